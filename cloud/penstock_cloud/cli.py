"""`penstock cloud`: commands for admins of bursting."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import typer

from penstock_cloud import cost_report, staging
from penstock_cloud.catalogue import Fetcher, KeptCatalogue, file_of, load, save
from penstock_cloud.command import Command, CommandClient
from penstock_cloud.doctor import CloudFinding, examine, slurms_timeouts
from penstock_cloud.doctor import policy as least_policy
from penstock_cloud.ec2 import Ec2, connect, connect_ssm
from penstock_cloud.live import check_live, cost
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.deciding.ledger import month
from penstock_scheduler.burst.manager.provider import LaunchFailed, Provider
from penstock_scheduler.cli.ask import ask
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.people.units import dollars
from penstock_scheduler.rounds.settings import DaemonSettings, Settings, load_settings

app = typer.Typer(no_args_is_help=True, help="Clouds: prices, checks, and what runs there.")

CONFIG = typer.Option(Path("/etc/penstock/penstock.toml"), "--config", help="The daemon's settings file.")


def _regions(settings: Settings) -> tuple[CloudSettings, ...]:
    """The settings in each region of EC2; none where the site has commands alone."""
    alone = settings.section(DaemonSettings).cloud == "command"
    return () if alone else settings.section(CloudSettings).everywhere()


def _file(settings: Settings, section: CloudSettings) -> Path:
    """The file with the catalogue of a region."""
    state_dir = settings.section(DaemonSettings).state_dir
    return file_of(state_dir, section.region, home=settings.section(CloudSettings).region)


def _commands(settings: Settings) -> list[Command]:
    """The places behind commands of the admin's. Raises ConfigError."""
    section = settings.section(CloudSettings)
    return [
        Command(name, str(section.site), CommandClient(name, command), section.price_days)
        for name, command in section.commands.items()
    ]


@app.command()
def refresh(config: Path = CONFIG) -> None:
    """Fetch instance types and prices now. penstockd does the same every 6 hours."""
    settings = load_settings(config)
    for section in _regions(settings):
        file = _file(settings, section)
        try:
            fetched = Fetcher(section).get_catalogue(load(file, section.region), datetime.now(UTC).timestamp())
        except LaunchFailed as error:
            raise ConfigError(
                f"EC2 does not answer in {section.region}: {error}; run `penstock cloud doctor`"
            ) from None
        found = fetched.catalogue
        save(found, file)
        for text in fetched.refused:
            typer.echo(f"{text}; those that were known before stay, with their age: see `penstock cloud types`")
        priced = sum(each.usd_per_h is not None for each in found.types.values())
        spot = sum(bool(each.spot_usd_per_h) for each in found.types.values())
        what = f"{len(found.types)} types with GPUs in {found.region}"
        typer.echo(f"{what}: {priced} with a price on demand, {spot} with spot prices")
    for place in _commands(settings):
        typer.echo(f"{place.name}: nothing to fetch; its command is asked for its prices once a minute")


@app.command()
def types(config: Path = CONFIG) -> None:
    """List the instance types that may be launched, and their prices."""
    settings = load_settings(config)
    for section in _regions(settings):
        catalogue = load(_file(settings, section), section.region)
        if catalogue is None:
            raise ConfigError(f"no instance types are known in {section.region}; run `penstock cloud refresh`")
        catalogue = catalogue.with_prices(section, datetime.now(UTC).timestamp())
        typer.echo(f"prices of {catalogue.region}, US dollars an hour, and when they were true")
        for name in section.instance_types:
            if (known := catalogue.types.get(name)) is None:
                typer.echo(f"{name:16} not known in this region")
                continue
            spot = min(known.spot_usd_per_h.values(), default=None)
            price = "?" if known.usd_per_h is None else f"{known.usd_per_h:.4f}"
            price += f"  {catalogue.as_of(name, 'on-demand'):%Y-%m-%d}"
            more = f"  spot {spot:.4f}  {catalogue.as_of(name, 'spot'):%Y-%m-%d %H:%M}" if spot else ""
            typer.echo(f"{name:16} {known.gpus} {known.gpu_type:10} {price:>21}{more}")
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
def doctor(
    config: Path = CONFIG,
    live: bool = typer.Option(False, "--live", help="Also launch a few instances for a minute, which costs money."),
    yes: bool = typer.Option(False, "--yes", help="With --live: do not ask before the launch."),
) -> None:
    """Check everything that a launch needs. Exit status 1 if a check fails."""

    settings: Settings = load_settings(config)
    home = settings.section(CloudSettings)
    wrong = 0
    for section in _regions(settings):
        if home.regions:
            typer.echo(f"in {section.region}:")
        for finding in _examined(settings, home, section):
            wrong += _tell(finding)
    partition = settings.as_dict().get("slurm", {}).get("cloud_partition")
    if partition and home.bucket is None:
        for finding in slurms_timeouts(home.boot_timeout_s, str(partition)):
            wrong += _tell(finding)
    for place in _commands(settings):
        why = place.check()
        wrong += bool(why)
        typer.echo(f"FAIL {place.name}: {why}" if why else f"ok   {place.name}: its command answers")
    if live and not wrong:
        wrong += _live(settings, yes=yes)
    elif live:
        typer.echo("nothing is launched while a check fails")
    if wrong:
        raise typer.Exit(1)


