"""Gavel: shares of time on each GPU type that maximise the sum of all jobs' throughputs, for jobs of a fixed size.

After *Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads* (Narayanan et al., OSDI '20), with its
objective "maximise total throughput". A job asks for a number of GPUs (the most that its job spec allows and that exist) and
runs on all of them, or waits. Each round performs these steps:

1. **Solve.** A linear program gives each job j the share x_jt of the time for which it should run on GPU type t: maximise
   sum_jt w_jt x_jt, with sum_t x_jt <= 1 for each job, and sum_j g_j x_jt <= the GPUs of each type. g_j is the number of GPUs
   that the job asks for, and w_jt is its throughput. The model's goodput takes the place of the throughput: for a job of
   fixed size and batch, the two differ by a constant factor only.
2. **Rank.** The priority of (j, t) is x_jt divided by the share that job j has had so far of all time that this round's jobs
   have had on t. So a job that has received little of its share comes first.
3. **Allocate.** The pairs of job and type get GPUs in the order of their priority, until no GPUs are left. Pairs with x = 0
   come last: they only use GPUs that would be idle.

The paper's rounds are 360 s long: set `[daemon] round_s = 360`. Each change of the running jobs costs restarts, and Gavel
does not weigh these.

Departures from the paper:

- A job's time counts from its submission, not from the last change of the set of jobs. Sia's port does the same.
- The authors' code and Sia's port add up steps/s as they are, and so does Penstock (docs/admin/simulator.md has a
  comparison). A job with many short steps then comes first. With `throughput = "normalised"`, each job's throughput is
  relative to that on its slowest type.
- Equal jobs get equal shares. An interior-point solver does this by itself; a simplex solver does not.

Axes: A classes of equal jobs, E entries (a class on a configuration that it asks for), T GPU types.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.model import Assignment, Configuration, Job, JobId, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.people.errors import RoundFailed
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.never_fits import never_fits
from penstock_scheduler.rounds.policies.settling import settle

HEAD_START_S = 180.0
"""Time that each job is assumed to have had on each type: in the paper, half a round."""


class GavelSettings(BaseModel):
    """Section `[policy.gavel]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    throughput: Literal["normalised", "steps"] = Field(
        default="steps", description="Steps/s, as in the authors' code, or relative to the job's slowest type."
    )


class Gavel:
    """Shares of time on each GPU type, for the largest sum of throughputs.

    From one round to the next it keeps only the requests of jobs that have not changed.
    """

    name = "gavel"

    def __init__(self, settings: GavelSettings) -> None:
        self._settings = settings
        self._requests = common.Requests()

    def decide(self, snapshot: Snapshot) -> Plan:
        """Serve the jobs that are furthest behind their shares first.

        Raises:
            RoundFailed: the linear program has no solution.
        """
        pins = common.pinned(snapshot)
        requests = self._requests.of(snapshot)
        free = [job for job in snapshot.jobs if job.id not in pins and requests[job.id]]
        jobs = sorted(free, key=lambda job: job.in_order)
        left = common.capacities(snapshot.nodes, pins)
        shares, prices = shares_of_time(jobs, requests, left, self._settings.throughput)
        order = self._order(jobs, shares, snapshot)
        chosen: dict[JobId, Configuration] = {}
        for job_id, option in order:
            if job_id not in chosen and option.gpus <= left[option.gpu_type]:
                chosen[job_id] = option
                left[option.gpu_type] -= option.gpus
        placements = settle(snapshot, pins, chosen, order)
        assignments: dict[JobId, Assignment] = {}
        waiting: dict[JobId, Reason] = {}
        for job in snapshot.jobs:
            if job.id in pins:
                assignments[job.id] = common.pinned_assignment(job, pins[job.id], snapshot)
            elif job.id in placements:
                due = shares[job.id].get(placements[job.id].configuration, 0.0)
                reason = common.given(job, placements[job.id], f"due {due:.0%} of the time")
                assignments[job.id] = common.assign(job, placements[job.id], reason, snapshot)
            elif not requests[job.id]:
                waiting[job.id] = never_fits(job, snapshot.nodes)
            else:
                text = f"due {sum(shares[job.id].values()):.0%} of the time; others are further behind"
                waiting[job.id] = Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))
        return Plan(snapshot.round, assignments, waiting, prices=prices)

    def _order(
        self, jobs: list[Job], shares: dict[JobId, dict[Configuration, float]], snapshot: Snapshot
    ) -> list[tuple[JobId, Configuration]]:
        """Pairs of job and configuration, the most urgent first."""
        received: dict[tuple[JobId, str], float] = {}
        total: dict[str, float] = {}
        for job in jobs:
            attained = snapshot.facts[job.id].attained_gpu_s
            for option in shares[job.id]:
                time_s = attained.get(option.gpu_type, 0.0) / option.gpus + HEAD_START_S
                if (job.id, option.gpu_type) not in received:
                    total[option.gpu_type] = total.get(option.gpu_type, 0.0) + time_s
                received[job.id, option.gpu_type] = time_s
        ranked = [
            (
                -share * total[option.gpu_type] / received[job.id, option.gpu_type],
                -share,
                position,
                column,
                job.id,
                option,
            )
            for position, job in enumerate(jobs)
            for column, (option, share) in enumerate(shares[job.id].items())
        ]
        return [(job_id, option) for *_, job_id, option in sorted(ranked)]


def shares_of_time(
    jobs: list[Job], requests: dict[JobId, common.Request], capacity: dict[str, int], unit: str
) -> tuple[dict[JobId, dict[Configuration, float]], dict[str, float]]:
    """Solve the linear program: x for each job and configuration, in [0, 1], and the worth of one more GPU of each type.

    The jobs come in order of age.

    Raises:
        RoundFailed: the solver fails, which is a defect: x = 0 is always a solution.
    """
    alike: dict[tuple[tuple[Configuration, float], ...], list[Job]] = {}
    for job in jobs:
        alike.setdefault(tuple(_throughputs(job, requests[job.id], unit).items()), []).append(job)
    if not alike:
        return {}, {}
    from scipy.optimize import linprog  # takes a second to load
    from scipy.sparse import coo_array, vstack

    types = sorted(capacity)
    entries = [(row, option, weight) for row, weights in enumerate(alike) for option, weight in weights]
    row_E = np.array([row for row, _, _ in entries])
    type_E = np.array([types.index(option.gpu_type) for _, option, _ in entries])
    gpus_E = np.array([option.gpus for _, option, _ in entries], dtype=np.float64)
    weight_E = np.array([weight for *_, weight in entries])
    size_A = np.array([len(members) for members in alike.values()])
    index_E = np.arange(len(entries))
    per_class = coo_array((np.ones(len(entries)), (row_E, index_E)), shape=(len(alike), len(entries)))
    per_type = coo_array((gpus_E, (type_E, index_E)), shape=(len(types), len(entries)))
    solved = linprog(  # type: ignore[call-overload]  # the stubs do not know that A_ub may be sparse
        -weight_E / weight_E.max(),
        A_ub=vstack([per_class, per_type]).tocsr(),
        b_ub=np.concatenate([size_A, [float(capacity[name]) for name in types]]),
        method="highs-ds",
    )
    if solved.status != 0:
        raise RoundFailed(f"gavel: the linear program has no solution: {solved.message}; the last plan is kept")
    share_E = np.where(solved.x > 1e-9, solved.x, 0.0) / size_A[row_E]
    members_A = list(alike.values())
    shares: dict[JobId, dict[Configuration, float]] = {job.id: {} for job in jobs}
    for (row, option, _), share in zip(entries, share_E, strict=True):
        for job in members_A[row]:
            shares[job.id][option] = float(share)
    worth_T = -solved.ineqlin.marginals[len(alike) :] * weight_E.max()
    return shares, {name: max(float(worth), 0.0) for name, worth in zip(types, worth_T, strict=True)}


def _throughputs(job: Job, request: common.Request, unit: str) -> common.Request:
    base = min(request.values()) if unit == "normalised" else float(job.spec.batch_size or 1)
    return {option: job.weight * goodput / base for option, goodput in request.items()}
