"""slurmctld is killed and comes back with an older state: it gives the id of a running job to another one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import ApiError, Client
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site

pytestmark = pytest.mark.slurm


def restore(site: Site, saved: Path) -> None:
    """Kill slurmctld and start it with an older state."""
    state = site.slurm.folder / "state"
    site.slurm.kill_slurmctld()
    shutil.rmtree(state)
    shutil.copytree(saved, state)
    site.slurm.start_slurmctld()


def is_silent(site: Site, job: str) -> bool:
    """Whether a job, which reports every 0.3 s, has reported nothing for ten seconds."""
    return all(time.time() - file.stat().st_mtime > 10 for file in (site.spool / job / "reports").iterdir())


def is_shown(penstock: Client, job: str) -> bool:
    """Whether penstockd shows the new job; until its first look at it, it may be unknown."""
    try:
        view = penstock.job(job)
    except ApiError:
        return False
    return view.name == "second" and view.state != "ended"


@pytest.mark.parametrize("away", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_job_that_gets_the_id_of_a_forgotten_job_inherits_nothing(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], away: bool
) -> None:
    """Neither its requests, its epochs, its progress, its GPU-seconds nor its history. A bystander runs on.

    Args:
        away: whether penstockd is away while the id changes hands.
    """
    site = make_site(make_loopback("t4:2x4"))
    site.start()
    by = site.submit(100_000, rates={"t4": RATES["t4"]})
    site.wait_states("RUNNING", by)
    before = site.job(by)
    saved = site.folder / "saved"
    site.slurm.stop_slurmctld()  # it saves its state
    shutil.copytree(site.slurm.folder / "state", saved)
    site.slurm.start_slurmctld()
    first = site.submit(100_000, rates={"t4": RATES["t4"]}, min_gpus=2, max_gpus=2)
    wait_for(lambda: len(site.reports(first)) > 2, 120, "its reports", details=site.tail)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: sum(penstock.job(first).gpu_seconds.values()) > 2, 120, "its GPU-seconds", details=site.tail)
    control = Spool(site.spool).control(first)
    assert control is not None
    if away:
        site.kill()
    restore(site, saved)
    wait_for(lambda: is_silent(site, first), 120, "Slurm to end the forgotten job", details=site.tail)
    comment = json.dumps({"penstock": {"max_gpus": 1}})
    held = ("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", "--output=/dev/null")
    second = site.sbatch(*held, "--job-name=second", "--wrap=sleep 8")
    assert second == first
    if away:
        site.start()
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: is_shown(penstock, second), 120, "the new job to be shown", details=site.tail)
        site.wait_states("COMPLETED", second)
        ended = penstock.wait(second, timeout_s=120)
        assert (ended.ended, ended.progress, ended.stopped, ended.restarts) == ("COMPLETED", None, "", 0)
        record = site.job(second)
        ran_s = (record.end_s or 0) - (record.start_s or 0)
        assert sum(ended.gpu_seconds.values()) == pytest.approx(ran_s, abs=2)
        history = penstock.history(second)
        assert not history.observations
        assert {line.action for line in history.outcomes} == {"start"}
        (former,) = (view for view in penstock.jobs(state=["ended"]) if view.id != second)
        assert former.id.startswith(f"{first}@")
        assert (former.name, former.ended) != ("second", "COMPLETED")
        assert former.gpu_seconds["t4"] > 2
        assert penstock.history(former.id).observations
        charged = {line.job: line.amount for line in penstock.ledger().lines}
        assert charged == {former.id: former.gpu_seconds["t4"], second: ended.gpu_seconds["t4"]}
    now = Spool(site.spool).control(second)
    assert now is not None
    assert now.epoch > control.epoch
    assert (site.job(by).start_s, site.job(by).restarts) == (before.start_s, 0)
    kinds = {line.action.kind for line in open_store(site.state).outcomes() if line.action.job == by}
    assert kinds == {"start"}
