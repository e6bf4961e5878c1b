"""`penstock db`: maintains the daemon's store."""

from __future__ import annotations

import json

import typer

from penstock_scheduler.errors import PenstockError, StoreError
from penstock_scheduler.store import open_store
from penstock_scheduler.store.opening import is_server, open_engine
from penstock_scheduler.store.schema import (
    differences,
    revision,
    tolerates_upgrade,
    upgrade,
    upgrade_beside_others,
)
from penstock_scheduler.store.tables import REVISION

db = typer.Typer(no_args_is_help=True, help="Upgrade, check or export the daemon's store. For admins.")

_STORE = typer.Argument("/var/lib/penstock", help="The daemon's state_dir, or the URL of its store.")


@db.command("upgrade")
def upgrade_(store: str = _STORE) -> None:
    """Upgrade the store's schema to this version of Penstock.

    Stop penstockd first. With PostgreSQL, it may run if this version says that it tolerates the upgrade; otherwise this
    command refuses. If the upgrade fails, the store stays as it was.
    """
    beside = is_server(store) and tolerates_upgrade(store)
    engine, name, lock = open_engine(store, lock=not beside)
    try:
        with engine.connect() as connection:
            before = revision(connection)
        if before is not None and before > REVISION:
            raise StoreError(f"{name} has the schema {before}, which is newer than this version's, {REVISION}")
        if beside:
            upgrade_beside_others(engine)
        else:
            upgrade(engine)
    finally:
        if lock is not None:
            lock.close()
        engine.dispose()
    typer.echo(
        f"{name}: " + ("is up to date" if before == REVISION else f"upgraded from schema {before} to {REVISION}")
    )


@db.command()
def check(store: str = _STORE) -> None:
    """Read every round and every report, and print what is wrong. The exit status is 1 if anything is wrong."""
    open_store(store).close()  # raises an error if the revision is wrong
    engine, name, _ = open_engine(store, lock=False)
    wrong = [f"the schema differs: {difference}" for difference in differences(engine)]
    engine.dispose()
    opened = open_store(store)
    for number in opened.round_numbers():
        try:
            opened.round(number)
        except PenstockError as error:
            wrong.append(str(error))
    reports = sum(1 for _ in opened.reports())
    outcomes = sum(1 for _ in opened.outcomes())
    for line in wrong:
        typer.echo(line)
    typer.echo(f"{name}: {len(opened.round_numbers())} rounds, {reports} reports, {outcomes} outcomes")
    if wrong:
        raise typer.Exit(1)


@db.command()
def export(store: str = _STORE) -> None:
    """Print every row of the store as a line of JSON, without the digests of tokens."""
    for row in open_store(store).export():
        typer.echo(json.dumps(row))
