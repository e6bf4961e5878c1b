"""One window in the authors' simulator: under their own policy, or under ours."""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmarks.reference_sia.artifact import TYPES, Artifact, quiet
from benchmarks.reference_sia.translation import Allocation, Nodes, TheirModel, job_view

from penstock_profiles.estimators import Batch, IntArray
from penstock_profiles.families import load_families
from penstock_profiles.gpus import load_gpus
from penstock_profiles.noise import GradientNoise
from penstock_profiles.throughput import FloatArray
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import JobFacts, Snapshot
from penstock_scheduler.rounds.one_thread import one_blas_thread
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.sharing.rules import broken
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.jobs import SimulatedJob, SimulatedRun
from penstock_scheduler.simulator.learning import SimulatedMemory, SimulatedModels
from penstock_scheduler.simulator.run import RESTART_COST_S, Driving, Scenario, Simulation, simulated_job
from penstock_scheduler.simulator.truth import Measurement, ModelledJob
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, read_workload

CLUSTER = "t4:6x4,rtx:3x8,a100:2x8"
ROUND_S = 60
THEIR_SETTINGS = {"p_fairness": -0.5, "lambda_n": 1.1, "lambda_a": 0.01, "project_throughputs": True}
"""As in their `run_experiment.sh`."""


@dataclass(frozen=True)
class Ours:
    """How our policy runs in their simulator."""

    profiled: bool = True
    """Whether each job's speed on one GPU of each type is known before it runs."""
    memory: SimulatedMemory | None = None
    """What earlier jobs have shown; None: nothing is remembered."""
    perfect: bool = False
    """Whether the policy is told the true goodput of each configuration. Jobs still choose batch sizes by what they learn."""
    batch: Literal["theirs", "ours"] = "ours"
    """Who chooses the batch size of a job: their code, by their fits, or ours, by its own estimator."""
    settings: Mapping[str, Any] | None = None
    """Settings of `sia`; None: its defaults."""


