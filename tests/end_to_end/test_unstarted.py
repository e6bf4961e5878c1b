"""A job that Slurm never starts keeps its GPUs from no other job for long, and its owner reads why."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock_scheduler.api.client import Client
from penstock_slurm.loopback import wait_for
from penstock_slurm.loopback.fixtures import MakeLoopback
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

ALL = "--comment=" + json.dumps({"penstock": {"min_gpus": 4, "max_gpus": 4, "preemptible": False}})
OURS = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null")


def test_a_job_that_slurm_never_starts_lets_others_have_its_gpus(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """A job without GPUs has all CPUs of the node but one, so a job of two CPUs cannot start there, and one of one CPU can."""
    site = make_site(make_loopback("t4:1x4"))
    site.slurm_settings["start_patience_s"] = 5
    site.start()
    node = site.slurm.command("scontrol", "-o", "show", "node", "t4-00").stdout
    cpus = int(node.split("CPUTot=")[1].split()[0])
    plain = site.sbatch(f"--cpus-per-task={cpus - 1}", "--output=/dev/null", "--wrap=sleep 3600")
    site.wait_states("RUNNING", plain)
    waits = site.sbatch(*OURS, ALL, "--cpus-per-task=2", "--wrap=sleep 3600")
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:

        def told() -> bool:
            states = [job.state for job in penstock.jobs() if job.id == waits]
            assert not {*states} - {"queued", "starting"}
            return bool(states) and "attempts in vain: Slurm did not start it" in str(penstock.explain(waits))

        wait_for(told, 120, "explain says what Slurm said", details=lambda: str(penstock.explain(waits)))
    other = site.sbatch(*OURS, ALL, "--wrap=sleep 3600")
    site.wait_states("RUNNING", other)
    site.slurm.command("scancel", plain, other)
    site.wait_states("RUNNING", waits)
