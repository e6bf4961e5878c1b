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
    slurm = make_loopback("t4:2x2")
    site = make_site(slurm)
    site.start()
    jobs = [site.submit(100_000, rates={"t4": RATES["t4"]}) for _ in range(4)]
    wait_for(lambda: all(site.starts(job) for job in jobs), 120, "all to run", details=site.tail)
    (node,) = site.job(jobs[0]).nodes
    held = [job for job in jobs if site.job(job).nodes == (node,)]
    others = [job for job in jobs if job not in held]
    assert len(held) == 2
    slurm.command("scontrol", "requeuehold", ",".join(held))
    site.wait_states("PENDING", *held)
    number = site.wait_round()
    site.wait_round(site.wait_round(number))
    slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=replaced")
    remove_node(slurm, node)
    assert site.states(*jobs) == dict.fromkeys(held, "PENDING") | dict.fromkeys(others, "RUNNING"), site.tail()
    assert "a message of Slurm's is not known" not in site.log.read_text(), site.tail()
    slurm.command("scontrol", "release", ",".join(held))
    slurm.command("scancel", *others)
    wait_for(lambda: all(len(site.starts(job)) == 2 for job in held), 120, "both to run elsewhere", details=site.tail)
    for job in held:
        site.assert_progress_kept(job, lost=5.0)
