"""Results of several simulations side by side: each policy, each over seeds."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.simulator.frames import SimulationResult
from penstock_scheduler.simulator.metrics import JobRow, Summary, job_rows, summarise
from penstock_scheduler.simulator.run import Driving, Scenario, Simulation, Tick, driving_of, simulate_policy

if TYPE_CHECKING:
    import pandas as pd

    from penstock_scheduler.simulator.agents import SimulatedAgents
    from penstock_scheduler.simulator.cloud import CloudSpec

DTYPES = {
    "str": "object",
    "bool": "bool",
    "int": "int64",
    "int | None": "Int64",
    "float": "float64",
    "float | None": "float64",
}
"""Annotation of a field -> dtype of its column. A missing float is NaN."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One simulation with its figures."""

    policy: str
    seed: int
    simulation: Simulation
    rows: list[JobRow]
    summary: Summary


def simulate_each(
    each: Iterable[tuple[Scenario, PolicyChoice, int]],
    *,
    prices: Mapping[str, float] | None = None,
    driving: Callable[[PolicyChoice], Driving] = driving_of,
    agents: Callable[[PolicyChoice, int], SimulatedAgents | None] = lambda policy, seed: None,
    on_tick: Callable[[PolicyChoice, int], Callable[[Simulation], None]] = lambda policy, seed: lambda simulation: None,
    cloud: CloudSpec | None = None,
) -> list[SeedResult]:
    """Simulate each (scenario, policy, seed). Ctrl-C ends the simulation that is under way, which is the last one then.

    Args:
        each: what to simulate.
        prices: GPU type -> price of a GPU-hour.
        driving: policy -> how it is driven.
        agents: (policy, seed) -> agents by which jobs share GPUs.
        on_tick: (policy, seed) -> function that is called after each tick.
        cloud: the cloud behind the site; None: there is none.
    """
    results: list[SeedResult] = []
    for scenario, choice, seed in each:
        simulation = simulate_policy(
            scenario, choice, None, driving(choice), on_tick(choice, seed), agents=agents(choice, seed), cloud=cloud
        )
        rows = job_rows(simulation, prices)
        results.append(SeedResult(str(choice), seed, simulation, rows, summarise(simulation, rows)))
        if simulation.interrupted:
            break
    return results


def to_result(results: Sequence[SeedResult]) -> SimulationResult:
    """The simulations as DataFrames."""
    about = [{"policy": each.policy, "seed": each.seed} for each in results]
    ends = [one | {"interrupted": each.simulation.interrupted} for one, each in zip(about, results, strict=True)]
    return SimulationResult(
        jobs=_frame(JobRow, about, [each.rows for each in results]),
        rounds=_frame(Tick, about, [each.simulation.ticks for each in results]),
        summary=_frame(Summary, ends, [[each.summary] for each in results]),
    )


def _frame(kind: type[Any], about: Sequence[Mapping[str, Any]], records: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """A row for each record of dataclass `kind`, after columns that say which simulation it is of."""
    import pandas as pd  # takes a second to load, and `penstock simulate whatif --help` loads this module

    columns: dict[str, pd.Series] = {}
    for name in about[0] if about else ("policy", "seed"):
        columns[name] = pd.Series([one[name] for one, of in zip(about, records, strict=True) for _ in of])
    for field in fields(kind):
        values = [getattr(record, field.name) for of in records for record in of]
        columns[field.name] = pd.Series(values, dtype=DTYPES[str(field.type)])
    return pd.DataFrame(columns)


def parquet_is_there() -> bool:
    """Whether `SimulationResult.write` can write Parquet."""
    return importlib.util.find_spec("pyarrow") is not None


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half of its 95 % confidence interval by Student's t; None for fewer than two values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    return mean, float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def over_seeds(results: Sequence[SeedResult], **about: str) -> dict[str, Any]:
    """The summary as JSON: each policy's figures by seed, their means, and half of the means' 95 % confidence
    intervals."""
    policies: dict[str, Any] = {}
    for name in dict.fromkeys(result.policy for result in results):
        mine = [result for result in results if result.policy == name]
        seeds = [
            {"seed": result.seed, "interrupted": result.simulation.interrupted} | asdict(result.summary)
            for result in mine
        ]
        mean: dict[str, float | None] = {}
        half: dict[str, float | None] = {}
        for field in fields(Summary):
            values = [seed[field.name] for seed in seeds if seed[field.name] is not None]
            mean[field.name], half[field.name] = interval(values) if values else (None, None)
        policies[name] = {"mean": mean, "ci95": half, "seeds": seeds}
    return {**about, "policies": policies}
