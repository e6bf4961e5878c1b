"""The GPU reservation: placeholder jobs that hold GPUs in Slurm for jobs that share them and hold none themselves.

Slurm keeps the GPUs of a suspended job, and gives none to two jobs. So a job that comes to share runs with its GRES cleared, and
its GPUs are held by somebody else: by a sharer that has them by Slurm itself, or by a *placeholder job*, a job of the
daemon's that holds one GPU and sleeps. What a placeholder job costs is one core, the least that Slurm gives out.

A sharer that has GPUs by Slurm may end at any time, so *standbys* wait for its end: placeholder jobs with `afterany` and
the highest priority, which Slurm starts before anybody else (docs/developer/slurm-gateway.md). Slurm chooses the index of a
GPU, and a job cannot be bound anew: where an index that is in use is not held, placeholder jobs take every GPU of the node that
comes free until one has it.

`changes` decides, of one node; `GpuReservations` looks and asks. Slurm's list of jobs is the record: a daemon that starts
finds its placeholder jobs there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock_slurm.gateway import CliGateway, ControllerAway, JobGone, SlurmError, SlurmJob, TimedOut
from penstock_slurm.states import HOLDING, LEAVING, WAITING

log = logging.getLogger(__name__)

NAME = "penstock-placeholder"
"""Name of every placeholder job. One is ours if it is also of the daemon's user."""

CHECKS = 20
"""Jobs on nodes without placeholder jobs of which one look asks Slurm what it has given them."""

NOTE = "penstock_placeholder"
"""Key in a placeholder job's comment: for whom it holds."""

AFTER = re.compile(r"afterany:(\d+)")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder job."""

    id: str
    node: str
    index: int | None = None
    """Of its GPU; None: it does not run yet, or nobody has said."""
    running: bool = False
    after: int | None = None
    """The job whose end it waits for; None: it takes the next GPU."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A job of ours that runs on a node, as far as the GPU reservation cares."""

    number: int
    """SLURM_JOB_ID."""
    gpus: int
    own: bool
    """Whether it holds its GPUs by Slurm itself."""
    devices: frozenset[int] | None
    """Indexes of its GPUs; None: not known. A job that waits for its first turn has none."""
    stays: bool = True
    """Not so of one that has been asked to leave."""
    shares: bool = False
    """Whether others are in its group."""


@dataclass(frozen=True, slots=True)
class Ground:
    """One node, as `changes` must know it."""

    gpus: int
    free: int
    """GPUs that nobody holds in Slurm."""
    wanted: int
    """GPUs to be kept from everybody else, those that sharers with others beside them hold themselves included."""
    placeholders: tuple[Placeholder, ...] = ()
    sharers: tuple[Sharer, ...] = ()
    promised: frozenset[int] = frozenset()
    """Indexes that the node's agent may give out, by orders that it may still carry out."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What brings a node's GPU reservation to where it should be."""

    submit: int = 0
    """Placeholder jobs that take a GPU as soon as one is free."""
    standbys: dict[int, int] = field(default_factory=dict)
    """Job's number -> placeholder jobs that take over when it ends."""
    let: tuple[Placeholder, ...] = ()
    """Standbys that wait no longer."""
    cancel: tuple[Placeholder, ...] = ()


def used(ground: Ground, *, staying: bool = False) -> frozenset[int]:
    """Indexes that jobs use which hold none themselves."""
    jobs = (each for each in ground.sharers if not each.own and (each.stays or not staying))
    return frozenset[int]().union(*(each.devices or () for each in jobs))


def held(ground: Ground) -> frozenset[int]:
    """Indexes that nobody else can get: those of placeholder jobs, and of jobs of ours that stay."""
    own = (each.devices or () for each in ground.sharers if each.own and each.stays)
    return frozenset(each.index for each in ground.placeholders if each.index is not None).union(*own)


def lacking(ground: Ground) -> int:
    """Placeholder jobs that are wanted: what is to be reserved and sharers do not hold themselves."""
    own = sum(each.gpus for each in ground.sharers if each.own and each.stays and each.shares)
    return max(ground.wanted - own, 0)


def stands(ground: Ground) -> bool:
    """Whether all is reserved that should be."""
    running = sum(each.running for each in ground.placeholders)
    return running >= lacking(ground) and used(ground, staying=True) <= held(ground)


