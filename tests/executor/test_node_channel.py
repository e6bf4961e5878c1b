"""The job's end of the channel to its node's agent, with a real process that makes steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_executor.node_channel import Channel
from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobControl, JobStatus, control_path, statuses_dir

NUMBER = 7
PATIENCE_S = 60.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    statuses_dir(tmp_path, NUMBER).mkdir(parents=True)
    return tmp_path


def tell(run_dir: Path, number: int, **fields: object) -> None:
    control = JobControl.model_validate({"number": number, **fields})
    write_whole(control_path(run_dir, NUMBER), control.model_dump_json())


def status(run_dir: Path) -> JobStatus | None:
    path = statuses_dir(run_dir, NUMBER) / "0.json"
    return JobStatus.model_validate_json(path.read_bytes()) if path.exists() else None


def wait_for(what: Callable[[], object], text: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end_s, f"no {text} within {PATIENCE_S:g} s"
        time.sleep(0.01)


@contextlib.contextmanager
def job(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("stepping.py")
    with subprocess.Popen([sys.executable, str(script), str(run_dir), str(NUMBER), *options]) as process:
        try:
            yield process
        finally:
            process.kill()


def answered(run_dir: Path, number: int) -> JobStatus:
    wait_for(lambda: (now := status(run_dir)) is not None and now.number == number, f"answer to control {number}")
    found = status(run_dir)
    assert found is not None
    return found


def speed(run_dir: Path, number: int, compute: float, seconds: float) -> float:
    """Steps per second with this share, by the job's own counts."""
    tell(run_dir, number, compute=compute)
    before = answered(run_dir, number)
    time.sleep(seconds)
    tell(run_dir, number + 1, compute=compute)
    after = answered(run_dir, number + 1)
    return (after.steps - before.steps) / (after.time_s - before.time_s)


@pytest.mark.parametrize(
    ("shares", "seconds", "within"),
    [
        pytest.param((0.25,), 1.5, 0.15, id="quick"),
        pytest.param((0.2, 0.5, 0.8), 6.0, 0.05, id="exact", marks=pytest.mark.long),
    ],
)
def test_a_duty_cycle_gives_that_throughput(run_dir: Path, shares: tuple[float, ...], seconds: float, within: float):
    """Relative to the throughput without a limit, measured before and after. Repeated if the machine stands still."""
    with job(run_dir, "--step", "0.02"):
        control = 1
        for share in shares:
            found: list[float] = []
            while not found or (found[-1] != pytest.approx(share, abs=within) and len(found) < 4):
                free = [speed(run_dir, control, 1.0, seconds)]
                held = speed(run_dir, control + 2, share, seconds)
                free.append(speed(run_dir, control + 4, 1.0, seconds))
                found.append(held / (sum(free) / 2))
                control += 6
            assert found[-1] == pytest.approx(share, abs=within), found


def test_at_share_0_it_stands_still_but_answers(run_dir: Path):
    with job(run_dir):
        tell(run_dir, 1, compute=0.0)
        standing = answered(run_dir, 1)
        tell(run_dir, 2, compute=0.0, memory_mb=5)
        assert answered(run_dir, 2).steps <= standing.steps + 1
        tell(run_dir, 3, compute=1.0)
        wait_for(lambda: (now := status(run_dir)) is not None and now.steps > standing.steps + 5, "further steps")


def test_it_stands_still_until_the_request_is_withdrawn(run_dir: Path):
    with job(run_dir):
        tell(run_dir, 1, suspend="a", compute=0.0)
        wait_for(lambda: (now := status(run_dir)) is not None and now.suspended == "a", "answer")
        first = status(run_dir)
        assert first is not None
        assert first.moved_mb == 100
        tell(run_dir, 2)
        wait_for(lambda: (now := status(run_dir)) is not None and now.steps > first.steps + 5, "further steps")
        now = status(run_dir)
        assert now is not None
        assert now.suspended is None


def test_a_request_that_is_over_is_not_carried_out_again(run_dir: Path):
    """Slurm resumed the process, and not its agent, which is gone and withdraws nothing."""
    channel = Channel(run_dir, NUMBER)
    tell(run_dir, 1, suspend="a")
    assert channel.wants("a")
    assert channel.request == "a"
    channel.suspended("a")
    channel.resumed()
    assert channel.request is None
    tell(run_dir, 2, suspend="b")
    assert channel.wants("b")
    assert channel.request == "b"


def test_a_request_to_an_earlier_run_does_not_hold_the_next_one(run_dir: Path):
    """It is left from an agent that is gone."""
    tell(run_dir, 1, suspend="a")
    os.utime(control_path(run_dir, NUMBER), (1e9, 1e9))
    channel = Channel(run_dir, NUMBER)
    channel.poll()
    assert channel.request is None
    tell(run_dir, 2, suspend="b")
    assert channel.wants("b")
    assert channel.request == "b"


def test_no_reader_sees_a_part_of_a_file(run_dir: Path):
    """Each of a thousand readings is a whole status, while the job writes one every few milliseconds."""
    with job(run_dir, "--step", "0.001"):
        tell(run_dir, 1)
        answered(run_dir, 1)
        path, sizes = statuses_dir(run_dir, NUMBER) / "0.json", set()
        end_s = time.monotonic() + 60
        for number in itertools.count(2):
            tell(run_dir, number)
            content = path.read_bytes()
            sizes.add(JobStatus.model_validate_json(content).steps)
            if (number > 1500 and len(sizes) > 10) or time.monotonic() > end_s:
                break
        assert len(sizes) > 10
        wait_for(lambda: not list(path.parent.glob("*.json.*")), "moment without a file beside it")


def test_a_word_that_is_broken_or_not_an_agents_changes_nothing(run_dir: Path):
    channel = Channel(run_dir, NUMBER)
    tell(run_dir, 1, compute=0.5)
    channel.poll()
    assert channel.compute == 0.5
    control_path(run_dir, NUMBER).write_text('{"number": 2, "comp')
    time.sleep(0.06)
    channel.poll()
    assert channel.compute == 0.5
    with pytest.raises(ValidationError):
        JobControl.model_validate({"number": 1, "compute": 1.5})


def test_without_an_agent_it_writes_nothing(tmp_path: Path):
    channel = Channel(tmp_path / "nowhere", NUMBER)
    for _ in range(3):
        channel.step_done(8)
    assert not list(tmp_path.iterdir())
    assert json.loads(JobControl(number=3).model_dump_json())["compute"] == 1.0


def test_limits_of_memory_are_carried_out_once(run_dir: Path):
    limits: list[int] = []
    channel = Channel(run_dir, NUMBER, limit_memory=limits.append, memory_mb=lambda: 123.0)
    for number, memory_mb in enumerate((1000, 1000, 500, 0), start=1):
        tell(run_dir, number, memory_mb=memory_mb)
        time.sleep(0.06)
        channel.poll()
    assert limits == [1000, 500, 0]
    found = status(run_dir)
    assert found is not None
    assert found.memory_mb == 123.0
