"""All that a decision may depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from penstock_scheduler.model.cloud import CloudState, GpuBudget
from penstock_scheduler.model.cluster import Configuration, Node, Partition
from penstock_scheduler.model.facts import JobFacts
from penstock_scheduler.model.job import EndedRun, GpuLimit, Job, JobId, Phase, PlainJob, Refusal, WaitingJob
from penstock_scheduler.model.sharing import SharingState


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A value that the cluster reports and that this version of Penstock does not know, with all records that have it."""

    kind: str
    """What the records are, in the singular: job, node, partition, reservation and others; message, for a text that the
    cluster answered with, as often as there are `names`; or reader, for a reason why another program reads the cluster."""
    field: str
    text: str
    """Field and value as the cluster wrote them, such as `State=RESTING`."""
    names: tuple[str, ...]
    """Ids of the jobs, or names of the nodes or partitions."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What a cluster reports when it is observed."""

    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    refused: tuple[Refusal, ...] = ()
    limits: tuple[GpuLimit, ...] = ()
    ended: tuple[EndedRun, ...] = ()
    """Last runs of ended jobs, as far as the cluster remembers: at least those that ended since the last observation."""
    partitions: tuple[Partition, ...] = ()
    """The managed partitions; one that is not here is open."""
    unknown: tuple[UnknownValue, ...] = ()
    """What cannot be read. Such jobs are refused and left alone; nothing starts on such nodes and in such partitions."""
    waiting: tuple[WaitingJob, ...] = ()
    """Jobs that are held, or wait for something else than GPUs."""
    replaced: frozenset[JobId] = frozenset()
    """Ids of jobs that the cluster has forgotten and given to other jobs, which the next observation shows."""
    unseen: tuple[Job, ...] = ()
    """Refused jobs that run on GPUs which Penstock gave them, such as a job that its user took away from Penstock. They count
    against limits, budgets and turns, and no round acts on them. `Node.gpus_others` counts their GPUs."""
    told_round: int = 0
    """The newest round that has placed or stopped one of the jobs; 0 if no round has, or if the cluster does not know. A store
    without this round is older than the jobs."""
    plain: tuple[PlainJob, ...] = ()
    """Plain jobs that wait for GPUs, for the queue."""
    unspooled: frozenset[JobId] = frozenset()
    """Jobs that were not told to report to the daemon's spool, although the site tells each job where to report."""

    present: Mapping[JobId, Job] = field(init=False, repr=False, compare=False)
    """All jobs, also those that wait for something else than GPUs, and `unseen`."""
    holding: tuple[Job, ...] = field(init=False, repr=False, compare=False)
    """The jobs with a run that holds GPUs, also while the run is being stopped; not those whose run has ended."""

    def __post_init__(self) -> None:
        jobs, runs = (*self.unseen, *self.jobs), (Phase.RUNNING, Phase.STOPPING)
        present = {job.id: job for job in jobs} | {each.job.id: each.job for each in self.waiting}
        holding = (job for job in jobs if job.allocation is not None and job.phase in runs and not job.leaving)
        object.__setattr__(self, "present", present)
        object.__setattr__(self, "holding", tuple(holding))

    def changed(self, before: ClusterState | None) -> list[Job]:
        """The jobs of `jobs` that may differ from what an earlier observation shows.

        A cluster shows the very same object for a job as long as nothing about it changes, so that readers of an observation
        need not look at every job.
        """
        if before is None:
            return list(self.jobs)
        known = set(map(id, before.jobs))
        return [job for job in self.jobs if id(job) not in known]


@dataclass(frozen=True, slots=True)
class Kept:
    """Running jobs keep what they have in this round, whatever the policy would decide."""

    why: str
    """As a sentence."""
    everything: bool = True
    """Whether that includes jobs that a drain or a reservation asks to leave."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round's input. `Policy.decide` reads nothing else, so a saved snapshot decides again to the same plan."""

    round: int
    time_s: float
    """When the cluster was observed, s since 1970."""
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    facts: dict[JobId, JobFacts]
    """What Penstock itself knows about each job. It may also have jobs that are not in `jobs`."""
    refused: tuple[Refusal, ...] = ()
    limits: tuple[GpuLimit, ...] = ()
    ended_gpu_s: dict[JobId, dict[str, float]] = field(default_factory=dict)
    """`JobFacts.attained_gpu_s` of jobs that the cluster stopped reporting a short time ago."""
    cloud: CloudState | None = None
    """The cloud, if the site has one."""
    budgets: tuple[GpuBudget, ...] = ()
    """Budgets of GPU-hours."""
    sharing: SharingState | None = None
    """What the agents report about co-located jobs; None: no job can share GPUs."""
    idle_since_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Node -> since when each of its idle GPUs has been observed idle, s since 1970, the earliest first. Only nodes with a
    job that grows into idle GPUs."""
    partitions: tuple[Partition, ...] = ()
    """The managed partitions; one that is not here is open."""
    kept: Kept | None = None
    """Set if the round is decided again because the plan gate refused the first plan."""
    incumbent: dict[JobId, Configuration] = field(default_factory=dict)
    """Configurations of a recorded plan that a time limit cut short. A replay takes them as they are."""

    moves: MoveBudget | None = None
    """How much exchanges of GPUs between running jobs may cost, or None if the policy alone decides."""

    no_gain: str = ""
    """Why no running job is moved for its own gain or for another running job's, as a sentence, or an empty text."""

    unseen: tuple[Job, ...] = ()
    """Jobs that have their GPUs whatever the policy decides, so that it does not see them; `Node.gpus_others` counts these GPUs.
    In a snapshot of the loop, those of the cluster's state."""

    def only(self, jobs: Iterable[Job]) -> Snapshot:
        """The same snapshot with these jobs instead of its own; they keep their facts."""
        return replace(self, jobs=tuple(jobs))

    @property
    def attained(self) -> dict[JobId, dict[str, float]]:
        """GPU-seconds by GPU type of each job that has held any, also of jobs that ended a short time ago."""
        present = {job: known.attained_gpu_s for job, known in self.facts.items() if known.attained_gpu_s}
        return self.ended_gpu_s | present

    def attained_gpu_s(self, job: JobId) -> dict[str, float]:
        """GPU-seconds that a job has held by GPU type, also of a job that ended a short time ago."""
        known = self.facts.get(job)
        return self.ended_gpu_s.get(job, {}) if known is None else known.attained_gpu_s


HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The cost of the moves of one round that count."""

    time_s: float
    """When they were decided, s since 1970."""
    gpu_s: float
    """GPU-seconds that jobs hold and do not train."""


@dataclass(frozen=True, slots=True)
class MoveBudget:
    """The share of the GPU-time of running jobs that moves may cost in any hour."""

    share: float
    spent: tuple[MoveCost, ...] = ()
    """Of earlier rounds, as far as they still count."""

    def counting(self, now_s: float, running_gpus: int) -> tuple[MoveCost, ...]:
        """The costs that still count: for an hour, and one that is larger than an hour's budget for as many hours as it takes."""
        per_s = self.share * running_gpus
        return tuple(
            each
            for each in self.spent
            if now_s - each.time_s < max(HOUR_S, each.gpu_s / per_s if per_s > 0 else HOUR_S)
        )

    def left(self, now_s: float, running_gpus: int) -> float:
        """GPU-seconds that moves may still cost now."""
        return self.share * running_gpus * HOUR_S - total(self.counting(now_s, running_gpus))


def total(costs: Iterable[MoveCost]) -> float:
    """Their GPU-seconds."""
    return sum(each.gpu_s for each in costs)
