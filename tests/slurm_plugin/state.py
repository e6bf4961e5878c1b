"""slurmctld's saved state."""

from __future__ import annotations

import contextlib
import time

from penstock_loopback import LoopbackCluster, wait_for


def save_jobs(slurm: LoopbackCluster, job: str) -> None:
    """Make slurmctld save its jobs, by changing this job's comment: it saves within 5 s of a change.

    A killed slurmctld loses unsaved changes.
    """
    slurm.command("scontrol", "update", f"JobId={job}", "Comment=saved")
    changed_s = time.time()
    state = slurm.folder / "state" / "job_state"

    def saved() -> bool:
        with contextlib.suppress(FileNotFoundError):  # the old file goes before the new one comes
            return state.stat().st_mtime > changed_s
        return False

    wait_for(saved, 120, "slurmctld to save its jobs")
