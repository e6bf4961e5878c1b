"""Drains on a real Slurm: an admin's asks jobs to leave, and Slurm's own, for a fault of the node, asks nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm


def test_a_job_leaves_a_node_that_an_admin_drains_and_stays_on_one_that_slurm_drains(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], tmp_path: Path
) -> None:
    """The epilog of another job fails, so Slurm drains the node. The job saves, may be moved, and the other node is free."""
    broken, epilog = tmp_path / "broken", tmp_path / "epilog"
    epilog.write_text(f"#!/bin/sh\n! [ -e {broken} ]\n")
    epilog.chmod(0o755)
    site = make_site(make_loopback("t4:2x4", settings={"Epilog": str(epilog)}))
    site.start()
    job = site.submit(100_000, rates={"t4": RATES["t4"]})
    wait_for(lambda: site.starts(job), 120, "its first report", details=site.tail)
    before = site.job(job)
    (node,) = before.nodes

    def state() -> frozenset[str]:
        return next(each.state for each in site.gateway.nodes() if each.name == node)

    broken.touch()
    site.sbatch(f"--nodelist={node}", "--gres=gpu:1", "--output=/dev/null", "--wrap=true")
    wait_for(lambda: "DRAIN" in state(), 120, "Slurm to drain the node", details=site.tail)
    number = site.wait_round()
    for _ in range(4):
        number = site.wait_round(after=number)
    now = site.job(job)
    assert (now.state, now.restarts, now.start_s, now.nodes) == ("RUNNING", 0, before.start_s, before.nodes), (
        site.tail()
    )
    assert {line.action.kind for line in open_store(site.state).outcomes()} == {"start"}
    site.slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a fan")
    wait_for(lambda: site.job(job).state == "RUNNING" and site.job(job).nodes != (node,), 120, "the job to leave")
    (stop,) = {line.stop for line in open_store(site.state).outcomes() if line.stop is not None}
    assert (stop.code.value, "a fan" in stop.text) == ("drain", True)
