"""Free CPUs and memory, on the nodes where they may run out before the GPUs do."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_scheduler.model import Node, Placement, ResourceRequest


class Amounts:
    """CPUs and memory (MB) that jobs may still get on each node with `Node.scarce`. All other nodes have enough of both."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = {node.name: node for node in nodes if node.scarce and node.may_start}
        self._free = {name: (node.cpus_for_us, node.memory_mb_for_us) for name, node in self._nodes.items()}

    def __bool__(self) -> bool:
        """Whether there is any such node."""
        return bool(self._nodes)

    @property
    def nodes(self) -> Iterable[str]:
        """Names of these nodes."""
        return self._nodes

    def copy(self) -> Amounts:
        """A copy that changes independently."""
        other = object.__new__(Amounts)
        other._nodes, other._free = self._nodes, dict(self._free)
        return other

    def take(self, request: ResourceRequest | None, placement: Placement, sign: int = 1) -> None:
        """Count what a job gets at a placement, or with a `sign` of -1 what it gives back."""
        if not self._nodes:
            return
        for share in placement.shares:
            if (node := self._nodes.get(share.node)) is None:
                continue
            cpus, memory_mb = share.amounts(request, node)
            free_cpus, free_mb = self._free[share.node]
            self._free[share.node] = free_cpus - sign * cpus, free_mb - sign * memory_mb

    def has(self, name: str, request: ResourceRequest | None, gpus: int) -> bool:
        """Whether a node has the CPUs and memory that a job needs for this many GPUs."""
        node = self._nodes.get(name)
        if node is None or request is None:
            return True
        return request.fits(gpus, node, *self._free[name])
