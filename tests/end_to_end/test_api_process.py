"""penstock-api beside a penstockd on a real Slurm: either may be killed, and the API may be flooded."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.cli import make_app
from tests.end_to_end.site import Site
from tests.scheduler.service.api import ApiProcess

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(
    loopback: LoopbackCluster, make_site: Callable[..., Site], tmp_path: Path
) -> Iterator[tuple[Site, ApiProcess]]:
    site = make_site(loopback)
    site.api |= {"embedded": False, "private_socket": str(site.state / "private.sock")}
    site.files = 1024, 1024
    site.start()
    api = ApiProcess(tmp_path, site.api, site.state)
    api.files = 256, 1024
    api.start()
    try:
        yield site, api
    finally:
        api.stop()


def start(site: Site) -> str:
    """A job that runs for long."""
    job = site.submit(3000, max_gpus=1)
    wait_for(lambda: site.starts(job), 120, "a job to start", details=site.tail)
    return job


def test_rounds_go_on_whatever_happens_to_the_api(site: tuple[Site, ApiProcess]):
    """It is flooded, then killed with -9, and started again. Slurm starts a job each time."""
    daemon, api = site
    first, logged = start(daemon), daemon.log.stat().st_size
    url = f"unix:{daemon.state / 'api.sock'}"
    with Client(url) as penstock:
        wait_for(lambda: penstock.job(first).state == "running", 120, "the API to see the job", details=daemon.tail)
        wait_for(lambda: penstock.job(first).progress, 120, "its progress", details=daemon.tail)
        order = Submission.model_validate({"command": ["true"], "name": "n", "key": "k", "spec": {"max_gpus": 1}})
        made = penstock.submit(order)
        assert penstock.wait(made.id, timeout_s=120).ended == "COMPLETED"
        assert penstock.log(made.id).ended
    with ExitStack() as stack:
        for _ in range(1100):
            attack = stack.enter_context(socket.socket(socket.AF_UNIX))
            attack.settimeout(20)
            attack.connect(str(daemon.state / "api.sock"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                attack.sendall(b"GET /v1/me HTTP/1.1\r\nHost: x\r\n")
        second = start(daemon)
        api.kill()
        third = start(daemon)
    assert daemon.states(first, second, third) == dict.fromkeys((first, second, third), "RUNNING")
    assert "Too many open files" not in daemon.log.read_text()
    assert daemon.log.stat().st_size - logged < 100_000
    api.start()
    with Client(url) as penstock:
        assert {each.id for each in penstock.jobs(state=["running"])} == {first, second, third}


def test_reading_goes_on_while_penstockd_is_away(site: tuple[Site, ApiProcess]):
    daemon, _ = site
    job, url = start(daemon), f"unix:{daemon.state / 'api.sock'}"

    def listed() -> str:
        told = CliRunner().invoke(make_app(), ["list"], env={"PENSTOCK_URL": url})
        assert told.exit_code == 0, told.output
        return told.output

    with Client(url) as penstock:
        wait_for(lambda: penstock.job(job).state == "running", 120, "the API to see the job", details=daemon.tail)
        assert "silent" not in listed()
        daemon.kill()
        killed_s = time.time()
        wait_for(lambda: penstock.cluster().daemon_silent_since_s is not None, 120, "the silence to be noticed")
        assert penstock.job(job).state == "running"
        assert penstock.cluster().daemon_silent_since_s == pytest.approx(killed_s, abs=10)
        assert "penstockd has been silent since" in listed()
        assert job in listed()
        daemon.start()
        wait_for(
            lambda: penstock.cluster().daemon_silent_since_s is None, 60, "penstockd to be back", details=daemon.tail
        )
        assert "silent" not in listed()
        penstock.cancel(job)
        assert penstock.wait(job, timeout_s=120).state == "ended"
