"""`penstock db`: maintains the daemon's store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import typer

from penstock_scheduler.people.errors import PenstockError, StoreError
from penstock_scheduler.people.units import data_size
from penstock_scheduler.store.backup import make_backup, restore_backup
from penstock_scheduler.store.opening import is_server, name_of, open_engine
from penstock_scheduler.store.schema import (
    differences,
    revision,
    tolerates_upgrade,
    upgrade,
    upgrade_beside_others,
)
from penstock_scheduler.store.sql import open_store
from penstock_scheduler.store.tables import REVISION

db = typer.Typer(
    no_args_is_help=True, help="Upgrade, check, export, back up or restore the daemon's store. For admins."
)

TELL_S = 2.0

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


@db.command()
def backup(
    file: Path = typer.Argument(
        ..., help="The new file. It holds secrets' digests and jobs' histories: keep it private."
    ),
    store: str = _STORE,
) -> None:
    """Copy the store, as it is at this moment, into a file. penstockd may run.

    The file is complete and has been checked when the command ends, or there is none. It can be restored into SQLite and
    into PostgreSQL.
    """
    about = make_backup(store, file, _progress())
    size = data_size(file.stat().st_size)
    typer.echo(f"{file}: a backup of {name_of(store)} {about}, schema {about.revision}, {size}")


@db.command()
def restore(
    file: Path = typer.Argument(..., help="A file of `penstock db backup`."),
    store: str = _STORE,
    replace: bool = typer.Option(False, "--replace", help="Replace what the store holds, even if it is newer."),
) -> None:
    """Replace the store by a backup, all or nothing. Stop penstockd first, and penstock-api where it is used.

    The next penstockd looks at Slurm and the cloud first, and acts after `grace_s` seconds of the section safety.
    """
    about = restore_backup(store, file, replace=replace, tell=_progress())
    typer.echo(
        f"{name_of(store)}: restored from the backup {about}. Lost is what Penstock alone knew and has learned since then: "
        "audit lines, settings by admins (pause, policy, drains), new tokens. Tokens that were revoked since then may be "
        "valid again: see `penstock token list`. Browsers must log in again."
    )


def _progress() -> Callable[[str, int, int], None]:
    """Tells of long work every few seconds."""
    told_s = time.monotonic()

    def tell(table: str, done: int, rows: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            typer.echo(f"{table}: {done:,} of {rows:,} rows", err=True)

    return tell
