"""Room for plain jobs, which Penstock does not manage.

Slurm starts plain jobs by itself wherever GPUs are free, but adaptive jobs grow until none are. A plain job that needs several
GPUs would wait forever. Therefore GPUs are set aside for the plain job that has waited longest, if it has waited longer than
every queued adaptive job: the next round allocates these GPUs to no job, the jobs on them leave, and Slurm finds them free.
This happens for one plain job at a time, so plain jobs cannot push out all adaptive jobs.

A job may wait for more than GPUs, such as CPUs or a whole node, and Slurm gives the same reason. So GPUs are set aside for the
jobs of one user for a bounded time. If Slurm starts none of them, others have the GPUs for a time that doubles at each attempt.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from penstock_scheduler.model import Adaptivity, Job, JobId, Node, NodeChoice, Phase, PlainJob
from penstock_scheduler.people.units import clock
from penstock_scheduler.safety.back_off import back_off_s
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.jobs.states import HOLDING, LEAVING

log = logging.getLogger(__name__)

WAITS = frozenset({"Resources", "Priority", "None", ""})
"""Reasons of pending jobs that more free GPUs would start."""

KEPT_FROM = (
    "ReqNodeNotAvail, May be reserved",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority",
)
"""Beginnings of the reasons of a job whose nodes Slurm keeps for others: in reservations, such as that for moves
(`base.MOVES`), or for a job of a higher priority, such as a placeholder job that is about to start."""

ROUNDS_S = 300.0
"""What an attempt may last beside saving and starting, s: for rounds to take the GPUs away."""

MOST_SHOWN = 1000
"""Plain jobs that the queue shows. A site may have more, and each tick looks at all of them."""

MOST_PAUSE_S = 6 * 3600.0
"""Longest pause between two attempts, s. A user is forgotten after as long a time without an attempt."""


@dataclasses.dataclass(slots=True)
class _User:
    """What was done for a user's plain jobs."""

    spent_s: dict[JobId, float] = dataclasses.field(default_factory=dict)
    """For how long GPUs have been set aside in this attempt, for each job that has not started since, s."""
    in_vain: int = 0
    """Attempts in vain."""
    until_s: float = 0.0
    """When the next attempt may begin, or the present one was last seen."""


class Attempts:
    """What the daemon remembers of the GPUs that it set aside. After a restart it tries again, on the same nodes.

    It counts by user: a job that is cancelled and submitted again, or held and released, is no new attempt.

    Args:
        most_s: how long GPUs are set aside for the jobs of one user of which Slurm starts none, s.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._users: dict[int, _User] = {}
        self._now: tuple[SlurmJob, float] | None = None
        """The job for which GPUs are set aside, and when that was last seen."""
        self._where: tuple[JobId, Collection[str]] = "", ()
        """The job for which GPUs were set aside last, and on which nodes."""

    def saw(self, jobs: Iterable[SlurmJob], now_s: float) -> None:
        """Count the time since the last observation. `jobs`: all plain jobs."""
        self._users = {
            uid: user for uid, user in self._users.items() if now_s - user.until_s <= max(MOST_PAUSE_S, self._most_s)
        }
        started = {each.id for each in jobs if each.state in HOLDING | LEAVING}
        for user in self._users.values():
            for job_id in user.spent_s.keys() & started:
                del user.spent_s[job_id]
        if self._now is None:
            return
        (job, since_s), self._now = self._now, None
        if job.id in started:
            return
        user = self._users.setdefault(job.uid, _User())
        user.spent_s[job.id] = user.spent_s.get(job.id, 0.0) + max(now_s - since_s, 0.0)
        user.until_s = now_s
        if sum(user.spent_s.values()) >= self._most_s:
            pause_s = back_off_s(self._most_s, user.in_vain + 1, MOST_PAUSE_S)
            user.in_vain, user.until_s, user.spent_s = user.in_vain + 1, now_s + pause_s, {}
            log.info(
                "Slurm did not start a plain job on the GPUs set aside for it",
                extra={"job": job.id, "attempt": user.in_vain, "pause_s": pause_s},
            )

    def may(self, uid: int, now_s: float) -> bool:
        """Whether GPUs may be set aside for this user's jobs."""
        user = self._users.get(uid)
        return user is None or user.until_s <= now_s

    def next_s(self, uid: int) -> float:
        """When GPUs may be set aside for this user's jobs again; a time that has passed: now."""
        user = self._users.get(uid)
        return 0.0 if user is None else user.until_s

    def made(self, job: SlurmJob, nodes: Collection[str], now_s: float) -> None:
        """GPUs of these nodes are set aside for this job from now on until the next observation."""
        self._now, self._where = (job, now_s), (job.id, nodes)

    def resume(self, nodes: Iterable[Node]) -> None:
        """GPUs were set aside on these nodes before a restart."""
        for job_id, names in room(nodes).items():
            self._where = job_id, names

    def nodes(self, job: SlurmJob) -> Collection[str]:
        """The nodes on which GPUs were set aside last, if it was for this job."""
        return self._where[1] if self._where[0] == job.id else ()


