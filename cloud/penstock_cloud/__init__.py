"""Clouds behind the burst manager (`penstock_scheduler.burst.manager`): EC2, and what runs on it. Read in this order:

1. `settings`: what may be launched, where, for how much. `catalogue`: instance types and prices.
2. `ec2`, `images`, `templates`, `failures`: one region of EC2 as a provider, and what EC2's errors mean.
3. `command`: any other cloud, behind a command of the admin's.
4. `programs`, `user_data`: how instances join Slurm.
5. `detached_runs`, `staging`, `cloud_runner`, `unpacking`: runs on instances that do not join.
6. `doctor`, `live`, `cost_report`, `cli`: `penstock cloud`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_cloud.ec2 import Ec2
    from penstock_scheduler.api.ports import Clock, CloudNodes
    from penstock_scheduler.burst.manager.manager import BurstManager
    from penstock_scheduler.rounds.settings import Settings
    from penstock_scheduler.store.sql import SqlStore


def open_cloud(settings: Settings, clock: Clock, store: SqlStore, nodes: CloudNodes) -> BurstManager:
    """EC2, and the commands of `[cloud.commands]`, for these nodes. Asks no provider yet. Raises ConfigError."""
    return _open(settings, clock, store, nodes, ec2=True)


def open_commands(settings: Settings, clock: Clock, store: SqlStore, nodes: CloudNodes) -> BurstManager:
    """The commands of `[cloud.commands]` alone, for these nodes. Asks no provider yet. Raises ConfigError."""
    from penstock_cloud.settings import CloudSettings
    from penstock_scheduler.people.errors import ConfigError

    if not settings.section(CloudSettings).commands:
        raise ConfigError('[daemon] cloud = "command" needs a section [cloud.commands.NAME] with command')
    return _open(settings, clock, store, nodes, ec2=False)


def _open(settings: Settings, clock: Clock, store: SqlStore, nodes: CloudNodes, *, ec2: bool) -> BurstManager:
    import random
    import threading

    from penstock_cloud import staging
    from penstock_cloud.catalogue import Fetcher, KeptCatalogue, file_of
    from penstock_cloud.command import Command, CommandClient
    from penstock_cloud.detached_runs import DetachedRuns
    from penstock_cloud.ec2 import Ec2, connect, connect_ssm
    from penstock_cloud.settings import CloudSettings
    from penstock_scheduler.burst.manager.manager import BurstManager
    from penstock_scheduler.burst.manager.places import Places, no_longer_set_up
    from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed, Provider
    from penstock_scheduler.burst.manager.share import SharedFolder
    from penstock_scheduler.burst.manager.worker import Rate, Yielding
    from penstock_scheduler.people.errors import ConfigError
    from penstock_scheduler.rounds.settings import DaemonSettings

    section, state_dir = settings.section(CloudSettings), settings.section(DaemonSettings).state_dir
    lock = threading.Lock()

    def region(name: str) -> Ec2:
        own = section.in_region(name)
        fetcher = Yielding(Fetcher(own), lock, store.leadership)
        file = file_of(state_dir, own.region, home=section.region)
        kept = KeptCatalogue(file, own.region, fetcher, section.refresh_h * 3600)
        ssm = connect_ssm(own)
        return Ec2(
            Yielding(connect(own), lock, store.leadership, Rate()),
            own,
            kept.now,
            kept,
            None if ssm is None else Yielding(ssm, lock, store.leadership),
            store,
        )

    def earlier_region(name: str) -> Provider:
        try:
            return region(name)
        except ConfigError as error:
            raise LaunchFailed(Kind.CONFIG, "", str(error)) from error

    guests = None
    if section.bucket is not None:
        bucket = staging.StagingBucket(
            Yielding(staging.connect(section), lock, store.leadership), section.bucket, str(section.site)
        )
        guests = DetachedRuns(section, SharedFolder(section.share), bucket)
    providers: list[Provider] = [region(name) for name in (section.region, *section.regions)] if ec2 else []
    for name, command in section.commands.items():
        client = Yielding(CommandClient(name, command), lock, store.leadership)
        providers.append(Command(name, str(section.site), client, section.price_days))
    places = Places(providers, earlier_region if ec2 else no_longer_set_up)
    return BurstManager(places, section, store, clock, nodes, random.Random(), guests, lock)  # noqa: S311
