"""`penstock loopback`, as a user runs it."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock_loopback import LoopbackCluster
from penstock_loopback import cli as loopback_cli
from penstock_loopback.fixtures import MakeLoopback


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The default folder, inside the test's folder. A cluster in it ends with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"penstock-loopback-{os.getuid()}"
    yield folder
    LoopbackCluster(folder, ()).down()


def penstock_loopback(*argv: str) -> Result:
    return CliRunner().invoke(loopback_cli.app, list(argv))


@pytest.mark.slurm
def test_up_env_status_down(folder: Path, make_loopback: MakeLoopback) -> None:
    make_loopback().down()  # skips where there is no Slurm
    up = penstock_loopback("up", "--nodes", "t4:1x4,rtx:1x8")
    assert up.exit_code == 0, up.output
    assert "2 nodes with 12 GPUs are up" in up.output

    env = penstock_loopback("env")
    shell = ["bash", "-c", 'eval "$1"; sinfo -h -N -p all -o %N', "bash", env.output]
    listing = subprocess.run(shell, capture_output=True, text=True, timeout=300, check=True)
    assert sorted(listing.stdout.split()) == ["rtx-00", "t4-00"]

    assert "0 of 8" in penstock_loopback("status").output
    status = json.loads(penstock_loopback("status", "--json").output)
    assert status["folder"] == str(folder)
    assert status["nodes"][0] == {"name": "t4-00", "gpu_type": "t4", "gpus": 4, "gpus_used": 0, "state": "idle"}

    LoopbackCluster.open(folder).kill_slurmctld()
    assert "not running: slurmctld" in penstock_loopback("status").output

    again = penstock_loopback("up")
    assert again.exit_code == 1
    assert "penstock: a loopback cluster already runs" in again.output

    down = penstock_loopback("down")
    assert down.exit_code == 0
    agents = 2 if Path("/usr/include/slurm/spank.h").exists() else 0
    ended = re.search(r"(\d+) processes", down.output)
    assert ended is not None, down.output
    least = 2 + agents + 1  # munged, two slurmds and their agents; slurmctld was killed
    assert least <= int(ended[1]) <= least + agents, "each agent may just ask Slurm by one command"


def test_down_with_nothing_to_stop_says_so(folder: Path) -> None:
    down = penstock_loopback("down")
    assert down.exit_code == 0
    assert f"nothing to stop: no loopback cluster runs in {folder}" in down.output


@pytest.mark.parametrize("command", ["status", "env"])
def test_nothing_running_is_an_error_with_the_remedy(folder: Path, command: str) -> None:
    result = penstock_loopback(command)
    assert result.exit_code == 1
    assert result.output == f"penstock: no loopback cluster runs in {folder}; start one with `up`\n"


@pytest.mark.parametrize("argv", [["up", "--nodes", "t4:6y4"], ["up", "--nodez", "t4:6x4"], ["up", "--port", "many"]])
def test_wrong_usage_ends_with_2(folder: Path, argv: list[str]) -> None:
    assert penstock_loopback(*argv).exit_code == 2
    assert not folder.exists()


def test_a_slow_start_tells_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    tell = loopback_cli.progress_line(now_s)
    for now_s in (101.0, 102.5, 103.0, 105.0):  # noqa: B007 - the clock that `monotonic` reads
        tell("3 of 11 nodes are idle")
    assert capsys.readouterr().err.splitlines() == [
        "penstock: 3 of 11 nodes are idle, after 2 s",
        "penstock: 3 of 11 nodes are idle, after 5 s",
    ]
