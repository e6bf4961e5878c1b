"""Learns a job's model from its own measurements, beginning with a prior or with nothing (Sia section 3.2).

For each GPU type, the model is the first of these that is available:

1. Steps on several GPUs were measured: a fit of them.
2. Steps on one GPU were measured, and synchronisation is known otherwise: from the catalogue's prior for this type, or
   else from a *donor*. That is the type with runs on several GPUs whose one-GPU steps are most similar. Its
   synchronisation is scaled in proportion to its compute time.
3. Only steps on one GPU were measured: synchronisation is free until it is measured, so that the policy tries it.
4. The catalogue's prior.
5. A donor, made faster or slower by the ratio of the two types for the model families of the catalogue.
6. Of a type of the site of which nothing tells: the model of the slowest other type.

Case 2 is Sia's est_B(N) = xput_B(1) / xput_A(1) x xput_A(N), exactly so if the one-GPU steps of A and B are in
proportion; otherwise B keeps its own.

While a job is believed to be like earlier jobs of its kind (`kin`), their model comes before all of these: made faster
or slower by what the job itself has measured on the type. It knows more shapes than the job has run on.

Two departures from Sia's artifact: the donor is not the first type of a
dictionary, and a type with one-GPU steps only does not scale perfectly once another type has shown how the job
synchronises.

What earlier jobs of the same kind have shown, and how far a new job is believed to be like them.

A new job starts with the model of its kin. Each of its own measurements raises or lowers the belief that it is one of them. Once
it is more likely a stranger, the kin's model is dropped and only its own measurements count, so that a wrong match costs the job
its first placement and not its later ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock_profiles.estimators import GpuModel, LinearEstimator, TrainingEstimator
from penstock_profiles.families import Families
from penstock_profiles.gpus import Gpus
from penstock_profiles.noise import GradientNoise
from penstock_profiles.observations import NOTICEABLE, Measured, Observations
from penstock_profiles.profiles import Profile
from penstock_profiles.throughput import FloatArray, ThroughputParams, compute_time, step_time
from penstock_profiles.wire import Observation

CERTAINTY = 0.8
"""Belief before the first measurement."""

STRANGERS_CERTAINTY = 0.6
"""The same for kin of another user or at another site, who may mean another program by the same name."""

NEAR, FAR = 0.1, 1.0
"""Scale of the error of a step's time, as the logarithm of measured over predicted: for kin, and for a stranger."""

MOST_ODDS = 4.0
"""Bound of the logarithm of the odds, so that a job that changes is noticed after two measurements that are far off."""


@dataclass(frozen=True, slots=True)
class Kin:
    """What earlier jobs of one kind have shown together."""

    estimator: TrainingEstimator
    most_gpus: int
    """Most GPUs on which one of them was measured."""
    work: tuple[float, ...] = ()
    """Whole work of those whose work is known, in samples at the estimator's initial batch size."""
    certainty: float = CERTAINTY
    """Belief that a new job is like them, in (0, 1)."""


class Belief:
    """The probability that a job is like its kin."""

    def __init__(self, certainty: float = CERTAINTY) -> None:
        self._log_odds = math.log(certainty / (1 - certainty))

    def saw(self, predicted_s: float, measured_s: float) -> None:
        """Compare a step of the job with what its kin's model predicts. Both densities are Laplace's."""
        off = abs(math.log(measured_s / predicted_s))
        gained = (math.log(1 / NEAR) - off / NEAR) - (math.log(1 / FAR) - off / FAR)
        self._log_odds = min(max(self._log_odds + gained, -MOST_ODDS), MOST_ODDS)

    @property
    def probability(self) -> float:
        """In (0, 1)."""
        return 1 / (1 + math.exp(-self._log_odds))

    @property
    def holds(self) -> bool:
        """Whether the job is more likely kin than a stranger."""
        return self._log_odds > 0


def kind_by_name(name: str) -> str:
    """A job's name without the numbers in it: `train-lr0.1-17` and `train-lr0.3-18` are one kind."""
    return re.sub(r"\d+(?:\.\d+)?", "#", name)


