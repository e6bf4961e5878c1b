"""A daemon's recorded history as a workload: its jobs, what they asked for, what they did, and what was known about
them.

The daemon's last models count the work: a job's work is what its model predicts for the time and the GPUs that the job
really had. So the same job on the same GPUs takes the same time again, even if its model is wrong about other GPUs.
Work that was done twice, because a node failed, counts once. For a job that had not ended, its own reports say how much
work was left.

Where jobs shared GPUs, a job did no work while it was suspended, which the node's agent reports. In a pack it did its
measured share. How fast an opportunistic job was beside a guaranteed job is not recorded: such a job is left out.

For a policy that lets jobs share GPUs, a job's use of a GPU is what an agent observed or, without an agent, what the
job reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median

from penstock_profiles.colocation import Colocation, Pair
from penstock_profiles.estimators import AnyEstimator, LinearEstimator
from penstock_profiles.wire import CPU, Ended, Observation, Report, Started
from penstock_scheduler.model import (
    Configuration,
    Job,
    JobFacts,
    JobId,
    JobUse,
    Node,
    Phase,
    Placement,
    Share,
    SharedGpus,
    SharingState,
    Snapshot,
)
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies.common import rate
from penstock_scheduler.simulator.jobs import SimulatedJob, SimulatedRun
from penstock_scheduler.simulator.learning import Donated
from penstock_scheduler.simulator.run import Tick
from penstock_scheduler.simulator.truth import EstimatedJob
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob


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


LEAST_UTILISATION = 0.001
"""Utilisation of a job with GPUs that were observed to do nothing: 0 is not valid in a workload."""


@dataclass(frozen=True, slots=True)
class RecordedHistory:
    """A daemon's recorded history. Times are in seconds since `start_s`."""

    start_s: float
    """When it begins, s since 1970."""
    end_s: float
    nodes: tuple[Node, ...]
    """The cluster of the last round with all nodes in service, and the mean number of GPUs that other jobs held."""
    workload: Workload
    """Its jobs. Their work is the time that they took; `truths` has the work itself."""
    truths: Mapping[JobId, EstimatedJob]
    """Speed and work of each job, by the model that the daemon had last."""
    lived: tuple[SimulatedJob, ...]
    """What really became of them, in the order of the workload."""
    ticks: tuple[Tick, ...]
    round_s: float
    """Median time between two rounds."""
    notes: tuple[str, ...]
    """What the recorded history does not tell, in sentences."""
    pairs: Colocation
    """What was last known about pairs of jobs."""
    gpu_memory_mb: Mapping[str, int]
    """Memory of one GPU by GPU type, MB, as agents reported it."""
    gpu_seconds: float | None
    """GPU-seconds that jobs held. A shared GPU counts once. None: no jobs shared GPUs."""

    @property
    def ended(self) -> frozenset[JobId]:
        """Jobs that ended while the record was kept. Only their durations are known."""
        return frozenset(job.id for job in self.lived if job.finish_s is not None)


@dataclass(slots=True)
class _Reading:
    """The jobs of a record that can be simulated, and how many cannot."""

    lived: list[SimulatedJob] = field(default_factory=list)
    requested: dict[JobId, WorkloadJob] = field(default_factory=dict)
    left_out: int = 0
    """Jobs that did not run, or that had not ended and reported no remaining work."""
    unsure: int = 0
    """Jobs that ended without saying that they were complete."""
    cut: int = 0
    """Jobs that had not ended."""
    unknown_share: int = 0
    """Jobs that shared GPUs at a speed that is not recorded."""


