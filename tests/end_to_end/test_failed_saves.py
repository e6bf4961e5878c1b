"""A job that can no longer write its checkpoints is not stopped for a drain, and says why, on a real Slurm."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.wire import Observation, SaveFailed
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site
from tests.end_to_end.test_any_job import told

pytestmark = pytest.mark.slurm


def test_a_job_that_cannot_save_any_more_stays_until_it_has_saved(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """A file is in the place of its folder when a round asks it to leave a drained node. Once there is none, it leaves."""
    site = make_site(make_loopback("t4:2x1"))
    site.start()
    job = site.submit(2000, rates={"t4": RATES["t4"]})
    site.wait_states("RUNNING", job)

    def reported(kind: type) -> list[object]:
        return [report.body for report in site.reports(job) if isinstance(report.body, kind)]

    wait_for(lambda: reported(Observation), 60, "its first report", details=site.tail)
    (node,) = site.job(job).nodes
    folder = site.folder / "checkpoints" / job
    shutil.rmtree(folder)
    folder.touch()
    site.slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a fan")
    wait_for(lambda: reported(SaveFailed), 60, "a failed save", details=site.tail)
    number = site.wait_round(site.wait_round(site.wait_round()))
    facts = open_store(site.state).round(number).snapshot.facts[job]
    assert (facts.saves, str(folder) in facts.save_failure) == (False, True)
    assert "It could not save its state" in told(site, "explain", job)
    assert (site.job(job).nodes, site.job(job).restarts) == ((node,), 0)
    folder.unlink()
    wait_for(lambda: site.job(job).nodes not in ((), (node,)), 120, "the job to leave", details=site.tail)
    site.assert_progress_kept(job, lost=3.0)
