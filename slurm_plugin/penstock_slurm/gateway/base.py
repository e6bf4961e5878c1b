"""The records that the gateway reads and writes, in Slurm's terms, and the protocols `SlurmReader` and `SlurmWriter`."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock_scheduler.store.leadership.site_clock import SITE_CLOCK
from penstock_slurm.gateway.errors import SlurmError

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""Slurm's states of a job that holds nothing."""

ADMIN = "JobHeldAdmin"
"""Slurm's reason for a hold by root, SlurmUser or an operator. Penstock's own holds are user holds."""

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of jobs that have ended. slurmctld remembers them for a while (MinJobAge)."""


STAND_IN = "penstock"
"""A GRES that jobs request in place of GPUs, for releases of Slurm that can remove a pending job's GPUs in no other way
(`abilities.Release.empty_tres_clears_gpus`)."""

MOVES = "penstock_moves"
"""The reservation that keeps the GPUs of jobs that move from all others. Penstock alone makes and ends it."""

MOVES_S = 120.0
"""How long that reservation lasts unless it is made anew, s. Slurm takes whole minutes."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value in an answer of Slurm that this version of Penstock does not know. It concerns one job, node or partition."""

    field: str
    """Slurm's name of the field."""
    text: str | None
    """What Slurm printed. None: the field is missing."""

    def __str__(self) -> str:
        return f"no {self.field}" if self.text is None else f"{self.field}={self.text[:100]}"


@dataclass(frozen=True, slots=True)
class Unread:
    """Something in an answer of Slurm that cannot be attributed to a job, node, partition or reservation."""

    kind: str
    """What it is, in the singular: job, QOS, association, fair share, run, end, switch or message."""
    text: str
    """Slurm's text."""
    count: int = 1
    """How often Slurm has answered with this message."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node. GPU counts are by GRES type. An untyped GRES such as `gpu:4` has the type ""."""

    name: str
    gpus: dict[str, int]
    gpus_used: dict[str, int]
    state: frozenset[str]
    """Slurm's names in capitals, such as {"IDLE", "DRAIN"}."""
    partitions: tuple[str, ...]
    cpus: int
    cpus_used: int
    memory_mb: int
    memory_used_mb: int
    reason: str = ""
    """Why an admin or Slurm took the node out of service."""
    stand_in: bool = False
    """Whether the node has the GRES `STAND_IN`."""
    unknown: tuple[Unknown, ...] = ()
    """What Slurm says of the node that cannot be read. Nothing may start on such a node; what runs there stays."""
    features: tuple[str, ...] = ()
    """Its active features, in order."""
    tmp_mb: int = 0
    """Its temporary disk, MB (TmpDisk)."""
    core_cpus: int = 1
    """CPUs of a core."""
    socket_cpus: int = 1
    """CPUs of a socket."""