def with_room(
    nodes: tuple[Node, ...],
    plain: Iterable[SlurmJob],
    managed: Collection[Job],
    partitions: Iterable[str],
    *,
    now_s: float,
    patience_s: float,
    attempts: Attempts,
    moves: Callable[[Job], bool],
    on_way: Mapping[str, int] = MappingProxyType({}),
    rank: Callable[[SlurmJob], str] = lambda _: "",
) -> tuple[Node, ...]:
    """The nodes without the GPUs that are set aside for a plain job.

    It is the one that has waited longest, if that is longer than `patience_s` and than every queued managed job. Jobs of users
    for whom `attempts` has a pause do not count. A job that `moves` is no queued one: it may have made room for the plain job.
    No job makes room for one that it outranks, by the plain job's `rank`: Slurm would stop that one again.

    Room stays on its nodes. The jobs that leave them may go to GPUs that others leave for them, and these are no room: they
    are among the GPUs of each node that jobs are `on_way` to.
    """
    plain = list(plain)
    attempts.saw(plain, now_s)
    job = longest_waiting((each for each in plain if attempts.may(each.uid, now_s)), partitions, now_s, patience_s)
    if job is None:
        return nodes
    if (job.eligible_s or now_s) > min(_first_s(managed, moves), now_s):
        return nodes
    held = _held(managed) + Counter(on_way)
    pinned = _held(each for each in managed if _outranks(each, rank(job)) or not _gives_way(each))
    aside = set_aside(job, nodes, pinned, held, attempts.nodes(job))
    if aside:
        attempts.made(job, aside.keys(), now_s)
    return tuple(
        dataclasses.replace(node, gpus_others=node.gpus_others + aside[node.name], set_aside_for=job.id)
        if node.name in aside
        else node
        for node in nodes
    )


def room(nodes: Iterable[Node]) -> dict[JobId, list[str]]:
    """Plain job -> the nodes on which GPUs are set aside for it. That is one job, or none."""
    aside: dict[JobId, list[str]] = {}
    for node in nodes:
        if node.set_aside_for:
            aside.setdefault(node.set_aside_for, []).append(node.name)
    return aside


def _queued(job: Job, moves: Callable[[Job], bool]) -> bool:
    """Whether a managed job waits for GPUs, and is not on its way to some."""
    return job.phase is Phase.QUEUED and not (job.restarts and moves(job))


def _first_s(managed: Iterable[Job], moves: Callable[[Job], bool]) -> float:
    """When the queued managed job came that has waited longest; infinite: there is none."""
    return min((each.submit_s for each in managed if _queued(each, moves)), default=math.inf)


