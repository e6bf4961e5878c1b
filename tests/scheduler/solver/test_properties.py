"""What every solver must keep to, on generated problems small enough to try every choice."""

from __future__ import annotations

from unittest import mock

import mip
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver import Limits, Problem, Quota, SolveFailed, dual, dynamic, python_mip, solve
from penstock_scheduler.rounds.solver.prices import relax
from penstock_scheduler.rounds.solver.reduced import reduce, repair
from tests.scheduler.solver.problems import INF, best_by_trying, dual_value, problem, problems

NEAR = 1e-6


@pytest.mark.parametrize("steps", [0, dynamic.MOST_STEPS], ids=["HiGHS", "dynamic program"])
@pytest.mark.parametrize("entries", [1, dual.CORE_ENTRIES], ids=["growing core", "core as it is"])
@settings(max_examples=80, deadline=None)
@given(case=problems(), gap=st.sampled_from([0.0, 1e-4, 0.05]))
def test_the_dual_against_trying_everything(entries: int, steps: int, case: Problem, gap: float) -> None:
    best = best_by_trying(case)
    with mock.patch.object(dual, "CORE_ENTRIES", entries), mock.patch.object(dynamic, "MOST_STEPS", steps):
        if best == INF:
            with pytest.raises(SolveFailed) as error:
                solve(case, "dual")
            assert error.value.status is SolveStatus.INFEASIBLE
            return
        solution = solve(case, "dual", Limits(gap=gap))
    report = solution.report
    assert case.feasible(solution.choice_J)
    assert report.objective == pytest.approx(case.objective(solution.choice_J))
    assert report.bound <= best + NEAR
    assert best <= report.objective + NEAR
    assert report.objective <= best + gap * abs(report.objective) + NEAR
    assert report.status is SolveStatus.OPTIMAL
    assert all(price >= 0 for price in report.prices_T)


@settings(max_examples=40, deadline=None)
@given(case=problems(), gap=st.sampled_from([0.0, 0.05]), library=st.sampled_from(sorted(python_mip.LIBRARIES)))
def test_milp_against_trying_everything(case: Problem, gap: float, library: str) -> None:
    best = best_by_trying(case)
    with mock.patch.object(python_mip, "LIBRARIES", {library: python_mip.LIBRARIES[library]}):
        if best == INF:
            with pytest.raises(SolveFailed):
                solve(case, "milp")
            return
        solution = solve(case, "milp", Limits(gap=gap))
    assert case.feasible(solution.choice_J)
    assert solution.report.bound <= best + NEAR
    assert best <= solution.report.objective + NEAR
    assert solution.report.objective <= solution.report.bound + gap * abs(solution.report.objective) + NEAR


@settings(max_examples=40, deadline=None)
@given(case=problems(jobs=12, configs=6), gap=st.sampled_from([0.0, 1e-4, 0.05]))
def test_the_integer_program_bounds_the_dual_method_within_its_proven_gap(case: Problem, gap: float) -> None:
    """`Problem.to_mip` says what a round is; no shortcut of `dual` may change that."""
    model = case.to_mip()
    assume(len(model.vars))  # python-mip has no answer to a program without variables
    code = model.optimize()
    try:
        report = solve(case, "dual", Limits(gap=gap)).report
    except SolveFailed:
        assert code in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE)
        return
    assert code is mip.OptimizationStatus.OPTIMAL
    best = model.objective_value
    assert report.bound - NEAR <= best <= report.objective + NEAR
    assert report.objective <= best + max(gap, report.gap) * abs(report.objective) + NEAR


@settings(max_examples=60, deadline=None)
@given(case=problems(jobs=12, configs=6, quotas=0), width=st.integers(2, 30))
def test_the_dynamic_program_finds_as_good_a_choice_as_highs(case: Problem, width: int) -> None:
    try:
        reduced = reduce(case)
    except SolveFailed:
        return
    assume(np.isfinite(reduced.saving_JK[:, :-1]).any())
    empty_J = np.full(len(reduced.job_J), reduced.nothing)
    pick_J = repair(reduced, reduced.saving_JK.argmin(axis=1), reduced.saving_JK)
    for regret_JK in (reduced.saving_JK - reduced.saving_JK.min(axis=1, keepdims=True), reduced.saving_JK):
        core_JK, _ = dual.choose(regret_JK.copy(), pick_J, width, INF)
        found_J = dynamic.solve_small(reduced, core_JK, pick_J)
        assert found_J is not None
        assert core_JK[np.arange(len(found_J)), found_J].all()
        assert (reduced.left(found_J) >= 0).all()
        with mock.patch.object(dynamic, "MOST_STEPS", 0):
            answer = dual.solve_core(reduced, core_JK, pick_J, gap=0.0, nodes=10_000, seconds=60.0)
        assert answer.pick_J is not None
        assert reduced.value(found_J) <= reduced.value(answer.pick_J) + NEAR
        assert reduced.value(found_J) <= reduced.value(empty_J) + NEAR or not core_JK[:, -1].all()


