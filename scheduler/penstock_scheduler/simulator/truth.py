"""How fast simulated jobs really are. No policy sees this; it sees what a real cluster would show it, `JobTruth.seen`.

Where a job's speed comes from, the first that there is:

1. measured tables of its model (`--profiles DIR`), interpolated as Sia's simulator does: an exact placement linearly in
   the batch, any other linearly over (nodes, GPUs, batch) of all that was measured. What even that does not reach is
   taken from our fit of the throughput model to the table: the reference stops there. Statistical efficiency is that of
   recorded trainings, epoch by epoch.
2. the family of its model in the catalogue, perhaps with noise on the step times, so that the catalogue is not exactly
   right.
3. its recorded duration: GPUs add up, on any type.

Progress is counted in samples of training at the model's initial batch size, as `Estimator.goodput` is; of a job
without a model in GPU-seconds of the type that its duration was recorded on.

Answers are kept by (GPU type, shape, batch) for all epochs E at once, so that only the first of a kind costs more than
a microsecond.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from penstock_profiles.estimators import AnyEstimator, Batch
from penstock_profiles.families import Families, Family, load_families
from penstock_profiles.gpus import Gpus, load_gpus
from penstock_profiles.noise import GradientNoise
from penstock_profiles.throughput import FloatArray, ThroughputParams, compute_time, step_time
from penstock_scheduler.simulator.disturbances import draw
from penstock_scheduler.simulator.profiles import ModelTables, Profiles
from penstock_scheduler.simulator.workloads import BadInput, Problem, Workload, WorkloadJob, application_of

Shape = tuple[int, ...]
"""GPUs on each node."""

NODE_GPUS = 8
"""GPUs of a node whose size is not told: only what a duration with a model is worth depends on it."""

BATCHES_TRIED = 12
"""Batch sizes among which a job that is alone takes the best."""

PROFILED = 4
"""Batch sizes of a profile, each half of the next. Sia's section 3.1 has about ten, in less than 20 GPU-seconds."""


class StepTimes(NamedTuple):
    """One micro-step that synchronises."""

    step_s: float
    sync_s: float
    """The part of `step_s` that waits for gradients."""


class Measurement(NamedTuple):
    """What a running job measures, for `JobModel.observe(gpu_type, *seen)` or `Observations.add(*seen)`."""

    nodes: int
    replicas: int
    atomic_batch: int
    step_s: float
    sync_s: float


class ModelTruth(Protocol):
    """The truth about a model: what all jobs that train it share."""

    @property
    def initial_batch(self) -> int:
        """Samples; what progress is counted in, and the smallest total batch."""
        ...

    @property
    def max_batch(self) -> int:
        """Largest total batch size, samples."""
        ...

    @property
    def restart_s(self) -> float:
        """Seconds without progress when a job of it starts, or goes on elsewhere."""
        ...

    @property
    def restart_cost_s(self) -> float:
        """What a scheduler takes a restart to cost, s: its table may be wrong."""
        ...

    @property
    def training(self) -> float | None:
        """Progress of a whole training; None: not known."""
        ...

    def runs_on(self, gpu_type: str) -> bool:
        """Whether it has a speed there at all."""
        ...

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """Samples per GPU that fit into memory; 0 on a type that it does not run on."""
        ...

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """Times of a micro-step; None where it cannot run."""
        ...

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """`grad_sqr` and `grad_var`, at the initial batch size, while it trains at this total batch; both of shape
        (epochs,)."""
        ...

    @property
    def epoch_ends(self) -> Sequence[float]:
        """Progress at which each epoch but the last is completed, ascending; `noise` stays what it is in between."""
        ...

    def progress_of(self, epochs: float) -> float | None:
        """Progress of so many epochs; None if nobody knows."""
        ...


