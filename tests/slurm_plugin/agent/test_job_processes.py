"""Which processes belong to a job."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from penstock_slurm.agent.processes import IN_CGROUP, Processes
from penstock_slurm.loopback.waiting import wait_for


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
