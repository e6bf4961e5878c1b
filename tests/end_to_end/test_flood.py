"""An ordinary user floods the socket of a penstockd on a real Slurm. Bystanders: rounds, commands of Slurm, running jobs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import Submission
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


def test_rounds_go_on_while_1100_requests_are_half_open(loopback: LoopbackCluster, make_site: Callable[..., Site]):
    """With 1,024 files, the usual soft limit, as the hard limit too. Slurm starts a job while the attack goes on."""
    site = make_site(loopback)
    site.files = 1024, 1024
    site.start()
    runs = site.submit(3000, max_gpus=1)
    wait_for(lambda: site.starts(runs), 120, "the first job to start", details=site.tail)
    before, logged = site.log.read_text().count("level=error"), site.log.stat().st_size
    with ExitStack() as stack:
        for _ in range(1100):
            attack = stack.enter_context(socket.socket(socket.AF_UNIX))
            attack.connect(str(site.state / "api.sock"))
            with contextlib.suppress(BrokenPipeError):  # it was refused
                attack.sendall(b"GET /v1/me HTTP/1.1\r\nHost: x\r\n")
        began_s = time.monotonic()
        late = site.submit(3000, max_gpus=1)
        wait_for(lambda: site.starts(late), 120, "a job to start during the attack", details=site.tail)
        while time.monotonic() < began_s + 15:
            time.sleep(0.5)
    assert "Too many open files" not in site.log.read_text()
    assert site.log.read_text().count("level=error") == before
    assert site.log.stat().st_size - logged < 100_000
    assert site.states(runs, late) == {runs: "RUNNING", late: "RUNNING"}


def test_a_submitted_job_has_the_limits_of_before(make_loopback: MakeLoopback, make_site: Callable[..., Site]):
    """sbatch passes its limits on to the job, as is Slurm's default, and penstockd has raised its own."""
    site = make_site(make_loopback("t4:1x2", settings={"PropagateResourceLimits": "ALL"}))
    site.files = 1000, 20_000
    site.start()
    told = site.folder / "told"
    order = Submission.model_validate(
        {"command": ["sh", "-c", f"ulimit -Sn > {told}"], "name": "limits", "spec": {"max_gpus": 1}}
    )
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        job = penstock.submit(order)
        assert penstock.ready().files.limit == 20_000
        wait_for(lambda: told.exists() and told.read_text(), 180, "the job to run", details=site.tail)
        penstock.cancel(job.id)
    assert told.read_text().strip() == "1000"
