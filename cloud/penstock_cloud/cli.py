"""`penstock cloud`: commands for admins of bursting."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import typer

from penstock_cloud.command import Client, Command
from penstock_cloud.doctor import Finding
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst_manager.provider import LaunchFailed, Provider
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.settings import DaemonSettings, Settings, load_settings

app = typer.Typer(no_args_is_help=True, help="Clouds: prices, checks, and what runs there.")

CONFIG = typer.Option(Path("/etc/penstock/penstock.toml"), "--config", help="The daemon's settings file.")


def _regions(settings: Settings) -> tuple[CloudSettings, ...]:
    """The settings in each region of EC2; none where the site has commands alone."""
    alone = settings.section(DaemonSettings).cloud == "command"
    return () if alone else settings.section(CloudSettings).everywhere()


def _commands(settings: Settings) -> list[Command]:
    """The places behind commands of the admin's. Raises ConfigError."""
    section = settings.section(CloudSettings)
    return [
        Command(name, str(section.site), Client(name, command), section.price_days)
        for name, command in section.commands.items()
    ]


@app.command()
def refresh(config: Path = CONFIG) -> None:
    """Fetch instance types and today's prices. penstockd reads them by itself. Run it daily, and hourly for spot."""
    from penstock_cloud.catalogue import fetch, file_of, save
    from penstock_profiles.gpus import load_gpus

    settings = load_settings(config)
    home, state_dir = settings.section(CloudSettings), settings.section(DaemonSettings).state_dir
    for section in _regions(settings):
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        session = boto3.session.Session(region_name=section.region)
        names, now = section.instance_types, datetime.now(UTC)
        try:
            found = fetch(session, section.region, names, load_gpus(), now=now, endpoint=section.endpoint)
        except (BotoCoreError, ClientError) as error:
            raise ConfigError(
                f"EC2 does not answer in {section.region}: {error}; run `penstock cloud doctor`"
            ) from None
        save(found, file_of(state_dir, section.region, home=home.region))
        priced = sum(each.usd_per_h is not None for each in found.types.values())
        spot = sum(bool(each.spot_usd_per_h) for each in found.types.values())
        what = f"{len(found.types)} types with GPUs in {found.region}"
        typer.echo(f"{what}: {priced} with a price on demand, {spot} with spot prices")
    for place in _commands(settings):
        typer.echo(f"{place.name}: nothing to fetch; its command is asked for its prices once a minute")


@app.command()
def types(config: Path = CONFIG) -> None:
    """List the instance types that may be launched, and their prices."""
    from penstock_cloud.catalogue import file_of, load

    settings = load_settings(config)
    home, state_dir = settings.section(CloudSettings), settings.section(DaemonSettings).state_dir
    for section in _regions(settings):
        catalogue = load(file_of(state_dir, section.region, home=home.region), section.region)
        if catalogue is None:
            raise ConfigError(f"no instance types are known in {section.region}; run `penstock cloud refresh`")
        typer.echo(f"prices of {catalogue.region}, as of {catalogue.prices_as_of}, US dollars an hour")
        for name in section.instance_types:
            if (known := catalogue.types.get(name)) is None:
                typer.echo(f"{name:16} not known in this region")
                continue
            spot = min(known.spot_usd_per_h.values(), default=None)
            price = "?" if known.usd_per_h is None else f"{known.usd_per_h:.4f}"
            more = f"  spot {spot:.4f}" if spot else ""
            typer.echo(f"{name:16} {known.gpus} {known.gpu_type:10} {price:>9}{more}")
    for place in _commands(settings):
        now_s = datetime.now(UTC).timestamp()
        try:
            machines = place.offers(now_s)
        except LaunchFailed as error:
            raise ConfigError(f"{error}; run `penstock cloud doctor`") from None
        typer.echo(f"prices of {place.name}, US dollars an hour with volume and address")
        for each in machines:
            typer.echo(f"{each.line:16} {each.gpus} {each.gpu_type:10} {each.usd_per_h:>9.4f}")
        if why := place.prices(now_s):
            typer.echo(f"not offered: {why}")


