"""Nodes of one GPU type, found by their free GPUs, by their switch, or by the jobs that would have to leave them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from penstock_scheduler.model import Configuration, JobId, Node, Placement, ResourceRequest, Share
from penstock_scheduler.rounds.free_gpus.access import Access, Choices, Door, access_of, opens
from penstock_scheduler.rounds.free_gpus.amounts import Amounts


class NodeIndex:
    """The nodes of one GPU type while jobs are placed on them.

    Heaps hold node names. An outdated entry stays until it comes up and is then skipped, so that a change costs O(log n).

    Args:
        nodes: all of one GPU type.
        free: free GPUs by node.
        move_cost: GPU-seconds of work that moving a kept job costs, >= 0; absent: its GPUs.
        choices: the node choices of the jobs to be placed.
        amounts: free CPUs and memory, which are counted from then on, where they may run out.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        free: Mapping[str, int],
        move_cost: Mapping[JobId, float] | None = None,
        choices: Choices | None = None,
        amounts: Amounts | None = None,
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._free = {name: free[name] for name in self._nodes}
        self._access = {name: access_of(node, choices or {}) for name, node in self._nodes.items()}
        self._accesses = sorted(set(self._access.values()))
        self._largest = max(self._free.values(), default=0)
        self._sizes = {node.gpus for node in self._nodes.values()}
        self._move_cost = move_cost or {}
        self._amounts = amounts or Amounts(())
        self._requests: dict[JobId, ResourceRequest | None] = {}
        """What the kept jobs need."""
        self.kept: dict[JobId, Placement] = {}
        """Jobs that have kept their nodes so far. `find` may still move them."""
        self._kept_on: dict[str, list[JobId]] = {}
        self._boots_s = sorted({node.boot_s for node in self._nodes.values()})
        """How long nodes take until a job can run there; [0.0]: all are awake. Those that are ready sooner are taken first."""
        self._parts: dict[tuple[float, Access, int], list[str]] = {}
        """Boot time, access and free GPUs of a node -> such nodes."""
        self._idle: dict[tuple[Access, int], dict[str, list[tuple[float, str]]]] = {}
        """Access and size of a node -> switch -> boot times and names of idle nodes."""
        self._idle_count: dict[tuple[float, Access, int, str], int] = {}
        self._counted: set[str] = set()
        """Nodes that are in `_idle_count`."""
        self._offers: dict[tuple[int, int], _Offers] = {}
        self._ready = False

    def keep(
        self,
        job: JobId,
        placement: Placement,
        reservation: str,
        choice: str = "",
        request: ResourceRequest | None = None,
    ) -> bool:
        """Let a job stay where it is; False if its GPUs are not free there, or not open to this reservation and node choice."""
        for share in placement.shares:
            if share.node not in self._nodes or self._free[share.node] < share.gpus:
                return False
            _, kept_for, admitting = self._access[share.node]
            if kept_for != reservation or choice not in ("", *admitting):
                return False
        for share in placement.shares:
            self._free[share.node] -= share.gpus
            self._kept_on.setdefault(share.node, []).append(job)
        self._amounts.take(request, placement)
        self.kept[job], self._requests[job] = placement, request
        return True

    def find(
        self, configuration: Configuration, doors: Sequence[Door], request: ResourceRequest | None = None
    ) -> tuple[Placement | None, list[JobId]]:
        """Take nodes for a job, and name the kept jobs that have to leave them. Every `keep` comes before the first `find`.

        Args:
            configuration: what the job gets.
            doors: partitions of the job, each with its reservation and node choice, the preferred partition first.
            request: what the job needs beside GPUs, if that is known.
        """
        if not self._ready:
            self._ready = True
            for name in sorted(self._nodes):
                self._changed(name)
        for make_room in (False, True) if self.kept else (False,):
            for door in doors:
                names, moved = self._choose(configuration, door, request, make_room=make_room)
                if names:
                    return self._take(configuration, door[0], names, moved, request), moved
        return None, []

    def _choose(
        self, configuration: Configuration, door: Door, request: ResourceRequest | None, *, make_room: bool
    ) -> tuple[list[str], list[JobId]]:
        """Nodes for a job in this partition and reservation, and the jobs that have to leave them; none if they are too few."""
        count, per_node = configuration.nodes, configuration.gpus // configuration.nodes
        if make_room:
            return self._cheapest(configuration, per_node, door, request)
        short = self._short(request, per_node)
        if count > 1 and per_node in self._sizes:
            return self._whole(count, per_node, door, short), []
        return self._part(count, per_node, door, short), []

    def _short(self, request: ResourceRequest | None, gpus: int) -> set[str]:
        """Nodes that lack the CPUs or memory which a job needs beside this many GPUs."""
        return {name for name in self._amounts.nodes if not self._amounts.has(name, request, gpus)}

    def _take(
        self,
        configuration: Configuration,
        partition: str,
        names: list[str],
        moved: Iterable[JobId],
        request: ResourceRequest | None,
    ) -> Placement:
        for job in moved:
            held = self.kept.pop(job)
            self._amounts.take(self._requests.pop(job), held, -1)
            for share in held.shares:
                self._free[share.node] += share.gpus
                self._kept_on[share.node].remove(job)
                self._changed(share.node)
        per_node = configuration.gpus // configuration.nodes
        for name in names:
            self._free[name] -= per_node
            self._changed(name)
        shares = tuple(Share(name, per_node) for name in sorted(names))
        found = Placement(configuration.gpu_type, partition, shares)
        self._amounts.take(request, found)
        return found

    def _changed(self, name: str) -> None:
        """Sort a node in again after its free GPUs or its kept jobs have changed."""
        node, free = self._nodes[name], self._free[name]
        access = self._access[name]
        place = (node.boot_s, access, node.gpus, node.switch)
        if name in self._counted:
            self._counted.remove(name)
            self._idle_count[place] -= 1
        if free > 0:
            heapq.heappush(self._parts.setdefault((node.boot_s, access, free), []), name)
        if free == node.gpus > 0:
            self._counted.add(name)
            self._idle_count[place] = self._idle_count.get(place, 0) + 1
            by_switch = self._idle.setdefault((access, node.gpus), {})
            heapq.heappush(by_switch.setdefault(node.switch, []), (node.boot_s, name))
        for offers in self._offers.values():
            offers.stale.add(name)

    def _part(self, count: int, gpus: int, door: Door, short: Set[str]) -> list[str]:
        """The `count` nodes of a partition that have `gpus`, but none of `short`: those that are ready soonest, and of these the
        fullest."""
        open_to = [access for access in self._accesses if opens(door, access)]
        names: list[str] = []
        for boot_s in self._boots_s:
            for free in range(gpus, self._largest + 1):
                found: list[str] = []
                for access in open_to:
                    heap = self._parts.get((boot_s, access, free), [])
                    while heap and self._free[heap[0]] != free:
                        heapq.heappop(heap)
                    if count == 1 and heap and heap[0] not in short:
                        found.append(heap[0])
                    else:
                        found += {name for name in heap if self._free[name] == free} - short
                names += sorted(found)[: count - len(names)]
                if len(names) == count:
                    return names
        return []

    def _whole(self, count: int, gpus: int, door: Door, short: Set[str]) -> list[str]:
        """`count` idle nodes of `gpus` GPUs that are ready soonest, but none of `short`: of the switch with just enough, else of
        as few switches as possible."""
        found = self._enough_idle(count, gpus, door, short)
        if found is None:
            return []
        idle, most_s = found
        enough = [switch for switch, nodes in idle.items() if nodes >= count]
        if enough:
            switches = [min(enough, key=lambda switch: (idle[switch], switch))]
        else:
            switches = sorted(idle, key=lambda switch: (-idle[switch], switch))
        names: list[str] = []
        passed_over: set[str] = set()
        for switch in switches:
            heaps = [
                by_switch[switch]
                for (access, size), by_switch in self._idle.items()
                if size == gpus and opens(door, access) and switch in by_switch
            ]
            while len(names) < count and (ready := [heap for heap in heaps if heap and heap[0][0] <= most_s]):
                _, name = heapq.heappop(min(ready, key=lambda heap: heap[0]))
                if name in short:
                    passed_over.add(name)
                elif self._free[name] == gpus and name not in names[-1:]:  # a node may have two entries in a row
                    names.append(name)
        for name in passed_over:
            self._changed(name)
        return names

    def _enough_idle(self, count: int, gpus: int, door: Door, short: Set[str]) -> tuple[dict[str, int], float] | None:
        """Switch -> its idle nodes for `_whole`, and the shortest boot time with which these are `count` nodes at least."""
        idle: dict[str, int] = {}
        for most_s in self._boots_s:
            for (boot_s, access, size, switch), idle_nodes in self._idle_count.items():
                if boot_s == most_s and size == gpus and opens(door, access):
                    idle[switch] = idle.get(switch, 0) + idle_nodes
            for node in (self._nodes[name] for name in short & self._counted):
                if node.boot_s == most_s and node.gpus == gpus and opens(door, self._access[node.name]):
                    idle[node.switch] -= 1
            if sum(idle.values()) >= count:
                return idle, most_s
        return None

    def _cheapest(
        self, configuration: Configuration, gpus: int, door: Door, request: ResourceRequest | None
    ) -> tuple[list[str], list[JobId]]:
        """The nodes on which making room costs least, and the jobs that have to leave them."""
        key = (gpus, configuration.gpus)
        if key not in self._offers:
            self._offers[key] = _Offers(set(self._nodes))
        offers = self._offers[key]
        for name in offers.stale:
            departing = self._departing(name, gpus, configuration.gpus)
            cost = 0.0 if departing is None else sum(self._cost(job) for job in departing)
            offers.set(name, None if departing is None else (cost, name, departing))
        offers.stale.clear()

        def suits(offer: Offer) -> bool:
            _, name, departing = offer
            node = self._nodes[name]
            whole = configuration.nodes > 1 and gpus in self._sizes
            if not opens(door, self._access[name]) or (node.gpus != gpus and whole):
                return False
            if not self._amounts:
                return True
            after = self._amounts.copy()
            for job in departing:
                after.take(self._requests[job], self.kept[job], -1)
            return after.has(name, request, gpus)

        best = offers.cheapest(configuration.nodes, suits)
        return [name for _, name, _ in best], sorted({job for _, _, departing in best for job in departing})

    def _departing(self, name: str, gpus: int, smaller_than: int) -> tuple[JobId, ...] | None:
        """The cheapest set of smaller kept jobs whose departure frees `gpus` on this node; None: there is no such set."""
        missing = gpus - self._free[name]
        if missing <= 0:
            return ()
        cheapest: dict[int, tuple[float, tuple[JobId, ...]]] = {0: (0.0, ())}  # GPUs freed -> cost and jobs
        for job in self._kept_on.get(name, ()):
            if self.kept[job].gpus >= smaller_than:
                continue
            held = next(share.gpus for share in self.kept[job].shares if share.node == name)
            for freed, (cost, jobs) in list(cheapest.items()):
                more = (cost + self._cost(job), (*jobs, job))
                total = min(freed + held, missing)
                if total not in cheapest or more < cheapest[total]:
                    cheapest[total] = more
        return cheapest[missing][1] if missing in cheapest else None

    def _cost(self, job: JobId) -> float:
        return self._move_cost.get(job, float(self.kept[job].gpus))


Offer = tuple[float, str, tuple[JobId, ...]]
"""What making room on a node costs, the node, and the jobs that have to leave it."""


class _Offers:
    """What making room for jobs of one shape costs on each node. Offers of the nodes in `stale` are outdated."""

    def __init__(self, stale: set[str]) -> None:
        self.stale = stale
        self._now: dict[str, Offer] = {}
        self._heap: list[Offer] = []

    def set(self, name: str, offer: Offer | None) -> None:
        """Replace the node's offer; None: it has none."""
        if offer is None:
            self._now.pop(name, None)
        elif self._now.get(name) != offer:
            self._now[name] = offer
            heapq.heappush(self._heap, offer)

    def cheapest(self, count: int, suits: Callable[[Offer], bool]) -> list[Offer]:
        """The `count` cheapest offers of suitable nodes; an empty list if there are fewer."""
        found: list[Offer] = []
        passed: list[Offer] = []
        while len(found) < count and self._heap:
            offer = heapq.heappop(self._heap)
            if self._now.get(offer[1]) == offer and offer not in passed[-1:]:
                passed.append(offer)
                if suits(offer):
                    found.append(offer)
        for offer in passed:
            heapq.heappush(self._heap, offer)
        return found if len(found) == count else []
