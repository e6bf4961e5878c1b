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
    """`gpus` GPUs of one node, and the CPUs and memory that come with them."""

    node: str
    gpus: int
    cpus: int = 0
    """CPUs on the node; 0: as many as the job itself asked for."""
    memory_mb: int = 0
    """Memory on the node, MB as Slurm counts them; 0: as much as the job itself asked for."""

    def suits(self, held: Share) -> bool:
        """Whether a job that holds `held` has what this share asks for. An amount of 0 in this share accepts any amount."""
        return (
            (self.node, self.gpus) == (held.node, held.gpus)
            and self.cpus in (0, held.cpus)
            and self.memory_mb in (0, held.memory_mb)
        )


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

    def suits(self, held: Placement) -> bool:
        """Whether a job that holds `held` can stay as it is: same nodes and GPUs, and the wanted CPUs and memory."""
        return len(self.shares) == len(held.shares) and all(
            wanted.suits(share) for wanted, share in zip(self.shares, held.shares, strict=True)
        )

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
    """GPUs that are held by jobs which Penstock does not manage."""
    reservation: str = ""
    """The reservation for which the node is kept now. Only jobs of that reservation may use it. Empty: none."""
    switch: str = ""
    """Leaf switch of the cluster's topology; nodes of one switch are close to each other. Empty: not known."""
    cpus: int = 1
    cpus_others: int = 0
    state: str = ""
    """The node's state as the cluster names it, for people."""
    memory_mb: int = 0
    """Memory that jobs may have, MB as Slurm counts them; 0: not known, or not allocated by the cluster."""
    memory_others_mb: int = 0
    """Memory that is held by jobs which Penstock does not manage, MB."""

    @property
    def gpus_for_us(self) -> int:
        """GPUs that a plan may allocate here; 0 on an unusable node."""
        return max(self.gpus - self.gpus_others, 0) if self.usable else 0

    @property
    def cpus_for_us(self) -> int:
        """CPUs that a plan may allocate here."""
        return max(self.cpus - self.cpus_others, 0) if self.usable else 0

    @property
    def memory_mb_for_us(self) -> int:
        """Memory that a plan may allocate here, MB."""
        return max(self.memory_mb - self.memory_others_mb, 0) if self.usable else 0
