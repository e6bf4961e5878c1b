"""A time limit over all runs, worked by hand. Times in seconds."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_profiles.wire import ControlMessage
from penstock_slurm import time_limits
from penstock_slurm.gateway.parse_jobs import parse_jobs
from penstock_slurm.time_limits import LimitedRun, left_s, next_limit_s
from tests.slurm_plugin.gateway.test_parse import OF_22_05, RUNNING, SEPARATOR, answer

(JOB,) = parse_jobs(answer(RUNNING), SEPARATOR, OF_22_05)
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


@pytest.mark.parametrize(
    ("restarts", "told", "run", "limit_s"),
    [
        (1, None, FIRST, 2760.0),
        (1, control(time_limit_s=100, time_limit_restarts=1), FIRST, 100.0),
        (1, control(time_limit_s=100, time_limit_restarts=0), None, None),
        (2, None, FIRST, None),
        (1, None, None, None),
    ],
)
def test_the_limit_of_the_next_run(
    restarts: int, told: ControlMessage | None, run: LimitedRun | None, limit_s: float | None
) -> None:
    """The limit written before the stop counts; else the last observed run; else nothing changes."""
    waiting = dataclasses.replace(JOB, state="PENDING", restarts=restarts)
    assert next_limit_s(waiting, run, told, 60) == limit_s


def test_a_run_is_remembered_while_its_job_is_there() -> None:
    runs = time_limits.seen({}, [JOB], JOB.start_s + 5)
    assert runs == {JOB.id: LimitedRun(JOB.restarts, JOB.start_s, JOB.start_s + 5, 300.0)}
    leaving = dataclasses.replace(JOB, state="COMPLETING", restarts=JOB.restarts + 1)
    assert time_limits.seen(runs, [leaving], JOB.start_s + 9) == runs
    assert time_limits.seen(runs, [], JOB.start_s + 9) == {}
