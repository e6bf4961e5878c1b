"""From configurations to nodes: which GPUs where.

Rules: a job on part of a node is never split over two; a job on several nodes takes them whole, and shares none, unless it is of
a fixed size that no nodes have (10 GPUs on nodes of 8), and takes the same part of each; a job that
keeps its configuration keeps its nodes, unless it stands in the way; parts of nodes are filled best-fit; several nodes are
taken from one switch where that is possible, from the one with the fewest free.

Jobs are placed from the largest to the smallest. One that finds no room makes some: of the nodes where smaller jobs could go,
it takes those where that costs least, and the smaller jobs are placed again in their turn.

Where the nodes of a type have one size, a power of two, all GPUs are ours, and every job that could use one node of the type can
use all, this places whatever fits by number of GPUs: by the time a job of r GPUs is placed, every node holds a multiple of r
in jobs that are as large or larger, so what smaller jobs and nobody hold there is a multiple of r too; and as the sum over the
nodes is at least r, one of them has r. Elsewhere a job may be left over, and is named.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.model import Configuration, JobId, Node, Placement, Share


@dataclass(frozen=True, slots=True)
class Placed:
    """What came of a placing."""

    placements: dict[JobId, Placement] = field(default_factory=dict)
    made_room_for: dict[JobId, JobId] = field(default_factory=dict)
    """Jobs that could have kept their nodes, and the job that has them now."""
    left_over: tuple[JobId, ...] = ()
    """Jobs for which there was no room in one piece."""


def place(
    nodes: Sequence[Node],
    wanted: Mapping[JobId, Configuration],
    partitions: Mapping[JobId, tuple[str, ...]],
    current: Mapping[JobId, Placement],
    pinned: Mapping[JobId, Placement],
    *,
    reservations: Mapping[JobId, str] | None = None,
    move_cost: Mapping[JobId, float] | None = None,
) -> Placed:
    """Place every job of `wanted`.

    Args:
        nodes: all nodes; unusable ones offer nothing.
        wanted: configuration per job. Where it equals the job's `current` placement's, the job should stay.
        partitions: partitions that each wanted job may use, the preferred one first.
        current: placements now held by wanted jobs.
        pinned: placements of other jobs, which must stay.
        reservations: of jobs that run in one: they use its nodes, and nobody else does.
        move_cost: GPU-seconds of work that moving a job costs, >= 0; None or absent: its GPUs.
    """
    placements: dict[JobId, Placement] = {}
    made_room_for: dict[JobId, JobId] = {}
    left_over: list[JobId] = []
    inside = reservations or {}
    by_type: dict[str, dict[JobId, Configuration]] = {}
    for job, configuration in wanted.items():
        by_type.setdefault(configuration.gpu_type, {})[job] = configuration
    for gpu_type, todo in sorted(by_type.items()):
        room = _Room([node for node in nodes if node.gpu_type == gpu_type], move_cost or {})
        for placement in pinned.values():
            if placement.gpu_type == gpu_type:
                room.pin(placement)
        queue = []
        for job, configuration in todo.items():
            held = current.get(job)
            stays = held is not None and held.configuration == configuration and held.partition in partitions[job]
            if not (stays and held is not None and room.keep(job, held, inside.get(job, ""))):
                queue.append((-configuration.gpus, -configuration.nodes, job))
        heapq.heapify(queue)
        while queue:
            _, _, job = heapq.heappop(queue)
            found, moved = room.find(todo[job], [(name, inside.get(job, "")) for name in partitions[job]])
            if found is None:
                left_over.append(job)
                continue
            placements[job] = found
            for other in moved:
                made_room_for[other] = job
                heapq.heappush(queue, (-todo[other].gpus, -todo[other].nodes, other))
        placements |= room.kept
    return Placed(
        placements, {job: by for job, by in made_room_for.items() if job not in left_over}, tuple(sorted(left_over))
    )


Door = tuple[str, str]
"""A partition, and the reservation that a job runs in, empty for none."""

Inside = tuple[tuple[str, ...], str]
"""Partitions of a node, and the reservation that it is kept for."""


def _inside(node: Node) -> Inside:
    return node.partitions, node.reservation


def _opens(door: Door, inside: Inside) -> bool:
    return door[0] in inside[0] and door[1] == inside[1]


class _Room:
    """The nodes of one GPU type while jobs are placed on them.

    Heaps hold node names; an entry that is no longer true is passed over when it comes up, so that a change costs O(log n).
    """

    def __init__(self, nodes: Iterable[Node], move_cost: Mapping[JobId, float]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._free = {name: node.gpus_for_us for name, node in self._nodes.items()}
        self._insides = sorted({_inside(node) for node in self._nodes.values()})
        self._largest = max(self._free.values(), default=0)
        self._sizes = {node.gpus for node in self._nodes.values()}
        self._move_cost = move_cost
        self.kept: dict[JobId, Placement] = {}
        """Jobs that have kept their nodes so far, and may still be asked to leave them."""
        self._kept_on: dict[str, list[JobId]] = {}
        self._parts: dict[tuple[Inside, int], list[str]] = {}
        """Where a node is and its free GPUs -> nodes."""
        self._idle: dict[tuple[Inside, int], dict[str, list[str]]] = {}
        """Where a node is and its GPUs -> switch -> idle nodes."""
        self._idle_count: dict[tuple[Inside, int, str], int] = {}
        self._counted: set[str] = set()
        """Nodes that are in `_idle_count`."""
        self._offers: dict[tuple[int, int], _Offers] = {}
        self._ready = False

    def pin(self, placement: Placement) -> None:
        """Take the GPUs of a job that must stay."""
        for share in placement.shares:
            if share.node in self._free:
                self._free[share.node] -= share.gpus

    def keep(self, job: JobId, placement: Placement, reservation: str) -> bool:
        """Let a job stay where it is; False if it has no room there any more."""
        for share in placement.shares:
            node = self._nodes.get(share.node)
            if node is None or node.reservation != reservation or self._free[share.node] < share.gpus:
                return False
        for share in placement.shares:
            self._free[share.node] -= share.gpus
            self._kept_on.setdefault(share.node, []).append(job)
        self.kept[job] = placement
        return True

    def find(self, configuration: Configuration, doors: Sequence[Door]) -> tuple[Placement | None, list[JobId]]:
        """Nodes for a job, taken; and the jobs that left them for it. All pins and kept jobs must be told before.

        `doors` are the ways in, the preferred one first.
        """
        if not self._ready:
            self._ready = True
            for name in sorted(self._nodes):
                self._changed(name)
        per_node = configuration.gpus // configuration.nodes
        for make_room in (False, True):
            for door in doors:
                moved: list[JobId] = []
                if make_room:
                    names, moved = self._cheapest(configuration, per_node, door)
                elif configuration.nodes > 1 and per_node in self._sizes:
                    names = self._whole(configuration.nodes, per_node, door)
                else:
                    names = self._part(configuration.nodes, per_node, door)
                if names:
                    for other in moved:
                        for share in self.kept.pop(other).shares:
                            self._free[share.node] += share.gpus
                            self._kept_on[share.node].remove(other)
                            self._changed(share.node)
                    for name in names:
                        self._free[name] -= per_node
                        self._changed(name)
                    shares = tuple(Share(name, per_node) for name in sorted(names))
                    return Placement(configuration.gpu_type, door[0], shares), moved
        return None, []

    def _changed(self, name: str) -> None:
        """Enter a node where it belongs, after its free GPUs or its jobs have changed."""
        node, free = self._nodes[name], self._free[name]
        inside = _inside(node)
        place = (inside, node.gpus, node.switch)
        if name in self._counted:
            self._counted.remove(name)
            self._idle_count[place] -= 1
        if free > 0:
            heapq.heappush(self._parts.setdefault((inside, free), []), name)
        if free == node.gpus > 0:
            self._counted.add(name)
            self._idle_count[place] = self._idle_count.get(place, 0) + 1
            by_switch = self._idle.setdefault((inside, node.gpus), {})
            heapq.heappush(by_switch.setdefault(node.switch, []), name)
        for offers in self._offers.values():
            offers.stale.add(name)

    def _part(self, count: int, gpus: int, door: Door) -> list[str]:
        """The `count` nodes of a partition with the fewest free GPUs that have `gpus`."""
        open_to = [inside for inside in self._insides if _opens(door, inside)]
        names: list[str] = []
        for free in range(gpus, self._largest + 1):
            found: list[str] = []
            for inside in open_to:
                heap = self._parts.get((inside, free), [])
                while heap and self._free[heap[0]] != free:
                    heapq.heappop(heap)
                found += heap[:1] if count == 1 else {name for name in heap if self._free[name] == free}
            names += sorted(found)[: count - len(names)]
            if len(names) == count:
                return names
        return []

    def _whole(self, count: int, gpus: int, door: Door) -> list[str]:
        """`count` idle nodes of `gpus` GPUs: of the switch with just enough, else of as few switches as possible."""
        idle: dict[str, int] = {}
        for (inside, size, switch), idle_nodes in self._idle_count.items():
            if size == gpus and _opens(door, inside):
                idle[switch] = idle.get(switch, 0) + idle_nodes
        if sum(idle.values()) < count:
            return []
        enough = [switch for switch, nodes in idle.items() if nodes >= count]
        if enough:
            switches = [min(enough, key=lambda switch: (idle[switch], switch))]
        else:
            switches = sorted(idle, key=lambda switch: (-idle[switch], switch))
        names: list[str] = []
        for switch in switches:
            heaps = [
                by_switch[switch]
                for (inside, size), by_switch in self._idle.items()
                if size == gpus and _opens(door, inside) and switch in by_switch
            ]
            while len(names) < count and any(heaps):
                name = heapq.heappop(min((heap for heap in heaps if heap), key=lambda heap: heap[0]))
                if self._free[name] == gpus and name not in names[-1:]:  # a name comes up twice in a row
                    names.append(name)
        return names

    def _cheapest(self, configuration: Configuration, gpus: int, door: Door) -> tuple[list[str], list[JobId]]:
        """The nodes where making room costs least, and who has to leave them."""
        key = (gpus, configuration.gpus)
        if key not in self._offers:
            self._offers[key] = _Offers(set(self._nodes))
        offers = self._offers[key]
        for name in offers.stale:
            departing = self._departing(name, gpus, configuration.gpus)
            cost = 0.0 if departing is None else sum(self._cost(job) for job in departing)
            offers.set(name, None if departing is None else (cost, name, departing))
        offers.stale.clear()

        def suits(name: str) -> bool:
            node = self._nodes[name]
            whole = configuration.nodes > 1 and gpus in self._sizes
            return _opens(door, _inside(node)) and (node.gpus == gpus or not whole)

        best = offers.cheapest(configuration.nodes, suits)
        return [name for _, name, _ in best], sorted({job for _, _, departing in best for job in departing})

    def _departing(self, name: str, gpus: int, smaller_than: int) -> tuple[JobId, ...] | None:
        """The cheapest set of smaller kept jobs that gives `gpus` on this node when it leaves; None if none does."""
        missing = gpus - self._free[name]
        if missing <= 0:
            return ()
        cheapest: dict[int, tuple[float, tuple[JobId, ...]]] = {0: (0.0, ())}  # GPUs freed -> at what cost, by whom
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
"""What making room on a node costs, the node, and who has to leave it."""


class _Offers:
    """What making room for jobs of one shape costs on each node; nodes in `stale` are to be asked anew."""

    def __init__(self, stale: set[str]) -> None:
        self.stale = stale
        self._now: dict[str, Offer] = {}
        self._heap: list[Offer] = []

    def set(self, name: str, offer: Offer | None) -> None:
        """The node's offer from now on, None if it has none."""
        if offer is None:
            self._now.pop(name, None)
        elif self._now.get(name) != offer:
            self._now[name] = offer
            heapq.heappush(self._heap, offer)

    def cheapest(self, count: int, suits: Callable[[str], bool]) -> list[Offer]:
        """The `count` cheapest offers of nodes that suit; none if there are not as many."""
        found: list[Offer] = []
        passed: list[Offer] = []
        while len(found) < count and self._heap:
            offer = heapq.heappop(self._heap)
            if self._now.get(offer[1]) == offer and offer not in passed[-1:]:
                passed.append(offer)
                if suits(offer[1]):
                    found.append(offer)
        for offer in passed:
            heapq.heappush(self._heap, offer)
        return found if len(found) == count else []
