"""`penstock top`: who has which GPUs, and why, as the newest round sees it."""

from __future__ import annotations

import time
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock_scheduler.model import Job, JobWish, Phase
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.store import FileStore

_STYLES = {Phase.RUNNING: "green", Phase.STARTING: "cyan", Phase.STOPPING: "yellow", Phase.QUEUED: "dim"}


def top(
    state: Path = typer.Option(Path("/var/lib/penstock"), help="The daemon's state_dir."),
    once: bool = typer.Option(False, help="Print once and exit."),
    interval: float = typer.Option(2.0, min=0.1, help="Seconds between two looks."),
) -> None:
    """Show the cluster's GPUs by type, and every job with what it has and why."""
    store = FileStore(state)
    console = Console()
    if once:
        console.print(_look(store))
        return
    with Live(_look(store), console=console, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(_look(store))


def _look(store: FileStore) -> RenderableType:
    record = store.last_round()
    return Text("no round has been decided yet") if record is None else render(record)


def render(record: RoundRecord) -> RenderableType:
    """A screen: GPUs by type, then the jobs, those that hold GPUs first."""
    plan, snapshot = record.plan, record.snapshot
    parts: list[RenderableType] = [_title(record), _types(record)]
    jobs = Table(box=None, pad_edge=False, expand=True)
    for heading in ("JOB", "NAME", "ASKS FOR", "STATE", "HAS", "NODES", "WHY"):
        jobs.add_column(
            heading, no_wrap=heading not in ("WHY", "NODES"), overflow="ellipsis", ratio=1 if heading == "WHY" else None
        )
    for job in sorted(snapshot.jobs, key=lambda job: (job.id not in plan.assignments, job.submit_s, job.id)):
        assignment = plan.assignments.get(job.id)
        reason = assignment.reason if assignment else plan.waiting[job.id]
        jobs.add_row(
            job.id,
            job.name,
            asks_for(job.wish),
            Text(job.phase.value, style=_STYLES[job.phase]),
            _has(job),
            _nodes(job),
            reason.text,
        )
    parts.append(jobs)
    for refusal in snapshot.refused:
        parts.append(Text(f"job {refusal.job} ({refusal.name}) is refused: {refusal.text}", style="red"))
    return Group(*parts)


def asks_for(wish: JobWish) -> str:
    """A wish in a few words, such as `adaptive 1-16 t4|a100`."""
    count = str(wish.max_gpus) if wish.min_gpus == wish.max_gpus else f"{wish.min_gpus}-{wish.max_gpus}"
    return f"{wish.adaptivity.value} {count}" + (f" {'|'.join(wish.gpu_types)}" if wish.gpu_types else "")


def _title(record: RoundRecord) -> Text:
    plan = record.plan
    text = f"round {plan.round}  {time.strftime('%H:%M:%S', time.localtime(record.snapshot.time_s))}  policy {record.policy}"
    text += f"  {len(plan.assignments)} jobs have GPUs, {len(plan.waiting)} wait"
    if plan.solve is not None:
        text += f"  gap {plan.solve.gap:.2%}" + ("  cut short by the time limit" if plan.cut_short else "")
    return Text(text, style="bold")


def _types(record: RoundRecord) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    used: dict[str, int] = {}
    for assignment in record.plan.assignments.values():
        used[assignment.placement.gpu_type] = used.get(assignment.placement.gpu_type, 0) + assignment.placement.gpus
    for gpu_type in sorted({node.gpu_type for node in record.snapshot.nodes}):
        nodes = [node for node in record.snapshot.nodes if node.gpu_type == gpu_type]
        total, others = sum(node.gpus for node in nodes), sum(node.gpus_others for node in nodes)
        out = sum(node.gpus for node in nodes if not node.usable)
        mine = used.get(gpu_type, 0)
        free = max(total - mine - others - out, 0)
        bar = Text("█" * mine, style="green") + Text("▒" * others, style="magenta") + Text("░" * free, style="dim")
        bar += Text("x" * min(out, total), style="red")
        words = f"{mine} of {total} given out" + (f", {others} used by other jobs" if others else "")
        words += f", {out} out of service" if out else ""
        table.add_row(Text(gpu_type, style="bold"), bar, words)
    return table


def _has(job: Job) -> str:
    if job.allocation is None or job.phase is Phase.QUEUED:
        return "-"
    return f"{job.allocation.gpus} {job.allocation.gpu_type}"


def _nodes(job: Job) -> str:
    if job.allocation is None or job.phase is Phase.QUEUED:
        return ""
    return ",".join(job.allocation.nodes)
