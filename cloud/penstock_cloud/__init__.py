"""Clouds behind the burst manager (`penstock_scheduler.burst_manager`): EC2, and what runs on it. Read in this order:

1. `settings`: what may be launched, where, for how much. `catalogue`: instance types and prices.
2. `ec2`, `failures`: one region of EC2 as a provider, and what EC2's errors mean.
3. `programs`, `user_data`: how instances join Slurm.
4. `detached_runs`, `staging`, `cloud_runner`: runs on instances that do not join.
5. `doctor`, `cli`: `penstock cloud`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_cloud.ec2 import Ec2
    from penstock_scheduler.burst_manager.manager import BurstManager
    from penstock_scheduler.ports import Clock, CloudNodes
    from penstock_scheduler.settings import Settings
    from penstock_scheduler.store import SqlStore


def open_cloud(settings: Settings, clock: Clock, store: SqlStore, nodes: CloudNodes) -> BurstManager:
    """The cloud that the section `[cloud]` describes, for these nodes. Asks no provider yet. Raises ConfigError."""
    import random
    import threading

    from penstock_cloud import staging
    from penstock_cloud.catalogue import Kept, file_of
    from penstock_cloud.detached_runs import DetachedRuns
    from penstock_cloud.ec2 import Ec2, connect
    from penstock_cloud.settings import CloudSettings
    from penstock_scheduler.burst_manager.manager import BurstManager
    from penstock_scheduler.burst_manager.places import Places
    from penstock_scheduler.burst_manager.share import Share
    from penstock_scheduler.burst_manager.worker import Yielding
    from penstock_scheduler.settings import DaemonSettings

    section, state_dir = settings.section(CloudSettings), settings.section(DaemonSettings).state_dir
    lock = threading.Lock()

    def region(name: str) -> Ec2:
        own = section.in_region(name)
        kept = Kept(file_of(state_dir, own.region, home=section.region), own.region)
        return Ec2(Yielding(connect(own), lock), own, kept.now)

    guests = None
    if section.bucket is not None:
        bucket = staging.StagingBucket(Yielding(staging.connect(section), lock), section.bucket, str(section.site))
        guests = DetachedRuns(section, Share(section.share), bucket)
    places = Places([region(name) for name in (section.region, *section.regions)], region)
    return BurstManager(places, section, store, clock, nodes, random.Random(), guests, lock)  # noqa: S311
