"""Freezing a job at once, by the cgroups that Slurm freezes or by signals."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.processes import Processes

from .cgroups import hierarchy_of


@pytest.fixture(params=[1, 2])
def step(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A step of a job, as Slurm makes its cgroups: version 1, or version 2 with the slurmstepd beside the user's processes."""
    own = hierarchy_of(request.param, "freezer") / f"penstock-test-{os.getpid()}"
    job = own / ("slurm/uid_0/job_7" if request.param == 1 else "system.slice/slurmstepd.scope/job_7")
    folder = job / "step_0"
    made = folder / "task_0" if request.param == 1 else folder / "user" / "task_0"
    try:
        made.mkdir(parents=True)
        if request.param == 2:
            (folder / "slurm").mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made: {error.strerror}")
    yield folder
    for above, _, _ in os.walk(own, topdown=False):
        Path(above).rmdir()


@contextlib.contextmanager
def process(folder: Path | None = None) -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(sleeping.pid))
        try:
            yield sleeping.pid
        finally:
            sleeping.kill()


def frozen(pid: int) -> bool:
    processes = Processes("n1")
    state = processes.state(pid)
    return state is not None and processes.is_frozen(pid, state)


def until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_step_is_frozen_with_all_that_is_in_it_and_thawed(step: Path):
    """Also processes that the agent has not seen yet, but not the slurmstepd."""
    v2 = (step / "user").exists()
    task, freezer = step / ("user/task_0" if v2 else "task_0"), Freezer()
    with process(task) as seen, process(task) as unseen, process(step / "slurm" if v2 else None) as slurmstepd:
        freezer.freeze([seen])
        until(lambda: frozen(seen) and frozen(unseen))
        assert not frozen(slurmstepd)
        assert Path(f"/proc/{seen}/stat").read_text().rpartition(")")[2].split()[0] != "T", "no signal was sent"
        freezer.thaw([seen])
        until(lambda: not frozen(seen) and not frozen(unseen))


def test_without_cgroups_of_slurm_processes_are_stopped_by_signals():
    freezer = Freezer()
    with process() as pid:
        freezer.freeze([pid, 2**22 + 1])
        until(lambda: frozen(pid))
        freezer.thaw([pid])
        until(lambda: not frozen(pid))
