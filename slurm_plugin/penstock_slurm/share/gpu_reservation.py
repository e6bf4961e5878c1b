"""The GPU reservation: placeholder jobs that hold GPUs in Slurm for jobs that share them and hold none themselves.

Slurm keeps the GPUs of a suspended job and never allocates a GPU to two jobs. So a job that shares runs with its GRES
cleared, and another job holds its GPUs in Slurm: a co-located job that got them from Slurm, or a *placeholder job*. A
placeholder job belongs to the daemon's user, holds one GPU and sleeps. It costs one core, the least that Slurm allocates.

A job that holds shared GPUs in Slurm may end at any time, so *standbys* wait for its end: placeholder jobs with `afterany`
and the highest priority, which Slurm starts before other jobs (docs/developer/slurm-gateway.md). Slurm chooses the index of a
GPU, and a job cannot be bound again. While an index in use is not held, placeholder jobs take every GPU of the node that
comes free until one of them has that index.

`changes` decides for one node; `GpuReservations` observes and requests. Slurm's list of jobs is the record: a new daemon finds
its placeholder jobs there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock_slurm.gateway import CliGateway, ControllerAway, JobGone, SlurmError, SlurmJob, TimedOut, UnreadableAnswer
from penstock_slurm.gateway.base import WAITING
from penstock_slurm.jobs.states import HOLDING, LEAVING

log = logging.getLogger(__name__)

NAME = "penstock-placeholder"
"""Name of all placeholder jobs. They also belong to the daemon's user."""

CHECKS = 20
"""In one observation: most jobs, on nodes without placeholder jobs, whose GPUs are requested from Slurm."""

AGAIN_S = 60.0
"""How long a job is not asked about again whose GPUs could not be read: its user may have chosen its name for that."""

NOTE = "penstock_placeholder"
"""Key in a placeholder job's comment: the jobs that it holds a GPU for."""

AFTER = re.compile(r"afterany:(\d+)")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder job."""

    id: str
    node: str
    index: int | None = None
    """Index of its GPU; None: it does not run yet, or the index is not known."""
    running: bool = False
    after: int | None = None
    """The job whose end it waits for; None: it takes the next free GPU."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A managed job that runs on a node, as the GPU reservation sees it."""

    number: int
    """SLURM_JOB_ID."""
    gpus: int
    own: bool
    """Whether it holds its GPUs in Slurm itself."""
    devices: frozenset[int] | None
    """Indexes of its GPUs; None: not known. Empty: it waits for its first time slice."""
    stays: bool = True
    """False for a departing job."""
    shares: bool = False
    """Whether other jobs are in its group."""


@dataclass(frozen=True, slots=True)
class Ground:
    """The state of one node, for `changes`."""

    gpus: int
    free: int
    """GPUs that no job holds in Slurm."""
    wanted: int
    """GPUs to reserve, including those that co-located jobs hold in Slurm themselves."""
    placeholders: tuple[Placeholder, ...] = ()
    sharers: tuple[Sharer, ...] = ()
    promised: frozenset[int] = frozenset()
    """Indexes in orders that the node's agent may still carry out."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What to change in the GPU reservation of a node."""

    submit: int = 0
    """Placeholder jobs that take a GPU as soon as one is free."""
    standbys: dict[int, int] = field(default_factory=dict)
    """Job's number -> placeholder jobs that take over when it ends."""
    released: tuple[Placeholder, ...] = ()
    """Standbys that need not wait any longer."""
    cancel: tuple[Placeholder, ...] = ()


def used(ground: Ground, *, staying: bool = False) -> frozenset[int]:
    """Indexes that cleared jobs use."""
    jobs = (each for each in ground.sharers if not each.own and (each.stays or not staying))
    return frozenset[int]().union(*(each.devices or () for each in jobs))


def held(ground: Ground) -> frozenset[int]:
    """Indexes that no other job can get: those of placeholder jobs, and of managed jobs that stay."""
    own = (each.devices or () for each in ground.sharers if each.own and each.stays)
    return frozenset(each.index for each in ground.placeholders if each.index is not None).union(*own)


def lacking(ground: Ground) -> int:
    """Number of placeholder jobs that are needed: GPUs to reserve that co-located jobs do not hold themselves."""
    own = sum(each.gpus for each in ground.sharers if each.own and each.stays and each.shares)
    return max(ground.wanted - own, 0)


def stands(ground: Ground) -> bool:
    """Whether the GPU reservation is complete."""
    running = sum(each.running for each in ground.placeholders)
    return running >= lacking(ground) and used(ground, staying=True) <= held(ground)


