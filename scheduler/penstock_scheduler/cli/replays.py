"""`penstock simulate whatif` as a task of penstockd: its bounds, its progress, and how a client asks for it."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress

from penstock_scheduler.api.whatif_messages import WhatIfOrder, WhatIfTask
from penstock_scheduler.cli.ask import ask
from penstock_scheduler.cli.simulation import show_table
from penstock_scheduler.people.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.simulator.run import Simulation

MEMORY_BYTES = 8 * 2**30
"""Address space of a task."""
LONGEST_S = 3600
"""Processor time of a task, s. penstockd ends a task earlier; this holds if penstockd is gone."""
READING = 0.2
"""Share of the work that reading the record counts as."""
TELL_S = 0.5
POLL_S = 1.0


def bound() -> None:
    """Give this process the lowest priority, and limit its memory and processor time."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))


_told_s = 0.0


def told(fraction: float, step: str) -> None:
    """Tell penstockd how far the task is, twice a second at most."""
    global _told_s  # one task is one process
    if time.monotonic() - _told_s >= TELL_S:
        _told_s = time.monotonic()
        print(json.dumps({"fraction": round(fraction, 4), "step": step}), file=sys.stderr, flush=True)  # noqa: T201


def told_by(total: int) -> Callable[[str, int], Callable[[Simulation], None]]:
    """As `cli.simulation.progress`, for `told`. `total`: jobs of all simulations."""

    def show(label: str, before: int) -> Callable[[Simulation], None]:
        def on_tick(simulation: Simulation) -> None:
            if len(simulation.ticks) % 16 == 0:
                ended = before * len(simulation.jobs) + sum(job.finish_s is not None for job in simulation.jobs)
                told(READING + (1 - READING) * ended / max(total, 1), f"simulates {label}")

        return on_tick

    return show


def ask_penstockd(order: WhatIfOrder, *, as_json: bool) -> None:
    """Let penstockd replay, wait for it, and print the result. Ctrl-C cancels the replay. Raises PenstockError."""

    def follow(penstock: Client) -> WhatIfTask:
        task = penstock.whatif(order)
        with Progress(console=Console(stderr=True), transient=True, disable=as_json) as shown:
            bar = shown.add_task(task.step, total=1.0)
            try:
                while task.state == "running":
                    time.sleep(POLL_S)
                    task = penstock.whatif_task(task.id)
                    shown.update(bar, completed=task.fraction, description=task.step)
            except KeyboardInterrupt:
                penstock.end_whatif(task.id)
                raise
        return task

    task = ask(follow)
    if task.result is None:
        raise PenstockError(task.error or "somebody cancelled the replay")
    if as_json:
        typer.echo(json.dumps(task.result))
        return
    show_table(task.result)
    for note in task.result.get("notes", ()):
        typer.echo(note, err=True)


def time_of(option: str, text: str) -> float | None:
    """A time in s since 1970, from a date, a date and time (local unless it has a zone), or such seconds. Raises ConfigError."""
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{option}={text!r} is no time; write it as 2026-11-01 or 2026-11-01T08:00") from None
