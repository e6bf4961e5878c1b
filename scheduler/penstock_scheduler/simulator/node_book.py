"""The nodes of the simulated cluster: which take new work, and what jobs hold there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock_scheduler.model import Node, Placement, Share


class NodeBook:
    """GPUs, CPUs and memory that jobs hold.

    Args:
        nodes: all nodes.
        now_s: when counting begins.
    """

    def __init__(self, nodes: Sequence[Node], now_s: float) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._cloud: set[str] = set()
        """Nodes that are instances. Jobs on them hold nothing on site."""
        self.free = {node.name: node.gpus_for_us for node in nodes}
        self.total_gpus = sum(self.free.values())
        self.gpus_held = self.cpus_held = self.memory_held_mb = 0
        self.gpu_seconds = 0.0
        """GPU-seconds that jobs held until the last `count`. GPUs that jobs share count once."""
        self._counted_s = now_s
        self._taken = dict.fromkeys(self.nodes, 0)
        """GPUs that jobs hold, by node."""
        self._shown = dict(self.nodes)
        """Nodes with the GPUs of jobs counted as held by others."""
        self._as_shown: dict[tuple[str, bool, int], Node] = {}
        """(name, whether it takes new work, GPUs that jobs hold) -> the node as it is shown then."""
        self._changed: set[str] = set()
        """Nodes that have changed since they were shown."""

    @property
    def whole(self) -> bool:
        """Whether every node takes new work."""
        return all(node.may_start for node in self.nodes.values())

    def may_start(self, name: str) -> bool:
        """Whether there is such a node and it takes new work."""
        return name in self._cloud or (name in self.nodes and self.nodes[name].may_start)

    def add_instance(self, name: str, gpus: int) -> None:
        """Count an instance as a node from now on."""
        self._cloud.add(name)
        self.free[name] = gpus
        self._taken.setdefault(name, 0)

    def set_may_start(self, name: str, may_start: bool) -> None:
        """A node fails or is repaired."""
        self.nodes[name] = replace(self.nodes[name], may_start=may_start, state="IDLE" if may_start else "DOWN")
        self._changed.add(name)

    def take(self, node: str, gpus: int, now_s: float) -> None:
        """Count GPUs of a node as held from now on; negative: as free."""
        self.count(now_s)
        self.free[node] -= gpus
        self._taken[node] += gpus
        if node in self._cloud:
            return
        self.gpus_held += gpus
        self._changed.add(node)

    def take_all(self, placement: Placement, sign: int, now_s: float) -> None:
        """Count all GPUs of a placement as held from now on, or with -1 as free."""
        for share in placement.shares:
            self.take(share.node, sign * share.gpus, now_s)

    def hold(self, share: Share, sign: int) -> None:
        """Count CPUs and memory as held from now on, or with -1 as free."""
        self.cpus_held += sign * share.cpus
        self.memory_held_mb += sign * share.memory_mb

    def count(self, now_s: float) -> None:
        """Bring `gpu_seconds` to `now_s`."""
        self.gpu_seconds += self.gpus_held * (now_s - self._counted_s)
        self._counted_s = now_s

    def shown(self) -> tuple[Node, ...]:
        """The nodes, with the GPUs that jobs hold counted as held by others."""
        for name in self._changed:
            node = self.nodes[name]
            key = (name, node.may_start, self._taken[name])
            if key not in self._as_shown:
                self._as_shown[key] = replace(node, gpus_others=node.gpus_others + self._taken[name])
            self._shown[name] = self._as_shown[key]
        self._changed.clear()
        return tuple(self._shown.values())
