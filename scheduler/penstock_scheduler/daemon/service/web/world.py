"""What pages show: read once for all viewers, whatever each of them may see of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock_scheduler.api.estimate_messages import Estimates
from penstock_scheduler.api.health_messages import LeaderHealth
from penstock_scheduler.api.history_messages import AllocationSpan, QueueEntry
from penstock_scheduler.api.messages import ClusterView, JobView, NodeView
from penstock_scheduler.daemon.service import views
from penstock_scheduler.daemon.service.api import Api
from penstock_scheduler.daemon.service.waits import numbered
from penstock_scheduler.store.leadership.site_clock import site_time_s

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