def _live(settings: Settings, *, yes: bool) -> int:
    """Launch in each place, once the admin has seen the cost and agreed. Returns the number of failed checks."""
    now = datetime.now(UTC)
    places: list[Provider] = [*_with_prices(settings), *_commands(settings)]
    try:
        costs = [cost(place, now.timestamp()) for place in places]
    except LaunchFailed as error:
        raise ConfigError(f"{error}; run `penstock cloud refresh`") from None
    for place, each in zip(places, costs, strict=True):
        lines = ", ".join(machine.line for machine in each.machines)
        typer.echo(
            f"{place.name}: 3 instances of each of {lines}: about {dollars(each.expected_usd)}, and at most "
            f"{dollars(each.most_usd)}, after which they have ended themselves"
        )
    if not yes and not typer.confirm("Launch them now?"):
        typer.echo("nothing was launched")
        return 0
    wrong = 0
    for place, each in zip(places, costs, strict=True):
        for finding in check_live(place, each.machines, lambda: datetime.now(UTC).timestamp()):
            wrong += _tell(finding, f"{place.name}: ")
    return wrong


def _tell(finding: CloudFinding, where: str = "") -> bool:
    """Print a finding. Returns whether it is a failure."""
    typer.echo(f"{'ok  ' if finding.ok else 'FAIL'} {where}{finding.check}: {finding.text}")
    if finding.remedy:
        typer.echo(f"     -> {finding.remedy}")
    return not finding.ok


def _with_prices(settings: Settings) -> list[Ec2]:
    """The regions of EC2, with what is known of their prices."""
    found = []
    for section in _regions(settings):
        kept = KeptCatalogue(_file(settings, section), section.region)
        found.append(Ec2(connect(section), section, kept.now, ssm=connect_ssm(section)))
    return found


def _examined(settings: Settings, home: CloudSettings, section: CloudSettings) -> Iterator[CloudFinding]:
    """The findings in one region. The staging bucket is checked with the region of `[cloud] region`."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    ec2 = connect(section)
    quick = Config(connect_timeout=3, read_timeout=20, retries={"total_max_attempts": 2})
    try:
        session = boto3.session.Session(region_name=section.region)
        quotas = session.client("service-quotas", config=quick)
    except BotoCoreError as error:
        raise ConfigError(f"[cloud] region={section.region!r}: {error}") from None
    catalogue = load(_file(settings, section), section.region)
    s3 = None if section.bucket is None or section.region != home.region else staging.connect(section)
    return examine(section, ec2, quotas, catalogue, lambda: os.access(section.share, os.W_OK), s3)


@app.command()
def policy(config: Path = CONFIG) -> None:
    """Print the least IAM policy that penstockd's role needs, for the cloud that the settings describe."""
    typer.echo(json.dumps(least_policy(load_settings(config).section(CloudSettings)), indent=2))


@app.command("list")
def list_(config: Path = CONFIG) -> None:
    """List the site's instances as their clouds report them, also those without a run."""
    settings = load_settings(config)
    places: list[Provider] = [*_with_prices(settings), *_commands(settings)]
    for place in places:
        try:
            found = place.list()
        except LaunchFailed as error:
            raise ConfigError(
                f"{place.name} does not list its instances: {error}; run `penstock cloud doctor`"
            ) from None
        for each in found:
            of = "  ".join(f"{name} {each.tags.get(name)}" for name in ("run", "node", "owner"))
            typer.echo(f"{each.id}  {each.state:13} {each.instance_type:14} {each.zone:12} {of}")


