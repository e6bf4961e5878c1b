"""The demo, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock_loopback.demo.jobs import JOBS
from penstock_loopback.demo.simulated import simulate
from penstock_profiles.families import load_families
from penstock_scheduler.model import Adaptivity
from penstock_scheduler.people.drawing.history import History


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
@pytest.mark.long  # a demo takes four minutes
def test_a_whole_demo_ends_with_every_job_completed_in_slurms_own_records(tmp_path, loopback):
    """Exit status 0 says that all jobs are COMPLETED, on both clusters."""
    begun_s = time.monotonic()
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(f"{len(JOBS)} of {len(JOBS)} jobs ended") == 2
    page = (tmp_path / "index.html").read_text()
    assert page.count(">completed") == 2 * len(JOBS)
    assert time.monotonic() - begun_s < 300


def seconds(history: History, series: list[tuple[float, float]], least: float) -> float:
    """For how long a series was at least so much."""
    ends = [at_s for at_s, _ in series[1:]] + [history.end_s]
    return sum(end_s - at_s for (at_s, value), end_s in zip(series, ends, strict=True) if value >= least)


def test_the_demo_has_a_queue_uses_all_gpu_types_and_shows_each_kind_of_job():
    """On the simulated cluster, where 47 s of 188 s had five or more waiting jobs when this was written."""
    ours, plain = simulate(load_families())
    for history in (ours, plain):
        assert history.makespan_s is not None
        assert history.makespan_s < 260  # with the start of the clusters, less than five minutes
        assert seconds(history, history.queue(), 5) > 30
        for gpu_type, held_s in history.gpu_seconds.items():
            there = sum(node.gpus for node in history.nodes if node.gpu_type == gpu_type)
            assert held_s > 0.4 * there * history.makespan_s, (history.title, gpu_type)
    assert (ours.average_jct_s or 0) < (plain.average_jct_s or 0)
    assert {job.spec.get("adaptivity", "adaptive") for job in JOBS} == set(Adaptivity)
    assert {name for job in JOBS for name in job.spec} >= {"min_gpus", "max_gpus", "gpu_types", "preemptible"}
    for job in JOBS:  # the plain request is one that the job's user also allows Penstock
        gpu_type, nodes, gpus = job.plain
        assert job.spec["min_gpus"] <= nodes * gpus <= job.spec["max_gpus"]
        assert gpu_type in job.spec.get("gpu_types", [gpu_type])


def test_without_slurm_the_demo_runs_on_the_simulated_cluster(tmp_path):
    done = demo(tmp_path, "--simulated")
    assert done.returncode == 0, done.stderr
    assert "instead of Slurm" in done.stdout
    assert "simulated" in (tmp_path / "index.html").read_text()
