"""What the scheduler of a simulation knows about each job: the same as on a real cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from penstock_profiles.estimators import AnyEstimator, Batch, GpuModel, IntArray, LinearEstimator, TrainingEstimator
from penstock_profiles.families import Families
from penstock_profiles.fit import fit_throughput
from penstock_profiles.learning import JobModel, Kin, kind_by_name
from penstock_profiles.noise import GradientNoise
from penstock_profiles.observations import Measured, Observations
from penstock_profiles.throughput import FloatArray, ThroughputParams
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Job, JobFacts, JobId, JobSpec
from penstock_scheduler.simulator.disturbances import Disturbances
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.truth import Measurement, ModelledJob

JOBS = 5
"""Newest jobs of a kind that count, as in the store."""


@dataclass(slots=True)
class _Kind:
    jobs: list[tuple[JobModel, int, float]] = field(default_factory=list)
    kin: Kin | None = None


class SimulatedMemory:
    """What jobs of each kind have shown. It may be kept from one simulation to the next."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def teach(self, kind: str, initial_batch: int, model: JobModel, most_gpus: int, work: float) -> None:
        """Learn from a job that has ended."""
        known = self._kinds.setdefault((kind, initial_batch), _Kind())
        known.jobs = [*known.jobs, (model, most_gpus, work)][-JOBS:]
        known.kin = None

    def recall(self, kind: str, initial_batch: int, max_batch: int) -> Kin | None:
        """What is known of a kind; None: nothing."""
        known = self._kinds.get((kind, initial_batch))
        if known is None:
            return None
        if known.kin is None:
            known.kin = together(initial_batch, max_batch, known.jobs)
        return known.kin


def together(initial_batch: int, max_batch: int, jobs: list[tuple[JobModel, int, float]]) -> Kin | None:
    """What these jobs have shown together; None: they have measured nothing."""
    shared = JobModel(initial_batch, max_batch)
    for model, _, _ in jobs:
        if model.noise is not None:
            shared.observe_noise(model.noise)
        for gpu_type, limit in model.limits.items():
            shared.observe_limit(gpu_type, limit)
        for gpu_type, measured in model.measurements.items():
            for row in zip(*Measured(*(column.tolist() for column in measured)), strict=True):
                nodes, replicas, atomic_batch, step_s, sync_s = row
                shared.observe(gpu_type, int(nodes), int(replicas), int(atomic_batch), step_s, sync_s)
    estimator = shared.estimator
    if not isinstance(estimator, TrainingEstimator):
        return None
    return Kin(estimator, max(most for _, most, _ in jobs), tuple(work for _, _, work in jobs))


ARTIFACT_NAMES = {"t4": "aws", "v100": "azure", "a100": "dgx-ext", "rtx6000": "quad"}
"""GPU type -> its name in Sia's artifact, which tries types in the order of these names."""


