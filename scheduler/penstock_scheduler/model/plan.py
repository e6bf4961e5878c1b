"""What a round decides: the plan, and the reason for every job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from penstock_scheduler.model.actions import Stop
from penstock_scheduler.model.cloud import Offer
from penstock_scheduler.model.cluster import Configuration, Placement
from penstock_scheduler.model.job import JobId
from penstock_scheduler.model.sharing import SharedGpus


class ReasonCode(StrEnum):
    """Why a job has what it has. Codes are stable; texts may change."""

    KEPT = "kept"
    """It keeps what it has."""
    CHOSEN = "chosen"
    """It gets something new."""
    MEASURING = "measuring"
    """It has one GPU of a type, to measure how fast it is there."""
    IN_FLIGHT = "in-flight"
    """It is on its way to what an earlier round gave it."""
    PINNED = "pinned"
    """It may not be moved."""
    WAITING_CAPACITY = "waiting-capacity"
    """Other jobs get the GPUs in this round."""
    WAITING_PARTITION = "waiting-partition"
    """Nothing starts in its partitions now: they are down or inactive."""
    WAITING_FRAGMENTS = "waiting-fragments"
    """Enough GPUs are free, but they are scattered over too many nodes."""
    BURST = "burst"
    """It runs in the cloud or is sent there."""
    RECALLED = "recalled"
    """It is brought back from the cloud."""
    CLOUD_BUDGET = "cloud-budget"
    """It would leave for the cloud, but the budget is used up."""
    GPU_BUDGET = "gpu-budget"
    """Its account has used up its GPU-hours."""
    SHARES = "shares"
    """It shares GPUs with other jobs."""
    FIRST_SLICE = "first-slice"
    """It has a time slice on another job's GPUs, so that its user soon sees whether it works."""
    STOPPED_BY_GROUP = "stopped-by-group"
    """Other trials of its group are more promising."""
    NEVER_FITS = "never-fits"
    """No round can place it as the cluster stands: the job or the cluster must change."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why, for a program and for a person."""

    code: ReasonCode
    text: str
    needs: str = ""
    """The fewest GPUs that the job needs, in words; empty if it has them."""
    estimated_start_s: float | None = None
    """Estimated start, s since 1970; None: not known."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Advice on the batch size; the executor decides."""

    atomic: int
    """Samples per GPU in one micro-step."""
    accumulation_steps: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a job gets."""

    placement: Placement
    reason: Reason
    goodput: float
    """Expected goodput, in the job's own unit per second (samples/s for training)."""
    batch: Batch | None = None

    @property
    def configuration(self) -> Configuration:
        """The shape of what it gets."""
        return self.placement.configuration


@dataclass(frozen=True, slots=True)
class CloudAssignment:
    """What a job gets in the cloud."""

    offer: Offer
    usd: float
    """Most dollars that it may cost."""
    reason: Reason
    stays: bool = False
    """Whether it was in the cloud before the round. It then keeps what it has, and nothing is ordered."""
    data_usd: float = 0.0
    """The part of `usd` for the transfer of data."""


class SolveStatus(StrEnum):
    """How the solver ended. Policies turn each status into a plan or a failed round; see `solver.STATUS_MEANING`."""

    OPTIMAL = "optimal"
    NODE_LIMIT = "node-limit"
    TIME_LIMIT = "time-limit"
    INCUMBENT = "incumbent"
    INFEASIBLE = "infeasible"
    NUMERICAL = "numerical-trouble"


@dataclass(frozen=True, slots=True)
class SolveReport:
    """What the solver did, so that a plan can be judged later."""

    solver: str
    status: SolveStatus
    objective: float
    bound: float
    seconds: float
    """Wall-clock time; the only field in a plan that two equal rounds may differ in."""
    prices_T: tuple[float, ...] = ()
    """Approximate decrease of the objective for one more GPU of each type, in the order of the problem's types, >= 0. Empty
    if the solver has no prices."""

    @property
    def gap(self) -> float:
        """Bound on how far the plan is from the best one, relative to its objective; 0: it is proven best."""
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-9)


@dataclass(frozen=True, slots=True)
class Plan:
    """The state of the cluster that one round decided on."""

    round: int
    assignments: dict[JobId, Assignment] = field(default_factory=dict)
    waiting: dict[JobId, Reason] = field(default_factory=dict)
    """Jobs that get nothing in this round."""
    bursts: dict[JobId, CloudAssignment] = field(default_factory=dict)
    """Jobs that run in the cloud or are sent there."""
    recalls: dict[JobId, Reason] = field(default_factory=dict)
    """Jobs in the cloud that must come back."""
    stops: dict[JobId, Stop] = field(default_factory=dict)
    """Why running jobs are stopped. Nothing is done to a running job that is not here."""
    shared: tuple[SharedGpus, ...] = ()
    """GPUs that jobs share; empty: each job has its own GPUs."""
    solve: SolveReport | None = None
    prices: dict[str, float] = field(default_factory=dict)
    """What one more GPU of each type would be worth in this round, in the unit of the solver's objective; empty: not known."""
    incumbent: dict[JobId, Configuration] = field(default_factory=dict)
    """The solver's own choice, before placement, if a time limit cut it short. A replay starts from it."""

    @property
    def cut_short(self) -> bool:
        """Whether a time limit cut the solver short, so that the plan depends on the machine's speed."""
        return self.solve is not None and self.solve.status is SolveStatus.TIME_LIMIT

    def sharing(self) -> dict[JobId, SharedGpus]:
        """For each job that shares GPUs: the GPUs that it shares."""
        return {job: group for group in self.shared for job in group.jobs}

    def gpus_held(self) -> Counter[str]:
        """GPUs that the plan allocates on each node. Shared GPUs count once."""
        held = Counter[str]()
        shared = self.sharing()
        for job, assignment in self.assignments.items():
            if job not in shared:
                for share in assignment.placement.shares:
                    held[share.node] += share.gpus
        for group in self.shared:
            held[group.node] += group.gpus
        return held

    @property
    def chosen(self) -> dict[JobId, Configuration]:
        """Configuration of each job that gets one."""
        return {job: assignment.configuration for job, assignment in self.assignments.items()}
