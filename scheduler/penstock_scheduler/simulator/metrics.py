"""Figures of a simulation: a row for each job, and a summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_profiles.throughput import FloatArray
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.run import Scenario, Simulation
from penstock_scheduler.simulator.truth import JobTruth, ModelledJob, packed

SLICE_S = 60.0
"""Training after which a user has seen whether a job works: a time slice of Gandiva."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job after the simulation. None: it did not get that far. Times are in seconds since the start of the
    workload."""

    id: str
    name: str
    user: str
    submit_s: float
    start_s: float | None
    end_s: float | None
    jct_s: float | None
    """From submission to end."""
    queue_s: float
    """Time without GPUs, before its start and between its runs, and while it was suspended."""
    gpu_hours: float
    """GPUs times hours in which it was not suspended. Two jobs that run on one GPU at once both count in full."""
    restarts: int
    resumes: int
    """Times that it was resumed after it was suspended."""
    feedback_s: float | None
    """Time from submission until it had trained for a minute (where jobs share GPUs, for a time slice), or ended
    sooner. By then its user sees whether it works."""
    failures: int
    contention: float | None
    """Mean number of jobs in the cluster while it was there, itself included."""
    ftf_rho: float | None
    """Finish-time fairness: `jct_s` over the time that it would take alone on its fair share. Above 1 is unfair."""
    cost: float | None
    """Its GPU-hours at their prices; None without prices."""
    cloud_usd: float | None = None
    """What it cost in the cloud, US dollars; None: the site has no cloud."""
    cloud_gpu_hours: float | None = None
    """GPU-hours of its instances, with their boot. None as above."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a simulation. Means are over the jobs that ended. None: no job ended."""

    jobs: int
    ended: int
    avg_jct_h: float | None
    p50_jct_h: float | None
    p99_jct_h: float | None
    makespan_h: float | None
    """From the first submission to the last end; None unless all have ended."""
    gpu_h_per_job: float
    restarts_per_job: float
    queue_h: float
    """Mean time without GPUs."""
    feedback_min: float | None
    """Mean `feedback_s`, of the jobs that came so far, in minutes."""
    suspends_per_job: float | None
    """None if the policy lets no jobs share GPUs."""
    packs: int | None
    """Pairs of jobs that ran on the same GPUs at the same time. None as above."""
    packs_at_a_loss: int | None
    """Number of these pairs that did less work together than in time slices. None as above."""
    worst_ftf: float | None
    unfair_share: float | None
    """Share of the jobs with an `ftf_rho` above 1."""
    utilisation: float
    """Share of all GPU-hours until the end that jobs held. A GPU that jobs share counts once."""
    contention: float
    """Mean number of jobs in the cluster, over the time in which there is any."""
    max_contention: int
    failures: int
    cost: float | None
    rounds: int
    failed_rounds: int
    cloud_usd: float | None
    """What the cloud cost, US dollars; None: the site has no cloud."""
    cloud_gpu_h: float | None
    """GPU-hours of instances, with their boot. None as above."""
    cloud_jobs: int | None
    """Jobs that ran in the cloud. None as above."""
    cpu_s: float
    """CPU seconds that the simulation took: the only figure that may differ between two equal simulations."""


def job_rows(simulation: Simulation, prices: Mapping[str, float] | None = None) -> list[JobRow]:
    """A row for each job of the workload, in its order.

    Args:
        simulation: finished or interrupted.
        prices: GPU type -> price of a GPU-hour; other types cost nothing.
    """
    contention = _Contention(simulation)
    until_s = [_until_s(job, simulation) for job in simulation.jobs]
    means = contention.means([job.submit_s for job in simulation.jobs], until_s)
    return [
        _job_row(job, simulation, at_s, mean, prices)
        for job, at_s, mean in zip(simulation.jobs, until_s, means, strict=True)
    ]


