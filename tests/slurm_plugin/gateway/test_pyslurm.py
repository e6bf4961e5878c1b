"""The back end `pyslurm`: penstockd refuses it, and the back end says what it lacks. test_contract.py runs where pyslurm is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock_scheduler.people.errors import ConfigError
from penstock_slurm.gateway import BackendMissing
from penstock_slurm.gateway import pyslurm as backend


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=x\n")
    monkeypatch.setenv("SLURM_CONF", "before")
    monkeypatch.setattr(backend, "loaded", [])
    monkeypatch.setitem(sys.modules, "pyslurm", None)  # import pyslurm raises ImportError
    return path


@pytest.mark.parametrize("more", ["", "agents = true"])
def test_penstockd_refuses_it_and_says_why_and_what_to_set(tmp_path: Path, more: str) -> None:
    settings = tmp_path / "penstock.toml"
    settings.write_text(f'[slurm]\npartitions = ["all"]\nbackend = "pyslurm"\n{more}\n')
    done = subprocess.run(
        [sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", settings, "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "no release of pyslurm passes the contract tests" in done.stderr
    assert "set [slurm] backend = 'cli'" in done.stderr


def test_without_pyslurm_the_remedy_is_told_and_nothing_is_changed(conf, monkeypatch):
    import os

    with pytest.raises(BackendMissing, match="install the pyslurm of your Slurm's release") as error:
        backend.PyslurmGateway(conf=conf, timeout_s=1)
    assert isinstance(error.value, ConfigError)
    assert os.environ["SLURM_CONF"] == "before"


def test_a_slurm_conf_that_is_not_there_is_said_before_libslurm_ends_the_process(conf, tmp_path):
    with pytest.raises(BackendMissing, match="there is no"):
        backend.PyslurmGateway(conf=tmp_path / "none.conf", timeout_s=1)


def test_a_process_speaks_to_one_slurm(conf, monkeypatch):
    monkeypatch.setattr(backend, "loaded", ["/another/slurm.conf"])
    with pytest.raises(BackendMissing, match=r"already uses the Slurm of /another/slurm\.conf"):
        backend.PyslurmGateway(conf=conf, timeout_s=1)
