"""`penstock doctor`: checks what Penstock needs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock_profiles.wire import SPOOL_VARIABLE, read
from penstock_scheduler.api.agent_messages import AWAY_S, Lack, NodeStatus, status_file
from penstock_scheduler.api.health_messages import LOST, REFUSED, STANDBY, DiskHealth, LeaderHealth, StepHealth
from penstock_scheduler.cli.ask import JSON, ask, print_table
from penstock_scheduler.cli.jobs import LIVE
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import data_size, duration
from penstock_scheduler.rounds.plan_check import DIFFERS, NONE_STARTS
from penstock_scheduler.safety.health import INCOMPLETE, SILENT, UNHEARD, UNSPOOLED

if TYPE_CHECKING:
    from penstock_scheduler.api.access_messages import Identity
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.api.health_messages import Health
    from penstock_scheduler.api.messages import AllocationView, JobView

WARNING = "WARNING"

MOST_UNSTARTED = 20
"""Jobs that may be named as not started by Slurm: the oldest ones. Each costs a request."""

Check = tuple[str, bool | str, str]
"""What was checked, whether it is good (or `WARNING`), and a text for people."""


def doctor(as_json: bool = JSON) -> None:
    """Check what Penstock needs, on this machine and as this user.

    The exit status is 1 if a check fails or warns.
    """
    checks = [*_commands(), *_spool(), *_daemon()]
    if as_json:
        typer.echo(json.dumps([{"check": what, "ok": good is True, "text": text} for what, good, text in checks]))
    else:
        rows = [(what, WARNING if good is WARNING else "ok" if good else "FAILED", text) for what, good, text in checks]
        print_table(("CHECK", "", "DETAILS"), rows, "")
    if not all(good is True for _, good, _ in checks):
        raise typer.Exit(1)


def _commands() -> Iterator[Check]:
    for command in ("sbatch", "squeue", "scontrol", "scancel"):
        found = shutil.which(command)
        yield command, found is not None, found or "not on PATH; install Slurm's commands (Debian: slurm-client)"


def _spool() -> Iterator[Check]:
    spool = os.environ.get(SPOOL_VARIABLE)
    if not spool:  # as the executor reads it
        return
    there = Path(spool).is_dir()
    yield "PENSTOCK_SPOOL", there, spool if there else f"{spool} is not a directory here; jobs cannot report through it"
    alive, silent, lacking = agents_in(Path(spool), time.time())
    for lack, nodes in sorted(lacking.items()):
        yield (
            "agents",
            WARNING,
            f"{lack} on {', '.join(nodes)}: `penstock slurm check` says what that means and what to do",
        )
    if silent:
        text = (
            f"no status for {AWAY_S:.0f} s from {', '.join(silent)}; jobs cannot share GPUs there: start penstock-agent"
        )
        yield "agents", False, text
    elif alive:
        yield "agents", True, f"the agents of all {len(alive)} nodes answer"


def agents_in(spool: Path, now_s: float) -> tuple[list[str], list[str], dict[Lack, list[str]]]:
    """The nodes in the spool whose agents answer, those whose agents do not, and those that lack what sharing needs."""
    alive: list[str] = []
    silent: list[str] = []
    lacking: dict[Lack, list[str]] = {}
    for folder in sorted((spool / "agents").glob("*")):
        try:
            status = read(NodeStatus, status_file(spool, folder.name).read_bytes())
            late = now_s - status.time_s >= AWAY_S
            lacks = status.lacks if not late else ()
        except (OSError, ValueError):
            late, lacks = True, ()
        for lack in lacks:
            lacking.setdefault(lack, []).append(folder.name)
        (silent if late else alive).append(folder.name)
    return alive, silent, lacking


def _daemon() -> Iterator[Check]:
    try:
        health, me, differ, waits = ask(_asked)
    except PenstockError as error:
        yield "penstockd", False, str(error)
        return
    text = "; ".join(health.problems) or f"version {health.version}, round {health.round}"
    yield "penstockd", health.status == "ok", text
    if (leader := health.leader) is not None:
        away = [each for each in health.warnings if each.startswith(STANDBY)]
        yield "leader", WARNING if away else True, "; ".join([_leader(leader), *away])
    for step in health.steps:
        yield step.step, not step.problem, _step(step, health.report_age_s)
    for disk in health.disks:
        yield disk.what, WARNING if disk.warning and not disk.problem else not disk.problem, _disk(disk)
    told = {disk.warning for disk in health.disks}
    for what, files in (("open files", health.files), ("penstock-api's files", health.api_files)):
        if files is not None:
            told.add(files.warning)
            yield what, WARNING if files.warning else True, files.warning or f"{files.open:,} of {files.limit:,}"
    for warning in health.warnings:
        if warning not in told and not warning.startswith(STANDBY):
            yield _warning(warning, differ, waits)
    yield "identity", True, f"user {me.user}, role {me.role}, identified by {me.by}"


def _asked(penstock: Client) -> tuple[Health, Identity, list[str], list[str]]:
    """The daemon's health and the caller. Of the jobs that the caller may see: those for which the plan and the cluster differ
    now, and those that Slurm does not start, with its answer."""
    health, differ = penstock.ready(), []
    maybe: list[tuple[JobView, bool]] = []
    differs, none_starts = (any(each.startswith(text) for each in health.warnings) for text in (DIFFERS, NONE_STARTS))
    if health.round is not None and (differs or none_starts):
        given = {each.job: _gpus(each.allocation) for each in penstock.round(health.round).decisions}
        for view in penstock.jobs(state=LIVE):
            planned, held = given.get(view.id), _gpus(view.allocation)
            if planned not in (None, held):
                differ.append(f"job {view.id} ({view.name}): {planned} in the plan, {held} held")
            if none_starts and view.state in ("queued", "starting") and (planned or view.reason == "waiting-cluster"):
                maybe.append((view, bool(planned)))
    waits = list(filter(None, (_unstarted(penstock, *each) for each in maybe[-MOST_UNSTARTED:])))
    return health, penstock.me(), differ, waits


def _unstarted(penstock: Client, view: JobView, planned: bool) -> str:
    """A job that Slurm does not start, with its answer. Returns an empty text if the job waits for something else.

    Args:
        planned: whether the newest round has sent it to nodes.
    """
    tried = [each for each in penstock.history(view.id).outcomes if each.action != "hold"]
    if not tried or not (planned or tried[-1].progress == "failed"):
        return ""
    answer = next((each.text for each in reversed(tried) if each.progress == "failed"), tried[-1].text)
    return f"job {view.id} ({view.name}): {answer}"


def _gpus(allocation: AllocationView | None) -> int:
    return 0 if allocation is None else allocation.gpus


def _leader(found: LeaderHealth) -> str:
    """Who leads, since when, and which stand by."""
    if found.alone:
        return f"{found.name} leads; the store is a file, so no other penstockd can take over"
    since = "" if found.since_age_s is None else f" since {duration(found.since_age_s)}"
    lease = "" if found.lease_age_s is None else f", confirmed {duration(found.lease_age_s)} ago"
    standbys = ", ".join(f"{each.name} ({each.lag or 0} rounds behind)" for each in found.standbys) or "nobody"
    return f"{found.name or 'nobody'} leads{since} (term {found.number}{lease}); {standbys} stands by"


def _warning(warning: str, differ: list[str], waits: list[str]) -> Check:
    """The check that a warning of the daemon makes, with the jobs that it is about; see `_asked`."""
    if warning.startswith(DIFFERS):
        return "GPUs", False, "; ".join([warning, *differ])
    if warning.startswith(NONE_STARTS):
        return "starts", False, "; ".join([warning, *waits])
    return _about(warning), False if warning.startswith((UNHEARD, UNSPOOLED)) else WARNING, warning


def _about(warning: str) -> str:
    """What a warning of the daemon is about."""
    begins = {REFUSED: "plan gate", LOST: "moves", INCOMPLETE: "view of the cluster"}
    begins |= dict.fromkeys((SILENT, UNHEARD, UNSPOOLED), "job reports")
    return next((what for text, what in begins.items() if warning.startswith(text)), "Slurm's answers")


def _step(step: StepHealth, report_age_s: float | None) -> str:
    """What a step of the round loop did last, such as `round 8 decided 3 s ago`."""
    what = DID.get(step.step, step.step).format(round=step.round)
    parts = [f"{what} {duration(step.age_s)} ago" if step.age_s is not None else "not yet since penstockd started"]
    if step.problem:
        parts.append(step.problem)
    elif step.error and step.error_age_s is not None:
        parts.append(f"last error {duration(step.error_age_s)} ago: {step.error}")
    if step.step == "reports":
        parts.append("newest report: " + (NO_REPORT if report_age_s is None else f"{duration(report_age_s)} ago"))
    return "; ".join(parts)


NO_REPORT = "none yet; if running jobs use penstock_executor, `penstock slurm check --submit` finds the step that fails"

DID = {
    "observe": "the cluster was observed",
    "tell": "the API and the notices have the observation",
    "reports": "reports were read and stored",
    "decide": "round {round} was decided",
    "apply": "round {round} was applied",
}
"""Step of the round loop -> what it has done."""


def _disk(disk: DiskHealth) -> str:
    """What is known of a disk, such as `/var/lib/penstock/penstock.db: 41 GiB free`."""
    parts = [disk.problem or disk.warning or disk.where]
    if not disk.problem and not disk.warning and disk.free_bytes is not None:
        left = (
            ""
            if disk.days_left is None
            else f", full in about {duration(disk.days_left * 86400)} at its present growth"
        )
        parts.append(f"{data_size(disk.free_bytes)} free{left}")
    if disk.used_bytes is not None:
        parts.append(f"it takes {data_size(disk.used_bytes)}")
    if disk.error and disk.error_age_s is not None and not disk.problem:
        parts.append(f"last error {duration(disk.error_age_s)} ago: {disk.error}")
    return "; ".join(parts)