def changes(ground: Ground) -> Changes:
    """What to submit and to cancel on one node.

    - As many placeholder jobs as are `lacking`. While an index in use is not held, enough to take all free GPUs as well.
    - A placeholder job whose index is in use or promised is never cancelled. While the indexes in use are not all known, no
      running placeholder job is cancelled.
    - For each job that holds shared GPUs in Slurm, standbys: as many as its GPUs, and one for each free GPU, because Slurm
      allocates the lowest index first.
    """
    missing = used(ground, staying=True) - held(ground)
    ordinary = [each for each in ground.placeholders if each.after is None]
    running = [each for each in ordinary if each.running]
    pending = [each for each in ordinary if not each.running]
    count, free = lacking(ground), max(ground.free, 0)
    if missing:
        count = max(count, min(len(running) + free + len(missing), ground.gpus))
    heirs = {each.number: each.gpus + free for each in ground.sharers if each.own and each.stays and each.shares}
    waiting = _standbys(ground)
    idle = [each for number in sorted(waiting.keys() - heirs.keys()) for each in waiting[number]]
    more = max(count - len(ordinary), 0)
    released, cancel = idle[:more], idle[more:]
    surplus = [*pending, *([] if missing else _spare(ground, running))]
    cancel += surplus[: max(len(ordinary) - count, 0)]
    standbys = {number: wanted - len(waiting.get(number, ())) for number, wanted in heirs.items()}
    lack = {number: most for number, most in standbys.items() if most > 0}
    return Changes(more - len(released), lack, tuple(released), tuple(cancel))


def _standbys(ground: Ground) -> dict[int, list[Placeholder]]:
    """Job's number -> the placeholder jobs that wait for its end."""
    waiting: dict[int, list[Placeholder]] = {}
    for each in ground.placeholders:
        if each.after is not None:
            waiting.setdefault(each.after, []).append(each)
    return waiting


def _spare(ground: Ground, running: Sequence[Placeholder]) -> list[Placeholder]:
    """The running placeholder jobs whose GPUs no job needs, the highest index first."""
    if any(each.devices is None for each in ground.sharers if not each.own):
        return []
    kept = used(ground) | ground.promised
    spare = (each for each in running if each.index not in kept)
    return sorted(spare, key=lambda each: -(each.index or 0))


