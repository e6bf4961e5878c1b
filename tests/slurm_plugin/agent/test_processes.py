"""To which job each process on a node belongs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_slurm.agent.processes import ATTEMPTS, Processes

from .cgroups import hierarchy_of


def test_a_task_that_waits_for_its_first_time_slice_belongs_to_its_job_once_it_has_begun():
    """Until then, in the SPANK plugin, it is a copy of slurmstepd, without a job in its environment."""
    number = os.getpid()
    script = f"read turn; SLURM_JOB_ID={number} SLURMD_NODENAME=n{number} exec sleep 60"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as task:
        try:
            processes, users = Processes(f"n{number}"), {number: os.getuid()}
            for _ in range(2 * ATTEMPTS):
                assert processes.scan(users) == {}
            assert task.stdin is not None
            task.stdin.write(b"\n")
            task.stdin.flush()
            wait_for(lambda: processes.scan(users) == {number: [task.pid]}, 120, "the job's process to be found")
        finally:
            task.kill()


def test_processes_of_another_slurm_on_the_host_are_not_this_ones():
    """Two test clusters both have a node t4-00 and a job 1."""
    number = os.getpid()
    names = {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": "n"}
    mine, other, plain = (
        subprocess.Popen(["sleep", "60"], env=os.environ | names | conf)
        for conf in ({"SLURM_CONF": "/a/slurm.conf"}, {"SLURM_CONF": "/b/slurm.conf"}, {})
    )
    try:
        users = {number: os.getuid()}
        wait_for(lambda: len(Processes("n").scan(users).get(number, ())) == 3, 120, "all three")
        processes = Processes("n", conf="/a/slurm.conf")
        assert sorted(processes.scan(users)[number]) == sorted((mine.pid, plain.pid))
        assert processes.job_of(other.pid) is None
    finally:
        for process in (mine, other, plain):
            process.kill()
            process.wait()


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def freezer(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cgroup that can be frozen, as Slurm makes them. Tests are skipped for a version that this machine lacks."""
    folder = hierarchy_of(request.param, "freezer") / f"penstock-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made in {folder.parent}: {error.strerror}")
    yield folder
    folder.rmdir()


def test_a_process_that_its_cgroup_freezes_is_frozen(freezer: Path):
    """So does proctrack/cgroup: the letter of the process's state stays as it is."""
    v1 = (freezer / "freezer.state").exists()
    switch, on, off = (freezer / "freezer.state", "FROZEN", "THAWED") if v1 else (freezer / "cgroup.freeze", "1", "0")
    mount = freezer.parent if not v1 else freezer.parent.parent
    processes = Processes("n1", cgroups=mount)
    with subprocess.Popen(["sleep", "60"]) as process:

        def frozen() -> bool:
            state = processes.state(process.pid)
            return state is not None and processes.is_frozen(process.pid, state)

        try:
            (freezer / "cgroup.procs").write_text(str(process.pid))
            assert not frozen()
            switch.write_text(on)
            wait_for(frozen, 120, "the freezer")
            switch.write_text(off)
            wait_for(lambda: not frozen(), 120, "the end of that")
        finally:
            switch.write_text(off)
            process.kill()
            process.wait()
