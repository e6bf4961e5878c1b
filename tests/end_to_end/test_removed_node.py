"""A node is taken out of slurm.conf, and slurmctld started again: no job that has left the node is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from tests.end_to_end.site import RATES, Site, remove_node

pytestmark = pytest.mark.slurm


def test_a_job_that_waits_outlives_the_node_of_its_last_run(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """slurmctld fails every job that requires a node which it does not know, waiting jobs too."""
    slurm = make_loopback("t4:2x1")
    site = make_site(slurm)
    site.start()
    first, second = jobs = [site.submit(100_000, rates={"t4": RATES["t4"]}) for _ in range(2)]
    wait_for(lambda: all(site.starts(job) for job in jobs), 120, "both to run", details=site.tail)
    (node,) = site.job(first).nodes
    slurm.command("scontrol", "requeuehold", first)
    site.wait_states("PENDING", first)
    number = site.wait_round()
    site.wait_round(site.wait_round(number))
    slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=replaced")
    remove_node(slurm, node)
    assert site.states(*jobs) == {first: "PENDING", second: "RUNNING"}, site.tail()
    slurm.command("scontrol", "release", first)
    slurm.command("scancel", second)
    wait_for(lambda: len(site.starts(first)) == 2, 120, "the job to run elsewhere", details=site.tail)
    site.assert_progress_kept(first, lost=5.0)
