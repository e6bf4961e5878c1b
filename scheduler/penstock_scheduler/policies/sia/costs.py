"""The cost of each entry of the matrix: what the integer program adds up. Sia, equations 1 and 2."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.policies import common
from penstock_scheduler.policies.sia.matrix import SiaMatrix
from penstock_scheduler.policies.sia.remaining import kept_shares, remaining, size_weights
from penstock_scheduler.policies.sia.settings import SiaSettings

KEEP_BONUS = 1e-3
"""Share of its cost by which an entry that the job already holds is preferred."""

AGE_BONUS = 1e-4
"""Cost by which the youngest job is less preferred than the oldest."""

START_BONUS = 1e-3
"""Cost by which a job that never ran prefers one type of `start_order` to the next; rounded costs differ by 0.01."""

MEASURE_BONUS = 0.01
"""Share of its cost by which a new job prefers being measured on one more type to staying where it is."""

LEAST_FACTOR = 1e-3
"""Lower bound of the restart factor in costs: with p < 0, a factor of 0 would make every move infinitely expensive."""


def costs(matrix: SiaMatrix, settings: SiaSettings) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The cost of leaving each job out (J), and of each entry (J x C; `inf` where the job cannot have it).

    Both without the jobs' weights.
    """
    p = settings.fairness_p
    left_JP = remaining(matrix)
    moved_JC = np.ones_like(matrix.possible_JC)
    held = matrix.held_J >= 0
    moved_JC[held, matrix.held_J[held]] = False
    factor_J = np.where(held, np.maximum(restart_factors(matrix, left_JP, settings), LEAST_FACTOR), 1.0)
    gain_JC = np.where(matrix.gain_JC > 0, np.where(moved_JC, factor_J[:, None], 1.0) * matrix.gain_JC, 1.0)
    powered_JC = gain_JC**p
    if settings.round_costs:
        powered_JC = np.minimum(np.round(powered_JC, 2), 3000.0)
    cost_JC = powered_JC if p < 0 else -powered_JC
    for row, measuring in matrix.measuring.items():
        # A little better than the job's best known entry: worth a move, but no other job's GPUs.
        known_C = np.flatnonzero(matrix.possible_JC[row] & (matrix.gain_JC[row] > 0))
        best = cost_JC[row, known_C].min(initial=np.copysign(1.0, -p))
        cost_JC[row, measuring.columns] = best - MEASURE_BONUS * abs(best)
    cost_JC -= KEEP_BONUS * np.abs(cost_JC) * ~moved_JC
    cost_JC += AGE_BONUS * (np.arange(len(matrix.jobs)) / max(len(matrix.jobs), 1))[:, None]
    if settings.blind_start and settings.start_order:
        order = settings.start_order
        rank_T = np.array([order.index(name) if name in order else len(order) for name in matrix.types])
        cost_JC += START_BONUS * np.outer(matrix.never_ran_J, rank_T[matrix.type_C])
    cost_JC[~matrix.possible_JC] = np.inf
    size_J = size_weights(left_JP, settings.size_power)
    leave_J = _leaving(size_J, held, settings)
    if not settings.leaving_is_free and p < 0:
        leave_J *= factor_J**p
    # Waits weigh the same for all sizes: else a long job could wait for ever.
    return leave_J + abs(settings.allocation_lambda) * _aging(matrix, settings), size_J[:, None] * cost_JC


def _leaving(size_J: NDArray[np.float64], held_J: NDArray[np.bool_], settings: SiaSettings) -> NDArray[np.float64]:
    """The cost of leaving each job out, before restarts and aging.

    Sizes decide which jobs have more than their fewest GPUs, and which of those that wait start first. So the fewest GPUs of a
    job that runs are worth the same whatever its size, and those of one that waits at least half as much.
    """
    slowest = np.copysign(1.0, -settings.fairness_p)
    leave_out = abs(settings.allocation_lambda)
    fewest_J = np.where(held_J, 1.0, (1 + size_J) / 2)
    leave_J: NDArray[np.float64] = leave_out * fewest_J + slowest * (size_J - fewest_J)
    return leave_J


def _aging(matrix: SiaMatrix, settings: SiaSettings) -> NDArray[np.float64]:
    """`aging` of each job."""
    if settings.aging_s is None:
        return np.zeros(len(matrix.jobs))
    snapshot = matrix.snapshot
    waits_s = [snapshot.time_s - job.submit_s - common.ran_s(snapshot, job, job.spec.min_gpus) for job in matrix.jobs]
    each = [aging(wait_s, settings.aging_s, settings.aging_most) for wait_s in waits_s]
    aging_J: NDArray[np.float64] = matrix.min_J.astype(np.float64) * np.array(each, dtype=np.float64)
    return aging_J


def aging(wait_s: float, aging_s: float, most: float) -> float:
    """What a wait adds to the cost of leaving a job out, for each GPU of its minimum, in multiples of `allocation_lambda`.

    `wait_s` is the age less the time that its GPU-seconds would have lasted on its fewest GPUs. It stands still while the job
    runs on these, so a job that came late does not lose its place as soon as it starts, and falls while it has more.
    """
    return min(max(wait_s / aging_s - 1, 0.0), most)


def restart_factors(matrix: SiaMatrix, left_JP: NDArray[np.float64], settings: SiaSettings) -> NDArray[np.float64]:
    """Share of each job's goodput that counts after a move: `restart_factor`, and `kept_shares` unless that is switched off."""
    costs_s = [matrix.snapshot.facts[job.id].restart_cost_s for job in matrix.jobs]
    ages_s = [max(matrix.snapshot.time_s - job.submit_s, 0.0) for job in matrix.jobs]
    factors = [
        1.0 if settings.restart_free_when_young and age_s < cost_s else restart_factor(age_s, job.restarts, cost_s)
        for age_s, cost_s, job in zip(ages_s, costs_s, matrix.jobs, strict=True)
    ]
    factor_J: NDArray[np.float64] = np.array(factors, dtype=np.float64)
    if settings.amortise_s is not None:
        factor_J = factor_J * kept_shares(matrix, left_JP, settings.amortise_s)
    return factor_J


def restart_factor(age_s: float, restarts: int, restart_cost_s: float) -> float:
    """Share of a job's goodput that survives moving it to another configuration.

    Sia section 3.4, r = (T - N*S) / (T + S): T is `age_s`, N is `restarts`, S is `restart_cost_s`. The paper gives S in
    GPU-seconds; ours is wall-clock like T, so that r is unitless. Clipped at 0, so r is in [0, 1).

    Raises:
        ConfigError: `restart_cost_s` is not positive.
    """
    if restart_cost_s <= 0:
        raise ConfigError(
            f"restart_cost_s={restart_cost_s} must be positive; use the seconds that a restart really takes"
        )
    return max(age_s - restarts * restart_cost_s, 0.0) / (age_s + restart_cost_s)
