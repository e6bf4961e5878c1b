"""What Slurm answers in one observation, before anything is made of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock_scheduler.errors import ClusterAway, RoundFailed
from penstock_scheduler.model import JobId
from penstock_scheduler.ports import Clock
from penstock_slurm.gateway import Gateway, SlurmError, SlurmJob, SlurmNode, SlurmPartition, SlurmReservation
from penstock_slurm.states import LEAVING


@dataclass(frozen=True, slots=True)
class Records:
    """Slurm's answers."""

    asked_s: float
    """When the list of jobs was requested."""
    partitions: Mapping[str, SlurmPartition]
    nodes: tuple[SlurmNode, ...]
    jobs: tuple[SlurmJob, ...]
    """Jobs that have not ended."""
    reservations: tuple[SlurmReservation, ...]
    gone: Mapping[JobId, SlurmJob | None]
    """Known jobs that Slurm lists as ending or ended, or (None) not at all."""
    ended: tuple[SlurmJob, ...] = ()
    """All jobs that Slurm remembers, also ended ones; empty if nothing depended on them."""


def read(gateway: Gateway, clock: Clock, known: Collection[JobId], *, look_back: bool) -> Records:
    """Ask Slurm: four calls, whatever the number of jobs, and a fifth if a known job is not listed any more.

    Args:
        gateway: the way to Slurm.
        clock: the daemon's.
        known: jobs of the last observation.
        look_back: whether to ask for ended jobs in any case.

    Raises:
        ClusterAway: Slurm does not answer.
    """
    try:
        partitions = {partition.name: partition for partition in gateway.partitions()}
        nodes = gateway.nodes()
        asked_s = clock.now_s()
        jobs = gateway.jobs()
        reservations = gateway.reservations()
        missing = {*known} - {job.id for job in jobs if job.state not in LEAVING}
        ended = gateway.jobs(finished=True) if missing or look_back else ()
    except SlurmError as error:
        raise ClusterAway(str(error)) from error
    gone = dict.fromkeys(missing) | {job.id: job for job in ended if job.id in missing}
    return Records(asked_s, partitions, nodes, jobs, reservations, gone, ended)


def expect_partitions(wanted: Collection[str], known: Collection[str]) -> None:
    """Raise RoundFailed if Slurm has not all of the managed partitions."""
    missing = [name for name in wanted if name not in known]
    if missing:
        raise RoundFailed(
            f"[slurm] partitions: Slurm has no partition {', '.join(missing)}; it has {', '.join(sorted(known))}"
        )
