"""Jobs that share the GPUs of a node, in packs and in time slices.

The jobs of a *pack* run at the same time on the same GPUs. Packs that do not fit on the GPUs together run in time
slices. A plan describes each set of shared GPUs and its packs as a `SharedGpus`. Each co-located job has an assignment
to that node, as any other job has; the GPUs of one `SharedGpus` count once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_scheduler.model.job import JobId


@dataclass(frozen=True, slots=True)
class Limit:
    """Most that one job of a pack may use."""

    compute: float = 1.0
    """Share of the time, in [0, 1], in which the job may train: a duty cycle between its steps."""
    memory_mb: int = 0
    """Memory on each of the job's GPUs, MB; 0: no limit."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Jobs that run at the same time on the same GPUs of one node. Most packs have one job."""

    jobs: tuple[JobId, ...]
    gpus: int = 1
    """Number of GPUs. A job uses as many of them as its placement says: those that the fewest other jobs of the pack
    use."""
    priority: int = 0
    """A pack is never suspended for a pack of lower priority."""
    guaranteed: JobId | None = None
    """The job that keeps the speed that it has alone; None: no job. To that end, the node adjusts the compute share of the
    other jobs between 0 and their limits (`sharing.control`)."""
    limits: tuple[Limit, ...] = ()
    """In the order of `jobs`; empty: no limits."""
    search: str = ""
    """Name of the search to which all of its jobs belong, as trials; "": none."""
    rank: int = 0
    """Among packs of one search: a pack that is due gives its time slice to the pack of lower rank."""

    def limit(self, job: JobId) -> Limit:
        """Limit of one of the jobs."""
        return self.limits[self.jobs.index(job)] if self.limits else Limit()


@dataclass(frozen=True, slots=True)
class SharedGpus:
    """GPUs of a node and the packs that use them: all at once if they fit, else in time slices."""

    node: str
    gpus: int
    packs: tuple[Pack, ...]
    """In the order of their arrival."""
    slice_s: float = 60.0
    """Length of a time slice, s, from when its packs have their GPUs. Without time slices: length of a measurement."""

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """Jobs of all packs."""
        return tuple(job for pack in self.packs for job in pack.jobs)

    @property
    def wanted(self) -> int:
        """Number of GPUs that the packs need together."""
        return sum(pack.gpus for pack in self.packs)

    @property
    def time_sliced(self) -> bool:
        """Whether the packs run in time slices, because they do not fit on the GPUs together."""
        return self.wanted > self.gpus


@dataclass(frozen=True, slots=True)
class JobUse:
    """What the nodes have observed of a job."""

    kind: str
    """Jobs of one kind behave alike beside other jobs: see `pairs.kind_of`. A job of unknown kind is its own kind."""
    utilisation: float | None = None
    """Utilisation of its GPUs when it runs alone, in [0, 1]; None: it has not yet run alone for a time slice."""
    memory_mb: int = 0
    """Most memory that it has used on each of its GPUs, MB; 0: unknown."""
    ran_s: float = 0.0
    """Time for which it has trained: it held GPUs, had started, and was not suspended."""
    moved_s: float | None = None
    """When it last started, moved, or entered or left a pack, s since 1970; None: never."""
    results: tuple[tuple[float, float], ...] = ()
    """(seconds trained, metric) as a trial reports them. Higher metrics are better."""
    answers: bool | None = None
    """Whether it answers the agents of its nodes, so that a share and limits can be imposed on it; None: unknown."""

    @property
    def profiled(self) -> bool:
        """Whether it has run alone, so that its speed alone is known."""
        return self.utilisation is not None


@dataclass(frozen=True, slots=True)
class PackSeen:
    """Speeds that were measured in the last time slice of a pack."""

    jobs: tuple[JobId, ...]
    gpu_type: str
    speeds: tuple[float, ...]
    """Each job's throughput relative to its throughput alone; 0: it could not run."""


@dataclass(frozen=True, slots=True)
class KnownPair:
    """Known effect of one kind of job on another on one GPU; see `penstock_profiles.colocation`."""

    gpu_type: str
    mine: str
    theirs: str
    share: float
    """Throughput of `mine` beside `theirs`, relative to its throughput alone."""


@dataclass(frozen=True, slots=True)
class SharingState:
    """What the nodes' agents report. In a snapshot without it, no GPU can be shared."""

    groups: tuple[SharedGpus, ...] = ()
    """Groups as the agents run them now."""
    uses: dict[JobId, JobUse] = field(default_factory=dict)
    seen: tuple[PackSeen, ...] = ()
    """Measurements since the last snapshot."""
    pairs: tuple[KnownPair, ...] = ()
    """Pairs of the kinds that are present now: measured, or from a table."""
    gpu_memory_mb: dict[str, int] = field(default_factory=dict)
    """Memory of one GPU by GPU type, MB. Unknown types are absent."""

    def use(self, job: JobId) -> JobUse:
        """What the nodes have observed of a job. For a job that no agent has observed yet, all values are unknown."""
        return self.uses.get(job) or JobUse(job)