class SimulatedModels:
    """The `ModelSource` of a simulation: what each job's learner knows or, without a learner, what its job spec says."""

    def __init__(
        self,
        jobs: Mapping[JobId, SimulatedJob],
        restart_costs_s: Mapping[JobId, float],
        specs: SpecModels,
        memory: SimulatedMemory | None = None,
    ):
        self._jobs, self._restart_costs_s, self._specs, self._memory = jobs, restart_costs_s, specs, memory
        self._present: set[JobId] = set()

    def facts(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> dict[JobId, JobFacts]:
        """See `ports.ModelSource`. How a job scales always counts as unknown, so that jobs grow step by step.

        The remaining work of a training is known once it has begun and reports its progress.
        """
        if self._memory is not None:
            self._remember(self._memory, jobs)
        said = self._specs.facts([job for job in jobs if self._jobs[job.id].learner is None], gpu_types)
        known = {}
        for job in jobs:
            simulated, left = self._jobs[job.id], None
            if simulated.learner is None:
                facts = said[job.id]
                known[job.id] = JobFacts(
                    facts.model, facts.restart_cost_s, facts.largest_run_gpus, sensitivity=simulated.sensitivity
                )
                continue
            if isinstance(simulated.truth, ModelledJob) and simulated.runs:
                initial, own = simulated.truth.model.initial_batch, job.spec.batch_size
                left = simulated.truth.left(simulated.progress, initial if own is None else own)
            known[job.id] = JobFacts(
                simulated.learner.estimator,
                self._restart_costs_s[job.id],
                max(simulated.most_gpus, simulated.learner.kin_gpus),
                simulated.learner.unmeasured,
                left,
                likely_work=simulated.learner.kin_work,
                sensitivity=simulated.sensitivity,
            )
        return known

    def _remember(self, memory: SimulatedMemory, jobs: Sequence[Job]) -> None:
        """Let jobs that have ended teach, and jobs that are new recall."""
        now = {job.id for job in jobs}
        for gone in sorted(self._present - now):
            ended = self._jobs[gone]
            if isinstance(ended.learner, FittedLearner) and ended.finish_s is not None:
                ended.learner.teach(memory, kind_by_name(ended.name), ended.most_gpus, ended.work)
        for new in sorted(now - self._present):
            learner = self._jobs[new].learner
            if isinstance(learner, FittedLearner) and not self._jobs[new].runs:
                learner.recall(memory, kind_by_name(self._jobs[new].name))
        self._present = now


class FittedLearner:
    """A job that learns from its own runs (`JobModel`). `profiled`: it was profiled on one GPU of each type before it
    comes."""

    def __init__(
        self,
        job: JobId,
        truth: ModelledJob,
        spec: JobSpec,
        gpu_types: Iterable[str],
        families: Families,
        disturbances: Disturbances,
        *,
        profiled: bool = True,
    ) -> None:
        self._job, self._truth, self._disturbances = job, truth, disturbances
        self._initial = truth.model.initial_batch if spec.batch_size is None else spec.batch_size
        largest = truth.model.max_batch if spec.max_batch_size is None else spec.max_batch_size
        largest = max(largest, self._initial)
        prior = None
        if spec.model_family is not None and (family := families.get(spec.model_family)) is not None and family.gpus:
            prior = family.estimator(self._initial, largest, spec.fixed_batch)
        known = None if profiled else families  # for types on which it has not run yet
        self._kin: Kin | None = None
        self._fresh = partial(
            JobModel, self._initial, largest, fixed_batch=spec.fixed_batch, prior=prior, families=known
        )
        self._largest = largest
        self._model = self._fresh()
        runs_on = {gpu_type: found for gpu_type in gpu_types if (found := truth.profile(gpu_type))}
        self._types = sorted(runs_on.keys() - (prior.models.keys() if prior is not None else set()))
        self._var_scale = truth.model.initial_batch / self._initial
        self._measured: set[tuple[str, int, int, int]] = set()
        self._reports = 0
        self._unknown = LinearEstimator(families.speeds(tuple(gpu_types)))
        self._profile = runs_on if profiled else {}
        self._take_profile()

    def _take_profile(self) -> None:
        for gpu_type, found in self._profile.items():
            for seen in found:
                self.saw(gpu_type, seen, None)

    def recall(self, memory: SimulatedMemory, kind: str) -> None:
        """Begin again with what jobs of this kind have shown."""
        self._kin = memory.recall(kind, self._initial, self._largest)
        if self._kin is not None:
            self._model = self._fresh(kin=self._kin.estimator)
            self._measured.clear()
            self._take_profile()

    def teach(self, memory: SimulatedMemory, kind: str, most_gpus: int, work: float) -> None:
        """Let later jobs of this kind know what this one has measured."""
        memory.teach(kind, self._initial, self._model, most_gpus, work)

    @property
    def kin_gpus(self) -> int:
        """See `Learner`."""
        return self._kin.most_gpus if self._kin is not None and self._model.like_kin else 0

    @property
    def kin_work(self) -> tuple[float, ...]:
        """See `Learner`."""
        return self._kin.work if self._kin is not None and self._model.like_kin else ()

    @property
    def estimator(self) -> AnyEstimator:
        """See `Learner`."""
        found = self._model.estimator
        return self._unknown if isinstance(found, LinearEstimator) else found

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """See `Learner`."""
        return tuple(gpu_type for gpu_type in self._types if gpu_type not in self._model.measured)

    def saw(self, gpu_type: str, seen: Measurement | None, noise: GradientNoise | None) -> None:
        """See `Learner`. A measurement without error counts once. A job knows the largest batch size of the types on
        which it runs."""
        if seen is not None and (key := (gpu_type, *seen[:3])) not in self._measured:
            if self._disturbances.estimation_error == 0:
                self._measured.add(key)
            self._reports += 1
            error = self._disturbances.measured(1.0, self._job, self._reports)
            if gpu_type not in self._model.measured:
                self._model.observe_limit(gpu_type, self._truth.model.max_atomic_batch(gpu_type, (1,)))
            self._model.observe(gpu_type, *seen[:3], seen.step_s * error, seen.sync_s * error)
        if noise is not None:
            self._model.observe_noise(GradientNoise(noise.grad_sqr, noise.grad_var * self._var_scale))

    @property
    def own_estimator(self) -> AnyEstimator:
        """See `Learner`: as the scheduler."""
        return self._model.estimator


@dataclass(frozen=True, slots=True)
class Donated:
    """An estimator that knows some GPU types, and assumes that others are multiples of them, as Sia's artifact does."""

    own: TrainingEstimator
    donors: Mapping[str, tuple[str, float, int]]
    """GPU type -> (donor, speed relative to the donor, GPUs of the donor's nodes)."""

    def goodput(self, gpu_type: str, nodes: IntArray, gpus: IntArray) -> FloatArray:
        """See `Estimator`. For a type with a donor: that of as many packed GPUs of the donor."""
        if gpu_type not in self.donors:
            return self.own.goodput(gpu_type, nodes, gpus)
        donor, faster, node_gpus = self.donors[gpu_type]
        return faster * self.own.goodput(donor, -(-np.asarray(gpus) // node_gpus), gpus)

    def best_batch(self, gpu_type: str, nodes: int, gpus: int) -> Batch | None:
        """See `Estimator`."""
        if gpu_type not in self.donors:
            return self.own.best_batch(gpu_type, nodes, gpus)
        donor, _, node_gpus = self.donors[gpu_type]
        return self.own.best_batch(donor, -(-gpus // node_gpus), gpus)


class ArtifactLearner:
    """What Sia's artifact knows about a job in its simulator; docs/measurements/simulator.md names the differences.

    Before a job runs, only the relative speed of one GPU of each type at its largest batch size is known. A type on
    which it has run has a fit of its own. For any other type, the donor is the first type in the order of
    `ARTIFACT_NAMES` on which it has run. The scheduler takes the batch size that the trace's user had tuned for the
    largest; the job knows the true one.
    """

    def __init__(self, truth: ModelledJob, tuned_batch: int, node_gpus: Mapping[str, int]) -> None:
        self._truth, self._node_gpus = truth, node_gpus
        self._tuned = max(tuned_batch, truth.model.initial_batch)
        self._speeds = {
            gpu_type: profile[-1].atomic_batch / profile[-1].step_s
            for gpu_type in node_gpus
            if (profile := truth.profile(gpu_type))
        }
        self._order = sorted(self._speeds, key=lambda gpu_type: ARTIFACT_NAMES.get(gpu_type, gpu_type))
        self._observations: dict[str, Observations] = {}
        self._measured: set[tuple[str, int, int, int]] = set()
        self._fits: dict[str, ThroughputParams] = {}
        self._noise: GradientNoise | None = None
        self._estimators: tuple[AnyEstimator, AnyEstimator] | None = None

    kin_gpus, kin_work = 0, ()

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """See `Learner`: nothing, because the artifact has no such rounds."""
        return ()

    @property
    def estimator(self) -> AnyEstimator:
        """See `Learner`: with the tuned batch as the largest."""
        return self._learned()[0]

    def saw(self, gpu_type: str, seen: Measurement | None, noise: GradientNoise | None) -> None:
        """See `Learner`. The first report for each shape and batch size counts."""
        if seen is not None and (key := (gpu_type, *seen[:3])) not in self._measured:
            self._measured.add(key)
            observations = self._observations.setdefault(gpu_type, Observations())
            observations.add(*seen)
            fit = fit_throughput(observations.measured(), self._fits.get(gpu_type))
            assert fit.params is not None, "there is something to fit"
            self._fits[gpu_type] = fit.params
            self._estimators = None
        if noise is not None and noise != self._noise:
            self._noise, self._estimators = noise, None

    @property
    def own_estimator(self) -> AnyEstimator:
        """See `Learner`: up to the largest batch of the application."""
        return self._learned()[1]

    def _learned(self) -> tuple[AnyEstimator, AnyEstimator]:
        if self._estimators is None:
            self._estimators = self._known_up_to(self._tuned), self._known_up_to(self._truth.model.max_batch)
        return self._estimators

    def _known_up_to(self, largest: int) -> AnyEstimator:
        model, noise = self._truth.model, self._noise or GradientNoise(1.0, 0.0)
        donor = next((gpu_type for gpu_type in self._order if gpu_type in self._fits), None)
        steps = self._fits
        if donor is None:  # it never ran: `blind_start` needs no model, and the batch size is the initial one
            steps = {gpu_type: _perfect(1 / speed) for gpu_type, speed in self._speeds.items()}
        own = TrainingEstimator(
            models={name: GpuModel(step, model.max_atomic_batch(name, (1,))) for name, step in sorted(steps.items())},
            initial_batch=model.initial_batch,
            max_batch=max(largest, model.initial_batch),
            grad_sqr=noise.grad_sqr,
            grad_var=noise.grad_var,
        )
        if donor is None:
            return own
        donors = {
            name: (donor, speed / self._speeds[donor], self._node_gpus[donor])
            for name, speed in self._speeds.items()
            if name not in steps
        }
        return Donated(own, donors)  # type: ignore[return-value]  # an Estimator, but not one that is saved


def _perfect(sample_s: float) -> ThroughputParams:
    return ThroughputParams(0.0, sample_s, 0.0, 0.0, 0.0, 0.0, 1.0)