@settings(max_examples=50, deadline=None)
@given(case=problems(quotas=0))
def test_the_prices_bound_the_best_from_below(case: Problem) -> None:
    """L, summed entry by entry at the prices given, is no more than the best choice, and what the solver says it is."""
    best = best_by_trying(case)
    assume(best < INF)
    reduced = reduce(case)
    assume(len(reduced.job_J))
    relaxed = relax(reduced, tolerance=1e-9)
    by_hand = dual_value(case, tuple(relaxed.price_R))
    # Entries that no best choice has may only loosen L, so the reduced problem's is the larger.
    assert by_hand <= relaxed.bound + NEAR
    assert relaxed.bound <= best + NEAR


@settings(max_examples=50, deadline=None)
@given(case=problems(), evaluations=st.sampled_from([1, 2, 3]))
def test_prices_that_were_cut_short_are_a_bound_all_the_same(case: Problem, evaluations: int) -> None:
    best = best_by_trying(case)
    assume(best < INF)
    reduced = reduce(case)
    assume(len(reduced.job_J))
    with mock.patch("penstock_scheduler.rounds.solver.prices.MAX_EVALUATIONS", evaluations):
        relaxed = relax(reduced, tolerance=0.0)
    assert relaxed.evaluations <= evaluations
    assert relaxed.bound <= best + NEAR


@settings(max_examples=50, deadline=None)
@given(case=problems(jobs=8), seed=st.integers(0, 99))
def test_any_choice_can_be_repaired(case: Problem, seed: int) -> None:
    try:
        reduced = reduce(case)
    except SolveFailed:
        return
    random = np.random.default_rng(seed)
    possible = np.isfinite(reduced.saving_JK)
    pick_J = np.array([random.choice(np.flatnonzero(row)) for row in possible], dtype=np.int64)
    repaired_J = repair(reduced, pick_J, reduced.saving_JK)
    assert case.feasible(reduced.expand(repaired_J))
    if case.feasible(reduced.expand(pick_J)):
        assert np.array_equal(repaired_J, pick_J)


@pytest.mark.parametrize("seed", range(6))
def test_both_solvers_agree_on_a_few_hundred_jobs(seed: int) -> None:
    """Random concave savings, 5 % forced, users with quotas of which some bind and accounts that hold several users."""
    random = np.random.default_rng(seed)
    jobs, gpus_C = 150, [1, 2, 4, 8] * 3
    gain_JC = np.array([1.0, 1.9, 3.5, 6.0] * 3) * np.repeat(random.uniform(0.8, 3.0, (jobs, 3)), 4, axis=1)
    cost_JC = gain_JC**-0.5
    cost_JC[random.uniform(size=cost_JC.shape) < 0.1] = INF
    forced = np.where((random.uniform(size=jobs) < 0.05) & np.isfinite(cost_JC[:, 0]), 0, -1)
    user_J = random.integers(0, 6, jobs)
    case = problem(cost_JC, gpus_C, np.repeat([0, 1, 2], 4), [60, 40, 40], forced=forced)
    quotas = [Quota(np.flatnonzero(user_J == user), 10 + 4 * user) for user in range(6)]
    quotas += [Quota(np.flatnonzero(user_J < 3), 40), Quota(np.flatnonzero(user_J >= 3), 70)]
    case = Problem(case.cost_JC, case.gpus_C, case.type_C, case.capacity_T, 1.1, case.forced_J, tuple(quotas))
    ours, theirs = solve(case, "dual"), solve(case, "milp")
    assert ours.report.gap <= 1e-4
    assert ours.report.objective <= theirs.report.objective * 1.0001
    assert theirs.report.objective <= ours.report.objective * 1.0001
    assert ours.report.bound <= theirs.report.objective + NEAR
    assert np.all((forced < 0) | (ours.choice_J == forced))
    held_J = np.where(ours.choice_J >= 0, case.gpus_C[ours.choice_J], 0)
    assert all(held_J[quota.job_M].sum() <= quota.gpus for quota in quotas)
    assert any(held_J[quota.job_M].sum() == quota.gpus for quota in quotas), "some quota binds"
