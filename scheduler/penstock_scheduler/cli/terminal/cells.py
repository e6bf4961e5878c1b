"""GPUs as cells: one sign for each GPU, which tells its job by a letter and, on terminals that have it, by a colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from penstock_scheduler.api.messages import NodeView
from penstock_scheduler.cli.terminal.picture import GpuCounts, Line, Picture, by_type
from penstock_scheduler.people.drawing.svg import is_dark, job_colour, number
from penstock_scheduler.people.safe_text import one_line

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghjkmnpqrstuvwxyz"
"""Without those that look like digits or strokes."""
FREE, PLAIN, HIDDEN, OUT = "·", "▒", "#", "x"
LEGEND = f"letter: a job of the list   {FREE} free   {PLAIN} other Slurm jobs   {HIDDEN} other users' jobs   {OUT} out of service"


class Letters:
    """Gives each job with GPUs a letter of its own, which it keeps for as long as it has GPUs.

    Jobs share letters if there are more jobs than letters.
    """

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def give(self, jobs: Iterable[str]) -> None:
        """Give letters to `jobs`, and take them back from all others."""
        wanted = list(jobs)
        self._of = {job: letter for job, letter in self._of.items() if job in set(wanted)}
        taken = set(self._of.values())
        free = [letter for letter in LETTERS if letter not in taken]
        for job in wanted:
            if job not in self._of:
                self._of[job] = free.pop(0) if free else LETTERS[number(job) % len(LETTERS)]

    def __getitem__(self, job: str) -> str:
        return self._of.get(job, " ")


def cell(text: str, style: str = "") -> Text:
    """A text of users or of the cluster, in one line."""
    return Text(one_line(text), style=style)


def style(job: str) -> str:
    """The colour of a job, which follows from its id."""
    colour = job_colour(job)
    return f"{'white' if is_dark(colour) else 'black'} on {colour}"


def node_cells(node: NodeView, lines: Sequence[Line], letters: Letters) -> Text:
    """The GPUs of one node.

    Args:
        lines: the jobs that hold GPUs of it.
    """
    cells, shown = Text(no_wrap=True), 0
    for line in lines:
        held = min(line.nodes[node.name], node.gpus - shown)
        cells.append(letters[line.id] * held, style=style(line.id))
        shown += held
    hidden = min(max(node.allocated - shown, 0), node.gpus - shown)
    others = min(node.others, node.gpus - shown - hidden)
    free = node.gpus - shown - hidden - others
    cells.append(HIDDEN * hidden, style="dim")
    cells.append(PLAIN * others, style="magenta")
    usable = max(free - node.out_of_reach, 0) if node.may_start else 0
    cells.append(FREE * usable, style="dim")
    cells.append(OUT * (free - usable), style="red")
    return cells


def cluster_cells(picture: Picture, width: int, letters: Letters) -> list[Text]:
    """All nodes, by GPU type, in as many columns as fit into `width`. A node that is asked to be left has a `!`."""
    on: dict[str, list[Line]] = {}
    for line in picture.lines:
        for name in line.nodes:
            on.setdefault(name, []).append(line)
    rows: list[Text] = []
    for gpu_type, counts in by_type(picture.nodes).items():
        rows.append(_heading(gpu_type, counts, picture.prices.get(gpu_type)))
        nodes = counts.nodes
        label = max(len(node.name) for node in nodes) + 1
        most = max(node.gpus for node in nodes)
        columns = max((width - 2) // (label + most + 3), 1)
        for first in range(0, len(nodes), columns):
            row = Text("  ", no_wrap=True)
            for node in nodes[first : first + columns]:
                text = f"{node.name}{'!' if node.leave else ''}"
                row.append(f"{text:<{label}} ", style="yellow" if node.leave else "" if node.may_start else "red")
                row.append_text(node_cells(node, on.get(node.name, []), letters))
                row.append(" " * (most - node.gpus + 2))
            row.rstrip()
            rows.append(row)
    return rows


def _heading(gpu_type: str, counts: GpuCounts, price: float | None) -> Text:
    text = Text(gpu_type, style="bold", no_wrap=True)
    text.append(f"  {counts}", style="not bold")
    text.append(f", price {price:.3g}" if price else "", style="dim not bold")
    return text
