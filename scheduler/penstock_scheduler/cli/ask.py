"""What the commands that ask penstockd share: the line to it, its store while it is away, and how answers are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock_scheduler.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock_scheduler.client import Client
    from penstock_scheduler.store import SqlStore

Answer = TypeVar("Answer")

STORE = typer.Option(
    "/var/lib/penstock",
    "--store",
    help="Read instead while penstockd is away, if you may: its state_dir, or the URL of its store.",
)
STATE = typer.Option("/var/lib/penstock", "--state", "--store", help="The daemon's state_dir, or the URL of its store.")
JSON = typer.Option(False, "--json", help="One JSON document, and nothing else, on standard output.")

STILL = (
    "What works without it: sbatch, squeue and scancel, `penstock submit` (the job waits for penstockd), and with "
    "--store this command for those who may read its store."
)


def ask(
    question: Callable[[Client], Answer], instead: Callable[[SqlStore], Answer] | None = None, store: str = ""
) -> Answer:
    """The daemon's answer; while it is away the store's, which is said on standard error. Raises PenstockError."""
    try:
        from penstock_scheduler.client import Client, DaemonAway
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; asking penstockd needs penstock[service]") from None
    try:
        with Client.open() as penstock:
            return question(penstock)
    except DaemonAway as away:
        if instead is None:
            raise
        from penstock_scheduler.store import open_store  # takes seconds to load

        try:
            opened = open_store(store)
        except PenstockError as unreadable:
            raise DaemonAway(f"{away}\nIts store is no help: {unreadable}.\n{STILL}") from None
        typer.echo(f"penstock: {away} What follows is what its store knows.", err=True)
        try:
            return instead(opened)
        finally:
            opened.close()


def tell_json(answer: BaseModel | Sequence[BaseModel]) -> None:
    """An answer as one JSON document."""
    if isinstance(answer, BaseModel):
        typer.echo(answer.model_dump_json())
    else:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in answer]))


def tell_table(columns: Sequence[str], rows: Iterable[Sequence[str]], nothing: str) -> None:
    """A table as wide as the terminal; the last column takes what is left and is folded. No row: `nothing` is said."""
    lines = list(rows)
    if not lines:
        typer.echo(nothing)
        return
    *first, last = columns
    table = Table(
        *(Column(name, no_wrap=True, overflow="ellipsis", max_width=24) for name in first),
        Column(last, ratio=1, overflow="fold"),
        box=None,
        pad_edge=False,
        expand=True,
    )
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)


def when(time_s: float | None) -> str:
    """A time of the clock, local; `-` if there is none."""
    return "-" if time_s is None else datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def hours(gpu_seconds: float) -> str:
    """GPU-seconds as GPU-hours."""
    return f"{gpu_seconds / 3600:.2f}"