class MeasuredModel:
    """A model from measured tables and recorded trainings."""

    def __init__(self, tables: ModelTables) -> None:
        self._tables = tables
        self.initial_batch, self.max_batch = tables.initial_batch, tables.max_batch
        self.restart_s = tables.application.restart_s_simulated
        self.restart_cost_s = tables.application.restart_s_policy
        self._slowdown = tables.application.slowdown
        self._ends = [iterations * tables.initial_batch for iterations in tables.epoch_iterations]
        self.epoch_ends = tuple(self._ends[:-1])
        self.training: float | None = self._ends[-1]
        self._noise: dict[int, tuple[FloatArray, FloatArray]] = {}

    def runs_on(self, gpu_type: str) -> bool:
        """See `ModelTruth`."""
        return gpu_type in self._tables.types

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """See `ModelTruth`."""
        return self._tables.types[gpu_type].max_atomic_batch(shape) if self.runs_on(gpu_type) else 0

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """See `ModelTruth`. Calibration makes a step as long as it was on a real cluster, where the table's was
        shorter."""
        if not self.runs_on(gpu_type):
            return None
        times = self._tables.types[gpu_type].lookup(shape, atomic_batch)
        return None if times is None else StepTimes(times[0] * self._slowdown, times[1] * self._slowdown)

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """See `ModelTruth`."""
        if batch not in self._noise:
            self._noise[batch] = self._tables.noise(batch)
        return self._noise[batch]

    def progress_of(self, epochs: float) -> float | None:
        """See `ModelTruth`. Beyond the recorded epochs nothing is known."""
        if epochs > len(self._ends):
            return None
        return float(np.interp(epochs, range(len(self._ends) + 1), [0.0, *self._ends]))


class FamilyModel:
    """A model from the catalogue.

    Args:
        name: of the model, which the noise is drawn for.
        family: on the GPU types of the cluster.
        noise: standard deviation of the logarithm of what multiplies the step times; each shape has its own factor.
        seed: of the noise.
    """

    def __init__(self, name: str, family: Family, noise: float = 0.0, seed: int = 0) -> None:
        self._name, self._family, self._noise, self._seed = name, family, noise, seed
        self.initial_batch, self.max_batch = family.initial_batch, family.max_batch
        self.restart_s = self.restart_cost_s = family.restart_cost_s
        application = application_of(name)
        self._epoch_samples = application.epoch_samples if application else None
        self.training = float(application.epochs * application.epoch_samples) if application else None
        self.epoch_ends: tuple[float, ...] = ()
        """All of the training is as one epoch."""

    def runs_on(self, gpu_type: str) -> bool:
        """See `ModelTruth`."""
        return gpu_type in self._family.gpus

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """See `ModelTruth`."""
        return self._family.gpus[gpu_type].max_atomic_batch if self.runs_on(gpu_type) else 0

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """See `ModelTruth`."""
        if not 1 <= atomic_batch <= self.max_atomic_batch(gpu_type, shape):
            return None
        times = modelled(self._family.gpus[gpu_type].step, shape, atomic_batch)
        if self._noise == 0:
            return times
        where = (len(shape), sum(shape))
        factor = math.exp(self._noise * draw(self._seed, "family", self._name, gpu_type, *where).standard_normal())
        return StepTimes(times.step_s * factor, times.sync_s * factor)

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """See `ModelTruth`: one number for a whole training."""
        return np.array([self._family.grad_sqr]), np.array([self._family.grad_var])

    def progress_of(self, epochs: float) -> float | None:
        """See `ModelTruth`."""
        return None if self._epoch_samples is None else epochs * self._epoch_samples


