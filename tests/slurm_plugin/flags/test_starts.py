"""What sbatch says about the start of a new job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock_scheduler.api.estimate_messages import Estimates, NewJobs, TimeRange
from tests.scheduler.service.api import serving
from tests.slurm_plugin.flags.site import FlagSite

pytestmark = pytest.mark.slurm


def test_sbatch_says_when_a_job_of_this_size_is_expected_to_start(flags: FlagSite, tmp_path: Path) -> None:
    """`penstock slurm sync` asks penstockd. sbatch says nothing of other jobs, of old estimates, and of a broken file."""
    with serving(tmp_path) as api:
        now_s = time.time()
        flags.settings("[api]", f"socket = '{api.socket.removeprefix('unix:')}'")
        new = [NewJobs(gpus=2, at_s=now_s, start=TimeRange(from_s=now_s + 700, to_s=now_s + 2300))]
        api.board.estimates = Estimates(round=1, at_s=now_s, seconds=0.1, jobs={}, new=new)
        assert flags.penstock("sync", "--quiet").exit_code == 0
    two = ("--adaptive", "--min-gpus=2", "--max-gpus=4")
    said = flags.sbatch(*two).stderr
    assert (
        "penstock: A job of 2 GPUs that is submitted now is expected to start in 10 to 40 minutes (80 %), as of "
        in said
    )
    for others in (
        ("--adaptive", "--max-gpus=4"),
        (*two, "--gpu-types=t4"),
        (*two, "--begin=now+1hour"),
    ):
        done = flags.sbatch(*others)
        assert (done.returncode, "expected to start" in done.stderr) == (0, False), others
    starts = flags.etc / "penstock_starts.lua"
    for broken in (
        "return {",
        "return 7",
        "return {[2] = 7}",
        starts.read_text().replace("until_s = 1", "until_s = 0"),
    ):
        starts.write_text(broken)
        done = flags.sbatch(*two)
        assert (done.returncode, "expected to start" in done.stderr) == (0, False), broken
    flags.settings()
    assert flags.penstock("sync", "--quiet").exit_code == 0
    assert "[2]" not in starts.read_text(), "penstockd is away"