def recorded_history(records: Iterable[RoundRecord], reports: Iterable[Report]) -> RecordedHistory:
    """Read a record.

    Args:
        records: ascending; only one is held at a time.
        reports: of the jobs, in any order.

    Raises:
        ConfigError: nothing in it can be simulated.
    """
    rounds = RecordedRounds()
    for record in records:
        rounds.add(record)
    last, times = rounds.last, rounds.times
    if last is None:
        raise ConfigError("the store has no rounds: nothing has happened yet that could be replayed")
    by_job: dict[JobId, list[Report]] = {}
    for report in reports:
        if report.job_id in rounds.jobs and report.job_id not in rounds.before:
            by_job.setdefault(report.job_id, []).append(report)
    submitted_s = (known.job.submit_s for job_id, known in rounds.jobs.items() if job_id not in rounds.before)
    start_s = min([times[0], *submitted_s])
    reading = _read_jobs(rounds, by_job, start_s)
    if not reading.lived:
        raise ConfigError("the store's rounds have no job that came and ran while they were kept: nothing to replay")
    return RecordedHistory(
        start_s=start_s,
        end_s=times[-1] - start_s,
        nodes=(nodes := rounds.nodes(last)),
        workload=Workload("the record", tuple(reading.requested[job.id] for job in reading.lived)),
        truths={job.id: job.truth for job in reading.lived if isinstance(job.truth, EstimatedJob)},
        lived=tuple(reading.lived),
        ticks=tuple(replace(tick, time_s=tick.time_s - start_s) for tick in rounds.ticks),
        round_s=median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 60.0,
        notes=_notes(rounds, reading, nodes, last),
        pairs=rounds.pairs,
        gpu_memory_mb=rounds.gpu_memory_mb,
        gpu_seconds=rounds.gpu_seconds if rounds.shared else None,
    )


def _read_jobs(rounds: RecordedRounds, reports: Mapping[JobId, Sequence[Report]], start_s: float) -> _Reading:
    """The jobs that came while the record was kept, in the order of their submission."""
    reading, pairs = _Reading(), rounds.pairs
    for job_id, known in rounds.jobs.items():
        if job_id in rounds.before:
            continue
        of_job = reports.get(job_id, [])
        part = _part(known, rounds.jobs, pairs)
        if part is None:
            reading.unknown_share += 1
            continue
        found = _live(known, of_job, start_s, part)
        if found is None:
            reading.left_out += 1
            continue
        job, complete = found
        reading.unsure += job.finish_s is not None and not complete
        reading.cut += job.finish_s is None
        reading.lived.append(job)
        reading.requested[job.id] = _requested(job, known.use, of_job)
    reading.lived.sort(key=lambda job: job.submit_s)
    return reading


def _notes(rounds: RecordedRounds, reading: _Reading, nodes: Sequence[Node], last: Snapshot) -> tuple[str, ...]:
    """What the record cannot tell, in sentences."""
    sentences = (
        (len(rounds.before), "held GPUs already, or had, when the record begins: they are left out"),
        (
            reading.left_out,
            "never ran, never had a time slice on shared GPUs, or had not ended and do not tell how much is left: they are "
            "left out",
        ),
        (
            reading.cut,
            "had not ended when the record ends: they run on in the simulation for the work that they told is left, but "
            "only jobs that ended count in the figures",
        ),
        (
            reading.unknown_share,
            "shared GPUs, and it is not recorded how fast they were beside the others: they are left out, and the "
            "simulated cluster is emptier than the real one was",
        ),
        (
            reading.unsure,
            "ended without saying that they were complete, as if cancelled: they end at the same work again",
        ),
    )
    notes = [f"{_jobs(count)} {text}." for count, text in sentences if count]
    if any(node.gpus_others for node in nodes):
        notes.append("GPUs that jobs of others held are taken to be held all the time, as many as in the mean.")
    if last.limits:
        notes.append("The site's limits on users, accounts and QOS are not applied.")
    if rounds.shared:
        notes.append(
            "Jobs shared GPUs while it was recorded: its figures of GPU-hours, queue and feedback count a suspended job as "
            "one that has GPUs."
        )
    return tuple(notes)


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _part(known: RecordedJob, jobs: Mapping[JobId, RecordedJob], pairs: Colocation) -> float | None:
    """What a job did of what it would have done alone on its GPUs, in [0, 1]; None: unknown."""
    if known.opportunistic_s:
        return None
    held_s = sum(end - begin for begin, end, _ in known.held)
    lost_s = max(known.idle_s, 0.0)
    for (gpu_type, other), ran_s in known.beside_s.items():
        theirs = jobs[other].use if other in jobs else None
        mine = known.use
        if mine is None or theirs is None:
            return None
        share = pairs.share(gpu_type, mine.kind, theirs.kind)
        if share is None and mine.utilisation is not None and theirs.utilisation is not None:
            share = 1 / max(mine.utilisation + theirs.utilisation, 1.0)
        if share is None:
            return None
        lost_s += ran_s * (1 - min(share, 1.0))
    return 1 - lost_s / max(held_s, lost_s) if lost_s else 1.0


