"""GPUs as cells: what each GPU of a node does, and a small SVG picture of the node. Pure; see `world` for where it comes from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape

from penstock_scheduler.api.estimate_messages import Estimates
from penstock_scheduler.api.health_messages import LeaderHealth
from penstock_scheduler.api.history_messages import AllocationSpan, QueueEntry
from penstock_scheduler.api.messages import ClusterView, JobView, NodeView
from penstock_scheduler.daemon.service import views
from penstock_scheduler.daemon.service.api import Api
from penstock_scheduler.daemon.service.waits import numbered
from penstock_scheduler.people.drawing.svg import index
from penstock_scheduler.store.leadership.site_clock import site_time_s

ACROSS = 8
"""Most cells side by side."""
SIZE, PITCH = 10, 11
"""Units of the picture: a cell, and from one to the next."""


@dataclass(frozen=True, slots=True)
class Held:
    """A job on a GPU."""

    job: str
    user: str
    busy: float | None = None
    """Mean utilisation of the job's GPUs, in [0, 1]; None: not reported."""

    @property
    def idle(self) -> bool:
        """Whether the job does not use what it holds."""
        return self.busy is not None and self.busy < IDLE_BELOW


@dataclass(frozen=True, slots=True)
class Cell:
    """A GPU."""

    held: tuple[Held, ...] = ()
    """The jobs on it; more than one: they share it."""
    other: str = ""
    """What else has it: `plain` (a plain job), `hidden` (a job that the viewer may not see); empty: nothing."""


@dataclass(frozen=True, slots=True)
class NodeCells:
    """A node and its GPUs."""

    name: str
    gpu_type: str
    switch: str
    cells: tuple[Cell, ...]
    states: tuple[str, ...] = ()
    """What sets it apart, in words that a style has: `down`, `drained`, `reserved`, `cloud`."""
    note: str = ""
    """The same for people, such as the name of the reservation."""

    @property
    def idle(self) -> int:
        """GPUs that are allocated and not used."""
        return sum(any(held.idle for held in cell.held) for cell in self.cells)

    @property
    def used(self) -> int:
        """GPUs that somebody holds."""
        return sum(bool(cell.held or cell.other) for cell in self.cells)


def nodes_of(
    nodes: Iterable[NodeView],
    switches: Mapping[str, str],
    spans: Iterable[AllocationSpan],
    busy: Mapping[str, float],
    *,
    past: bool = False,
) -> list[NodeCells]:
    """The nodes with their cells, by GPU type, switch and name; last, nodes of the cloud.

    Args:
        nodes: the site's nodes.
        switches: node -> leaf switch.
        spans: what jobs hold, of those that the viewer may see.
        busy: job -> mean utilisation.
        past: whether the spans are of another time than `nodes`: then states and plain jobs are not known.
    """
    on: dict[str, list[AllocationSpan]] = defaultdict(list)
    clouds: dict[str, list[AllocationSpan]] = defaultdict(list)
    known = {node.name: node for node in nodes}
    for span in spans:
        for name in span.nodes:
            (on if name in known else clouds)[name].append(span)
    found = []
    for node in known.values():
        states, note = ((), "") if past else _states(node)
        cells = _cells(node.name, node.gpus, on[node.name], busy)
        if not past:
            visible = sum(bool(cell.held) for cell in cells)
            cells = _fill(cells, {"hidden": max(node.allocated - visible, 0), "plain": node.others})
        found.append(NodeCells(node.name, node.gpu_type, switches.get(node.name, ""), tuple(cells), states, note))
    for name, there in clouds.items():
        gpus = max(span.nodes[name] for span in there)
        states = ("cloud",) if any(span.where == "cloud" for span in there) else ()
        cells = _cells(name, gpus, there, busy)
        found.append(
            NodeCells(name, there[0].gpu_type, "", tuple(cells), states, "in the cloud" if states else "a former node")
        )
    return sorted(
        found, key=lambda node: (node.gpu_type, "cloud" in node.states, _natural(node.switch), _natural(node.name))
    )


def _natural(name: str) -> tuple[str, int, str]:
    """Sorts n2 before n10."""
    head = name.rstrip("0123456789")
    tail = name[len(head) :]
    return head, int(tail[:18] or 0), name


def _states(node: NodeView) -> tuple[tuple[str, ...], str]:
    states, notes = [], []
    if node.leave or (not node.may_start and "drain" in node.state.lower()):
        states.append("drained")
        notes.append("drained: its jobs are asked to leave" if node.leave else "drained")
    elif not node.may_start:
        states.append("down")
        notes.append(f"out of service ({node.state.lower()})" if node.state else "out of service")
    if node.out_of_reach:
        gpus = "1 free GPU" if node.out_of_reach == 1 else f"{node.out_of_reach} free GPUs"
        notes.append(f"{gpus} without free CPUs or memory beside them")
    if node.reservation:
        states.append("reserved")
        notes.append(f"reserved for {node.reservation}")
    if node.note:
        notes.append(node.note)
    return tuple(states), "; ".join(notes)


