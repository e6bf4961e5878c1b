"""Freezing a job at once, by the cgroups that Slurm freezes or by signals."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.processes import Processes

from .cgroups import capabilities, hierarchy_of, run_with

NOBODY = 65534


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
def process(folder: Path | None = None, user: int | None = None) -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"], user=user) as sleeping:
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


CHANGE = """
import sys
from penstock_slurm.agent.freezer import Freezer
freezer, pid = Freezer(), int(sys.argv[2])
print(freezer.trouble([pid]))
getattr(freezer, sys.argv[1])([pid])
"""


def test_with_its_units_capabilities_the_agent_freezes_processes_of_other_users():
    """Signals. Files of cgroups belong to root."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of other users")
    with process(user=NOBODY) as pid:
        assert run_with(capabilities(), CHANGE, "freeze", str(pid)) == "\n"
        until(lambda: frozen(pid))
        assert run_with(capabilities(), CHANGE, "thaw", str(pid)) == "\n"
        until(lambda: not frozen(pid))


def test_why_processes_cannot_be_frozen():
    """The agent may not send signals to other users, or its unit does not let it write to cgroups. One that has ended is no
    hindrance."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of other users")
    with process(user=NOBODY) as pid:
        said = run_with("CAP_CHOWN", CHANGE.rpartition("getattr")[0], "", str(pid))
        assert said == f"the agent may not send signals to process {pid}\n"
        assert Freezer().trouble([pid, 2**22 + 1]) == ""


def test_why_a_cgroup_cannot_be_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where the agent's unit protects control groups. `access` says so of a file system that is read-only, also to root."""
    step = "/system.slice/slurmstepd.scope/job_7/step_0/user"
    file = tmp_path / "cgroups" / step.lstrip("/") / "cgroup.freeze"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "proc" / "8").mkdir(parents=True)
    (tmp_path / "proc" / "8" / "cgroup").write_text(f"0::{step}/task_0\n")
    freezer = Freezer(tmp_path / "proc", tmp_path / "cgroups")
    assert freezer.trouble([8]) == ""
    monkeypatch.setattr(os, "access", lambda path, how: (path, how) != (file, os.W_OK))
    assert freezer.trouble([8]) == f"the agent may not write to {file}"


def test_a_process_that_cannot_be_thawed_does_not_keep_the_others_frozen(monkeypatch: pytest.MonkeyPatch):
    kill, freezer = os.kill, Freezer()

    def refuses_one(pid: int, number: int) -> None:
        if pid == first:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        kill(pid, number)

    with process() as first, process() as second:
        freezer.freeze([first, second])
        until(lambda: frozen(first) and frozen(second))
        monkeypatch.setattr(os, "kill", refuses_one)
        with pytest.raises(PermissionError):
            freezer.thaw([first, second])
        monkeypatch.undo()
        until(lambda: not frozen(second))
        assert frozen(first)
