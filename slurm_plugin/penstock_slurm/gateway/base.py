"""What the gateway reads and writes, in Slurm's own words: records and the `Gateway` protocol."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock_slurm.gateway.errors import SlurmError

UNUSABLE = frozenset(
    {
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "FUTURE",
        "INVAL",
        "INVALID_REG",
        "MAINT",
        "NOT_RESPONDING",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWER_DOWN",
        "REBOOT",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
        "UNKNOWN",
    }
)
"""Node states in which a node takes no new job now; PLANNED, POWERING_UP and COMPLETING are not among them."""

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
"""States of jobs that have ended and that slurmctld still remembers (MinJobAge)."""


STAND_IN = "penstock"
"""A GRES that jobs ask for in place of GPUs: Slurm 23.02 and later forget a pending job's GPUs only for another GRES."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node. Counts of GPUs are by GRES type; an untyped GRES such as `gpu:4` has the type ""."""

    name: str
    gpus: dict[str, int]
    gpus_used: dict[str, int]
    state: frozenset[str]
    """Slurm's words in capitals, such as {"IDLE", "DRAIN"}."""
    partitions: tuple[str, ...]
    cpus: int
    cpus_used: int
    memory_mb: int
    memory_used_mb: int
    reason: str = ""
    """Why an admin or Slurm took it out of service."""
    stand_in: bool = False
    """Whether it has the GRES `STAND_IN`."""

    @property
    def usable(self) -> bool:
        """Whether a job that fits can start here now."""
        return not self.state & UNUSABLE


@dataclass(frozen=True, slots=True)
class SlurmPartition:
    """One partition; `nodes` are its nodes by name, `max_time_s` None means no limit."""

    name: str
    nodes: tuple[str, ...]
    up: bool
    default: bool
    max_time_s: float | None


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job, or one element of an array. Times are seconds since the epoch, None where Slurm has none.

    `name` and `comment` are the user's and can hold anything; `admin_comment` only an admin can write.
    """

    id: str
    """What the gateway's other methods take, the same for the job's whole life: `12`, or `12_3` for element 3 of
    array 12, also after Slurm gave the element a number of its own."""
    number: int
    """Slurm's JobId, SLURM_JOB_ID inside the job; elements of an array that have not started share one."""
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
    """The nodes it holds now."""
    required_nodes: tuple[str, ...]
    node_count: int
    gpus_per_node: int | None
    """From the TRES per node; None where it asked for no GPUs or in another way (--gpus, --gpus-per-task)."""
    gpu_type: str | None
    """Set where the GPUs per node are of one named type, which Slurm 22.05 cannot change."""
    cpus: int
    cpus_per_task: int
    tasks: int
    comment: str
    admin_comment: str
    submit_s: float
    eligible_s: float | None
    start_s: float | None
    """When it started; None while it is PENDING, where Slurm's own field is a guess or left from the last run."""
    end_s: float | None
    """When it ended or will reach its limit."""
    time_limit_s: float | None
    """None: no limit, or the partition's."""
    restarts: int
    requeue: bool
    priority: int
    qos: str = ""
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_job_id: int | None = None
    reservation: str = ""
    """What it was submitted with; several are separated by commas."""
    gpus_counted: dict[str, int] = field(default_factory=dict)
    """GPUs that count against Slurm's limits by type, "" for all together. A pending job's are those it asks for. Empty
    where the site does not track gres/gpu (AccountingStorageTRES): there it can have no limits on it either."""
    dependency: str = ""
    """Other jobs that it still waits for, in Slurm's words; empty once they are as it wants them."""
    licenses: str = ""
    exclusive: bool = False
    """Whether it wants whole nodes for itself, CPUs and all."""
    deadline_s: float | None = None
    """When Slurm ends it at the latest, if it is not held."""
    ran_s: float | None = None
    """For how long its present run was not suspended, whole seconds; None: not told."""

    @property
    def held(self) -> bool:
        """Whether it waits and will not start before a `release`. Slurm's hold is priority 0."""
        return self.state == "PENDING" and self.priority == 0


