"""To which job each process on a node belongs."""

import os
import subprocess

from penstock_slurm.agent.processes import ATTEMPTS, Processes
from penstock_slurm.loopback import wait_for


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
