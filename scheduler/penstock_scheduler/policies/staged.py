"""A policy with stages behind it: `sia+synergy-tune` decides as `sia`, and `synergy-tune` refines its plan."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_scheduler.model import Plan, Snapshot
from penstock_scheduler.ports import Policy, Stage


class Staged:
    """The policy; see the module."""

    def __init__(self, policy: Policy, stages: Sequence[Stage]) -> None:
        self._policy = policy
        self._stages = tuple(stages)
        self.name = "+".join([policy.name, *(stage.name for stage in self._stages)])

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, refined by each stage in its turn."""
        plan = self._policy.decide(snapshot)
        for stage in self._stages:
            plan = stage.refine(snapshot, plan)
        return plan
