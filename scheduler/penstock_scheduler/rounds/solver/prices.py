"""Prices for GPUs: the Lagrangian dual of the round's problem, maximised with cutting planes.

Let each GPU of type t cost mu_t, and each GPU that counts for quota q cost nu_q, and let each job take its cheapest entry. For
any prices >= 0, the sum of these costs, less the price of all GPUs, is a lower bound of the objective:

    L(mu, nu) = base + sum_j min_k (saving[j, k] + gpus[k] (mu[type(k)] + sum_{q of j} nu_q)) - capacity mu - limit nu

L is concave and piecewise linear in a few prices, and one evaluation is one pass over the entries. For each block b of jobs in
the same quotas, each evaluation gives a choice, and with it a cut that L cannot exceed (Kelley, 1960):

    theta_b <= saved_b + used_b mu + held_b sum_{q of b} nu_q

A small linear program, which HiGHS solves from its last basis, maximises sum theta_b - capacity mu - limit nu under all cuts so
far. The next prices lie between the best prices and its solution. Once its maximum has come down to the best L seen, that L is
the maximum of L. The multipliers of the cuts then mix the choices seen into a fractional choice that fits the limits. `_mix`
rounds it, each job by a number of its own, so that thousands of equal jobs are divided in proportion as well. This changes no
cost, and jobs with equal costs take no more time than others.

Axes: J jobs; K configurations and nothing; T GPU types; Q quotas; R = T + Q resources; B blocks; N evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.problem import SolveFailed
from penstock_scheduler.rounds.solver.reduced import Floats, Ints, Reduced

MAX_EVALUATIONS = 500
"""Most evaluations of L. The best prices so far are then used; they give a bound, too. 40 suffice for three types without
quotas."""

STEP = 0.7
"""Step from the best prices seen towards those of the linear program, as a share of the distance. With less than 1, a quarter
fewer evaluations suffice, because the program's first, extreme solutions are cut off sooner (Ben-Ameur and Neto, 2007)."""

LAST = 10
"""Most evaluations with full steps once the tolerance is met. They end at a corner of L, where undecided jobs have equal costs
to the last digit, not only to the tolerance. Otherwise one kind of undecided jobs could fill the core."""

EXACT = 1e-10
"""Relative difference at which L has reached its maximum."""

ROUNDING = 1e-13
"""Share of the summed magnitudes by which the bound is lowered, to allow for floating-point errors."""

GOLDEN = 0.6180339887498949
"""The golden ratio: its multiples, modulo 1, fill [0, 1) evenly, and so does every regular subset of them."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The best prices found.

    Attributes:
        price_R: prices of the types, then of the quotas, in the objective's unit per GPU, >= 0.
        bound: no choice has a lower objective.
        regret_JK: how much more each entry costs than the job's cheapest, prices included; `inf` where it is impossible.
        mixed_J: a choice that takes about as many GPUs as there are.
        evaluations: number of evaluations of L.
    """

    price_R: Floats
    bound: float
    regret_JK: Floats
    mixed_J: Ints
    evaluations: int


def relax(reduced: Reduced, *, tolerance: float) -> Relaxation:
    """Maximise L to within the relative `tolerance`. It reads no clock, and always runs to its end.

    Raises:
        SolveFailed: HiGHS has numerical trouble.
    """
    master = _Master(reduced)
    priced_JK = np.empty_like(reduced.saving_JK)
    price_R = best_R = np.zeros(len(reduced.limit_R))
    best, step, evaluations = -np.inf, STEP, MAX_EVALUATIONS
    picks: list[Ints] = []
    while True:
        value, pick_J = evaluate(reduced, price_R, priced_JK)
        if value > best:
            best, best_R = value, price_R
        picks.append(pick_J)
        highest, corner_R = master.cut(pick_J)
        apart = (highest - best) / max(abs(best), 1e-9)
        if apart <= tolerance and step < 1:
            step, evaluations = 1.0, min(len(picks) + LAST, MAX_EVALUATIONS)
        if apart <= EXACT or len(picks) >= evaluations:
            break
        price_R = step * corner_R + (1 - step) * best_R
    evaluate(reduced, best_R, priced_JK)
    regret_JK = priced_JK - priced_JK.min(axis=1, keepdims=True)
    return Relaxation(best_R, best, regret_JK, _mix(reduced, picks, master.weights()), len(picks))