@app.command()
def adopt(
    other: str | None = typer.Argument(
        None,
        help="The other identity: the UUID in the instances' tag penstock:site or penstock:owner. Without it: the copied store.",
    ),
    config: Path = CONFIG,
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
) -> None:
    """Take over a copied store, or the EC2 instances of another or an earlier site or store.

    Without an identity, penstockd's store becomes its cluster's own, as on a restored head node. With one, penstockd goes on
    with an instance whose run is open in its store. It ends every other one within a minute or two, and charges it from its
    launch. Never adopt anything of a site that is alive.
    """
    if other is None:
        _adopt_store(yes=yes)
        return
    settings = load_settings(config)
    home = settings.section(CloudSettings)
    try:
        theirs = UUID(other)
    except ValueError:
        raise ConfigError(f"{other} is no UUID; see the tag penstock:site of the instances") from None
    places = [(place, place.of_others(str(theirs))) for place in _with_prices(settings)]
    if theirs == home.site:
        places = [(place, [each for each in listed if "owner" not in each.tags]) for place, listed in places]
    found = [each for _, listed in places for each in listed]
    if theirs == home.site and not found:
        raise ConfigError(
            f"{other} is this site's own identity, and all of its instances have an owner; `penstock cloud list` shows it"
        )
    for each in found:
        launched = datetime.fromtimestamp(each.launched_s, UTC)
        run, price = each.tags.get("run"), each.tags.get("usd_per_h", "?")
        typer.echo(
            f"{each.id}  {each.instance_type:14} {each.zone:12} since {launched:%Y-%m-%d %H:%M} UTC  ${price}/h  run {run}"
        )
    if not found:
        typer.echo(f"no instance with penstock:site={theirs} or penstock:owner={theirs} runs")
        return
    if not yes and not typer.confirm(f"Adopt {len(found)} instances? Those without an open run here are ended"):
        typer.echo("nothing was adopted")
        return
    for place, listed in places:
        for each in listed:
            try:
                place.adopt(each.id)
            except LaunchFailed as error:
                raise ConfigError(
                    f"{each.id} in {place.name} was not adopted: {error}; run the command with credentials that may do "
                    "ec2:CreateTags on it, since penstockd's own may not touch what belongs to others"
                ) from None
            typer.echo(f"{each.id} is adopted")


def _adopt_store(*, yes: bool) -> None:
    if not yes:
        typer.confirm("Is the cluster gone to which penstockd's store belongs? `penstock doctor` names it", abort=True)
    was = ask(lambda penstock: penstock.adopt_cloud()).was
    typer.echo(f"the store is this cluster's own; it belonged to {was}" if was else "the store was its own already")


@app.command()
def reconcile(
    report: str = typer.Argument(help="The Cost and Usage Report, or its export as CUR 2.0: s3://BUCKET/PREFIX/NAME."),
    when: datetime | None = typer.Option(
        None, "--month", formats=["%Y-%m"], help="The month, such as 2026-11; the present one if it is not given."
    ),
    config: Path = CONFIG,
) -> None:
    """Compare the ledger with AWS's own cost report, instance by instance. Exit status 1 if they differ."""
    from penstock_scheduler.store.sql import open_store

    settings, now_s = load_settings(config), datetime.now(UTC).timestamp()
    section, daemon = settings.section(CloudSettings), settings.section(DaemonSettings)
    bucket, _, prefix = report.removeprefix("s3://").partition("/")
    if not report.startswith("s3://") or not prefix:
        raise ConfigError(f"{report}: name the report as s3://BUCKET/PREFIX/NAME")
    month_s = month(now_s if when is None else when.replace(tzinfo=UTC).timestamp())[0]
    bill = cost_report.read_bill(
        cost_report.rows_of(staging.connect(section), bucket, prefix, month_s), str(section.site)
    )
    store = open_store(daemon.store or daemon.state_dir)
    try:
        charged = cost_report.charges(store, month_s, section, now_s)
    finally:
        store.close()
    found = cost_report.differences(bill, charged)
    if found and not bill.tagged:
        raise ConfigError(cost_report.UNTAGGED)
    for each in found:
        typer.echo(each)
    until = datetime.fromtimestamp(bill.until_s, UTC)
    late = cost_report.waiting(bill, charged)
    of = f"{len(bill.instances)} instances for {dollars(sum(bill.instances.values()))} until {until:%Y-%m-%d %H:%M} UTC"
    typer.echo(f"{of}; {late} more are not in the report yet, or run on")
    if found:
        raise typer.Exit(1)
    typer.echo("no dollar unaccounted")


@app.command()
def accept_image() -> None:
    """Launch from the AMI that the parameter of the setting `image` names now, in place of the pinned one. For admins."""
    images = ask(lambda penstock: penstock.accept_images()).images
    typer.echo(f"new instances launch from {', '.join(images)}" if images else "the parameters have not changed")


@app.command()
def forget(run: str) -> None:
    """Close a run whose record cannot be read, once its instances have ended. For admins.

    Its commitment stays in the ledger.
    """
    closed = ask(lambda penstock: penstock.forget_cloud_run(run))
    typer.echo(f"run {closed.run} of job {closed.job} is closed; what was committed to it stays in the ledger")


@app.command()
def resume() -> None:
    """End protected mode, so that penstockd may launch again. For admins."""
    reasons = ask(lambda penstock: penstock.resume_cloud()).reasons
    typer.echo(
        f"protected mode is off; it was on because {'; '.join(reasons)}" if reasons else "protected mode was off"
    )
