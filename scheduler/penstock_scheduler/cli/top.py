"""`penstock top`: shows which jobs have which GPUs, and why, as of the newest round."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from penstock_scheduler.cli.ask import STATE
from penstock_scheduler.model import Adaptivity, Job, JobSpec, Phase
from penstock_scheduler.records import RoundRecord

if TYPE_CHECKING:
    from penstock_scheduler.store import SqlStore

_STYLES = {Phase.RUNNING: "green", Phase.STARTING: "cyan", Phase.STOPPING: "yellow", Phase.QUEUED: "dim"}

_ROOMY, _WIDE = 100, 150
"""Least widths of the terminal, in columns, at which the jobs' nodes are shown, and shown in full."""


def top(
    state: str = STATE,
    once: bool = typer.Option(False, help="Print once and exit. This is the default if the output is not a terminal."),
    interval: float = typer.Option(2.0, min=0.1, help="Seconds between two updates."),
) -> None:
    """Show GPUs and jobs on one screen, and keep updating.

    Press Ctrl-C to exit. Reads the store of the daemon.
    """
    from penstock_scheduler.store import open_store  # takes seconds to load

    store = open_store(state)
    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(_screen(store))
        return
    with Live(_screen(store), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(_screen(store), refresh=True)
        except KeyboardInterrupt:
            return


def _screen(store: SqlStore) -> RenderableType:
    record = store.last_round()
    return Text("No round has been decided yet.") if record is None else render(record, now_s=time.time())


def render(record: RoundRecord, *, now_s: float | None = None) -> RenderableType:
    """The screen: GPUs by type, then the jobs, those with GPUs first. With `now_s` it shows the round's age."""
    return _RoundScreen(record, now_s)


@dataclasses.dataclass(frozen=True)
class _RoundScreen:
    record: RoundRecord
    now_s: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _title(self.record, self.now_s)
        yield _types(self.record, options.max_width)
        if self.record.snapshot.jobs:
            yield _jobs(self.record, options.max_width)
        else:
            yield Text("Penstock manages no jobs.", style="dim")
        for refusal in self.record.snapshot.refused:
            yield Text(f"Job {refusal.job} ({refusal.name}) is not managed: {refusal.text}", style="red")


def _jobs(record: RoundRecord, width: int) -> Table:
    """The table of jobs. It shows the reason at every width, and in full for jobs that wait."""
    plan = record.plan
    table = Table(box=None, pad_edge=False, expand=True)
    roomy = width >= _ROOMY
    widths = {
        "JOB": 10,
        "NAME": 24 if roomy else 14,
        "ASKS FOR": 24 if roomy else 14,
        "STATE": 8,
        "GPUS": 12,
        "NODES": 40,
    }
    for heading, most in widths.items():
        if heading != "NODES" or roomy:
            table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=most)
    table.add_column("REASON", ratio=1)

    def order(job: Job) -> tuple[bool, float, int, str]:
        return job.id not in plan.assignments, job.submit_s, len(job.id), job.id

    for job in sorted(record.snapshot.jobs, key=order):
        assignment = plan.assignments.get(job.id)
        why = assignment.reason if assignment else plan.waiting[job.id]
        cells = [
            Text(job.id),
            Text(job.name),
            Text(asks_for(job.spec)),
            Text(job.phase.value, style=_STYLES[job.phase]),
            Text(_has(job)),
            *([Text(_nodes(job, in_full=width >= _WIDE))] if roomy else []),
            Text(why.text, no_wrap=assignment is not None, overflow="ellipsis" if assignment else "fold"),
        ]
        table.add_row(*cells)
    return table


def asks_for(spec: JobSpec) -> str:
    """A job spec in short, such as `1-16 t4|a100`, `2 ^t4` (any type but t4) or, if it is not adaptive, `rigid 4`."""
    count = str(spec.max_gpus) if spec.min_gpus == spec.max_gpus else f"{spec.min_gpus}-{spec.max_gpus}"
    text = f"{count} {'|'.join(spec.gpu_types or [f'^{name}' for name in spec.excluded_gpu_types or ()])}".rstrip()
    return text if spec.adaptivity is Adaptivity.ADAPTIVE else f"{spec.adaptivity.value} {text}"


def _title(record: RoundRecord, now_s: float | None) -> Text:
    plan = record.plan
    decided_s = record.snapshot.time_s
    text = f"Round {plan.round} at {time.strftime('%H:%M:%S', time.localtime(decided_s))}"
    text += f" ({_age(now_s - decided_s)} ago)" if now_s is not None else ""
    text += f"  policy {record.policy}  jobs: {len(plan.assignments)} with GPUs, {len(plan.waiting)} waiting"
    if plan.cut_short and plan.solve is not None:
        text += f"  stopped at the time limit, within {plan.solve.gap:.1%} of the best plan"
    return Text(text, style="bold")


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _types(record: RoundRecord, width: int) -> Table:
    """A line for each GPU type with a bar. A cell of the bar stands for one GPU, or for several on large clusters."""
    table = Table("type", Column("bar", no_wrap=True), "text", box=None, pad_edge=False, show_header=False)
    used: dict[str, int] = {}
    for assignment in record.plan.assignments.values():
        used[assignment.placement.gpu_type] = used.get(assignment.placement.gpu_type, 0) + assignment.placement.gpus
    types = sorted({node.gpu_type for node in record.snapshot.nodes})
    totals = {name: sum(node.gpus for node in record.snapshot.nodes if node.gpu_type == name) for name in types}
    cell = max(max(totals.values(), default=0) / max(width // 2, 1), 1.0)
    for gpu_type in types:
        nodes = [node for node in record.snapshot.nodes if node.gpu_type == gpu_type]
        total, others = totals[gpu_type], sum(node.gpus_others for node in nodes)
        out = sum(node.gpus for node in nodes if not node.may_start)
        mine = used.get(gpu_type, 0)
        bar = Text()
        counted = drawn = 0
        free = total - mine - others - out
        for sign, style, gpus in (
            ("█", "green", mine),
            ("▒", "magenta", others),
            ("░", "dim", free),
            ("x", "red", out),
        ):
            counted = min(counted + max(gpus, 0), total)
            bar.append(sign * (round(counted / cell) - drawn), style=style)
            drawn = round(counted / cell)
        text = f"{mine} of {total} allocated" + (f", {others} used by other jobs" if others else "")
        text += f", {out} out of service" if out else ""
        table.add_row(Text(gpu_type, style="bold"), bar, text)
    return table


def _has(job: Job) -> str:
    if job.allocation is None or job.phase is Phase.QUEUED:
        return "-"
    return f"{job.allocation.gpus} {job.allocation.gpu_type}"


def _nodes(job: Job, *, in_full: bool) -> str:
    if job.allocation is None or job.phase is Phase.QUEUED:
        return ""
    first, *others = job.allocation.nodes
    return ",".join([first, *others]) if in_full or not others else f"{first} +{len(others)}"
