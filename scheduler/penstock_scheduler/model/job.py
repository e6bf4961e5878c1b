"""Jobs as a round sees them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from penstock_scheduler.model.cluster import Configuration, NodeChoice, Outranks, Placement, ResourceRequest
from penstock_scheduler.model.spec import Adaptivity, GpuClass, JobSpec

JobId = str
"""Slurm's number for the job, as text."""


class Phase(StrEnum):
    """How far a job is on its way from the queue to its GPUs and back."""

    QUEUED = "queued"
    """It holds no GPUs and waits for a round to give it some."""
    STARTING = "starting"
    """It was sent to its placement and does not run there yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It still holds its GPUs and has been asked to save a checkpoint and leave them."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """Why a job that holds GPUs stands still, or is slower than it could be."""

    since_s: float | None
    """Since when, s since 1970; None: not known."""
    text: str
    """Why, and what ends it, as a sentence."""
    state: Literal["suspended", "frozen", "driven"] = "suspended"
    """`suspended`: in Slurm. `frozen`: by its agent alone. `driven`: its agent freezes and thaws it in turn."""


def in_order(job_id: JobId) -> tuple[str, int, str]:
    """Sort key of job ids: by number, 9 before 10, and the elements of an array by theirs, 12_2 before 12_10. Ids
    that are no numbers come last."""
    array, _, element = job_id.partition("_")
    number = array.rjust(20) if array.isdecimal() else array
    return number, int(element) if element.isdecimal() else -1, job_id


@dataclass(frozen=True, slots=True)
class Job:
    """A job that Penstock manages."""

    id: JobId
    name: str
    user: str
    spec: JobSpec
    partitions: tuple[str, ...]
    """Managed partitions in which it may run. The first is the one to which it was submitted."""
    phase: Phase
    submit_s: float
    """When it was submitted, s since 1970 on the cluster's clock."""
    restarts: int = 0
    """Number of times that it was stopped and started again."""
    allocation: Placement | None = None
    """What it holds, or in phase STARTING is about to hold."""
    leaving: bool = False
    """Whether its run has ended and the cluster cleans up: what it holds is not free yet, and is not counted any
    more."""
    started_s: float | None = None
    """When its present run began, on the cluster's clock; None: it does not run, or the cluster does not say."""
    suspended_s: float = 0.0
    """Seconds for which its present run has been suspended or frozen so far. Meanwhile it holds GPUs that other jobs
    use."""
    suspension: Suspension | None = None
    """Why it stands still or is driven now; None: it is not."""
    stopped_s: float | None = None
    """When the run before that, or the run that is leaving, ended; None: there was none, or the cluster does not
    say."""
    requeued_s: float | None = None
    """When it was put back into the queue, at the latest when the run before ended; None: never, or not known."""
    pauses_s: tuple[float, ...] = ()
    """Seconds for which each of its last few moves kept it from training, from the decision until it ran again; the newest
    last."""
    target: Placement | None = None
    """Where an earlier round has sent it, until it runs there. While it is QUEUED, it has not started there yet."""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    """The reservation in which it asked to run. Empty: none; then it runs on no reserved node."""
    nodes: NodeChoice | None = None
    """The nodes on which its user lets it run; None: all."""
    request: ResourceRequest | None = None
    """What it needs beside GPUs, if that is known."""
    outranks: Outranks | None = None
    """The jobs that the cluster stops for it, or None if it stops none."""
    weight: float = 1.0
    """How much its progress counts relative to that of other jobs, > 0. Comes from Slurm's priority or fair share if the
    site has chosen so."""
    time_limit_s: float | None = None
    """Seconds of running after which the cluster ends it, an upper bound of the running time. None: no limit, or
    unknown."""

    @property
    def in_order(self) -> tuple[float, str, int, str]:
        """Sort key of jobs by age: of two that were submitted at once, the lower number first."""
        return self.submit_s, *in_order(self.id)

    @property
    def movable(self) -> bool:
        """Whether the job, when it runs, may be stopped, moved or resized."""
        return self.spec.preemptible and self.spec.adaptivity is not Adaptivity.FIXED

    @property
    def sharing_priority(self) -> int:
        """Rank among co-located jobs and in the queue for shared GPUs: 1 for a guaranteed job, 0 otherwise. Higher goes
        first."""
        return 1 if self.spec.gpu_class is GpuClass.GUARANTEED else 0

    @property
    def running_on(self) -> Placement | None:
        """The GPUs on which it runs; None: it does not run, or is starting or stopping."""
        return self.allocation if self.phase is Phase.RUNNING else None

    @property
    def running_as(self) -> Configuration | None:
        """The configuration on which it runs; None: it does not run."""
        return None if self.running_on is None else self.running_on.configuration

    @property
    def bound_for(self) -> Placement | None:
        """Where a starting or stopping job goes; None: it is not on its way to a placement."""
        return self.target if self.phase in (Phase.STARTING, Phase.STOPPING) else None


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The last run of a job that has ended. Times are the cluster's."""

    job: JobId
    held: Placement
    started_s: float
    ended_s: float


