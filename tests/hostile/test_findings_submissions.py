"""What a script for the API can ask sbatch for: `#SBATCH --wait` held a place for 15 s, and its job arrived in spite of a 503."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock_scheduler.api.messages import Submission
from penstock_scheduler.people.errors import BadJobSpec, ClusterAway
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.gateway import CliGateway
from penstock_slurm.settings import SlurmSettings


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("#SBATCH --wait", True),
        ("#SBATCH -W -t 5", True),
        ("#SBATCH -t 5 -WH", True),
        ("#SBATCH --wait-all-nodes=1", False),
        ("true\n#SBATCH --wait", False),
        ("# --wait", False),
    ],
)
def test_a_script_that_makes_sbatch_wait_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, refused: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    submitter = SlurmSubmitter(
        cast("CliGateway", SimpleNamespace()), Spool(tmp_path), SlurmSettings(partitions=("all",))
    )
    with pytest.raises(BadJobSpec if refused else ClusterAway, match="--wait" if refused else "not on PATH"):
        submitter.submit(Submission(script=f"#!/bin/sh\n{line}\n"), "root", os.getuid())
