"""How far a job's claims count: what its user declares, and what it reports of its own speed and end.

Nobody can check a claim before the job runs, and a job may report anything. So each claim has a bound, and counts only as far as
what Penstock sees itself, or what the job measured itself, agrees with it:

- *GPUs.* Twice the GPUs make a job at most twice as fast. A declared table is cut at that, from its smallest number of GPUs; the
  other models have that form anyway.
- *GPU types.* A type makes a job at most `MARGIN` times as much faster as it makes any model family of the catalogue. Types that
  a table compares and the job has not measured differ at most as for a job of which nothing is known.
- *Steps that progress contradicts.* If a job's progress on a type is less than half of what its steps there promise, compared
  with its other types, then its progress counts. Steps on more GPUs than it has held, or on types that it has not, are ignored.
- *A table that the job's steps contradict.* What the job measured counts in place of what the table says, and its other entries
  count less by the same factor.
- *Silence.* A job that runs and measures nothing is taken to scale by `SILENT_POWER` at most. A table, a model family, a profile
  or earlier jobs of its kind may say that it scales worse. The last three count in full for `GRACE_S` on its GPUs.
- *The end.* A job that has worked, by its own speed, more than `SLACK` times the work that it first said it has counts as a very
  long one.
- *The cost of a restart.* `SpecModels` bounds it.

A job that makes up all its reports in agreement with each other, and does not end when it says, is found out by its end. Until
then it counts as one that scales perfectly, and never as more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator, TrainingEstimator
from penstock_profiles.estimators.base import Table, interpolate
from penstock_profiles.families import Families
from penstock_profiles.learning import slowed
from penstock_profiles.wire import Observation
from penstock_scheduler.model import JobFacts, Promise
from penstock_scheduler.people.units import shortened, times

MARGIN = 1.5
"""How many times the largest ratio of two GPU types in the catalogue a job's own ratio may be."""

UNKNOWN_RATIO = 10.0
"""Largest ratio of two GPU types that the catalogue does not compare. In the catalogue, bert-squad is 10.6 times as fast on an
A100 as on a T4. Narayanan et al. (OSDI '20, figure 1) measured up to 10 between a K80 and a V100."""

NOTICEABLE = 1.25
"""How many times the measured speed a declared one must be to be named a contradiction: steps of one job differ by less."""

SLACK = 1.5
"""How many times the work that a job said it has it may have done before its end counts as unknown. Saving, evaluating and
waiting for data take part of its time, and are no part of its speed."""

GRACE_S = 300.0
"""Seconds on its largest number of GPUs that a job may have, in addition, to start and to save its result."""

SEEN = 9
"""Newest measurements of one number of GPUs of a type that count; their median does."""

SILENT_POWER = 0.5
"""A job that runs and measures nothing is taken to be faster by at most this power of its GPUs: as `sia` takes any job beyond the
GPUs that it has run on (`unproven_power`). Else silence would be worth more than the truth about a job that scales badly."""

DOUBLINGS = 13
"""Numbers of GPUs, from one replica to 4,096 times as many, of which the model of a silent job tells."""

AS_LONG_AGAIN = 10.0
"""How many times the work that it has done a job is taken to have left that should have ended by what it said."""

VERY_LONG_GPU_S = 1e9
"""GPU-seconds that a job is taken to have left that reported only what cannot be. It is also taken not to scale."""

Ratio = Callable[[str, str], float]
"""(a GPU type, another) -> how many times as fast the first may make a job at most."""


def ratio_of(families: Families) -> Ratio:
    """The bound for what a job measured itself."""
    return lambda a, b: MARGIN * max(families.fastest.get((a, b), UNKNOWN_RATIO), 1.0)


def usual_ratio_of(families: Families, gpu_types: Collection[str]) -> Ratio:
    """The bound for what a job only declares: the ratio that a job of which nothing is known is taken to have.

    Nothing is known of types that the site does not have. They bound no other type.
    """

    def usual(a: str, b: str) -> float:
        return max(families.slowdowns.get((a, b), 1.0), 1.0) if a in gpu_types and b in gpu_types else math.inf

    return usual


def bounded(model: TrainingEstimator, ratio: Ratio) -> TrainingEstimator:
    """The model with no GPU type faster than plausible; the very object if none is."""
    per_gpu = {}
    for gpu_type, on_type in model.models.items():
        unit = np.array([on_type.gpus_per_replica])
        rate = float(model.goodput(gpu_type, np.array([1]), unit)[0]) / on_type.gpus_per_replica
        if rate > 0:
            per_gpu[gpu_type] = rate
    most = _most(per_gpu, ratio)
    too_fast = {name: rate / most[name] for name, rate in per_gpu.items() if rate > most[name] * (1 + 1e-6)}
    return slower_on(model, too_fast)


