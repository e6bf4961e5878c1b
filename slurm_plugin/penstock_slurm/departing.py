"""Jobs that leave GPUs on which others stay: how they go on until they have left.

One that runs stays with those whom it runs with, as it was, so nobody is suspended for it and a promise to one of them is kept.
Who comes in its place waits. One that is suspended is next in line, so that it can save; but a pack with a promise, or of jobs
that may not be stopped or are of a higher priority, is not suspended for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import reduce

from penstock_scheduler.model import JobId, Pack, SharedGpus
from penstock_scheduler.sharing.node import without


def only(group: SharedGpus, jobs: Collection[JobId]) -> SharedGpus:
    """What is left of a group when all others have left it."""
    return reduce(without, [job for job in group.jobs if job not in jobs], group)


def among_its_own(group: SharedGpus, job: JobId, runs: SharedGpus, bound: Collection[JobId]) -> SharedGpus | None:
    """The group with a job that leaves, in the pack in which it runs; None: of that pack nobody else is in the group.

    Args:
        group: as it is to be when the job has left.
        job: not in the group.
        runs: the group in which it runs, with its pack alone.
        bound: jobs that have GPUs. Of those who are to come to that pack these are a pack of their own, and others wait.
    """
    mates = next((pack for pack in group.packs if not {*pack.jobs}.isdisjoint(runs.jobs)), None)
    if mates is None:
        return None
    stays = dataclasses.replace(only(runs, {*mates.jobs, job}).packs[0], priority=mates.priority)
    come = only(dataclasses.replace(group, packs=(mates,)), {*bound} - {*runs.jobs}).packs
    packs = [each for pack in group.packs for each in ((stays, *come) if pack is mates else (pack,))]
    return dataclasses.replace(group, gpus=max(group.gpus, stays.gpus), packs=tuple(packs), slice_s=runs.slice_s)


def next_in_line(group: SharedGpus, job: JobId, gpus: int, before: Collection[Pack]) -> SharedGpus:
    """The group with a job that leaves, in a pack of its own that goes before all but these."""
    top = max((pack.priority for pack in group.packs), default=0)
    packs = [
        dataclasses.replace(each, priority=each.priority + top + 2) if each in before else each for each in group.packs
    ]
    return dataclasses.replace(group, packs=(*packs, Pack((job,), gpus, top + 1)))


def promising(group: SharedGpus, promised: Collection[JobId]) -> SharedGpus:
    """The group with the promises that these jobs had, where its packs make none: who leaves is not to break them."""
    packs = (
        dataclasses.replace(
            pack, guaranteed=pack.guaranteed or next((job for job in pack.jobs if job in promised), None)
        )
        for pack in group.packs
    )
    return dataclasses.replace(group, packs=tuple(packs))
