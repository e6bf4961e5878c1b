"""The screen of `penstock top`: GPUs as cells above, the jobs below, and both follow the cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

from rich.text import Text
from textual import content, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import DataTable, Footer, Input, Static
from textual.widgets.data_table import RowDoesNotExist

from penstock_scheduler.api.messages import JobView
from penstock_scheduler.cli.terminal.cells import Letters, cell, cluster_cells, style
from penstock_scheduler.cli.terminal.picture import Line, Picture
from penstock_scheduler.cli.terminal.printed import STYLES, held, title
from penstock_scheduler.cli.terminal.screens import Help, JobDetail, JobScreen, Question
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import guard_table, one_line
from penstock_scheduler.people.units import clock

SORTS: dict[str, Callable[[Line], tuple[object, ...]]] = {
    "GPUs first": lambda line: line.order,
    "newest": lambda line: (-line.submit_s, line.order),
    "most GPUs": lambda line: (-line.gpus, line.order),
    "user": lambda line: (line.user, line.order),
    "state": lambda line: (line.state, line.order),
    "progress": lambda line: (-(line.progress or 0.0), line.order),
}
"""Name of an order of the jobs -> its key."""


class Source(Protocol):
    """Where the screens get what they show, and send orders. Each method may take seconds, and raises PenstockError."""

    def look(self) -> Picture:
        """The cluster as it is now."""

    def detail(self, job: str) -> JobDetail:
        """One job as it is now."""

    def order(self, kind: str, job: str) -> JobView:
        """Cancel, hold or release a job."""


class Jobs(DataTable[Text]):
    """The table of jobs."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Job")]


