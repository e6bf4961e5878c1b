"""The policy `sia`: one round, step by step. The package's documentation explains the algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock_profiles.matrix import GoodputMatrix
from penstock_scheduler.burst.deciding.choices import CloudChoice
from penstock_scheduler.model import Configuration, Job, JobId, Plan, Snapshot, SolveStatus
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.placement import Placed
from penstock_scheduler.rounds.policies.cloud import in_cloud, sent
from penstock_scheduler.rounds.policies.equals import unswapped
from penstock_scheduler.rounds.policies.sia import program
from penstock_scheduler.rounds.policies.sia.cloud import solve_with_cloud
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.policies.sia.reasons import explained, remarks
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings
from penstock_scheduler.rounds.solver import Problem, python_mip


class Sia:
    """Goodput of all jobs at once, by an integer program.

    From one round to the next it keeps only the goodput of jobs whose model has not changed.
    """

    name = "sia"

    def __init__(self, settings: SiaSettings) -> None:
        """Raises ConfigError if the settings name the solver `milp` and it is not installed."""
        if settings.solver == "milp":
            python_mip.library()
        self._settings = settings
        self._goodputs = GoodputMatrix()

    def decide(self, snapshot: Snapshot) -> Plan:
        """The best plan for this snapshot. Raises RoundFailed when the solver has no usable answer."""
        matrix = SiaMatrix(snapshot, self._settings, self._goodputs)
        problem, leave_J = program.build(matrix, self._settings)
        away: dict[JobId, CloudChoice] = {}
        if snapshot.cloud is None:
            solution = program.solved(problem, self._settings)
        else:
            solution, away = solve_with_cloud(matrix, problem, leave_J, snapshot.cloud, self._settings)
        report = solution.report
        chosen = {
            job.id: matrix.options[c]
            for job, c in zip(matrix.jobs, solution.choice_J, strict=True)
            if 0 <= c < len(matrix.options)
        }
        moves = np.flatnonzero((matrix.held_J >= 0) & (matrix.held_J != solution.choice_J))
        chosen = unswapped(snapshot, chosen, [matrix.jobs[row] for row in moves.tolist()], matrix.rate)
        placed, instead = _place(matrix, chosen, problem)
        cut_short = report.status is SolveStatus.TIME_LIMIT
        assignments, waiting = explained(matrix, chosen, placed, instead)
        return Plan(
            snapshot.round,
            assignments,
            {job: reason for job, reason in waiting.items() if job not in away},
            {job: sent(choice) for job, choice in away.items()},
            solve=report,
            prices=dict(zip(matrix.types, report.prices_T, strict=False)) if report.prices_T else {},
            incumbent=chosen | {job: in_cloud(choice.offer) for job, choice in away.items()} if cut_short else {},
        )

    def remarks(self, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
        """What a move would cost the job, how much it has left, and whether others would gain from its GPUs."""
        return remarks(snapshot, plan, job, self._settings)


def _place(
    matrix: SiaMatrix, chosen: Mapping[JobId, Configuration], problem: Problem
) -> tuple[Placed, dict[JobId, Configuration]]:
    """Find nodes for the chosen configurations.

    A job for which there are none takes its next best entry for which there is room. The second value has these entries.
    """
    placed = matrix.place(chosen)
    instead: dict[JobId, Configuration] = {}
    if not placed.left_over:
        return placed, instead
    taken, book = dict(placed.placements), FreeGpus.of(matrix.snapshot)
    for held_by, held in {**matrix.pins, **taken}.items():
        book.take(matrix.by_id[held_by], held)
    for job_id in sorted(placed.left_over, key=matrix.row_of.__getitem__):
        cost_C = problem.cost_JC[matrix.row_of[job_id]]
        for column in np.argsort(cost_C, kind="stable"):
            if not cost_C[column] < problem.leave_out:  # no better than nothing
                break
            option, job = matrix.options[column], matrix.by_id[job_id]
            if option != chosen[job_id] and (found := book.find(job, (option,), job.allocation)) is not None:
                taken[job_id] = found
                book.take(job, found)
                instead[job_id] = option
                break
    left_over = tuple(job_id for job_id in placed.left_over if job_id not in instead)
    return Placed(taken, placed.made_room_for, left_over), instead
