"""Stand-ins for Slurm's commands."""

import stat
from pathlib import Path

import pytest

from penstock_slurm.gateway import (
    CliGateway,
)
from penstock_slurm.gateway.commands import COMMANDS

WAIT = "for job in $(seq 20); do echo $job PENDING; done"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """slurm(body): every command becomes this shell script. They log their arguments to `calls`. `-V` prints `version`.

    Asked for the states of jobs, squeue runs `states` instead, and logs nothing. By default, jobs 1 to 20 wait.
    """

    def install(body: str, version: str = "slurm-wlm 22.05.8", states: str = WAIT) -> Path:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        for command in COMMANDS:
            path = tmp_path / command
            says = f'[ "$*" != -V ] || {{ echo "{version}"; exit 0; }}'
            says += f'\ncase "$*" in *"-o %i %T"*) {states}; exit ;; esac'
            path.write_text(f'#!/bin/sh\n{says}\nprintf "%s\\n" "${{0##*/}} $*" >> {calls}\n{body}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return calls

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return install


def gateway(timeout_s: float = 30.0):
    return CliGateway(conf=None, timeout_s=timeout_s)
