"""Departing jobs: how they go on until they have left GPUs on which other jobs stay.

A departing job that runs stays in its pack as it was. No job is suspended for it, and a guaranteed job of that pack keeps its
guarantee. A job that comes in its place waits. A departing job that is suspended gets the next time slice so that it can save.
For that, no pack is suspended that has a guaranteed job, that may not be stopped, or that has a higher priority.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import reduce

from penstock_scheduler.model import JobId, Pack, SharedGpus
from penstock_scheduler.rounds.sharing.node import without


def only(group: SharedGpus, jobs: Collection[JobId]) -> SharedGpus:
    """The group with these jobs only."""
    return reduce(without, [job for job in group.jobs if job not in jobs], group)


def among_its_own(group: SharedGpus, job: JobId, runs: SharedGpus, bound: Collection[JobId]) -> SharedGpus | None:
    """The group with a departing job in the pack in which it runs; None: no other job of that pack is in the group.

    Args:
        group: the group as planned after the job has left.
        job: the departing job, which is not in the group.
        runs: the group in which the job runs, with its pack only.
        bound: jobs that are bound to GPUs. Those that are to join the pack get a pack of their own; others wait.
    """
    mates = next((pack for pack in group.packs if not {*pack.jobs}.isdisjoint(runs.jobs)), None)
    if mates is None:
        return None
    stays = dataclasses.replace(only(runs, {*mates.jobs, job}).packs[0], priority=mates.priority)
    come = only(dataclasses.replace(group, packs=(mates,)), {*bound} - {*runs.jobs}).packs
    packs = [each for pack in group.packs for each in ((stays, *come) if pack is mates else (pack,))]
    return dataclasses.replace(group, gpus=max(group.gpus, stays.gpus), packs=tuple(packs), slice_s=runs.slice_s)


def next_in_line(group: SharedGpus, job: JobId, gpus: int, before: Collection[Pack]) -> SharedGpus:
    """The group with a departing job in a pack of its own, which comes before all packs but these."""
    top = max((pack.priority for pack in group.packs), default=0)
    packs = [
        dataclasses.replace(each, priority=each.priority + top + 2) if each in before else each for each in group.packs
    ]
    return dataclasses.replace(group, packs=(*packs, Pack((job,), gpus, top + 1)))


def with_guarantees(group: SharedGpus, guaranteed: Collection[JobId]) -> SharedGpus:
    """The group with these jobs guaranteed in packs without a guaranteed job: a departing job must not end a guarantee."""
    packs = (
        dataclasses.replace(
            pack, guaranteed=pack.guaranteed or next((job for job in pack.jobs if job in guaranteed), None)
        )
        for pack in group.packs
    )
    return dataclasses.replace(group, packs=tuple(packs))
