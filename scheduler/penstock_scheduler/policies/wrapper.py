"""What policies that stand around every other have in common."""

from __future__ import annotations

from penstock_scheduler.ports import Policy


def front_only(policy: Policy) -> bool:
    """Whether a policy decides by the free GPUs and the front of the queue alone: see `Fifo.front_only`."""
    return bool(getattr(policy, "front_only", False))


class Wrapper:
    """Goes by the name of the policy inside, and needs no more of the queue than that one; subclasses decide."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def name(self) -> str:
        """The policy's."""
        return self._policy.name

    @property
    def front_only(self) -> bool:
        """The policy's."""
        return front_only(self._policy)