class TopApp(App[None]):
    """Follows the cluster until the user quits.

    Args:
        interval_s: pause between two looks, in s.
    """

    TITLE = "penstock top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: 1; text-style: bold; }
    #away { height: auto; color: $error; display: none; }
    #gpus { height: auto; max-height: 40%; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #status { height: 1; color: $text-muted; }
    #jobs { height: 1fr; }
    #refused { height: auto; max-height: 3; color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("c", "order('cancel')", "Cancel"),
        Binding("h", "order('hold')", "Hold"),
        Binding("r", "order('release')", "Release"),
        Binding("escape", "clear", "Clear the filter", show=False),
    ]

    def __init__(self, source: Source, interval_s: float = 2.0) -> None:
        guard_table(content._CONTROL_STRIP_TRANSLATE)  # Textual writes to the terminal itself
        super().__init__()
        self.source = source
        self._interval_s = interval_s
        self._picture: Picture | None = None
        self._sort = next(iter(SORTS))
        self._words: list[str] = []
        self._letters = Letters()
        self._stop = threading.Event()

    def compose(self) -> ComposeResult:
        """The parts of the screen, from top to bottom."""
        yield Static("Asking penstockd ...", id="title", markup=False)
        yield Static("", id="away", markup=False)
        with VerticalScroll(id="gpus", can_focus=False):
            yield Static("", id="cells")
        yield Input(placeholder="words that a job must have, such as: ada queued a100", id="filter")
        yield Static("", id="status", markup=False)
        yield Jobs(id="jobs", cursor_type="row", zebra_stripes=True)
        yield Static("", id="refused", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        self.table.focus()
        self._follow()

    def on_unmount(self) -> None:
        """End the thread that follows."""
        self._stop.set()

    @property
    def table(self) -> Jobs:
        """The table of jobs."""
        return self.screen_stack[0].query_one(Jobs)

    def _part(self, name: str) -> Static:
        return self.screen_stack[0].query_one(name, Static)

    @property
    def selected(self) -> str | None:
        """The job on which the cursor is."""
        if not self.table.row_count:
            return None
        return self.table.coordinate_to_cell_key(self.table.cursor_coordinate).row_key.value

    @work(thread=True, exit_on_error=True)
    def _follow(self) -> None:
        away_s: float | None = None
        while not self._stop.is_set():
            try:
                picture = self.source.look()
            except PenstockError as error:
                away_s = away_s or time.time()
                self.call_from_thread(
                    self._show_away, f"No answer since {clock(away_s)}; what you see is older. {error}"
                )
            else:
                away_s = None
                self.call_from_thread(self._show, picture)
            self._stop.wait(self._interval_s)

    def _show_away(self, text: str) -> None:
        if not self.is_running:  # the answer came while the screen was closing
            return
        line = self._part("#away")
        line.update(text)
        line.display = True

    def _show(self, picture: Picture) -> None:
        if not self.is_running:  # the answer came while the screen was closing
            return
        self._picture = picture
        self._part("#away").display = False
        self._draw()

    def on_resize(self, event: Resize) -> None:
        """Draw for the new width."""
        del event
        self._draw()

    def _draw(self) -> None:
        if (picture := self._picture) is None:
            return
        self._part("#title").update(title(picture, time.time()))
        self._letters.give(line.id for line in picture.lines if line.gpus)
        rows = cluster_cells(picture, self.size.width, self._letters)
        self._part("#cells").update(Text("\n").join(rows))
        self._draw_jobs(picture)
        refused = [f"Job {each.id} ({each.name}) is not managed: {each.text}" for each in picture.refused]
        self._part("#refused").update("\n".join(map(one_line, refused)))
        self._part("#refused").display = bool(refused)

    def _draw_jobs(self, picture: Picture) -> None:
        """Fill the table anew, and leave cursor and scrolling where they were."""
        table, before = self.table, self.selected
        scroll = table.scroll_offset
        lines = sorted(filter(self._matches, picture.lines), key=SORTS[self._sort])
        table.clear(columns=True)
        roomy = self.size.width >= 100
        for name in ("", "JOB", "USER", "NAME", "STATE", "ASKS FOR", "GPUS", "DONE", "WHY"):
            if roomy or name not in ("NAME", "ASKS FOR"):
                table.add_column(name)
        for line in lines:
            done = "" if line.progress is None else f"{line.progress:.0%}"
            cells = [
                Text(self._letters[line.id], style=style(line.id) if line.gpus else ""),
                Text(line.id),
                cell(line.user[:12]),
            ]
            cells += [cell(line.name[:24])] if roomy else []
            cells += [Text(line.state, style=STYLES.get(line.state, ""))]
            cells += [cell(line.asks[:24])] if roomy else []
            cells += [cell(held(line)), Text(done, justify="right"), cell(line.why)]
            table.add_row(*cells, key=line.id)
        if before is not None:
            with contextlib.suppress(RowDoesNotExist):  # the job has ended, or the filter hides it
                table.move_cursor(row=table.get_row_index(before), scroll=False)
        table.scroll_to(scroll.x, scroll.y, animate=False)
        hidden = len(picture.lines) - len(lines)
        parts = [f"order: {self._sort}", f"{hidden} hidden by the filter" if hidden else ""]
        parts.append(f"only the newest {len(picture.lines)} jobs" if picture.more else "")
        self._part("#status").update("; ".join(filter(None, parts)))

    def _matches(self, line: Line) -> bool:
        has = f"{line.id} {line.name} {line.user} {line.state} {line.asks} {line.gpu_type} {line.why}".lower()
        return all(word in has or word in line.nodes for word in self._words)

    def action_help(self) -> None:
        """Show the keys and the signs."""
        self.push_screen(Help())

    def action_sort(self) -> None:
        """Sort by the next order."""
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self.notify(f"order: {self._sort}", timeout=2)
        self._draw()

    def action_filter(self) -> None:
        """Ask for the words of the filter."""
        line = self.query_one("#filter", Input)
        line.display = True
        line.focus()

    def action_clear(self) -> None:
        """Show all jobs again."""
        line = self.query_one("#filter", Input)
        line.value = ""
        line.display = False
        self.table.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._words = event.value.lower().split()
        self._draw()

    def on_input_submitted(self) -> None:
        """Go back to the jobs, with the filter on."""
        self.query_one("#filter", Input).display = bool(self._words)
        self.table.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the job on which the user pressed Enter."""
        if event.row_key.value is not None:
            self.push_screen(JobScreen(event.row_key.value, self.source.detail, self._interval_s))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Which keys work: the list's only on the list, and none behind a question."""
        del parameters
        if action in ("filter", "sort", "clear"):
            return len(self.screen_stack) == 1
        return action not in ("order", "help") or not isinstance(self.screen, (Question, Help))

    def action_order(self, kind: str) -> None:
        """Ask whether to cancel, hold or release the job, and do it."""
        job = self.screen.job if isinstance(self.screen, JobScreen) else self.selected
        if job is None:
            return
        line = next((each for each in self._picture.lines if each.id == job), None) if self._picture else None
        name = one_line(f"{job} ({line.name})") if line is not None and line.name else job

        def answered(yes: bool | None) -> None:
            if yes:
                self._order(kind, job)

        self.push_screen(Question(kind, name, running=line is not None and line.gpus > 0), answered)

    @work(thread=True, exit_on_error=True)
    def _order(self, kind: str, job: str) -> None:
        try:
            self.source.order(kind, job)
        except PenstockError as error:
            self.call_from_thread(self.notify, f"job {job}: {error}", severity="error", timeout=10, markup=False)
        else:
            done = {"cancel": "is being cancelled", "hold": "is held", "release": "is released"}[kind]
            self.call_from_thread(self.notify, f"job {job} {done}", markup=False)