@dataclass(frozen=True, slots=True)
class SlurmPartition:
    """One partition. `max_time_s` None means no limit."""

    name: str
    nodes: tuple[str, ...]
    up: bool
    default: bool
    max_time_s: float | None
    unknown: tuple[Unknown, ...] = ()
    """What Slurm says of the partition that cannot be read."""
    state: str = ""
    """Slurm's name, such as UP or INACTIVE."""
    whole_nodes: bool = False
    """Whether each of its jobs has whole nodes (OverSubscribe=EXCLUSIVE)."""
    most_cpus: int | None = None
    """Most CPUs of its jobs on a node (MaxCPUsPerNode), if there is a limit."""
    most_memory_mb: int | None = None
    """Most memory of a job on a node, MB (MaxMemPerNode), likewise."""
    tier: int = 0
    """Its PriorityTier."""
    frees: bool = False
    """Whether a job of it that Slurm preempts leaves its GPUs (PreemptMode=REQUEUE or CANCEL)."""
    grace_s: float = 0.0
    """How long Slurm lets such a job run on (GraceTime), s."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job, or one element of an array. Times are seconds since the epoch, None where Slurm has none.

    Users write `name` and `comment`, which can hold any text. Only admins write `admin_comment`.
    """

    id: str
    """The id that the gateway's methods take: `12`, or `12_3` for element 3 of array 12. It never changes, even when Slurm
    gives the element a number of its own."""
    number: int
    """Slurm's JobId, which is SLURM_JOB_ID inside the job. Elements of an array that have not started share one."""
    name: str
    user: str
    uid: int
    account: str
    partition: tuple[str, ...]
    """A pending job may name several."""
    state: str
    """PENDING, RUNNING, COMPLETING, CONFIGURING, SUSPENDED, COMPLETED, ..."""
    reason: str
    nodes: tuple[str, ...]
    """The nodes allocated to the job now."""
    required_nodes: tuple[str, ...]
    node_count: int
    gpus_per_node: int | None
    """From the TRES per node. None if the job requested no GPUs, or in another way (--gpus, --gpus-per-task)."""
    gpu_type: str | None
    """The type of the GPUs per node, if it is one named type. Slurm 22.05 cannot change it."""
    cpus: int
    cpus_per_task: int
    tasks: int
    comment: str
    admin_comment: str
    submit_s: float
    eligible_s: float | None
    start_s: float | None
    """When the job started. None while it is PENDING, where Slurm's field is an estimate or left from the last run."""
    end_s: float | None
    """When the job ended or will reach its time limit."""
    time_limit_s: float | None
    """None: no limit, or the partition's. Slurm shows a year for a job without a limit that its backfill scheduler started."""
    restarts: int
    requeue: bool
    priority: int
    qos: str = ""
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_job_id: int | None = None
    reservation: str = ""
    """The reservation with which the job was submitted. Several are separated by commas."""
    gpus_counted: dict[str, int] = field(default_factory=dict)
    """GPUs that count against Slurm's limits by type, "" for all together. For a pending job: the requested ones. Empty if the
    site does not track gres/gpu (AccountingStorageTRES), in which case it can have no limits on GPUs."""
    memory_mb: int = 0
    """Memory on all its nodes, MB: what a pending job requests, and what a running one holds."""
    least_memory_mb: int = 0
    """Memory that it requests on each node, or for each CPU; 0: for each GPU, or all memory of its nodes."""
    dependency: str = ""
    """The jobs that it still waits for, in Slurm's syntax. Empty once the dependency is fulfilled."""
    licenses: str = ""
    exclusive: bool = False
    """Whether the job requested whole nodes (--exclusive)."""
    apart: bool = False
    """Whether Slurm keeps some other jobs off its nodes (`--exclusive=user`, `mcs` or `topo`, or by its partition)."""
    deadline_s: float | None = None
    """When Slurm ends the job at the latest, if it is not held."""
    cpus_per_gpu: int | None = None
    """From --cpus-per-gpu. Slurm turns it into a number of CPUs at the first start only."""
    suspended_s: float = 0.0
    """How long the present run has been suspended so far, in whole seconds."""
    unknown: tuple[Unknown, ...] = ()
    """What Slurm says of the job that cannot be read. The attributes for these fields are empty. Such a job is left alone."""

    @property
    def held(self) -> bool:
        """Whether the job is pending and waits for a `release`. Slurm holds a job by priority 0."""
        return self.state == "PENDING" and self.priority == 0

    def begins_later(self, now_s: float) -> bool:
        """Whether it has a begin time that has not come, and that scontrol could end: it raises all times to its host's own."""
        return (self.eligible_s or 0.0) > now_s + max(SITE_CLOCK.host_ahead_s(), 0.0)

    def cpus_for(self, gpus: int, tasks: int = 1) -> int:
        """CPUs on each of its nodes, as the job's user requested them, if it has this many GPUs and tasks there."""
        return max(self.cpus_per_gpu * gpus if self.cpus_per_gpu else self.cpus_per_task * tasks, tasks)


@dataclass(frozen=True, slots=True)
class SlurmRun:
    """An ended run in Slurm's accounting. A job that was requeued has several."""

    job_id: str
    """Like `SlurmJob.id`."""
    start_s: float
    end_s: float
    nodes: tuple[str, ...]
    gpus: int
    """On all nodes."""


@dataclass(frozen=True, slots=True)
class SlurmEnd:
    """How a job ended, by Slurm's accounting."""

    state: str
    exit_code: int | None
    """128 and the number of a signal that ended it; None: not known."""
    end_s: float
    submit_s: float
    """When it was first submitted: Slurm gives each run of a requeued job a later time."""


