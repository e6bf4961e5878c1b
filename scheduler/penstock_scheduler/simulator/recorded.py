"""A daemon's own record as something to simulate: its jobs, what they asked for, what they did, and what was known of
them.

Work is counted by the models that the daemon had last: what each says was done in the time and on the GPUs that the job
really had. So the same job on the same GPUs takes the same time again, however wrong its model is about others. Work
that was done twice, because a node failed, counts once; of a job that had not ended, the rest is what its own reports
say was left.

Where jobs shared GPUs, a job did no work while it was suspended, which its node's agent tells, and in a pack its share
of it, as it was measured. How fast a guest beside a guaranteed job was is not recorded: it is left out.

What a job uses of a GPU, for a policy that lets jobs share, is what an agent has seen of it, or else what it told in
its reports.
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
from penstock_scheduler.errors import ConfigError
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
from penstock_scheduler.policies.common import rate
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.simulator.jobs import SimulatedJob, SimulatedRun
from penstock_scheduler.simulator.learning import Donated
from penstock_scheduler.simulator.run import Tick
from penstock_scheduler.simulator.truth import EstimatedJob
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob

LEAST_UTILISATION = 0.001
"""Of a job whose GPUs were seen to do nothing: a workload has no 0."""


@dataclass(frozen=True, slots=True)
class RecordedHistory:
    """What a record tells. Times in s since `start_s`."""

    start_s: float
    """When it begins, s since 1970."""
    end_s: float
    nodes: tuple[Node, ...]
    """The cluster as of the last round, whole, with the GPUs that jobs of others held in the mean."""
    workload: Workload
    """Its jobs. Of their work it knows only the time that it took; `truths` has it."""
    truths: Mapping[JobId, EstimatedJob]
    """How fast each job is and how much it is, by the model that the daemon had last."""
    lived: tuple[SimulatedJob, ...]
    """What really became of them, in the order of the workload."""
    ticks: tuple[Tick, ...]
    round_s: float
    """From one round to the next, in the median."""
    notes: tuple[str, ...]
    """What the record cannot tell, in sentences."""
    pairs: Colocation
    """What was known of pairs of jobs last, of those that were there together."""
    gpu_memory_mb: Mapping[str, int]
    """Memory of one GPU by type, as agents told it."""
    gpu_seconds: float | None
    """GPUs that jobs held, times how long, one that they shared counting once; None: nobody shared any."""

    @property
    def ended(self) -> frozenset[JobId]:
        """Jobs that ended while it was kept: only of these it knows how long they took."""
        return frozenset(job.id for job in self.lived if job.finish_s is not None)


@dataclass(slots=True)
class _RecordedJob:
    """What the rounds say of a job."""

    job: Job
    model: AnyEstimator
    restart_cost_s: float
    gone_s: float | None = None
    """First round without it; None: it is in the last one."""
    held: list[tuple[float, float, Placement]] = field(default_factory=list)
    use: JobUse | None = None
    """By the agents, last; None: they have told nothing."""
    idle_s: float = 0.0
    """Time in which it held GPUs that it shared, and was suspended. What ran is told when a slice ends, and may make up
    for the rounds before: in between this may be below 0."""
    beside_s: dict[tuple[str, JobId], float] = field(default_factory=dict)
    """(GPU type, another job) -> time in which it ran beside that one."""
    guest_s: float = 0.0
    """Time in which it ran beside a guaranteed job."""


def recorded_history(rounds: Iterable[RoundRecord], reports: Iterable[Report]) -> RecordedHistory:
    """Read a record.

    Args:
        rounds: ascending; only one is held at a time.
        reports: of the jobs, in any order.

    Raises:
        ConfigError: nothing in it can be simulated.
    """
    seen: dict[JobId, _RecordedJob] = {}
    before: set[JobId] = set()
    times: list[float] = []
    others: dict[str, list[int]] = {}
    ticks: list[Tick] = []
    pairs: dict[tuple[str, str, str], Pair] = {}
    gpu_memory_mb: dict[str, int] = {}
    gpu_s, shared = 0.0, False
    last: Snapshot | None = None
    record: RoundRecord | None = None
    for record in rounds:
        snapshot, now_s = record.snapshot, record.snapshot.time_s
        here = {job.id for job in snapshot.jobs}
        for job_id, known in seen.items():
            if job_id not in here and known.gone_s is None:
                known.gone_s = now_s
        for node in snapshot.nodes:
            others.setdefault(node.name, []).append(node.gpus_others)
        for job in snapshot.jobs:
            if not times and (job.allocation is not None or job.restarts):
                before.add(job.id)
            facts = snapshot.facts[job.id]
            known = seen.setdefault(job.id, _RecordedJob(job, facts.model, facts.restart_cost_s))
            known.job, known.model, known.gone_s = job, facts.model, None
            _hold(known.held, job, now_s)
        if (state := snapshot.sharing) is not None:
            shared |= any(_crowded(state))
            pairs |= {(p.gpu_type, p.mine, p.theirs): Pair(share=p.share) for p in state.pairs}
            gpu_memory_mb |= state.gpu_memory_mb
            for job_id in here & state.uses.keys():
                _share(seen[job_id], state, last, now_s)
        ticks.append(_tick(snapshot, now_s))
        gpu_s += ticks[-2].gpus_held * (now_s - ticks[-2].time_s) if last is not None else 0.0
        times.append(now_s)
        last = snapshot
    if record is None:
        raise ConfigError("the store has no rounds: nothing has happened yet that could be replayed")
    by_job: dict[JobId, list[Report]] = {}
    for report in reports:
        if report.job_id in seen and report.job_id not in before:
            by_job.setdefault(report.job_id, []).append(report)
    start_s = min([times[0], *(known.job.submit_s for job_id, known in seen.items() if job_id not in before)])
    lived: list[SimulatedJob] = []
    asked: dict[JobId, WorkloadJob] = {}
    together = Colocation(pairs)
    left_out = unsure = cut = guests = 0
    for job_id, known in seen.items():
        if job_id in before:
            continue
        part = _part(known, seen, together)
        if part is None:
            guests += 1
            continue
        found = _live(known, by_job.get(job_id, []), start_s, times[-1], part)
        if found is None:
            left_out += 1
            continue
        one, said_so = found
        unsure += one.finish_s is not None and not said_so
        cut += one.finish_s is None
        lived.append(one)
        asked[one.id] = _asked(one, known.use, by_job.get(job_id, []))
    lived.sort(key=lambda job: job.submit_s)
    if not lived:
        raise ConfigError("the store's rounds have no job that came and ran while they were kept: nothing to replay")
    nodes = tuple(
        replace(node, usable=True, reservation="", gpus_others=min(round(fmean(others[node.name])), node.gpus))
        for node in record.snapshot.nodes
    )
    sentences = (
        (len(before), "held GPUs already, or had, when the record begins: they are left out"),
        (
            left_out,
            "never ran, never had a turn on shared GPUs, or had not ended and do not tell how much is left: they are left out",
        ),
        (
            cut,
            "had not ended when the record ends: they run on in the simulation for the work that they told is left, but only "
            "jobs that ended count in the figures",
        ),
        (
            guests,
            "shared GPUs, and it is not recorded how fast they were beside the others: they are left out, and the simulated "
            "cluster is emptier than it was",
        ),
        (unsure, "ended without saying that they were complete, as if cancelled: they end at the same work again"),
    )
    notes = [f"{_jobs(count)} {text}." for count, text in sentences if count]
    if any(node.gpus_others for node in nodes):
        notes.append("GPUs that jobs of others held are taken to be held all the time, as many as in the mean.")
    if record.snapshot.limits:
        notes.append("The site's limits on users, accounts and QOS are not applied.")
    if shared:
        notes.append(
            "Jobs shared GPUs while it was recorded: in its figures of GPU-hours, queue and feedback who is suspended has GPUs."
        )
    return RecordedHistory(
        start_s=start_s,
        end_s=times[-1] - start_s,
        nodes=nodes,
        workload=Workload("the record", tuple(asked[job.id] for job in lived)),
        truths={job.id: job.truth for job in lived if isinstance(job.truth, EstimatedJob)},
        lived=tuple(lived),
        ticks=tuple(replace(tick, time_s=tick.time_s - start_s) for tick in ticks),
        round_s=median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 60.0,
        notes=tuple(notes),
        pairs=together,
        gpu_memory_mb=gpu_memory_mb,
        gpu_seconds=gpu_s if shared else None,
    )


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _hold(held: list[tuple[float, float, Placement]], job: Job, now_s: float) -> None:
    """Note what a job holds in a round: until the next one, if it then still does."""
    if job.allocation is None or job.phase not in (Phase.RUNNING, Phase.STOPPING):
        return
    if held and held[-1][2] == job.allocation:
        held[-1] = (held[-1][0], now_s, job.allocation)
    else:
        held.append((now_s, now_s, job.allocation))


def _crowded(state: SharingState) -> Iterator[SharedGpus]:
    """Groups in which jobs are not alone."""
    return (group for group in state.groups if len(group.jobs) > 1)


def _share(known: _RecordedJob, state: SharingState, last: Snapshot | None, now_s: float) -> None:
    """Note what has become of a job since the last round if it shared its GPUs: as it had begun by then, and runs
    still."""
    job, use, before = known.job, state.uses[known.job.id], known.use
    known.use = use if use.utilisation is not None or before is None else replace(use, utilisation=before.utilisation)
    group = next((group for group in _crowded(state) if job.id in group.jobs), None)
    if group is None or last is None or before is None or not before.ran_s or job.allocation is None:
        return
    if len(known.held) == 0 or known.held[-1][0] > last.time_s:  # it came to these GPUs since then
        return
    ran_s = max(use.ran_s - before.ran_s, 0.0)
    known.idle_s += now_s - last.time_s - ran_s
    pack = next(pack for pack in group.packs if job.id in pack.jobs)
    if pack.guaranteed not in (None, job.id):
        known.guest_s += ran_s
    elif pack.guaranteed is None:
        for other in pack.jobs:
            if other != job.id:
                beside = (job.allocation.gpu_type, other)
                known.beside_s[beside] = known.beside_s.get(beside, 0.0) + ran_s


def _part(known: _RecordedJob, seen: Mapping[JobId, _RecordedJob], pairs: Colocation) -> float | None:
    """What a job did of what it would have done alone on its GPUs, in [0, 1]; None: nobody knows."""
    if known.guest_s:
        return None
    held_s = sum(end - begin for begin, end, _ in known.held)
    lost_s = max(known.idle_s, 0.0)
    for (gpu_type, other), ran_s in known.beside_s.items():
        theirs = seen[other].use if other in seen else None
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


def _tick(snapshot: Snapshot, now_s: float) -> Tick:
    jobs = snapshot.jobs
    running = [job.allocation for job in jobs if job.phase is Phase.RUNNING and job.allocation is not None]
    between = sum(job.phase in (Phase.STARTING, Phase.STOPPING) for job in jobs)
    gpus = sum(held.gpus for held in running)
    if snapshot.sharing is not None:
        own = {job.id: job.allocation.gpus for job in jobs if job.phase is Phase.RUNNING and job.allocation is not None}
        for group in _crowded(snapshot.sharing):
            together = sum(own.get(job, 0) for job in group.jobs)
            gpus -= max(together - group.gpus, 0)
    return Tick(now_s, len(jobs), len(running), between, len(jobs) - len(running) - between, gpus, 0.0, decided=True)


def _live(
    known: _RecordedJob, reports: Sequence[Report], start_s: float, end_s: float, part: float
) -> tuple[SimulatedJob, bool] | None:
    """What became of a job, and whether it said at its end that it was complete; None if nothing can be told.

    `part`: what it did of what it would have done alone on its GPUs.
    """
    runs: dict[int, list[Report]] = {}
    for report in sorted(reports, key=lambda report: (report.epoch, report.sequence)):
        runs.setdefault(report.epoch, []).append(report)
    spans: list[tuple[float, float, Placement]] = []
    gross = progress = 0.0
    total: float | None = None
    completed_s: float | None = None
    for run in runs.values():
        started = next((report.body for report in run if isinstance(report.body, Started)), None)
        if started is None:
            continue
        spans.append((run[0].time_s, run[-1].time_s, _where(started)))
        reached = max(r.body.progress for r in run if isinstance(r.body, Started | Observation | Ended))
        gross, progress, total = gross + reached - started.progress, max(progress, reached), started.total or total
        completed_s = next(
            (r.time_s for r in run if isinstance(r.body, Ended) and r.body.outcome == "completed"), completed_s
        )
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


def _asked(job: SimulatedJob, use: JobUse | None, reports: Sequence[Report]) -> WorkloadJob:
    """The job, with what is known of it beside others: what an agent has seen, or else what it told itself."""
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
        """There is nothing that could be unknown."""


class RecordedModels:
    """The `ModelSource` of a replay: what the daemon knew last of each job."""

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
    """The same jobs, which also know GPU types that are `like` another: so many times as fast, in a node of as many
    GPUs.

    Args:
        truths: by job.
        nodes: of the record, for the sizes of the types that others are like.
        like: new type -> (type of the record, how many times as fast).

    Raises:
        ConfigError: it names a type that is not in the record.
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
    """Types on which no job has a speed."""
    one = [(truth.estimator, gpus) for truth in truths.values() for gpus in (1, 2, 4, 8)]
    return [
        gpu_type
        for gpu_type in gpu_types
        if not any(
            math.isfinite(speed := rate(model, Configuration(1, gpus, gpu_type))) and speed > 0 for model, gpus in one
        )
    ]
