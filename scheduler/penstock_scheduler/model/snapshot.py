"""All that a decision may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.sensitivity import SensitivityProfile
from penstock_scheduler.model.budget import GpuBudget
from penstock_scheduler.model.cloud import CloudState
from penstock_scheduler.model.cluster import Configuration, Node
from penstock_scheduler.model.job import EndedRun, GpuLimit, Job, JobId, Refusal
from penstock_scheduler.model.sharing import SharingState


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What a cluster reports when it is observed."""

    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    refused: tuple[Refusal, ...] = ()
    limits: tuple[GpuLimit, ...] = ()
    ended: tuple[EndedRun, ...] = ()
    """Last runs of jobs that are not there any more, as far as the cluster remembers: at least those since the last look."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round's input. `Policy.decide` reads nothing else, so a saved snapshot decides again to the same plan."""

    round: int
    time_s: float
    """When the cluster was observed, s since 1970."""
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    models: dict[JobId, AnyEstimator]
    """How fast each job is on what."""
    restart_costs_s: dict[JobId, float]
    """Wall-clock seconds of progress that a restart of each job costs."""
    refused: tuple[Refusal, ...] = ()
    limits: tuple[GpuLimit, ...] = ()
    unscaled: dict[JobId, int] = field(default_factory=dict)
    """Jobs of which nobody knows how they scale -> most GPUs that they have run on, 0 if they never ran."""
    unmeasured: dict[JobId, tuple[str, ...]] = field(default_factory=dict)
    """GPU types, sorted, on which nothing was measured of a job that learns from its runs, and on which the catalogue does not
    know its speed either; absent: there are none."""
    remaining: dict[JobId, float] = field(default_factory=dict)
    """Work that is left of each job, in the unit of its model's goodput times seconds, >= 0; absent: not known."""
    attained: dict[JobId, dict[str, float]] = field(default_factory=dict)
    """GPU-seconds that each job has held so far, by GPU type, as the round loop saw it; absent: none.
    Those of jobs that have just ended are in it, too."""
    cloud: CloudState | None = None
    """The cloud, if the site has one."""
    sensitivities: dict[JobId, SensitivityProfile] = field(default_factory=dict)
    """How the speed of a job depends on CPU and memory, of jobs of which that is known."""
    budgets: tuple[GpuBudget, ...] = ()
    """GPU-hours that accounts may use."""
    sharing: SharingState | None = None
    """What the nodes tell of jobs that share GPUs; None: nobody can share any."""
    idle_since_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Since when each GPU that nobody has is seen idle, s since 1970, the earliest first, by node; only of nodes with jobs that
    grow into such."""
    incumbent: dict[JobId, Configuration] = field(default_factory=dict)
    """A plan's configurations to take as they are, when a round that a time limit cut short is decided again."""