def bounded_table(table: Table, ratio: Ratio, power: float = 1.0) -> Table:
    """The table with no entry that is faster than plausible: at most this power of GPUs, and the ratios of types."""
    firsts, per_gpu = _firsts(table), _per_gpu(table)
    most = _most(per_gpu, ratio)

    def counts(gpu_type: str, gpus: int, rate: float) -> float:
        first = firsts[gpu_type]
        return min(rate / per_gpu[gpu_type], first * math.pow(gpus / first, power)) * most[gpu_type]

    return {
        gpu_type: {gpus: counts(gpu_type, gpus, rate) if rate > 0 else 0.0 for gpus, rate in rates.items()}
        for gpu_type, rates in table.items()
    }


def _firsts(table: Table) -> dict[str, int]:
    """The smallest number of GPUs of each type that has a rate."""
    firsts = {name: min((gpus for gpus, rate in rates.items() if rate > 0), default=0) for name, rates in table.items()}
    return {name: gpus for name, gpus in firsts.items() if gpus}


def _per_gpu(table: Table) -> dict[str, float]:
    """Rate for each GPU of a type, at its smallest number."""
    return {name: table[name][gpus] / gpus for name, gpus in _firsts(table).items()}


def _most(per_gpu: Mapping[str, float], ratio: Ratio) -> dict[str, float]:
    """The most that one GPU of each type may be worth, by what those of the other types are worth."""
    return {
        name: min([rate, *(other * ratio(name, of) for of, other in per_gpu.items() if of != name)])
        for name, rate in per_gpu.items()
    }


@dataclass(slots=True)
class TableCheck:
    """A declared table beside what the job has measured."""

    declared: Table
    measured: dict[tuple[str, int], deque[float]] = field(default_factory=dict)
    """(GPU type, GPUs) -> samples/s, the newest last."""

    def saw(self, seen: Observation, most_gpus: int) -> None:
        """Take over a measurement on no more GPUs than the job has held, of which the table says something."""
        where = seen.gpu_type, seen.gpus
        if seen.gpus > most_gpus or not self._says(*where):
            return
        rate = seen.samples_per_s if seen.goodput is None else seen.goodput
        if rate > 0:
            self.measured.setdefault(where, deque(maxlen=SEEN)).append(rate)

    def _says(self, gpu_type: str, gpus: int) -> float:
        return float(interpolate(self.declared, gpu_type, np.array([1]), np.array([gpus]), outside=0.0)[0])

    def believed(self, unmeasured: Ratio, ratio: Ratio) -> tuple[Table, str]:
        """The table as it counts, and what is wrong with the declared one, as a sentence; empty: nothing.

        Args:
            unmeasured: the bound for types that the job has not measured, with another that it has or has not.
            ratio: that between two types that it has measured.
        """
        seen = {where: median(rates) for where, rates in self.measured.items()}
        types = {gpu_type for gpu_type, _ in seen}

        def of_types(a: str, b: str) -> float:
            return (ratio if a in types and b in types else unmeasured)(a, b)

        table, off, worst = self.declared, 1.0, None
        if seen:
            first = min(seen, key=lambda where: (where[1], where))
            scale = self._says(*first) / seen[first]
            offs = {where: rate * scale / self._says(*where) for where, rate in seen.items()}
            worst = min(offs, key=lambda where: (offs[where], where))
            off = min(offs[worst], 1.0)
            table = {
                gpu_type: {
                    gpus: rate * (off if gpu_type not in types or gpus > first[1] else 1.0)
                    for gpus, rate in rates.items()
                }
                for gpu_type, rates in table.items()
            }
            for (gpu_type, gpus), rate in seen.items():
                table[gpu_type][gpus] = rate * scale
        if worst is not None and off * NOTICEABLE < 1:
            what = f"it measures {off:.0%} of the speed that its goodput_table gives for {worst[1]} {worst[0]} GPUs"
            return bounded_table(table, of_types), f"{what}, so what it measures counts instead: correct the table"
        per_gpu = _per_gpu(self.declared)
        most = _most(per_gpu, ratio)
        over, gpus, gpu_type = max(
            (
                (rate / per_gpu[name] / gpus, gpus, name)
                for name in per_gpu
                for gpus, rate in self.declared[name].items()
            ),
            default=(0.0, 0, ""),
        )
        text = ""
        fast = max(per_gpu, key=lambda name: (per_gpu[name] / most[name], name), default="")
        if fast and per_gpu[fast] > NOTICEABLE * most[fast]:
            text = (
                f"by its goodput_table, a {shortened(fast, 40)} GPU makes it {times(per_gpu[fast] / most[fast])} as fast as is "
                "plausible beside its other types, so it counts for less: correct the table"
            )
        elif over > NOTICEABLE:
            text = (
                f"by its goodput_table, it is {times(over)} as fast on {gpus} {shortened(gpu_type, 40)} GPUs as in proportion "
                "to its fewest, and no job is, so they count in proportion: correct the table"
            )
        return bounded_table(table, of_types, 1.0 if seen else SILENT_POWER), text


FALLS_BEHIND = 0.5
"""Pace of a type, relative to the job's best one, below which its progress counts and not its steps. Evaluating, saving and
waiting for data take less of the time of an honest job, and about the same part on all types."""


