"""The other screens of `penstock top`: one job, the help, and the question before an order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Label, Sparkline, Static

from penstock_scheduler.api.messages import JobView
from penstock_scheduler.cli.terminal.cells import LEGEND
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import one_line

HELP = """\
arrows, Page Up, Page Down, Home, End   move through the jobs
Enter     open the job under the cursor; Escape closes it
/         show only jobs that have all the words you type; Escape shows all
s         sort by GPUs, age, user, state or progress
c, h, r   cancel, hold or release the job, after a question
q         quit

The cells above the jobs are the GPUs of each node.
"""

CONSEQUENCES = {
    "cancel": "Slurm ends it. This cannot be undone.",
    "hold": "It is not started until it is released.",
    "release": "The next round considers it again.",
}
"""Kind of order -> what it does to a job."""


@dataclass(frozen=True)
class JobDetail:
    """What the screen of one job shows."""

    view: JobView
    fields: dict[str, str]
    """Label -> text."""
    reasons: tuple[str, ...]
    """Why the job waits or has its GPUs, in sentences."""
    events: tuple[str, ...]
    """What Penstock did with it, oldest first, a line each."""
    speeds: tuple[float, ...]
    """Samples per second of its newest reports, oldest first."""
    output: str
    """The end of its output."""


class JobScreen(Screen[None]):
    """One job, followed until the user closes it.

    Args:
        detail: fetches the job; may take seconds, and raises PenstockError.
        interval_s: pause between two looks, in s.
    """

    CSS = """
    JobScreen Sparkline { height: 2; margin: 0 0 1 0; }
    JobScreen #output { color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]

    def __init__(self, job: str, detail: Callable[[str], JobDetail], interval_s: float) -> None:
        super().__init__()
        self.job = job
        self._detail = detail
        self._interval_s = interval_s
        self._stop = threading.Event()

    def compose(self) -> ComposeResult:
        """The parts of the screen, from top to bottom."""
        with VerticalScroll():
            yield Static(f"Asking penstockd about job {self.job} ...", id="facts", markup=False)
            yield Label("", id="speed", markup=False)
            yield Sparkline([], id="speeds")
            yield Static("", id="events", markup=False)
            yield Static("", id="output", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow the job."""
        self._follow()

    def on_unmount(self) -> None:
        """End the thread that follows."""
        self._stop.set()

    @work(thread=True, exit_on_error=True)
    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                detail = self._detail(self.job)
            except PenstockError as error:
                self.app.call_from_thread(self._show_error, str(error))
            else:
                self.app.call_from_thread(self._show, detail)
            self._stop.wait(self._interval_s)

    def _show_error(self, text: str) -> None:
        if not self.is_running:  # the answer came while the screen was closing
            return
        self.query_one("#facts", Static).update(Text(text, style="red"))

    def _show(self, detail: JobDetail) -> None:
        if not self.is_running:  # the answer came while the screen was closing
            return
        facts = Text()
        width = max(map(len, detail.fields), default=0)
        for label, text in detail.fields.items():
            if text:
                facts.append(f"{label:<{width}}  ", style="bold").append(f"{one_line(text)}\n")
        facts.append("\n" + "\n".join(map(one_line, detail.reasons)) + "\n")
        self.query_one("#facts", Static).update(facts)
        speeds = detail.speeds
        chart = self.query_one(Sparkline)
        chart.display = len(speeds) > 1
        chart.data = list(speeds)
        said = f"samples/s, of the newest {len(speeds)} reports: now {speeds[-1]:.4g}" if len(speeds) > 1 else ""
        self.query_one("#speed", Label).update(said)
        self.query_one("#events", Static).update("\n".join(map(one_line, detail.events)))
        self.query_one("#output", Static).update(f"\n{detail.output}" if detail.output else "")


class Help(ModalScreen[None]):
    """The keys and the signs."""

    CSS = """
    Help { align: center middle; }
    Help Vertical { width: 76; height: auto; border: round $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,enter", "app.pop_screen", "Close")]

    def compose(self) -> ComposeResult:
        """One box."""
        with Vertical():
            yield Static(HELP + LEGEND.replace("   ", "\n"), markup=False)


class Question(ModalScreen[bool]):
    """Asks before an order is given. The answer is True only after `y`.

    Args:
        kind: cancel, hold or release.
        job: the job's id and name.
        running: whether it holds GPUs.
    """

    CSS = """
    Question { align: center middle; }
    Question Vertical { width: 60; height: auto; border: round $warning; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, kind: str, job: str, *, running: bool) -> None:
        super().__init__()
        self._text = f"{kind.capitalize()} job {job}? {CONSEQUENCES[kind]}"
        if kind == "hold" and running:
            self._text += " It keeps running until it ends or is stopped."

    def compose(self) -> ComposeResult:
        """One box."""
        with Vertical():
            yield Static(f"{self._text}\n\ny: yes   n: no", markup=False)