def changes(ground: Ground) -> Changes:
    """What to submit and to cancel on one node.

    - As many placeholder jobs as are wanted beyond what sharers hold themselves. While an index in use is not held, so many
    that they   take all that is free as well.
    - A placeholder job whose index is in use or promised is never cancelled; nor is any that runs while it is not known
    which are in use.
    - For each sharer with GPUs of its own and others beside it, standbys: as many as it holds, and one for each GPU that is
      free, since Slurm gives them the lowest index.
    """
    missing = used(ground, staying=True) - held(ground)
    unknown = any(each.devices is None for each in ground.sharers if not each.own)
    ordinary = [each for each in ground.placeholders if each.after is None]
    running = [each for each in ordinary if each.running]
    pending = [each for each in ordinary if not each.running]
    count, free = lacking(ground), max(ground.free, 0)
    if missing:
        count = max(count, min(len(running) + free + len(missing), ground.gpus))
    heirs = {each.number: each.gpus + free for each in ground.sharers if each.own and each.stays and each.shares}
    waiting: dict[int, list[Placeholder]] = {}
    for each in ground.placeholders:
        if each.after is not None:
            waiting.setdefault(each.after, []).append(each)
    idle = [each for number in sorted(waiting.keys() - heirs.keys()) for each in waiting[number]]
    more = max(count - len(ordinary), 0)
    let, cancel = idle[:more], idle[more:]
    kept = used(ground) | ground.promised
    spare = [] if unknown or missing else [each for each in running if each.index not in kept]
    surplus = [*pending, *sorted(spare, key=lambda each: -(each.index or 0))]
    cancel += surplus[: max(len(ordinary) - count, 0)]
    standbys = {number: wanted - len(waiting.get(number, ())) for number, wanted in heirs.items()}
    lack = {number: most for number, most in standbys.items() if most > 0}
    return Changes(more - len(let), lack, tuple(let), tuple(cancel))


class GpuReservations:
    """The placeholder jobs of all nodes."""

    def __init__(self, commands: CliGateway) -> None:
        self._commands = commands
        self._uid = os.geteuid()
        self._placeholders: dict[str, Placeholder] = {}
        self._comments: dict[str, str] = {}
        self.leaving: tuple[SlurmJob, ...] = ()
        """Jobs whose run has ended and whose processes may live still."""
        self.away: SlurmError | None = None
        """Why Slurm was asked no more in this look: it did not answer."""
        self._asked = 0
        """Jobs that it was asked for in this look."""
        self._limited: set[str] = set()
        """Placeholder jobs that run and would be ended by a time limit, a partition's."""
        self._indexes: dict[tuple[str, int], frozenset[int]] = {}
        """(job, restarts) -> indexes of the GPUs that Slurm has given it."""

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """All that the last look saw."""
        return tuple(self._placeholders.values())

    def saw(self, jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
        """Take a look; returns the jobs that are no placeholder jobs."""
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
        """Indexes of the GPUs that Slurm has given a running job on one node; None: it does not say now.

        Once it has not answered it is not asked again before the next look: each time would cost as much as a command may take.
        """
        key = job.id, job.restarts
        ours = job.name == NAME or any(placeholder.node in job.nodes for placeholder in self._placeholders.values())
        if key not in self._indexes and self.away is None and (ours or self._asked < CHECKS):
            self._asked += not ours
            try:
                self._indexes[key] = frozenset(self._commands.gpu_indexes(job.id))
            except (ControllerAway, TimedOut) as error:
                self.away = error
            except SlurmError as error:
                log.info("cannot see which GPUs a job has", extra={"job": job.id, "text": str(error)})
        return self._indexes.get(key)

    def forget(self, keep: Collection[str]) -> None:
        """Drop what is remembered of jobs that are neither these nor placeholder jobs."""
        kept = self._placeholders.keys() | set(keep)
        self._indexes = {key: found for key, found in self._indexes.items() if key[0] in kept}

    def gpus(self, node: str) -> int:
        """GPUs of a node that placeholder jobs have."""
        return sum(each.running for each in self._placeholders.values() if each.node == node)

    def on(self, node: str) -> tuple[Placeholder, ...]:
        """Placeholder jobs on a node, or on their way there."""
        return tuple(each for each in self._placeholders.values() if each.node == node)

    def carry_out(self, node: str, partition: str, ground: Ground, jobs: Sequence[str]) -> None:
        """Bring one node's GPU reservation a step nearer to what it should be; what Slurm refuses is tried again at the
        next look.

        Args:
            node: where.
            partition: one that the node is in and that is up.
            ground: as `changes` takes it.
            jobs: for whom, for the comment.

        Raises:
            ControllerAway, TimedOut: nobody answers.
        """
        todo = changes(ground)
        note = json.dumps({NOTE: sorted(jobs)})
        try:
            for placeholder in todo.cancel:
                self._drop(placeholder)
            for placeholder in todo.let:
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
            log.warning("reservations", extra={"node": node, "text": str(error)})
        if todo != Changes():
            facts = {"node": node, "wanted": ground.wanted, "submitted": todo.submit, "cancelled": len(todo.cancel)}
            log.info("reservations", extra=facts | {"standbys": sum(todo.standbys.values()), "let": len(todo.let)})

    def exchange(self, node: str, partition: str, spared: Collection[int], jobs: Sequence[str]) -> None:
        """Put a new placeholder job behind one that runs, and end that one, best one whose GPU is not among `spared`.

        Raises:
            ControllerAway, TimedOut: nobody answers.
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
            log.warning("reservations", extra={"node": node, "text": str(error)})
        log.info("gate", extra={"node": node, "placeholder": old.id, "index": old.index})

    def _keep(self, placeholder: Placeholder, note: str) -> None:
        self._placeholders[placeholder.id], self._comments[placeholder.id] = placeholder, note

    def _drop(self, placeholder: Placeholder) -> None:
        with contextlib.suppress(JobGone):
            self._commands.cancel(placeholder.id)
        self._placeholders.pop(placeholder.id, None)