class JobModel:
    """One training job's model, which improves with each measurement.

    `estimator` is the same object until the model changes, as `matrix.GoodputMatrix` requires.

    Args:
        initial_batch: total batch size that progress is counted in, in samples, >= 1.
        max_batch: largest total batch size, in samples, >= `initial_batch`.
        fixed_batch: whether the total batch stays `initial_batch`.
        prior: the catalogue's model of the job (`Family.estimator`); None if its family is unknown.
        kin: the model of earlier jobs of its kind, at the same initial batch size; None: there are none.
        certainty: how far the job is believed to be like them before its first measurement, in (0, 1).
        families: for case 5.
        gpu_types: those of the site, for case 6. The job does not run on types that nothing tells of.
        gpus: to estimate the batch that fits into a type's memory if only another type's is known.
        gpus_per_replica: returns the number of GPUs of a type that hold one replica of the model. It is used for types
            on which the job has not run yet; reports contain it for the others.

    Raises:
        ValueError: the batch sizes are not 1 <= initial <= max.
    """

    def __init__(
        self,
        initial_batch: int,
        max_batch: int,
        *,
        fixed_batch: bool = False,
        prior: TrainingEstimator | None = None,
        kin: TrainingEstimator | None = None,
        certainty: float = CERTAINTY,
        families: Families | None = None,
        gpus: Gpus | None = None,
        gpus_per_replica: Callable[[str], int] = lambda _: 1,
        gpu_types: Collection[str] = (),
    ) -> None:
        if not 1 <= initial_batch <= max_batch:
            raise ValueError(
                f"initial_batch={initial_batch}, max_batch={max_batch}: choose 1 <= initial_batch <= max_batch"
            )
        self.has_run = False
        """Whether a run of the job has measured a step that counts; a profile does not."""
        self._batches = (initial_batch, max_batch, fixed_batch)
        self._prior, self._families, self._gpus, self._gpu_types = prior, families, gpus, gpu_types
        self._observations: dict[str, Observations] = {}
        self._limits: dict[str, int] = {}
        self._requested_per_replica = gpus_per_replica
        self._per_replica: dict[str, int] = {}
        """GPU type -> GPUs of one replica of the model, as reported."""
        self._fits: dict[str, ThroughputParams] = {}
        self._stale_fits: set[str] = set()
        self._fitted_shapes: set[tuple[str, int, int]] = set()
        self._kin, self._belief = kin, Belief(certainty)
        self._compared: set[tuple[str, int, int, int]] = set()
        guess = prior if prior is not None else kin
        self._noise = GradientNoise(guess.grad_sqr, guess.grad_var) if guess is not None else None
        self._models: dict[str, GpuModel] | None = None
        """The models that `_estimator` consists of, by GPU type; None: they must be learnt again."""
        self._estimator: TrainingEstimator | LinearEstimator | None = None

    def observe(
        self,
        gpu_type: str,
        nodes: int,
        replicas: int,
        atomic_batch: int,
        step_s: float,
        sync_s: float = 0.0,
        steps: float = 1.0,
    ) -> None:
        """Learn from measured steps; see `Observations.add` for the arguments and errors."""
        observations = self._observations.get(gpu_type, Observations())
        news = observations.add(nodes, replicas, atomic_batch, step_s, sync_s, steps)
        self._observations[gpu_type] = observations
        if atomic_batch > self._limits.get(gpu_type, 0):
            self.observe_limit(gpu_type, atomic_batch)
        self._compare_with_kin(gpu_type, nodes, replicas, atomic_batch, step_s)
        if news and not self._predicted(gpu_type, nodes, replicas, atomic_batch, step_s, sync_s):
            self._fitted_shapes.add((gpu_type, nodes, replicas))
            self._stale_fits.add(gpu_type)
            self._models = self._estimator = None

    def observe_report(self, seen: Observation) -> None:
        """Learn from an observation of a run or a profile: its steps, and its gradient noise if it has an estimate.

        With accumulation, all micro-steps compute equally long, and the last one synchronises too. On several GPUs,
        steps without a measured synchronisation time are ignored, since a fit cannot use them.
        """
        if seen.grad_sqr is not None and seen.grad_var is not None and seen.grad_sqr + seen.grad_var > 0:
            self.observe_noise(GradientNoise(seen.grad_sqr, seen.grad_var))
        if self._per_replica.get(seen.gpu_type) != seen.gpus_per_replica:
            self._per_replica[seen.gpu_type] = seen.gpus_per_replica
            self._models = self._estimator = None
        sync_s = seen.sync_time_s if seen.replicas > 1 else 0.0
        if sync_s is not None and sync_s < seen.step_time_s:
            compute_s = (seen.step_time_s - sync_s) / (seen.accumulation_steps + 1)
            # A replica that spans nodes is still one rank of the all-reduce.
            shape = min(seen.nodes, seen.replicas), seen.replicas
            self.observe(seen.gpu_type, *shape, seen.atomic_batch, compute_s + sync_s, sync_s, seen.steps)
            self.has_run = True

    def observe_profile(self, profile: Profile) -> None:
        """Learn from a profile that `penstock profile run` measured, under the profile's GPU type."""
        before = self.has_run
        for seen in profile.observations:
            self.observe_report(seen)
        self.has_run = before

    def _compare_with_kin(self, gpu_type: str, nodes: int, replicas: int, atomic_batch: int, step_s: float) -> None:
        """Let the first measurement of each shape and batch size change the belief that the job is like its kin."""
        shape = gpu_type, nodes, replicas, atomic_batch
        if self._kin is None or gpu_type not in self._kin.models or shape in self._compared:
            return
        self._compared.add(shape)
        believed = self._belief.holds
        self._belief.saw(float(step_time(self._kin.models[gpu_type].step, nodes, replicas, atomic_batch)), step_s)
        if self._belief.holds != believed:
            self._models = self._estimator = None

    @property
    def like_kin(self) -> bool:
        """Whether the job is believed to be like its kin."""
        return self._kin is not None and self._belief.holds

    @property
    def measurements(self) -> dict[str, Measured]:
        """The averages of what was measured, by GPU type."""
        return {gpu_type: seen.measured() for gpu_type, seen in self._observations.items()}

    @property
    def limits(self) -> dict[str, int]:
        """The largest atomic batch that is known to fit, by GPU type."""
        return dict(self._limits)

    @property
    def noise(self) -> GradientNoise | None:
        """The newest estimate of its gradient noise, or else the prior's."""
        return self._noise

    def _predicted(
        self, gpu_type: str, nodes: int, replicas: int, atomic_batch: int, step_s: float, sync_s: float
    ) -> bool:
        """Whether the present fit includes this shape and predicts the step closely enough: a new fit is expensive."""
        params = self._fits.get(gpu_type)
        if params is None or gpu_type in self._stale_fits or (gpu_type, nodes, replicas) not in self._fitted_shapes:
            return False
        compute = float(compute_time(params, atomic_batch)) - (step_s - sync_s)
        step = float(step_time(params, nodes, replicas, atomic_batch)) - step_s
        return max(abs(compute), abs(step)) <= NOTICEABLE * step_s

    def observe_limit(self, gpu_type: str, max_atomic_batch: int) -> None:
        """Set the largest atomic batch that is known to fit into this type's memory. A larger one that runs replaces
        it."""
        if not max_atomic_batch >= 1:
            raise ValueError(
                f"max_atomic_batch={max_atomic_batch} must be at least 1; leave out a GPU type on which no sample fits"
            )
        if self._limits.get(gpu_type) != max_atomic_batch:
            self._limits[gpu_type] = max_atomic_batch
            self._models = self._estimator = None

    def observe_noise(self, noise: GradientNoise) -> None:
        """Set the job's own estimate of its gradient noise, at `initial_batch`. It replaces the prior's."""
        if self._noise is None or abs(_efficiency_loss(noise) / _efficiency_loss(self._noise) - 1) > NOTICEABLE:
            self._noise = noise
            self._estimator = None

    @property
    def measured(self) -> frozenset[str]:
        """GPU types on which the job's own steps were measured, in runs or stored profiles."""
        return frozenset(self._observations)

    @property
    def estimator(self) -> TrainingEstimator | LinearEstimator:
        """The present model; a `LinearEstimator` if nothing is known."""
        if self._estimator is None:
            self._estimator = self._learn()
        return self._estimator

    def _learn(self) -> TrainingEstimator | LinearEstimator:
        if self._models is None:
            self._models = self._learn_models()
            if self._models:
                self._models = on_all(self._models, self._gpu_types)
        if not self._models:
            return LinearEstimator()
        initial, largest, fixed = self._batches
        noise = self._noise if self._noise is not None else GradientNoise(grad_sqr=1.0, grad_var=0.0)
        return TrainingEstimator(
            models=self._models,
            initial_batch=initial,
            max_batch=largest,
            grad_sqr=noise.grad_sqr,
            grad_var=noise.grad_var,
            fixed_batch=fixed,
        )

    def _learn_models(self) -> dict[str, GpuModel]:
        for gpu_type in sorted(self._stale_fits):
            columns = tuple(tuple(column.tolist()) for column in self._observations[gpu_type].measured())
            params = _fitted(columns, self._fits.get(gpu_type))
            if params is not None:
                self._fits[gpu_type] = params
        self._stale_fits.clear()
        known = {gpu_type: self._observations[gpu_type].measured() for gpu_type in self._fits}
        scaled = {gpu_type for gpu_type, measured in known.items() if (measured.replicas > 1).any()}
        prior = {} if self._prior is None else self._prior.models
        steps: dict[str, ThroughputParams] = {name: model.step for name, model in prior.items()}
        if self._kin is not None and self._belief.holds:
            steps |= {name: model.step for name, model in self._kin.models.items()}
        for gpu_type, own in self._fits.items():
            if self._kin is not None and self._belief.holds and gpu_type in self._kin.models:
                steps[gpu_type] = _as_measured(self._kin.models[gpu_type].step, known[gpu_type])
            elif gpu_type in scaled:
                steps[gpu_type] = own
            elif gpu_type in prior:
                steps[gpu_type] = _with_sync(own, prior[gpu_type].step, 1.0)
            elif scaled:
                donor = min(sorted(scaled), key=lambda name: _difference(self._fits[name], known[gpu_type]))
                slower = _slowdown(self._fits[donor], known[gpu_type])
                steps[gpu_type] = _with_sync(own, self._fits[donor], slower)
            else:
                steps[gpu_type] = own
        steps |= self._from_other_types(steps)
        return {
            name: GpuModel(step, self._limit(name, steps), self._gpus_per_replica(name))
            for name, step in sorted(steps.items())
        }

    def _gpus_per_replica(self, gpu_type: str) -> int:
        if gpu_type in self._per_replica:
            return self._per_replica[gpu_type]
        return self._requested_per_replica(gpu_type) if max(self._per_replica.values(), default=1) > 1 else 1

    def _from_other_types(self, steps: Mapping[str, ThroughputParams]) -> dict[str, ThroughputParams]:
        """Case 5: types that only the catalogue's families know, by the median ratio to the most similar known type."""
        found: dict[str, ThroughputParams] = {}
        if self._families is None:
            return found
        speeds = self._families.slowdowns
        for gpu_type in sorted({to for _, to in speeds} - set(steps)):
            ratios = {donor: speeds[donor, gpu_type] for donor in sorted(steps) if (donor, gpu_type) in speeds}
            if ratios:
                donor = min(ratios, key=lambda name: abs(np.log(ratios[name])))
                found[gpu_type] = slowed(steps[donor], ratios[donor])
        return found

    def _limit(self, gpu_type: str, steps: Mapping[str, ThroughputParams]) -> int:
        """Largest atomic batch: one that has run, the prior's, or another type's in proportion to the types'
        memories."""
        prior = (
            {} if self._prior is None else {name: model.max_atomic_batch for name, model in self._prior.models.items()}
        )
        if self._kin is not None and self._belief.holds and gpu_type in self._kin.models:
            return max(self._kin.models[gpu_type].max_atomic_batch, self._limits.get(gpu_type, 1))
        limits = prior | self._limits
        if gpu_type in limits:
            return max(limits[gpu_type], self._limits.get(gpu_type, 1))
        others = [name for name in sorted(limits) if name in steps]
        if not others:
            return self._batches[1]
        smallest = min(others, key=lambda name: limits[name])
        memory = {name: self._memory_gb(name) for name in (gpu_type, *others)}
        if memory[gpu_type] is None or None in memory.values():
            return limits[smallest]
        return max(int(min(limits[name] * memory[gpu_type] / memory[name] for name in others)), 1)  # type: ignore[operator]

    def _memory_gb(self, gpu_type: str) -> int | None:
        if self._gpus is None:
            return None
        try:
            return self._gpus[self._gpus.type_of(gpu_type)].memory_gb
        except LookupError:
            return None


