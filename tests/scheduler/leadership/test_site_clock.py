"""Several penstockd on one database go by the database's time, whatever their hosts' clocks say."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from penstock_scheduler.store.leadership.lease import boot_s
from penstock_scheduler.store.leadership.site_clock import SiteClock
from penstock_scheduler.store.sql import open_store
from tests.scheduler.leadership.test_takeover import leads

ROOT = Path(__file__).parents[3]


def told(clock: SiteClock, ahead_s: float, took_s: float = 0.0) -> None:
    """The database, whose clock is ahead of this machine's, answers a question that took `took_s`."""
    now_s = boot_s()
    clock.heard(REAL() + ahead_s - took_s / 2, now_s - took_s, now_s)


REAL = time.time


def test_without_a_database_it_is_this_machines_clock():
    assert SiteClock().now_s() == pytest.approx(time.time(), abs=1)


@pytest.mark.parametrize("wrong_s", [600.0, -600.0])
def test_a_wrong_clock_has_no_effect_also_when_it_is_set(
    wrong_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(time, "time", lambda: REAL() + wrong_s)
    clock = SiteClock()
    assert clock.now_s() == pytest.approx(REAL() + wrong_s, abs=1)
    with caplog.at_level(logging.WARNING):
        told(clock, 0.0)
    assert clock.now_s() == pytest.approx(REAL(), abs=1)
    assert f"this machine's clock was {wrong_s:+.0f} s off" in caplog.records[0].__dict__["text"]
    monkeypatch.setattr(time, "time", REAL)
    assert clock.now_s() == pytest.approx(REAL(), abs=1)


def test_small_differences_and_slow_answers_do_not_set_it():
    """Otherwise, times would go back and forth."""
    clock = SiteClock()
    told(clock, 0.0)
    told(clock, 0.4)
    told(clock, 5.0, took_s=10.0)
    assert clock.now_s() == pytest.approx(REAL(), abs=0.2)
    told(clock, 2.0)
    assert clock.now_s() == pytest.approx(REAL() + 2.0, abs=0.2)


def test_the_lease_tells_it_the_time_of_the_database_again_and_again(database):
    lease = leads(database, "a")  # it confirms its term from now on
    heard: list[float] = []
    lease.tell_time(lambda time_s: heard.append(time_s()))
    assert len(heard) == 1
    until_s = time.monotonic() + 30
    while len(heard) < 3 and time.monotonic() < until_s:
        time.sleep(0.05)
    lease.close()
    assert len(heard) >= 3
    assert heard == sorted(heard)
    assert heard[-1] == pytest.approx(time.time(), abs=60)


def test_what_is_stored_takes_its_time_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The audit log of a penstockd whose clock is ten minutes ahead."""
    clock = SiteClock()
    monkeypatch.setattr("penstock_scheduler.store.leadership.site_clock.SITE_CLOCK", clock)
    monkeypatch.setattr(time, "time", lambda: REAL() + 600)
    told(clock, 0.0)
    store = open_store(tmp_path, writer=True)
    store.note("ada", "user", "GET /v1/x", "", allowed=True)
    (line,) = store.audit()
    store.close()
    assert line.time_s == pytest.approx(REAL(), abs=5)


def test_no_part_that_stores_times_asks_the_machine():
    """The commands, the nodes' agents and a backup run where no penstockd has asked the database."""
    own = {"store/leadership/site_clock.py", "store/backup.py", "daemon/standing_by.py"}
    folder = ROOT / "scheduler/penstock_scheduler"
    asks = {
        str(path.relative_to(folder))
        for room in ("accounts", "burst", "daemon", "jobs", "rounds", "store")
        for path in (folder / room).rglob("*.py")
        if re.search(r"\btime\.time\(|datetime\.now\(", path.read_text(encoding="utf-8"))
    }
    assert asks == own
