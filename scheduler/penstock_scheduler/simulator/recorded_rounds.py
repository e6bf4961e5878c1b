"""What the recorded rounds of a daemon say about its jobs, its nodes and the GPUs that jobs shared. Only one round is in
memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from penstock_profiles.colocation import Colocation, Pair
from penstock_profiles.estimators import AnyEstimator
from penstock_scheduler.model import Job, JobId, JobUse, Node, Phase, Placement, SharedGpus, SharingState, Snapshot
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.simulator.run import Tick


@dataclass(slots=True)
class RecordedJob:
    """What the rounds say about a job."""

    job: Job
    model: AnyEstimator
    restart_cost_s: float
    gone_s: float | None = None
    """First round without it; None: it is in the last one."""
    held: list[tuple[float, float, Placement]] = field(default_factory=list)
    """(from, until, where) for each time that it held GPUs."""
    use: JobUse | None = None
    """What the agents last reported about it; None: nothing."""
    idle_s: float = 0.0
    """Time in which it held GPUs that it shared, and was suspended. Agents tell what ran at the end of a slice, which
    may make up for earlier rounds. Until then this may be below 0."""
    beside_s: dict[tuple[str, JobId], float] = field(default_factory=dict)
    """(GPU type, another job) -> time in which it ran beside that job."""
    opportunistic_s: float = 0.0
    """Time in which it ran beside a guaranteed job."""

    def hold(self, now_s: float) -> None:
        """Note what the job holds in a round: until the next one, if it then still does."""
        job = self.job
        if job.allocation is None or job.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        if self.held and self.held[-1][2] == job.allocation:
            self.held[-1] = (self.held[-1][0], now_s, job.allocation)
        else:
            self.held.append((now_s, now_s, job.allocation))

    def share(self, state: SharingState, last: Snapshot | None, now_s: float) -> None:
        """Note what the job did since the last round if it shared its GPUs then and still does."""
        job, use, before = self.job, state.uses[self.job.id], self.use
        self.use = (
            use if use.utilisation is not None or before is None else replace(use, utilisation=before.utilisation)
        )
        group = next((group for group in _crowded(state) if job.id in group.jobs), None)
        if group is None or last is None or before is None or not before.ran_s or job.allocation is None:
            return
        if len(self.held) == 0 or self.held[-1][0] > last.time_s:  # it came to these GPUs since then
            return
        ran_s = max(use.ran_s - before.ran_s, 0.0)
        self.idle_s += now_s - last.time_s - ran_s
        pack = next(pack for pack in group.packs if job.id in pack.jobs)
        if pack.guaranteed not in (None, job.id):
            self.opportunistic_s += ran_s
        elif pack.guaranteed is None:
            for other in pack.jobs:
                if other != job.id:
                    beside = (job.allocation.gpu_type, other)
                    self.beside_s[beside] = self.beside_s.get(beside, 0.0) + ran_s


class RecordedRounds:
    """All rounds of a record, which `add` takes in ascending order."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, RecordedJob] = {}
        self.before: set[JobId] = set()
        """Jobs that held GPUs, or had held some, when the record begins."""
        self.times: list[float] = []
        """Time of each round, s since 1970."""
        self.ticks: list[Tick] = []
        self.gpu_memory_mb: dict[str, int] = {}
        """GPU type -> memory of one GPU, MB, as agents reported it."""
        self.gpu_seconds = 0.0
        self.shared = False
        """Whether any jobs shared GPUs."""
        self.last: Snapshot | None = None
        self._pairs: dict[tuple[str, str, str], Pair] = {}
        self._others: dict[str, list[int]] = {}
        """Node -> GPUs that jobs of others held in each round."""

    @property
    def pairs(self) -> Colocation:
        """What was last known about pairs of jobs."""
        return Colocation(self._pairs)

    def add(self, record: RoundRecord) -> None:
        """Take in the next round."""
        snapshot, now_s = record.snapshot, record.snapshot.time_s
        here = {job.id for job in snapshot.jobs}
        for job_id, known in self.jobs.items():
            if job_id not in here and known.gone_s is None:
                known.gone_s = now_s
        for node in snapshot.nodes:
            self._others.setdefault(node.name, []).append(node.gpus_others)
        for job in snapshot.jobs:
            self._add_job(job, snapshot)
        if (state := snapshot.sharing) is not None:
            self.shared |= any(_crowded(state))
            self._pairs |= {(p.gpu_type, p.mine, p.theirs): Pair(share=p.share) for p in state.pairs}
            self.gpu_memory_mb |= state.gpu_memory_mb
            for job_id in here & state.uses.keys():
                self.jobs[job_id].share(state, self.last, now_s)
        self.ticks.append(_tick(snapshot, now_s))
        if self.last is not None:
            self.gpu_seconds += self.ticks[-2].gpus_held * (now_s - self.ticks[-2].time_s)
        self.times.append(now_s)
        self.last = snapshot

    def _add_job(self, job: Job, snapshot: Snapshot) -> None:
        if not self.times and (job.allocation is not None or job.restarts):
            self.before.add(job.id)
        facts = snapshot.facts[job.id]
        known = self.jobs.setdefault(job.id, RecordedJob(job, facts.model, facts.restart_cost_s))
        known.job, known.model, known.gone_s = job, facts.model, None
        known.hold(snapshot.time_s)

    def nodes(self, last: Snapshot) -> tuple[Node, ...]:
        """The nodes of the last round, all in service, with as many GPUs held by others as in the mean of all rounds."""
        return tuple(
            replace(
                node,
                may_start=True,
                leave=None,
                reservation="",
                gpus_others=min(round(fmean(self._others[node.name])), node.gpus),
            )
            for node in last.nodes
        )


def _crowded(state: SharingState) -> Iterator[SharedGpus]:
    """Groups of several jobs."""
    return (group for group in state.groups if len(group.jobs) > 1)


def _tick(snapshot: Snapshot, now_s: float) -> Tick:
    jobs: Sequence[Job] = snapshot.jobs
    running = [job.allocation for job in jobs if job.phase is Phase.RUNNING and job.allocation is not None]
    between = sum(job.phase in (Phase.STARTING, Phase.STOPPING) for job in jobs)
    gpus = sum(held.gpus for held in running)
    if snapshot.sharing is not None:
        own = {job.id: job.allocation.gpus for job in jobs if job.phase is Phase.RUNNING and job.allocation is not None}
        for group in _crowded(snapshot.sharing):
            together = sum(own.get(job, 0) for job in group.jobs)
            gpus -= max(together - group.gpus, 0)
    return Tick(now_s, len(jobs), len(running), between, len(jobs) - len(running) - between, gpus, 0.0, decided=True)
