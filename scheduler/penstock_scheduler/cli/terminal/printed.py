"""A picture printed once: GPUs by type as bars, then the jobs, those with GPUs first."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from penstock_scheduler.cli.terminal.cells import cell
from penstock_scheduler.cli.terminal.picture import Line, Picture, by_type
from penstock_scheduler.people.safe_text import one_line
from penstock_scheduler.people.units import clock

STYLES = {"running": "green", "starting": "cyan", "stopping": "yellow", "queued": "dim"}
"""State of a job -> its colour."""

_ROOMY, _WIDE = 100, 150
"""Least widths of the terminal, in columns, at which the jobs' nodes are shown, and shown in full."""


def render(picture: Picture, *, now_s: float | None = None) -> RenderableType:
    """What `penstock top --once` prints. With `now_s`, it shows the round's age."""
    return _Printed(picture, now_s)


@dataclass(frozen=True)
class _Printed:
    picture: Picture
    now_s: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(title(self.picture, self.now_s), style="bold")
        yield _types(self.picture, options.max_width)
        if self.picture.lines:
            yield _jobs(self.picture, options.max_width)
        else:
            yield Text("Penstock manages no jobs that you may see.", style="dim")
        if self.picture.more:
            yield Text(f"Only the newest {len(self.picture.lines)} jobs are shown.", style="dim")
        for refusal in self.picture.refused:
            yield cell(f"Job {refusal.id} ({refusal.name}) is not managed: {refusal.text}", "red")


def title(picture: Picture, now_s: float | None) -> str:
    """Round, age, policy and numbers of jobs, in one line."""
    if picture.round is None:
        return f"No round has been decided yet.  policy {picture.policy}"
    text = f"Round {picture.round} at {clock(picture.decided_s)}"
    text += f" ({age(now_s - picture.decided_s)} ago)" if now_s is not None else ""
    text += (
        f"  policy {picture.policy}  jobs: {picture.placed} with GPUs, {len(picture.lines) - picture.placed} waiting"
    )
    text += "  PAUSED: no round is decided" if picture.paused else ""
    return text + (f"  {picture.note}" if picture.note else "")


def age(seconds: float) -> str:
    """A short time span: `12 s`, `3 min`, `5 h`."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _jobs(picture: Picture, width: int) -> Table:
    """The table of jobs. It shows the reason at every width, and in full for jobs that wait."""
    table = Table(box=None, pad_edge=False, expand=True)
    roomy = width >= _ROOMY
    widths = {
        "JOB": 10,
        "NAME": 24 if roomy else 14,
        "ASKS FOR": 24 if roomy else 14,
        "STATE": 9,
        "GPUS": 12,
        "NODES": 40,
    }
    for heading, most in widths.items():
        if heading != "NODES" or roomy:
            table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=most)
    table.add_column("REASON", ratio=1)
    for line in picture.lines:
        table.add_row(
            Text(line.id),
            cell(line.name),
            cell(line.asks),
            Text(line.state, style=STYLES.get(line.state, "")),
            cell(held(line)),
            *([Text(_nodes(line, in_full=width >= _WIDE))] if roomy else []),
            Text(one_line(line.why), no_wrap=line.placed, overflow="ellipsis" if line.placed else "fold"),
        )
    return table


def held(line: Line) -> str:
    """A job's GPUs, such as `4 a100`; `-` without."""
    return f"{line.gpus} {line.gpu_type}" if line.gpus else "-"


def _types(picture: Picture, width: int) -> Table:
    """A line for each GPU type with a bar. A cell of the bar stands for one GPU, or for several on large clusters."""
    table = Table("type", Column("bar", no_wrap=True), "text", box=None, pad_edge=False, show_header=False)
    counts = by_type(picture.nodes)
    cell = max(max((its.total for its in counts.values()), default=0) / max(width // 2, 1), 1.0)
    for gpu_type, its in counts.items():
        bar = Text()
        counted = drawn = 0
        free = its.total - its.allocated - its.others - its.out
        for sign, style, gpus in (
            ("█", "green", its.allocated),
            ("▒", "magenta", its.others),
            ("░", "dim", free),
            ("x", "red", its.out),
        ):
            counted = min(counted + max(gpus, 0), its.total)
            bar.append(sign * (round(counted / cell) - drawn), style=style)
            drawn = round(counted / cell)
        table.add_row(Text(gpu_type, style="bold"), bar, str(its))
    return table


def _nodes(line: Line, *, in_full: bool) -> str:
    names = list(line.nodes)
    return ",".join(names) if in_full or len(names) < 2 else f"{names[0]} +{len(names) - 1}"
