"""Whose output `penstock logs` shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from penstock_scheduler.spool import Spool
from penstock_slurm.gateway import CliGateway
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.submitter import SlurmSubmitter

RECORD = "JobId=1 JobName={name} UserId=ada(1001) GroupId=ada(1001) JobState=RUNNING StdOut={out}"


def output(tmp_path: Path, name: str = "train", out: str = "/home/ada/1.out") -> tuple[str, int] | None:
    gateway = SimpleNamespace(describe=lambda job: RECORD.format(name=name, out=out))
    settings = SlurmSettings(partitions=("all",), conf=tmp_path / "slurm.conf", spool_dir=tmp_path)
    found = SlurmSubmitter(cast(CliGateway, gateway), Spool(tmp_path), settings).output("1")
    return (str(found.file), found.uid) if found is not None else None


def test_a_job_whose_names_hold_another_user_shows_no_output(tmp_path: Path):
    """penstockd may run as root, and would read the file as that user."""
    assert output(tmp_path) == ("/home/ada/1.out", 1001)
    assert output(tmp_path, out="/etc/shadow UserId=root(0)") is None
    assert output(tmp_path, name="x UserId=root(0)") is None
