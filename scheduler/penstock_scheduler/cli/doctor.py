"""`penstock doctor`: checks what Penstock needs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from penstock_scheduler.cli.ask import JSON, ask, print_table
from penstock_scheduler.errors import PenstockError
from penstock_scheduler.messages import REFUSED
from penstock_scheduler.sharing.messages import AWAY_S, NodeStatus, status_file

Check = tuple[str, bool, str]
"""What was checked, whether it is good, and a text for people."""


def doctor(as_json: bool = JSON) -> None:
    """Check what Penstock needs, on this machine and as this user.

    The exit status is 1 if a check fails.
    """
    checks = [*_commands(), *_spool(), *_daemon()]
    if as_json:
        typer.echo(json.dumps([{"check": what, "ok": good, "text": text} for what, good, text in checks]))
    else:
        rows = [(what, "ok" if good else "FAILED", text) for what, good, text in checks]
        print_table(("CHECK", "", "DETAILS"), rows, "")
    if not all(good for _, good, _ in checks):
        raise typer.Exit(1)


def _commands() -> Iterator[Check]:
    for command in ("sbatch", "squeue", "scontrol", "scancel"):
        found = shutil.which(command)
        yield command, found is not None, found or "not on PATH; install Slurm's commands (Debian: slurm-client)"


def _spool() -> Iterator[Check]:
    spool = os.environ.get("PENSTOCK_SPOOL")
    if spool is None:
        return
    there = Path(spool).is_dir()
    yield "PENSTOCK_SPOOL", there, spool if there else f"{spool} is not a directory here; jobs cannot report through it"
    alive, silent = agents_in(Path(spool), time.time())
    if silent:
        text = (
            f"no status for {AWAY_S:.0f} s from {', '.join(silent)}; jobs cannot share GPUs there: start penstock-agent"
        )
        yield "agents", False, text
    elif alive:
        yield "agents", True, f"the agents of all {len(alive)} nodes answer"


def agents_in(spool: Path, now_s: float) -> tuple[list[str], list[str]]:
    """The nodes in the spool whose agents answer, and those whose agents do not."""
    alive: list[str] = []
    silent: list[str] = []
    for folder in sorted((spool / "agents").glob("*")):
        try:
            status = NodeStatus.model_validate_json(status_file(spool, folder.name).read_bytes())
            late = now_s - status.time_s >= AWAY_S
        except (OSError, ValueError):
            late = True
        (silent if late else alive).append(folder.name)
    return alive, silent


def _daemon() -> Iterator[Check]:
    try:
        health, me = ask(lambda penstock: (penstock.ready(), penstock.me()))
    except PenstockError as error:
        yield "penstockd", False, str(error)
        return
    text = "; ".join(health.problems) or f"version {health.version}, round {health.round}"
    yield "penstockd", health.status == "ok", text
    for warning in health.warnings:
        yield "plan gate" if warning.startswith(REFUSED) else "Slurm's answers", False, warning
    yield "identity", True, f"user {me.user}, role {me.role}, identified by {me.by}"
