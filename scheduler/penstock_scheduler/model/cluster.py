"""Nodes, configurations and placements."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """Sia's (n, r, t): `nodes` nodes that hold `gpus` GPUs in total, of type `gpu_type`."""

    nodes: int
    gpus: int
    gpu_type: str

    def __str__(self) -> str:
        return f"{self.gpus} {self.gpu_type}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


def part_of_node(host: str, gpu_type: str) -> str:
    """The name of the part of a host that has the GPUs of this type. To a round, it is a node of its own: `lab1[gtx970]`."""
    return f"{host}[{gpu_type}]"


def host_of(node: str) -> str:
    """The host that a node of this name is, or is a part of. In Slurm, the names of hosts have no bracket."""
    return node.partition("[")[0]


def on_parts(nodes: Iterable[str]) -> bool:
    """Whether one of these nodes is a part of a host."""
    return any(host_of(node) != node for node in nodes)


@dataclass(frozen=True, slots=True)
class Share:
    """`gpus` GPUs of one node, and the CPUs and memory that come with them."""

    node: str
    gpus: int
    cpus: int = 0
    """CPUs on the node; 0: as many as the job itself asked for."""
    memory_mb: int = 0
    """Memory on the node, MB as Slurm counts them; 0: as much as the job itself asked for."""

    def amounts(self, request: ResourceRequest | None, node: Node) -> tuple[int, int]:
        """CPUs and memory in MB of a job with this request here, on this node; 0: not known."""
        if request is None:
            return self.cpus, self.memory_mb
        cpus = self.cpus or request.cpus_on(self.gpus, node.cpus)
        return node.whole(cpus), self.memory_mb or request.memory_mb_on(self.gpus, node.memory_mb)

    def suits(self, held: Share) -> bool:
        """Whether a job that holds `held` has what this share asks for. An amount of 0 in this share accepts any amount."""
        return (
            (self.node, self.gpus) == (held.node, held.gpus)
            and self.cpus in (0, held.cpus)
            and self.memory_mb in (0, held.memory_mb)
        )


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The CPUs and memory that a job needs on each of its nodes."""

    cpus: int = 1
    memory_mb: int = 0
    """0: none that the cluster counts."""
    cpus_gpus: int = 0
    """`cpus` are for so many GPUs, and more GPUs need more; 0: any number of GPUs needs the same."""
    memory_gpus: int = 0
    """Likewise for `memory_mb`."""
    all_cpus: bool = False
    """Whether it needs all CPUs of its nodes, however many these are: no other job can share one."""
    all_memory: bool = False
    """Likewise for their memory."""

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}" + _for(self.cpus_gpus)
        memory = f"{self.memory_mb} MB" + _for(self.memory_gpus) if self.memory_mb else ""
        both = "all CPUs" if self.all_cpus else cpus, "all memory" if self.all_memory else memory
        return " and ".join(filter(None, both))

    def cpus_on(self, gpus: int, node_cpus: int) -> int:
        """CPUs on a node with `node_cpus` where the job has so many GPUs."""
        if self.all_cpus:
            return node_cpus
        return -(-self.cpus * gpus // self.cpus_gpus) if self.cpus_gpus else self.cpus

    def memory_mb_on(self, gpus: int, node_mb: int) -> int:
        """MB on a node with `node_mb` for jobs where the job has so many GPUs."""
        if self.all_memory:
            return node_mb
        return -(-self.memory_mb * gpus // self.memory_gpus) if self.memory_gpus else self.memory_mb

    def fits(self, gpus: int, node: Node, cpus: int, memory_mb: int) -> bool:
        """Whether these CPUs and MB of a node suffice for so many GPUs there. Memory that is not allocated does not count."""
        if node.whole(self.cpus_on(gpus, node.cpus)) > cpus:
            return False
        return not node.memory_mb or self.memory_mb_on(gpus, node.memory_mb) <= memory_mb


def _for(gpus: int) -> str:
    return f" for {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which nodes, and how many GPUs on each. Shares are in the order of their node names."""

    gpu_type: str
    partition: str
    shares: tuple[Share, ...]

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        if len(self.shares) == 1:  # most placements: a large round asks for hundreds of thousands
            return self.shares[0].gpus
        return sum(share.gpus for share in self.shares)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(share.node for share in self.shares)

    @property
    def configuration(self) -> Configuration:
        """The shape of this placement, without the names."""
        return _configuration(len(self.shares), self.gpus, self.gpu_type)

    def suits(self, held: Placement) -> bool:
        """Whether a job that holds `held` can stay as it is: same nodes and GPUs, and the wanted CPUs and memory."""
        if self is held:  # a plan gives a job that stays what it holds already
            return True
        return len(self.shares) == len(held.shares) and all(
            wanted.suits(share) for wanted, share in zip(self.shares, held.shares, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.gpu_type} " + ",".join(f"{share.node}:{share.gpus}" for share in self.shares)


@functools.lru_cache(maxsize=4096)
def _configuration(nodes: int, gpus: int, gpu_type: str) -> Configuration:
    """One object for each shape: many placements have the same, and a round asks for it again and again."""
    return Configuration(nodes, gpus, gpu_type)


class LeaveCause(StrEnum):
    """What asks the jobs of a node to leave it. The list is closed."""

    DRAIN = "drain"
    """Slurm drains the node."""
    PENSTOCK_DRAIN = "penstock-drain"
    """An admin drains it with `penstock drain`."""
    RESERVATION = "reservation"
    """It is kept for a reservation that the job is not in."""


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """A request to the jobs of a node to leave it."""

    cause: LeaveCause
    text: str = ""
    """Who asks, and why, as far as that is known."""
    by_s: float | None = None
    """By when the jobs have to be gone, s since 1970; None: no time is set."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A managed partition as a round sees it."""

    name: str
    may_start: bool = True
    """Whether new work may start in it. What runs in it stays in any case."""
    state: str = ""
    """Its state as the cluster names it, for people."""


@dataclass(frozen=True, slots=True)
class Preemptible:
    """GPUs, CPUs and memory of plain jobs of one rank on a node, which the cluster takes from them for others."""

    rank: str
    """Their partition or QOS, by which the cluster ranks jobs."""
    gpus: int
    cpus: int
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Outranks:
    """The right of a job to start in place of plain jobs, which the cluster stops for it."""

    ranks: frozenset[str]
    """See `Preemptible.rank`."""
    partition: str
    """The partition in which the job has to start for that."""
    within_s: float
    """How long they may take to leave, s."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as a round sees it. A host with GPUs of several types is one node for each type; see `part_of_node`.

    Two facts say what may happen on it: whether new work may start there, and whether the work that is there has to leave.
    A node may take no new work without asking anybody to leave: it does not respond, or has not registered yet.
    """

    name: str
    gpu_type: str
    gpus: int
    partitions: tuple[str, ...]
    may_start: bool = True
    """Whether new work may be placed here: not down, drained, silent or unregistered."""
    gpus_others: int = 0
    """GPUs that are held by jobs which Penstock does not manage."""
    reservation: str = ""
    """The reservation for which the node is kept now. Only jobs of that reservation may use it. Empty: none."""
    reserved_s: float | None = None
    """When that reservation begins or began, s since 1970; None: not known."""
    leave: LeaveRequest | None = None
    """The request to all jobs on the node to leave it; None: what runs here stays. See `leave_request`."""
    switch: str = ""
    """Leaf switch of the cluster's topology; nodes of one switch are close to each other. Empty: not known."""
    cpus: int = 1
    cpus_others: int = 0
    cpus_together: int = 1
    """The cluster allocates CPUs in multiples of this: those of a core, or of a socket."""
    set_aside_for: str = ""
    """The job, of those that Penstock does not manage, for which some of `gpus_others` are kept free; empty: none."""
    state: str = ""
    """The node's state as the cluster names it, for people."""
    memory_mb: int = 0
    """Memory that jobs may have, MB as Slurm counts them; 0: not known, or not allocated by the cluster."""
    memory_others_mb: int = 0
    """Memory that is held by jobs which Penstock does not manage, MB."""
    features: tuple[str, ...] = ()
    """The features that an admin gave the node, which a job may ask for."""
    boot_s: float = 0.0
    """About how long it takes until a job can run here, s, because the node is powered down or boots; 0: it is awake."""
    note: str = ""
    """A remark for people about the node, as a sentence without its subject."""
    scarce: bool = False
    """Whether its CPUs or memory may run out before its GPUs do. Only then a round counts them."""
    gpus_out_of_reach: int = 0
    """Free GPUs that no job can have, because jobs which Penstock does not manage hold the CPUs or memory beside them."""
    preemptible: tuple[Preemptible, ...] = ()
    """Parts of what others hold here that a job may have which outranks them."""

    def leave_request(self, reservation: str = "") -> LeaveRequest | None:
        """The request to leave for a job of this reservation (empty: of none); None: the job may stay."""
        if self.leave is None and self.reservation and self.reservation != reservation:
            return LeaveRequest(LeaveCause.RESERVATION, f"reservation {self.reservation}", self.reserved_s)
        return self.leave

    @property
    def gpus_for_us(self) -> int:
        """GPUs that a plan may allocate here; 0 where nothing may start."""
        return max(self.gpus - self.gpus_others - self.gpus_out_of_reach, 0) if self.may_start else 0

    @property
    def cpus_for_us(self) -> int:
        """CPUs that a plan may allocate here."""
        return max(self.cpus - self.cpus_others, 0) if self.may_start else 0

    @property
    def memory_mb_for_us(self) -> int:
        """Memory that a plan may allocate here, MB."""
        return max(self.memory_mb - self.memory_others_mb, 0) if self.may_start else 0

    def without(self, outranked: frozenset[str]) -> Node:
        """The node when the cluster has stopped the jobs of these ranks on it."""
        left = [each for each in self.preemptible if each.rank in outranked]
        if not left:
            return self
        return replace(
            self,
            gpus_others=max(self.gpus_others - sum(each.gpus for each in left), 0),
            cpus_others=max(self.cpus_others - sum(each.cpus for each in left), 0),
            memory_others_mb=max(self.memory_others_mb - sum(each.memory_mb for each in left), 0),
            gpus_out_of_reach=0,
            preemptible=tuple(each for each in self.preemptible if each.rank not in outranked),
        )

    def whole(self, cpus: int) -> int:
        """The CPUs that the cluster allocates to a job that needs so many here."""
        if self.cpus_together == 1:
            return cpus
        return max(cpus, min(-(-cpus // self.cpus_together) * self.cpus_together, self.cpus))

    def has_room_for(self, request: ResourceRequest, gpus: int) -> bool:
        """Whether jobs that Penstock does not manage leave the CPUs and memory that a job needs for so many GPUs."""
        return not self.scarce or request.fits(gpus, self, self.cpus_for_us, self.memory_mb_for_us)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes on which a job may run. An empty field allows every node."""

    only: frozenset[str] = frozenset()
    """Hosts that are allowed."""
    exclude: frozenset[str] = frozenset()
    """Hosts that are not allowed."""
    features: frozenset[frozenset[str]] = frozenset()
    """Sets of features. A node that has all features of one of the sets is allowed."""
    able: frozenset[str] | None = None
    """Hosts that have `able_for`, if the job needs something else that jobs do not use up."""
    able_for: str = ""
    request: ResourceRequest | None = None
    """The CPUs and memory that the job needs, if some node has fewer for it. A node is allowed that has them for `gpus` GPUs."""
    gpus: int = 1
    """Fewest GPUs that the job can use."""
    tried: frozenset[str] = frozenset()
    """Names of nodes on which the cluster did not start the job. They are not allowed for a while."""
    kept: frozenset[str] = frozenset()
    """Names of nodes on which jobs share GPUs, and for which a plain job waits that came before this job. They are not allowed
    until it has started."""

    @property
    def named(self) -> NodeChoice | None:
        """What the user's options say alone; None: they allow every node."""
        return replace(self, able=None, able_for="", tried=frozenset(), kept=frozenset()).without_request

    @property
    def without_request(self) -> NodeChoice | None:
        """The choice without `request`, unless that allows every node."""
        found = replace(self, request=None, gpus=1)
        return None if found == NodeChoice() else found

    def admits(self, node: Node) -> bool:
        """Whether the job may run on the node."""
        able = self.able is None or host_of(node.name) in self.able
        return (
            able
            and node.name not in self.tried
            and node.name not in self.kept
            and self.names(node)
            and (self.request is None or node.has_room_for(self.request, min(self.gpus, node.gpus)))
        )

    def names(self, node: Node) -> bool:
        """Whether the user's options allow the node, whatever else the job needs."""
        return (
            (not self.only or host_of(node.name) in self.only)
            and host_of(node.name) not in self.exclude
            and (not self.features or any(wanted.issubset(node.features) for wanted in self.features))
        )

    def __str__(self) -> str:
        return _shown(self)


@functools.lru_cache(maxsize=4096)
def _shown(choice: NodeChoice) -> str:
    """A choice as sbatch's options. It names every node, so that different choices differ."""
    features = "|".join(sorted("&".join(sorted(wanted)) for wanted in choice.features))
    values = {"nodelist": ",".join(sorted(choice.only)), "exclude": ",".join(sorted(choice.exclude))}
    options = [f"--{name}={value}" for name, value in (values | {"constraint": features}).items() if value]
    if choice.able is not None:
        options.append(f"{choice.able_for} ({', '.join(sorted(choice.able))})")
    if choice.request is not None:
        options.append(f"{choice.request} with {choice.gpus} GPU{'s' if choice.gpus > 1 else ''}")
    if choice.tried:
        options.append(f"not yet tried (tried: {','.join(sorted(choice.tried))})")
    if choice.kept:
        options.append(f"not kept for plain jobs that came before (kept: {','.join(sorted(choice.kept))})")
    return " ".join(options)
