"""`penstock top`: follows the cluster, the queue and each job on the screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer
from pydantic import TypeAdapter
from rich.console import Console

from penstock_scheduler.cli.ask import JSON, STORE, ask
from penstock_scheduler.cli.terminal.picture import Picture, Watcher, recorded
from penstock_scheduler.cli.terminal.printed import render
from penstock_scheduler.people.errors import PenstockError

if TYPE_CHECKING:
    from penstock_scheduler.store.sql import SqlStore


def top(
    once: bool = typer.Option(False, help="Print once and exit. This is the default if the output is not a terminal."),
    interval: float = typer.Option(2.0, min=0.1, help="Seconds between two updates."),
    store: str = STORE,
    as_json: bool = JSON,
) -> None:
    """Show GPUs and jobs on one screen, and keep updating.

    Press ? for the keys and q to quit. Users see their own jobs, operators all.
    """
    console = Console()
    if as_json or once or not console.is_terminal or console.is_dumb_terminal:
        picture = ask(lambda penstock: Watcher(penstock).look(), _kept, store)
        if as_json:
            typer.echo(TypeAdapter(Picture).dump_json(picture).decode())
        else:
            console.print(render(picture, now_s=time.time()))
        return
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.cli.terminal.app import TopApp
    from penstock_scheduler.cli.terminal.source import Daemon

    with Client.open() as penstock:
        penstock.me()  # a daemon that is not there, or a bad token, is better said before the screen opens
        TopApp(Daemon(penstock), interval).run()


def _kept(store: SqlStore) -> Picture:
    record = store.last_round()
    if record is None:
        raise PenstockError("the store has no round yet")
    return recorded(record)
