"""What Slurm answers in one observation, before anything is made of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from penstock_scheduler.errors import ClusterAway, RoundFailed
from penstock_scheduler.model import JobId, UnknownValue
from penstock_slurm.gateway import (
    Gateway,
    SlurmError,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    Unknown,
)
from penstock_slurm.gateway.base import ENDED
from penstock_slurm.states import LEAVING

log = logging.getLogger(__name__)

CHECKS = 50
"""Most jobs, in one observation, that are asked for by their id: about 5 ms each."""


@dataclass(frozen=True, slots=True)
class Records:
    """Slurm's answers."""

    partitions: Mapping[str, SlurmPartition]
    nodes: tuple[SlurmNode, ...]
    jobs: tuple[SlurmJob, ...]
    """Jobs that have not ended."""
    reservations: tuple[SlurmReservation, ...]
    gone: Mapping[JobId, SlurmJob | None]
    """Known jobs that Slurm lists as ending or ended, or (None) not at all."""
    ended: tuple[SlurmJob, ...] = ()
    """All jobs that Slurm remembers, also ended ones; empty if nothing depended on them."""


def read(gateway: Gateway, managed: Mapping[JobId, SlurmJob], known: Set[JobId], *, look_back: bool) -> Records:
    """Ask Slurm: four calls, whatever the number of jobs, and a fifth if a known job is not listed any more.

    An answer may lack jobs. A managed job that is in neither list of jobs is asked for by its id, and stays as it was last seen
    until Slurm says that it has no such job.

    Args:
        gateway: the way to Slurm.
        managed: the managed jobs, as last seen.
        known: all jobs whose end matters.
        look_back: whether to ask for ended jobs in any case.

    Raises:
        ClusterAway: Slurm does not answer.
    """
    try:
        partitions = {partition.name: partition for partition in gateway.partitions()}
        nodes = gateway.nodes()
        jobs = gateway.jobs()
        reservations = gateway.reservations()
        listed = {job.id for job in jobs}
        missing = (known - listed) | (known & {job.id for job in jobs if job.state in LEAVING})
        ended = gateway.jobs(finished=True) if missing or look_back else ()
    except SlurmError as error:
        raise ClusterAway(str(error)) from error
    remembered = {job.id: job for job in ended}
    unlisted = managed.keys() - listed
    alive = [remembered[job_id] for job_id in unlisted & remembered.keys() if remembered[job_id].state not in ENDED]
    alive += [managed[job_id] for job_id in _not_gone(gateway, sorted(unlisted - remembered.keys()))]
    if alive:
        names = ",".join(sorted(job.id for job in alive)[:8])
        text = "Slurm's list of jobs lacked them, but Slurm has them"
        log.warning("jobs not listed", extra={"jobs": names, "count": len(alive), "text": text})
    missing -= {job.id for job in alive if job.state not in LEAVING}
    gone = dict.fromkeys(missing) | {job_id: job for job_id, job in remembered.items() if job_id in missing}
    return Records(partitions, nodes, (*jobs, *alive), reservations, gone, ended)


def _not_gone(gateway: Gateway, jobs: Sequence[JobId]) -> list[JobId]:
    """Those of these jobs that Slurm has, or may have. A few are asked for at a time; the others stay until it is their turn."""
    found = [*jobs[CHECKS:]]
    for job_id in jobs[:CHECKS]:
        try:
            known = gateway.knows(job_id)
        except SlurmError as error:
            known = True  # in doubt
            log.info("cannot ask for a job", extra={"job": job_id, "text": str(error)})
        found += [job_id] if known else []
    return found


def unknown_values(records: Records) -> tuple[UnknownValue, ...]:
    """What Slurm's answers say that cannot be read: each field and value with all records that have it."""
    found: dict[tuple[str, str, str], list[str]] = {}

    def take(kind: str, name: str, unknown: Iterable[Unknown]) -> None:
        for each in unknown:
            found.setdefault((kind, each.field, str(each)), []).append(name)

    for partition in records.partitions.values():
        take("partition", partition.name, partition.unknown)
    for node in records.nodes:
        take("node", node.name, node.unknown)
    for job in records.jobs:
        if job.unknown:
            take("job", job.id, job.unknown)
    return tuple(UnknownValue(*key, tuple(names)) for key, names in found.items())


def expect_partitions(wanted: Collection[str], known: Collection[str]) -> None:
    """Raise RoundFailed if Slurm has not all of the managed partitions."""
    missing = [name for name in wanted if name not in known]
    if missing:
        raise RoundFailed(
            f"[slurm] partitions: Slurm has no partition {', '.join(missing)}; it has {', '.join(sorted(known))}"
        )