@dataclass(frozen=True, slots=True)
class SlurmReservation:
    """One reservation. One of licences only has no nodes."""

    name: str
    start_s: float
    """Its next start, if it recurs."""
    end_s: float
    nodes: tuple[str, ...]
    active: bool
    flags: frozenset[str]
    """Slurm's names, such as {"MAINT", "SPEC_NODES"}."""
    unknown: tuple[Unknown, ...] = ()
    """What Slurm says of the reservation that cannot be read. Nothing may start on its nodes; what runs there stays."""


@dataclass(frozen=True, slots=True)
class SlurmFeatures:
    """The features that this Slurm has. Penstock reads nothing that belongs to others."""

    cluster: str = ""
    """The cluster's name in the accounting."""
    accounting: bool = False
    """Whether slurmdbd registers the jobs."""
    topology: bool = False
    limits: bool = False
    """Whether Slurm enforces the limits of QOS and associations."""
    fair_share: bool = False
    memory: bool = False
    """Whether Slurm allocates memory, as it does CPUs (SelectTypeParameters=CR_Core_Memory)."""
    cpus_by: Literal["", "core", "socket"] = ""
    """Jobs get whole cores or sockets (SelectTypeParameters=CR_Core or CR_Socket), or single CPUs if this is empty."""
    counts_gpus: bool = False
    """Whether `SlurmJob.gpus_counted` has a running job's GPUs (AccountingStorageTRES=gres/gpu)."""
    resume_timeout_s: float | None = None
    """How long a node may take to boot (ResumeTimeout), s; None: this Slurm wakes no nodes, because it has no ResumeProgram."""
    preempts_by: Literal["", "partition", "qos"] = ""
    """Slurm preempts jobs for those of partitions with a higher PriorityTier, or of a QOS that names theirs (PreemptType)."""
    preempted_frees: bool = False
    """Whether jobs that Slurm preempts leave their GPUs, where their QOS says nothing else (PreemptMode)."""
    preempt_exempt_s: float = 0.0
    """How long Slurm preempts no job after its start (PreemptExemptTime), s; infinite if that cannot be read."""
    gpu_types_stay: bool = False
    """Whether a pending job that once asked for a GPU type can only run on nodes that have it (`abilities.Release`)."""


@dataclass(frozen=True, slots=True)
class SlurmQos:
    """How a QOS takes part in preemption. A field that is None has what slurm.conf says."""

    name: str
    preempts: frozenset[str]
    """The QOS whose jobs Slurm preempts for its own."""
    frees: bool | None
    """As `SlurmPartition.frees`."""
    exempt_s: float | None
    """As `SlurmFeatures.preempt_exempt_s`."""
    grace_s: float


@dataclass(frozen=True, slots=True)
class SlurmLimit:
    """Most GPUs of a group of jobs: a limit of a QOS, or of an association (an account, or a user in an account)."""

    gpus: int
    gpu_type: str = ""
    """Empty: GPUs of all types together."""
    qos: str = ""
    accounts: tuple[str, ...] = ()
    """The account that has the limit, and then the accounts below it."""
    user: str = ""
    each: Literal["", "user", "account"] = ""
    """Whether the limit is one for each user or account of the QOS."""


def slurm_time(time_s: float) -> str:
    """A time, s since 1970, as Slurm's commands take it: in the local time of this host."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))


def slurm_minutes(seconds: float) -> int:
    """A time limit in Slurm's whole minutes, rounded up, at least one."""
    return max(math.ceil(seconds / 60), 1)


