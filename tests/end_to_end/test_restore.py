"""A backup of the store is restored on a real Slurm after the site has worked on: no job is stopped, lost or doubled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.cli import make_app
from penstock_scheduler.model import JobSpec
from penstock_scheduler.store.backup import RESTORED
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm


def run(site: Site, *words: str) -> str:
    told = CliRunner().invoke(make_app(), list(words), env={"PENSTOCK_URL": f"unix:{site.state / 'api.sock'}"})
    assert told.exit_code == 0, f"{told.output} {told.exception}"
    return told.output


@pytest.mark.long
def test_an_older_store_is_restored_while_jobs_run(make_loopback: MakeLoopback, make_site: Callable[..., Site]) -> None:
    """Between backup and restore, jobs run on, move, are submitted, start and end. grace_s is 20 s here."""
    site = make_site(make_loopback("t4:2x4", accounting=True))
    site.safety["grace_s"] = 20.0
    site.start()
    t4 = {"t4": RATES["t4"]}
    stays = site.submit(100_000, rates=t4, min_gpus=2, max_gpus=2)
    waits = site.submit(100_000, rates=t4, min_gpus=4, max_gpus=4)
    site.wait_states("RUNNING", stays, waits)
    ends = site.submit(20, rates=t4)
    site.wait_states("RUNNING", ends)
    file = site.folder / "backup.db"
    run(site, "db", "backup", str(file), str(site.state))

    # The site works on: one job ends, one is cancelled, one is submitted and ends, others are submitted and run or wait.
    site.wait_completed(ends)
    site.gateway.cancel(waits)
    new = site.submit(100_000, rates=t4, min_gpus=4, max_gpus=4)
    short = site.submit(4, rates=t4)
    key = {"spec": JobSpec(max_gpus=1), "script": "#!/bin/sh\nsleep 600\n", "key": "k1", "name": "keyed"}
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        keyed = penstock.submit(Submission.model_validate(key)).id
    site.wait_completed(short)
    site.wait_states("RUNNING", stays, new, keyed)
    queued = site.submit(100_000, rates=t4, min_gpus=8, max_gpus=8)
    site.wait_round(open_store(site.state).round_numbers()[-1] + 1)
    before = {job: (site.job(job).start_s, site.job(job).restarts) for job in (stays, new, keyed)}
    site.stop()
    told = CliRunner().invoke(make_app(), ["db", "restore", str(file), str(site.state)]).exception
    assert "which is newer than the backup" in str(told)
    assert "restored" in run(site, "db", "restore", str(file), str(site.state), "--replace")

    rounds = open_store(site.state).round_numbers()
    site.start()
    pause(3)
    assert open_store(site.state).round_numbers() == rounds, "nothing is decided within grace_s"
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        assert any("restored from a backup" in each for each in penstock.ready().warnings)
    site.wait_round(rounds[-1] + 2)
    wait_for(lambda: open_store(site.state).control(RESTORED) is None, 120, "the restore to be over", details=site.tail)
    pause(3)
    assert {job: (site.job(job).start_s, site.job(job).restarts) for job in before} == before, site.tail()
    assert site.states(*before) == dict.fromkeys(before, "RUNNING")
    assert site.states(queued) == {queued: "PENDING"}
    stopped = [line for line in open_store(site.state).outcomes() if line.stop is not None]
    assert not stopped, site.tail()
    check_views(site, key, keyed, running=(stays, new, keyed), queued=queued, completed=ends, cancelled=waits)
    names = [job.name for job in site.gateway.jobs(finished=True)]
    assert names.count("keyed") == 1
    site.assert_no_run_twice(stays, new)


def check_views(
    site: Site,
    key: dict[str, object],
    keyed: str,
    *,
    running: tuple[str, ...],
    queued: str,
    completed: str,
    cancelled: str,
) -> None:
    """What the API says after the restore, and what is charged."""
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        assert penstock.submit(Submission.model_validate(key)).id == keyed, "a key is one job, also after a restore"
        views = {view.id: view for view in (*penstock.jobs(), *penstock.jobs(state=["ended"]))}
        states = {job: views[job].state for job in (*running, queued)}
        assert states == dict.fromkeys(running, "running") | {queued: "queued"}
        assert (views[completed].ended, views[cancelled].ended) == ("COMPLETED", "CANCELLED")
        charged = [line for line in penstock.ledger().lines if line.job == completed]
    record = site.job(completed)
    assert len(charged) == 1, "what ended since is charged once"
    assert record.start_s is not None
    assert record.end_s is not None
    assert charged[0].amount == pytest.approx(record.end_s - record.start_s, abs=2)