class Owned(Protocol):
    """A record of a job that limits can cover."""

    @property
    def user(self) -> str:
        """Its user."""
        ...

    @property
    def account(self) -> str:
        """The account that it is charged to."""
        ...

    @property
    def qos(self) -> str:
        """Its QOS."""
        ...

    @property
    def partitions(self) -> tuple[str, ...]:
        """Partitions in which it may run. The first is the one to which it was submitted."""
        ...


@dataclass(frozen=True, slots=True)
class GpuLimit:
    """Most GPUs that some jobs may hold together: a limit of Slurm for a QOS, or of the site for a user, an account or a
    partition."""

    kind: Literal["user", "account", "qos", "partition"]
    name: str
    gpus: int
    """GPUs that the jobs of the snapshot which it covers may hold: the limit, less what other covered jobs hold."""
    gpu_type: str = ""
    """Only GPUs of this type count. Empty: GPUs of all types."""
    below: tuple[str, ...] = ()
    """Accounts below the named one. Their jobs count too."""
    user: str = ""
    """Covers jobs of this user only: a limit for each user of an account or a QOS. Empty: jobs of all users."""
    account: str = ""
    """Likewise for each account of a QOS."""
    spared_qos: tuple[str, ...] = ()
    """QOS with a limit of their own. This limit does not cover their jobs."""

    def covers(self, job: Owned) -> bool:
        """Whether the job counts against the limit."""
        submitted_to = next(iter(job.partitions), "")
        owner = {"user": job.user, "account": job.account, "qos": job.qos, "partition": submitted_to}[self.kind]
        narrowed = self.user in ("", job.user) and self.account in ("", job.account)
        return narrowed and owner in (self.name, *self.below) and job.qos not in self.spared_qos

    def counts(self, gpu_type: str) -> bool:
        """Whether GPUs of this type count against the limit."""
        return self.gpu_type in ("", gpu_type)

    def __str__(self) -> str:
        kind = f"{self.gpu_type} GPUs" if self.gpu_type else "GPUs"
        only = "".join(f" of {what} {name}" for what, name in (("user", self.user), ("account", self.account)) if name)
        return f"the limit of {self.gpus} {kind} for {self.kind} {self.name}{' and jobs' if only else ''}{only}"


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job with a job spec that waits for something else than GPUs, such as a release. No policy sees it."""

    job: Job
    code: Literal["held", "waiting-cluster"]
    """`held`: somebody holds it. `waiting-cluster`: it waits for what its user requested, such as a dependency."""
    text: str
    """What it waits for, as a sentence without its subject, with the remedy."""


@dataclass(frozen=True, slots=True)
class PlainJob:
    """A plain job that waits for GPUs of managed nodes. The cluster starts it, and no policy sees it."""

    id: JobId
    name: str
    user: str
    account: str
    partitions: tuple[str, ...]
    submit_s: float
    needs: str
    """GPUs that it requests, in words."""
    text: str
    """When room is made for it, as a sentence."""
    room_s: float | None
    """The same as a time, s since 1970, if that is known."""
    restarts: int = 0
    """As in `Job`. A plain job that waits again counts as one that waits for the first time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A job that asks for Penstock but cannot be managed, and why."""

    job: JobId
    name: str
    user: str
    text: str
    runs: bool | None = None
    """Whether it runs, as a job of the cluster alone; None: not known."""