def on_all(models: Mapping[str, GpuModel], gpu_types: Collection[str]) -> dict[str, GpuModel]:
    """These models of a job, at least one, and for each further type that of the one that is slowest on one GPU."""
    slowest = max(sorted(models), key=lambda name: models[name].step.alpha_c + models[name].step.beta_c)
    return dict(models) | dict.fromkeys(sorted({*gpu_types} - models.keys()), models[slowest])


@lru_cache(maxsize=4096)
def _fitted(columns: tuple[tuple[float, ...], ...], start: ThroughputParams | None) -> ThroughputParams | None:
    """A fit of the columns of `Measured`. It is cached, since jobs with the same profile, as in a simulation, share
    it."""
    # SciPy takes a second to import, and most programs that import this module fit nothing.
    from penstock_profiles.fit import fit_throughput

    return fit_throughput(Measured(*map(np.array, columns)), start).params


def _efficiency_loss(noise: GradientNoise) -> float:
    """sqr / (sqr + var), which says how fast efficiency falls with the batch. A small addend keeps ratios finite."""
    return noise.grad_sqr / (noise.grad_sqr + noise.grad_var) + 1e-6


def _one_gpu_ratio(donor: ThroughputParams, measured: Measured) -> FloatArray:
    """Ratio of the measured one-GPU steps to the donor's at the same atomic batches."""
    alone = measured.replicas == 1
    return np.asarray(measured.step_s[alone] / compute_time(donor, measured.atomic_batch[alone]))


