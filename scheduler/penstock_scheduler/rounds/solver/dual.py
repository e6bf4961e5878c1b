"""The solver for rounds of any size: prices first, then an exact choice for the few jobs that prices do not decide.

1. **Relax.** `prices.relax` finds the prices at which the jobs, each choosing for itself, just about fill the cluster, and
   with them a lower bound L of the objective. The regret of an entry is how much more it costs, prices included, than the
   job's best entry.
2. **Discard.** Any choice costs at least L plus the sum of its regrets (plus prices times GPUs left over). So a choice of
   cost U can only be beaten by a choice with a sum of regrets below U - L. Every entry with a larger regret is discarded.
3. **Solve the core.** Of the other entries, the `CORE_ENTRIES` with the least regret are solved exactly (`core`); all other
   jobs keep their choice. With r the least regret outside the core, the optimum is at least min(bound of the core, L + r).
   This bound holds for the whole problem, not only for the core.
4. **Grow the core.** While the bound does not prove the gap, the core grows by `CORE_GROWTH`, in the end to all entries that
   were not discarded.

After Pisinger, *A minimal algorithm for the multiple-choice knapsack problem*, 1995, with HiGHS for his dynamic program.
"""

from __future__ import annotations

import time

import numpy as np

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver.core import choose, solve_core
from penstock_scheduler.rounds.solver.prices import relax
from penstock_scheduler.rounds.solver.problem import Limits
from penstock_scheduler.rounds.solver.reduced import Answer, Reduced, repair
from penstock_scheduler.rounds.solver.whole import relax_whole

CORE_ENTRIES = 50
"""Entries of the first core for each GPU type and quota. With 150 for three types one core proves a gap of 1e-4 on all but
one of the rounds of docs/developer/solver.md; 400 take twice the time."""

WHOLE_ENTRIES = 500
"""Entries up to which all prices come from one linear program. Measured on the rounds of docs/developer/solver.md: of 100
entries a quarter of the time of cutting planes, of 450 two thirds, of 1,500 as long, of 6,000 four times as long."""

CORE_GROWTH = 4
"""Factor by which the core grows."""

CORE_MOST = 10_000
"""Entries from which on the core does not grow: HiGHS takes 1 to 10 s for this many."""

SMALLEST_GAP = 1e-9
"""Relative difference below which two objectives count as equal: floating point does not resolve smaller ones."""


def solve(reduced: Reduced, limits: Limits) -> Answer:
    """Solve with prices and a core. The answer has the prices of the types, in the objective's unit per GPU.

    Raises:
        SolveFailed: HiGHS has numerical trouble.
    """
    deadline = time.perf_counter() + limits.seconds
    gap = max(limits.gap, SMALLEST_GAP)
    best_J = reduced.saving_JK.argmin(axis=1)
    if np.all(reduced.left(best_J) >= 0):  # enough for all jobs: no GPU has a price
        return Answer("dual", best_J, reduced.value(best_J), SolveStatus.OPTIMAL, (0.0,) * reduced.types)
    small = np.isfinite(reduced.saving_JK).sum() <= WHOLE_ENTRIES
    relaxed = relax_whole(reduced) if small else relax(reduced, tolerance=gap / 10)
    pick_J = repair(reduced, relaxed.mixed_J, relaxed.regret_JK)
    value, bound, nodes, width = reduced.value(pick_J), relaxed.bound, limits.nodes, CORE_ENTRIES * len(relaxed.price_R)
    while True:
        seconds = deadline - time.perf_counter()
        if seconds <= 0:
            status = SolveStatus.TIME_LIMIT
            break
        worth = value - relaxed.bound
        core_JK, outside = choose(relaxed.regret_JK, pick_J, width, worth)
        core = solve_core(reduced, core_JK, pick_J, gap=limits.gap / 2, nodes=nodes, seconds=seconds)
        if core.pick_J is not None and reduced.value(core.pick_J) < value:
            pick_J, value = core.pick_J, reduced.value(core.pick_J)
        bound = max(bound, min(core.bound, relaxed.bound + outside))
        if value - bound <= gap * abs(value) or (core.finished and outside > worth):
            status = SolveStatus.OPTIMAL
            break
        nodes -= core.nodes
        if nodes <= 0 or width >= CORE_MOST:
            status = SolveStatus.NODE_LIMIT
            break
        width = min(width * CORE_GROWTH, CORE_MOST)
    return Answer("dual", pick_J, bound, status, tuple(relaxed.price_R[: reduced.types].tolist()))
