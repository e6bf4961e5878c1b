from __future__ import annotations

import dataclasses
import subprocess
import sys

import highspy
import mip
import numpy as np
import pytest

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.people.errors import RoundFailed
from penstock_scheduler.rounds.solver import (
    SOLVERS,
    STATUS_MEANING,
    BadProblem,
    Limits,
    Problem,
    Quota,
    SolveFailed,
    dual,
    dynamic,
    python_mip,
    solve,
)
from penstock_scheduler.rounds.solver.prices import relax
from penstock_scheduler.rounds.solver.reduced import reduce
from tests.scheduler.solver.problems import INF, problem

EXACT = Limits(gap=0.0)
COSTS = [0.8, 0.6, 0.5]
"""Of 1, 2 and 4 GPUs, against 1.1 for none: the first saves 0.3, the second 0.2, two more 0.05 each."""


def crowd(jobs: int = 300, seed: int = 0) -> Problem:
    """More jobs than GPUs, no two alike, and GPUs that prices alone do not share out to the last."""
    cost_JC = np.array([1.0, 0.75, 0.6, 0.9, 0.6, 0.4]) * np.random.default_rng(seed).uniform(0.5, 1.1, (jobs, 6))
    return problem(cost_JC, [2, 3, 5] * 2, [0, 0, 0, 1, 1, 1], [jobs + 1, jobs - 1])