def _difference(donor: ThroughputParams, measured: Measured) -> float:
    """How much the measured one-GPU steps differ from the donor's: root mean square of the logarithm of their ratio."""
    return float(np.sqrt(np.mean(np.log(_one_gpu_ratio(donor, measured)) ** 2)))


def _slowdown(donor: ThroughputParams, measured: Measured) -> float:
    """xput_A(1) / xput_B(1) at the largest measured batch, where fixed costs matter least."""
    return float(_one_gpu_ratio(donor, measured)[np.argmax(measured.atomic_batch[measured.replicas == 1])])


def _as_measured(kin: ThroughputParams, measured: Measured) -> ThroughputParams:
    """The kin's times, made longer or shorter by the mean ratio of what was measured."""
    predicted = step_time(kin, measured.nodes, measured.replicas, measured.atomic_batch)
    return slowed(kin, float(np.exp(np.mean(np.log(measured.step_s / predicted)))))


def _with_sync(own: ThroughputParams, donor: ThroughputParams, slower: float) -> ThroughputParams:
    """The compute time of `own` with `slower` times the donor's synchronisation time."""
    return dataclasses.replace(slowed(donor, slower), alpha_c=own.alpha_c, beta_c=own.beta_c)


def slowed(params: ThroughputParams, times: float) -> ThroughputParams:
    """`params` with every time `times` as long."""
    names = ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n")
    return dataclasses.replace(params, **{name: times * getattr(params, name) for name in names})