class JobTruth(Protocol):
    """The truth about one job."""

    @property
    def work(self) -> float:
        """Progress at which it is done."""
        ...

    @property
    def restart_s(self) -> float:
        """Seconds without progress when it starts, or goes on elsewhere."""
        ...

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """A total batch (None: the initial one) over these GPUs, accumulated where memory asks for it; None: cannot
        run."""
        ...

    @property
    def epoch_ends(self) -> Sequence[float]:
        """Progress at which each epoch but the last is completed, ascending: where `rates` and `noise` change."""
        ...

    def rates(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Sequence[float]:
        """Progress per second in each epoch; 0 where it cannot run."""
        ...

    def seen(self, gpu_type: str, shape: Shape, batch: Batch | None) -> Measurement | None:
        """What it measures of its speed there; None if it cannot run or does not measure."""
        ...

    def noise(self, batch: Batch | None, replicas: int, progress: float) -> GradientNoise | None:
        """Its own estimate of its gradient's noise, at the model's initial batch size; None if it has none."""
        ...


class ModelledJob:
    """A job whose model's speed is known."""

    def __init__(self, model: ModelTruth, work: float) -> None:
        self.model, self.work, self.restart_s = model, work, model.restart_s
        self.epoch_ends = model.epoch_ends
        self._rates: dict[tuple[str, Shape, Batch], list[float]] = {}
        self._best_rates: dict[tuple[str, Shape], list[float]] = {}
        self._seen: dict[tuple[str, Shape, Batch], Measurement | None] = {}

    def of(self, work: float) -> ModelledJob:
        """Another job of the same model; the two share what was asked before."""
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
        """Progress per second in each epoch with the best of `BATCHES_TRIED` batch sizes in it; 0 where it cannot
        run."""
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
        """The work that is left, in samples of another initial batch size: as many as it needs at that size in this
        epoch."""
        sqr_E, var_E = self.model.noise(initial_batch)
        epoch = bisect_right(self.epoch_ends, progress)
        wasted = max(initial_batch / self.model.initial_batch - 1, 0.0) * sqr_E[epoch] / (sqr_E[epoch] + var_E[epoch])
        return float(max(self.work - progress, 0.0) * (1 + wasted))

    def profile(self, gpu_type: str) -> list[Measurement]:
        """What profiling it on one GPU of a type shows: a few batch sizes, the last the largest that fits."""
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
class RecordedJob:
    """A job of which only a duration is known: its GPUs add up, on any type, at that type's speed."""

    gpu_type: str | None
    work: float
    """GPU-seconds on `gpu_type`."""
    restart_s: float
    speeds: Mapping[str, float]
    """GPU type -> speed of one GPU relative to that of others; 1 where it is not given."""
    epoch_ends: tuple[float, ...] = ()

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """None: batches are not for it to say."""
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
    """A job that is exactly as fast as an estimator says."""

    estimator: AnyEstimator
    work: float
    """In the estimator's unit, times seconds."""
    restart_s: float = 30.0
    epoch_ends: tuple[float, ...] = ()

    def batch(self, gpu_type: str, shape: Shape, total: int | None = None) -> Batch | None:
        """None: the estimator has its best one in its goodput."""
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
    """What the truth is made of, beside the tables."""

    gpu_speeds: Mapping[str, float] | None = None
    """For jobs that are only recorded durations: speed of a GPU of each type, such as {"a100": 1, "h100": 2}."""
    noise: float = 0.0
    """How wrong the catalogue is; see `FamilyModel`."""
    restart_s: float = 30.0
    """Of jobs that are only recorded durations."""
    node_gpus: Mapping[str, int] | None = None
    """GPU type -> GPUs of one node."""
    seed: int = 0


class Truth:
    """The truth about the jobs of a workload on one cluster.

    Args:
        gpu_types: of the cluster, under its own names.
        profiles: measured tables; None: the catalogue alone.
        families: the catalogue; None: Penstock's own.
        settings: the rest.
        gpus: by whose names tables and families find the cluster's types; None: Penstock's own.
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
        """The truth about a job. Raises BadInput if its model is not known, or runs on no type of the cluster."""
        if job.model is None:
            assert job.duration_s is not None, "WorkloadJob has one of the two"
            speeds = self._settings.gpu_speeds or {}
            return RecordedJob(job.gpu_type, job.duration_s * job.gpus, self._settings.restart_s, speeds)
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
            raise self._bad(job, f"{what} of {job.model!r}, which nobody recorded", "samples instead")
        return modelled_job.of(work)

    def check(self, workload: Workload) -> None:
        """Raise BadInput with the first problems of jobs that `of` cannot answer, one for each model."""
        problems: dict[str | None, Problem] = {}
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
        """The model by this name, on the cluster's types and perhaps another, that a duration was recorded on."""
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
        """Progress per second of what the job's user asked for, when it begins."""
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
        return BadInput([Problem(f"job {job.id!r}", None, found, expected)])


def packed(gpus: int, node_gpus: int) -> Shape:
    """So many GPUs on the fewest nodes of this size, whole ones first."""
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
    """A job's progress after running for `seconds` with one batch, and how many of them passed before it was done.

    `speed` multiplies its rate, as interference and stragglers do.
    """
    rates, ends, work = truth.rates(gpu_type, shape, batch), truth.epoch_ends, truth.work
    first, passed_s = bisect_right(ends, progress), 0.0
    for end, its_rate in zip((*ends[first : bisect_left(ends, work)], work), rates[first:], strict=False):
        if progress >= end:  # the work is done, or an epoch is empty
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
    """Progress per second of a job that has come so far."""
    return truth.rates(gpu_type, shape, batch)[bisect_right(truth.epoch_ends, progress)]


def modelled(params: ThroughputParams, shape: Shape, atomic_batch: int) -> StepTimes:
    """Times of a micro-step by the throughput model."""
    step_s = float(step_time(params, len(shape), sum(shape), atomic_batch))
    return StepTimes(step_s, max(step_s - float(compute_time(params, atomic_batch)), 0.0))


def _total(batch: Batch, replicas: int) -> int:
    return replicas * batch.atomic_batch * (batch.accumulation_steps + 1)
