"""`penstock submit --dry-run` says what penstockd then does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from penstock_scheduler.store import open_store
from penstock_slurm.loopback import wait_for
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


def dry_run(site: Site, *argv: str) -> str:
    program = [sys.executable, "-c", "from penstock_slurm.submit.cli import app; app()"]
    done = subprocess.run(
        [*program, "--dry-run", "--config", str(site.config), *argv],
        env=dict(os.environ) | site.slurm.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_a_dry_run_says_what_the_daemon_then_does(flag_site: Site) -> None:
    holder = flag_site.submit_with_flags(
        5000, "--adaptive=rigid", "--max-gpus=4", "--gpu-types=t4", "--non-preemptible", "--time=30"
    )
    flag_site.wait_states("RUNNING", holder)
    flag_site.wait_round(flag_site.wait_round())

    waits = dry_run(flag_site, "--adaptive=rigid", "--max-gpus=4", "--gpu-types=t4", "train.sh")
    assert "it would wait: " in waits
    assert "it needs 4 GPUs of type t4" in waits
    minutes = re.search(r"about, if nobody else comes \((\d+) min from now\)", waits)
    assert minutes, waits
    assert 28 <= int(minutes[1]) <= 30, "the holder's time limit"

    flags = ("--min-gpus=2", "--max-gpus=4", "--gpu-types=a100,t4")
    said = dry_run(flag_site, "--adaptive", *flags, "train.sh")
    assert re.search(r"by the policy sia on round \d+ of penstockd, \d+ s old", said)
    assert f"job {holder}" not in said
    job = flag_site.submit_with_flags(5000, *flags)

    def first() -> object:
        store = open_store(flag_site.state)
        plans = (store.round(number).plan for number in store.round_numbers())
        return next((plan.assignments[job] for plan in plans if job in plan.assignments), None)

    given = wait_for(first, 120, "the job to be placed", details=flag_site.tail)
    assert f"it would get {given.configuration} ({given.placement.gpus} on a100-00): {given.reason.text}" in said

    other = dry_run(flag_site, "--adaptive=rigid", "--max-gpus=8", "--gpu-types=a100", "train.sh")
    assert "it would wait" in other or f"job {job} (wrap) would have nothing in place of" in other
