"""Sia: the allocation that makes the most of every GPU, for elastic jobs on mixed GPU types.

After *Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling* (SOSP '23). Each round:

1. For each job and each configuration (nodes, GPUs, type) that its job spec allows, the model gives a goodput: how fast it
   would train there. Dividing a job's row by its smallest entry makes jobs comparable: 1 is its slowest way to run, or for a
   rigid job its number of GPUs, and for a job in units of several GPUs that unit.
2. A job of which nobody knows how it scales starts on its fewest GPUs and at most doubles (`growth`) from one round to the next.
   Nor does anybody know a job that has a GPU type yet to run on: see `_Measuring`.
3. Moving costs a restart, so all entries but the one that a job holds are multiplied by its restart factor.
4. An integer program picks at most one configuration for each job, within the GPUs of each type, so that the sum of
   (goodput ** p) is best. With p < 0, the default, that is a minimum and favours the jobs that have least; each job left
   out costs `allocation_lambda`, which must exceed 1, the cost of a job on its slowest configuration, or nobody would run.
   A job's first GPU is then worth `allocation_lambda` - 1, and its second at most 1 - 2 ** p, so that 2 is enough for every
   p < 0 that nobody waits for a first GPU while others, who can be moved, have a second.
   Where the site has a cloud, its offers are further configurations, with a price, for jobs whose wait for GPUs is over: see
   `Sia._solve_with_cloud` and docs/admin/bursting.md.
5. Placement finds the nodes (`penstock_scheduler.placement`). A job that finds none takes the next best that there is room for.

Hard constraints: jobs that may not move, and jobs on their way from an earlier round, are taken out beforehand with their GPUs;
partitions, reservations and limits on users, accounts and QOS are rows of the program.

Where two choices are as good as each other, what a job has is kept (`KEEP_BONUS`), then the older job is preferred
(`AGE_BONUS`): the same snapshot gives the same plan, whatever the order of its jobs.

The authors' artifact differs from their paper and from us in what follows. Each is a setting; the preset `sia:artifact` sets them
all as there, for comparison.

- `allocation_lambda`: 1.1, as in the paper, so that a job's first GPU is worth less than another's second. A newcomer, which
  gets one at first, waits as long as one old job has 4.
- `round_costs`: costs are rounded to two decimals and end at 3000. That makes 48 and 52 GPUs weigh the same, and ties that
  are broken by moving jobs for nothing.
- `max_job_gpus`: no job gets more than 64 GPUs.
- `restart_free_when_young`: a job younger than its restart cost moves freely, though it loses most by it.
- `leaving_is_free`: the restart factor makes all but the held entry worse, but not being stopped. So a young job is stopped
  rather than moved, and comes back at no cost. Ours multiplies that too: with p < 0 the cost of leaving out a running job
  is lambda x r ** p.
- `blind_start`: a job that never ran gets one unit of some type, and no type is preferred, whatever is known of it. Of equals
  its solver takes the first in the order of the artifact's own names (`start_order`): all 40 such jobs in the rounds that were
  recorded from its simulator got a T4.

Axes: J jobs, C configurations, T GPU types.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from penstock_profiles.estimators import AnyEstimator, PipelineEstimator
from penstock_profiles.matrix import Configurations, GoodputMatrix
from penstock_scheduler.burst.choices import Choice, within
from penstock_scheduler.burst.choices import choices as choices_of
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import (
    Adaptivity,
    Assignment,
    Batch,
    CloudState,
    Configuration,
    GpuLimit,
    Job,
    JobId,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
    SolveStatus,
)
from penstock_scheduler.placement import Placed, place
from penstock_scheduler.policies import common
from penstock_scheduler.policies.cloud import in_cloud, sent
from penstock_scheduler.policies.room import Allowance
from penstock_scheduler.solver import Limits, Problem, Quota, Solution, solve

KEEP_BONUS = 1e-3
"""Share of its cost by which an entry that the job already holds is preferred."""

AGE_BONUS = 1e-4
"""Cost by which the youngest job is less preferred than the oldest."""

START_BONUS = 1e-3
"""Cost by which a job that never ran prefers a type of `start_order` to the next; rounded costs differ by 0.01."""

NEW_GPU_S = 180.0
"""GPU-seconds for each type that it may use in which a job is new: three rounds of the daemon's default."""

MEASURE_BONUS = 0.01
"""Share of its cost by which a job that is new rather learns how fast it is on one more type than stays where it is."""

LEAST_FACTOR = 1e-3
"""Lower bound of the restart factor in costs: with p < 0, 0 would make every move infinitely dear."""

CLOUD_BONUS = 1e-3
"""Cost by which a job whose wait is over prefers its best offer in the cloud to a round without GPUs."""

FIRST_PRICE = 1e-4
"""Objective per dollar with which the price of a broken budget begins; it doubles until the budget is kept."""

MOST_UNIONS = 6
"""Sets of nodes that are open to different jobs, up to which every union of them gets a row of its own."""

FloatMatrix = NDArray[np.float64]


