"""`FreeGpus`: see the package. Axes: N nodes."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import (
    Configuration,
    GpuLimit,
    Job,
    JobId,
    Node,
    Placement,
    ResourceRequest,
    Share,
    Snapshot,
)
from penstock_scheduler.rounds.free_gpus.access import Choices, choices_of, doors, is_open
from penstock_scheduler.rounds.free_gpus.allowance import Allowance
from penstock_scheduler.rounds.free_gpus.amounts import Amounts
from penstock_scheduler.rounds.free_gpus.index import NodeIndex

"""The node that part of a node is taken from: the first with enough free GPUs, or the one that then has fewest left."""

Counts = NDArray[np.int64]


class _Frame:
    """What does not change about the nodes when jobs come and go."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.index = {node.name: index for index, node in enumerate(nodes)}
        self._names = [node.name for node in nodes]
        self._types = np.array([node.gpu_type for node in nodes], dtype=np.str_)
        self._gpus_N = np.array([node.gpus for node in nodes], dtype=np.int64)
        self._rank_N: Counts | None = None
        self._suitable: dict[Configuration, NDArray[np.bool_]] = {}

    def ranks(self) -> Counts:
        """Position of each node in the order of the names."""
        if self._rank_N is None:
            self._rank_N = np.argsort(np.argsort(np.array(self._names, dtype=np.str_)))
        return self._rank_N

    def suitable(self, option: Configuration) -> NDArray[np.bool_]:
        """Nodes that could be part of a configuration if they were idle."""
        if option not in self._suitable:
            suitable_N: NDArray[np.bool_] = self._types == option.gpu_type
            if option.nodes > 1 and (whole_N := suitable_N & (self._gpus_N == option.gpus // option.nodes)).any():
                suitable_N = whole_N
            self._suitable[option] = suitable_N
        return self._suitable[option]


class FreeGpus:
    """The free GPUs of each node, with the CPUs and memory beside them, and what the limits still allow; see the package.

    Args:
        nodes: all nodes.
        limits: on users, accounts, QOS and partitions.
        like: the book of an earlier round. Counts of unchanged nodes are taken from it, which saves time.
    """

    def __init__(self, nodes: Sequence[Node], limits: Iterable[GpuLimit] = (), like: FreeGpus | None = None) -> None:
        self.nodes = nodes
        self.allowance = Allowance(limits)
        self._shared = False
        """Whether another copy may have the same counts, so that they must not be changed in place."""
        self._frame: _Frame
        self._at_first_N: Counts
        changed = None if like is None else changed_nodes(like.nodes, nodes)
        if like is not None and changed is not None and all(_alike(like.nodes[n], nodes[n]) for n in changed):
            self._frame = like._frame
            self._at_first_N = like._at_first_N.copy()
            for n in changed:
                self._at_first_N[n] = nodes[n].gpus_for_us
        else:
            self._frame = _Frame(nodes)
            self._at_first_N = np.array([node.gpus_for_us for node in nodes], dtype=np.int64)
        self._boots = any(node.boot_s for node in nodes)
        self._amounts = Amounts(nodes)
        self.free_N = self._at_first_N.copy()
        """Free GPUs by node, in the order of `nodes`. Callers read it only."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> FreeGpus:
        """All GPUs that a round may allocate, under the limits of its snapshot."""
        return cls(snapshot.nodes, snapshot.limits)

    def copy(self) -> FreeGpus:
        """A copy that changes independently."""
        self._shared = True
        other = object.__new__(FreeGpus)
        other.__dict__ |= self.__dict__ | {"allowance": self.allowance.copy(), "_amounts": self._amounts.copy()}
        return other

    # What jobs get and give back.

    def take(self, job: Job, placement: Placement) -> None:
        """Count GPUs that the job gets, on the nodes and against the limits that cover it."""
        self.take_nodes(placement, job.request)
        self.charge(job, placement.gpus, placement.gpu_type)

    def give_back(self, job: Job, placement: Placement) -> None:
        """Count GPUs that the job leaves."""
        self.leave_nodes(placement, job.request)
        self.charge(job, -placement.gpus, placement.gpu_type)

    def take_nodes(self, placement: Placement, request: ResourceRequest | None = None) -> None:
        """Count GPUs on the nodes alone, with the CPUs and memory beside them by a job's request."""
        self._own()
        self.add_to(self.free_N, placement, -1)
        self._amounts.take(request, placement)

    def leave_nodes(self, placement: Placement, request: ResourceRequest | None = None) -> None:
        """The reverse of `take_nodes`."""
        self._own()
        self.add_to(self.free_N, placement, 1)
        self._amounts.take(request, placement, -1)

    def charge(self, job: Job, gpus: int, gpu_type: str) -> None:
        """Count GPUs against the limits alone, as for a job that shares them; below 0: the job gives them back."""
        self.allowance.take(job, gpus, gpu_type)

    def _own(self) -> None:
        if self._shared:
            self.free_N, self._shared = self.free_N.copy(), False

    # What is there.

    def on(self, node: str) -> int:
        """Free GPUs of a node, >= 0."""
        return max(int(self.free_N[self._frame.index[node]]), 0)

    def by_type(self) -> dict[str, int]:
        """Free GPUs by GPU type, in the order of the types."""
        total = dict.fromkeys(sorted({node.gpu_type for node in self.nodes}), 0)
        for node, free in zip(self.nodes, self.free_N.tolist(), strict=True):
            total[node.gpu_type] += max(free, 0)
        return total

    def has(self, placement: Placement) -> bool:
        """Whether all these GPUs are free on nodes that take new work, so that a job may start there."""
        return all(
            (index := self._frame.index.get(share.node)) is not None and self.free_N[index] >= share.gpus
            for share in placement.shares
        )

    def may_stay(self, placement: Placement, request: ResourceRequest | None = None) -> bool:
        """Whether a job that runs there may stay: its GPUs are free but for the job, or their node is out of service.

        Args:
            placement: where the job runs.
            request: the CPUs and memory that must be free, too, unless it is sure to have them.
        """
        return all(
            (index := self._frame.index.get(share.node)) is None
            or (self.free_N[index] >= share.gpus and self._amounts.has(share.node, request, share.gpus))
            or not self.nodes[index].may_start
            for share in placement.shares
        )

    # Nodes for a job.

    def find(self, job: Job, options: Collection[Configuration], rather: Placement | None = None) -> Placement | None:
        """GPUs for the first of these configurations that nodes, partitions, reservation and limits allow the job now.

        Args:
            job: the job.
            options: configurations, the preferred one first.
            rather: GPUs that the job gets if they are of one of these configurations, and free and open to it.
        """
        if rather is not None and rather.configuration in options and self.may_have(job, rather):
            return rather
        if self.allowance:
            options = [each for each in options if self.allowance.refuses(job, each.gpus, each.gpu_type) is None]
        return self.find_nodes(job, options)

    def may_have(self, job: Job, placement: Placement) -> bool:
        """Whether these GPUs are free, on nodes that are open to the job, and within the limits."""
        return (
            self.has(placement)
            and (
                placement is job.running_on
                or all(self._amounts.has(share.node, job.request, share.gpus) for share in placement.shares)
            )
            and placement.partition in job.partitions
            and all(is_open(self.nodes[self._frame.index[name]], job) for name in placement.nodes)
            and self.allowance.refuses(job, placement.gpus, placement.gpu_type) is None
        )

    def find_nodes(
        self, job: Job, options: Iterable[Configuration], free_N: Counts | None = None, *, later: bool = False
    ) -> Placement | None:
        """As `find`, without regard to the limits.

        Args:
            job: the job.
            options: configurations, the preferred one first.
            free_N: free GPUs at another time; None: now.
            later: whether the job starts later. Which CPUs and memory are free then is not known, and is not asked.
        """
        free_N = self.free_N if free_N is None else free_N
        counts_all = bool(self._amounts) and job.request is not None and not later
        for option in options:
            candidates = self.enough(option, free_N).nonzero()[0]
            if job.nodes is not None:
                candidates = self._only(candidates, job.nodes.admits)
            if counts_all:
                candidates = self._only(candidates, functools.partial(self._has_amounts, job, option))
            if len(candidates) < option.nodes:
                continue
            if option.nodes == 1:
                found = self._on_one_node(job, option, candidates, free_N)
            else:
                found = self.on_several_nodes(job, option, candidates, free_N)
            if found is not None:
                return found
        return None

    def _only(self, candidates: Counts, suits: Callable[[Node], bool]) -> Counts:
        return candidates[np.array([suits(self.nodes[index]) for index in candidates.tolist()], dtype=np.bool_)]

    def _has_amounts(self, job: Job, option: Configuration, node: Node) -> bool:
        return self._amounts.has(node.name, job.request, option.gpus // option.nodes)

    def _on_one_node(self, job: Job, option: Configuration, candidates: Counts, free_N: Counts) -> Placement | None:
        """The node of the job's first partition that has one: of those that are ready soonest, the fullest."""
        keys = [self._frame.ranks()[candidates], free_N[candidates]]
        if self._boots:
            keys.append(np.array([self.nodes[index].boot_s for index in candidates.tolist()]))
        order = candidates[np.lexsort(tuple(keys))].tolist()
        for partition, index in itertools.product(job.partitions, order):
            node = self.nodes[index]
            if partition in node.partitions and node.reservation == job.reservation:
                return Placement(option.gpu_type, partition, (Share(node.name, option.gpus),))
        return None

    def on_several_nodes(self, job: Job, option: Configuration, candidates: Counts, free_N: Counts) -> Placement | None:
        """Nodes for a configuration of several, out of these candidates, given by index."""
        nodes = [self.nodes[index] for index in candidates.tolist()]
        free = dict(zip((node.name for node in nodes), free_N[candidates].tolist(), strict=True))
        return NodeIndex(nodes, free, choices=choices_of([job])).find(option, doors(job))[0]

    def enough(self, option: Configuration, free: Counts) -> NDArray[np.bool_]:
        """Which nodes could be part of a configuration, in the shape of `free`. The last axis of `free` is the nodes."""
        enough: NDArray[np.bool_] = (free >= option.gpus // option.nodes) & self._frame.suitable(option)
        return enough

    def add_to(self, free_N: Counts, placement: Placement, sign: int) -> None:
        """Add the GPUs of a placement to `free_N`, or with a `sign` of -1 take them from it."""
        for share in placement.shares:
            index = self._frame.index.get(share.node)
            if index is not None and self.nodes[index].may_start:
                free_N[index] += sign * share.gpus

    def index(
        self, gpu_type: str, move_cost: Mapping[JobId, float] | None = None, choices: Choices | None = None
    ) -> NodeIndex:
        """The nodes of one GPU type, ready for placing many jobs with these node choices; it counts on its own from then on."""
        free = {
            node.name: free
            for node, free in zip(self.nodes, self.free_N.tolist(), strict=True)
            if node.gpu_type == gpu_type
        }
        nodes = (node for node in self.nodes if node.gpu_type == gpu_type)
        return NodeIndex(nodes, free, move_cost, choices, self._amounts.copy())


def changed_nodes(old: Sequence[Node], new: Sequence[Node]) -> list[int] | None:
    """Positions at which `new` has another object than `old`; None: their lengths differ.

    An unchanged node is mostly the same object in the next round, so this finds the few that callers must compare.
    """
    if len(old) != len(new):
        return None
    return [n for n, same in enumerate(map(operator.is_, old, new)) if not same]


def _alike(old: Node, new: Node) -> bool:
    """Whether two objects stand for the same node, of the same type and size."""
    return (old.name, old.gpu_type, old.gpus) == (new.name, new.gpu_type, new.gpus)
