"""Whose processes those on a node are."""

import os
import subprocess

from penstock_slurm.agent.processes import LOOKS, Processes
from penstock_slurm.loopback import wait_for


def test_a_task_that_waits_for_its_first_turn_is_its_jobs_once_it_has_begun():
    """Until then, in the SPANK plugin, it is a copy of slurmstepd, whose environment names no job."""
    number = os.getpid()
    script = f"read turn; SLURM_JOB_ID={number} SLURMD_NODENAME=n{number} exec sleep 60"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as task:
        try:
            processes, users = Processes(f"n{number}"), {number: os.getuid()}
            for _ in range(2 * LOOKS):
                assert processes.scan(users) == {}
            assert task.stdin is not None
            task.stdin.write(b"\n")
            task.stdin.flush()
            wait_for(lambda: processes.scan(users) == {number: [task.pid]}, 20, "the job's process to be found")
        finally:
            task.kill()
