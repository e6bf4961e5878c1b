"""The wrapper of NVIDIA's `cuda-checkpoint`, with a stand-in for the tool: no GPU here."""

from pathlib import Path

import pytest

from penstock_executor.cuda_checkpoint import CannotSuspend, find_tool, main

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Nov  7 00:00:00 UTC 2025\n"

TOOL = """#!/bin/sh
case "$1" in
  --get-state) cat "$STATE" ;;
  --toggle)
    case $(cat "$STATE") in running) new=checkpointed ;; *) new=running ;; esac
    echo $new > "$STATE" ;;
esac
[ "$3" != 13 ] || { echo "no such process" >&2; exit 1; }
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the process's state."""
    path = tmp_path / "cuda-checkpoint"
    path.write_text(TOOL)
    path.chmod(0o755)
    (tmp_path / "state").write_text("running\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("STATE", str(tmp_path / "state"))
    (tmp_path / "driver").write_text(DRIVER.format("570.86.15"))
    return tmp_path / "state"


def test_twice_suspended_is_once(tool: Path, capsys: pytest.CaptureFixture[str]):
    states = []
    for verb in ("suspend", "suspend", "resume", "resume"):
        assert main([verb, "7"], tool.with_name("driver")) == 0
        states.append(tool.read_text().strip())
    assert states == ["checkpointed", "checkpointed", "running", "running"]
    assert "suspend of 7 took" in capsys.readouterr().out


def test_the_message_names_what_is_missing_and_the_remedy(tool: Path, tmp_path: Path, monkeypatch, capsys):
    with pytest.raises(CannotSuspend, match="driver is not loaded; run this on a GPU node"):
        find_tool(tmp_path / "none")
    (tmp_path / "driver").write_text(DRIVER.format("535.183.01"))
    with pytest.raises(CannotSuspend, match="driver has version 535, but cuda-checkpoint needs 550 or later"):
        find_tool(tmp_path / "driver")
    (tmp_path / "driver").write_text(DRIVER.format("550.54.14"))
    assert main(["suspend", "13"], tmp_path / "driver") == 1
    assert "no such process; does the process use one GPU" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CannotSuspend, match="not on the PATH; get it from"):
        find_tool(tmp_path / "driver")
