"""How fast simulated jobs really are. No policy sees this; policies see what a real cluster would show,
`JobTruth.seen`.

A job's speed comes from the first of these that is known:

1. measured tables of its model (`--profiles DIR`), interpolated as Sia's simulator does (`profiles`). Statistical
   efficiency is that of recorded trainings, epoch by epoch.
2. the family of its model in the catalogue, perhaps with noise on the step times, so that the catalogue is not exactly
   right.
3. its recorded duration: GPUs add up, on any type.

Progress is counted in samples of training at the model's initial batch size, as `Estimator.goodput` is. For a job
without a model it is counted in GPU-seconds of the type on which its duration was recorded.

Answers are kept by (GPU type, shape, batch) for all epochs E at once, so that only the first one costs more than a
microsecond.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from penstock_profiles.estimators import AnyEstimator, Batch
from penstock_profiles.families import Families, load_families
from penstock_profiles.gpus import Gpus, load_gpus
from penstock_profiles.noise import GradientNoise
from penstock_scheduler.simulator.model_truth import FamilyModel, MeasuredModel, ModelTruth, Shape
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.workloads import BadInput, InputProblem, Workload, WorkloadJob, application_of

NODE_GPUS = 8
"""GPUs of a node of unknown size. Only the work of a job with a model and a duration depends on it."""

BATCHES_TRIED = 12
"""Batch sizes that are tried for a job that runs alone."""

PROFILED = 4
"""Batch sizes of a profile, each half of the next. Sia (section 3.1) measures about ten, in less than 20
GPU-seconds."""


class Measurement(NamedTuple):
    """What a running job measures, for `JobModel.observe(gpu_type, *seen)` or `Observations.add(*seen)`."""

    nodes: int
    replicas: int
    atomic_batch: int
    step_s: float
    sync_s: float


class JobTruth(Protocol):
    """The truth about one job."""

    @property
    def work(self) -> float:
        """Progress at which it is done."""
        ...

    @property
    def restart_s(self) -> float:
        """Seconds without progress when it starts, or continues elsewhere."""
        ...

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """A total batch size (None: the initial one) on these GPUs, with accumulation where memory needs it; None: it
        cannot run."""
        ...

    @property
    def epoch_ends(self) -> Sequence[float]:
        """Progress at which each epoch but the last is completed, ascending: where `rates` and `noise` change."""
        ...

    def rates(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Sequence[float]:
        """Progress per second in each epoch; 0 if it cannot run."""
        ...

    def seen(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Measurement | None:
        """What the job measures of its speed there; None if it cannot run or does not measure."""
        ...

    def noise(self, batch: Batch | None, replicas: int, progress: float) -> GradientNoise | None:
        """The job's estimate of its gradient noise at the model's initial batch size; None if it has none."""
        ...


class ModelledJob:
    """A job of a model with known speed."""

    def __init__(self, model: ModelTruth, work: float) -> None:
        self.model, self.work, self.restart_s = model, work, model.restart_s
        self.epoch_ends = model.epoch_ends
        self._rates: dict[tuple[str, Shape, Batch], list[float]] = {}
        self._best_rates: dict[tuple[str, Shape], list[float]] = {}
        self._seen: dict[tuple[str, Shape, Batch], Measurement | None] = {}

    def of(self, work: float) -> ModelledJob:
        """Another job of the same model; the two share the answers that are kept."""
        other = ModelledJob(self.model, work)
        other._rates, other._best_rates, other._seen = self._rates, self._best_rates, self._seen
        return other

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """See `JobTruth`. As evenly as whole samples allow, and at least one for each GPU."""
        fits, gpus = self.model.max_atomic_batch(gpu_type, shape), sum(shape)
        total = self.model.initial_batch if total is None else total
        if fits < 1 or gpus > max(total, self.model.max_batch):
            return None
        total = max(total, gpus)
        accumulation = -(-total // (gpus * fits)) - 1
        return Batch(-(-total // (gpus * (accumulation + 1))), accumulation)

    def rates(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Sequence[float]:
        """See `JobTruth`: samples/s x r / S, where a step takes step + s (step - sync) seconds."""
        if batch is None:
            return [0.0] * (len(self.epoch_ends) + 1)
        key = (gpu_type, shape, batch)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._rates_of_epochs(*key)
        return rates

    def best_rates(self, gpu_type: str, shape: Shape) -> Sequence[float]:
        """Progress per second in each epoch with the best of `BATCHES_TRIED` batch sizes; 0 if it cannot run."""
        key = (gpu_type, shape)
        if key not in self._best_rates:
            totals = np.geomspace(self.model.initial_batch, self.model.max_batch, BATCHES_TRIED)
            batches = {self.batch(gpu_type, shape, int(total)) for total in totals}
            self._best_rates[key] = list(map(max, zip(*(self.rates(*key, batch) for batch in batches), strict=True)))
        return self._best_rates[key]

    def seen(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Measurement | None:
        """See `JobTruth`."""
        if batch is None:
            return None
        key = (gpu_type, shape, batch)
        if key not in self._seen:
            times = self.model.step(gpu_type, shape, batch.atomic_batch)
            self._seen[key] = None if times is None else Measurement(len(shape), sum(shape), batch.atomic_batch, *times)
        return self._seen[key]

    def noise(self, batch: Batch | None, replicas: int, progress: float) -> GradientNoise | None:
        """See `JobTruth`."""
        if batch is None:
            return None
        sqr_E, var_E = self.model.noise(_total(batch, replicas))
        epoch = bisect_right(self.epoch_ends, progress)
        return GradientNoise(float(sqr_E[epoch]), float(var_E[epoch]))

    def left(self, progress: float, initial_batch: int) -> float:
        """The work that is left, in samples at another initial batch size, by the noise of the present epoch."""
        sqr_E, var_E = self.model.noise(initial_batch)
        epoch = bisect_right(self.epoch_ends, progress)
        wasted = max(initial_batch / self.model.initial_batch - 1, 0.0) * sqr_E[epoch] / (sqr_E[epoch] + var_E[epoch])
        return float(max(self.work - progress, 0.0) * (1 + wasted))

    def profile(self, gpu_type: str) -> list[Measurement]:
        """What a profile on one GPU of a type measures: a few batch sizes, up to the largest that fits."""
        most = self.model.max_atomic_batch(gpu_type, (1,))
        batches = sorted({max(most >> halved, 1) for halved in range(PROFILED)}) if most else []
        seen = [self.seen(gpu_type, (1,), Batch(batch, 0)) for batch in batches]
        return [each for each in seen if each is not None]

    def _rates_of_epochs(self, gpu_type: str, shape: Shape, batch: Batch) -> list[float]:
        total, initial = _total(batch, sum(shape)), self.model.initial_batch
        sqr_E, var_E = self.model.noise(total)
        times = self.model.step(gpu_type, shape, batch.atomic_batch)
        if times is None:
            return [0.0] * len(sqr_E)
        seconds = times.step_s + batch.accumulation_steps * (times.step_s - times.sync_s)
        # r / S = 1 / (1 + (S - 1) sqr / (sqr + var)), as in `efficiency`; below the initial batch no sample teaches
        # more.
        wasted_E = max(total / initial - 1, 0.0) * sqr_E / (sqr_E + var_E)
        rates: list[float] = (total / seconds / (1 + wasted_E)).tolist()
        return rates


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job with a known duration only. Its speed is its number of GPUs times the speed of their type."""

    gpu_type: str | None
    work: float
    """GPU-seconds on `gpu_type`."""
    restart_s: float
    speeds: Mapping[str, float]
    """GPU type -> relative speed of one GPU; 1 for other types."""
    epoch_ends: tuple[float, ...] = ()

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """None: it has no batch sizes."""
        return None

    def rates(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Sequence[float]:
        """See `JobTruth`; GPU-seconds of the recorded type per second."""
        own = self.speeds.get(self.gpu_type, 1.0) if self.gpu_type is not None else 1.0
        return (sum(shape) * self.speeds.get(gpu_type, 1.0) / own,)

    def seen(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Measurement | None:
        """None: it does not measure."""
        return None

    def noise(self, batch: Batch | None, replicas: int, progress: float) -> GradientNoise | None:
        """None: it does not measure."""
        return None


@dataclass(frozen=True, slots=True)
class EstimatedJob:
    """A job that is exactly as fast as an estimator predicts."""

    estimator: AnyEstimator
    work: float
    """In units of the estimator's goodput times seconds."""
    restart_s: float = 30.0
    epoch_ends: tuple[float, ...] = ()

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """None: the estimator's goodput already has the best batch size."""
        return None

    def rates(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Sequence[float]:
        """See `JobTruth`."""
        return (float(self.estimator.goodput(gpu_type, np.array([len(shape)]), np.array([sum(shape)]))[0]),)

    def seen(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Measurement | None:
        """None: it does not measure."""
        return None

    def noise(self, batch: Batch | None, replicas: int, progress: float) -> GradientNoise | None:
        """None: it does not measure."""
        return None


@dataclass(frozen=True, slots=True)
class TruthSettings:
    """What the truth depends on, beside the tables."""

    gpu_speeds: Mapping[str, float] | None = None
    """For jobs with recorded durations only: GPU type -> relative speed, such as {"a100": 1, "h100": 2}."""
    noise: float = 0.0
    """Error of the catalogue; see `FamilyModel`."""
    restart_s: float = 30.0
    """For jobs with recorded durations only."""
    node_gpus: Mapping[str, int] | None = None
    """GPU type -> GPUs of one node."""
    seed: int = 0


class Truth:
    """The truth about the jobs of a workload on one cluster.

    Args:
        gpu_types: of the cluster, under its own names.
        profiles: measured tables; None: the catalogue alone.
        families: the catalogue; None: Penstock's own.
        settings: other settings.
        gpus: names of GPU types, by which tables and families find the cluster's types; None: Penstock's own.
    """

    def __init__(
        self,
        gpu_types: tuple[str, ...],
        profiles: Profiles | None = None,
        families: Families | None = None,
        settings: TruthSettings | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        self._gpus = load_gpus() if gpus is None else gpus
        self._types = gpu_types
        self._profiles = profiles
        self._families = load_families() if families is None else families
        self._settings = TruthSettings() if settings is None else settings
        self._models: dict[tuple[str, str | None], ModelledJob | None] = {}

    def of(self, job: WorkloadJob) -> JobTruth:
        """The truth about a job. Raises BadInput if its model is unknown, or runs on no type of the cluster."""
        if job.model is None:
            assert job.duration_s is not None, "WorkloadJob has one of the two"
            speeds = self._settings.gpu_speeds or {}
            return TimedJob(job.gpu_type, job.duration_s * job.gpus, self._settings.restart_s, speeds)
        modelled_job = self._modelled(job.model, job.gpu_type)
        if modelled_job is None:
            raise self._bad(
                job, f"the model {job.model!r}", f"one of {', '.join(self.models())}, or no model and duration_s"
            )
        model = modelled_job.model
        if not any(model.runs_on(gpu_type) for gpu_type in self._types):
            raise self._bad(
                job, f"the model {job.model!r}", f"one that was measured on any of {', '.join(self._types)}"
            )
        if job.duration_s is not None:
            return modelled_job.of(job.duration_s * self._rate_as_recorded(job, modelled_job))
        if job.samples is not None:
            return modelled_job.of(job.samples)
        work = model.training if job.epochs is None else model.progress_of(job.epochs)
        if work is None:
            what = "its whole training" if job.epochs is None else f"epochs={job.epochs:g}"
            raise self._bad(job, f"{what} of {job.model!r}, which was not recorded", "samples instead")
        return modelled_job.of(work)

    def check(self, workload: Workload) -> None:
        """Raise BadInput if there are jobs without a truth; it names one job for each model."""
        problems: dict[str | None, InputProblem] = {}
        for job in workload.jobs:
            if job.model not in problems:
                try:
                    self.of(job)
                except BadInput as error:
                    problems[job.model] = error.problems[0]
        if problems:
            raise BadInput(list(problems.values()))

    def models(self) -> list[str]:
        """Names that a job's model may have."""
        return sorted({*(self._profiles.models if self._profiles else ()), *self._families})

    def _modelled(self, name: str, also: str | None) -> ModelledJob | None:
        """The model by this name, on the cluster's types and perhaps on `also`, the type on which a duration was
        recorded."""
        key = (name, None if also in self._types else also)
        if key not in self._models:
            types = (*self._types, *((key[1],) if key[1] is not None else ()))
            tables = self._profiles.on(name, types, self._gpus) if self._profiles else None
            application = application_of(name)
            family = self._families.get(application.family if application else name)
            if tables is not None:
                self._models[key] = ModelledJob(MeasuredModel(tables), 0.0)
            elif family is not None:
                here = Families({name: family}).on(types, self._gpus)[name]
                noise, seed = self._settings.noise, self._settings.seed
                self._models[key] = ModelledJob(FamilyModel(name, here, noise, seed), 0.0)
            else:
                self._models[key] = None
        return self._models[key]

    def _rate_as_recorded(self, job: WorkloadJob, modelled_job: ModelledJob) -> float:
        """Progress per second at the start of the job, on the GPUs that its user asked for."""
        types = (job.gpu_type,) if job.gpu_type is not None else self._types
        node_gpus = self._settings.node_gpus or {}
        for gpu_type in types:
            shape = packed(job.gpus, node_gpus.get(gpu_type, NODE_GPUS))
            rate = modelled_job.rates(gpu_type, shape, modelled_job.batch(gpu_type, shape, job.batch_size))[0]
            if rate > 0:
                return rate
        found = f"duration_s of the model {job.model!r} with gpus={job.gpus}, batch_size={job.batch_size}"
        raise self._bad(job, found, f"a request that runs on any of {', '.join(types)}")

    def _bad(self, job: WorkloadJob, found: str, expected: str) -> BadInput:
        return BadInput([InputProblem(f"job {job.id!r}", None, found, expected)])


def packed(gpus: int, node_gpus: int) -> Shape:
    """The shape of `gpus` GPUs on the fewest nodes of this size, whole nodes first."""
    whole, rest = divmod(gpus, node_gpus)
    return (node_gpus,) * whole + ((rest,) if rest else ())


def advance(
    truth: JobTruth,
    gpu_type: str,
    shape: Shape,
    batch: Batch | None,
    progress: float,
    seconds: float,
    speed: float = 1.0,
) -> tuple[float, float]:
    """A job's progress after `seconds` with one batch size, and the seconds that passed until it was done.

    `speed` is a factor on its rate, as for interference and stragglers.
    """
    rates, ends, work = truth.rates(gpu_type, shape, batch), truth.epoch_ends, truth.work
    first, passed_s = bisect_right(ends, progress), 0.0
    for end, its_rate in zip((*ends[first : bisect_left(ends, work)], work), rates[first:], strict=False):
        if progress >= end:  # the work is done, or the epoch is empty
            continue
        rate = speed * its_rate
        if rate <= 0:
            return progress, seconds
        needed_s = (end - progress) / rate
        if passed_s + needed_s > seconds:
            return progress + (seconds - passed_s) * rate, seconds
        progress, passed_s = end, passed_s + needed_s
    return progress, passed_s


def rate_at(truth: JobTruth, gpu_type: str, shape: Shape, batch: Batch | None, progress: float) -> float:
    """Progress per second of a job with this progress."""
    return truth.rates(gpu_type, shape, batch)[bisect_right(truth.epoch_ends, progress)]


def _total(batch: Batch, replicas: int) -> int:
    return replicas * batch.atomic_batch * (batch.accumulation_steps + 1)
