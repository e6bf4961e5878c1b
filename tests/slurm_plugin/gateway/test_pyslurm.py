"""The back end `pyslurm` where there is no pyslurm; with it, the contract tests run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock_scheduler.errors import ConfigError
from penstock_slurm.gateway import BackendMissing, open_gateway
from penstock_slurm.gateway import pyslurm as backend


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=x\n")
    monkeypatch.setenv("SLURM_CONF", "before")
    monkeypatch.setattr(backend, "loaded", [])
    monkeypatch.setitem(sys.modules, "pyslurm", None)  # import pyslurm raises ImportError
    return path


def test_without_pyslurm_the_remedy_is_told_and_nothing_is_changed(conf, monkeypatch):
    import os

    with pytest.raises(BackendMissing, match="backend = 'cli'") as error:
        open_gateway("pyslurm", conf=conf, timeout_s=1)
    assert isinstance(error.value, ConfigError)
    assert os.environ["SLURM_CONF"] == "before"


def test_a_slurm_conf_that_is_not_there_is_said_before_libslurm_ends_the_process(conf, tmp_path):
    with pytest.raises(BackendMissing, match="there is no"):
        open_gateway("pyslurm", conf=tmp_path / "none.conf", timeout_s=1)


def test_a_process_speaks_to_one_slurm(conf, monkeypatch):
    monkeypatch.setattr(backend, "loaded", ["/another/slurm.conf"])
    with pytest.raises(BackendMissing, match=r"already uses the Slurm of /another/slurm\.conf"):
        open_gateway("pyslurm", conf=conf, timeout_s=1)
