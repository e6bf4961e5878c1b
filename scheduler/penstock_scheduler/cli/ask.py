"""Shared by the commands that ask penstockd: the connection, the store as a fallback, and the output.

The modules of commands import at their top only what their options need, so that the help is there at once: `import httpx`,
`pydantic` and `rich` take longer than all else together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import typer

from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.safe_text import one_line

if TYPE_CHECKING:
    from pydantic import BaseModel

    from penstock_scheduler.api.client import Client
    from penstock_scheduler.api.messages import RefusedJob
    from penstock_scheduler.model import JobSpec
    from penstock_scheduler.store.sql import SqlStore

Answer = TypeVar("Answer")

STORE = typer.Option(
    "/var/lib/penstock",
    "--store",
    help="Where to read while penstockd does not answer: its state_dir, or the URL of its store. You need access to it.",
)
STATE = typer.Option("/var/lib/penstock", "--state", "--store", help="The daemon's state_dir, or the URL of its store.")
JSON = typer.Option(False, "--json", help="Print one JSON document and nothing else.")

WIDEST, NARROWEST, LAST, GAP = 24, 6, 16, 2
"""Of a table: its widest column but the last, how far columns are cut, what the last one has, and what is between two."""

STILL_WORKS = (
    "These work without penstockd: sbatch, squeue and scancel; `penstock submit` (the job waits until penstockd is back); and "
    "this command with --store, if you may read the store."
)


def ask(
    question: Callable[[Client], Answer], instead: Callable[[SqlStore], Answer] | None = None, store: str = ""
) -> Answer:
    """The daemon's answer to a question.

    Args:
        instead: what to read from the store if the daemon does not answer. The command then says so on standard error.
        store: the daemon's state_dir, or the URL of its store.

    Raises:
        PenstockError: neither the daemon nor its store can answer.
    """
    try:
        from penstock_scheduler.api.client import Client, DaemonAway
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; this command needs Penstock with its extra `service`") from None
    try:
        with Client.open() as penstock:
            penstock.on_search = lambda text: typer.echo(f"penstock: {text}", err=True)
            answer = question(penstock)
            if (since_s := penstock.silent_since_s) is not None:
                typer.echo(
                    f"penstock: penstockd has been silent since {local_time(since_s)}: this is what was known then.",
                    err=True,
                )
            return answer
    except DaemonAway as away:
        if instead is None:
            raise
        try:
            if "://" not in store and not os.access(store, os.R_OK | os.X_OK):
                raise PenstockError(f"{store} is no folder that you may read")
            from penstock_scheduler.store.sql import open_store  # takes seconds to load

            opened = open_store(store)
        except PenstockError as unreadable:
            raise DaemonAway(f"{away}\nIts store cannot be read: {unreadable}.\n{STILL_WORKS}") from None
        typer.echo(f"penstock: {away} This answer is read from its store.", err=True)
        try:
            return instead(opened)
        finally:
            opened.close()


def print_json(answer: BaseModel | Sequence[BaseModel]) -> None:
    """Print an answer as one JSON document."""
    if isinstance(answer, Sequence):
        typer.echo(json.dumps([each.model_dump(mode="json") for each in answer]))
    else:
        typer.echo(answer.model_dump_json())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """Print a table as wide as the terminal. The last column takes the remaining space, and wraps.

    A column that is empty in every row leaves its space to the others. Where the space is short, the widest columns are cut, and
    never those of ids, users and numbers, which are narrow.

    Args:
        empty: what to print if there are no rows.
    """
    lines = [[one_line(cell) for cell in row] for row in rows]
    if not lines:
        typer.echo(empty)
        return
    shown = [at for at in range(len(columns)) if any(line[at] for line in lines)]
    from rich.console import Console  # here, because most commands need no table, and the help of none does
    from rich.table import Column, Table
    from rich.text import Text

    *first, last = (columns[at] for at in shown)
    console = Console()
    widths = _widths([[columns[at], *(line[at] for line in lines)] for at in shown], console.width)
    table = Table(
        *(
            Column(name, no_wrap=True, overflow="ellipsis", width=width)
            for name, width in zip(first, widths, strict=True)
        ),
        Column(last, ratio=1, overflow="fold"),
        box=None,
        pad_edge=False,
        expand=True,
    )
    for line in lines:
        table.add_row(*(Text(line[at]) for at in shown))
    console.print(table)


def _widths(cells: Sequence[Sequence[str]], space: int) -> list[int]:
    """The widths of all columns but the last, which gets what is left: at least its own width, up to `LAST` or a quarter."""
    from rich.cells import cell_len

    natural = [max(map(cell_len, column)) for column in cells]
    widths = [min(width, WIDEST) for width in natural[:-1]]
    left = space - GAP * len(widths) - min(natural[-1], LAST, space // 4)
    while widths and sum(widths) > left and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def print_refused(jobs: Sequence[RefusedJob]) -> None:
    """Print jobs that Penstock cannot manage, and why; nothing if there are none."""
    if jobs:
        typer.echo("\nPenstock refuses these jobs. Each waits in Slurm until its job spec is corrected:")
        print_table(("JOB", "NAME", "USER", "WHY"), [(each.id, each.name, each.user, each.text) for each in jobs], "")


def print_fields(fields: dict[str, str]) -> None:
    """Print labels and texts in two columns. Leaves out the fields without a text."""
    width = max(map(len, fields), default=0)
    for label, text in fields.items():
        if text:
            typer.echo(f"{label:<{width}} {one_line(text)}")


def local_time(time_s: float | None) -> str:
    """A time as the local clock shows it; `-` for None. `time_s`: s since 1970."""
    return "-" if time_s is None else datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def hours(gpu_seconds: float) -> str:
    """GPU-seconds as GPU-hours."""
    return f"{gpu_seconds / 3600:.2f}"


def asks_for(spec: JobSpec) -> str:
    """A job spec in short, such as `1-16 t4|a100`, `2 ^t4` (any type but t4) or, if it is not adaptive, `rigid 4`."""
    count = str(spec.max_gpus) if spec.min_gpus == spec.max_gpus else f"{spec.min_gpus}-{spec.max_gpus}"
    text = f"{count} {'|'.join(spec.gpu_types or [f'^{name}' for name in spec.excluded_gpu_types or ()])}".rstrip()
    return text if spec.adaptivity.value == "adaptive" else f"{spec.adaptivity.value} {text}"
