"""The files through which the daemon and the agents talk: statuses, orders, and which events were taken.

`penstock_scheduler.api.agent_messages` says what is in them. What the daemon ordered and took is also in the spool, so the next
daemon learns what happened while no daemon ran, and reports nothing twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from penstock_profiles.files import open_regular, write_whole
from penstock_profiles.wire import read
from penstock_scheduler.api.agent_messages import (
    MAX_BYTES,
    Contained,
    NodeOrder,
    NodeStatus,
    NumberedPack,
    OrderedGroup,
    OrderedJob,
    Taken,
    XidSeen,
    agent_folder,
    agents_folder,
    order_file,
    status_file,
    taken_file,
)
from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store.leadership.lease import ALONE
from penstock_scheduler.store.spool import led
from penstock_slurm.share.node_sharing import Devices, Told

log = logging.getLogger(__name__)

Numbered = TypeVar("Numbered", NumberedPack, Contained, XidSeen)

ORDERS_KEPT = 64
"""Newest orders to a node whose devices are remembered, because its agent may still carry them out."""


def read_status(spool: Path, node: str) -> NodeStatus | None:
    """What the agent of a node reported last; None: nothing that can be read."""
    found = _read(status_file(spool, node))
    try:
        return None if found is None else read(NodeStatus, found)
    except ValueError as error:
        log.warning("agent status ignored", extra={"node": node, "text": str(error)[:300]})
        return None


def nodes_with_agents(spool: Path, nodes: Collection[str]) -> list[str]:
    """Those of these nodes that have a folder of an agent; all of them if that cannot be told."""
    try:
        names = {*os.listdir(agents_folder(spool))}
    except FileNotFoundError:
        return []
    except OSError:
        return [*nodes]
    return [name for name in nodes if name in names]


class Orders:
    """The orders to the agents."""

    def __init__(self, spool: Path, leadership: Leadership = ALONE) -> None:
        self._spool, self._leadership = spool, leadership
        self._orders: dict[str, NodeOrder] = {}
        self._promised: dict[str, dict[int, Devices]] = {}
        """Node -> number of an order -> devices that the order lets the agent bind jobs to."""
        self._recalled: set[str] = set()
        """Nodes whose order of the previous daemon was searched for."""

    def recall(self, nodes: Iterable[str]) -> None:
        """Read the orders of the previous daemon, once: agents may still carry them out, and their jobs may run."""
        for node in {*nodes} - self._recalled:
            self._recalled.add(node)
            if (found := _read(order_file(self._spool, node))) is None:
                continue
            try:
                self._orders[node] = read(NodeOrder, found)
            except ValueError as error:
                log.warning("cannot read the old order to an agent", extra={"node": node, "text": str(error)[:300]})
            else:
                self._promise(self._orders[node])

    @property
    def given(self) -> bool:
        """Whether any agent has had an order."""
        return bool(self._orders)

    def to(self, node: str) -> NodeOrder | None:
        """The last order to the agent of a node."""
        return self._orders.get(node)

    def promised(self, node: str, status: NodeStatus | None) -> Devices:
        """Devices of the order that the agent carries out, and of orders that it has not read yet."""
        done = status.order if status is not None else 0
        kept = self._promised.get(node, {})
        return frozenset[int]().union(*(devices for number, devices in kept.items() if number >= done))

    def write(
        self,
        node: str,
        groups: Sequence[Told],
        jobs: tuple[OrderedJob, ...],
        *,
        status: NodeStatus | None,
        gpu_type: str,
        now_s: float,
    ) -> None:
        """Write an order to the agent of a node if it differs from the last one. Raises StoreError."""
        before = self._orders.get(node)
        number = max(before.number if before is not None else 0, status.order if status is not None else 0)
        order = NodeOrder(
            node=node,
            number=number,
            written_s=now_s,
            groups=tuple(
                OrderedGroup(shared=group, devices=tuple(sorted(devices)), gpu_type=gpu_type)
                for group, devices in groups
            ),
            jobs=jobs,
        )
        if before is not None and before.model_copy(update={"written_s": order.written_s}) == order:
            return
        if before is None and not order.groups and not order.jobs and status is None:
            return
        order = order.model_copy(update={"number": number + 1})
        path = order_file(self._spool, node)
        try:
            agent_folder(self._spool, node).mkdir(parents=True, exist_ok=True)
            with self._leadership.write("spool", f"order {order.number} of {node}"):
                write_whole(path, order.model_dump_json(), **led(self._leadership))
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror}; the agent of {node} gets no orders until this is fixed"
            ) from None
        self._orders[node] = order
        self._promise(order)

    def _promise(self, order: NodeOrder) -> None:
        kept = self._promised.setdefault(order.node, {})
        kept[order.number] = frozenset(device for group in order.groups for device in group.devices)
        for number in sorted(kept)[:-ORDERS_KEPT]:
            del kept[number]


class Events:
    """Which of the agents' numbered events were taken."""

    def __init__(self, spool: Path, leadership: Leadership = ALONE) -> None:
        self._spool, self._leadership = spool, leadership
        self._statuses: Mapping[str, NodeStatus] = {}
        self._taken: dict[str, Taken] = {}
        """Node -> the events that were taken."""

    def saw(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Take over what the agents report. If no daemon recorded what it took, all present events count as taken."""
        self._statuses = statuses
        for node, status in statuses.items():
            taken = self._taken.get(node) or self._left(node)
            if taken is None:
                newest = {
                    kind: max((each.number for each in some), default=0)
                    for kind, some in (("packs", status.packs), ("contained", status.contained), ("xids", status.xids))
                }
                self._keep(node, Taken(history=status.history, **newest))
            else:
                self._taken[node] = taken if taken.history == status.history else Taken(history=status.history)

    def news(self, kind: str, of: Callable[[NodeStatus], Sequence[Numbered]]) -> list[tuple[str, Numbered]]:
        """Node and event, for each event that was not taken yet."""
        return [
            (node, each)
            for node, status in self._statuses.items()
            for each in of(status)
            if each.number > getattr(self._taken[node], kind)
        ]

    def take(self, kind: str, of: Callable[[NodeStatus], Sequence[Numbered]]) -> list[tuple[str, Numbered]]:
        """Take these events: no daemon will see them again."""
        news = self.news(kind, of)
        for node, number in {node: each.number for node, each in news}.items():
            self._keep(node, self._taken[node].model_copy(update={kind: number}))
        return news

    def _left(self, node: str) -> Taken | None:
        """What the previous daemon has recorded as taken."""
        found = _read(taken_file(self._spool, node))
        try:
            return None if found is None else read(Taken, found)
        except ValueError:
            log.warning("cannot read which events of an agent were taken", extra={"node": node})
            return None

    def _keep(self, node: str, taken: Taken) -> None:
        self._taken[node] = taken
        path = taken_file(self._spool, node)
        try:
            with self._leadership.write("spool", f"events taken of {node}"):
                write_whole(path, taken.model_dump_json(), **led(self._leadership))
        except OSError as error:
            text = f"{path}: {error.strerror}; after a restart the daemon would report the same events again"
            log.warning("cannot record which events of an agent were taken", extra={"node": node, "text": text})


def _read(path: Path) -> bytes | None:
    """The content of a file in the spool; None: it is missing, too large, or no regular file."""
    try:
        with open_regular(path) as file:
            found = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    return found if len(found) <= MAX_BYTES else None
