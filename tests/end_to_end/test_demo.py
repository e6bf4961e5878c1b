"""The demo, as a user runs it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.demo.jobs import JOBS, DemoJob, draw
from penstock_loopback.demo.simulated import simulate
from penstock_loopback.demo.site import DemoSite
from penstock_profiles.families import load_families


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
@pytest.mark.long  # a demo takes six minutes
def test_a_whole_demo_ends_with_every_job_completed_in_slurms_own_records(tmp_path, loopback):
    """Exit status 0 says that all jobs are COMPLETED, on both clusters."""
    begun_s = time.monotonic()
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(f"{JOBS} of {JOBS} jobs ended") == 2
    page = (tmp_path / "index.html").read_text()
    assert page.count(">completed") == 2 * JOBS
    assert time.monotonic() - begun_s < 500


def processes(folder: str) -> list[str]:
    """Those that name this folder."""
    return subprocess.run(["pgrep", "--full", folder], capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.slurm
def test_a_demo_that_is_ended_takes_its_clusters_with_it(tmp_path, loopback):
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    command = [str(Path(sys.executable).with_name("penstock")), "demo", "--out", str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        first = next(line for line in job.stdout if "one under penstockd, in" in line)
        folder = first.split()[-1]
        wait_for(lambda: len(processes(folder)) >= 3, 60, "daemons of the demo")
        job.terminate()
        job.stdout.read()
        assert job.wait(timeout=120) in (1, 130), "before and after the first job"
    wait_for(lambda: not processes(folder), 30, "the end of the demo's processes")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_jobs_drawn_from_a_published_workload_end_sooner_and_the_rigid_ones_lose_nothing(seed):
    """On the simulated cluster: all jobs 1.92, 1.64 and 1.60 times as fast when this was written."""
    families = load_families()
    jobs = [job for job, _ in draw(seed, families)]
    rigid = [job.spec["min_gpus"] == job.spec["max_gpus"] for job in jobs]
    assert sum(rigid) == len(jobs) / 2 == JOBS / 2
    assert {job.spec.get("preemptible", True) for job, own in zip(jobs, rigid, strict=True) if own} == {False}
    ours, plain = simulate(seed, families)
    assert (plain.average_jct_s or 0) / (ours.average_jct_s or math.inf) > 1.4
    lengths_s = [
        sum(job.jct_s or math.inf for job, own in zip(each.jobs, rigid, strict=True) if own) for each in (ours, plain)
    ]
    assert lengths_s[0] < lengths_s[1]
    assert all(len(job.spans) == 1 for job, own in zip(ours.jobs, rigid, strict=True) if own), "rigid jobs never move"
    for job in jobs:  # the plain request is one that the job's user also allows Penstock
        _, nodes, gpus = job.plain
        assert job.spec["min_gpus"] <= nodes * gpus <= job.spec["max_gpus"]


@pytest.mark.parametrize(("penstock", "asks"), [(True, ["1 to 4", "2, rigid"]), (False, ["4 t4", "2"])])
def test_a_history_says_what_each_job_asked_for(tmp_path, penstock: bool, asks: list[str]):
    """Also of a job whose spec has no minimum, as in the benchmark of the simulator's fidelity."""
    site = DemoSite(tmp_path, "t4:1x4", penstock=penstock)
    specs = ({"max_gpus": 4}, ("t4", 1, 4)), ({"min_gpus": 2, "max_gpus": 2}, ("", 1, 2))
    site.jobs = {str(number): DemoJob("j", "ncf", 1.0, *each) for number, each in enumerate(specs)}
    site.submitted_s = dict.fromkeys(site.jobs, 0.0)
    assert [job.asks for job in site.history("", "", 0.0, 1.0, load_families()).jobs] == asks


def test_a_seed_draws_the_same_jobs_again_and_another_one_others():
    families = load_families()
    assert draw(1, families) == draw(1, families) != draw(2, families)
    times_s = [at_s for _, at_s in draw(1, families)]
    assert times_s == sorted(times_s)
    assert times_s[0] == 0


def test_without_slurm_the_demo_runs_on_the_simulated_cluster(tmp_path):
    done = demo(tmp_path, "--simulated")
    assert done.returncode == 0, done.stderr
    assert "instead of Slurm" in done.stdout
    assert "simulated" in (tmp_path / "index.html").read_text()
