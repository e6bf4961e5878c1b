"""Small problems, and the plain way to solve them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from penstock_scheduler.rounds.solver import Problem, Quota

INF = float("inf")


def problem(cost_JC, gpus_C, type_C, capacity_T, leave_out=1.1, *, forced=None, quotas=()):
    """A problem from lists; a quota is (members, gpus) or (members, gpus, type)."""
    return Problem(
        np.array(cost_JC, dtype=np.float64).reshape(-1, len(gpus_C)),
        np.array(gpus_C, dtype=np.int64),
        np.array(type_C, dtype=np.int64),
        np.array(capacity_T, dtype=np.int64),
        leave_out,
        forced_J=None if forced is None else np.array(forced, dtype=np.int64),
        quotas=tuple(Quota(np.array(members, dtype=np.int64), *rest) for members, *rest in quotas),
    )


def best_by_trying(given: Problem) -> float:
    """The least objective of all choices that are feasible; `inf` if none is."""
    jobs, configs = given.cost_JC.shape
    values = [
        given.objective(choice_J)
        for choice in itertools.product(range(-1, configs), repeat=jobs)
        if given.feasible(choice_J := np.array(choice, dtype=np.int64))
    ]
    return min(values, default=INF)


def dual_value(given: Problem, price_T: tuple[float, ...]) -> float:
    """L at these prices without quotas, entry by entry: sum of each job's cheapest, less what all GPUs would fetch."""
    total = -sum(int(gpus) * price for gpus, price in zip(given.capacity_T, price_T, strict=True))
    for job, costs in enumerate(given.cost_JC):
        priced = [cost + int(given.gpus_C[config]) * price_T[given.type_C[config]] for config, cost in enumerate(costs)]
        must = -1 if given.forced_J is None else int(given.forced_J[job])
        total += min([*priced, given.leave_out]) if must < 0 else priced[must]
    return total


@st.composite
def problems(draw: st.DrawFn, *, jobs: int = 4, configs: int = 4, quotas: int = 3) -> Problem:
    """Costs of either sign in hundredths, so that there are ties; impossible entries; quotas that overlap."""
    types, count, columns = draw(st.integers(1, 3)), draw(st.integers(0, jobs)), draw(st.integers(1, configs))
    costs = st.one_of(st.integers(-50, 150).map(lambda c: c / 100), st.just(INF), st.floats(-2, 2))
    cost_JC = [[draw(costs) for _ in range(columns)] for _ in range(count)]
    forced = [draw(st.sampled_from([-1, -1, -1, -1, 0])) for _ in range(count)]
    members = st.lists(st.integers(0, count - 1), unique=True) if count else st.just([])
    return problem(
        cost_JC,
        [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in range(columns)],
        [draw(st.integers(0, types - 1)) for _ in range(columns)],
        [draw(st.integers(0, 8)) for _ in range(types)],
        draw(st.sampled_from([1.1, 0.0, -0.3, 0.5])),
        forced=draw(st.sampled_from([None, forced])),
        quotas=[
            (draw(members), draw(st.integers(0, 8)), draw(st.sampled_from([None, *range(types)])))
            for _ in range(draw(st.integers(0, quotas)))
        ],
    )