@pytest.mark.parametrize("solver", SOLVERS)
def test_three_gpus_for_two_jobs(solver):
    """2 + 1 GPUs cost 0.6 + 0.8 = 1.4; 1 + 1 cost 1.6; one job alone 0.6 + 1.1 = 1.7. A second GPU for the other job would
    take off 0.2, and that is the price: L(0.2) = 2 (0.8 + 0.2) - 3 x 0.2 = 1.4, so the bound is tight."""
    solution = solve(problem([COSTS, COSTS], [1, 2, 4], [0, 0, 0], [3]), solver, EXACT)
    assert sorted(solution.choice_J) == [0, 1]
    assert solution.report.objective == pytest.approx(1.4)
    assert solution.report.bound == pytest.approx(1.4)
    assert solution.report.status is SolveStatus.OPTIMAL
    if solver != "milp":
        assert solution.report.prices_T == (pytest.approx(0.2),)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_forced_is_kept_and_the_rest_makes_do(solver):
    """The first job must have 4 of the 5 GPUs: 0.5 + 0.8. Free, they would take 2 + 2 for 1.2."""
    solution = solve(problem([COSTS, COSTS], [1, 2, 4], [0, 0, 0], [5], forced=[2, -1]), solver, EXACT)
    assert solution.choice_J.tolist() == [2, 0]
    assert solution.report.objective == pytest.approx(1.3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_quota_holds_its_members_over_all_types(solver):
    """The first two may hold 2 GPUs together, of whatever type: 0.8 + 0.8 beats 0.6 + 1.1. The third takes 4 for 0.5."""
    quotas = [([0, 1], 2)]
    given = problem([COSTS * 2] * 3, [1, 2, 4] * 2, [0, 0, 0, 1, 1, 1], [8, 8], quotas=quotas)
    solution = solve(given, solver, EXACT)
    assert given.gpus_C[solution.choice_J].tolist() == [1, 1, 4]
    assert solution.report.objective == pytest.approx(2.1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_job_may_be_in_several_quotas(solver):
    """User 2 GPUs, account 1 GPU: the tighter one binds the job that is in both."""
    given = problem([COSTS, COSTS], [1, 2, 4], [0, 0, 0], [8], quotas=[([0, 1], 3), ([0], 1)])
    assert given.gpus_C[solve(given, solver, EXACT).choice_J].tolist() == [1, 2]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "given",
    [
        problem([], [1, 2], [0, 0], [4]),
        problem([[INF, INF]] * 3, [1, 2], [0, 0], [4]),
        problem([[0.1, 0.1]] * 3, [1, 2], [0, 0], [0]),
        problem([[1.1, 2.0]] * 3, [1, 2], [0, 0], [4]),
        problem([[0.1, 0.1]] * 3, [1, 2], [0, 0], [4], quotas=[([0, 1, 2], 0)]),
        problem([[0.1], [0.1]], [4], [0], [3]),
        Problem(np.zeros((2, 0)), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), 1.1),
    ],
    ids=["no jobs", "all impossible", "no GPUs", "too dear", "no quota left", "too large", "no configurations"],
)
def test_where_nothing_can_be_given_nothing_is(given, solver):
    solution = solve(given, solver)
    assert np.all(solution.choice_J == -1)
    assert solution.report.objective == solution.report.bound == given.leave_out * len(given.cost_JC)
    assert solution.report.status is SolveStatus.OPTIMAL


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_type_without_gpus_is_left_alone(solver):
    given = problem([[0.5, 0.1]] * 2, [1, 1], [0, 1], [2, 0])
    assert solve(given, solver).choice_J.tolist() == [0, 0]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "given",
    [
        problem([COSTS, COSTS], [1, 2, 4], [0, 0, 0], [7], forced=[2, 2]),
        problem([COSTS, COSTS], [1, 2, 4], [0, 0, 0], [8], forced=[2, 1], quotas=[([0, 1], 5)]),
        problem([[INF, 1.0]], [1, 2], [0, 0], [8], forced=[0]),
    ],
    ids=["capacity", "quota", "impossible entry"],
)
def test_what_is_forced_and_cannot_be_fails_the_round(given, solver):
    with pytest.raises(SolveFailed, match="the last allocation stays") as error:
        solve(given, solver)
    assert error.value.status is SolveStatus.INFEASIBLE
    assert isinstance(error.value, RoundFailed)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: problem([[0.1, float("nan")]], [1, 2], [0, 0], [4]), r"cost_JC\[0, 1\] is nan"),
        (lambda: problem([[-INF, 0.1]], [1, 2], [0, 0], [4]), r"cost_JC\[0, 0\] is -inf"),
        (lambda: problem([[0.1]], [1], [0], [4], float("nan")), "leave_out is nan"),
        (lambda: problem([[0.1]], [1], [3], [4]), "type_C has 3 to 3; use 0 to 0"),
        (lambda: problem([[0.1]], [0], [0], [4]), "gpus_C must be at least 1"),
        (lambda: problem([[0.1]], [1], [0], [4], forced=[1]), "forced_J has 1 to 1; use -1 to 0"),
        (lambda: problem([[0.1]], [1], [0], [4], forced=[0, 0]), "forced_J has 2 entries for 1 jobs"),
        (lambda: problem([[0.1]], [1], [0], [4], quotas=[([1], 1)]), "job_M of a quota has 1 to 1"),
        (lambda: problem([[0.1]], [1], [0], [4], quotas=[([0, 0], 1)]), "names a job twice"),
        (lambda: problem([[0.1]], [1], [0], [4], quotas=[([0], -1)]), "at least 0"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(build, words):
    with pytest.raises(BadProblem, match=words):
        build()


def test_ten_thousand_jobs_that_are_alike():
    """One GPU saves 0.1, two 0.35, four 0.5: the most per GPU is the pairs' 0.175, and that is the price.
    12,344 GPUs make 6,172 of them: 6172 x 0.75 + 3828 x 1.1 = 8839.8 = 11000 - 12344 x 0.175, so that is proven."""
    given = problem([[1.0, 0.75, 0.6]] * 10_000, [1, 2, 4], [0, 0, 0], [12_344])
    solution = solve(given, "dual", EXACT)
    assert solution.report.objective == pytest.approx(8839.8)
    assert solution.report.bound == pytest.approx(8839.8)
    assert np.bincount(solution.choice_J + 1).tolist() == [3828, 0, 6172]
    assert solution.report.prices_T == (pytest.approx(0.175),)
    assert solution.report.seconds < 5


def test_ties_between_types_are_shared_out():
    """Both types are as good for every job; a choice of one type only would leave half the cluster empty."""
    given = problem([[1.0, 0.7, 1.0, 0.7]] * 5_000, [1, 2] * 2, [0, 0, 1, 1], [4_001, 5_999])
    mixed = reduce(given).left(relax(reduce(given), tolerance=1e-9).mixed_J)
    assert mixed.tolist() == pytest.approx([0, 0], abs=20), "the mixture itself is about right, before any repair"
    solution = solve(given, "dual")
    taken = solution.choice_J[solution.choice_J >= 0]
    assert np.bincount(given.type_C[taken], given.gpus_C[taken]).tolist() == pytest.approx([4_001, 5_999], abs=2)
    assert solution.report.gap <= 1e-4


def test_the_same_problem_gives_the_same_choice():
    first, second = solve(crowd(), "dual"), solve(crowd(), "dual")
    assert np.array_equal(first.choice_J, second.choice_J)
    assert first.report.prices_T == second.report.prices_T


def test_every_status_has_its_line():
    assert set(STATUS_MEANING) == set(SolveStatus)


@pytest.mark.parametrize(("solver", "library"), [("dual", "cbc"), ("milp", "cbc"), ("milp", "highs")])
def test_without_time_there_is_still_a_plan_and_a_bound(solver, library, monkeypatch):
    given = crowd()
    monkeypatch.setattr(python_mip, "LIBRARIES", {library: python_mip.LIBRARIES[library]})
    solution = solve(given, solver, Limits(seconds=0.0))
    assert solution.report.status is SolveStatus.TIME_LIMIT
    assert given.feasible(solution.choice_J)
    best = solve(given, limits=EXACT).report.objective
    assert solution.report.bound <= best <= solution.report.objective
    assert solution.report.gap < 0.02


def test_a_node_limit_ends_the_search_and_says_so(monkeypatch):
    solve_core = dual.solve_core

    def never_done(*args, nodes, **keywords):
        return dataclasses.replace(solve_core(*args, nodes=nodes, **keywords), nodes=nodes, finished=False, bound=-INF)

    monkeypatch.setattr(dual, "solve_core", never_done)
    given = crowd()
    solution = solve(given, "dual", Limits(gap=0.0, nodes=7))
    assert solution.report.status is SolveStatus.NODE_LIMIT
    assert given.feasible(solution.choice_J)
    assert -INF < solution.report.bound < solution.report.objective


def test_a_core_that_may_not_grow_ends_the_search_and_says_so(monkeypatch):
    best = solve(crowd(), "dual", EXACT).report.objective
    monkeypatch.setattr(dual, "CORE_ENTRIES", 1)
    monkeypatch.setattr(dual, "CORE_MOST", 8)
    solution = solve(crowd(), "dual", EXACT)
    assert solution.report.status is SolveStatus.NODE_LIMIT
    assert solution.report.bound <= best < solution.report.objective


def test_trouble_in_highs_fails_the_dual_and_auto_asks_python_mip(monkeypatch):
    monkeypatch.setattr(highspy.Highs, "run", lambda self: None)
    with pytest.raises(SolveFailed, match="HiGHS") as error:
        solve(crowd(), "dual")
    assert error.value.status is SolveStatus.NUMERICAL
    solution = solve(crowd(), "auto")
    assert solution.report.solver == "milp-highs"
    assert solution.report.gap <= 1e-4


def test_trouble_in_the_core_fails_the_dual(monkeypatch):
    class Troubled(highspy.Highs):
        def getModelStatus(self):  # noqa: N802
            return highspy.HighsModelStatus.kSolveError

    monkeypatch.setattr(dual, "quiet_highs", lambda **options: Troubled())
    monkeypatch.setattr(dynamic, "MOST_STEPS", 0)
    with pytest.raises(SolveFailed, match="kSolveError") as error:
        solve(crowd(), "dual")
    assert error.value.status is SolveStatus.NUMERICAL


def test_trouble_in_the_library_fails_milp(monkeypatch):
    monkeypatch.setattr(mip.Model, "optimize", lambda self, **_: mip.OptimizationStatus.INFEASIBLE)
    with pytest.raises(SolveFailed, match="highs calls a problem that has a solution INFEASIBLE") as error:
        solve(crowd(), "milp")
    assert error.value.status is SolveStatus.NUMERICAL


def test_a_choice_that_breaks_a_limit_is_not_used(monkeypatch):
    def greedy(reduced, limits):
        return dual.ReducedSolution("careless", reduced.saving_JK.argmin(axis=1), 0.0, SolveStatus.OPTIMAL)

    monkeypatch.setitem(SOLVERS, "dual", greedy)
    with pytest.raises(SolveFailed, match="the choice of careless breaks a capacity or a quota"):
        solve(crowd(), "dual")


def test_a_recorded_choice_is_taken_as_it_is():
    given = Problem(
        np.array([[0.2], [0.1]]),
        np.array([1]),
        np.array([0]),
        np.array([1]),
        1.1,
        recorded_J=np.array([0, -1]),
    )
    solution = solve(given)
    assert solution.choice_J.tolist() == [0, -1]
    assert solution.report.status is SolveStatus.INCUMBENT
    assert solution.report.objective == pytest.approx(1.3)


def test_quotas_that_cannot_bind_cost_nothing():
    """All members' largest entries together are within the limit: there is no price for it, and the rows are gone."""
    given = problem([COSTS] * 3, [1, 2, 4], [0, 0, 0], [12], quotas=[([0, 1], 8), ([0, 1, 2], 11)])
    reduced = reduce(given)
    assert reduced.types == 1
    assert reduced.limit_R.tolist() == [12, 11]


def test_gpus_that_no_sizes_can_fill_are_no_room():
    """Jobs take 2 or 4 GPUs, so that 7 are as good as 6 and a quota of 5 as one of 4: else the prices' bound is off."""
    given = problem([[0.8, 0.5]] * 3, [2, 4], [0, 0], [7], quotas=[([0, 1], 5)])
    assert reduce(given).limit_R.tolist() == [6, 4]


def test_entries_that_pass_a_quota_are_no_entries():
    """Half of one would look good to the prices."""
    given = problem([COSTS] * 2, [1, 2, 4], [0, 0, 0], [8], quotas=[([0], 3)])
    assert np.isfinite(reduce(given).saving_JK).tolist() == [[True, True, False, True], [True] * 4]


def test_a_quota_of_a_thousand_jobs_is_met_by_prices():
    """Two users with 500 alike jobs each; one may hold 100 GPUs, the other is free: 100 singles against 500 pairs."""
    quota = Quota(np.arange(500), 100)
    given = problem([[1.0, 0.9]] * 1000, [1, 2], [0, 0], [2000])
    given = Problem(given.cost_JC, given.gpus_C, given.type_C, given.capacity_T, 1.1, quotas=(quota,))
    solution = solve(given, "dual", EXACT)
    # 0.1 for the first GPU and 0.1 for the second: singles and pairs are as good for limited jobs.
    assert solution.report.objective == pytest.approx(500 * 0.9 + 500 * 1.1 - 100 * 0.1)
    assert given.gpus_C[solution.choice_J[500:]].tolist() == [2] * 500
    relaxed = relax(reduce(given), tolerance=1e-9)
    assert relaxed.bound == pytest.approx(solution.report.objective)
    assert relaxed.price_R == pytest.approx([0.0, 0.1])


def test_solving_prints_nothing():
    """Also not the name of HiGHS: the output of a command such as `penstock simulate run --json` is read by programs."""
    code = (
        "from tests.scheduler.solver.test_solve import crowd\n"
        "from penstock_scheduler.rounds.solver import solve\n"
        "for solver in ('dual', 'milp'): solve(crowd(), solver)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
