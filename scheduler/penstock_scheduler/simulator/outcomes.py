"""Several simulations side by side: policy against policy, each over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from scipy.special import stdtrit

from penstock_scheduler.simulator.metrics import JobRow, Summary
from penstock_scheduler.simulator.run import Simulation


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation with its figures."""

    policy: str
    seed: int
    simulation: Simulation
    rows: list[JobRow]
    summary: Summary


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half of its 95 % confidence interval by Student's t; None with fewer than two values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    return mean, float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def over_seeds(results: Sequence[Result], **about: str) -> dict[str, Any]:
    """The summary as JSON: for each policy its figures by seed, their means, and half of the means' 95 % intervals."""
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