@app.command()
def doctor(config: Path = CONFIG) -> None:
    """Check everything that a launch needs. Exit status 1 if a check fails."""

    settings: Settings = load_settings(config)
    home = settings.section(CloudSettings)
    wrong = 0
    for section in _regions(settings):
        if home.regions:
            typer.echo(f"in {section.region}:")
        for finding in _examined(settings, home, section):
            wrong += not finding.ok
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.check}: {finding.text}")
            if finding.remedy:
                typer.echo(f"     -> {finding.remedy}")
    for place in _commands(settings):
        why = place.check()
        wrong += bool(why)
        typer.echo(f"FAIL {place.name}: {why}" if why else f"ok   {place.name}: its command answers")
    if wrong:
        raise typer.Exit(1)


def _examined(settings: Settings, home: CloudSettings, section: CloudSettings) -> Iterator[Finding]:
    """The findings in one region. The staging bucket is checked with the region of `[cloud] region`."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    from penstock_cloud import staging
    from penstock_cloud.catalogue import file_of, load
    from penstock_cloud.doctor import examine
    from penstock_cloud.ec2 import connect

    ec2 = connect(section)
    quick = Config(connect_timeout=3, read_timeout=20, retries={"total_max_attempts": 2})
    try:
        session = boto3.session.Session(region_name=section.region)
        quotas = session.client("service-quotas", config=quick)
    except BotoCoreError as error:
        raise ConfigError(f"[cloud] region={section.region!r}: {error}") from None
    state_dir = settings.section(DaemonSettings).state_dir
    catalogue = load(file_of(state_dir, section.region, home=home.region), section.region)
    s3 = None if section.bucket is None or section.region != home.region else staging.connect(section)
    return examine(section, ec2, quotas, catalogue, lambda: os.access(section.share, os.W_OK), s3)


@app.command()
def policy(config: Path = CONFIG) -> None:
    """Print the least IAM policy that penstockd's role needs, for the cloud that the settings describe."""
    from penstock_cloud.doctor import policy as least

    typer.echo(json.dumps(least(load_settings(config).section(CloudSettings)), indent=2))


@app.command("list")
def list_(config: Path = CONFIG) -> None:
    """List the site's instances as their clouds report them, also those without a run."""
    from penstock_cloud.ec2 import Ec2, connect

    settings = load_settings(config)
    places: list[Provider] = [Ec2(connect(section), section) for section in _regions(settings)]
    for place in (*places, *_commands(settings)):
        try:
            found = place.list()
        except LaunchFailed as error:
            raise ConfigError(
                f"{place.name} does not list its instances: {error}; run `penstock cloud doctor`"
            ) from None
        for each in found:
            run, node = each.tags.get("run"), each.tags.get("node")
            typer.echo(f"{each.id}  {each.state:13} {each.instance_type:14} {each.zone:12} run {run}  node {node}")


@app.command()
def forget(run: str, config: Path = CONFIG) -> None:
    """Close a run whose record cannot be read, once its instances have ended. Its commitment stays in the ledger.

    Stop penstockd before, and start it afterwards.
    """
    from penstock_scheduler.burst_manager.book import Book
    from penstock_scheduler.store import open_store

    daemon = load_settings(config).section(DaemonSettings)
    store = open_store(daemon.store or daemon.state_dir, writer=True)
    try:
        bad = Book(store).unreadable.get(run)
        if bad is None:
            raise ConfigError(f"{run} is no open run with an unreadable record; `penstock doctor` names those")
        row = next(row for row in store.cloud_runs() if row.run == run)
        store.save_cloud_run(replace(row, state="over", ended_s=datetime.now(UTC).timestamp()))
    finally:
        store.close()
    typer.echo(f"run {run} of job {bad.job} is closed; what was committed to it stays in the ledger")


@app.command()
def resume(config: Path = CONFIG) -> None:
    """End protected mode, so that penstockd may launch again. Stop penstockd before, and start it afterwards."""
    from penstock_scheduler.burst_manager.instances import PROTECTED, PROTECTED_PLACES
    from penstock_scheduler.store import open_store

    daemon = load_settings(config).section(DaemonSettings)
    store = open_store(daemon.store or daemon.state_dir, writer=True)
    try:
        why = store.control(PROTECTED)
        places = store.control(PROTECTED_PLACES) or {}
        store.set_control(PROTECTED, None)
        store.set_control(PROTECTED_PLACES, None)
    finally:
        store.close()
    reasons = "; ".join(([] if why is None else [str(why)]) + list(places.values()))
    typer.echo(f"protected mode is off; it was on because {reasons}" if reasons else "protected mode was off")