@dataclass(slots=True)
class PaceCheck:
    """How much progress a job makes, relative to what the steps that it reports promise."""

    last: tuple[int, Observation, float] | None = None
    """Epoch, observation and time of the newest report."""
    rates: dict[str, deque[tuple[int, int, float]]] = field(default_factory=dict)
    """GPU type -> (nodes, GPUs, progress/s), the newest last."""

    def saw(self, epoch: int, seen: Observation, time_s: float) -> None:
        """Take over a measurement: the progress since the one before, if that was on the same GPUs of the same run."""
        before, self.last = self.last, (epoch, seen, time_s)
        if before is None or before[0] != epoch or time_s <= before[2]:
            return
        where, then = (seen.gpu_type, seen.nodes, seen.gpus), before[1]
        if where == (then.gpu_type, then.nodes, then.gpus):
            rate = max(seen.progress - then.progress, 0.0) / (time_s - before[2])
            self.rates.setdefault(seen.gpu_type, deque(maxlen=SEEN)).append((seen.nodes, seen.gpus, rate))

    def behind(self, model: TrainingEstimator) -> dict[str, float]:
        """GPU type -> how many times slower it is than the model says, where that is a contradiction."""
        paces = {}
        for gpu_type, rates in self.rates.items():
            nodes, gpus = (np.array([each[n] for each in rates]) for n in (0, 1))
            says = model.goodput(gpu_type, nodes, gpus)
            if len(rates) > 1 and (says > 0).all():
                paces[gpu_type] = float(np.median([each[2] for each in rates] / says))
        best = max(paces.values(), default=0.0)
        return {name: best / max(pace, 1e-9 * best) for name, pace in paces.items() if pace < FALLS_BEHIND * best}


def slower_on(model: TrainingEstimator, behind: Mapping[str, float]) -> TrainingEstimator:
    """The model with these types slower by these factors; the very object if there are none."""
    if not behind:
        return model
    models = {
        name: replace(on_type, step=slowed(on_type.step, behind[name])) if name in behind else on_type
        for name, on_type in model.models.items()
    }
    return replace(model, models=models)


def as_silent(model: AnyEstimator, ratio: Ratio, power: float = SILENT_POWER) -> AnyEstimator:
    """The model of a job that runs and has measured nothing: at most this power of its GPUs, and the ratios of types."""
    if isinstance(model, LinearEstimator):
        return replace(model, power=power)
    assert isinstance(model, TrainingEstimator), "tables are checked by `TableCheck`"
    table = {}
    for gpu_type, on_type in model.models.items():
        counts = on_type.gpus_per_replica * 2 ** np.arange(DOUBLINGS)
        rates = model.goodput(gpu_type, np.ones_like(counts), counts)
        table[gpu_type] = dict(zip(counts.tolist(), rates.tolist(), strict=True))
    return TableEstimator(bounded_table(table, ratio, power))


def promise(total: float, done: float, model: AnyEstimator, gpus: int, gpu_types: Iterable[str]) -> Promise:
    """What a job said of its work, with the least that each GPU-second has done of it, by its own speed.

    Args:
        total: the work that it first said it has.
        done: what it says that it has done.
        model: its model.
        gpus: the most GPUs that it has held.
        gpu_types: those of the site.
    """
    counts = np.array(sorted({2**power for power in range(gpus.bit_length())} | {max(gpus, 1)}))
    least = {}
    for gpu_type in sorted(gpu_types):
        rates = np.concatenate(
            [model.goodput(gpu_type, nodes, counts) / counts for nodes in (np.ones_like(counts), counts)]
        )
        if (rates > 0).any():
            least[gpu_type] = float(rates[rates > 0].min())
    return Promise(total, done, gpus, least)


def believed(facts: JobFacts) -> JobFacts:
    """The facts, with the model of silence for a job that has run for long and measured nothing, and without what is known of the
    end of one that should have ended long ago by what it said."""
    said = facts.promise
    if said is None:
        return facts
    held_gpu_s = sum(facts.attained_gpu_s.values())
    if held_gpu_s <= GRACE_S * said.gpus:
        return facts
    if said.silent is not None:
        facts = replace(facts, model=said.silent, largest_run_gpus=said.gpus)
    if facts.remaining_work is None and not facts.likely_work:
        return facts
    least = sum(gpu_s * said.least.get(gpu_type, 0.0) for gpu_type, gpu_s in facts.attained_gpu_s.items())
    least *= (1 - GRACE_S * said.gpus / held_gpu_s) / SLACK
    if facts.remaining_work is not None:
        if least <= said.work:
            return facts
        text = (
            "it has run for longer than the work that it first reported takes at the speed that it reports, so it counts as a "
            "very long job: correct the `total` and the step times of its reports"
        )
        left = AS_LONG_AGAIN * SLACK * least
        return replace(facts, remaining_work=None, likely_work=(left,), doubts=(*facts.doubts, text))
    more = max(least - said.done, 0.0)
    return (
        replace(facts, likely_work=tuple(work - more for work in facts.likely_work if work > more)) if more else facts
    )
