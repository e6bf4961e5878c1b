"""The simulated cluster as an entry point of `penstock.clusters`, to try the daemon without a cluster."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock_scheduler.api.ports import Clock, ClusterParts, Leadership, SpecCheck
from penstock_scheduler.model.nodespec import DEFAULT_SPEC
from penstock_scheduler.rounds.settings import Settings
from penstock_scheduler.simulator.cluster import SimulatedCluster, nodes_from_spec


class SimulatedSettings(BaseModel):
    """Section `[simulated]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: str = Field(default=DEFAULT_SPEC, description="Nodes as TYPE:NODESxGPUS,... such as t4:6x4,a100:2x8.")


def open_cluster(settings: Settings, clock: Clock, check: SpecCheck, leadership: Leadership) -> ClusterParts:
    """An empty simulated cluster."""
    del check, leadership  # users submit no job specs to a simulated cluster
    nodes = nodes_from_spec(settings.section(SimulatedSettings).nodes)
    return ClusterParts(SimulatedCluster(nodes, (), clock))
