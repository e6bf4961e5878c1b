"""The playground, as a user runs it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock_loopback import LoopbackCluster, NotRunning, wait_for
from penstock_loopback.fixtures import skip_without_slurm
from penstock_loopback.playground.arrivals import KINDS, PLAIN, REFUSED
from penstock_scheduler.api.client import Client

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    skip_without_slurm(accounting=False)
    yield tmp_path / "playground"
    LoopbackCluster(tmp_path / "playground", ()).down()


def playground(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("penstock")), "playground", *arguments, "--dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def in_shell(exports: str, command: str) -> str:
    """What a command prints in a shell with the printed lines."""
    script = f"{exports}\n{command}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True).stdout


def test_it_shows_a_page_and_a_queue_until_down(folder: Path) -> None:
    begun = playground(folder, "up", "--nodes", "t4:1x4,a100:1x4")
    assert begun.returncode == 0, begun.stderr
    token, address = (re.search(pattern, begun.stdout) for pattern in (r"the token +(\S+)", r"the page +(\S+)"))
    assert token
    assert address
    headers = {"Authorization": f"Bearer {token[1]}", "Accept": "text/html"}
    with httpx.Client(base_url=address[1], headers=headers) as page:
        assert "a100-00" in page.get("/cluster", timeout=60).text
        assert page.get("/site", timeout=60).status_code == 200
    # the printed variables lead every command to it
    exports = "\n".join(re.findall(r"^ +(export .*)$", begun.stdout, re.MULTILINE))
    url = in_shell(exports, "echo $PENSTOCK_URL").strip()
    with Client(url) as penstock:
        wait_for(lambda: list(penstock.jobs(state=["running"])), 180, "a job to run")
        wait_for(lambda: [each.name for each in penstock.refused()] == [REFUSED], 180, "the refused job")
        wait_for(lambda: len(list(penstock.queue())) > 2, 300, "a queue")
        assert {job.name for job in penstock.jobs()} <= {kind.name for kind in KINDS} | {PLAIN}
    wait_for(
        lambda: in_shell(exports, "squeue -h").count("\n") > 3, 120, "squeue with jobs that run and wait", poll_s=1.0
    )
    assert REFUSED in in_shell(exports, "penstock list")
    # `up` again says the same; another user cannot read the token
    again = playground(folder, "up")
    assert (again.returncode, again.stdout) == (0, begun.stdout)
    assert (folder / "etc" / "playground.txt").stat().st_mode & 0o77 == 0
    ended = playground(folder, "down")
    assert ended.returncode == 0, ended.stderr
    with pytest.raises(NotRunning):
        LoopbackCluster.open(folder)
    with pytest.raises(httpx.ConnectError):
        httpx.get(address[1])
    assert "nothing to stop" in playground(folder, "down").stdout


def test_a_port_that_is_taken_is_named_and_leaves_nothing_behind(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = playground(folder, "up", "--nodes", "t4:1x4", "--port", port)
    assert refused.returncode == 1
    assert f"TCP port {port} is in use" in refused.stderr
    with pytest.raises(NotRunning):
        LoopbackCluster.open(folder)
