"""What Slurm counts and a round does not: Slurm's answer teaches, and the next attempt is on other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.store.sql import open_store
from tests.reality.cluster import beside
from tests.reality.differential import running
from tests.reality.sites.gpus import DGX

pytestmark = pytest.mark.slurm

BOUND = "--min-gpus=5 --gres=gpu:5 --gres-flags=enforce-binding -c 1 --mem-per-cpu=1000"


def test_a_job_starts_elsewhere_when_its_gpus_lack_the_cores_that_they_are_bound_to(tmp_path: Path) -> None:
    """A plain job has all cores of one socket of dgx1, and none of its GPUs. Slurm finds no five GPUs with cores of their own
    there, and a round counts 32 free CPUs and 8 free GPUs."""
    with running(tmp_path, DGX) as judged:
        judged.site.start()
        plain, _ = judged.submit(beside("-w dgx1 -n 32 -m block:block --mem-per-cpu=1000 --gres=none"))
        judged.site.wait_states("RUNNING", plain)
        judged.site.slurm.command("scontrol", "update", "NodeName=dgx2", "State=drain", "Reason=look")
        job = judged.site.sbatch("--adaptive", *BOUND.split(), "--output=/dev/null", "--wrap=sleep 600")
        wait_for(lambda: "Resources" in judged.command("squeue", "-h", "-o", "%r"), 60, "Slurm to say what it lacks")
        judged.site.slurm.command("scontrol", "update", "NodeName=dgx2", "State=resume")
        judged.site.wait_states("RUNNING", job, timeout_s=60)
        assert judged.site.job(job).nodes == ("dgx2",)
        said = [each.text for each in open_store(judged.site.state).outcomes(job) if each.progress.value == "failed"]
        assert said == ["Slurm did not start it in 10 s: Resources"]
