"""`penstock cloud`: commands for admins of bursting."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import typer

from penstock_scheduler.errors import ConfigError
from penstock_scheduler.settings import DaemonSettings, Settings, load_settings

app = typer.Typer(no_args_is_help=True, help="EC2: prices, checks, and what runs there.")

CONFIG = typer.Option(Path("/etc/penstock/penstock.toml"), "--config", help="The daemon's settings file.")


@app.command()
def refresh(config: Path = CONFIG) -> None:
    """Fetch instance types and today's prices. penstockd reads them by itself. Run it daily, and hourly for spot."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    from penstock_cloud.catalogue import FILE, fetch, save
    from penstock_cloud.settings import CloudSettings
    from penstock_profiles.gpus import load_gpus

    settings = load_settings(config)
    section = settings.section(CloudSettings)
    session = boto3.session.Session(region_name=section.region)
    try:
        found = fetch(
            session,
            section.region,
            section.instance_types,
            load_gpus(),
            now=datetime.now(UTC),
            endpoint=section.endpoint,
        )
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(f"EC2 does not answer: {error}; run `penstock cloud doctor`") from None
    save(found, settings.section(DaemonSettings).state_dir / FILE)
    priced = sum(each.usd_per_h is not None for each in found.types.values())
    spot = sum(bool(each.spot_usd_per_h) for each in found.types.values())
    typer.echo(
        f"{len(found.types)} types with GPUs in {found.region}: {priced} with a price on demand, {spot} with spot prices"
    )


@app.command()
def types(config: Path = CONFIG) -> None:
    """List the instance types that may be launched, and their prices."""
    from penstock_cloud.catalogue import FILE, load
    from penstock_cloud.settings import CloudSettings

    settings = load_settings(config)
    section = settings.section(CloudSettings)
    catalogue = load(settings.section(DaemonSettings).state_dir / FILE, section.region)
    if catalogue is None:
        raise ConfigError(f"no instance types are known in {section.region}; run `penstock cloud refresh`")
    typer.echo(f"prices of {catalogue.region}, as of {catalogue.prices_as_of}, US dollars an hour")
    for name in section.instance_types:
        if (known := catalogue.types.get(name)) is None:
            typer.echo(f"{name:16} not known in this region")
            continue
        spot = min(known.spot_usd_per_h.values(), default=None)
        price = "?" if known.usd_per_h is None else f"{known.usd_per_h:.4f}"
        typer.echo(f"{name:16} {known.gpus} {known.gpu_type:10} {price:>9}" + (f"  spot {spot:.4f}" if spot else ""))


@app.command()
def doctor(config: Path = CONFIG) -> None:
    """Check everything that a launch needs. Exit status 1 if a check fails."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    from penstock_cloud import staging
    from penstock_cloud.catalogue import FILE, load
    from penstock_cloud.doctor import examine
    from penstock_cloud.fleet import connect
    from penstock_cloud.settings import CloudSettings

    settings: Settings = load_settings(config)
    section = settings.section(CloudSettings)
    ec2 = connect(section)
    quick = Config(connect_timeout=3, read_timeout=20, retries={"total_max_attempts": 2})
    try:
        session = boto3.session.Session(region_name=section.region)
        quotas = session.client("service-quotas", config=quick)
    except BotoCoreError as error:
        raise ConfigError(f"[cloud] region={section.region!r}: {error}") from None
    catalogue = load(settings.section(DaemonSettings).state_dir / FILE, section.region)
    wrong = 0
    s3 = None if section.bucket is None else staging.connect(section)
    for finding in examine(section, ec2, quotas, catalogue, lambda: os.access(section.share, os.W_OK), s3):
        wrong += not finding.ok
        typer.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.check}: {finding.text}")
        if finding.remedy:
            typer.echo(f"     -> {finding.remedy}")
    if wrong:
        raise typer.Exit(1)


@app.command()
def policy(config: Path = CONFIG) -> None:
    """Print the least IAM policy that penstockd's role needs, for the cloud that the settings describe."""
    from penstock_cloud.doctor import policy as least
    from penstock_cloud.settings import CloudSettings

    typer.echo(json.dumps(least(load_settings(config).section(CloudSettings)), indent=2))


@app.command("list")
def list_(config: Path = CONFIG) -> None:
    """List the site's instances as EC2 reports them, also those without a run."""
    from penstock_cloud.failures import LaunchFailed
    from penstock_cloud.fleet import Fleet, connect
    from penstock_cloud.settings import CloudSettings

    section = load_settings(config).section(CloudSettings)
    try:
        found = Fleet(connect(section), section).seen()
    except LaunchFailed as error:
        raise ConfigError(f"EC2 does not answer: {error}; run `penstock cloud doctor`") from None
    for each in found:
        tags = each.tags
        typer.echo(
            f"{each.id}  {each.state:13} {each.instance_type:14} {each.zone:12} run {tags.get('run')}  node {tags.get('node')}"
        )


@app.command()
def forget(run: str, config: Path = CONFIG) -> None:
    """Close a run whose record cannot be read, once its instances have ended. Its commitment stays in the ledger.

    Stop penstockd before, and start it afterwards.
    """
    from penstock_cloud.book import Book
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
    from penstock_cloud.instances import PROTECTED
    from penstock_scheduler.store import open_store

    daemon = load_settings(config).section(DaemonSettings)
    store = open_store(daemon.store or daemon.state_dir, writer=True)
    try:
        why = store.control(PROTECTED)
        store.set_control(PROTECTED, None)
    finally:
        store.close()
    typer.echo("protected mode was off" if why is None else f"protected mode is off; it was on because {why}")
