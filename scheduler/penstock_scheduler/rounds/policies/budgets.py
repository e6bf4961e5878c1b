"""Budgets of GPU-hours. `make_policy` wraps every policy in `WithBudgets`, which applies these rules:

1. While an account is over its *soft* limit, the weight of its jobs is multiplied by the budget's `soft_weight`. Policies
   without weights, such as the queues, ignore this.
2. While an account is over its *hard* limit, none of its jobs starts, and its running jobs together get no more GPUs than
   they hold.
3. Once the grace period after that is over, and if the site has chosen so, the account's running jobs leave their GPUs: each
   saves a checkpoint and waits. Jobs that may not be stopped, and jobs in the cloud, keep running.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from penstock_scheduler.model import GpuBudget, GpuLimit, Job, JobId, Phase, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.rounds.policies.common import smallest_need
from penstock_scheduler.rounds.policies.wrapper import Wrapper


class WithBudgets(Wrapper):
    """Applies the rules of this module. `policy` decides about the jobs that may get GPUs."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan for the jobs that the budgets allow."""
        if not snapshot.budgets:
            return self._policy.decide(snapshot)
        away = {run.job for run in snapshot.cloud.runs} if snapshot.cloud else set()
        barred: dict[JobId, Reason] = {}
        for job in snapshot.jobs:
            line = None if job.id in away else next((b for b in snapshot.budgets if _bars(b, job)), None)
            if line is not None:
                barred[job.id] = _reason(line, job)
        jobs = tuple(_weighed(job, snapshot.budgets) for job in snapshot.jobs if job.id not in barred)
        limits = (*snapshot.limits, *_no_more(snapshot, [job for job in jobs if job.id not in away]))
        plan = self._policy.decide(dataclasses.replace(snapshot, jobs=jobs, limits=limits))
        waiting = plan.waiting | barred
        return dataclasses.replace(
            plan, waiting={job.id: waiting[job.id] for job in snapshot.jobs if job.id in waiting}
        )


def _bars(budget: GpuBudget, job: Job) -> bool:
    """Whether the job gets no GPUs because of this budget."""
    if not budget.over_hard or not budget.covers(job.account):
        return False
    return job.phase is Phase.QUEUED or (budget.stops and job.phase is Phase.RUNNING and job.movable)


def _reason(budget: GpuBudget, job: Job) -> Reason:
    what = "nothing of it starts" if job.phase is Phase.QUEUED else "the grace for what ran is over"
    again = " until the next period begins, or an admin raises it" if budget.ends_s is not None else ""
    return Reason(ReasonCode.GPU_BUDGET, f"{budget}; over the hard limit {what}{again}", smallest_need(job))


def _weighed(job: Job, budgets: tuple[GpuBudget, ...]) -> Job:
    factor = math.prod(b.soft_weight for b in budgets if b.over_soft and b.covers(job.account))
    return job if factor == 1 else dataclasses.replace(job, weight=job.weight * factor)


def _no_more(snapshot: Snapshot, jobs: Sequence[Job]) -> list[GpuLimit]:
    """For each account over a hard limit, a limit of the GPUs that its jobs on site hold now."""
    over = {job.account for job in jobs if any(b.over_hard and b.covers(job.account) for b in snapshot.budgets)}
    held = dict.fromkeys(sorted(over), 0)
    for job in jobs:
        if job.account in held and (where := job.target or job.allocation) is not None:
            held[job.account] += where.gpus
    return [GpuLimit("account", name, gpus) for name, gpus in held.items()]