def behind(
    jobs: Collection[Job],
    shared: Collection[Node],
    plain: Iterable[SlurmJob],
    partitions: Iterable[str],
    *,
    now_s: float,
    attempts: Attempts,
    moves: Callable[[Job], bool],
    rank: Callable[[SlurmJob], str] = lambda _: "",
) -> dict[JobId, Job]:
    """The queued managed jobs that have to let plain jobs go first on nodes of shared GPUs, with node choices without these.

    Elsewhere, Slurm gives a plain job the GPUs that come free. Shared GPUs never come free for it as long as new jobs join
    the running ones: placeholder jobs hold them. So no job joins there that came after a plain job which waits for GPUs of
    the node and could get them.

    Args:
        jobs: the managed jobs.
        shared: nodes on which jobs share GPUs.
        plain: all plain jobs.
        partitions: the managed partitions.
        now_s: the time.
        attempts: jobs of users that have a pause keep no others back.
        moves: whether a job has left other GPUs for those that it goes to.
        rank: see `with_room`.
    """
    ours = set(partitions)
    waiting = (job for job in plain if shared and _waits_for_gpus(job, ours) and attempts.may(job.uid, now_s))
    first = _first(sorted(waiting, key=_order), shared, jobs)
    found = {}
    for each in jobs if first else ():
        if not _queued(each, moves):
            continue
        kept = [
            name
            for name, job in first.items()
            if (job.eligible_s or now_s) < each.submit_s and not _outranks(each, rank(job))
        ]
        if kept:
            choice = dataclasses.replace(each.nodes or NodeChoice(), kept=frozenset(kept))
            found[each.id] = dataclasses.replace(each, nodes=choice)
    return found


def _first(waiting: Sequence[SlurmJob], nodes: Iterable[Node], managed: Iterable[Job]) -> dict[str, SlurmJob]:
    """Node -> the first of these plain jobs that could start there if managed jobs made room."""
    if not waiting:
        return {}
    first, pinned = {}, _held(each for each in managed if not _gives_way(each))
    for node in nodes:
        if (job := next((job for job in waiting if _could_start(job, node, pinned)), None)) is not None:
            first[node.name] = job
    return first


def _held(jobs: Iterable[Job]) -> Counter[str]:
    """Node -> GPUs that these jobs hold."""
    held: Counter[str] = Counter()
    for job in jobs:
        for share in job.allocation.shares if job.allocation is not None else ():
            held[share.node] += share.gpus
    return held


def _gives_way(job: Job) -> bool:
    """Whether a managed job may be moved to make room for a plain one."""
    return job.spec.preemptible and job.spec.adaptivity is not Adaptivity.FIXED


def _outranks(job: Job, rank: str) -> bool:
    return job.outranks is not None and rank in job.outranks.ranks


def longest_waiting(
    jobs: Iterable[SlurmJob], partitions: Iterable[str], now_s: float, patience_s: float
) -> SlurmJob | None:
    """The plain job to make room for; None: none has waited for `patience_s`."""
    ours = set(partitions)
    waiting = [job for job in jobs if _waits_for_gpus(job, ours) and now_s - (job.eligible_s or 0.0) >= patience_s]
    return min(waiting, key=_order) if waiting else None


def waiting_jobs(
    plain: Iterable[SlurmJob],
    nodes: Iterable[Node],
    managed: Iterable[Job],
    partitions: Iterable[str],
    *,
    now_s: float,
    patience_s: float,
    attempts: Attempts,
    moves: Callable[[Job], bool],
) -> tuple[PlainJob, ...]:
    """The plain jobs that wait for GPUs, longest first and at most `MOST_SHOWN`, and when room is made for each.

    Args:
        plain: all plain jobs.
        nodes: the managed nodes, with the GPUs that are set aside.
        managed: the managed jobs.
        partitions: the managed partitions.
        now_s: the time.
        patience_s: for how long a plain job waits before room is made for it.
        attempts: the pauses of users.
        moves: see `with_room`.
    """
    ours = set(partitions)
    waiting = sorted((job for job in plain if _waits_for_gpus(job, ours)), key=_order)[:MOST_SHOWN]
    if not waiting:
        return ()
    aside = room(nodes)
    first_s = _first_s(managed, moves)

    def when(job: SlurmJob) -> tuple[float | None, str]:
        """When room is made for the job, if that is known, and a sentence."""
        eligible_s = job.eligible_s or now_s
        due_s, next_s = eligible_s + patience_s, attempts.next_s(job.uid)
        if job.id in aside:
            return now_s, f"Penstock keeps GPUs of {', '.join(aside[job.id])} free for it; jobs there save and leave"
        if next_s > now_s:
            tried = "Slurm did not start a job of this user on GPUs that were kept free"
            return next_s, f"{tried}; Penstock tries again from {clock(next_s)} on"
        if due_s > now_s:
            return due_s, f"Penstock makes room for it from {clock(due_s)} on, if Slurm has not started it by then"
        if eligible_s > first_s:
            return None, "Penstock makes room for it when no adaptive job has waited longer"
        if aside:
            return None, f"Penstock makes room for job {next(iter(aside))} first"
        return None, "Slurm starts it when GPUs are free; Penstock cannot make room for it by moving jobs"

    return tuple(_shown(job, *when(job)) for job in waiting)


