"""A job that cannot grow later starts on all the GPUs that it can use, as far as these are idle.

A job that has not shown that it can save is never moved, so it keeps the GPUs on which it starts until it ends. `sia` and
`pollux` start a job of unknown scaling on its fewest GPUs and let it grow: such a job would keep so few beside idle GPUs. This
step gives it more of the GPUs that the policy's plan leaves idle, the oldest job first. It takes GPUs from no job, and wakes no
node. A job that saves starts as the policy decides, and grows.
"""

from __future__ import annotations

import dataclasses

from penstock_scheduler.model import Assignment, Job, Phase, Placement, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.wrapper import Wrapper

WHY = "it has not shown that it can save, so it cannot grow later"


class WithFullStarts(Wrapper):
    """Lets jobs that cannot grow later start on more of the GPUs that the policy leaves idle."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan with such starts."""
        plan = self._policy.decide(snapshot)
        starts = [job for job in snapshot.jobs if _cannot_grow(snapshot, plan, job)]
        if not starts:
            return plan
        book = common.left_free(snapshot.nodes, snapshot, plan)
        larger = {}
        for job in sorted(starts, key=lambda job: job.in_order):
            if (found := _larger(snapshot, book, job, plan.assignments[job.id])) is not None:
                larger[job.id] = found
        return dataclasses.replace(plan, assignments=plan.assignments | larger) if larger else plan


def _cannot_grow(snapshot: Snapshot, plan: Plan, job: Job) -> bool:
    """Whether the plan starts the job on fewer GPUs than it can use, and it cannot be moved to more."""
    given = plan.assignments.get(job.id)
    return (
        given is not None
        and job.phase is Phase.QUEUED
        and job.movable
        and not snapshot.facts[job.id].saves
        and given.reason.code is ReasonCode.CHOSEN
        and given.placement.gpus < job.spec.max_gpus
    )


def _larger(snapshot: Snapshot, book: FreeGpus, job: Job, given: Assignment) -> Assignment | None:
    """The start with the best goodput on more GPUs, whose GPUs the book then counts as taken; None if all of them are worse."""
    book.give_back(job, given.placement)
    options = common.options(snapshot, job, job.spec.max_gpus)
    better = [each for each, goodput in options.items() if each.gpus > given.placement.gpus and goodput > given.goodput]
    for option in sorted(better, key=lambda each: (-options[each], each)):
        found = book.find(job, (option,), job.target)
        if found is not None and _awake(snapshot, found):
            book.take(job, found)
            reason = Reason(ReasonCode.CHOSEN, f"starts on {option}: {WHY}")
            return common.assign(job, found, reason, snapshot, options[option])
    book.take(job, given.placement)
    return None


def _awake(snapshot: Snapshot, placement: Placement) -> bool:
    return not any(node.boot_s for node in snapshot.nodes if node.name in placement.nodes)
