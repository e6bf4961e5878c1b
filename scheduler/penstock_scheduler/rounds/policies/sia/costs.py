"""The cost of each entry of the matrix: what the integer program adds up. Sia, equations 1 and 2.

What a job has left decides how much its size weighs, and whether a move still pays. Sia does not ask how long jobs still run:
a job that needs two more minutes and one that needs a week weigh the same, and a job is moved a minute before its end. Here,
what a job has left is `POINTS` equally likely values, from the first of these that is known:

1. what the job itself reports (`JobFacts.remaining_work`): one value;
2. what earlier jobs of its kind had left after as much work (`JobFacts.likely_work`);
3. its age. Lengths of jobs have a heavy tail: the longer a job has run, the longer it is likely to run on. A job that has had
   `a` GPU-seconds needs more than another x with the probability (a + NEW_S) / (a + NEW_S + x).

The unit is seconds on the job's slowest configuration, which is one GPU for most jobs, so that jobs of different models
compare.

No weight is above 1, and no restart counts more than `KEPT_LEAST`. Both keep the promise to jobs that wait: see
docs/developer/sia.md#aging.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock_scheduler.model import JobFacts
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings

POINTS = 8
"""Equally likely values for each job."""

NEW_S = 1800.0
"""Median of what a job has left that has not run yet and of which nothing is known, s on one GPU."""

FLOOR_S = 360.0
"""Added to what is left. Among jobs that end within minutes, size makes little difference."""

SIZE_LEAST = 0.05
"""Weight of the longest jobs; that of a job which is about to end is 1."""

KEPT_LEAST = 0.25
"""Least share of a job's coming work that a restart is taken to leave. A job that always reports to be about to end can still be
moved."""


def remaining(matrix: SiaMatrix) -> NDArray[np.float64]:
    """Seconds that each job has left on its slowest configuration, shape (J, POINTS), each row ascending."""
    share_P = (np.arange(POINTS) + 0.5) / POINTS
    left_JP = share_P / (1 - share_P) * (matrix.attained_J + NEW_S)[:, None]
    for row, (facts, scale) in enumerate(zip(matrix.facts, matrix.scale_J.tolist(), strict=True)):
        if facts.remaining_work is not None and scale > 0:
            left_JP[row] = facts.remaining_work * scale
        elif facts.likely_work and scale > 0:
            left_JP[row] = _quantiles(facts.likely_work, share_P) * scale
    return left_JP


def _quantiles(values: tuple[float, ...], share_P: NDArray[np.float64]) -> NDArray[np.float64]:
    """As `np.quantile`, in a tenth of its 70 us: a round may ask for tens of thousands of jobs."""
    return np.interp(share_P * (len(values) - 1), np.arange(len(values)), sorted(values))


def source(facts: JobFacts) -> str:
    """Where `remaining` has a job's remaining work from, in words."""
    if facts.remaining_work is not None:
        return "as it reports"
    return "by earlier jobs of its kind" if facts.likely_work else "judged by its age"


