"""The prices of a small problem: its linear relaxation at once, which takes less time than a dozen cutting planes.

The relaxation of the whole problem has the maximum of L (`prices`) as its value, the best prices as the multipliers of its
resources, and a choice in which only as many jobs are split as there are resources.

Axes: J jobs; K configurations and nothing; E entries; R resources.
"""

from __future__ import annotations

import highspy
import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.core import program
from penstock_scheduler.rounds.solver.prices import GOLDEN, Relaxation, evaluate, quiet_highs
from penstock_scheduler.rounds.solver.problem import SolveFailed
from penstock_scheduler.rounds.solver.reduced import Reduced


def relax_whole(reduced: Reduced) -> Relaxation:
    """As `prices.relax`, but exact.

    Raises:
        SolveFailed: HiGHS has numerical trouble.
    """
    nothing_J = np.full(len(reduced.block_J), reduced.nothing)
    lp, _, job_E, config_E = program(reduced, np.isfinite(reduced.saving_JK), nothing_J)
    highs = quiet_highs(presolve="off")
    highs.passModel(lp)
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise SolveFailed(SolveStatus.NUMERICAL, f"HiGHS ended the linear relaxation with {status.name}")
    solved = highs.getSolution()
    price_R = np.maximum(-np.array(solved.row_dual[-len(reduced.limit_R) :]), 0.0)
    priced_JK = np.empty_like(reduced.saving_JK)
    bound, _ = evaluate(reduced, price_R, priced_JK)
    taken_JK = np.zeros_like(reduced.saving_JK)
    taken_JK[job_E, config_E] = solved.col_value
    # A split job takes the share in which its own number falls, as in `prices`; the last share is "nothing".
    number_J = np.arange(1, len(nothing_J) + 1) * GOLDEN % 1
    mixed_J = (np.cumsum(taken_JK[:, :-1], axis=1) <= number_J[:, None]).sum(axis=1)
    return Relaxation(price_R, bound, priced_JK - priced_JK.min(axis=1, keepdims=True), mixed_J, 1)
