"""Where a job writes its output, by `scontrol show job`, and whose file `penstock logs` shows."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock_scheduler.api.messages import OutputFiles
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.gateway import CliGateway
from penstock_slurm.jobs.output_files import resolved
from penstock_slurm.settings import SlurmSettings

RECORD = (
    "JobId=7 ArrayJobId=5 ArrayTaskId=13 JobName={name} UserId=ada(1001) JobState=RUNNING BatchHost=t4-00.site.org "
    "StdErr={err} StdIn=/dev/null StdOut={out} Power="
)
ME = pwd.getpwuid(os.geteuid())


def output(tmp_path: Path, user: str = ME.pw_name, **fields: str) -> OutputFiles | None:
    names = {"name": "train", "out": "/home/ada/1.out", "err": ""} | fields
    gateway = SimpleNamespace(describe=lambda job: RECORD.format(**names))
    settings = SlurmSettings(partitions=("all",), conf=tmp_path / "slurm.conf", spool_dir=tmp_path)
    return SlurmSubmitter(cast(CliGateway, gateway), Spool(tmp_path), settings).output("7", user)


@pytest.mark.parametrize(
    "fields",
    [{}, {"name": "x UserId=root(0)"}, {"out": "/etc/shadow UserId=nobody(65534)"}],
    ids=["plain", "name", "path"],
)
def test_the_file_must_belong_to_the_user_that_squeue_names(tmp_path: Path, fields: dict[str, str]):
    """penstockd may run as root, and would read a file of the user that a name or a path pretends."""
    found = output(tmp_path, **fields)
    assert found is not None
    assert found.uid == ME.pw_uid
    assert found.stderr == found.stdout


def test_a_user_that_this_host_does_not_know_has_no_output(tmp_path: Path):
    assert output(tmp_path, user="penstock-test-nobody") is None


def test_names_and_paths_with_spaces(tmp_path: Path):
    found = output(tmp_path, name="a night", out="/data/of ada/%x.out", err="/data/of ada/%j.err")
    assert found is not None
    assert (found.stdout, found.stderr) == ("/data/of ada/a night.out", "/data/of ada/7.err")


@pytest.mark.parametrize(
    ("pattern", "file"),
    [
        ("%A_%a", "5_13"),
        ("%j.%4j.%04j.%99j", "7.0007.0007.0000000007"),
        ("%J %b %s %t %n", "7 3 batch 0 0"),
        ("%u-%x", "ada-train"),
        ("%N", "t4-00"),
        ("100%%", "100%"),
        ("%q %", "%q %"),
        (r"\%j", "%j"),
    ],
)
def test_patterns(pattern: str, file: str):
    told = {"JobId": "7", "ArrayJobId": "5", "ArrayTaskId": "13", "JobName": "train", "UserId": "ada(1001)"}
    assert resolved(pattern, told | {"BatchHost": "t4-00.site.org"}) == file


def test_patterns_without_a_value_stay():
    assert resolved("%a.%N.%A", {"JobId": "7"}) == "%a.%N.7"