def summarise(simulation: Simulation, rows: list[JobRow]) -> Summary:
    """Figures of the simulation, from the rows of its jobs."""
    jct_h = np.array(_known(rows, "jct_s")) / 3600
    rho = np.array(_known(rows, "ftf_rho"))
    came = [row for row in rows if row.submit_s <= simulation.end_s] or rows
    jobs = max(len(came), 1)
    ends = _known(rows, "end_s")
    first_s = min(_known(rows, "submit_s"), default=0.0)
    gpu_hours = sum(_known(rows, "gpu_hours"))
    there_h = simulation.scenario.total_gpus * max(simulation.end_s - first_s, 0.0) / 3600
    contention = _Contention(simulation)
    costs = _known(rows, "cost")
    agents, cloud = simulation.agents, simulation.cloud
    held_h = gpu_hours if simulation.gpu_seconds is None else simulation.gpu_seconds / 3600
    return Summary(
        jobs=len(rows),
        ended=len(jct_h),
        avg_jct_h=_of(np.mean, jct_h),
        p50_jct_h=_of(np.median, jct_h),
        p99_jct_h=_of(lambda values: np.percentile(values, 99), jct_h),
        makespan_h=(max(ends) - first_s) / 3600 if ends and len(ends) == len(rows) else None,
        gpu_h_per_job=gpu_hours / jobs,
        restarts_per_job=sum(_known(rows, "restarts")) / jobs,
        queue_h=sum(_known(came, "queue_s")) / jobs / 3600,
        feedback_min=_of(np.mean, np.array(_known(rows, "feedback_s")) / 60),
        suspends_per_job=None if agents is None else sum(_known(rows, "resumes")) / jobs,
        packs=None if agents is None else len(agents.trials),
        packs_at_a_loss=None if agents is None else sum(trial.total < 1 - 1e-9 for trial in agents.trials),
        worst_ftf=_of(np.max, rho),
        unfair_share=_of(lambda values: np.mean(values > 1), rho),
        utilisation=held_h / there_h if there_h else 0.0,
        contention=contention.busy_mean,
        max_contention=contention.most,
        failures=sum(_known(rows, "failures")),
        cost=sum(costs) if costs else None,
        rounds=simulation.rounds,
        failed_rounds=simulation.failed_rounds,
        cloud_usd=None if cloud is None else sum(cloud.usd.values()),
        cloud_gpu_h=None if cloud is None else sum(cloud.gpu_hours.values()),
        cloud_jobs=None if cloud is None else len(cloud.away),
        cpu_s=simulation.cpu_s,
    )


def _known(rows: list[JobRow], column: str) -> list[Any]:
    """The values of a column, without those that are unknown."""
    return [value for row in rows if (value := getattr(row, column)) is not None]


def _of(figure: Any, values: np.ndarray[Any, Any]) -> float | None:
    """The figure of these values; None: there are none."""
    return float(figure(values)) if len(values) else None


def isolated_s(job: SimulatedJob, scenario: Scenario, gpu_type: str, gpus: float) -> float:
    """Seconds that a job takes alone on `gpus` GPUs of a type, with one start and its best batch size; infinite: it
    cannot run.

    Linear between whole numbers of GPUs. Below the fewest GPUs that the job needs, it gets those for a share of the
    time.
    """
    least, most = job.spec.min_gpus, job.spec.max_gpus
    if gpus < least:
        return isolated_s(job, scenario, gpu_type, least) * least / gpus
    gpus = min(gpus, most)
    below = math.floor(gpus)
    if gpus == below:
        return job.truth.restart_s + _alone_s(job, gpu_type, packed(below, scenario.node_gpus[gpu_type]))
    shorter, longer = (
        job.truth.restart_s + _alone_s(job, gpu_type, packed(count, scenario.node_gpus[gpu_type]))
        for count in (math.ceil(gpus), below)
    )
    return longer + (gpus - below) * (shorter - longer) if shorter < longer else longer


def _alone_s(job: SimulatedJob, gpu_type: str, shape: tuple[int, ...]) -> float:
    truth: JobTruth = job.truth
    if isinstance(truth, ModelledJob) and not job.spec.fixed_batch:
        rates = truth.best_rates(gpu_type, shape)
    else:
        rates = truth.rates(gpu_type, shape, truth.batch(gpu_type, shape, job.batch_size))
    begin = seconds = 0.0
    for rate, end in zip(rates, (*truth.epoch_ends, math.inf), strict=True):
        if begin >= truth.work:
            break
        if rate <= 0:
            return math.inf
        seconds += (min(end, truth.work) - begin) / rate
        begin = end
    return seconds


def _until_s(job: SimulatedJob, simulation: Simulation) -> float:
    """When the job ended, or else the simulation."""
    return job.finish_s if job.finish_s is not None else max(simulation.end_s, job.submit_s)