def evaluate(reduced: Reduced, price_R: Floats, priced_JK: Floats) -> tuple[float, Ints]:
    """L, and the cheapest entry of each job. Writes the cost of each entry, prices included, into `priced_JK`."""
    price_T, price_Q = price_R[: reduced.types], price_R[reduced.types :]
    np.add(reduced.saving_JK, reduced.gpus_K * price_T[reduced.type_K], out=priced_JK)
    if price_Q.any():
        price_BT = (reduced.member_BQ * price_Q) @ reduced.counts_QT
        priced_JK += (price_BT[:, reduced.type_K] * reduced.gpus_K)[reduced.block_J]
    pick_J = priced_JK.argmin(axis=1)
    cheapest = priced_JK[np.arange(len(pick_J)), pick_J].sum()
    worth = reduced.limit_R @ price_R
    rounding = ROUNDING * (abs(reduced.base) - cheapest + worth)
    return float(reduced.base + cheapest - worth - rounding), pick_J


class _Master:
    """The linear program over all cuts: columns theta_B, then the prices R. A row for each block and evaluation."""

    def __init__(self, reduced: Reduced) -> None:
        self._reduced = reduced
        self._blocks, resources = len(reduced.member_BQ), len(reduced.limit_R)
        self._theta_BB = np.eye(self._blocks)
        # A block's cut has its own theta, the types, and the quotas that it is in.
        types_BT = np.ones((self._blocks, reduced.types))
        self._row_E, self._column_E = np.nonzero(np.hstack([self._theta_BB, types_BT, reduced.member_BQ]))
        self._first_B = np.searchsorted(self._row_E, np.arange(self._blocks)).astype(np.int32)
        self._index_E = self._column_E.astype(np.int32)
        self._free_B = np.full(self._blocks, highspy.kHighsInf)
        # At the highest saving per GPU no job takes any.
        best_K = -reduced.saving_JK[:, :-1].min(axis=0, initial=0.0)
        highest = float((best_K / reduced.gpus_K[:-1]).max(initial=0.0))
        no_rows = np.zeros(0, dtype=np.int32)
        self._highs = quiet_highs()
        self._highs.addCols(
            self._blocks + resources,
            np.concatenate([np.full(self._blocks, -1.0), reduced.limit_R]),
            np.concatenate([-self._free_B, np.zeros(resources)]),
            np.concatenate([self._free_B, np.full(resources, highest)]),
            0,
            no_rows,
            no_rows,
            np.zeros(0),
        )

    def cut(self, pick_J: Ints) -> tuple[float, Floats]:
        """Add the cuts of a choice. Returns the maximum of L under all cuts, and the prices R there."""
        reduced = self._reduced
        saved_B = np.bincount(reduced.block_J, reduced.saving_JK[np.arange(len(pick_J)), pick_J])
        cut_BC = np.hstack([self._theta_BB, -reduced.used(pick_J)])
        self._highs.addRows(
            self._blocks,
            -self._free_B,
            saved_B.astype(np.float64),
            len(self._index_E),
            self._first_B,
            self._index_E,
            cut_BC[self._row_E, self._column_E],
        )
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolveFailed(SolveStatus.NUMERICAL, f"HiGHS ended the search for prices with {status.name}")
        highest = reduced.base - self._highs.getObjectiveValue()
        return highest, np.maximum(self._highs.getSolution().col_value[self._blocks :], 0.0)

    def weights(self) -> Floats:
        """How much of each evaluation's choice is in the mixture, N x B; those of a block sum to 1."""
        dual_NB = np.reshape(self._highs.getSolution().row_dual, (-1, self._blocks))
        weight_NB = np.maximum(-dual_NB, 0.0)
        return np.asarray(weight_NB / weight_NB.sum(axis=0), dtype=np.float64)


def _mix(reduced: Reduced, picks: list[Ints], weight_NB: Floats) -> Ints:
    """Round the mixture: each choice has a part of [0, 1), and job j takes the choice in whose part its number falls."""
    used = np.flatnonzero(weight_NB.max(axis=1) > 1e-9)
    share_NB = np.cumsum(weight_NB[used], axis=0)
    number_J = np.arange(1, len(reduced.block_J) + 1) * GOLDEN % 1
    mixed_J: Ints = picks[used[-1]].copy()
    for index in range(len(used) - 2, -1, -1):
        below = number_J < share_NB[index, reduced.block_J]
        mixed_J[below] = picks[used[index]][below]
    return mixed_J


class _QuietHighs(highspy.Highs):
    """highspy 1.16 prints the name of HiGHS from this method, which its constructor calls before an option can be set."""

    def enableCallbacks(self) -> None:  # noqa: N802 (highspy's name)
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def quiet_highs(**options: float | str) -> highspy.Highs:
    """HiGHS on one thread, with a fixed seed and without output, so that the same problem gives the same answer."""
    highs = _QuietHighs()  # type: ignore[no-untyped-call]
    for name, value in ({"threads": 1, "random_seed": 1} | options).items():
        highs.setOptionValue(name, value)
    return highs
