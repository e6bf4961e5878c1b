"""A policy with stages: the policy decides, and each stage refines its plan.

For example, with `[policy] name = "sia"` and `stages = ["synergy-tune"]`, `sia` allocates the GPUs, and `synergy-tune` the
CPUs and the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock_scheduler.api.ports import Policy, Stage
from penstock_scheduler.model import Job, Plan, Snapshot
from penstock_scheduler.rounds.policies.colocation import residents_only
from penstock_scheduler.rounds.policies.partitioned import apart
from penstock_scheduler.rounds.policies.wrapper import remarks


class Staged:
    """A policy and its stages; see the module.

    Args:
        policy: the policy that decides.
        stages: the stages that refine its plan, in this order.
        name: the name that logs and stored rounds show.
        own: partitions with a policy of their own. A stage moves no job to nodes of another part.
    """

    def __init__(self, policy: Policy, stages: Sequence[Stage], name: str, own: Sequence[str] = ()) -> None:
        self._policy = policy
        self._stages = tuple(stages)
        self._own = tuple(own)
        self._shares = any(getattr(stage, "shares", False) for stage in stages)
        self.name = name

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, refined by each stage."""
        plan = self._policy.decide(residents_only(snapshot) if self._shares else snapshot)
        seen = dataclasses.replace(snapshot, nodes=tuple(apart(node, self._own) for node in snapshot.nodes))
        for stage in self._stages:
            plan = stage.refine(seen, plan)
        return plan

    def remarks(self, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
        """The policy's remarks."""
        return remarks(self._policy, snapshot, plan, job)
