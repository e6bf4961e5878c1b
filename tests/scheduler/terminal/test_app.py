"""The screen of `penstock top`, driven by keys, over the real API and real HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from penstock_scheduler.cli.terminal.app import Jobs, TopApp
from penstock_scheduler.cli.terminal.screens import JobScreen, Question
from penstock_scheduler.cli.terminal.source import Daemon
from penstock_scheduler.model import Phase
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.store.sql import SqlStore
from tests.scheduler.builders import job, on
from tests.scheduler.service.api import ADAS, OBSERVED, Api, report, serving

PATIENCE_S = 60.0


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as running:
        yield running


def screen(app: TopApp) -> str:
    """The text of the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, screen(pilot.app)
        await pilot.pause(0.05)


def drive(
    api: Api,
    steps: Callable[[TopApp, Pilot[None]], Awaitable[None]],
    *,
    who: str = "oz",
    size: tuple[int, int] = (80, 24),
) -> None:
    """Run the screen as a user, and do the steps once it shows jobs."""

    async def run() -> None:
        with api.client(who) as penstock:
            app = TopApp(Daemon(penstock), 0.1)
            async with app.run_test(size=size, notifications=True) as pilot:
                await until(pilot, lambda: app.table.row_count > 0)
                await steps(app, pilot)

    asyncio.run(run())


def rows(app: TopApp) -> list[str]:
    return [str(key.value) for key in app.table.rows]


@pytest.mark.parametrize("size", [(80, 24), (150, 40)])
def test_gpus_jobs_and_keys_are_on_one_screen(api, size):
    async def steps(app, pilot):
        await until(pilot, lambda: "t4-00" in screen(app))
        shown = screen(app)
        assert "2 of 8 allocated" in shown
        assert rows(app) == ["1", "2"]
        assert "q Quit" in shown
        assert all(len(line) <= size[0] for line in shown.splitlines())

    drive(api, steps, size=size)


def test_the_screen_follows_the_cluster(api):
    async def steps(app, pilot):
        api.look(ADAS, job("7", user="bob", phase=Phase.RUNNING, allocation=on("t4", t4_01=4)))
        await until(pilot, lambda: "7" in rows(app) and "6 of 8 allocated" in screen(app))

    drive(api, steps)


def test_users_see_their_own_jobs_and_that_others_hold_gpus(api):
    async def steps(app, pilot):
        assert rows(app) == ["2"]
        await until(pilot, lambda: "##" in screen(app))  # ada's two GPUs
        assert "ada" not in screen(app)

    drive(api, steps, who="bob")


def test_filter_and_sort(api):
    async def steps(app, pilot):
        await pilot.press("slash", *"BOB queued")
        await until(pilot, lambda: rows(app) == ["2"])
        assert "1 hidden by the filter" in screen(app)
        await pilot.press("enter", "s")
        assert rows(app) == ["2"], "the filter stays, and the letters were no keys"
        await pilot.press("escape")
        await until(pilot, lambda: len(rows(app)) == 2)
        assert app.query_one(Input).display is False

    drive(api, steps)


def test_the_cursor_stays_on_its_job_while_others_come_and_go(api):
    async def steps(app, pilot):
        await pilot.press("down")
        assert app.selected == "2"
        newer = [job(str(number), user="bob") for number in range(3, 40)]
        api.look(ADAS, job("2", user="bob", max_gpus=2), *newer)
        await until(pilot, lambda: len(rows(app)) == 39)
        assert app.selected == "2"

    drive(api, steps)


def test_an_order_is_given_only_after_a_yes(api):
    async def steps(app, pilot):
        for no in ("n", "escape", "q"):
            await pilot.press("c")
            await until(pilot, lambda: isinstance(app.screen, Question))
            assert "Cancel job 1 (name-1)? Slurm ends it. This cannot be" in screen(app)
            await pilot.press(no)
            await until(pilot, lambda: len(app.screen_stack) == 1)
        assert api.submitter.cancelled == []
        await pilot.press("h", "y")
        await until(pilot, lambda: "1" in api.submitter.held)
        await pilot.press("r", "y")
        await until(pilot, lambda: not api.submitter.held)
        await pilot.press("c", "y")
        await until(pilot, lambda: api.submitter.cancelled == ["1"])

    drive(api, steps)


def test_a_refused_order_says_why(api):
    async def steps(app, pilot):
        await pilot.press("r", "y")
        await until(pilot, lambda: "nobody holds it" in screen(app))

    drive(api, steps, size=(120, 30))


def test_a_job_has_its_reason_its_speed_and_its_output(api, tmp_path):
    (tmp_path / "1.out").write_text("epoch 3 [bold]loss[/bold] 0.25\n")
    store: SqlStore = api.board.store
    bodies = [OBSERVED | {"step_time_s": 1 / (number + 1)} for number in range(3)]
    store.add_reports([report(number, body=body) for number, body in enumerate(bodies)])

    async def steps(app, pilot):
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, JobScreen) and "loss" in screen(app))
        shown = screen(app)
        assert "epoch 3 [bold]loss[/bold] 0.25" in shown, "output is text and no markup"
        assert "Job 1 runs" in shown
        assert "samples/s, of the newest 3 reports: now 48" in shown
        assert "Filter" not in shown
        assert "Cancel" in shown
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)

    drive(api, steps, size=(100, 40))


def test_names_are_text_and_no_markup(api):
    async def steps(app, pilot):
        api.look(ADAS, dataclasses.replace(job("9", user="bob"), name="[red]x[/red]"))
        await until(pilot, lambda: "[red]x[/red]" in screen(app))

    drive(api, steps, size=(120, 30))


def test_what_was_shown_stays_while_penstockd_does_not_answer(api):
    class Silent(Daemon):
        away = False

        def look(self):
            if self.away:
                raise PenstockError("penstockd does not answer")
            return super().look()

    async def run() -> None:
        with api.client("oz") as penstock:
            source = Silent(penstock)
            app = TopApp(source, 0.1)
            async with app.run_test(size=(80, 24)) as pilot:
                await until(pilot, lambda: app.table.row_count == 2)
                source.away = True
                await until(pilot, lambda: "No answer since" in screen(app))
                assert rows(app) == ["1", "2"]
                source.away = False
                await until(pilot, lambda: "No answer since" not in screen(app))

    asyncio.run(run())


def test_an_answer_that_comes_while_the_screen_closes_is_dropped(api):
    async def run() -> None:
        with api.client("oz") as penstock:
            source = Daemon(penstock)
            app = TopApp(source, 0.1)
            async with app.run_test(size=(80, 24)) as pilot:
                await until(pilot, lambda: app.table.row_count == 2)
                await pilot.press("enter")
                await until(pilot, lambda: isinstance(app.screen, JobScreen))
                shown = app.screen
            picture, detail = source.look(), source.detail(shown.job)
            app._show(picture)
            app._show_away("No answer")
            shown._show(detail)
            shown._show_error("No answer")

    asyncio.run(run())


def test_help_tells_keys_and_signs_and_q_ends(api):
    async def steps(app, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: "out of service" in screen(app))
        await pilot.press("escape", "q")
        await until(pilot, lambda: not app.is_running)

    drive(api, steps)


def test_the_table_says_what_enter_does():
    assert [binding.description for binding in Jobs.BINDINGS if binding.key == "enter"] == ["Job"]