def slurm_time_limit(seconds: float) -> str:
    """A time limit as Slurm's commands take it; an infinite one is none."""
    return "UNLIMITED" if math.isinf(seconds) else str(slurm_minutes(seconds))


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """Where a pending job is to run: the same number of GPUs on each of `nodes`, and `cpus` over all of them.

    With 0 GPUs the job gets none from Slurm: it shares those that a GPU reservation holds. `tasks` are over all nodes; None
    keeps the job's own. CPUs and tasks must change with the number of nodes, or Slurm reports BadConstraints.
    """

    partition: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    tasks: int | None
    cpus: int
    gpu_type: str = ""
    """The type to ask for, where a node has GPUs of several types."""
    clears_type: bool = False
    """Whether the present request of GPUs has to be removed first (`SlurmFeatures.gpu_types_stay`)."""
    time_limit_s: float | None = None
    """Time limit of this run, which Slurm rounds up to whole minutes; infinite: no limit. None keeps the job's own."""
    cpus_per_task: int | None = None
    """None keeps the job's own."""
    memory_mb_per_node: int | None = None
    """None keeps the job's own."""
    tasks_per_node: int | None = None
    """None keeps the job's own, which is none unless it was submitted with --ntasks-per-node."""
    stand_in: bool = False
    """Whether a job with 0 GPUs requests `STAND_IN`, or nothing."""
    ends_begin: bool = False
    """Whether this ends the begin time that keeps the job back, such as Slurm gives to each job that it requeues.

    The new begin time is now by the clock of the host that sends it. The job waits if slurmctld's clock is behind that."""

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes={self.nodes}: name at least one node, and each once")
        if self.gpus_per_node < 0 or self.cpus < 1 or (self.tasks is not None and self.tasks < 1):
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} cpus={self.cpus} tasks={self.tasks}: must be 1 or more, GPUs 0 or more"
            )


@dataclass(frozen=True, slots=True)
class PlainShape:
    """How Slurm may start a job without Penstock: on any `nodes` nodes of a partition."""

    partition: str
    nodes: int
    gpus_per_node: int
    tasks_per_node: int | None = None
    """None keeps the job's own, which is one on each node unless it was submitted with --ntasks-per-node."""


@dataclass(frozen=True, slots=True)
class Write:
    """One command about one job, named like the `SlurmWriter` method for a single one.

    Four have no method:

    - `release` lets a held job start as soon as Slurm has resources.
    - `split` gives an array's element that has not started a job record and a number of its own.
    - `put_first` gives a job that is not held the highest priority, until its next release.
    - `place` changes a pending job so that it runs exactly there. Slurm applies the whole update or nothing. The error is
      NotWaiting, and nothing changes, if the job has started or ended meanwhile: Slurm would shrink a running job to the nodes of
      the placement. Hold the job first, so that it does not start between this check and the update. Slurm checks only when it
      starts the job that the nodes are in the partition. Wait until a requeued job is PENDING, and then 1.1 s
      (docs/developer/slurm-gateway.md), before releasing it.
    """

    job_id: str
    kind: Literal["hold", "release", "requeue_hold", "split", "place", "put_first"]
    placement: JobPlacement | None = None
    """For `place` only."""
    admin_holds: bool = False
    """Whether an admin is known to hold the job. If not, and one does by now, the error is HeldMeanwhile."""

    def __post_init__(self) -> None:
        if (self.kind == "place") != (self.placement is not None):
            raise ValueError(f"kind={self.kind} placement={self.placement}: only `place` has a placement")


