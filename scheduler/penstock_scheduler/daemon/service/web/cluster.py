"""The page of the cluster: every GPU a cell, and the jobs that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from html import escape
from weakref import WeakKeyDictionary

from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.daemon.service.api import Call
from penstock_scheduler.daemon.service.web.cells import IDLE_BELOW, NodeCells, World, nodes_of, picture, words
from penstock_scheduler.daemon.service.web.render import Fragments, block

TEMPLATE = "cluster.html"
SHOWN = 40
"""Most jobs in the list below the map."""
NAMED = 48
"""Up to so many nodes, the map shows their names; with more, one GPU type at a time does."""


@dataclass(frozen=True, slots=True)
class Query:
    """What part of the cluster to show."""

    gpu_type: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """The nodes of a GPU type, by switch."""

    name: str
    switches: Mapping[str, Sequence[NodeCells]]
    counts: Mapping[str, int]
    price: float | None


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds GPUs, as the viewer may see it."""

    job: str
    user: str
    name: str
    own: bool
    """Whether the viewer may open its page."""
    gpus: int
    gpu_type: str
    nodes: str
    busy: float | None
    idle: bool
    shared: bool
    cloud: bool
    since_s: float


Scope = str | None
"""Viewers of one scope see the same: None sees all jobs, "" all but reasons, and a name is a user that sees own jobs alone."""

_maps: WeakKeyDictionary[World, dict[tuple[Scope, Query], tuple[dict[str, str], str, Sequence[Kind]]]] = (
    WeakKeyDictionary()
)
"""World -> maps that have been drawn of it."""


def scope_of(call: Call) -> Scope:
    """The scope of a viewer."""
    if call.sees_all:
        return None
    return "" if call.may_see_of("jobs", "") else call.identity.user


def fragments(call: Call, world: World, query: Query) -> Fragments:
    """The page."""
    scope = scope_of(call)
    drawn = _maps.setdefault(world, {})
    if (scope, query) not in drawn:
        drawn[scope, query] = _map([span for span in world.spans if _sees(scope, span)], world, query)
    nodes, shape, kinds = drawn[scope, query]
    holders, count = _holders(call, world, query)
    parts = {
        "holders": block(TEMPLATE, "holders", rows="".join(map(_row, holders)), left=count - SHOWN),
        **nodes,
    }
    return Fragments(parts, shape, {"kinds": kinds, "query": query, "named": bool(query.gpu_type) or _few(kinds)})


def past(call: Call, world: World, query: Query, spans: Iterable[AllocationSpan]) -> dict[str, str]:
    """The map as it was when these spans held GPUs: id of a node's element -> its picture."""
    scope = scope_of(call)
    visible = [span for span in spans if _sees(scope, span)]
    found = nodes_of(world.nodes, world.switches, visible, {}, past=True)
    return {f"node-{node.name}": picture(node) for node in found if _chosen(node, query)}


def _sees(scope: Scope, span: AllocationSpan) -> bool:
    return not scope or span.user == scope


def _chosen(node: NodeCells, query: Query) -> bool:
    return (not query.gpu_type or node.gpu_type == query.gpu_type) and (not query.node or node.name == query.node)


def _few(kinds: Sequence[Kind]) -> bool:
    return sum(len(nodes) for kind in kinds for nodes in kind.switches.values()) <= NAMED


def _map(spans: Sequence[AllocationSpan], world: World, query: Query) -> tuple[dict[str, str], str, list[Kind]]:
    found = [node for node in nodes_of(world.nodes, world.switches, spans, world.busy) if _chosen(node, query)]
    kinds: dict[str, dict[str, list[NodeCells]]] = {}
    for node in found:
        place = "cloud" if "cloud" in node.states else node.switch
        kinds.setdefault(node.gpu_type, {}).setdefault(place, []).append(node)
    made = [
        Kind(
            name,
            switches,
            _counts([node for nodes in switches.values() for node in nodes]),
            world.cluster.prices.get(name),
        )
        for name, switches in kinds.items()
    ]
    parts = {f"node-{node.name}": picture(node) for node in found}
    parts |= {f"words-{node.name}": escape(words(node)) for node in found}
    parts |= {f"counts-{kind.name}": block(TEMPLATE, "counts", kind=kind) for kind in made}
    if query.node and found:
        parts["gpus"] = block(TEMPLATE, "gpus", node=found[0])
    shape = " ".join(f"{node.name}/{len(node.cells)}/{'+'.join(node.states)}" for node in found)
    return parts, shape, made


def _counts(nodes: Sequence[NodeCells]) -> dict[str, int]:
    counts: Counter[str] = Counter(nodes=len(nodes))
    for node in nodes:
        for cell in node.cells:
            counts["all"] += 1
            if cell.held or cell.other == "hidden":
                counts["held"] += 1
                counts["idle"] += any(held.idle for held in cell.held)
                counts["shared"] += len(cell.held) > 1
            elif cell.other:
                counts["plain"] += 1
            elif {"down", "drained"} & set(node.states):
                counts["out"] += 1
            else:
                counts["free"] += 1
    return counts


def _holders(call: Call, world: World, query: Query) -> tuple[list[Holder], int]:
    """The first jobs that hold GPUs, and how many there are: the viewer's own first, then idle ones, then by size."""
    scope, me = scope_of(call), call.identity.user
    types = {node.name: node.gpu_type for node in world.nodes} if query.gpu_type else {}

    def shows(span: AllocationSpan) -> bool:
        if not _sees(scope, span) or (query.node and query.node not in span.nodes):
            return False
        return not query.gpu_type or query.gpu_type in {span.gpu_type, *(types.get(name) for name in span.nodes)}

    def rank(span: AllocationSpan) -> tuple[bool, bool, int, str]:
        return span.user != me, world.busy.get(span.job, 1.0) >= IDLE_BELOW, -span.gpus, span.job

    found = [span for span in world.spans if shows(span)]
    return [_holder(call, world, span) for span in nsmallest(SHOWN, found, key=rank)], len(found)


def _holder(call: Call, world: World, span: AllocationSpan) -> Holder:
    own, busy = call.may_see(span.user), world.busy.get(span.job)
    view: JobView | None = world.jobs.get(span.job) if own else None
    return Holder(
        job=span.job,
        user=span.user,
        name=view.name if view is not None else "",
        own=own,
        gpus=span.gpus,
        gpu_type=span.gpu_type,
        nodes=", ".join(f"{name}:{count}" for name, count in list(span.nodes.items())[:4])
        + (f" and {len(span.nodes) - 4} more" if len(span.nodes) > 4 else ""),
        busy=busy,
        idle=busy is not None and busy < IDLE_BELOW,
        shared=span.shared,
        cloud=span.where == "cloud",
        since_s=span.from_s,
    )


@lru_cache(maxsize=16_384)
def _row(holder: Holder) -> str:
    return block(TEMPLATE, "holder", row=holder)
