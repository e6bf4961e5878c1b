"""Which processes belong to a job."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from penstock_loopback.processes import wait_for
from penstock_slurm.agent.processes import IN_CGROUP, Processes


def test_only_processes_of_the_jobs_user_are_its():
    """One claims to belong to job 7, another to a job with an endless number."""
    with contextlib.ExitStack() as stack:
        mine, odd = (
            stack.enter_context(subprocess.Popen(["sleep", "60"], env=os.environ | {"SLURM_JOB_ID": number}))
            for number in ("7", "9" * 5000)
        )
        stack.callback(odd.kill)
        stack.callback(mine.kill)
        processes = Processes("n")
        assert processes.scan({7: os.getuid() + 1}) == {}
        assert processes.job_of(mine.pid) is None

        def is_found() -> bool:
            nonlocal processes
            processes = Processes("n")
            return processes.scan({7: os.getuid()}) == {7: [mine.pid]}

        wait_for(is_found, 120, "the process to be found")
        assert processes.job_of(mine.pid) == 7


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0", "12"),
        ("3:freezer:/slurm/uid_1000/job_12/step_batch", "12"),
        ("3:freezer:/slurm_n1/uid_1000/job_12", "12"),
        ("0::/user.slice/user-1000.slice/job_12", None),
        ("0::/system.slice/slurmstepd.scope/job_99999999999/step_0", None),
    ],
)
def test_the_jobs_cgroup_is_slurms(path: str, number: str | None):
    found = IN_CGROUP.search(path)
    assert (found[1] if found is not None else None) == number


OF_SLURM = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"


@pytest.mark.parametrize("how", ["scan", "glance"])
@pytest.mark.parametrize(
    ("cgroup", "user", "counts"),
    [
        (OF_SLURM, 100_001, True),
        ("4:freezer:/slurm/uid_1000/job_7/step_0\n", 100_001, True),
        (OF_SLURM, 1000, True),
        (OF_SLURM, 0, False),
        ("0::/\n", 1000, True),
        ("0::/\n", 1001, False),
        ("0::/user.slice/user-1001.slice/user@1001.service/x/slurmstepd.scope/job_7/step_0/user\n", 1001, False),
        ("0::/user.slice/user-1000.slice/user@1000.service/x/slurmstepd.scope/job_7/step_0/user\n", 1000, True),
        ("1:name=systemd:/user.slice/user-1001.slice/slurm/uid_1000/job_7/step_0\n0::/\n", 1001, False),
        ("4:freezer:/slurm/uid_1001/job_8\n1:name=systemd:/user@1001.service/slurm/uid_0/job_7/step_0\n", 1001, False),
        (
            "1:name=systemd:/user.slice/slurm/uid_0/job_8/step_0\n4:freezer:/slurm/uid_1000/job_7/step_0\n",
            100_001,
            True,
        ),
    ],
    ids=[
        "container",
        "container-v1",
        "user",
        "slurmstepd",
        "by-environment",
        "lies",
        "makes-cgroups",
        "makes-own-cgroups",
        "makes-v1-cgroups",
        "another-job",
        "makes-cgroups-in-its-job",
    ],
)
def test_a_process_of_another_user_counts_if_slurm_itself_has_put_it_into_the_job(
    tmp_path: Path, cgroup: str, user: int, how: str, *, counts: bool
):
    """As in a container of a user without privileges, whose processes have users of their own. The process says that it
    belongs to job 7, which is user 1000's. A user can make cgroups with such names below their own."""
    folder = tmp_path / "30"
    folder.mkdir()
    (folder / "stat").write_text(f"30 (train) S {' 0' * 50}\n")
    (folder / "status").write_text(f"Name:\ttrain\nUid:\t{user}\t{user}\t{user}\t{user}\n")
    (folder / "environ").write_bytes(b"SLURM_JOB_ID=7\0")
    (folder / "cgroup").write_text(cgroup)
    processes = Processes("n", tmp_path)
    found = processes.scan({7: 1000}) if how == "scan" else processes.glance({7: 1000})
    assert found == ({7: [30]} if counts else {})