class GpuReservations:
    """The placeholder jobs of all nodes."""

    def __init__(self, commands: CliGateway) -> None:
        self._commands = commands
        self._uid = os.geteuid()
        self._placeholders: dict[str, Placeholder] = {}
        self._comments: dict[str, str] = {}
        self.leaving: tuple[SlurmJob, ...] = ()
        """Jobs whose run has ended and whose processes may still live."""
        self.away: SlurmError | None = None
        """The error after which Slurm was not asked again in this observation; None: it answers."""
        self._asked = 0
        """Jobs that Slurm was asked about in this observation."""
        self._limited: set[str] = set()
        """Running placeholder jobs that the time limit of a partition would end."""
        self._indexes: dict[tuple[str, int], frozenset[int]] = {}
        """(job, restarts) -> indexes of the GPUs that Slurm has allocated to it."""
        self._again_s: dict[tuple[str, int], float] = {}
        """(job, restarts) -> when it may be asked about again, by the clock `time.monotonic`."""

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """All placeholder jobs, as of the last observation."""
        return tuple(self._placeholders.values())

    def saw(self, jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
        """Observe Slurm's jobs. Returns those that are not placeholder jobs."""
        others, found, comments = [], {}, {}
        self._limited, self._asked, self.away = set(), 0, None
        for job in jobs:
            if job.name != NAME or job.uid != self._uid:
                others.append(job)
            elif job.state in WAITING | HOLDING:
                found[job.id], comments[job.id] = self._placeholder(job), job.comment
                if job.state in HOLDING and job.time_limit_s is not None:
                    self._limited.add(job.id)
        self._placeholders, self._comments = found, comments
        self.leaving = tuple(job for job in others if job.state in LEAVING)
        return tuple(others)

    def _placeholder(self, job: SlurmJob) -> Placeholder:
        if job.state in WAITING:
            after = AFTER.search(job.dependency)
            return Placeholder(job.id, next(iter(job.required_nodes), ""), after=int(after[1]) if after else None)
        devices = self.devices(job)
        return Placeholder(job.id, job.nodes[0], next(iter(devices or ()), None), running=True)

    def devices(self, job: SlurmJob) -> frozenset[int] | None:
        """Indexes of the GPUs that Slurm has allocated to a running job on one node; None: not known now.

        After a command that timed out, Slurm is not asked again before the next observation.
        """
        key = job.id, job.restarts
        if self._again_s.get(key, 0.0) > time.monotonic():
            return None
        ours = job.name == NAME or any(placeholder.node in job.nodes for placeholder in self._placeholders.values())
        if key not in self._indexes and self.away is None and (ours or self._asked < CHECKS):
            self._asked += not ours
            try:
                self._indexes[key] = frozenset(self._commands.gpu_indexes(job.id, next(iter(job.nodes), "")))
            except (ControllerAway, TimedOut) as error:
                self.away = error
            except SlurmError as error:
                log.info("cannot read a job's GPUs", extra={"job": job.id, "text": str(error)})
                if isinstance(error, UnreadableAnswer):
                    self._again_s[key] = time.monotonic() + AGAIN_S
        return self._indexes.get(key)

    def forget(self, keep: Collection[str]) -> None:
        """Forget all jobs but these and the placeholder jobs."""
        kept = self._placeholders.keys() | set(keep)
        self._indexes = {key: found for key, found in self._indexes.items() if key[0] in kept}
        self._again_s = {key: at_s for key, at_s in self._again_s.items() if key[0] in kept}

    def gpus(self, node: str) -> int:
        """GPUs of a node that placeholder jobs hold."""
        return sum(each.running for each in self._placeholders.values() if each.node == node)

    def on(self, node: str) -> tuple[Placeholder, ...]:
        """Placeholder jobs that run on a node or are about to."""
        return tuple(each for each in self._placeholders.values() if each.node == node)

    def carry_out(self, node: str, partition: str, ground: Ground, jobs: Sequence[str]) -> None:
        """Take the changes to one node's GPU reservation one step further. A change that Slurm refuses is tried again next
        time.

        Args:
            node: the node.
            partition: a partition of the node that is up.
            ground: the state of the node.
            jobs: the jobs that share there, for the comment.

        Raises:
            ControllerAway, TimedOut: Slurm does not answer.
        """
        todo = changes(ground)
        note = json.dumps({NOTE: sorted(jobs)})
        try:
            for placeholder in todo.cancel:
                self._drop(placeholder)
            for placeholder in todo.released:
                self._commands.wait_no_longer(placeholder.id)
                self._keep(dataclasses.replace(placeholder, after=None), note)
            for after in (*[None] * todo.submit, *(job for job, most in todo.standbys.items() for _ in range(most))):
                job_id = self._commands.submit_placeholder(NAME, node, partition, note, after)
                self._keep(Placeholder(job_id, node, after=after), note)
            for placeholder in self.on(node):
                if jobs and self._comments.get(placeholder.id) != note:
                    self._commands.set_comment(placeholder.id, note)
                    self._comments[placeholder.id] = note
                if placeholder.id in self._limited:
                    self._commands.no_time_limit(placeholder.id)
        except (ControllerAway, TimedOut):
            raise
        except SlurmError as error:
            log.warning("GPU reservation", extra={"node": node, "text": str(error)})
        if todo != Changes():
            facts = {"node": node, "wanted": ground.wanted, "submitted": todo.submit, "cancelled": len(todo.cancel)}
            log.info(
                "GPU reservation",
                extra=facts | {"standbys": sum(todo.standbys.values()), "released": len(todo.released)},
            )

    def exchange(self, node: str, partition: str, spared: Collection[int], jobs: Sequence[str]) -> None:
        """Submit a new placeholder job and end a running one, if possible one whose GPU is not among `spared`.

        Raises:
            ControllerAway, TimedOut: Slurm does not answer.
        """
        running = [each for each in self.on(node) if each.running]
        if not running:
            return
        old = min(running, key=lambda each: (each.index in spared, -(each.index or 0)))
        note = json.dumps({NOTE: sorted(jobs)})
        try:
            self._keep(Placeholder(self._commands.submit_placeholder(NAME, node, partition, note, None), node), note)
            self._drop(old)
        except (ControllerAway, TimedOut):
            raise
        except SlurmError as error:
            log.warning("GPU reservation", extra={"node": node, "text": str(error)})
        log.info("placeholder job exchanged", extra={"node": node, "placeholder": old.id, "index": old.index})

    def _keep(self, placeholder: Placeholder, note: str) -> None:
        self._placeholders[placeholder.id], self._comments[placeholder.id] = placeholder, note

    def _drop(self, placeholder: Placeholder) -> None:
        with contextlib.suppress(JobGone):
            self._commands.cancel(placeholder.id)
        self._placeholders.pop(placeholder.id, None)
