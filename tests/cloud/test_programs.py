"""penstock-resume and penstock-suspend, as slurmctld calls them, without a slurmctld."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from uuid import UUID

import pytest

from penstock_cloud import programs
from penstock_scheduler.burst.manager.share import NodeRequest, SharedFolder
from tests.cloud.conftest import SITE


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedFolder:
    """The folder in which the programs write, and a scontrol that knows one list."""
    config = tmp_path / "penstock.toml"
    config.write_text(f'[cloud]\nname = "lab"\nsite = "{UUID(SITE)}"\nshare = "{tmp_path}/share"\n')
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    monkeypatch.setattr(programs, "_names", {"cloud-[0-1]": ["cloud-0", "cloud-1"], "cloud-0": ["cloud-0"]}.__getitem__)
    monkeypatch.setattr(sys, "argv", ["penstock-resume", "cloud-[0-1]"])
    return SharedFolder(tmp_path / "share")


def test_a_resume_tells_which_job_waits_for_which_nodes(
    share: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "resume"
    file.write_text(json.dumps({"jobs": [{"job_id": 7, "nodes_resume": "cloud-0"}]}))
    monkeypatch.setenv("SLURM_RESUME_FILE", str(file))
    assert programs.resume() == 0
    assert [*share.requests()] == [NodeRequest(True, {"7": ["cloud-0"]}, ["cloud-0", "cloud-1"])]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "{", "[]", '{"jobs": [{"nodes": "cloud-0"}]}', '{"jobs": 3}', "\0"])
def test_a_resume_whose_file_is_gone_or_strange_tells_the_nodes(
    share: SharedFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
) -> None:
    """Slurm deletes the file ten seconds after it has called the program. penstockd finds the jobs in Slurm's own records."""
    file = tmp_path / "resume"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("SLURM_RESUME_FILE", str(file))
    assert programs.resume() == 0
    assert [*share.requests()] == [NodeRequest(True, {}, ["cloud-0", "cloud-1"])]
    told = capsys.readouterr().err
    assert told.startswith(f"penstock-resume: SLURM_RESUME_FILE={file} cannot be read")
    assert "penstockd is told the nodes without their jobs" in told


def test_a_share_that_cannot_be_written_is_a_failure(
    share: SharedFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "share").write_text("no folder")
    assert programs.resume() == 1
    assert capsys.readouterr().err.startswith("penstock-resume: ")
