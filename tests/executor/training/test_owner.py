"""Two jobs do not train in one folder."""

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.environment import Environment  # noqa: E402
from penstock_executor.training import owner  # noqa: E402

from ..elastic import environment, gang  # noqa: E402
from ..spool import ROOT  # noqa: E402

FIRST, SECOND = Environment(job_id="41"), Environment(job_id="42")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file in which squeue finds the state of job 41; without it, Slurm knows no such job."""
    programs, state = tmp_path / "bin", tmp_path / "state"
    programs.mkdir()
    squeue = programs / "squeue"
    squeue.write_text(
        f'#!/bin/sh\ncase "$*" in *--jobs=41*) cat {state} 2>/dev/null && exit;; esac\n'
        'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1\n'
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return state


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED"])
def test_a_second_job_is_told_whose_folder_it_is_while_the_first_one_has_not_ended(tmp_path: Path, slurm, state: str):
    folder = tmp_path / "shared"
    assert owner.claim(folder, FIRST) is None
    assert owner.claim(folder, FIRST) is None, "its next run"
    slurm.write_text(f"{state}\n")
    told = owner.claim(folder, SECOND)
    assert told is not None
    assert f"is the folder of job 41, which is {state}" in told
    assert owner.claim(folder, FIRST) is None, "the first one keeps it"


@pytest.mark.parametrize("known", [True, False])
def test_the_folder_of_a_job_that_has_ended_goes_to_the_next_one(tmp_path: Path, slurm, known: bool):
    owner.claim(tmp_path, FIRST)
    if known:
        slurm.write_text("")
    assert owner.claim(tmp_path, SECOND) is None
    assert (tmp_path / "job").read_text() == "42"


def test_outside_slurm_a_folder_has_no_owner(tmp_path: Path):
    assert owner.claim(tmp_path, dataclasses.replace(FIRST, job_id=None)) is None
    assert not (tmp_path / "job").exists()


def test_a_run_is_refused_on_all_its_processes_and_begins_no_epoch(tmp_path: Path, slurm):
    folder = tmp_path / "checkpoints"
    owner.claim(folder, FIRST)
    slurm.write_text("RUNNING\n")
    environ = environment() | {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "t4-00",
        "PATH": f"{slurm.parent / 'bin'}:/bin",
    }
    with gang(ROOT / "tests/executor/train_around.py", tmp_path, processes=2, environ=environ) as job:
        assert job.wait() == 1
    assert job.said.read_text().count("RuntimeError: ") == 2
    assert [path.name for path in folder.iterdir()] == ["job"], "no later run has begun"
