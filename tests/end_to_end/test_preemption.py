"""A partition's owner gets its nodes back from plain jobs, as in plain Slurm, and keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reality.cluster import beside
from tests.reality.differential import running
from tests.reality.sites.partitions import NODESETS

pytestmark = pytest.mark.slurm


def test_slurm_stops_a_plain_job_once_for_the_owner_of_its_nodes(tmp_path: Path) -> None:
    """Slurm requeues the plain job, which then waits for GPUs. The owner's job must not make room for it: Slurm would stop it
    again and again."""
    with running(tmp_path, NODESETS) as judged:
        site = judged.site
        site.slurm_settings |= {"plain_patience_s": 2}
        site.start()
        plain = [judged.submit(beside(f"-p scavenge -w {node} --gres=gpu:4"))[0] for node in ("n3", "n4")]
        site.wait_states("RUNNING", *plain)
        owner = site.sbatch("--adaptive", "-p", "owners", "--gres=gpu:4", "--output=/dev/null", "--wrap=sleep 600")
        site.wait_states("RUNNING", owner)
        stopped, spared = sorted(plain, key=lambda job: site.job(job).state)
        assert (site.job(stopped).state, site.job(spared).state) == ("PENDING", "RUNNING"), "one node is enough"
        site.wait_round(after=site.wait_round() + 12)
        assert (site.job(owner).state, site.job(owner).restarts) == ("RUNNING", 0)
        assert (site.job(stopped).restarts, site.job(spared).restarts) == (1, 0)
