"""`penstock leader`: which of several penstockd leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from penstock_scheduler.cli.ask import JSON, ask, print_fields, print_json, print_table
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import duration

if TYPE_CHECKING:
    from penstock_scheduler.api.health_messages import LeaderHealth

leader = typer.Typer(no_args_is_help=True, help="Show which of several penstockd leads, or let another one lead.")


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
