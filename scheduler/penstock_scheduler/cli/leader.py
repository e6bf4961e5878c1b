"""`penstock leader`: which of several penstockd leads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, ask, print_fields, print_json, print_table
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.api.health_messages import LeaderHealth

leader = typer.Typer(
    no_args_is_help=True, help="Set up several penstockd, show which one leads, or let another one lead."
)


@leader.command()
def show(as_json: bool = JSON) -> None:
    """Show which penstockd leads, since when, and which stand by.

    The exit status is 1 if nobody leads.
    """
    found = ask(lambda penstock: penstock.ready()).leader
    if found is None:
        raise PenstockError("this penstockd is of a version without standbys; it leads alone")
    if as_json:
        print_json(found)
    else:
        print_fields(fields(found))
        if not found.alone:
            rows = [
                (
                    each.name,
                    each.version,
                    f"{duration(each.seen_age_s)} ago",
                    "-" if each.lag is None else str(each.lag),
                )
                for each in found.standbys
            ]
            typer.echo("")
            print_table(("STANDBY", "VERSION", "SEEN", "ROUNDS BEHIND"), rows, "No other penstockd stands by.")
    if not found.name:
        raise typer.Exit(1)


def fields(found: LeaderHealth) -> dict[str, str]:
    """Who leads, in words."""
    lease = ""
    if found.lease_age_s is not None and found.lease_s is not None:
        lease = f"confirmed {duration(found.lease_age_s)} ago; a confirmation holds for {duration(found.lease_s)}"
    return {
        "leader": found.name or "nobody at the moment",
        "version": found.version,
        "address": found.address,
        "since": f"{duration(found.since_age_s)} ago" if found.since_age_s is not None else "",
        "term": str(found.number),
        "lease": "none is needed: the store is a file, so no other penstockd can take over" if found.alone else lease,
    }


@leader.command()
def move(
    to: str = typer.Option("", "--to", help="Name of the penstockd that is to lead; any that stands by otherwise."),
) -> None:
    """Let another penstockd lead. Running jobs notice nothing, and rounds go on within seconds. For admins."""
    where = ask(lambda penstock: penstock.move_leader(to))
    typer.echo(f"the leader hands over to {where}; see `penstock leader show`")


@leader.command()
def init(
    hosts: list[str] = typer.Argument(
        help="Hosts of the penstockd, as HOST or HOST:PORT; the port is 7373 by default."
    ),
    store: str | None = typer.Option(
        None, help="URL of the database on PostgreSQL.  (default: the one in the settings)"
    ),
    out: Path = typer.Option(Path("heads"), help="The folder to make."),
    config: Path = typer.Option(
        Path("/etc/penstock/penstock.toml"), help="The site's settings file, which stays as it is."
    ),
    name: list[str] = typer.Option(
        [], help="A further name or address of the hosts for their certificates; repeatable."
    ),
    tokens: bool = typer.Option(False, "--tokens", help="Users have tokens; without this, MUNGE identifies them."),
    days: int = typer.Option(825, min=1, help="Days for which the hosts' certificates are valid."),
    ca: Path | None = typer.Option(None, help="Folder `ca` of an earlier call: sign with its key, not with a new one."),
    folder: Path = typer.Option(Path("/etc/penstock"), help="Where the files will be on the hosts."),
) -> None:
    """Write what the hosts of several penstockd need: settings, certificates, and variables for users.

    Each host gets a folder. It changes no existing file, and prints the next steps, such as how to copy the folders to the hosts.
    """
    from penstock_scheduler.cli import heads

    try:
        settings = config.read_text(encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"{config}: {error.strerror}; give the site's settings file with --config") from None
    members = heads.parse_heads(hosts)
    heads.write_heads(
        out,
        members,
        settings,
        config,
        store=store,
        names=name,
        folder=folder,
        munge=not tokens,
        days=days,
        authority=ca,
    )
    steps = [f"scp -p {out}/{head.host}/* root@{head.host}:{folder}/" for head in members]
    steps += [
        f"penstockd --config {folder}/penstock.toml --check && systemctl restart penstockd  # on each host",
        f"copy {out}/ca/ca.crt to {folder}/, and {out}/penstock.sh to /etc/profile.d/, on all hosts where users have shells",
        *(["penstock token create --user NAME  # for each user, whose PENSTOCK_TOKEN it is"] if tokens else []),
        "penstock leader show",
        f"keep {(ca or out / 'ca') / 'ca.key'} where only root reads it: before {days} days are over, run this again with "
        f"--ca {ca or out / 'ca'}",
    ]
    typer.echo(f"{out} has the files of {len(members)} hosts; the next steps:")
    for number, step in enumerate(steps, start=1):
        typer.echo(f"{number}. {step}")
