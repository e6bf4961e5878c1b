"""Sia with a cloud: its offers are further columns of the integer program, and its budgets are prices on dollars."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.burst.deciding.choices import CloudChoice, choices, needs_usd, within
from penstock_scheduler.model import BudgetLine, CloudState, JobId
from penstock_scheduler.rounds.policies.cloud import in_cloud
from penstock_scheduler.rounds.policies.sia.costs import LEAST_FACTOR, remaining, size_weights
from penstock_scheduler.rounds.policies.sia.matrix import SiaMatrix
from penstock_scheduler.rounds.policies.sia.program import solved
from penstock_scheduler.rounds.policies.sia.settings import SiaSettings
from penstock_scheduler.rounds.solver import Problem, Solution

CLOUD_BONUS = 1e-3
"""Once a job's waiting budget is over, its best offer in the cloud costs this much less than a round without GPUs."""

FIRST_PRICE = 1e-4
"""First price of a dollar of a broken budget, in the objective's unit. It doubles until the budget is kept."""


def solve_with_cloud(
    matrix: SiaMatrix, problem: Problem, leave_J: NDArray[np.float64], cloud: CloudState, settings: SiaSettings
) -> tuple[Solution, dict[JobId, CloudChoice]]:
    """Solve the program with a column for each of the cloud's offers. Also returns the jobs that leave, and their choices.

    An offer counts as a GPU type of its own, of which there are as many GPUs as the cloud offers. Its entry costs as much as a
    configuration of the same goodput on site, plus `cost_per_usd` for each dollar. Once its waiting budget is over, a job
    prefers its best offer to a further round without GPUs, whatever the offer costs. Budgets are side constraints: each broken
    budget gets a price on its dollars, which is raised until no budget is broken.

    Args:
        matrix: the jobs and the site's configurations.
        problem: the program of the site alone.
        leave_J: cost of leaving each job out, with its weight.
        cloud: its offers and budgets.
        settings: the policy's.
    """
    offers = [offer for offer in cloud.offers if offer.count > 0]
    columns = _Columns(matrix, cloud, settings)
    # In `problem`, leaving out costs the same for every job. The best offer costs a little less than that.
    cost_JO = columns.cost_JO + (problem.leave_out - leave_J)[:, None]
    best_J = cost_JO.min(axis=1, initial=np.inf)
    most = problem.leave_out - CLOUD_BONUS
    cost_JO -= np.where(np.isfinite(best_J), np.maximum(best_J - most, 0.0), 0.0)[:, None]
    types = len(matrix.types)
    quotas = tuple(dataclasses.replace(quota, first_types=types) for quota in problem.quotas)
    price = dict.fromkeys(cloud.budgets, 0.0)
    recorded_J = matrix.recorded(tuple(in_cloud(offer) for offer in offers))
    while True:
        dearer_JO = np.zeros(cost_JO.shape)
        for line, per_usd in price.items():
            if per_usd > 0:
                dearer_JO += per_usd * columns.needs(line)
        solution = solved(
            Problem(
                np.hstack([problem.cost_JC, cost_JO + dearer_JO]),
                np.append(problem.gpus_C, [offer.gpus for offer in offers]).astype(np.int64),
                np.append(problem.type_C, types + np.arange(len(offers))).astype(np.int64),
                np.append(problem.capacity_T, [offer.gpus * offer.count for offer in offers]).astype(np.int64),
                problem.leave_out,
                quotas=quotas,
                recorded_J=recorded_J,
            ),
            settings,
        )
        away = {
            matrix.jobs[row].id: columns.choice_of[row, c - len(matrix.options)]
            for row, c in enumerate(solution.choice_J.tolist())
            if c >= len(matrix.options)
        }
        broken = within(cloud.budgets, {job: (matrix.by_id[job].account, to) for job, to in away.items()})
        if not broken or recorded_J is not None:
            return solution, away
        for line in broken:
            price[line] = max(2 * price[line], FIRST_PRICE)


class _Columns:
    """The cloud's columns: cost of each job on each offer (J x O); `inf` where the job cannot have it."""

    def __init__(self, matrix: SiaMatrix, cloud: CloudState, settings: SiaSettings) -> None:
        of_job, _ = choices(matrix.snapshot)
        offers = [offer for offer in cloud.offers if offer.count > 0]
        column = {offer.id: o for o, offer in enumerate(offers)}
        shape = (len(matrix.jobs), len(offers))
        self._jobs, self.cost_JO = matrix.jobs, np.full(shape, np.inf)
        self.choice_of: dict[tuple[int, int], CloudChoice] = {}
        p = settings.fairness_p
        size_J = size_weights(remaining(matrix), settings.size_power)
        for row, job in enumerate(matrix.jobs):
            for choice in of_job.get(job.id, ()):
                o = column[choice.offer.id]
                scale = matrix.scale_J[row]
                gain = max(choice.goodput * scale, LEAST_FACTOR) if scale > 0 else 1.0
                cost = np.copysign(gain**p, -p) * job.weight + cloud.cost_per_usd * choice.expected_usd
                self.cost_JO[row, o] = size_J[row] * cost  # a dollar weighs as much against goodput for every size
                self.choice_of[row, o] = choice

    def needs(self, line: BudgetLine) -> NDArray[np.float64]:
        """The dollars that each job on each offer may cost of a budget (J x O)."""
        needs_JO = np.zeros(self.cost_JO.shape)
        for (row, o), choice in self.choice_of.items():
            needs_JO[row, o] = needs_usd(line, self._jobs[row].account, choice)
        return needs_JO
