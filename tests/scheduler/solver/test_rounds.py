"""Rounds of the size that a cluster has, from recorded and generated workloads; they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from penstock_scheduler.cli.solve import load_problem
from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver import Limits, solve

DATA = os.environ.get("PENSTOCK_TEST_DATA")
ROUNDS = sorted((Path(DATA) / "sia" / "rounds").rglob("*.npz")) if DATA else []


@pytest.mark.skipif(not ROUNDS, reason="needs PENSTOCK_TEST_DATA, a folder with sia/rounds/*.npz")
def test_every_round_is_solved_with_a_proof():
    """Gap 0.01 %, feasible, within the node limit, and no dearer than what the authors' own program chose."""
    for file in ROUNDS:
        problem, _ = load_problem(file)
        solution = solve(problem)
        report = solution.report
        assert report.gap <= 1e-4, file.name
        assert report.status is SolveStatus.OPTIMAL, file.name
        assert problem.feasible(solution.choice_J), file.name
        assert all(price >= 0 for price in report.prices_T)
        with np.load(file) as arrays:
            reference = float(arrays["ref_obj"]) if "ref_obj" in arrays else np.nan
        assert not report.objective > reference * 1.0001, file.name


@pytest.mark.skipif(not ROUNDS, reason="needs PENSTOCK_TEST_DATA, a folder with sia/rounds/*.npz")
def test_milp_finds_no_better_choice_than_auto_on_small_rounds():
    for file in ROUNDS:
        problem, _ = load_problem(file)
        if len(problem.cost_JC) > 150:
            continue
        ours, theirs = solve(problem), solve(problem, "milp", Limits(gap=0.0))
        assert theirs.report.gap <= 1e-6, file.name
        assert ours.report.objective <= theirs.report.objective * 1.0001, file.name
        assert ours.report.bound <= theirs.report.objective + 1e-6, file.name