def _job_row(
    job: SimulatedJob, simulation: Simulation, until_s: float, mean: float | None, prices: Mapping[str, float] | None
) -> JobRow:
    """`mean`: mean contention until `until_s`; None: the job was there for no time."""
    held_s = sum(run.end_s - run.start_s for run in job.runs)
    suspended_s = _suspended_s(job, simulation)
    used = 1 - suspended_s / held_s if held_s else 1.0
    by_type: dict[str, float] = {}
    for run in job.runs:
        by_type[run.placement.gpu_type] = by_type.get(run.placement.gpu_type, 0.0) + used * run.gpu_seconds / 3600
    jct_s = None if job.finish_s is None else job.finish_s - job.submit_s
    cloud = simulation.cloud
    return JobRow(
        id=job.id,
        name=job.name,
        user=job.user,
        submit_s=job.submit_s,
        start_s=job.runs[0].start_s if job.runs else None,
        end_s=job.finish_s,
        jct_s=jct_s,
        queue_s=max(until_s - job.submit_s - held_s, 0.0) + suspended_s,
        gpu_hours=sum(by_type.values()),
        restarts=job.restarts,
        resumes=0 if simulation.agents is None else simulation.agents.resumes[job.id],
        feedback_s=_feedback_s(job, simulation),
        failures=job.failures,
        contention=mean,
        ftf_rho=None if jct_s is None or mean is None else jct_s / _fair_s(job, simulation.scenario, mean),
        cost=None if prices is None else sum(hours * prices.get(name, 0.0) for name, hours in by_type.items()),
        cloud_usd=None if cloud is None else cloud.usd.get(job.id, 0.0),
        cloud_gpu_hours=None if cloud is None else cloud.gpu_hours.get(job.id, 0.0),
    )


def _suspended_s(job: SimulatedJob, simulation: Simulation) -> float:
    """Time in which it was suspended. It is known at observations only, so up to a minute of a running job may be
    missing."""
    if simulation.agents is None:
        return 0.0
    trained_s = sum(max(run.end_s - run.ready_s, 0.0) for run in job.runs)
    return max(trained_s - simulation.agents.ran_s.get(job.id, 0.0), 0.0)


def _feedback_s(job: SimulatedJob, simulation: Simulation) -> float | None:
    """From submission to the end of its first time slice, as the agents count it where jobs share GPUs."""
    ended_s = None if job.finish_s is None else job.finish_s - job.submit_s
    if simulation.agents is not None:
        first_s = simulation.agents.first_slice_s.get(job.id)
        return ended_s if first_s is None else first_s - job.submit_s
    left_s = SLICE_S
    for run in job.runs:
        trained_s = max(run.end_s - run.ready_s, 0.0)
        if trained_s >= left_s:
            return run.ready_s + left_s - job.submit_s
        left_s -= trained_s
    return ended_s


def _fair_s(job: SimulatedJob, scenario: Scenario, contention: float) -> float:
    """Sia's sum over g of P(g) JCT_isolated(g): alone on 1 / `contention` of the GPUs, P(g) being the share of type g.

    Types on which the job cannot run do not count.
    """
    share = scenario.total_gpus / contention
    found: list[tuple[float, float]] = []
    for gpu_type, gpus in scenario.gpus_by_type.items():
        if job.spec.allows_type(gpu_type):
            found.append((gpus, isolated_s(job, scenario, gpu_type, share)))
    possible = [(gpus, seconds) for gpus, seconds in found if math.isfinite(seconds)]
    total = sum(gpus for gpus, _ in possible)
    return sum(gpus * seconds for gpus, seconds in possible) / total if total else math.inf


class _Contention:
    """Number of jobs in the cluster over time."""

    def __init__(self, simulation: Simulation) -> None:
        changes: dict[float, int] = {}
        for job in simulation.jobs:
            if job.submit_s <= simulation.end_s:
                changes[job.submit_s] = changes.get(job.submit_s, 0) + 1
                if job.finish_s is not None:
                    changes[job.finish_s] = changes.get(job.finish_s, 0) - 1
        self._times = np.array([*sorted(changes), max([simulation.end_s, *changes])])
        self._counts = np.cumsum([*(changes[at_s] for at_s in sorted(changes)), 0])
        lengths = np.diff(self._times, append=self._times[-1])
        self._area = np.concatenate([[0.0], np.cumsum(self._counts * lengths)])
        busy_s = float(lengths[self._counts > 0].sum())
        self.busy_mean = float(self._area[-1]) / busy_s if busy_s else 0.0
        self.most = int(self._counts.max(initial=0))

    def means(self, begins_s: list[float], ends_s: list[float]) -> list[float | None]:
        """Mean over each interval; None for an empty interval."""
        begins, ends = np.array(begins_s), np.array(ends_s)
        lengths = ends - begins
        means = (self._until(ends) - self._until(begins)) / np.where(lengths > 0, lengths, 1.0)
        return [mean if length > 0 else None for mean, length in zip(means.tolist(), lengths.tolist(), strict=True)]

    def _until(self, at_s: FloatArray) -> FloatArray:
        before = np.searchsorted(self._times, at_s, side="right") - 1
        known = np.maximum(before, 0)
        area: FloatArray = self._area[known] + self._counts[known] * (at_s - self._times[known])
        return np.where(before < 0, 0.0, area)
