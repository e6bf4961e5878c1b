"""Jobs that wait start in place of jobs that Penstock does not manage, where the cluster stops those for them.

The cluster preempts jobs of a lower rank as soon as it schedules one of a higher rank, such as a partition's owner. A policy
counts only GPUs that are free. Each job that it leaves waiting and that outranks others is placed here as if these were gone. It
gets the fewest GPUs that it can use, because others lose their work for them, and it can grow later.
"""

from __future__ import annotations

import dataclasses

from penstock_scheduler.model import Job, Outranks, Phase, Placement, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.rounds.free_gpus import FreeGpus, is_open
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.wrapper import Wrapper

WAITS = (ReasonCode.WAITING_CAPACITY, ReasonCode.WAITING_FRAGMENTS)


class Preempting(Wrapper):
    """See the module."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, with jobs that start in place of others."""
        plan = self._policy.decide(snapshot)
        there = [node for node in snapshot.nodes if node.preemptible]
        if not there:
            return plan
        free = common.left_free(there, snapshot, plan)
        emptied: dict[frozenset[str], FreeGpus] = {}
        for job in sorted(snapshot.jobs, key=lambda each: each.in_order):
            if job.outranks is None or not _waits(job, plan):
                continue
            if (ranks := job.outranks.ranks) not in emptied:
                emptied[ranks] = common.left_free([node.without(ranks) for node in there], snapshot, plan)
            found = _place(snapshot, job, job.outranks, emptied[ranks])
            if found is None or free.has(found):  # the policy keeps what is free for others
                continue
            for book in (free, *emptied.values()):
                book.take(job, found)
            text = f"starts on {found.configuration}, where the cluster stops jobs of a lower rank for it"
            given = common.assign(job, found, Reason(ReasonCode.CHOSEN, text), snapshot)
            left = {other: reason for other, reason in plan.waiting.items() if other != job.id}
            plan = dataclasses.replace(plan, assignments={**plan.assignments, job.id: given}, waiting=left)
        return plan


def _waits(job: Job, plan: Plan) -> bool:
    """Whether the job gets nothing in this round because others have the GPUs."""
    reason = plan.waiting.get(job.id)
    return job.phase is Phase.QUEUED and reason is not None and reason.code in WAITS


def _place(snapshot: Snapshot, job: Job, above: Outranks, free: FreeGpus) -> Placement | None:
    """Where the job starts, with the fewest GPUs."""
    there = dataclasses.replace(job, partitions=(above.partition,))
    if sum(free.on(node.name) for node in free.nodes if is_open(node, there)) < job.spec.min_gpus:
        return None
    options = common.options(snapshot, there)
    return free.find(there, sorted(options, key=lambda option: (option.gpus, -options[option])))
