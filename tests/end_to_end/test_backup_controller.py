"""Slurm's own backup controller takes over: penstockd's rounds go on, and no job stops."""

from __future__ import annotations

import contextlib
import subprocess
import time

import pytest

from penstock_loopback import wait_for
from tests.end_to_end.site import UNFORESEEN

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        subprocess.run(["unshare", "--uts", "--mount", "true"], check=False, capture_output=True).returncode != 0,
        reason="needs root, and / as a mount point, to give each slurmctld a host name",
    ),
]


def test_rounds_go_on_while_slurms_backup_controller_takes_over(make_loopback, make_site):
    """The first controller is killed under load, and comes back later."""
    slurm = make_loopback("t4:2x4", backup=True)
    site = make_site(slurm, round_s=1.0)
    site.start()
    runs = [site.submit(40_000.0) for _ in range(3)]
    site.wait_states("RUNNING", *runs)
    began_s = {job: site.job(job).start_s for job in runs}
    slurm.stop_slurmctld()  # it saves its state: a killed one forgets the last seconds
    slurm.start_slurmctld()
    before = site.wait_round()
    killed_s = time.monotonic()
    slurm.kill_slurmctld()

    def taken() -> str:
        """The job, once the backup takes it: sbatch itself waits for that, but for 9 s only."""
        with contextlib.suppress(AssertionError):
            return site.submit(3.0)
        return ""

    after = wait_for(taken, 120, "the backup to take a job", details=site.tail)
    answered_s = time.monotonic()
    site.wait_completed(after)
    site.wait_round(after=before)
    print(
        f"the backup took a job after {answered_s - killed_s:.1f} s; it had ended after {time.monotonic() - killed_s:.1f} s"
    )

    before = site.wait_round()
    slurm.start_slurmctld()
    back = site.submit(3.0)
    site.wait_completed(back)
    site.wait_round(after=before)
    for job in runs:
        found = site.job(job)
        assert (found.state, found.start_s, found.restarts) == ("RUNNING", began_s[job], 0)
    site.assert_no_run_twice(*runs, after, back)
    assert UNFORESEEN not in site.log.read_text()
    slurm.command("scancel", *runs)
    site.stop()
