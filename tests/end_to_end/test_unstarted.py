"""A job that Slurm never starts keeps its GPUs from no other job for long, and its owner reads why."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

ALL = "--comment=" + json.dumps({"penstock": {"min_gpus": 4, "max_gpus": 4, "preemptible": False}})
OURS = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null")


def test_a_job_that_slurm_never_starts_lets_others_have_its_gpus(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """A partition may use four CPUs of the node, and a job without GPUs has three of them. Rounds do not count that where the
    node is in a partition without such a limit, too. The job cannot go there, because its time limit is too long."""
    site = make_site(make_loopback("t4:1x4"))
    site.slurm_settings["start_patience_s"] = 5
    site.slurm.command("scontrol", "update", "PartitionName=all", "MaxCPUsPerNode=4")
    site.slurm.command("scontrol", "create", "PartitionName=brief", "Nodes=t4-00", "MaxTime=10")
    site.partitions = ["all", "brief"]
    site.start()
    plain = site.sbatch("--cpus-per-task=3", "--output=/dev/null", "--wrap=sleep 3600")
    site.wait_states("RUNNING", plain)
    waits = site.sbatch(*OURS, ALL, "--cpus-per-task=2", "--time=60", "--wrap=sleep 3600")
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
