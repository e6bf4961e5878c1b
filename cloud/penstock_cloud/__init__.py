"""Bursting to EC2. Read in this order:

1. `settings`: what may be launched, where, for how much. `catalogue`: instance types and prices.
2. `ec2`: the cloud behind the port `Burst`, and the states of a run. `runs`: a run's record. `worker`: its thread.
3. `book`: open runs, ledger and budgets. `offers`: what can be ordered now. `history`: the waiting policy.
4. `instances`, `regions`, `fleet`, `failures`: launching, listing and ending instances, and what EC2's errors mean.
5. `cluster_side`, `share`, `programs`, `user_data`: how instances join Slurm.
6. `detached_runs`, `staging`, `cloud_runner`: runs on instances that do not join.
7. `doctor`, `cli`: `penstock cloud`.
"""

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
    import threading

    from penstock_cloud import staging
    from penstock_cloud.catalogue import FILE, Kept
    from penstock_cloud.ec2 import Ec2Cloud
    from penstock_cloud.fleet import Fleet, connect
    from penstock_cloud.regions import Regions
    from penstock_cloud.settings import CloudSettings
    from penstock_cloud.worker import Yielding
    from penstock_scheduler.settings import DaemonSettings

    section = settings.section(CloudSettings)
    kept = Kept(settings.section(DaemonSettings).state_dir / FILE, section.region)
    lock = threading.Lock()

    def fleet(region: str) -> Fleet:
        return Fleet(Yielding(connect(section, region), lock), section)

    bucket = section.bucket
    s3 = (
        None
        if bucket is None
        else staging.StagingBucket(Yielding(staging.connect(section), lock), bucket, str(section.site))
    )
    rng = random.Random()  # noqa: S311
    return Ec2Cloud(Regions(fleet(section.region), fleet), section, store, clock, kept.now, nodes, rng, s3, lock)
