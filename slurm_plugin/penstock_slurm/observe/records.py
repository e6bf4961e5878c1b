"""What Slurm answers in one observation, before anything is made of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from penstock_scheduler.model import JobId, UnknownValue
from penstock_scheduler.people.errors import ClusterAway, RoundFailed
from penstock_slurm.gateway import (
    ControllerAway,
    SlurmError,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    SlurmReader,
    SlurmReservation,
    Unknown,
    Unread,
)
from penstock_slurm.gateway.base import ENDED, WAITING
from penstock_slurm.gateway.node_states import UNLISTED
from penstock_slurm.jobs.states import LEAVING

log = logging.getLogger(__name__)

CHECKS = 50
"""Most jobs, in one observation, that are asked for by their id: about 5 ms each."""

DOUBT_S = 60.0
"""After this time a job that no answer has is gone, whatever Slurm says when it is asked for the job."""


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
    unread: tuple[Unread, ...] = ()
    """What of the answers could not be attributed to a record."""


class Absences:
    """Jobs that no answer has, until they are gone."""

    def __init__(self) -> None:
        self._seen: dict[JobId, tuple[float, int]] = {}
        """Job -> when an answer first lacked it, s since 1970, and how many complete looks have lacked it since."""

    def look(
        self, reader: SlurmReader, jobs: Mapping[JobId, SlurmJob], now_s: float, *, complete: bool
    ) -> tuple[SlurmJob, ...]:
        """Those of the jobs that may still be there.

        A job is gone when two complete looks in a row lack it. If it was last seen with GPUs, Slurm is also asked for it by its
        id: while Slurm has it, it stays. Doubt ends after DOUBT_S. Meanwhile no round plans for a job that waits.

        Args:
            reader: asks Slurm.
            jobs: the managed jobs that neither list of this observation has, as last seen.
            now_s: the time, s since 1970.
            complete: whether all records of the lists could be attributed to jobs.

        Raises:
            ControllerAway: Slurm does not answer.
        """
        left, stay = CHECKS, []
        seen: dict[JobId, tuple[float, int]] = {}
        for job_id, job in jobs.items():
            since_s, looks = self._seen.get(job_id, (now_s, 0))
            looks += complete
            waits, there = job.state in WAITING, None
            if not waits and left:
                there = _asks(reader, job_id)
                left = left - 1 if there is not None else 0  # Slurm hangs: each further question may take as long
            if there or (now_s - since_s < DOUBT_S and (looks < 2 or (there is None and not waits))):
                stay.append(dataclasses.replace(job, reason=UNLISTED) if waits else job)
                if not there:
                    seen[job_id] = since_s, looks
        self._seen = seen
        return tuple(stay)


def read(
    reader: SlurmReader,
    managed: Mapping[JobId, SlurmJob],
    known: Set[JobId],
    absences: Absences,
    now_s: float,
    *,
    look_back: bool,
) -> Records:
    """Ask Slurm: four calls, whatever the number of jobs, and a fifth if a known job is not listed any more.

    Args:
        reader: asks Slurm.
        managed: the managed jobs, as last seen.
        known: all jobs whose end matters.
        absences: remembers the managed jobs that neither list of jobs has.
        now_s: the time, s since 1970.
        look_back: whether to ask for ended jobs in any case.

    Raises:
        ClusterAway: Slurm does not answer.
    """
    try:
        partitions = {partition.name: partition for partition in reader.partitions()}
        nodes = reader.nodes()
        jobs = reader.jobs()
        reservations = reader.reservations()
        listed = {job.id for job in jobs}
        missing = (known - listed) | (known & {job.id for job in jobs if job.state in LEAVING})
        ended = reader.jobs(finished=True) if missing or look_back else ()
        unread = reader.unread()
        remembered = {job.id: job for job in ended}
        unlisted = managed.keys() - listed
        alive = [remembered[job_id] for job_id in unlisted & remembered.keys() if remembered[job_id].state not in ENDED]
        unseen = {job_id: managed[job_id] for job_id in sorted(unlisted - remembered.keys())}
        alive += absences.look(reader, unseen, now_s, complete=all(each.kind != "job" for each in unread))
    except SlurmError as error:
        raise ClusterAway(str(error)) from error
    if alive:
        names = ",".join(sorted(job.id for job in alive)[:8])
        text = "Slurm's list of jobs lacks them, but they may be there"
        log.warning("jobs not listed", extra={"jobs": names, "count": len(alive), "text": text})
    missing -= {job.id for job in alive if job.state not in LEAVING}
    gone = dict.fromkeys(missing) | {job_id: job for job_id, job in remembered.items() if job_id in missing}
    jobs = (*_as_last_seen(jobs, managed), *alive)
    return Records(partitions, _with_reservations(nodes, reservations), jobs, reservations, gone, ended, unread)


def _asks(reader: SlurmReader, job_id: JobId) -> bool | None:
    """Whether Slurm has the job; None: it does not say. Raises ControllerAway."""
    try:
        return reader.knows(job_id)
    except ControllerAway:
        raise
    except SlurmError as error:
        log.info("cannot ask for a job", extra={"job": job_id, "text": str(error)})
        return None


def _as_last_seen(jobs: Iterable[SlurmJob], managed: Mapping[JobId, SlurmJob]) -> Iterator[SlurmJob]:
    """The jobs. A managed job whose record cannot be read stays as it was last seen."""
    for job in jobs:
        unreadable = not job.state and job.id in managed
        yield dataclasses.replace(managed[job.id], unknown=job.unknown) if unreadable else job


def _with_reservations(nodes: tuple[SlurmNode, ...], reservations: Iterable[SlurmReservation]) -> tuple[SlurmNode, ...]:
    """The nodes, on which nothing may start if a reservation that cannot be read may be for them."""
    unknown: dict[str, Unknown] = {}
    for each in reservations:
        if each.unknown:
            unknown |= dict.fromkeys(
                each.nodes, Unknown("ReservationName", f"{each.name}, which has {each.unknown[0]}")
            )
    if not unknown:
        return nodes
    return tuple(
        dataclasses.replace(node, unknown=(*node.unknown, unknown[node.name])) if node.name in unknown else node
        for node in nodes
    )


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
    for reservation in records.reservations:
        take("reservation", reservation.name, reservation.unknown)
    for job in records.jobs:
        if job.unknown:
            take("job", job.id, job.unknown)
    for unread in records.unread:
        if unread.kind in ("message", "reader"):
            found[unread.kind, "text", unread.text] = [""] * unread.count
        else:
            take(unread.kind, "without a readable name", [Unknown("record", unread.text)])
    return tuple(UnknownValue(*key, tuple(names)) for key, names in found.items())


def expect_partitions(wanted: Collection[str], known: Collection[str]) -> None:
    """Raise RoundFailed if Slurm has not all of the managed partitions."""
    missing = [name for name in wanted if name not in known]
    if missing:
        raise RoundFailed(
            f"[slurm] partitions: Slurm has no partition {', '.join(missing)}; it has {', '.join(sorted(known))}"
        )