@dataclass(slots=True)
class _Told:
    """What a job's reports tell of its runs."""

    spans: list[tuple[float, float, Placement]] = field(default_factory=list)
    """Begin and end of each run, s, and where it ran."""
    gross: float = 0.0
    """Progress of all runs, with what was done twice."""
    progress: float = 0.0
    total: float | None = None
    completed_s: float | None = None
    """When it reported that it was complete."""


def _told(reports: Sequence[Report]) -> _Told:
    runs: dict[int, list[Report]] = {}
    for report in sorted(reports, key=lambda report: (report.epoch, report.sequence)):
        runs.setdefault(report.epoch, []).append(report)
    told = _Told()
    for run in runs.values():
        started = next((report.body for report in run if isinstance(report.body, Started)), None)
        if started is None:
            continue
        told.spans.append((run[0].time_s, run[-1].time_s, _where(started)))
        reached = max(r.body.progress for r in run if isinstance(r.body, Started | Observation | Ended))
        told.gross = told.gross + reached - started.progress
        told.progress, told.total = max(told.progress, reached), started.total or told.total
        for report in run:
            if isinstance(report.body, Ended) and report.body.outcome == "completed":
                told.completed_s = report.time_s
                break
    return told


def _live(
    known: RecordedJob, reports: Sequence[Report], start_s: float, part: float
) -> tuple[SimulatedJob, bool] | None:
    """What became of a job, and whether it reported at its end that it was complete; None: unknown.

    `part`: the share that it did of what it would have done alone on its GPUs.
    """
    told = _told(reports)
    spans, gross, progress, total, completed_s = told.spans, told.gross, told.progress, told.total, told.completed_s
    if not spans:
        spans = list(known.held)
        if spans and known.gone_s is not None:
            spans[-1] = (spans[-1][0], known.gone_s, spans[-1][2])
    done = part * sum(_rate(known.model, where) * (end - begin) for begin, end, where in spans)
    finish_s = completed_s if completed_s is not None else known.gone_s
    if finish_s is None and (total is None or gross <= 0):
        return None
    if done <= 0:
        return None
    wanted = progress if finish_s is not None else max(total or 0.0, progress)
    work = done * wanted / gross if gross > 0 else done
    job = SimulatedJob(
        id=known.job.id,
        name=known.job.name,
        spec=known.job.spec,
        truth=EstimatedJob(known.model, work, known.restart_cost_s),
        submit_s=known.job.submit_s - start_s,
        user=known.job.user,
        account=known.job.account,
        time_limit_s=known.job.time_limit_s,
        progress=work if finish_s is not None else min(done, work),
        starts=len(spans),
        finish_s=None if finish_s is None else finish_s - start_s,
    )
    for begin, end, where in spans:
        each = SimulatedRun(begin - start_s, end - start_s, where, begin - start_s, 0.0)
        each.rates.append((each.start_s, part * _rate(known.model, where)))
        job.runs.append(each)
    return job, completed_s is not None


def _where(started: Started) -> Placement:
    shares = tuple(Share(node, len(gpus)) for node, gpus in sorted(started.gpu_ids.items()))
    return Placement(started.gpu_type, "", shares)


def _rate(model: AnyEstimator, where: Placement) -> float:
    return rate(model, where.configuration)