def _cells(name: str, gpus: int, spans: Sequence[AllocationSpan], busy: Mapping[str, float]) -> list[Cell]:
    """The cells of a node. Jobs whose indices are not known get the first ones that are left."""
    held: list[list[Held]] = [[] for _ in range(gpus)]
    unknown: list[tuple[Held, int]] = []
    for span in sorted(spans, key=lambda span: span.job):
        there = Held(span.job, span.user, None if (use := busy.get(span.job)) is None else round(use, 2))
        ids = None if span.gpu_ids is None else span.gpu_ids.get(name)
        if ids is None:
            unknown.append((there, span.nodes[name]))
            continue
        for each in ids:
            if 0 <= each < gpus:
                held[each].append(there)
    for there, count in unknown:
        for at in [at for at, jobs in enumerate(held) if not jobs][:count]:
            held[at].append(there)
    return [Cell(tuple(jobs)) for jobs in held]


def _fill(cells: list[Cell], others: Mapping[str, int]) -> list[Cell]:
    """Gives what else is held to free cells: on which GPU it is, is not known."""
    kinds = [kind for kind, count in others.items() for _ in range(count)]
    return [cell if cell.held or not kinds else Cell(other=kinds.pop(0)) for cell in cells]


def words(node: NodeCells) -> str:
    """The node in words, for those who do not see the picture."""
    parts = [f"{len(node.cells)} {node.gpu_type}", f"{node.used} in use"]
    parts += [f"{node.idle} of them idle"] if node.idle else []
    parts += [node.note] if node.note else []
    return f"{node.name}: {', '.join(parts)}"


@lru_cache(maxsize=16_384)
def picture(node: NodeCells) -> str:
    """The node's GPUs as SVG."""
    across = min(len(node.cells), ACROSS) or 1
    rows = -(-len(node.cells) // ACROSS) or 1
    parts = [
        _cell(cell, at % ACROSS * PITCH + 0.5, at // ACROSS * PITCH + 0.5, node.states)
        for at, cell in enumerate(node.cells)
    ]
    size = f'viewBox="0 0 {across * PITCH} {rows * PITCH}" width="{across * PITCH}" height="{rows * PITCH}"'
    return f'<svg class="cells" {size} aria-hidden="true">{"".join(parts)}</svg>'


def _cell(cell: Cell, x: float, y: float, states: Collection[str]) -> str:
    if not cell.held:
        kind = {"": "free", "hidden": "hidden-job"}.get(cell.other, cell.other)
        square = f'<rect class="{kind}" x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" rx="1.5"/>'
        if kind != "free":
            return square
        if "down" in states:
            return square + f'<path class="out" d="M{x + 2} {y + 2}l6 6m0-6l-6 6"/>'
        if "drained" in states:
            return square + f'<path class="out" d="M{x + 2} {y + 8}l6-6"/>'
        if "reserved" in states:
            return square + f'<circle class="kept" cx="{x + 5}" cy="{y + 5}" r="2"/>'
        return square
    wide = SIZE / len(cell.held)
    return "".join(_held(each, round(x + at * wide, 2), y, round(wide, 2)) for at, each in enumerate(cell.held))


def _held(held: Held, x: float, y: float, wide: float) -> str:
    job, colour = escape(held.job), index(held.job)
    place = f'x="{x}" width="{wide}"'
    if held.busy is None:
        return f'<rect class="c{colour}" data-job="{job}" {place} y="{y}" height="{SIZE}"/>'
    tall = round(SIZE * held.busy, 1)
    parts = [f'<rect class="c{colour} pale" data-job="{job}" {place} y="{y}" height="{SIZE}"/>']
    if tall:
        parts.append(f'<rect class="c{colour} over" {place} y="{round(y + SIZE - tall, 1)}" height="{tall}"/>')
    if held.idle:
        parts.append(f'<circle class="idle" cx="{x + wide / 2}" cy="{y + SIZE / 2}" r="2.2"/>')
    return "".join(parts)


BUSY_S = 600.0
"""Utilisation is shown as the mean over this time: the time that a GPU must be unused to be called idle."""
IDLE_BELOW = 0.02
"""Allocated GPUs with a mean utilisation below this share are idle."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class World:
    """The cluster, the queue and the live jobs at a time."""

    number: int
    """Grows with each reading."""
    time_s: float
    nodes: Sequence[NodeView]
    switches: Mapping[str, str]
    """Node -> its leaf switch; nodes without one are left out."""
    spans: Sequence[AllocationSpan]
    """Allocation spans that have not ended."""
    queue: Sequence[QueueEntry]
    """With positions."""
    jobs: Mapping[str, JobView]
    """Jobs that have not ended."""
    busy: Mapping[str, float]
    """Job -> mean utilisation of its GPUs, in [0, 1], of jobs that report it."""
    cluster: ClusterView
    leader: LeaderHealth | None
    """Which of several penstockd leads; None: not known."""
    estimates: Estimates | None = None
    """None: nothing has been estimated yet."""


def read(api: Api, number: int, busy: Mapping[str, float] | None = None) -> World:
    """Read the world from the store and from what the process knows. Raises StoreError.

    Args:
        number: of this reading.
        busy: the mean utilisation if it has been read lately; None: read it.
    """
    known, now_s = api.known, site_time_s()
    nodes = views.node_views(known, api.daemon.chosen.drains)
    jobs = {view.id: view for view in known.live()}
    if busy is None:
        busy = api.store.busy(tuple(jobs), now_s - BUSY_S)
    state = known.state
    return World(
        number=number,
        time_s=now_s,
        nodes=nodes,
        switches={node.name: node.switch for node in state.nodes if node.switch} if state is not None else {},
        spans=api.store.open_spans(),
        queue=numbered(api.store.waits()),
        jobs=jobs,
        busy=busy,
        cluster=views.cluster_view(known, api.daemon),
        estimates=known.estimates,
        leader=api.daemon.leader,
    )