class SlurmReader(Protocol):
    """Penstock's questions to Slurm. Every error is a SlurmError.

    Each reading is one call to slurmctld (`limits`: two to slurmdbd; the jobs through pyslurm: two).
    """

    def version(self) -> tuple[int, int]:
        """Slurm's release, such as (22, 5)."""
        ...

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes that slurmctld shows. It shows powered-down cloud nodes only with `PrivateData=cloud` in slurm.conf."""
        ...

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """All partitions, hidden ones too."""
        ...

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs in any order, each array element as one. `finished` adds ended jobs that are not yet purged."""
        ...

    def knows(self, job_id: str) -> bool:
        """Whether slurmctld has a record of this job, also of one that has ended and is not yet purged."""
        ...

    def array_limit(self, job_id: str) -> int | None:
        """Most elements of this element's array that Slurm lets run at once (ArrayTaskThrottle). None: it has no such limit."""
        ...

    def gpus_held(self, job_id: str) -> int | None:
        """GPUs that Slurm has allocated to a running job, sometimes fewer than requested. None: unknown."""
        ...

    def free_licences(self) -> dict[str, int]:
        """Licence -> how many are free."""
        ...

    def reservations(self) -> tuple[SlurmReservation, ...]:
        """All reservations but `MOVES`."""
        ...

    def features(self) -> SlurmFeatures:
        """What slurm.conf enables."""
        ...

    def switches(self) -> dict[str, str]:
        """Node -> leaf switch. Only with `features().topology`."""
        ...

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        """The limits on GPUs of QOS and associations in the database. Only with `features().limits`.

        Raises:
            AccountingAway: slurmdbd does not answer. slurmctld continues without it.
        """
        ...

    def qos(self) -> tuple[SlurmQos, ...]:
        """All QOS in the database. Raises AccountingAway, as `limits`."""
        ...

    def fair_shares(self) -> dict[tuple[str, str], float]:
        """(account, user) -> Slurm's fair-share factor, from 0 (used too much) to 1. Only with `features().fair_share`."""
        ...

    def runs(self, job_ids: Collection[str], since_s: float) -> tuple[SlurmRun, ...]:
        """Runs of these jobs that have ended since then, from slurmdbd. Only with `features().counts_gpus`.

        Raises:
            AccountingAway: slurmdbd does not answer.
        """
        ...

    def unread(self) -> tuple[Unread, ...]:
        """What of the newest answers could not be attributed to a record, and all messages whose meaning is not known."""
        ...


class SlurmWriter(Protocol):
    """Penstock's orders to Slurm. Each write is safe to repeat.

    After `Transient` it may have taken effect or not: read the job, then repeat the write. All writes raise ControllerAway,
    JobGone, Refused or Transient (also its subclasses TimedOut and Unregistered).
    """

    def hold(self, job_id: str) -> None:
        """Keep a pending job from starting until it is released, by a user hold (JobHeldUser). A running job continues."""
        ...

    def requeue_hold(self, job_id: str) -> None:
        """Stop a running or suspended job. After a while it is PENDING and held.

        Other jobs stay as they are: this does not hold a pending job, and does not requeue a job that its user has cancelled.
        """
        ...

    def bring_back(self, job_id: str) -> None:
        """Requeue a job that has failed, and hold it."""
        ...

    def cancel(self, job_id: str) -> None:
        """Cancel a job. Raises JobGone if it has ended."""
        ...

    def suspend(self, job_id: str) -> None:
        """Suspend a running job: SIGTSTP to all of its processes, SIGSTOP 2.0 s later. It keeps its GRES."""
        ...

    def resume(self, job_id: str) -> None:
        """Resume a suspended job (SIGCONT). Raises Refused if it is not suspended."""
        ...

    def signal(self, job_id: str, where: Literal["batch", "steps"]) -> None:
        """Send SIGUSR2 to the batch script's process of a running job, or to all processes of its steps."""
        ...

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        """Take all nodes but these from a running job. Its first node must be among them. Not repeated."""
        ...

    def leave_to_slurm(self, job_id: str, shape: PlainShape, cpus: int, after_s: float) -> None:
        """Give a pending job this shape and a begin time in `after_s` seconds, and release it. Slurm starts it then by itself."""
        ...

    def begin_later(self, job_ids: Sequence[str], after_s: float) -> None:
        """Set the begin time of pending jobs to `after_s` seconds from now. Ignores jobs that have ended."""
        ...

    def name_no_nodes(self, job_ids: Sequence[str]) -> None:
        """Let pending jobs require no nodes. Ignores jobs that have ended."""
        ...

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """Write the comment that only admins can write. "" clears it. Slurm keeps any text, also newlines."""
        ...

    def keep_nodes(self, nodes: Sequence[str], *, changes: bool) -> None:
        """Let no job start on these nodes, for `MOVES_S` at most. Running jobs continue. Not repeated.

        Args:
            nodes: nodes.
            changes: whether such a reservation exists, which is then for these nodes.
        """
        ...

    def keep_no_nodes(self) -> None:
        """Let jobs start on all nodes again. Not repeated."""
        ...

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        """Many commands, at most one about each job. Returns the error of each in their order, None if Slurm did it.

        The failure of one does not stop the others. But if the controller is down, the rest are not sent and have the same error.
        Slow enough for slurmctld to stay responsive.
        """
        ...
