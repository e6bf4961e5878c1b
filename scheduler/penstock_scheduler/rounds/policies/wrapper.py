"""What policies that wrap other policies have in common."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_scheduler.api.ports import Explainer, Policy
from penstock_scheduler.model import Job, Plan, Snapshot


def front_only(policy: Policy) -> bool:
    """Whether a policy decides by the free GPUs and the front of the queue alone; see `Fifo.front_only`."""
    return bool(getattr(policy, "front_only", False))


def remarks(policy: Policy, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
    """What a policy says about a job beyond its reason; see `Explainer`. Empty for a policy without remarks."""
    return policy.remarks(snapshot, plan, job) if isinstance(policy, Explainer) else ()


class Wrapper:
    """Has the name and the remarks of the policy that it wraps. Subclasses implement `decide`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def name(self) -> str:
        """The name of the wrapped policy."""
        return self._policy.name

    @property
    def front_only(self) -> bool:
        """Whether the wrapped policy decides by the front of the queue alone."""
        return front_only(self._policy)

    def remarks(self, snapshot: Snapshot, plan: Plan, job: Job) -> Sequence[str]:
        """The remarks of the wrapped policy."""
        return remarks(self._policy, snapshot, plan, job)