@dataclass(frozen=True, slots=True)
class SlurmRun:
    """A run that is over, in Slurm's accounts. A job that was requeued has several."""

    job_id: str
    """Like `SlurmJob.id`."""
    start_s: float
    end_s: float
    nodes: tuple[str, ...]
    gpus: int
    """On all nodes."""


@dataclass(frozen=True, slots=True)
class SlurmReservation:
    """One reservation with its nodes. Those of licences alone have none."""

    name: str
    start_s: float
    """Of the next time, where it comes again and again."""
    end_s: float
    nodes: tuple[str, ...]
    active: bool
    flags: frozenset[str]
    """Slurm's words, such as {"MAINT", "SPEC_NODES"}."""


@dataclass(frozen=True, slots=True)
class SlurmFeatures:
    """What this Slurm has switched on, so that nothing else is asked for."""

    cluster: str = ""
    """Its name in the accounts."""
    topology: bool = False
    limits: bool = False
    """Whether it keeps jobs within the limits of QOS and associations."""
    fair_share: bool = False
    memory: bool = False
    """Whether it gives out memory, as it does CPUs (SelectTypeParameters=CR_Core_Memory)."""
    counts_gpus: bool = False
    """Whether `SlurmJob.gpus_counted` says what a running job holds (AccountingStorageTRES=gres/gpu)."""


@dataclass(frozen=True, slots=True)
class SlurmLimit:
    """GPUs that some jobs may hold together: a QOS's, or an association's (of an account, or of a user in an account)."""

    gpus: int
    gpu_type: str = ""
    """Empty: GPUs of all types."""
    qos: str = ""
    accounts: tuple[str, ...] = ()
    """The account that has the limit, then those below it."""
    user: str = ""
    each: Literal["", "user", "account"] = ""
    """Whether it holds for each user or account of the QOS by itself."""


def slurm_minutes(seconds: float) -> int:
    """A time limit as Slurm keeps it: whole minutes, rounded up, at least one."""
    return max(math.ceil(seconds / 60), 1)


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """Where a pending job shall run: the same number of GPUs on each of `nodes`, `cpus` over all of them.

    With 0 GPUs it runs there without any from Slurm, as a job that shares those which a GPU reservation holds.

    `tasks` over all nodes; None leaves the job's own. The GPU type follows from the nodes: 22.05 can change the
    count of a pending job's GRES but not its type. CPUs and tasks have to change with the number of nodes, or Slurm
    finds BadConstraints.
    """

    partition: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    tasks: int | None
    cpus: int
    time_limit_s: float | None = None
    """Time that this run may take, rounded up to whole minutes as Slurm counts; None leaves the job's own."""
    cpus_per_task: int | None = None
    """None leaves the job's own."""
    memory_mb_per_node: int | None = None
    """None leaves the job's own."""
    stand_in: bool = False
    """Whether a job with 0 GPUs asks for `STAND_IN` instead, or for nothing."""

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes={self.nodes}: name at least one node, and each once")
        if self.gpus_per_node < 0 or self.cpus < 1 or (self.tasks is not None and self.tasks < 1):
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} cpus={self.cpus} tasks={self.tasks}: must be 1 or more, GPUs 0 or more"
            )


@dataclass(frozen=True, slots=True)
class PlainShape:
    """How a job that Penstock places would run if Slurm started it alone: any `nodes` nodes of a partition."""

    partition: str
    nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class Write:
    """One command about one job, named like the `Gateway` method that gives it alone.

    Two have no method: `split` makes an element of an array that has not started a job record of its own, with a number of its
    own; `put_first` gives a job that is not held the highest priority, until it is released the next time.
    """

    job_id: str
    kind: Literal["hold", "release", "requeue_hold", "split", "place", "put_first"]
    placement: JobPlacement | None = None
    """Where to, for `place` only."""

    def __post_init__(self) -> None:
        if (self.kind == "place") != (self.placement is not None):
            raise ValueError(f"kind={self.kind} placement={self.placement}: `place`, and only that, has a placement")


