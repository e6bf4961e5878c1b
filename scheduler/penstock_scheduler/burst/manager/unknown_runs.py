"""Runs that the store does not know, because it was restored from a backup that is older than they are.

Their instances have tags that say all that matters, and their jobs may run on them. So their records are made again from the
tags, before the burst manager does anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from penstock_scheduler.api.ports import CloudNode
from penstock_scheduler.burst.manager.book import Book, Unreadable
from penstock_scheduler.burst.manager.provider import DescribedInstance
from penstock_scheduler.burst.manager.runs import BurstRun, Slot
from penstock_scheduler.model import JobId, Offer

log = logging.getLogger(__name__)


def of_unknown_runs(
    found: Collection[DescribedInstance], book: Book, jobs: Collection[JobId]
) -> dict[str, list[DescribedInstance]]:
    """Run -> its instances, of runs that the store does not know and whose job is in the cluster."""
    unknown: dict[str, list[DescribedInstance]] = {}
    for seen in found:
        run, job = seen.tags.get("run", ""), seen.tags.get("job", "")
        if seen.gone or not run or job not in jobs or run in book.runs or run in book.unreadable:
            continue
        of_job = book.of_job(job)
        if run not in of_job.paid and all(run != each.id for each in of_job.runs):
            unknown.setdefault(run, []).append(seen)
    return unknown


def record_of(
    run: str, instances: Sequence[DescribedInstance], nodes: Mapping[str, CloudNode], partition: str
) -> BurstRun | Unreadable:
    """The record of a run, from its instances."""
    first = instances[0]
    tags = first.tags
    launched_s = min(each.launched_s for each in instances)
    try:
        usd_per_h, lifetime_s = float(tags["usd_per_h"]), float(tags["lifetime_s"])
        mine = {each.tags["node"]: each for each in instances}
        gpus, gpu_type = sum(nodes[name].gpus for name in mine), nodes[next(iter(mine))].gpu_type
        count = len(mine)
        return BurstRun(
            id=run,
            job=tags["job"],
            region=first.region,
            user=tags["user"],
            account=tags["account"],
            offer=Offer(first.instance_type, gpu_type, count, gpus, count * usd_per_h),
            instance_type=first.instance_type,
            market="spot" if first.spot else "on-demand",
            usd_per_h=usd_per_h,
            extras_usd_per_h=float(tags.get("extras_usd_per_h", "0")),
            usd=count * usd_per_h * lifetime_s / 3600,
            round=0,
            ordered_s=launched_s,
            partition=partition,
            state="booting",
            slots=tuple(
                Slot(node=name, instance=mine[name].id, launched_s=mine[name].launched_s) for name in sorted(mine)
            ),
            asked=True,
        )
    except (KeyError, ValueError) as error:
        why = f"the store is older than the run, and the tags of its instances do not make a record ({error!r})"
        return Unreadable(run, tags["job"], launched_s, why)


def ended_by(run: BurstRun, since: BurstRun, found: Mapping[str, DescribedInstance]) -> BurstRun:
    """A run that is over, as a later one has its nodes: its instances ended before the later one was ordered."""

    def ended(slot: Slot) -> Slot:
        if slot.instance is None or slot.ended_s is not None:
            return slot
        seen = found.get(slot.instance)
        return slot.model_copy(
            update={"ended_s": since.ordered_s if seen is None or seen.ended_s is None else seen.ended_s}
        )

    why = "it had ended when the store was restored, as another run has its nodes"
    return run.model_copy(update={"slots": tuple(map(ended, run.slots)), "why": why})
