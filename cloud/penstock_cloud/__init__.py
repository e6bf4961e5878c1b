"""Bursting to EC2: the catalogue of instance types, the provisioner, and the cloud behind the port `Burst`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_cloud.ec2 import Ec2Cloud
    from penstock_scheduler.ports import Clock, CloudNodes
    from penstock_scheduler.settings import Settings
    from penstock_scheduler.store import SqlStore


def open_cloud(settings: Settings, clock: Clock, store: SqlStore, nodes: CloudNodes) -> Ec2Cloud:
    """The EC2 that the section `[cloud]` describes, for these nodes. Asks EC2 nothing yet. Raises ConfigError."""
    import random

    from penstock_cloud import staging
    from penstock_cloud.catalogue import FILE, Kept
    from penstock_cloud.ec2 import Ec2Cloud
    from penstock_cloud.fleet import Fleet, connect
    from penstock_cloud.regions import Regions
    from penstock_cloud.settings import CloudSettings
    from penstock_scheduler.settings import DaemonSettings

    section = settings.section(CloudSettings)
    kept = Kept(settings.section(DaemonSettings).state_dir / FILE, section.region)
    regions = Regions(Fleet(connect(section), section), lambda region: Fleet(connect(section, region), section))
    bucket = section.bucket
    s3 = None if bucket is None else staging.StagingBucket(staging.connect(section), bucket, str(section.site))
    return Ec2Cloud(regions, section, store, clock, kept.now, nodes, random.Random(), s3)  # noqa: S311
