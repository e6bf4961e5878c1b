"""A time limit over all runs, worked by hand. Times in seconds."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock_profiles.wire import ControlMessage
from penstock_slurm.gateway.parse_jobs import parse_jobs
from penstock_slurm.jobs import time_limits
from penstock_slurm.jobs.time_limits import LimitedRun, left_s, next_limit_s
from tests.slurm_plugin.gateway.test_parse import MARKS, OF_22_05, RUNNING, answer

(JOB,) = parse_jobs(answer(RUNNING), MARKS, OF_22_05)
FIRST = LimitedRun(restarts=0, start_s=1000, seen_s=1900, limit_s=3600)


def control(**fields: object) -> ControlMessage:
    return ControlMessage.model_validate({"job_id": "4_2", "epoch": 1, "round": 1} | fields)


def test_what_is_left_is_the_limit_less_the_run_and_with_what_a_move_takes() -> None:
    assert left_s(FIRST, None, 60) == 3600 - 900 + 60
    assert left_s(FIRST, control(), 0) == 2700
    assert left_s(dataclasses.replace(FIRST, seen_s=9000), None, 0) == 60, "Slurm's shortest"


def test_whole_minutes_of_slurm_do_not_add_up() -> None:
    """2,710 s were set as 46 minutes, which is 2,760 s. A run of 100 s leaves 2,610 s, not 2,660, unless the limit was
    changed."""
    second = LimitedRun(restarts=1, start_s=3000, seen_s=3100, limit_s=2760)
    given = control(time_limit_s=2710, time_limit_restarts=1)
    assert left_s(second, given, 0) == 2610
    assert left_s(dataclasses.replace(second, limit_s=7200), given, 0) == 7100
    assert left_s(second, control(time_limit_s=2710, time_limit_restarts=0), 0) == 2660


MOVED = {"time_limit_s": 2710, "time_limit_restarts": 1, "submitted_limit_s": 3600}
"""The second run has what was left after a move. Slurm shows it as 46 minutes."""


@pytest.mark.parametrize(
    ("restarts", "told", "run", "limit_s"),
    [
        (
            1,
            control(time_limit_s=100, time_limit_restarts=1, submitted_limit_s=3600),
            FIRST,
            100.0,
        ),  # Penstock moves it
        (2, control(**MOVED), LimitedRun(1, 3000, 5000, 2760), 3600.0),  # it requeues itself after a move
        (2, control(**MOVED), LimitedRun(1, 3000, 5000, 7200), None),  # the same, but its user has changed the limit
        (1, control(submitted_limit_s=3600), FIRST, None),  # it requeues itself, and has not been moved
        (3, control(**MOVED), LimitedRun(2, 6000, 9000, 3600), None),  # it requeues itself again
        (1, None, None, None),
    ],
)
def test_the_limit_of_the_next_run(
    restarts: int, told: ControlMessage | None, run: LimitedRun | None, limit_s: float | None
) -> None:
    """What is left after a move. A job that requeues itself has its whole limit, as in Slurm."""
    waiting = dataclasses.replace(JOB, state="PENDING", restarts=restarts)
    assert next_limit_s(waiting, run, told) == limit_s


def test_a_run_is_remembered_while_its_job_is_there() -> None:
    runs = time_limits.seen({}, [JOB], JOB.start_s + 5)
    assert runs == {JOB.id: LimitedRun(JOB.restarts, JOB.start_s, JOB.start_s + 5, 300.0)}
    leaving = dataclasses.replace(JOB, state="COMPLETING", restarts=JOB.restarts + 1)
    assert time_limits.seen(runs, [leaving], JOB.start_s + 9) == runs
    assert time_limits.seen(runs, [], JOB.start_s + 9) == {}


@pytest.mark.parametrize(
    ("max_time_s", "limit_s", "admitted"),
    [(None, None, True), (None, 3600, True), (3600, 3600, True), (3600, 3601, False), (3600, None, False)],
)
def test_a_job_runs_only_in_partitions_that_let_it_run_to_its_limit(
    max_time_s: float | None, limit_s: float | None, admitted: bool
) -> None:
    assert time_limits.admits(max_time_s, limit_s) is admitted


WAITING = dataclasses.replace(
    JOB, state="PENDING", restarts=1, partition=("all",), time_limit_s=1800.0, deadline_s=None
)


@pytest.mark.parametrize(
    ("left_s", "max_time_s", "limit_s"),
    [
        (1790.0, 1800.0, 1790.0),
        (1850.0, 1800.0, 1800.0),  # 10 s of 30 min, and 60 s for the move: MaxTime is 30 min
        (1850.0, 1200.0, 1800.0),  # Slurm let it run with more than MaxTime before (PartitionTimeLimit of its QOS)
        (1850.0, None, 1850.0),
        (None, 1800.0, None),  # every run has the whole limit
    ],
)
def test_what_a_move_adds_does_not_exceed_maxtime(
    left_s: float | None, max_time_s: float | None, limit_s: float | None
) -> None:
    assert time_limits.limit_there_s(WAITING, left_s, "all", max_time_s, 0.0) == limit_s


def test_a_job_keeps_the_default_time_of_its_partition_in_another_one() -> None:
    assert time_limits.limit_there_s(WAITING, None, "a100", None, 0.0) == 1800.0


def test_a_job_without_a_limit_never_gets_the_year_of_slurms_backfill_scheduler() -> None:
    free = dataclasses.replace(WAITING, time_limit_s=None)
    assert time_limits.limit_there_s(free, None, "all", None, 0.0) == math.inf
    assert time_limits.limit_there_s(free, None, "all", 1800.0, 0.0) is None, "the partition's"
    (year,) = parse_jobs(answer(RUNNING.replace("%q5:00%q", "%q365-00:00:00%q")), MARKS, OF_22_05)
    assert year.time_limit_s is None


def test_a_limit_ends_before_the_deadline_or_slurm_ends_the_job_at_once() -> None:
    due = dataclasses.replace(WAITING, deadline_s=10_000.0)
    assert time_limits.limit_there_s(due, 1850.0, "all", None, 9_000.0) == 960.0, "1000 s in whole minutes"
    assert time_limits.limit_there_s(due, 300.0, "all", None, 9_000.0) == 300.0
    assert time_limits.limit_there_s(due, 300.0, "all", None, 9_990.0) == 60.0, "Slurm's shortest"
