"""What `penstock doctor` and /v1/ready say while slurmctld is frozen or the disk is full, and that jobs run on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.cli import make_app
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

FROZEN_S = 60
"""Longest wait for what must be noticed within 20 s on an idle machine."""


def health(site: Site) -> Health:
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        return penstock.ready()


def doctor(site: Site) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit status, and the checks by name."""
    environment = {"PENSTOCK_URL": f"unix:{site.state / 'api.sock'}"}
    told = CliRunner().invoke(make_app(), ["doctor", "--json"], env=environment)
    return told.exit_code, {line["check"]: line for line in json.loads(told.stdout)}


def wait_ready(site: Site) -> None:
    wait_for(lambda: health(site).status == "ok", 120, "penstockd to be ready", details=lambda: health(site))


def run_a_job(site: Site) -> str:
    job = site.submit(100_000)
    wait_for(lambda: site.starts(job), 120, "the job to start", details=site.tail)
    return job


def test_a_frozen_slurmctld_is_seen_within_20_s_and_stops_no_job(site: Site):
    job = run_a_job(site)
    wait_ready(site)
    slurmctld = site.slurm.pid("slurmctld")
    os.kill(slurmctld, signal.SIGSTOP)
    try:
        wait_for(lambda: health(site).status == "not-ready", FROZEN_S, "penstockd to notice", details=site.tail)
        (problem,) = health(site).problems
        assert "the cluster has not answered for" in problem
        status, checks = doctor(site)
        assert (status, checks["penstockd"]["ok"], checks["observe"]["ok"]) == (1, False, False)
        assert checks["store"]["ok"], "only what is wrong is called wrong"
        assert checks["spool"]["ok"]
    finally:
        os.kill(slurmctld, signal.SIGCONT)
    wait_ready(site)
    assert doctor(site)[1]["observe"]["ok"]
    assert site.states(job) == {job: "RUNNING"}
    assert len(site.starts(job)) == 1


@pytest.mark.parametrize("full", ["store", pytest.param("spool", marks=pytest.mark.long)])
def test_a_full_disk_is_seen_and_stops_no_job(
    full: str, make_site: Callable[..., Site], loopback, small_disk: Path
) -> None:
    site: Site = make_site(loopback)
    if full == "store":
        site.state = small_disk / "state"
        site.api["socket"] = str(site.state / "api.sock")
    else:
        site.spool = small_disk / "spool"
    site.start()
    job = run_a_job(site)
    wait_ready(site)
    assert any(f"the {full}" in each and "free" in each for each in health(site).warnings), "it warns before it is full"
    filling = fill(small_disk)
    try:
        wait_for(lambda: health(site).status == "not-ready", FROZEN_S, "penstockd to notice", details=site.tail)
        assert any(f"the {full}" in problem for problem in health(site).problems)
        status, checks = doctor(site)
        assert (status, checks["penstockd"]["ok"], checks[full]["ok"]) == (1, False, False)
        assert checks["observe"]["ok"], "only what is wrong is called wrong"
        assert site.states(job) == {job: "RUNNING"}
    finally:
        filling.unlink()
    wait_ready(site)
    assert site.states(job) == {job: "RUNNING"}
    assert len(site.starts(job)) == 1


def fill(disk: Path) -> Path:
    """Write a file that takes all free space."""
    filling = disk / "filling"
    with filling.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65536):
                pass
        except OSError:
            pass
    return filling
