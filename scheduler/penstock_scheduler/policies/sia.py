"""Sia: the allocation that makes the most of every GPU, for elastic jobs on mixed GPU types.

After *Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling* (SOSP '23). Each round:

1. For each job and each configuration (nodes, GPUs, type) that its wish allows, the model gives a goodput: how fast it
   would train there. Dividing a job's row by its smallest entry makes jobs comparable: 1 is its slowest way to run.
2. Moving costs a restart, so all entries but the one that the job holds are multiplied by its restart factor.
3. An integer program picks at most one configuration for each job, within the GPUs of each type, so that the sum of
   (goodput ** p) is best. With p < 0, the default, that is a minimum and favours the jobs that have least; each job left
   out costs `allocation_lambda`, which must exceed 1, the cost of a job on its slowest configuration, or nobody would run.
4. Placement finds the nodes (`penstock_scheduler.placement`).

Where two choices are as good as each other, what a job has is kept (`KEEP_BONUS`), then the older job is preferred
(`AGE_BONUS`). Jobs that may not move, and jobs on their way from an earlier round, are taken out beforehand with their
GPUs. Departures from the authors' program: costs are not rounded to two decimals, which made ties.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import (
    Assignment,
    Configuration,
    Job,
    JobId,
    Phase,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
    SolveStatus,
)
from penstock_scheduler.placement import place
from penstock_scheduler.policies import common
from penstock_scheduler.solver import Limits, Problem, solve

KEEP_BONUS = 1e-3
"""Share of its cost by which an entry that the job already holds is preferred."""

AGE_BONUS = 1e-4
"""Cost by which the youngest job is less preferred than the oldest."""


class SiaSettings(BaseModel):
    """Section `[policy.sia]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fairness_p: float = Field(default=-0.5, description="Power p of the goodput; below 0 favours those who have least.")
    allocation_lambda: float = Field(
        default=1.1, description="Cost of leaving a job out; above 1 for p < 0, below 0 for p > 0."
    )
    solver: Literal["auto", "milp", "dual"] = Field(default="auto", description="How the round's problem is solved.")
    backend: Literal["cbc", "highs"] = Field(default="cbc", description="What `milp` runs.")
    gap: NonNegativeFloat = Field(default=1e-4, description="Relative gap at which a plan counts as the best.")
    max_nodes: PositiveInt = Field(
        default=10_000, description="Branch-and-bound nodes after which the best so far is taken."
    )
    max_seconds: PositiveFloat = Field(
        default=20.0, description="Last resort; a plan that met it is marked as cut short."
    )

    @model_validator(mode="after")
    def _check(self) -> SiaSettings:
        p, leave_out = self.fairness_p, self.allocation_lambda
        if p == 0:
            raise ValueError("fairness_p=0 weighs every configuration alike; use a non-zero value, such as -0.5")
        if p < 0 and leave_out <= 1:
            raise ValueError(
                f"allocation_lambda={leave_out} with fairness_p={p} would leave every job out: a job's slowest "
                "configuration costs 1; use more than 1, such as 1.1"
            )
        if p > 0 and leave_out >= 0:
            raise ValueError(
                f"allocation_lambda={leave_out} with fairness_p={p} would reward leaving jobs out; use less than 0, such as -1.1"
            )
        return self


class Sia:
    """The policy; see the module."""

    name = "sia"

    def __init__(self, settings: SiaSettings) -> None:
        self._settings = settings

    def decide(self, snapshot: Snapshot) -> Plan:
        """The best plan for this snapshot. Raises RoundFailed when the solver has no usable answer."""
        settings = self._settings
        pins = common.pinned(snapshot)
        jobs = [job for job in snapshot.jobs if job.id not in pins]
        capacity = common.capacities(snapshot.nodes, pins)
        shared = common.configurations(snapshot.nodes)
        held = {job.id: job.allocation.configuration for job in jobs if job.allocation and job.phase is Phase.RUNNING}
        odd = sorted(set(held.values()) - set(shared), key=lambda c: (c.gpu_type, c.gpus, c.nodes))
        options = tuple(c for c in (*shared, *odd) if c.gpu_type in capacity)

        goodput_JC = goodput_matrix(snapshot, jobs, options, shared, held)
        cost_JC = self._costs(snapshot, jobs, options, held, goodput_JC)
        types = sorted(capacity)
        recorded_J = None
        if snapshot.incumbent:
            column = {configuration: c for c, configuration in enumerate(options)}
            recorded_J = np.array([column.get(snapshot.incumbent.get(job.id), -1) for job in jobs], dtype=np.int64)  # type: ignore[arg-type]
        problem = Problem(
            cost_JC,
            np.array([c.gpus for c in options], dtype=np.int64),
            np.array([types.index(c.gpu_type) for c in options], dtype=np.int64),
            np.array([capacity[t] for t in types], dtype=np.int64),
            settings.allocation_lambda if settings.fairness_p < 0 else -settings.allocation_lambda,
            recorded_J=recorded_J,
        )
        limits = Limits(settings.gap, settings.max_nodes, settings.max_seconds)
        solution = solve(problem, settings.solver, limits, backend=settings.backend)
        chosen = {job.id: options[c] for job, c in zip(jobs, solution.choice_J, strict=True) if c >= 0}

        placements, scattered = place(
            snapshot.nodes,
            chosen,
            {job.id: job.partitions for job in jobs},
            {job.id: job.allocation for job in jobs if job.allocation is not None},
            pins,
        )
        assignments: dict[JobId, Assignment] = {}
        waiting: dict[JobId, Reason] = {}
        for job in snapshot.jobs:
            if job.id in pins:
                assignments[job.id] = common.pinned_assignment(job, pins[job.id], snapshot)
        for row, job in enumerate(jobs):
            if job.id in placements:
                gain = goodput_JC[row, options.index(chosen[job.id])] / _slowest(goodput_JC[row])
                reason = _why(job, chosen[job.id], held.get(job.id), gain)
                assignments[job.id] = common.assign(job, placements[job.id], reason, snapshot)
            elif job.id in scattered:
                text = f"{chosen[job.id]} would be best, but the free GPUs are scattered over too many nodes"
                waiting[job.id] = Reason(ReasonCode.WAITING_FRAGMENTS, text, common.smallest_need(job))
            elif not np.any(goodput_JC[row] > 0):
                waiting[job.id] = common.never_fits(job, shared, snapshot.nodes)
            else:
                text = "the GPUs that it could use do more for other jobs in this round"
                waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))
        cut_short = solution.report.status is SolveStatus.TIME_LIMIT
        return Plan(snapshot.round, assignments, waiting, solution.report, chosen if cut_short else {})

    def _costs(
        self,
        snapshot: Snapshot,
        jobs: list[Job],
        options: tuple[Configuration, ...],
        held: dict[JobId, Configuration],
        goodput_JC: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Cost of each entry, J x C, `inf` where it cannot be. Sia, equations 1 and 2."""
        p = self._settings.fairness_p
        cost_JC = np.full(goodput_JC.shape, np.inf)
        order = {job.id: rank for rank, job in enumerate(sorted(jobs, key=lambda job: (job.submit_s, job.id)))}
        for row, job in enumerate(jobs):
            possible = goodput_JC[row] > 0
            if not possible.any():
                continue
            gain_C = goodput_JC[row] / _slowest(goodput_JC[row])
            keeps_C = np.zeros(len(options), dtype=bool)
            if job.id in held:
                keeps_C[options.index(held[job.id])] = True
                age_s = max(snapshot.time_s - job.submit_s, 0.0)
                factor = restart_factor(age_s, job.restarts, snapshot.restart_costs_s[job.id])
                gain_C = np.where(keeps_C, gain_C, gain_C * factor)
            possible &= gain_C > 0
            powered_C = gain_C[possible] ** p
            cost_C = powered_C if p < 0 else -powered_C
            cost_C = cost_C - KEEP_BONUS * np.abs(cost_C) * keeps_C[possible]
            cost_JC[row, possible] = cost_C + AGE_BONUS * order[job.id] / len(jobs)
        return cost_JC


def goodput_matrix(
    snapshot: Snapshot,
    jobs: list[Job],
    options: tuple[Configuration, ...],
    shared: tuple[Configuration, ...],
    held: dict[JobId, Configuration],
) -> NDArray[np.float64]:
    """Goodput of each job on each configuration, J x C in the job's own unit; 0 where it may not or cannot run.

    A configuration that is not one of `shared` is open only to the job that holds it, if its wish allows it: a job that
    Slurm itself started outside its wish is moved.
    """
    goodput_JC = np.zeros((len(jobs), len(options)))
    columns: dict[str, list[int]] = {}
    for c, option in enumerate(options):
        columns.setdefault(option.gpu_type, []).append(c)
    open_to_all = set(shared)
    for row, job in enumerate(jobs):
        for gpu_type, all_of_type in columns.items():
            mine = [
                c
                for c in all_of_type
                if common.allowed(job, options[c]) and (options[c] in open_to_all or held.get(job.id) == options[c])
            ]
            if mine:
                goodput_JC[row, mine] = snapshot.models[job.id].goodput(
                    gpu_type, np.array([options[c].nodes for c in mine]), np.array([options[c].gpus for c in mine])
                )
    if not np.isfinite(goodput_JC).all() or (goodput_JC < 0).any():
        bad = [
            jobs[row].id for row in np.flatnonzero(~np.isfinite(goodput_JC).all(axis=1) | (goodput_JC < 0).any(axis=1))
        ]
        raise ConfigError(f"the models of jobs {', '.join(bad)} give goodput that is negative or not a number")
    return goodput_JC


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


def _slowest(goodput_C: NDArray[np.float64]) -> float:
    return float(goodput_C[goodput_C > 0].min())


def _why(job: Job, chosen: Configuration, held: Configuration | None, gain: float) -> Reason:
    speed = f"{gain:.1f}x its slowest configuration"
    if chosen == held:
        return Reason(ReasonCode.KEPT, f"keeps {chosen}, {speed}")
    if held is None:
        return Reason(ReasonCode.CHOSEN, f"starts on {chosen}, {speed}")
    return Reason(ReasonCode.CHOSEN, f"from {held} to {chosen}, {speed}")