class Truth:
    """The truth about the jobs (`JobsTruth`), from their applications."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def of(self, job: WorkloadJob) -> ModelledJob:
        """See `JobsTruth`."""
        assert job.model is not None, "their workloads name an application"
        return self._model(job.model)

    def check(self, workload: Workload) -> None:
        """See `JobsTruth`."""
        for job in workload.jobs:
            self.of(job)

    @cache  # noqa: B019  # one for each run of the program
    def _model(self, name: str) -> ModelledJob:
        applications = self._artifact.applications.APPLICATIONS
        ours = {ours: applications[theirs][name] for theirs, ours in TYPES.items() if name in applications[theirs]}
        slowdown = self._artifact.simulator_config.SLOWDOWNS[name]
        model = TheirModel(ours, slowdown, float(self._artifact.sia.get_restart_penalty(name)))
        return ModelledJob(model, model.training)


@dataclass(frozen=True)
class PerfectModel:
    """The true goodput of a job in one epoch, at the best of a dozen batch sizes (`Estimator`)."""

    truth: ModelledJob
    epoch: int

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator.goodput`. The same number of GPUs on each node; 0 for other configurations."""
        pairs = zip(np.ravel(nodes).tolist(), np.ravel(gpus).tolist(), strict=True)
        return np.array([self._rate(gpu_type, nodes, gpus) for nodes, gpus in pairs]).reshape(np.shape(gpus))

    def _rate(self, gpu_type: str, nodes: int, gpus: int) -> float:
        if gpus % nodes:
            return 0.0
        return self.truth.best_rates(gpu_type, (gpus // nodes,) * nodes)[self.epoch]

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator.best_batch`. None: jobs choose their own."""
        return None


@cache
def _perfect_model(truth: ModelledJob, epoch: int) -> PerfectModel:
    """The same object for all jobs of an application, so that it is evaluated once (`GoodputMatrix`)."""
    return PerfectModel(truth, epoch)


class Mirror:
    """Our records of their jobs: what each holds, how far it is, and when it started and ended."""

    def __init__(self, scenario: Scenario, driving: Driving) -> None:
        self.jobs = {job.id: simulated_job(job, scenario, driving) for job in scenario.workload.jobs}
        self.nodes = Nodes(scenario.nodes, TYPES)
        self.attained_s: dict[str, dict[str, float]] = {job: {} for job in self.jobs}
        """Job -> GPU type -> GPU-seconds."""

    def update(self, cluster: Any) -> None:
        """Take in what happened in their simulator since the last time."""
        now_s = float(cluster.current_time)
        for theirs in cluster.jobs:
            job = self.jobs[theirs.name]
            if job.finish_s is not None:
                continue
            initial = job.truth.model.initial_batch  # type: ignore[attr-defined]  # a ModelledJob
            job.progress = float(theirs.progress) * initial
            if theirs.completion_time is not None:
                job.finish_s = float(theirs.completion_time)
                self._leave(job, job.finish_s)
                continue
            held = self.nodes.placement(cluster.allocations.get(theirs.name))
            if held == job.allocation:
                continue
            self._leave(job, now_s)
            if held is None:
                continue
            job.starts = (theirs.num_restarts or 0) + 1
            job.runs.append(SimulatedRun(now_s, now_s, held, now_s + theirs.rescale_time, job.progress))
            job.allocation, job.shape = held, tuple(share.gpus for share in held.shares)
            job.most_gpus = max(job.most_gpus, held.gpus)

    def attained(self, job_id: str, now_s: float) -> dict[str, float]:
        """GPU-seconds of a job by GPU type."""
        job, found = self.jobs[job_id], dict(self.attained_s[job_id])
        if job.allocation is not None:
            run = job.runs[-1]
            gpu_type = run.placement.gpu_type
            found[gpu_type] = found.get(gpu_type, 0.0) + run.placement.gpus * (now_s - run.start_s)
        return found

    def _leave(self, job: SimulatedJob, at_s: float) -> None:
        if job.allocation is None:
            return
        job.runs[-1].end_s = at_s
        counted = self.attained_s[job.id]
        gpu_type = job.allocation.gpu_type
        counted[gpu_type] = counted.get(gpu_type, 0.0) + job.runs[-1].gpu_seconds
        job.allocation, job.shape = None, ()


class OurPolicy:
    """`sia` of Penstock behind the interface of their policies, and the jobs' own learning."""

    def __init__(self, artifact: Artifact, scenario: Scenario, mirror: Mirror, ours: Ours) -> None:
        self._scenario, self._mirror, self._ours = scenario, mirror, ours
        self._policy, _ = make_policy("sia", ours.settings)
        costs_s = {job.id: job.truth.model.restart_cost_s for job in mirror.jobs.values()}  # type: ignore[attr-defined]
        specs = SpecModels(scenario.families, RESTART_COST_S, scenario.gpus)
        self._models = SimulatedModels(mirror.jobs, costs_s, specs, ours.memory)
        self._round = 0
        self._cluster: Any = None
        self._chosen: dict[str, tuple[Any, Batch]] = {}

    def attach(self, cluster: Any) -> None:
        """Let their jobs report to our learners and, with `batch` "ours", take our batch sizes."""
        self._cluster = cluster
        for theirs in cluster.jobs:
            self._attach(theirs, self._mirror.jobs[theirs.name])

    def _attach(self, theirs: Any, job: SimulatedJob) -> None:
        own_fit, own_batch, slowdown = theirs.update_params, theirs.update_local_bsz, 1 / theirs.calibration_factor

        def saw(
            nodes: int, gpus: int, atomic: int, step_s: float, sync_s: float, grad_sqr: float, grad_var: float
        ) -> None:
            assert job.learner is not None, "their jobs train"
            assert step_s > 0, f"{job.id}: their tables have no {atomic} samples on each of {gpus} GPUs"
            seen = Measurement(nodes, gpus, atomic, float(step_s) * slowdown, float(sync_s) * slowdown)
            job.learner.saw(TYPES[theirs.current_cluster], seen, GradientNoise(float(grad_sqr), float(grad_var)))
            if self._ours.batch == "theirs":
                own_fit(nodes, gpus, atomic, step_s, sync_s, grad_sqr, grad_var)

        def choose(placement: Any) -> None:
            if self._ours.batch == "theirs":
                own_batch(placement)
            else:
                theirs.atomic_bsz, theirs.accum_steps = self._batch(job, TYPES[theirs.current_cluster], placement)

        theirs.update_params, theirs.update_local_bsz = saw, choose

    def _batch(self, job: SimulatedJob, gpu_type: str, placement: Any) -> Batch:
        """The batch size that is best by what is known of the job, within what they have measured."""
        shape = tuple(gpus for gpus in placement if gpus)
        assert job.learner is not None, "their jobs train"
        assert isinstance(job.truth, ModelledJob), "its speed is measured"
        known = (job.learner.own_estimator, gpu_type, shape)
        before = self._chosen.get(job.id)
        if before is not None and before[0][0] is known[0] and before[0][1:] == known[1:]:
            return before[1]
        gpus = sum(shape)
        best = known[0].best_batch(gpu_type, len(shape), gpus)
        total = None if best is None else gpus * best.atomic_batch * (best.accumulation_steps + 1)
        batch = job.truth.batch(gpu_type, shape, total)
        model = job.truth.model
        assert batch is not None, f"{job.id} cannot run on {gpus} {gpu_type}"
        assert isinstance(model, TheirModel), "it is theirs"
        atomic = max(batch.atomic_batch, model.min_atomic_batch(gpu_type))
        atomic = min(atomic, model.max_batch // (gpus * (batch.accumulation_steps + 1)))
        found = Batch(atomic, batch.accumulation_steps)
        self._chosen[job.id] = known, found
        return found

    def optimize(self, jobs: Mapping[str, Any], nodes: Any, allocations: Mapping[str, Allocation]) -> dict[str, Any]:
        """One round: theirs calls this instead of their own policy."""
        self._mirror.update(self._cluster)
        now_s = float(self._cluster.current_time)
        self._round += 1
        shown = tuple(
            job_view(
                self._mirror.jobs[name],
                self._mirror.jobs[name].allocation,
                restarting=theirs.rescale_time > 0,
            )
            for name, theirs in jobs.items()
        )
        facts = self._models.facts(shown, self._scenario.node_gpus)
        if self._ours.perfect:
            facts = {job: self._told_all(self._mirror.jobs[job], known) for job, known in facts.items()}
        snapshot = Snapshot(
            round=self._round,
            time_s=now_s,
            nodes=self._scenario.nodes,
            jobs=shown,
            facts={job: known.with_attained(self._mirror.attained(job, now_s)) for job, known in facts.items()},
        )
        plan = self._policy.decide(snapshot)
        assert not broken(snapshot, plan), broken(snapshot, plan)
        return {job: self._mirror.nodes.allocation(given.placement) for job, given in plan.assignments.items()}

    @staticmethod
    def _told_all(job: SimulatedJob, known: JobFacts) -> JobFacts:
        assert isinstance(job.truth, ModelledJob), "its speed is measured"
        epoch = bisect_right(job.truth.epoch_ends, job.progress)
        # Its scaling is known, so its growth is not bounded.
        return dataclasses.replace(known, model=_perfect_model(job.truth, epoch), largest_run_gpus=None)


def run_window(artifact: Artifact, truth: Truth, window: Path, ours: Ours | None) -> Simulation:
    """Simulate a window until all jobs have ended. `ours`: None under their own policy."""
    begun_s = time.process_time()
    scenario = Scenario(nodes_from_spec(CLUSTER), read_workload(window), truth, load_families(), load_gpus())
    driving = Driving(learner="fitted" if ours is not None and ours.profiled else "unprofiled")
    mirror = Mirror(scenario, driving)
    rounds = 0
    with quiet(), one_blas_thread():
        cluster = _cluster(artifact, window, None if ours is None else OurPolicy(artifact, scenario, mirror, ours))
        while not cluster.all_complete():
            cluster.step(ROUND_S)
            mirror.update(cluster)
            rounds += 1
    jobs = list(mirror.jobs.values())
    simulation = Simulation("their own" if ours is None else "ours", scenario, jobs, rounds=rounds)
    simulation.end_s = max(job.finish_s or 0.0 for job in jobs)
    simulation.cpu_s = time.process_time() - begun_s
    return simulation


def _cluster(artifact: Artifact, window: Path, policy: OurPolicy | None) -> Any:
    """Their cluster with the jobs of a window."""
    import pandas

    settings = artifact.simulator_config
    node_gpus = {name: settings.cluster_ngpus_per_node[name] for name in settings.cluster_nnodes}
    own = artifact.sia.SiaPolicy(restart_penalty=30, share_max_replicas=True, **THEIR_SETTINGS)
    own.populate_valid_configs(settings.cluster_nnodes, node_gpus, settings.cluster_max_physical_nnodes)
    cluster = artifact.cluster.Cluster(
        pandas.read_csv(window), own, settings.cluster_nnodes, node_gpus, settings.cluster_max_physical_nnodes
    )
    if policy is not None:
        own.optimize = policy.optimize
        cluster.get_job_infos = lambda: {
            job.name: job
            for job in cluster.jobs
            if job.submission_time <= cluster.current_time and job.completion_time is None
        }
        policy.attach(cluster)
    return cluster
