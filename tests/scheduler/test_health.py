"""What is called wrong with the daemon, and what will be."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path

import pytest

from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.safety.health import (
    DiskRecord,
    Findings,
    HealthSettings,
    LoopHealth,
    StepName,
    problems,
    warnings,
)
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.disks import DiskCheck, days_left, spool_check, store_check
from penstock_scheduler.store.sql import open_store
from tests.scheduler.loops import simulated

SETTINGS = HealthSettings()
GIB = 1024**3
DISK = DiskRecord("store", "/state", checked_s=0.0, free_bytes=100 * GIB)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


def found(loop: LoopHealth, clock: SimulatedClock, *disks: DiskRecord, **other: object) -> Findings:
    fields = {"paused": False, "round_s": 60.0, "report_s": None, "reporting": 0} | other
    return Findings(clock.now_s(), loop.started_s, loop.steps(), disks, **fields)  # type: ignore[arg-type]


def ticked(clock: SimulatedClock) -> LoopHealth:
    """A loop after one good tick."""
    loop = LoopHealth(clock.now_s)
    for name in StepName:
        with loop.step(name, 1):
            pass
    return loop


def fail(loop: LoopHealth, name: StepName, error: Exception) -> None:
    with suppress(type(error)), loop.step(name):
        raise error


def test_a_daemon_is_ready_once_it_has_seen_the_cluster(clock):
    assert problems(found(LoopHealth(clock.now_s), clock), SETTINGS) == [
        "the cluster has not been observed yet; see the daemon's log if this stays so"
    ]
    assert problems(found(ticked(clock), clock), SETTINGS) == []


def test_a_cluster_that_hangs_is_a_problem_before_its_command_ends(clock):
    loop = ticked(clock)
    with loop.step(StepName.OBSERVE):
        clock.sleep(15.0)
        assert problems(found(loop, clock), SETTINGS) == []
        clock.sleep(1.0)
        (problem,) = problems(found(loop, clock), SETTINGS)
    assert problem == ("the cluster has not answered for 16 s. Running jobs continue; check it (Slurm: scontrol ping)")
    assert problems(found(loop, clock), SETTINGS) == [], "the command came back"


def test_one_failure_is_forgiven_and_a_series_is_a_problem_until_a_success(clock):
    loop = ticked(clock)
    for _ in range(4):
        assert problems(found(loop, clock), SETTINGS) == []
        clock.sleep(5.0)
        fail(loop, StepName.APPLY, ClusterAway("scontrol: no answer"))
    (problem,) = problems(found(loop, clock), SETTINGS)
    assert problem == "the plan could not be applied for 20 s: scontrol: no answer. Running jobs continue"
    with loop.step(StepName.APPLY, 2):
        pass
    assert problems(found(loop, clock), SETTINGS) == []
    assert loop.steps()[-1].error == "scontrol: no answer", "the last error is still known"


def test_an_unexpected_error_does_not_show_what_it_was_about(clock):
    loop = ticked(clock)
    fail(loop, StepName.DECIDE, KeyError("ada's secret job"))
    assert {step.name: step.error for step in loop.steps()}[StepName.DECIDE] == "KeyError; see the daemon's log"


def test_rounds_that_stop_are_a_problem_unless_an_admin_paused_them(clock):
    loop = ticked(clock)
    clock.sleep(301.0)
    with loop.step(StepName.OBSERVE):
        pass
    assert problems(found(loop, clock, paused=True), SETTINGS) == []
    assert "no round was decided for 5 min" in problems(found(loop, clock), SETTINGS)[0]
    fail(loop, StepName.DECIDE, ClusterAway("no plan"))
    assert problems(found(loop, clock, paused=True), SETTINGS) == [], "nor is a failure before the pause"
    assert "no round could be decided for 5 min: no plan" in problems(found(loop, clock), SETTINGS)[0]
    assert problems(found(loop, clock, round_s=120.0), SETTINGS) == [], "longer rounds may take longer"


def test_a_loop_that_stands_still_is_a_problem(clock):
    loop = ticked(clock)
    clock.sleep(16.0)
    assert "the round loop has done nothing for 16 s" in problems(found(loop, clock), SETTINGS)[0]


def test_a_step_of_a_real_tick_is_noted_with_its_round():
    loop, _, _ = simulated(1)
    loop.tick()
    steps = {step.name: step for step in loop.health.steps()}
    assert all(step.done_s is not None and step.began_s is None for step in steps.values())
    assert (steps[StepName.DECIDE].round, steps[StepName.APPLY].round) == (1, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"error": "/state: No space left on device"}, "the store cannot be written: /state: No space left"),
        ({"free_bytes": 4096}, "the disk of the store (/state) is full"),
        ({"began_s": -16.0}, "the store (/state) has not answered a write for 16 s"),
    ],
)
def test_a_disk_that_takes_nothing_is_a_problem(change: dict[str, object], says: str, clock):
    clock = SimulatedClock(0.0)
    (problem,) = problems(found(ticked(clock), clock, dataclasses.replace(DISK, **change)), SETTINGS)
    assert problem.startswith(says)
    assert warnings(found(ticked(clock), clock, dataclasses.replace(DISK, **change)), SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"free_bytes": 1900 * 1024**2}, "the store (/state) has 1.9 GiB free; free some space"),
        ({"days_left": 3.0}, "the store (/state) has 100 GiB free, full in about 3.0 days at its present growth"),
        ({"days_left": 8.0}, ""),
        ({"free_bytes": None}, ""),
    ],
)
def test_it_warns_before_a_disk_is_full(change: dict[str, object], says: str, clock):
    told = warnings(found(ticked(clock), clock, dataclasses.replace(DISK, **change)), SETTINGS)
    assert [text[: len(says)] for text in told] == ([says] if says else [])


def test_it_warns_if_no_job_reports_any_more(clock):
    loop, now_s = ticked(clock), clock.now_s()
    assert warnings(found(loop, clock, report_s=now_s - 1000, reporting=2), SETTINGS) == []
    assert warnings(found(loop, clock, report_s=now_s - 2000, reporting=0), SETTINGS) == [], "none runs"
    (warning,) = warnings(found(loop, clock, report_s=now_s - 2000, reporting=2), SETTINGS)
    assert warning.startswith("no report of a job has come for 33 min, although 2 running jobs have reported before")


@pytest.mark.parametrize(
    ("samples", "days"),
    [
        (((0, 100), (86400, 90)), 9.0),  # 10 a day, 90 left
        (((0, 100), (43200, 95), (86400, 90)), 9.0),
        (((0, 100), (86400, 100)), None),
        (((0, 90), (86400, 100)), None),  # it was cleaned up
        (((0, 100), (3599, 50)), None),  # too short
        (((0, 100),), None),
        ((), None),
    ],
)
def test_days_left_at_the_present_growth(samples: tuple[tuple[float, int], ...], days: float | None):
    assert days_left(samples) == (None if days is None else pytest.approx(days))


def checks(folder: Path, clock: SimulatedClock) -> list[DiskCheck]:
    (folder / "spool").mkdir()
    return [
        store_check(open_store(folder / "state", writer=True), clock.now_s),
        spool_check(folder / "spool", clock.now_s),
    ]


def test_a_good_disk_is_written_and_left_as_it_was(tmp_path, clock):
    store, spool = checks(tmp_path, clock)
    for check in (store, spool):
        check.check()
        assert check.record.error == ""
        assert check.record.free_bytes
    assert store.record.used_bytes
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_full_disk_is_found_and_found_good_again(small_disk, clock):
    store, spool = checks(small_disk, clock)
    store.check()
    filling = small_disk / "filling"
    with suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(b"\0" * 65536):
            pass
    for check in (store, spool):
        check.check()
        assert problems(found(ticked(clock), clock, check.record), SETTINGS)
    assert "No space left on device" in spool.record.error
    filling.unlink()
    for check in (store, spool):
        check.check()
        assert problems(found(ticked(clock), clock, check.record), SETTINGS) == []
    assert "No space left on device" in spool.record.last_error, "the last error is still known"


@pytest.mark.parametrize("there", ["none", "another"])
def test_a_store_that_is_no_longer_at_its_path_is_found(tmp_path, clock, there: str):
    """Its file was removed or replaced: what penstockd writes is lost with its last open file."""
    check = store_check(open_store(tmp_path, writer=True), clock.now_s)
    check.check()
    assert check.record.error == ""
    file = tmp_path / "penstock.db"
    file.rename(tmp_path / "gone")
    if there == "another":
        file.write_bytes(b"")
    check.check()
    assert "removed or replaced" in check.record.error


def test_a_spool_that_vanishes_is_found(tmp_path, clock):
    _, spool = checks(tmp_path, clock)
    (tmp_path / "spool").rmdir()
    spool.check()
    assert "No such file or directory" in spool.record.error


def test_a_cloud_in_protected_mode_is_a_warning_with_the_remedy(clock):
    (told,) = warnings(found(ticked(clock), clock, cloud_protected="EC2 refuses to end i-1"), SETTINGS)
    assert "EC2 refuses to end i-1" in told
    assert "penstock cloud resume" in told


def test_claims_that_do_not_hold_are_a_warning(clock):
    loop = ticked(clock)
    (text,) = warnings(found(loop, clock, doubted=2), SETTINGS)
    assert text.startswith("jobs that said more of their speed or their end than they have shown: 2;")
    assert "penstock explain JOB" in text
    assert warnings(found(loop, clock), SETTINGS) == []
