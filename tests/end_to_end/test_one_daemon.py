"""One penstockd, on SQLite and on PostgreSQL: a job from submission to its end, restarts of the daemon, and its log."""

from __future__ import annotations

import time

import pytest

from tests.end_to_end.site import UNFORESEEN
from tests.scheduler.databases import REASON, available, new_database, postgresql

pytestmark = pytest.mark.slurm


@pytest.fixture(params=["SQLite", pytest.param("PostgreSQL", marks=pytest.mark.skipif(not available(), reason=REASON))])
def store(request):
    """Settings of the store."""
    if request.param == "SQLite":
        yield {}
        return
    with postgresql() as server:
        yield {"store": new_database(server)}


def test_a_daemon_starts_jobs_and_comes_back_at_once(loopback, make_site, store):
    """A stopped penstockd exits with 0, and the next one leads at once: nobody waits for a lease to end."""
    site = make_site(loopback, **store)
    site.start()
    done = site.submit(3)
    site.wait_completed(done)

    runs = site.submit(4000)
    site.wait_states("RUNNING", runs)
    began_s = site.job(runs).start_s
    before = site.wait_round()
    stopping_s = time.monotonic()
    site.stop()  # asserts the exit status 0
    stopped_s = time.monotonic()
    site.start()
    started_s = time.monotonic()
    site.wait_round(after=before)

    after = site.submit(3)
    site.wait_completed(after)
    assert (site.job(runs).state, site.job(runs).start_s, site.job(runs).restarts) == ("RUNNING", began_s, 0)
    site.assert_no_run_twice(done, runs, after)
    log = site.log.read_text()
    assert UNFORESEEN not in log
    assert "event=write" not in log, "writes are logged where an admin asks for it only"
    print(f"stop {stopped_s - stopping_s:.1f} s, start {started_s - stopped_s:.1f} s")
    site.slurm.command("scancel", runs)
    site.stop()
