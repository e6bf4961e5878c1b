"""Keeps the GPUs of jobs that move from all other jobs of Slurm, from the stop of the one run to the start of the next.

A move takes seconds, for which its GPUs are free. slurmctld would start ordinary jobs on them at once. Therefore a reservation
(`base.MOVES`) keeps the nodes to which stopped jobs are on their way. No job runs in it. Once a job is released with the highest
priority, the reservation ends, and Slurm starts that job first on the GPUs that it is for (decision 43).

`nodes_to_keep` is pure. `KeptNodes` makes, changes and ends the reservation. It ends by itself if penstockd dies.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from penstock_scheduler.model import host_of
from penstock_slurm.gateway import SlurmError, SlurmWriter
from penstock_slurm.gateway.base import MOVES_S

log = logging.getLogger(__name__)

RENEWED_S = MOVES_S / 2
"""How old the reservation becomes before its end is moved, s."""

RETRY_S = 30.0
"""How long Slurm is not asked again after it has refused the reservation, s."""


class MoveStage(enum.Enum):
    """How far a job with a placement is."""

    SAVING = enum.auto()
    """It runs where it was, and is about to leave."""
    STOPPED = enum.auto()
    """It has no GPUs, or is leaving them."""
    SENT = enum.auto()
    """Slurm may start it."""


@dataclass(frozen=True, slots=True)
class Move:
    """A job on its way to GPUs that are for it."""

    stage: MoveStage
    more: Mapping[str, int]
    """Node -> GPUs that it needs there beside those that it holds there."""


def nodes_to_keep(moves: Collection[Move], free: Mapping[str, int], emptying: Collection[str]) -> frozenset[str]:
    """The nodes on which no other job may start now.

    A node counts only while GPUs are free there or about to be. For a job that still runs elsewhere, no node is kept on which
    another one waits to start: that one has no GPUs, and the former keeps its own if it loses the new ones.

    Args:
        moves: the moves that are under way.
        free: node -> GPUs that no job holds in Slurm, less those of jobs that were sent there.
        emptying: nodes that jobs are leaving.
    """
    sent = {node for each in moves if each.stage is MoveStage.SENT for node in each.more}
    return frozenset(
        node
        for each in moves
        if each.stage is not MoveStage.SENT
        for node, gpus in each.more.items()
        if gpus > 0
        and (free.get(node, 0) > 0 or node in emptying)
        and (each.stage is MoveStage.STOPPED or node not in sent)
    )


@dataclass(slots=True)
class KeptNodes:
    """The reservation, as this process has made it. One that an earlier process left is changed or ended."""

    writer: SlurmWriter
    _hosts: frozenset[str] | None = field(default=None, init=False)
    """Hosts that it keeps, or None if an earlier process may have left it."""
    _made_s: float = field(default=0.0, init=False)
    _refused_s: float = field(default=-math.inf, init=False)

    def keep(self, nodes: Iterable[str], now_s: float) -> None:
        """Keep exactly these nodes. If Slurm refuses, the moves go on without protection, with an error in the log."""
        hosts = frozenset(map(host_of, nodes)) if now_s - self._refused_s >= RETRY_S else frozenset()
        if hosts == self._hosts and (not hosts or now_s - self._made_s < RENEWED_S):
            return
        before, self._hosts, self._made_s = self._hosts, hosts, now_s
        if not hosts:
            try:
                self.writer.keep_no_nodes()
            except SlurmError as error:
                if before is not None:
                    log.info("cannot end the reservation for moves, it ends by itself", extra={"text": str(error)})
            return
        names = sorted(hosts)
        # It may be there from an earlier process, or have ended meanwhile.
        refused = self._try(names, changes=bool(before))
        if refused is not None and self._try(names, changes=not before) is not None:
            self._hosts, self._refused_s = frozenset(), now_s
            log.error(
                "cannot keep the GPUs of jobs that move: ordinary jobs may take them",
                extra={"nodes": ",".join(names), "text": str(refused)},
            )

    def _try(self, hosts: list[str], *, changes: bool) -> SlurmError | None:
        try:
            self.writer.keep_nodes(hosts, changes=changes)
        except SlurmError as error:
            return error
        return None
