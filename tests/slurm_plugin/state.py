"""What slurmctld has on disk."""

from __future__ import annotations

import time

from penstock_slurm.loopback import LoopbackCluster, wait_for


def save_jobs(slurm: LoopbackCluster, job: str) -> None:
    """Have slurmctld save its jobs as they are now: within 5 s of a change, such as that of this job's comment.

    What it has not saved is lost when it is killed.
    """
    slurm.command("scontrol", "update", f"JobId={job}", "Comment=saved")
    changed_s = time.time()
    state = slurm.folder / "state" / "job_state"
    wait_for(lambda: state.exists() and state.stat().st_mtime > changed_s, 120, "slurmctld to save its jobs")
