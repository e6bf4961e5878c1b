"""Jobs that share GPUs of a node: packs run at the same time on the same GPUs, and packs take turns.

A plan says it by `SharedGpus`: which of a node's GPUs are shared, and by whom. A job that shares has an assignment like any
other, to that node; the GPUs of all packs of one `SharedGpus` count once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_scheduler.model.job import JobId


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that one job of a pack may use."""

    compute: float = 1.0
    """Part of the time, in [0, 1], in which it may train: a duty cycle between its steps."""
    memory_mb: int = 0
    """Memory on each of its GPUs, MB; 0: no limit."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Jobs that run at the same time on the same GPUs of one node; most often one job."""

    jobs: tuple[JobId, ...]
    gpus: int = 1
    """GPUs of the pack. A job uses as many of them as its placement says, those that the fewest others use."""
    priority: int = 0
    """The higher one is never suspended for the lower."""
    guaranteed: JobId | None = None
    """The job that keeps the speed which it would have alone: the node moves the compute of the others so that it does, between 0
    and their limits (`sharing.control`). None: nobody has that promise."""
    limits: tuple[Limit, ...] = ()
    """In the order of the jobs; empty: nobody is limited."""
    search: str = ""
    """Whose trials its jobs are; "": of no search, or not all of one."""
    rank: int = 0
    """Where packs of one search take turns: the lower one takes the place of a higher one that is due."""

    def limit(self, job: JobId) -> Limit:
        """The limit of one of the jobs."""
        return self.limits[self.jobs.index(job)] if self.limits else Limit()


@dataclass(frozen=True, slots=True)
class SharedGpus:
    """GPUs of a node that are reserved from the cluster, for packs that use them: all at once if they fit, or else in turns."""

    node: str
    gpus: int
    packs: tuple[Pack, ...]
    """In the order in which they came."""
    slice_s: float = 60.0
    """Length of a turn from when those whose turn it is have their GPUs; where nobody takes turns, of a measurement."""

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """All who share."""
        return tuple(job for pack in self.packs for job in pack.jobs)

    @property
    def wanted(self) -> int:
        """GPUs that the packs want; a pack wants its GPUs once."""
        return sum(pack.gpus for pack in self.packs)

    @property
    def turns(self) -> bool:
        """Whether packs take turns."""
        return self.wanted > self.gpus


@dataclass(frozen=True, slots=True)
class JobUse:
    """What the nodes have seen of a job."""

    kind: str
    """Jobs of one kind run alike beside others: see `pairs.kind_of`; one that nobody has told of is its own."""
    utilisation: float | None = None
    """Part of its GPUs that it uses alone, in [0, 1]; None: it has not run alone for a slice yet."""
    memory_mb: int = 0
    """Most memory that it has used on each of its GPUs, MB; 0: not known."""
    ran_s: float = 0.0
    """Time in which it held GPUs, had started, and was not suspended."""
    moved_s: float | None = None
    """When it was last started, moved, packed or taken out of a pack, s since 1970; None: never."""
    results: tuple[tuple[float, float], ...] = ()
    """(seconds that it had run, metric), the higher the better, of a trial that reports them."""
    answers: bool | None = None
    """Whether it speaks with the agents of its nodes, and so can be held to a share and to limits; None: not known yet."""

    @property
    def profiled(self) -> bool:
        """Whether it has run alone, so that it is known how fast that is."""
        return self.utilisation is not None


@dataclass(frozen=True, slots=True)
class PackSeen:
    """What the last slice showed of a pack that ran in it."""

    jobs: tuple[JobId, ...]
    gpu_type: str
    speeds: tuple[float, ...]
    """Each job's throughput over its throughput alone; 0: it could not run."""


@dataclass(frozen=True, slots=True)
class KnownPair:
    """What is known of one kind of job beside another on one GPU; see `penstock_profiles.colocation`."""

    gpu_type: str
    mine: str
    theirs: str
    share: float
    """Throughput of `mine` beside `theirs` over its throughput alone."""


@dataclass(frozen=True, slots=True)
class SharingState:
    """What the nodes' agents tell. A snapshot without it is of a cluster on which no GPU can be shared."""

    groups: tuple[SharedGpus, ...] = ()
    """As they are carried out now."""
    uses: dict[JobId, JobUse] = field(default_factory=dict)
    seen: tuple[PackSeen, ...] = ()
    """Since the last look."""
    pairs: tuple[KnownPair, ...] = ()
    """Of kinds that are there now: measured, or from a table."""
    gpu_memory_mb: dict[str, int] = field(default_factory=dict)
    """Memory of one GPU by type; absent: not known."""

    def use(self, job: JobId) -> JobUse:
        """What was seen of a job; of one that the agents have not seen yet, nothing."""
        return self.uses.get(job) or JobUse(job)
