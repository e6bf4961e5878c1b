"""Nodes, configurations and placements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """Sia's (n, r, t): `nodes` nodes that hold `gpus` GPUs in total, of type `gpu_type`."""

    nodes: int
    gpus: int
    gpu_type: str

    def __str__(self) -> str:
        return f"{self.gpus} {self.gpu_type}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


@dataclass(frozen=True, slots=True)
class Share:
    """`gpus` GPUs of one node."""

    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Which nodes, and how many GPUs on each. Shares are in the order of their node names."""

    gpu_type: str
    partition: str
    shares: tuple[Share, ...]

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return sum(share.gpus for share in self.shares)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(share.node for share in self.shares)

    @property
    def configuration(self) -> Configuration:
        """The shape of this placement, without the names."""
        return Configuration(len(self.shares), self.gpus, self.gpu_type)

    def __str__(self) -> str:
        return f"{self.gpu_type} " + ",".join(f"{share.node}:{share.gpus}" for share in self.shares)


@dataclass(frozen=True, slots=True)
class Node:
    """A node as a round sees it."""

    name: str
    gpu_type: str
    gpus: int
    partitions: tuple[str, ...]
    usable: bool = True
    """Whether new work may be placed here: not down, drained or silent."""
    gpus_others: int = 0
    """GPUs that jobs hold which Penstock does not manage."""
    reservation: str = ""
    """The reservation that it is kept for now: only jobs of that reservation may use it. Empty: none."""
    switch: str = ""
    """Leaf switch of the cluster's topology; nodes of one switch are close to each other. Empty: not known."""
    cpus: int = 1
    cpus_others: int = 0
    state: str = ""
    """The cluster's own words for the node's state, for people."""

    @property
    def gpus_for_us(self) -> int:
        """GPUs that a plan may give out here: 0 on a node that is not usable."""
        return max(self.gpus - self.gpus_others, 0) if self.usable else 0