class Gateway(Protocol):
    """Slurm, as Penstock sees it. A reading is one call to slurmctld (`limits`: two to slurmdbd); every error is a SlurmError.

    Each write is safe to repeat. After `Transient` it may have taken effect or not: read back, then ask again.
    All writes raise ControllerAway, JobGone, Refused or Transient (TimedOut and Unregistered among them).
    """

    def version(self) -> tuple[int, int]:
        """Slurm's release, such as (22, 5)."""
        ...

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes that slurmctld shows. Powered-down cloud nodes need `PrivateData=cloud` in slurm.conf."""
        ...

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """All partitions, hidden ones too."""
        ...

    def jobs(self, *, finished: bool = False) -> tuple[SlurmJob, ...]:
        """All jobs in no certain order, each array element for itself; with `finished` also ended ones not yet purged."""
        ...

    def gpus_held(self, job_id: str) -> int | None:
        """GPUs that Slurm has really given to a running job, at times fewer than it asked for; None: it does not say."""
        ...

    def reservations(self) -> tuple[SlurmReservation, ...]:
        """All reservations."""
        ...

    def features(self) -> SlurmFeatures:
        """What is switched on in slurm.conf."""
        ...

    def switches(self) -> dict[str, str]:
        """Node -> leaf switch. Only where `features().topology`."""
        ...

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        """Limits on GPUs of QOS and associations, as the database has them. Only where `features().limits`.

        Raises:
            AccountingAway: slurmdbd does not answer; slurmctld goes on without it.
        """
        ...

    def fair_shares(self) -> dict[tuple[str, str], float]:
        """(account, user) -> Slurm's fair-share factor, 0 (has had too much) to 1. Only where `features().fair_share`."""
        ...

    def runs(self, job_ids: Collection[str], since_s: float) -> tuple[SlurmRun, ...]:
        """Runs of these jobs that ended since then, as slurmdbd knows them. Only where `features().counts_gpus`.

        Raises:
            AccountingAway: slurmdbd does not answer.
        """
        ...

    def hold(self, job_id: str) -> None:
        """Keep a pending job from starting; only an admin can release it. A running one stays running."""
        ...

    def release(self, job_id: str) -> None:
        """Let a held job start when Slurm finds room."""
        ...

    def requeue_hold(self, job_id: str) -> None:
        """Stop a running or suspended job; it ends up PENDING and held. Watch for that: it takes its time.

        A job that does not run is left as it is: a pending one is not held by this, and one that its user has
        cancelled meanwhile is not brought back to life.
        """
        ...

    def bring_back(self, job_id: str) -> None:
        """Put a job that has failed back into the queue, held."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job for good. JobGone where it had ended."""
        ...

    def suspend(self, job_id: str) -> None:
        """Freeze a running job: SIGTSTP to all of its processes now, SIGSTOP 2.0 s later. It keeps its GRES."""
        ...

    def resume(self, job_id: str) -> None:
        """Let a suspended job go on (SIGCONT). Refused where it is not suspended."""
        ...

    def place(self, job_id: str, placement: JobPlacement) -> None:
        """Shape a pending job to run exactly there, in one update that happens wholly or not at all.

        Does not release it. Slurm does not check that the nodes lie in the partition before it tries to start the
        job. Wait until a requeued job is PENDING and then 1.1 s (docs/developer/slurm-gateway.md) before releasing it.
        """
        ...

    def signal(self, job_id: str, where: Literal["batch", "steps"]) -> None:
        """Send SIGUSR2 to the process of a running job's batch script, or to all processes of its steps."""
        ...

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        """Take from a running job all nodes but these, of which its first must be one. Not tried again."""
        ...

    def leave_to_slurm(self, job_id: str, shape: PlainShape, cpus: int, after_s: float) -> None:
        """Give a pending job this shape and a begin time `after_s` from now, held no longer: Slurm starts it then by itself."""
        ...

    def begin_later(self, job_ids: Sequence[str], after_s: float) -> None:
        """Move the begin time of pending jobs to `after_s` from now, in one command. Those that are gone are passed over."""
        ...

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """Write the comment that only admins can write; "" clears it. Slurm keeps any text, newlines included."""
        ...

    def write(self, writes: Sequence[Write]) -> tuple[SlurmError | None, ...]:
        """Many commands, at most one about each job; what became of each, in their order: None where Slurm has done it.

        The failure of one does not stop the others, but where the controller is away all that follow are not sent and
        have that error too. No faster than `slurmctld` stays responsive by.
        """
        ...
