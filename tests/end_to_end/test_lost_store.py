"""The store's file is lost on a real Slurm, or an older one is put in its place: no job is stopped, and it is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.store.backup import RESTORED
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm

GRACE_S = 15.0


@pytest.mark.parametrize("older", [False, pytest.param(True, marks=pytest.mark.long)], ids=["empty", "older"])
def test_a_store_without_the_jobs_newest_rounds_is_as_one_that_was_restored(
    older: bool, make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """While penstockd runs, `rm penstock.db*`, or a copy that is older than the running jobs; then a restart."""
    site = make_site(make_loopback("t4:2x4"))
    site.safety["grace_s"] = GRACE_S
    site.start()
    t4 = {"t4": RATES["t4"]}
    copy = site.folder / "copy"
    first = site.submit(100_000, rates=t4)
    site.wait_states("RUNNING", first)
    site.stop()
    shutil.copytree(site.state, copy)
    site.start()
    site.wait_round(open_store(site.state).round_numbers()[-1])
    jobs = (first, *(site.submit(100_000, rates=t4) for _ in range(7)))
    site.wait_states("RUNNING", *jobs)
    newest = site.wait_round(open_store(site.state).round_numbers()[-1])
    before = {job: (site.job(job).start_s, site.job(job).restarts) for job in jobs}
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        for file in site.state.glob("penstock.db*"):
            file.unlink()
        wait_for(lambda: penstock.ready().status != "ok", 60, "the lost file to be told", details=site.tail)
        assert any("penstock.db" in each for each in penstock.ready().problems)
    site.kill()
    for file in site.state.glob("penstock.db*"):
        file.unlink()
    if older:
        for file in copy.glob("penstock.db*"):
            shutil.copy(file, site.state)
    known = open_store(site.state).round_numbers() if older else []
    site.start()
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(
            lambda: any("Penstock only looks" in each for each in penstock.ready().warnings),
            60,
            "the look to be told",
            details=site.tail,
        )
    pause(4)
    assert open_store(site.state).round_numbers() == known, "no round is decided within grace_s"
    assert open_store(site.state).control(RESTORED) is not None, "a further restart looks again"
    assert site.wait_round(newest) > newest, "no number of a round comes twice"
    wait_for(lambda: open_store(site.state).control(RESTORED) is None, 120, "the look to be over", details=site.tail)
    pause(4)
    assert {job: (site.job(job).start_s, site.job(job).restarts) for job in jobs} == before, site.tail()
    assert site.states(*jobs) == dict.fromkeys(jobs, "RUNNING")
    site.stop()
    rounds = open_store(site.state).round_numbers()
    site.start()
    site.wait_round(rounds[-1])  # a store that has the rounds of all jobs is not looked at again