class SiaSettings(BaseModel):
    """Section `[policy.sia]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fairness_p: float = Field(default=-0.5, description="Power p of the goodput; below 0 favours those who have least.")
    allocation_lambda: float = Field(
        default=2.0,
        description="Cost of leaving a job out; above 1 for p < 0, below 0 for p > 0. Under 2 - 2 ** p, a job waits for its "
        "first GPU while others have more than they need.",
    )
    growth: float | None = Field(
        default=2.0,
        gt=1,
        description="Times its largest number of GPUs so far that a job may get while nobody knows how it scales; "
        "null: no limit.",
    )
    measure_gpu_s: NonNegativeFloat = Field(
        default=20.0,
        description="GPU-seconds, beside a restart, in which a new job is to show how fast it is on one GPU of each type that "
        "nothing is known of; 0: it is not measured.",
    )
    solver: Literal["auto", "milp", "dual"] = "auto"
    backend: Literal["cbc", "highs"] = Field(default="cbc", description="What `milp` runs.")
    gap: NonNegativeFloat = Field(default=1e-4, description="Relative gap at which a plan counts as the best.")
    max_nodes: PositiveInt = Field(
        default=10_000, description="Branch-and-bound nodes after which the best so far is taken."
    )
    max_seconds: PositiveFloat = Field(
        default=20.0, description="Last resort; a plan that met it is marked as cut short."
    )
    round_costs: bool = Field(default=False, description="As the artifact: costs of two decimals, at most 3000.")
    max_job_gpus: PositiveInt | None = Field(default=None, description="Most GPUs of one job; the artifact's is 64.")
    restart_free_when_young: bool = Field(
        default=False, description="As the artifact: a job younger than its restart cost moves freely."
    )
    leaving_is_free: bool = Field(
        default=False, description="As the artifact: the restart factor does not count for being stopped."
    )
    blind_start: bool = Field(
        default=False, description="As the artifact: a job that never ran gets one unit, of whichever type."
    )
    start_order: tuple[str, ...] = Field(
        default=(),
        description="With blind_start: of which type, the first that has room; as the artifact's choices show.",
    )

    @model_validator(mode="after")
    def _check(self) -> SiaSettings:
        p, leave_out = self.fairness_p, self.allocation_lambda
        if p == 0:
            raise ValueError("fairness_p=0 weighs every configuration alike; use a non-zero value, such as -0.5")
        if p < 0 and leave_out <= 1:
            raise ValueError(
                f"allocation_lambda={leave_out} with fairness_p={p} would leave every job out: a job's slowest "
                "configuration costs 1; use more than 1, such as 2"
            )
        if p > 0 and leave_out >= 0:
            raise ValueError(
                f"allocation_lambda={leave_out} with fairness_p={p} would reward leaving jobs out; use less than 0, such as -1.1"
            )
        return self


ARTIFACT: dict[str, Any] = {
    "allocation_lambda": 1.1,
    "measure_gpu_s": 0.0,
    "round_costs": True,
    "max_job_gpus": 64,
    "restart_free_when_young": True,
    "leaving_is_free": True,
    "blind_start": True,
    "start_order": ("t4", "v100", "a100", "rtx6000", "rtx"),
}
"""Settings of the preset `sia:artifact`."""


class Sia:
    """The policy; see the module. Keeps the goodput of jobs whose model has not changed from round to round, and nothing else."""

    name = "sia"

    def __init__(self, settings: SiaSettings) -> None:
        self._settings = settings
        self._goodput = GoodputMatrix()

    def decide(self, snapshot: Snapshot) -> Plan:
        """The best plan for this snapshot. Raises RoundFailed when the solver has no usable answer."""
        table = _Table(snapshot, self._settings, self._goodput)
        leave_J, cost_JC = self._costs(table)
        # The solver knows one cost of leaving a job out: the average, from which each job's own entries are told.
        weighted_J = leave_J * table.weight_J
        leave_out = float(weighted_J.mean()) if len(weighted_J) else 0.0
        problem = Problem(
            cost_JC * table.weight_J[:, None] - weighted_J[:, None] + leave_out,
            table.gpus_C,
            table.type_C,
            table.capacity_T,
            leave_out,
            quotas=table.quotas(),
            recorded_J=table.recorded(),
        )
        away: dict[JobId, Choice] = {}
        if snapshot.cloud is None:
            solution = self._solve(problem)
        else:
            solution, away = self._solve_with_cloud(table, problem, weighted_J, snapshot.cloud)
        report = solution.report
        chosen = {
            job.id: table.options[c]
            for job, c in zip(table.jobs, solution.choice_J, strict=True)
            if 0 <= c < len(table.options)
        }
        placed, instead = self._place(table, chosen, problem)
        cut_short = report.status is SolveStatus.TIME_LIMIT
        assignments, waiting = _explained(table, chosen, placed, instead)
        return Plan(
            snapshot.round,
            assignments,
            {job: reason for job, reason in waiting.items() if job not in away},
            {job: sent(choice) for job, choice in away.items()},
            solve=report,
            prices=dict(zip(table.types, report.prices_T, strict=False)) if report.prices_T else {},
            incumbent=chosen | {job: in_cloud(choice.offer) for job, choice in away.items()} if cut_short else {},
        )

    def _solve(self, problem: Problem) -> Solution:
        limits = Limits(self._settings.gap, self._settings.max_nodes, self._settings.max_seconds)
        return solve(problem, self._settings.solver, limits, backend=self._settings.backend)

    def _solve_with_cloud(
        self, table: _Table, problem: Problem, leave_J: NDArray[np.float64], cloud: CloudState
    ) -> tuple[Solution, dict[JobId, Choice]]:
        """The problem with a column for each of the cloud's offers, and who leaves for what.

        An offer is a GPU type of its own, whose capacity is what can be had of it. Its entry costs what a configuration
        of its goodput would on site, and `cost_per_usd` for each dollar; but a job whose wait is over prefers its best
        offer to a further round without GPUs, however dear: that is what it has waited for. Budgets are side constraints,
        with a price on the dollars of each that would be broken, raised until none is.

        Args:
            table: the jobs and the site's configurations.
            problem: the site's.
            leave_J: what leaving each job out costs, with its weight.
            cloud: what there is.
        """
        choices, _ = choices_of(table.snapshot)
        offers = [offer for offer in cloud.offers if offer.count > 0]
        column = {offer.id: o for o, offer in enumerate(offers)}
        shape = (len(table.jobs), len(offers))
        cost_JO, usd_JO = np.full(shape, np.inf), np.zeros(shape)
        choice_of: dict[tuple[int, int], Choice] = {}
        p = self._settings.fairness_p
        for row, job in enumerate(table.jobs):
            for choice in choices.get(job.id, ()):
                o = column[choice.offer.id]
                gain = max(choice.goodput * table.scale_J[row], LEAST_FACTOR) if table.scale_J[row] > 0 else 1.0
                cost_JO[row, o] = np.copysign(gain**p, -p) * job.weight + cloud.cost_per_usd * choice.expected_usd
                usd_JO[row, o] = choice.usd
                choice_of[row, o] = choice
        # In the terms of `problem`, where every job costs the same when it is left out, and the best offer a bit less.
        cost_JO += (problem.leave_out - leave_J)[:, None]
        best_J = cost_JO.min(axis=1, initial=np.inf)
        most = problem.leave_out - CLOUD_BONUS
        cost_JO -= np.where(np.isfinite(best_J), np.maximum(best_J - most, 0.0), 0.0)[:, None]
        types = len(table.types)
        quotas = tuple(dataclasses.replace(quota, first_types=types) for quota in problem.quotas)
        price = dict.fromkeys(cloud.budgets, 0.0)
        recorded_J = table.recorded(tuple(in_cloud(offer) for offer in offers))
        while True:
            dearer_JO = np.zeros(shape)
            for line, per_usd in price.items():
                dearer_JO += per_usd * usd_JO * np.array([line.covers(job.account) for job in table.jobs])[:, None]
            solution = self._solve(
                Problem(
                    np.hstack([problem.cost_JC, cost_JO + dearer_JO]),
                    np.append(problem.gpus_C, [offer.gpus for offer in offers]).astype(np.int64),
                    np.append(problem.type_C, types + np.arange(len(offers))).astype(np.int64),
                    np.append(problem.capacity_T, [offer.gpus * offer.count for offer in offers]).astype(np.int64),
                    problem.leave_out,
                    quotas=quotas,
                    recorded_J=recorded_J,
                )
            )
            away = {
                table.jobs[row].id: choice_of[row, c - len(table.options)]
                for row, c in enumerate(solution.choice_J.tolist())
                if c >= len(table.options)
            }
            broken = within(cloud.budgets, {job: (table.by_id[job].account, to.usd) for job, to in away.items()})
            if not broken or recorded_J is not None:
                return solution, away
            for line in broken:
                price[line] = max(2 * price[line], FIRST_PRICE)

    def _costs(self, table: _Table) -> tuple[NDArray[np.float64], FloatMatrix]:
        """Cost of leaving each job out, and of each entry, J x C and `inf` where it cannot be. Sia, equations 1 and 2."""
        settings, p = self._settings, self._settings.fairness_p
        moved_JC = np.ones_like(table.possible_JC)
        held = table.held_J >= 0
        moved_JC[held, table.held_J[held]] = False
        factor_J = np.where(held, np.maximum(table.restart_factors(settings), LEAST_FACTOR), 1.0)
        gain_JC = np.where(table.gain_JC > 0, np.where(moved_JC, factor_J[:, None], 1.0) * table.gain_JC, 1.0)
        powered_JC = gain_JC**p
        if settings.round_costs:
            powered_JC = np.minimum(np.round(powered_JC, 2), 3000.0)
        cost_JC = powered_JC if p < 0 else -powered_JC
        for row, measuring in table.measuring.items():
            # What it has now, or could have, and a bit: worth a move, and no other job's GPUs.
            known_C = np.flatnonzero(table.possible_JC[row] & (table.gain_JC[row] > 0))
            best = cost_JC[row, known_C].min(initial=np.copysign(1.0, -p))
            cost_JC[row, measuring.columns] = best - MEASURE_BONUS * abs(best)
        cost_JC -= KEEP_BONUS * np.abs(cost_JC) * ~moved_JC
        cost_JC += AGE_BONUS * (np.arange(len(table.jobs)) / max(len(table.jobs), 1))[:, None]
        if settings.blind_start and settings.start_order:
            order = settings.start_order
            rank_T = np.array([order.index(name) if name in order else len(order) for name in table.types])
            cost_JC += START_BONUS * np.outer(table.never_ran_J, rank_T[table.type_C])
        cost_JC[~table.possible_JC] = np.inf
        leave_out = settings.allocation_lambda if p < 0 else -settings.allocation_lambda
        leave_J = np.full(len(table.jobs), leave_out)
        if not settings.leaving_is_free and p < 0:
            leave_J *= factor_J**p
        return leave_J, cost_JC

    def _place(
        self, table: _Table, chosen: Mapping[JobId, Configuration], problem: Problem
    ) -> tuple[Placed, dict[JobId, Configuration]]:
        """Nodes for what was chosen; for jobs that find none, the next best that fits beside the others (`instead`)."""
        placed = table.place(chosen)
        instead: dict[JobId, Configuration] = {}
        if not placed.left_over:
            return placed, instead
        taken = dict(placed.placements)
        allowance = Allowance(table.snapshot.limits)
        for held_by, held in {**table.pins, **taken}.items():
            allowance.take(table.by_id[held_by], held.gpus, held.gpu_type)
        row_of = {job.id: row for row, job in enumerate(table.jobs)}
        for job in sorted(placed.left_over, key=row_of.__getitem__):
            row = row_of[job]
            for column in np.argsort(problem.cost_JC[row], kind="stable"):
                if not problem.cost_JC[row, column] < problem.leave_out:  # no better than nothing
                    break
                option = table.options[column]
                if (
                    option == chosen[job]
                    or allowance.refuses(table.by_id[job], option.gpus, option.gpu_type) is not None
                ):
                    continue
                if found := table.place({job: option}, beside=taken).placements:
                    taken |= found
                    allowance.take(table.by_id[job], option.gpus, option.gpu_type)
                    instead[job] = option
                    break
        left_over = tuple(job for job in placed.left_over if job not in instead)
        return Placed(taken, placed.made_room_for, left_over), instead


class _Table:
    """A snapshot as arrays: the jobs that the round decides on, oldest first, and what each may have."""

    def __init__(self, snapshot: Snapshot, settings: SiaSettings, matrix: GoodputMatrix) -> None:
        self.snapshot, self.matrix = snapshot, matrix
        self.by_id = {job.id: job for job in snapshot.jobs}
        self.pins = common.pinned(snapshot)
        free = [job for job in snapshot.jobs if job.id not in self.pins]
        self.jobs: list[Job] = sorted(free, key=lambda job: (job.submit_s, job.id))
        self.models: list[AnyEstimator] = [snapshot.models[job.id] for job in self.jobs]
        capacity = common.capacities(snapshot.nodes, self.pins)
        self.types = tuple(sorted(capacity))
        self.capacity_T = np.array([capacity[name] for name in self.types], dtype=np.int64)
        held = {
            job.id: job.allocation.configuration for job in self.jobs if job.allocation and job.phase is Phase.RUNNING
        }
        self.min_J = np.array([job.spec.min_gpus for job in self.jobs], dtype=np.int64)
        self.max_J = np.array([job.spec.max_gpus for job in self.jobs], dtype=np.int64)
        self._set_options(held, settings)
        column = {option: c for c, option in enumerate(self.options)}
        self.held_J = np.array([column.get(held.get(job.id), -1) for job in self.jobs], dtype=np.int64)  # type: ignore[arg-type]
        self.weight_J = np.array([job.weight for job in self.jobs], dtype=np.float64)
        self._set_access()
        self.measuring: dict[int, _Measuring] = {}
        """By row, the jobs that are to be measured."""
        self._set_gain(settings)

    def _set_options(self, held: Mapping[JobId, Configuration], settings: SiaSettings) -> None:
        exact = {int(count) for count in np.unique(self.min_J[self.min_J == self.max_J])}
        self.unit_JT = np.ones((len(self.jobs), len(self.types)), dtype=np.int64)
        for row, (job, model) in enumerate(zip(self.jobs, self.models, strict=True)):
            if isinstance(model, PipelineEstimator):
                self.unit_JT[row] = [model.models[t].gpus_per_replica if t in model.models else 1 for t in self.types]
            if job.spec.scale_unit != 1:
                self.unit_JT[row] = np.lcm(self.unit_JT[row], [job.spec.unit(name) for name in self.types])
        units = {int(unit) * 2**power for unit in np.unique(self.unit_JT) for power in range(8)}
        most = int(self.max_J.max(initial=1))
        if settings.max_job_gpus is not None:
            most = min(most, settings.max_job_gpus)
        shared = common.configurations(self.snapshot.nodes, exact | units, most)
        odd = sorted(set(held.values()) - set(shared), key=lambda c: (c.gpu_type, c.gpus, c.nodes))
        offered = [c for c in shared if c.gpu_type in self.types]
        self.options = (*offered, *(c for c in odd if c.gpu_type in self.types))
        self.offered_C = np.arange(len(self.options)) < len(offered)
        self.gpus_C = np.array([c.gpus for c in self.options], dtype=np.int64)
        self.nodes_C = np.array([c.nodes for c in self.options], dtype=np.int64)
        index_of = {name: index for index, name in enumerate(self.types)}
        self.type_C = np.array([index_of[c.gpu_type] for c in self.options], dtype=np.int64)
        sizes: dict[str, set[int]] = {}
        for node in self.snapshot.nodes:
            sizes.setdefault(node.gpu_type, set()).add(node.gpus)
        self.regular_C = np.array([common.is_regular(c, sizes[c.gpu_type]) for c in self.options], dtype=np.bool_)
        self.parts_C = np.array(
            [c.nodes > 1 and c.gpus // c.nodes not in sizes[c.gpu_type] for c in self.options], dtype=np.bool_
        )
        """Parts of several nodes: only for jobs that want just so many GPUs."""

    def _set_access(self) -> None:
        """Which jobs may use which nodes: by partition and reservation, for each of the few combinations that occur."""
        keys = [(frozenset(job.partitions), job.reservation) for job in self.jobs]
        self.accesses = list(dict.fromkeys(keys))
        index = {key: access for access, key in enumerate(self.accesses)}
        self.access_J = np.array([index[key] for key in keys], dtype=np.int64)
        free = {node.name: node.gpus_for_us for node in self.snapshot.nodes}
        for placement in self.pins.values():
            for share in placement.shares:
                if share.node in free:
                    free[share.node] -= share.gpus
        self.free_gpus: dict[tuple[tuple[str, ...], str, str], int] = {}
        """(partitions, reservation, GPU type) -> GPUs that the round can give out there."""
        nodes_of: dict[tuple[tuple[str, ...], str, str], dict[int, int]] = {}
        for node in self.snapshot.nodes:
            pool = (node.partitions, node.reservation, node.gpu_type)
            self.free_gpus[pool] = self.free_gpus.get(pool, 0) + max(free[node.name], 0)
            if node.usable:
                sizes = nodes_of.setdefault(pool, {})
                sizes[node.gpus] = sizes.get(node.gpus, 0) + 1
        # Whether the nodes that are open to these jobs have this shape at all, A x C.
        self.open_AC = np.zeros((len(self.accesses), len(self.options)), dtype=np.bool_)
        for access, (partitions, reservation) in enumerate(self.accesses):
            count: dict[tuple[str, int], int] = {}
            for (inside, kept_for, gpu_type), sizes in nodes_of.items():
                if kept_for == reservation and partitions & set(inside):
                    for size, nodes in sizes.items():
                        count[gpu_type, size] = count.get((gpu_type, size), 0) + nodes
            for c, option in enumerate(self.options):
                per_node = option.gpus // option.nodes
                whole = option.nodes > 1 and (option.gpu_type, per_node) in count
                self.open_AC[access, c] = any(
                    nodes >= option.nodes and (size == per_node or (size >= per_node and not whole))
                    for (gpu_type, size), nodes in count.items()
                    if gpu_type == option.gpu_type
                )

    def _set_gain(self, settings: SiaSettings) -> None:
        jobs, types = self.jobs, self.types
        configurations = Configurations(
            tuple(c.gpu_type for c in self.options),
            tuple(c.nodes for c in self.options),
            tuple(c.gpus for c in self.options),
        )
        self.goodput_JC = self.matrix.evaluate(self.models, configurations)
        wanted_JT = np.ones((len(jobs), len(types)), dtype=np.bool_)
        for row, job in enumerate(jobs):
            if job.spec.gpu_types is not None or job.spec.excluded_gpu_types is not None:
                wanted_JT[row] = [job.spec.allows_type(name) for name in types]
        unit_JC = self.unit_JT[:, self.type_C]
        units_JC = self.gpus_C // unit_JC
        power_JC = (units_JC & (units_JC - 1)) == 0
        exact_J = self.min_J == self.max_J
        regular_JC = np.where(
            unit_JC > 1,
            (self.gpus_C % unit_JC == 0) & (power_JC | (self.nodes_C > 1)) & ~self.parts_C,
            self.regular_C,
        )
        holds_JC = self.held_J[:, None] == np.arange(len(self.options))
        in_spec_JC = (self.gpus_C >= self.min_J[:, None]) & (self.gpus_C <= self.max_J[:, None])
        in_spec_JC &= wanted_JT[:, self.type_C] & self.open_AC[self.access_J] & (self.gpus_C % unit_JC == 0)
        bad_J = ~np.all(np.isfinite(self.goodput_JC) & (self.goodput_JC >= 0), axis=1)
        self.bad = {jobs[row].id for row in np.flatnonzero(bad_J)}
        sane_JC = np.where(bad_J[:, None], 0.0, self.goodput_JC)
        # What the job spec and the cluster allow at all; and of it, what this round does.
        self.ever_JC = in_spec_JC & ((self.offered_C & (regular_JC | exact_J[:, None])) | holds_JC) & (sane_JC > 0)
        self.possible_JC = self.ever_JC & (self.gpus_C <= self._most_now(settings)[:, None])
        never_ran = np.array([job.restarts == 0 and job.phase is Phase.QUEUED for job in jobs], dtype=np.bool_)
        self.never_ran_J = never_ran
        if settings.blind_start:
            fewest_JC = self.gpus_C <= np.maximum(self.min_J[:, None], unit_JC)
            self.possible_JC &= ~never_ran[:, None] | fewest_JC
            sane_JC = np.where(never_ran[:, None] & fewest_JC, 1.0, sane_JC)
        with np.errstate(divide="ignore", invalid="ignore"):
            possible_JC = np.where(self.ever_JC, sane_JC, np.inf)
            slowest_J = possible_JC.min(axis=1, initial=np.inf)
            base_J = np.ones(len(jobs))
            if possible_JC.size:
                base_J = np.take_along_axis(unit_JC, possible_JC.argmin(axis=1)[:, None], axis=1)[:, 0].astype(
                    np.float64
                )
            rigid_J = np.array(
                [job.spec.adaptivity in (Adaptivity.RIGID, Adaptivity.FIXED) for job in jobs], dtype=np.bool_
            )
            base_J = np.where(rigid_J, self.min_J, base_J)
            # What a goodput anywhere else is to be multiplied with; 0 where there is nothing on site to compare with.
            self.scale_J = base_J / slowest_J
            self.gain_JC = np.where(self.possible_JC, sane_JC / slowest_J[:, None] * base_J[:, None], 0.0)
        if settings.measure_gpu_s > 0 and self.snapshot.unmeasured:
            self._measure(settings, in_spec_JC & self.offered_C & (self.gpus_C == 1))

    def _measure(self, settings: SiaSettings, single_JC: NDArray[np.bool_]) -> None:
        """Open single GPUs of types yet unknown to jobs that are to be measured; `single_JC`: those that are open to each."""
        for row, job in enumerate(self.jobs):
            singles = np.flatnonzero(single_JC[row])
            types = {self.options[c].gpu_type: int(c) for c in singles}
            found = _Measuring.of(self.snapshot, job, types, settings.measure_gpu_s)
            if found is None or job.id in self.bad:
                continue
            held = self.held_J[row]
            if held in found.columns:  # it stays until it has reported, or its time there is over
                found = dataclasses.replace(found, columns=[int(held)])
            self.measuring[row] = found
            if held >= 0 and self.possible_JC[row, held]:  # it grows when it is known
                self.possible_JC[row] = False
                self.possible_JC[row, held] = True
            self.possible_JC[row, found.columns] = self.ever_JC[row, found.columns] = True

    def _most_now(self, settings: SiaSettings) -> NDArray[np.int64]:
        """Most GPUs that each job may have in this round, for jobs that nobody knows the scaling of."""
        most_J = np.full(len(self.jobs), np.iinfo(np.int64).max)
        if settings.growth is not None:
            fewest_J = np.where(self.ever_JC, self.gpus_C, np.iinfo(np.int64).max).min(
                axis=1, initial=most_J.max(initial=1)
            )
            for row, job in enumerate(self.jobs):
                ran_on = self.snapshot.unscaled.get(job.id)
                if ran_on is not None:
                    now = job.allocation.gpus if job.allocation is not None else 0
                    most_J[row] = max(int(fewest_J[row]), int(settings.growth * max(ran_on, now)))
        return most_J

    @functools.cached_property
    def all_shapes(self) -> tuple[Configuration, ...]:
        """Every configuration that the cluster has, also those that are larger than any job's spec."""
        return common.configurations(self.snapshot.nodes)

    def restart_factors(self, settings: SiaSettings) -> NDArray[np.float64]:
        """See `restart_factor`."""
        costs = [self.snapshot.restart_costs_s[job.id] for job in self.jobs]
        ages = [max(self.snapshot.time_s - job.submit_s, 0.0) for job in self.jobs]
        factors = [
            1.0 if settings.restart_free_when_young and age < cost else restart_factor(age, job.restarts, cost)
            for age, cost, job in zip(ages, costs, self.jobs, strict=True)
        ]
        return np.array(factors, dtype=np.float64)

    def quotas(self) -> tuple[Quota, ...]:
        """Rows beside the capacity of each type: what is open to some jobs only, and limits of users, accounts and QOS."""
        return (*self._access_quotas(), *self._limit_quotas(), *self._measuring_quotas())

    def _access_quotas(self) -> list[Quota]:
        """For each type, jobs that can use only some of its nodes get together no more than those have.

        One row for every union of the sets of nodes that are open to somebody, as in Hall's theorem; with more than
        `MOST_UNIONS` different sets for each single one, and placement finds out the rest.
        """
        quotas = []
        for t, gpu_type in enumerate(self.types):
            pools = {pool: gpus for pool, gpus in self.free_gpus.items() if pool[2] == gpu_type}
            sets = [
                frozenset(p for p in pools if p[1] == reservation and partitions & set(p[0]))
                for partitions, reservation in self.accesses
            ]
            different = sorted(set(sets), key=lambda pools: sorted(pools))
            unions = set(different)
            if len(different) <= MOST_UNIONS:
                for count in range(2, len(different) + 1):
                    unions |= {frozenset().union(*some) for some in itertools.combinations(different, count)}
            for union in sorted(unions, key=lambda pools: sorted(pools)):
                gpus = sum(pools[pool] for pool in union)
                if gpus < sum(pools.values()):
                    inside = [access for access, own in enumerate(sets) if own <= union]
                    quotas.append(Quota(np.flatnonzero(np.isin(self.access_J, inside)), gpus, gpu_type=t))
        return quotas

    def _measuring_quotas(self) -> list[Quota]:
        """Who has a GPU and is to be measured on another type gets there what nobody holds: no other job is moved for it."""
        quotas: list[Quota] = []
        if not self.measuring:
            return quotas
        for t in range(len(self.types)):
            there_J = (self.held_J >= 0) & (self.type_C[self.held_J] == t)
            free = int(self.capacity_T[t]) - int(self.gpus_C[self.held_J[there_J]].sum())
            rows = [
                row
                for row, measuring in self.measuring.items()
                if self.held_J[row] >= 0 and not there_J[row] and t in self.type_C[measuring.columns]
            ]
            if rows:
                quotas.append(Quota(np.array(rows, dtype=np.int64), max(free, 0), gpu_type=t))
        return quotas

    def _limit_quotas(self) -> list[Quota]:
        quotas = []
        for limit in self.snapshot.limits:
            if limit.gpu_type and limit.gpu_type not in self.types:
                continue
            pinned = _held(limit, self.pins, self.by_id)
            members = [row for row, job in enumerate(self.jobs) if limit.covers(job)]
            gpu_type = self.types.index(limit.gpu_type) if limit.gpu_type else None
            quotas.append(Quota(np.array(members, dtype=np.int64), max(limit.gpus - pinned, 0), gpu_type))
        return quotas

    def recorded(self, offers: tuple[Configuration, ...] = ()) -> NDArray[np.int64] | None:
        """The choice of a round that is decided again after a time limit had cut it short; `offers`: of the cloud."""
        if not self.snapshot.incumbent:
            return None
        column = {option: c for c, option in enumerate((*self.options, *offers))}
        recorded = [column.get(self.snapshot.incumbent.get(job.id), -1) for job in self.jobs]  # type: ignore[arg-type]
        return np.array(recorded, dtype=np.int64)

    def place(self, chosen: Mapping[JobId, Configuration], beside: Mapping[JobId, Placement] | None = None) -> Placed:
        """Nodes for these jobs, beside the pinned ones and `beside`."""
        jobs = [self.by_id[job] for job in chosen]
        return place(
            self.snapshot.nodes,
            chosen,
            {job.id: job.partitions for job in jobs},
            {job.id: job.allocation for job in jobs if job.allocation is not None},
            {**self.pins, **(beside or {})},
            reservations={job.id: job.reservation for job in jobs if job.reservation},
            move_cost={
                job.id: job.allocation.gpus * self.snapshot.restart_costs_s[job.id]
                for job in jobs
                if job.allocation is not None
            },
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Measuring:
    """A job that is measured: it has one GPU of each type in its turn, and trains on there, until it has reported its speed.

    Sia profiles a job on one GPU of each type when it comes, in less than 20 GPU-seconds each. Here its first rounds do that:
    what it trains meanwhile counts, and what it costs are the restarts. Types with a profile, or of a family that the catalogue
    has, are known. It takes no GPU that another has, and while there is none of an unknown type free, the job stays where it is.

    It ends when all types are known; with the first on which the job had its GPU-seconds and reported nothing, for it reports
    nowhere; and when it has trained so long on all types together that it is not new any more (a round is often longer than what
    measuring needs).
    """

    columns: list[int]
    """One GPU of each type that is still unknown."""
    number: int
    """How many types will be known with the next one."""
    types: int
    """That it may use."""

    @classmethod
    def of(cls, snapshot: Snapshot, job: Job, columns: Mapping[str, int], measure_gpu_s: float) -> _Measuring | None:
        """None: it is known, or not new any more, or may not be moved.

        Args:
            snapshot: the round's.
            job: one of its jobs.
            columns: by type, where one GPU of it is; types that are not open to the job are not in it.
            measure_gpu_s: see `SiaSettings`.
        """
        unknown = [name for name in snapshot.unmeasured.get(job.id, ()) if name in columns]
        if not unknown or len(columns) < 2 or job.spec.adaptivity is Adaptivity.RIGID or not common.movable(job):
            return None
        most_gpu_s = snapshot.restart_costs_s[job.id] + measure_gpu_s
        attained = snapshot.attained.get(job.id, {})
        if sum(attained.values()) >= len(columns) * max(most_gpu_s, NEW_GPU_S):
            return None
        if any(attained.get(gpu_type, 0.0) >= most_gpu_s for gpu_type in unknown):
            return None
        return cls([columns[gpu_type] for gpu_type in unknown], len(columns) - len(unknown) + 1, len(columns))

    def reason(self, gpu_type: str, *, held: bool) -> Reason:
        """Why it has one GPU of this type."""
        what = "being measured on" if held else "is to be measured on"
        return Reason(ReasonCode.MEASURING, f"{what} {gpu_type}, {self.number} of {self.types} types")


def _held(limit: GpuLimit, placements: Mapping[JobId, Placement], jobs: Mapping[JobId, Job]) -> int:
    """GPUs of these placements that count against the limit."""
    return sum(p.gpus for job, p in placements.items() if limit.covers(jobs[job]) and limit.counts(p.gpu_type))


def _explained(
    table: _Table, chosen: Mapping[JobId, Configuration], placed: Placed, instead: Mapping[JobId, Configuration]
) -> tuple[dict[JobId, Assignment], dict[JobId, Reason]]:
    """For every job what it gets or why it waits, in the order of the snapshot."""
    snapshot = table.snapshot
    row_of = {job.id: row for row, job in enumerate(table.jobs)}
    column = {option: c for c, option in enumerate(table.options)}
    given = {**chosen, **instead}
    assignments: dict[JobId, Assignment] = {}
    waiting: dict[JobId, Reason] = {}
    for job in snapshot.jobs:
        if job.id in table.pins:
            assignments[job.id] = common.pinned_assignment(job, table.pins[job.id], snapshot)
            continue
        row = row_of[job.id]
        if job.id in placed.placements:
            placement = placed.placements[job.id]
            c, held = column[given[job.id]], int(table.held_J[row])
            moved = held >= 0 and job.allocation is not None and job.allocation.shares != placement.shares
            gain, room_for = float(table.gain_JC[row, c]), placed.made_room_for.get(job.id)
            measuring = table.measuring.get(row)
            if measuring is not None and c in measuring.columns:
                reason = measuring.reason(given[job.id].gpu_type, held=c == held)
            else:
                reason = _why(given[job.id], table.options[held] if held >= 0 else None, gain, moved, room_for)
            if job.id in instead:
                text = f"{reason.text}; {chosen[job.id]} would be better, but the free GPUs are scattered"
                reason = dataclasses.replace(reason, text=text)
            batch = table.matrix.batch(row, c)
            advice = Batch(batch.atomic_batch, batch.accumulation_steps) if batch is not None else None
            assignments[job.id] = Assignment(placement, reason, float(table.goodput_JC[row, c]), advice)
        else:
            waiting[job.id] = _why_not(table, job, row, chosen.get(job.id))
    return assignments, waiting


def _why_not(table: _Table, job: Job, row: int, chosen: Configuration | None) -> Reason:
    needs = common.smallest_need(job)
    if job.id in table.bad:
        text = "its model gives a goodput that is negative or not a number: correct the model, or leave it out"
        return Reason(ReasonCode.NEVER_FITS, text, needs)
    if chosen is not None:
        text = f"{chosen} would be best, but the free GPUs are scattered over too many nodes"
        return Reason(ReasonCode.WAITING_FRAGMENTS, text, needs)
    nodes = [node for node in table.snapshot.nodes if node.reservation == job.reservation]
    if not nodes and job.reservation:
        text = f"no node is kept for its reservation {job.reservation} now: it has not begun, or is over"
        return Reason(ReasonCode.WAITING_CAPACITY, text, needs)
    if not nodes and table.snapshot.nodes:
        return Reason(ReasonCode.WAITING_CAPACITY, "all nodes are reserved now", needs)
    if not table.ever_JC[row].any():
        return common.never_fits(job, nodes, table.all_shapes)
    for limit in table.snapshot.limits:
        if limit.covers(job):
            counted_C = np.array([limit.counts(option.gpu_type) for option in table.options], dtype=np.bool_)
            if not (table.ever_JC[row] & ~(counted_C & (table.gpus_C > limit.gpus))).any():
                fewest = int(table.gpus_C[table.ever_JC[row]].min())
                return Reason(ReasonCode.NEVER_FITS, f"needs {fewest} GPUs, but {limit} does not allow that", needs)
    text = "the GPUs that it could use do more for other jobs in this round"
    return Reason(ReasonCode.WAITING_CAPACITY, text, needs)


def restart_factor(age_s: float, restarts: int, restart_cost_s: float) -> float:
    """Share of a job's goodput that survives moving it to another configuration.

    Sia section 3.4, r = (T - N*S) / (T + S): T is `age_s`, N is `restarts`, S is `restart_cost_s`. The paper gives S in
    GPU-seconds; ours is wall-clock like T, so that r is unitless. Clipped at 0, so r is in [0, 1).

    Raises:
        ConfigError: `restart_cost_s` is not positive.
    """
    if restart_cost_s <= 0:
        raise ConfigError(
            f"restart_cost_s={restart_cost_s} must be positive; use the seconds that a restart really takes"
        )
    return max(age_s - restarts * restart_cost_s, 0.0) / (age_s + restart_cost_s)


def _why(chosen: Configuration, held: Configuration | None, gain: float, moved: bool, room_for: JobId | None) -> Reason:
    speed = f"{gain:.1f}x its slowest configuration"
    if held is None:
        return Reason(ReasonCode.CHOSEN, f"starts on {chosen}, {speed}")
    if chosen == held and not moved:
        return Reason(ReasonCode.KEPT, f"keeps {chosen}, {speed}")
    if chosen == held:
        whom = f"makes room for job {room_for}" if room_for is not None else "has to leave its nodes"
        return Reason(ReasonCode.CHOSEN, f"keeps {chosen} on other nodes: {whom}")
    return Reason(ReasonCode.CHOSEN, f"from {held} to {chosen}, {speed}")
