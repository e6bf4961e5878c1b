"""The demo, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    return subprocess.run(
        [str(Path(sys.executable).with_name("penstock")), "demo", "--out", str(folder), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


@pytest.mark.slurm
@pytest.mark.long  # a demo takes five minutes
def test_a_whole_demo_ends_with_every_job_completed_in_slurms_own_records(tmp_path, loopback):
    """About four and a half minutes. Exit status 0 says that all 24 jobs are COMPLETED, on both clusters."""
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("12 of 12 jobs ended") == 2
    page = (tmp_path / "index.html").read_text()
    assert page.count(">completed") == 24


def test_without_slurm_the_demo_runs_on_the_simulated_cluster(tmp_path):
    done = demo(tmp_path, "--simulated")
    assert done.returncode == 0, done.stderr
    assert "instead of Slurm" in done.stdout
    assert "simulated" in (tmp_path / "index.html").read_text()
