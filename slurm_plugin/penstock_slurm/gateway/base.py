"""What the gateway reads and writes, in Slurm's own words: records and the `Gateway` protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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

    @property
    def held(self) -> bool:
        """Whether it waits and will not start before a `release`. Slurm's hold is priority 0."""
        return self.state == "PENDING" and self.priority == 0


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """Where a pending job shall run: the same number of GPUs on each of `nodes`, `cpus` over all of them.

    `tasks` over all nodes; None leaves the job's own. The GPU type follows from the nodes: 22.05 can change the
    count of a pending job's GRES but not its type. CPUs and tasks have to change with the number of nodes, or Slurm
    finds BadConstraints.
    """

    partition: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    tasks: int | None
    cpus: int

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes={self.nodes}: name at least one node, and each once")
        if self.gpus_per_node < 1 or self.cpus < 1 or (self.tasks is not None and self.tasks < 1):
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} cpus={self.cpus} tasks={self.tasks}: must be 1 or more"
            )


class Gateway(Protocol):
    """Slurm, as Penstock sees it. The three readings are one call to slurmctld each; every error is a SlurmError.

    Each write is safe to repeat. After `Transient` it may have taken effect or not: read back, then ask again.
    All writes raise ControllerAway, JobGone, Refused or Transient (TimedOut among them).
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

    def cancel(self, job_id: str) -> None:
        """End a job for good. JobGone where it had ended."""
        ...

    def place(self, job_id: str, placement: JobPlacement) -> None:
        """Shape a pending job to run exactly there, in one update that happens wholly or not at all.

        Does not release it. Slurm does not check that the nodes lie in the partition before it tries to start the
        job. Wait until a requeued job is PENDING and then 1.1 s (docs/slurm-gateway.md) before releasing it.
        """
        ...

    def set_admin_comment(self, job_id: str, text: str) -> None:
        """Write the comment that only admins can write; "" clears it. Slurm keeps any text, newlines included."""
        ...
