"""The report's pictures as PNGs, for slides and mails. Needs the extra `report` (matplotlib)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_scheduler.people.drawing.colours import job_colour
from penstock_scheduler.people.drawing.gantt import bars, rows
from penstock_scheduler.people.drawing.history import History
from penstock_scheduler.simulator.figures import Bars, Figures, Lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "no PNGs, because matplotlib is not installed: pip install matplotlib. The page has the same pictures"
"""Message if they cannot be drawn."""


class NoMatplotlib(Exception):
    """`MISSING`."""

    def __init__(self) -> None:
        super().__init__(MISSING)


def write_pictures(drawn: Figures, folder: Path) -> list[Path]:
    """Write all pictures as PNGs, and return their paths. Raises NoMatplotlib and OSError."""
    written = [_compare(drawn, folder / "policies.png")]
    written += [_lines(drawn, lines, folder / f"{lines.name}.png") for lines in drawn.lines]
    names = [
        f"gpus-{''.join(c if c.isalnum() or c in '-_.' else '-' for c in each.title)}.png" for each in drawn.gantts
    ]
    written += [_gantt(drawn, each, folder / name) for each, name in zip(drawn.gantts, names, strict=True)]
    return written


def _compare(drawn: Figures, path: Path) -> Path:
    with _figure(path, 11, 3.4 * -(-len(drawn.comparison) // 3)) as figure:
        rows = max(-(-len(drawn.comparison) // 3), 1)
        for number, bars in enumerate(drawn.comparison):
            _bars(figure.add_subplot(rows, 3, number + 1), drawn, bars)
        whiskers = f"whiskers: 95 % confidence interval over {drawn.seeds} seeds" if drawn.seeds > 1 else "one seed"
        figure.suptitle(_fill(f"Policy against policy: {drawn.heading} ({whiskers})"), fontsize=12)
    return path


def _bars(axes: Axes, drawn: Figures, bars: Bars) -> None:
    for place, bar in enumerate(bars.bars):
        axes.bar(place, bar.mean, width=0.65, color=drawn.colours[bar.policy])
        above = bar.mean
        if bar.half is not None:
            below = min(bar.half, bar.mean)
            axes.errorbar(place, bar.mean, yerr=[[below], [bar.half]], color="#222", capsize=4, linewidth=1.2)
            above += bar.half
        axes.annotate(
            f"{bar.mean:.3g}", (place, above), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9
        )
    most = max(bar.mean + (bar.half or 0.0) for bar in bars.bars) or 1.0
    axes.set_ylim(0, most * 1.15)
    axes.set_xticks(range(len(bars.bars)), [bar.policy for bar in bars.bars], rotation=20 if len(bars.bars) > 3 else 0)
    axes.set_title(bars.label, fontsize=10, loc="left")
    axes.grid(axis="x", visible=False)


def _lines(drawn: Figures, picture: Lines, path: Path) -> Path:
    with _figure(path, 9, 4.2) as figure:
        axes = figure.add_subplot()
        for line in picture.lines:
            colour = drawn.colours[line.policy]
            axes.plot(picture.x, line.mean, color=colour, linewidth=1.8, label=line.policy)
            if line.low is not None and line.high is not None:
                axes.fill_between(picture.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
        axes.set_ylim(0, None if picture.most is None else picture.most * 1.02)
        if picture.ticks is not None:
            axes.set_xscale("log")
            axes.set_xticks([at for at, _ in picture.ticks], [label for _, label in picture.ticks])
            axes.minorticks_off()
            axes.set_xlim(picture.x[0], picture.x[-1])
        else:
            axes.set_xlim(0, drawn.end_s / drawn.unit[1])
        axes.set_xlabel(picture.x_label)
        axes.set_ylabel(picture.y_label)
        bands = f"; bands: 95 % confidence interval over {drawn.seeds} seeds" if drawn.seeds > 1 else ""
        axes.set_title(_fill(f"{picture.title}: {drawn.heading}{bands}"), fontsize=10, loc="left")
        axes.legend(frameon=False)
    return path


def _gantt(drawn: Figures, history: History, path: Path) -> Path:
    """A chart with a row for each GPU and a colour for each job."""
    drawn_rows = rows(history)
    height = drawn_rows.end
    with _figure(path, 11, min(max(height * 0.11 + 1.2, 3.0), 40.0)) as figure:
        axes = figure.add_subplot()
        drawn_bars: dict[tuple[float, int, str], list[tuple[float, float]]] = {}
        for job, span, node, gpus in bars(history):
            begin, long = span.start_s / drawn.unit[1], (span.end_s - span.start_s) / drawn.unit[1]
            place = drawn_rows.of[node, gpus[0]], len(gpus), job_colour(job.id)
            drawn_bars.setdefault(place, []).append((begin, long))
        for (row, tall, colour), spans in drawn_bars.items():
            axes.broken_barh(spans, (row + 0.08, tall - 0.16), facecolors=colour, linewidth=0)
        most = 40  # names of more nodes would overlap
        shown = list(drawn_rows.nodes.items())[:: max(-(-len(history.nodes) // most), 1)]
        axes.set_yticks([at for _, at in shown], [name for name, _ in shown], fontsize=8)
        axes.set_ylim(max(height, 1.0), 0)
        axes.set_xlim(0, drawn.end_s / drawn.unit[1])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{drawn.unit[0]} since the start")
        axes.set_ylabel("nodes, one row for each GPU")
        axes.set_title(
            _fill(f"The job on each GPU under {history.title}, one colour for each job: {drawn.heading}"),
            fontsize=10,
            loc="left",
        )
    return path


@contextmanager
def _figure(path: Path, width_in: float, height_in: float) -> Iterator[Any]:
    """An empty figure, which is written at the end of the block. It needs no screen and changes no global state."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib from None
    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "font.size": 10,
    }
    with rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=120)


def _fill(text: str) -> str:
    return textwrap.fill(text, 115)