def _requested(job: SimulatedJob, use: JobUse | None, reports: Sequence[Report]) -> WorkloadJob:
    """The job as its user submitted it, with what is known of it beside others: by an agent, or else by its own
    reports."""
    told = [report.body for report in reports if isinstance(report.body, Observation) and report.body.gpu_type != CPU]
    busy = [(each.utilisation, each.steps * each.step_time_s) for each in told if each.utilisation is not None]
    used = sum(share * seconds for share, seconds in busy) / sum(seconds for _, seconds in busy) if busy else None
    memory_mb = max((each.device_memory_mb or each.memory_mb or 0.0 for each in told), default=0.0)
    if use is not None:
        used = used if use.utilisation is None else use.utilisation
        memory_mb = use.memory_mb or memory_mb
    trained_s = sum(run.end_s - run.start_s for run in job.runs)
    return WorkloadJob(
        id=job.id,
        submit_s=job.submit_s,
        gpus=job.spec.max_gpus,
        spec=job.spec,
        name=job.name,
        user=job.user,
        account=job.account,
        duration_s=max(trained_s, 1e-3),
        time_limit_s=job.time_limit_s,
        kind=use.kind if use is not None else None,
        gpu_utilisation=None if used is None else min(max(used, LEAST_UTILISATION), 1.0),
        gpu_mem_mb=memory_mb or None,
    )


class RecordedTruth:
    """The truth about the jobs of a record, in the place of `Truth`."""

    def __init__(self, truths: Mapping[JobId, EstimatedJob]) -> None:
        self._truths = truths

    def of(self, job: WorkloadJob) -> EstimatedJob:
        """See `Truth.of`."""
        return self._truths[job.id]

    def check(self, workload: Workload) -> None:
        """Nothing is unknown."""


class RecordedModels:
    """The `ModelSource` of a replay: what the daemon knew of each job last."""

    def __init__(self, truths: Mapping[JobId, EstimatedJob]) -> None:
        self._truths = truths

    def facts(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> dict[JobId, JobFacts]:
        """See `ports.ModelSource`."""
        known = {}
        for job in jobs:
            truth, held = self._truths[job.id], 0 if job.allocation is None else job.allocation.gpus
            unscaled = isinstance(truth.estimator, LinearEstimator)
            known[job.id] = JobFacts(truth.estimator, truth.restart_s, held if unscaled else None)
        return known


def on_types(
    truths: Mapping[JobId, EstimatedJob], nodes: Sequence[Node], like: Mapping[str, tuple[str, float]]
) -> dict[JobId, EstimatedJob]:
    """The same jobs with the speed on GPU types that are `like` another type, on nodes of as many GPUs.

    Args:
        truths: by job.
        nodes: of the record, for the sizes of the types that others are like.
        like: new type -> (type of the record, relative speed).

    Raises:
        ConfigError: `like` names a type that is not in the record.
    """
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes[node.gpu_type] = max(node.gpus, sizes.get(node.gpu_type, 0))
    for new, (donor, _) in like.items():
        if donor not in sizes:
            raise ConfigError(f"--like {new}={donor}: the record has no {donor}; it has {', '.join(sorted(sizes))}")
    donors = {new: (donor, faster, sizes[donor]) for new, (donor, faster) in like.items()}

    def known(truth: EstimatedJob) -> EstimatedJob:
        if not donors or isinstance(truth.estimator, LinearEstimator):
            return truth
        return replace(truth, estimator=Donated(truth.estimator, donors))  # type: ignore[arg-type]  # an Estimator

    return {job: known(truth) for job, truth in truths.items()}


def unknown_types(truths: Mapping[JobId, EstimatedJob], gpu_types: Iterable[str]) -> list[str]:
    """GPU types on which the speed of no job is known."""
    one = [(truth.estimator, gpus) for truth in truths.values() for gpus in (1, 2, 4, 8)]
    return [
        gpu_type
        for gpu_type in gpu_types
        if not any(
            math.isfinite(speed := rate(model, Configuration(1, gpus, gpu_type))) and speed > 0 for model, gpus in one
        )
    ]
