"""The steps of the page Maintenance (docs/admin/maintenance.md), on a real Slurm: none of them stops a running job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock_loopback import wait_for
from penstock_scheduler.api.client import Client
from penstock_scheduler.cli import make_app
from penstock_scheduler.daemon.penstockd import main as penstockd
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


def penstock(site: Site, *words: str) -> Result:
    return CliRunner().invoke(make_app(), list(words), env={"PENSTOCK_URL": f"unix:{site.state / 'api.sock'}"})


def must(told: Result) -> None:
    assert told.exit_code == 0, told.output


def wait_healthy(site: Site) -> None:
    """Wait until `penstock doctor` warns of nothing: a slurmctld that has just started does not hear all nodes at once."""
    wait_for(
        lambda: penstock(site, "doctor").exit_code == 0,
        120,
        "doctor is content",
        details=lambda: penstock(site, "doctor").output,
    )


def wait_ready(site: Site) -> None:
    def ready() -> bool:
        with Client(f"unix:{site.state / 'api.sock'}") as client:
            return client.ready().status == "ok"

    wait_for(ready, 120, "penstockd to be ready", details=site.tail)


def test_no_step_of_maintenance_stops_a_running_job(make_site: Callable[..., Site], loopback, tmp_path: Path):
    site: Site = make_site(loopback)
    site.start()
    jobs = [site.submit(6000) for _ in range(3)]
    wait_for(lambda: all(site.starts(job) for job in jobs), 120, "the jobs to start", details=site.tail)
    wait_ready(site)
    must(penstock(site, "rounds", "pause"))
    began = {job: site.job(job).start_s for job in jobs}
    runs = {job: len(site.starts(job)) for job in jobs}

    def undisturbed(step: str) -> None:
        assert site.states(*jobs) == dict.fromkeys(jobs, "RUNNING"), step
        assert {job: site.job(job).start_s for job in jobs} == began, step
        assert {job: len(site.starts(job)) for job in jobs} == runs, step

    # Upgrade of Slurm: the controller stops and comes back, while rounds are paused.
    site.slurm.stop_slurmctld()
    site.slurm.start_slurmctld()
    wait_ready(site)
    undisturbed("slurmctld restarted")
    # Upgrade of Penstock: the version stays the same here.
    site.stop()
    undisturbed("penstockd stopped")
    copy = tmp_path / "copy"
    shutil.copytree(site.state, copy, symlinks=True)
    must(penstock(site, "db", "upgrade", str(site.state)))
    assert penstockd(["--config", str(site.config), "--check"]) == 0
    site.start()
    wait_ready(site)
    wait_healthy(site)
    with Client(f"unix:{site.state / 'api.sock'}") as client:
        assert client.cluster().paused, "a pause outlives a restart"
    undisturbed("penstockd started")
    # Back to the former version, with the copy of the store.
    site.stop()
    shutil.rmtree(site.state)
    copy.rename(site.state)
    site.start()
    wait_ready(site)
    undisturbed("the copy of the store is used")
    # Moving the state directory.
    site.stop()
    before = open_store(site.state).round_numbers()
    moved = tmp_path / "moved"
    site.state.rename(moved)
    site.state = moved
    site.api["socket"] = str(moved / "api.sock")
    site.start()
    wait_ready(site)
    assert open_store(site.state).round_numbers()[: len(before)] == before, "the recorded history moved with it"
    undisturbed("state directory moved")
    # Emergency off.
    site.stop()
    undisturbed("penstockd is off")