def _shown(job: SlurmJob, room_s: float | None, text: str) -> PlainJob:
    gpus = (job.gpus_per_node or 0) * max(job.node_count, 1)
    needs = f"{gpus} GPU{'s' if gpus > 1 else ''}" + (f" of type {job.gpu_type}" if job.gpu_type else "")
    return PlainJob(job.id, job.name, job.user, job.account, job.partition, job.submit_s, needs, text, room_s)


def _waits_for_gpus(job: SlurmJob, ours: Set[str]) -> bool:
    """Whether more free GPUs in these partitions would start a plain job."""
    return bool(job.gpus_per_node and not job.reservation and _waits(job, ours) and job.eligible_s is not None)


def _order(job: SlurmJob) -> tuple[float, int]:
    return job.eligible_s or 0.0, job.number


def due_s(jobs: Iterable[SlurmJob], partitions: Iterable[str]) -> float:
    """Since when the plain job waits that has waited longest; infinite: none waits. Any of them may be waiting for GPUs."""
    ours = set(partitions)
    return min((job.eligible_s for job in jobs if _waits(job, ours) and job.eligible_s is not None), default=math.inf)


def _waits(job: SlurmJob, ours: Set[str]) -> bool:
    """Whether Slurm would start a job in these partitions if there were room."""
    reason = job.reason in WAITS or job.reason.startswith(KEPT_FROM)
    return job.state == "PENDING" and not job.held and reason and not ours.isdisjoint(job.partition)


def set_aside(
    job: SlurmJob,
    nodes: Iterable[Node],
    pinned: Mapping[str, int],
    held: Mapping[str, int],
    first: Collection[str] = (),
) -> dict[str, int]:
    """Node -> GPUs to set aside so that `job` can start, on the nodes where managed jobs lose the fewest GPUs.

    Args:
        job: a pending job.
        nodes: the managed nodes.
        pinned: GPUs of each node that managed jobs hold and that cannot be freed.
        held: GPUs of each node that managed jobs hold, or are on their way to.
        first: nodes on which GPUs are set aside for the job already. They come first.

    Returns:
        Empty if the job cannot start that way.
    """
    gpus = job.gpus_per_node or 0
    fitting = [node for node in nodes if _could_start(job, node, pinned)]
    lost = {node.name: max(gpus - (node.gpus_for_us - held.get(node.name, 0)), 0) for node in fitting}
    fitting.sort(key=lambda node: (node.name not in first, lost[node.name], node.name))
    wanted = fitting[: max(job.node_count, 1)]
    return {node.name: gpus for node in wanted} if len(wanted) == max(job.node_count, 1) else {}


def _could_start(job: SlurmJob, node: Node, pinned: Mapping[str, int]) -> bool:
    """Whether a plain job could start on a node if managed jobs made room; `pinned` as in `set_aside`."""
    return (
        node.may_start
        and not node.reservation
        and not set(node.partitions).isdisjoint(job.partition)
        and job.gpu_type in (None, node.gpu_type)
        and (not job.required_nodes or node.name in job.required_nodes)
        and node.gpus_for_us - pinned.get(node.name, 0) >= (job.gpus_per_node or 0)
    )
