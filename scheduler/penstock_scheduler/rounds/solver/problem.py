"""The problem that a solver gets, and the solution that it returns.

Axes: J jobs, C configurations, T GPU types, M members of a quota.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import SolveReport, SolveStatus
from penstock_scheduler.people.errors import RoundFailed

if TYPE_CHECKING:
    import mip

STATUS_MEANING: dict[SolveStatus, str] = {
    SolveStatus.OPTIMAL: "proven best within the gap that was asked for; use it",
    SolveStatus.NODE_LIMIT: "best found within the limits on nodes or on the core's size; the same on every machine; use it",
    SolveStatus.TIME_LIMIT: "best found within the time limit; depends on the machine; use it and mark the plan",
    SolveStatus.INCUMBENT: "taken from the record of a round that was cut short; use it",
    SolveStatus.INFEASIBLE: "forced entries break a capacity or a quota; the round fails and the last allocation stays",
    SolveStatus.NUMERICAL: "the solver's own answer is wrong or missing; the round fails and the last allocation stays",
}
"""Every status that a solver may report, and what a policy does with it."""


class SolveFailed(RoundFailed):
    """The solver has no usable answer, and the last allocation stays. `status`: a key of STATUS_MEANING."""

    def __init__(self, status: SolveStatus, text: str) -> None:
        super().__init__(f"{text}; {STATUS_MEANING[status]}")
        self.status, self.text = status, text


class BadProblem(RoundFailed):
    """The problem itself is invalid, such as a cost that is not a number. The code that built it has a defect."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Most GPUs that some jobs may hold together, by a limit of a user, an account or a QOS, or by the nodes open to them.

    Attributes:
        job_M: rows of its members, each once.
        gpus: GPUs that they may hold together, >= 0.
        gpu_type: index of the only GPU type that counts; None: all types together.
        first_types: number of first types that count; None: all. The types after them are offers of the cloud.
    """

    job_M: NDArray[np.int64]
    gpus: int
    gpu_type: int | None = None
    first_types: int | None = None

    def counts_types(self, type_C: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether configurations of these types count."""
        if self.gpu_type is not None:
            return np.asarray(type_C == self.gpu_type, dtype=np.bool_)
        if self.first_types is not None:
            return np.asarray(type_C < self.first_types, dtype=np.bool_)
        return np.ones(len(type_C), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Problem:
    """One round's choices.

    Attributes:
        cost_JC: cost of giving configuration c to job j, any sign; `inf` where it is impossible.
        gpus_C: GPUs that each configuration takes, >= 1.
        type_C: index of its GPU type, 0 to T - 1.
        capacity_T: GPUs of each type, >= 0.
        leave_out: cost of giving a job nothing.
        forced_J: the configuration that a job must have, -1 where it is free; None: all are free.
        quotas: limits on GPUs in addition to the capacities; a job may be in several.
        recorded_J: the recorded choice of a round that a time limit cut short, -1 where a job gets nothing. It is returned as
            it is.

    Raises:
        BadProblem: a cost is NaN or -inf, a shape is wrong, or an index points nowhere.
    """

    cost_JC: NDArray[np.float64]
    gpus_C: NDArray[np.int64]
    type_C: NDArray[np.int64]
    capacity_T: NDArray[np.int64]
    leave_out: float
    forced_J: NDArray[np.int64] | None = None
    quotas: tuple[Quota, ...] = ()
    recorded_J: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        bad = np.argwhere(np.isnan(self.cost_JC) | np.isneginf(self.cost_JC))
        if len(bad):
            job, config = map(int, bad[0])
            raise BadProblem(
                f"cost_JC[{job}, {config}] is {self.cost_JC[job, config]}, and so are {len(bad) - 1} more; "
                "use inf for an impossible entry"
            )
        if not np.isfinite(self.leave_out):
            raise BadProblem(f"leave_out is {self.leave_out}; use a number")
        jobs, configs = self.cost_JC.shape
        if len(self.gpus_C) != configs or len(self.type_C) != configs:
            raise BadProblem(
                f"cost_JC has {configs} configurations, gpus_C {len(self.gpus_C)} and type_C {len(self.type_C)}"
            )
        if np.any(self.gpus_C < 1) or np.any(self.capacity_T < 0) or any(quota.gpus < 0 for quota in self.quotas):
            raise BadProblem("gpus_C must be at least 1, capacity_T and the GPUs of each quota at least 0")
        _within("type_C", self.type_C, 0, len(self.capacity_T))
        for name, choice_J in (("forced_J", self.forced_J), ("recorded_J", self.recorded_J)):
            if choice_J is not None:
                if len(choice_J) != jobs:
                    raise BadProblem(f"{name} has {len(choice_J)} entries for {jobs} jobs")
                _within(name, choice_J, -1, configs)
        for quota in self.quotas:
            _within("job_M of a quota", quota.job_M, 0, jobs)
            if quota.gpu_type is not None:
                _within("gpu_type of a quota", np.array([quota.gpu_type]), 0, len(self.capacity_T))
            if len(np.unique(quota.job_M)) != len(quota.job_M):
                raise BadProblem("job_M of a quota names a job twice")

    def objective(self, choice_J: NDArray[np.int64]) -> float:
        """Cost of a choice, `inf` if it takes an impossible entry."""
        jobs_J = np.arange(len(choice_J))
        taken = choice_J >= 0
        costs = self.cost_JC[jobs_J[taken], choice_J[taken]]
        return float(costs.sum() + self.leave_out * np.count_nonzero(~taken))

    def forced(self) -> NDArray[np.int64]:
        """A new array of the forced entries, -1 where a job is free."""
        return np.full(len(self.cost_JC), -1, dtype=np.int64) if self.forced_J is None else self.forced_J.copy()

    def held(self, quota: Quota, choice_J: NDArray[np.int64]) -> int:
        """GPUs of a choice that count against a quota."""
        taken_C = choice_J[quota.job_M]
        taken_C = taken_C[taken_C >= 0]
        return int(self.gpus_C[taken_C][quota.counts_types(self.type_C[taken_C])].sum())

    def feasible(self, choice_J: NDArray[np.int64]) -> bool:
        """Whether a choice keeps within capacities and quotas, takes the forced entries, and takes no impossible one."""
        taken_C = choice_J[choice_J >= 0]
        used_T = np.bincount(self.type_C[taken_C], weights=self.gpus_C[taken_C], minlength=len(self.capacity_T))
        forced_J = self.forced()
        kept = np.all((forced_J < 0) | (choice_J == forced_J))
        return bool(
            kept
            and np.all(used_T <= self.capacity_T)
            and all(self.held(quota, choice_J) <= quota.gpus for quota in self.quotas)
            and np.isfinite(self.objective(choice_J))
        )

    def to_mip(self, library: str = "HIGHS") -> mip.Model:
        """The integer program of this problem for python-mip. Both solvers answer this program.

        Its variables are the possible entries, in the order of `numpy.nonzero(numpy.isfinite(cost_JC))`; 1: the job gets the
        configuration. `milp` and the tests solve this form. `dual` never builds it.

        Args:
            library: "HIGHS" or "CBC".
        """
        import mip  # loading a library of solvers takes longer than most rounds

        model = mip.Model(sense=mip.MINIMIZE, solver_name=library)
        model.verbose = 0
        cost, gpus, gpu_type = self.cost_JC.tolist(), self.gpus_C.tolist(), self.type_C.tolist()
        x = [
            {c: model.add_var(var_type=mip.BINARY) for c in np.flatnonzero(np.isfinite(cost_C)).tolist()}
            for cost_C in self.cost_JC
        ]
        entries = [(j, c, variable) for j, x_j in enumerate(x) for c, variable in x_j.items()]

        # Minimise the cost of the configurations, and of each job that gets none.
        left_out = len(x) - mip.xsum(variable for _, _, variable in entries)
        model.objective = mip.xsum(cost[j][c] * variable for j, c, variable in entries) + self.leave_out * left_out

        # Each job gets at most one configuration, and a forced job gets the one that it must have.
        for x_j in x:
            model.add_constr(mip.xsum(x_j.values()) <= 1)
        for x_j, must in zip(x, self.forced().tolist(), strict=True):
            if must >= 0:
                model.add_constr(mip.xsum(variable for c, variable in x_j.items() if c == must) == 1)

        # The GPUs of each type suffice.
        for t, capacity in enumerate(self.capacity_T.tolist()):
            held = [gpus[c] * variable for _, c, variable in entries if gpu_type[c] == t]
            model.add_constr(mip.xsum(held) <= capacity)

        # The members of a quota together hold no more GPUs than it allows.
        for quota in self.quotas:
            counts_C = quota.counts_types(self.type_C).tolist()
            held = [gpus[c] * variable for j in quota.job_M for c, variable in x[j].items() if counts_C[c]]
            model.add_constr(mip.xsum(held) <= quota.gpus)
        return model


def _within(name: str, index: NDArray[np.int64], low: int, high: int) -> None:
    if index.size and (index.min() < low or index.max() >= high):
        raise BadProblem(f"{name} has {int(index.min())} to {int(index.max())}; use {low} to {high - 1}")


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop the search. The limit on nodes gives the same plan on every machine; that on seconds is the last resort."""

    gap: float = 1e-4
    nodes: int = 10_000
    seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of configuration for each job, -1 for none, and how it was found."""

    choice_J: NDArray[np.int64]
    report: SolveReport