def size_weights(left_JP: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Weight of each job, in [SIZE_LEAST, 1]: the mean over what may be left. `power` 0: all weigh 1."""
    weights_J: NDArray[np.float64] = np.mean((FLOOR_S / (left_JP + FLOOR_S)) ** power, axis=1)
    return np.maximum(weights_J, SIZE_LEAST)


def kept_shares(
    left_JP: NDArray[np.float64], gain_JC: NDArray[np.float64], cost_s_J: NDArray[np.float64], most_s: float
) -> NDArray[np.float64]:
    """Share of each job's coming work that a move leaves, shape (J, C): T / (T + S), the mean over what may be left.

    T is what is left on a configuration with this gain, at most `most_s`: later rounds may move the job again. S is what a move
    costs the job.
    """
    gain_JC, kept_JC = np.where(gain_JC > 0, gain_JC, 1.0), np.zeros(gain_JC.shape)
    for left_J in left_JP.T:
        time_JC = np.minimum(left_J[:, None] / gain_JC, most_s)
        kept_JC += time_JC / (time_JC + cost_s_J[:, None])
    return np.asarray(np.maximum(kept_JC / left_JP.shape[1], KEPT_LEAST))


KEEP_BONUS = 1e-3
"""Share of its cost by which an entry that the job already holds is preferred."""

AGE_BONUS = 1e-4
"""Cost by which the youngest job is less preferred than the oldest."""

START_BONUS = 1e-3
"""Cost by which a job that never ran prefers one type of `START_ORDER` to the next; rounded costs differ by 0.01."""

MEASURE_BONUS = 0.01
"""Share of its cost by which a new job prefers being measured on one more type to staying where it is."""

START_ORDER = ("t4", "v100", "a100", "rtx6000", "rtx")
"""The artifact's own order of GPU types. Types that it does not name come last."""

BOOT_LEAST = 0.999
"""Least gain that a configuration keeps whose nodes have to boot, in multiples of the job's slowest configuration."""

AGING_MOST = 4.0
"""Most that a wait weighs: that of a job which has waited `aging_s` this many times more."""

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
    factor_JC, stopped_J = restart_factors(matrix, left_JP, settings)
    gain_JC = np.where(moved_JC & held[:, None], factor_JC, 1.0)
    gain_JC = np.where(matrix.gain_JC > 0, gain_JC * matrix.gain_JC, 1.0)
    _pay_boots(matrix, gain_JC, left_JP, settings)
    powered_JC = gain_JC**p
    if settings.variant == "artifact":
        powered_JC = np.minimum(np.round(powered_JC, 2), 3000.0)
    cost_JC = powered_JC if p < 0 else -powered_JC
    for row, measuring in matrix.measuring.items():
        # A little better than the job's best known entry: worth a move, but no other job's GPUs.
        known_C = np.flatnonzero(matrix.possible_JC[row] & (matrix.gain_JC[row] > 0))
        best = cost_JC[row, known_C].min(initial=np.copysign(1.0, -p))
        cost_JC[row, measuring.columns] = best - MEASURE_BONUS * abs(best)
    cost_JC -= KEEP_BONUS * np.abs(cost_JC) * ~moved_JC
    cost_JC += AGE_BONUS * (np.arange(len(matrix.jobs)) / max(len(matrix.jobs), 1))[:, None]
    if settings.variant == "artifact":
        order = START_ORDER
        rank_T = np.array([order.index(name) if name in order else len(order) for name in matrix.types])
        cost_JC += START_BONUS * np.outer(matrix.never_ran_J, rank_T[matrix.type_C])
    cost_JC[~matrix.possible_JC] = np.inf
    size_J = size_weights(left_JP, settings.size_power)
    leave_J = _leaving(size_J, held, settings)
    if settings.variant == "penstock" and p < 0:
        leave_J *= np.where(held, stopped_J, 1.0) ** p
    # Waits weigh the same for all sizes: else a long job could wait for ever.
    return leave_J + abs(settings.allocation_lambda) * _aging(matrix, settings), size_J[:, None] * cost_JC


def _pay_boots(
    matrix: SiaMatrix, gain_JC: NDArray[np.float64], left_JP: NDArray[np.float64], settings: SiaSettings
) -> None:
    """Lower `gain_JC` of jobs that wait where nodes have to boot first, to T / (T + S): T is what they have left there, S the
    boot. It stays at `BOOT_LEAST` of the slowest configuration's, so that no boot is a reason to let a job wait. A running job
    pays for a boot in `stops`."""
    waits_J = np.flatnonzero(matrix.held_J < 0)
    for column in np.flatnonzero(matrix.boot_s_C).tolist() if waits_J.size else ():
        before_J = gain_JC[waits_J, column]
        time_JP = np.minimum(left_JP[waits_J] / before_J[:, None], settings.amortise_s or np.inf)
        kept_J = np.mean(time_JP / (time_JP + matrix.boot_s_C[column]), axis=1)
        least_J = np.minimum(before_J, BOOT_LEAST * matrix.base_J[waits_J])
        gain_JC[waits_J, column] = np.maximum(before_J * kept_J, least_J)


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
    wait_s_J = matrix.age_s_J - matrix.attained_J / matrix.min_J
    return matrix.min_J * aging(wait_s_J, settings.aging_s, AGING_MOST)


def aging(wait_s_J: NDArray[np.float64], aging_s: float, most: float) -> NDArray[np.float64]:
    """What each wait adds to the cost of leaving a job out, for each GPU of its minimum, in multiples of `allocation_lambda`.

    A wait is the job's age less the time that its GPU-seconds would have lasted on its fewest GPUs. It stands still while the job
    runs on these, so a job that came late does not lose its place as soon as it starts, and falls while it has more.
    """
    return np.clip(wait_s_J / aging_s - 1, 0.0, most)


def restart_factors(
    matrix: SiaMatrix, left_JP: NDArray[np.float64], settings: SiaSettings
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of each job's goodput that counts after a move to each configuration (J x C), and after a stop (J).

    It is `restart_factor`, and `kept_shares` unless that is switched off: with what is left on the new configuration, and after
    a stop on the one that the job holds now. For jobs that hold nothing, it has no meaning.
    """
    age_s_J, cost_s_J = np.maximum(matrix.age_s_J, 0.0), matrix.restart_cost_s_J
    factor_J = restart_factor(age_s_J, np.array([job.restarts for job in matrix.jobs]), cost_s_J)
    if settings.variant == "artifact":
        factor_J = np.where(age_s_J < cost_s_J, 1.0, factor_J)
    factor_JC, stopped_J = np.broadcast_to(factor_J[:, None], matrix.gain_JC.shape), factor_J
    if settings.amortise_s is not None and matrix.gain_JC.size:
        kept_JC = kept_shares(left_JP, matrix.gain_JC, cost_s_J, settings.amortise_s)
        factor_JC = factor_JC * kept_JC
        stopped_J = factor_J * np.take_along_axis(kept_JC, np.maximum(matrix.held_J, 0)[:, None], axis=1)[:, 0]
    return np.maximum(factor_JC, LEAST_FACTOR), np.maximum(stopped_J, LEAST_FACTOR)


def restart_factor(age_s: ArrayLike, restarts: ArrayLike, restart_cost_s: ArrayLike) -> NDArray[np.float64]:
    """Share of a job's goodput that survives moving it to another configuration. Numbers, or arrays for several jobs.

    Sia section 3.4, r = (T - N*S) / (T + S): T is `age_s`, N is `restarts`, S is `restart_cost_s`. The paper gives S in
    GPU-seconds; ours is wall-clock like T, so that r is unitless. Clipped at 0, so r is in [0, 1).

    Raises:
        ConfigError: `restart_cost_s` is not positive.
    """
    age, cost = np.asarray(age_s, dtype=np.float64), np.asarray(restart_cost_s, dtype=np.float64)
    if not np.all(cost > 0):
        raise ConfigError(f"restart_cost_s={cost.min()} must be positive; use the seconds that a restart really takes")
    return np.maximum(age - np.asarray(restarts) * cost, 0.0) / (age + cost)
