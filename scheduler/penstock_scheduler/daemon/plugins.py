"""Opens clusters and clouds: other packages register them as entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from penstock_scheduler.api.ports import Burst, Clock, CloudNodes, ClusterParts, Leadership, SpecCheck, Store
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.settings import Settings
from penstock_scheduler.store.leadership.lease import ALONE

CLUSTERS = "penstock.clusters"
"""Entry points (settings, clock, check, leadership) -> ClusterParts."""

CLOUDS = "penstock.clouds"
"""Entry points (settings, clock, store, cloud nodes) -> Burst."""


def open_cluster(
    name: str, settings: Settings, clock: Clock, check: SpecCheck, leadership: Leadership = ALONE
) -> ClusterParts:
    """The installed cluster of this name, which asks `leadership` before each write. Raises ConfigError."""
    parts: ClusterParts = _installed(CLUSTERS, "cluster", name)(settings, clock, check, leadership)
    return parts


def open_cloud(name: str, settings: Settings, clock: Clock, store: Store, nodes: CloudNodes | None) -> Burst:
    """The installed cloud of this name, for the cluster's cloud nodes. Raises ConfigError."""
    found = load_cloud(name)
    if nodes is None:
        raise ConfigError(
            "[daemon] cloud: the cluster has no nodes for it; name their partition in [slurm] cloud_partition"
        )
    cloud: Burst = found(settings, clock, store, nodes)
    return cloud


def load_cloud(name: str) -> Callable[..., Any]:
    """What opens the installed cloud of this name. Raises ConfigError."""
    return _installed(CLOUDS, "cloud", name)


def _installed(group: str, key: str, name: str) -> Callable[..., Any]:
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        raise ConfigError(
            f"[daemon] {key}={name!r} is not installed; installed are {', '.join(sorted(found)) or 'none'}"
        )
    loaded: Callable[..., Any] = found[name].load()
    return loaded
