"""What a program does whose training another program has completed."""

from pathlib import Path

import pytest

from ..elastic import environment, gang
from ..spool import JOB

IN_JOB = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "t4-00", "SLURM_RESTART_COUNT": "1"}

SCRIPT = """\
import os, sys
from pathlib import Path
import torch
import penstock_executor as px
os.chdir(sys.argv[1])
run = px.start()
run.keep(model=torch.nn.Linear(1, 1))
for epoch in run.epochs(int(sys.argv[2])):
    for _ in range(3):
        if run.rank == 0:
            Path("seen").open("a").write(f"{epoch}")
        run.step_done(8)
    if "--stop" in sys.argv:
        os.kill(os.getpid(), 15)
        run.step_done(8)
        run.step_done(8)
if "--fail" in sys.argv:
    raise RuntimeError("the evaluation failed")
"""

WHOLE = """\
import sys
from penstock_executor.launch import end, status_of
end(status_of(__file__.replace("whole", "train"), sys.argv[1:], module=False))
"""
"""Ends the process as Python does, with its hooks: a process of `multiprocessing` calls none."""


@pytest.fixture
def trains(tmp_path: Path):
    """Runs a program in the job. Returns its exit status, the epochs of the steps that it made, and what it said."""
    script = tmp_path / "whole.py"
    script.write_text(WHOLE)
    (tmp_path / "train.py").write_text(SCRIPT)

    def train(epochs: int, *options: str, processes: int = 1, **changed: str) -> tuple[int, str, str]:
        before = seen(tmp_path)
        environ = environment() | IN_JOB | changed
        with gang(script, tmp_path, str(epochs), *options, processes=processes, environ=environ) as job:
            (tmp_path / "said").write_text("")
            status = job.wait()
        return status, seen(tmp_path)[len(before) :], job.said.read_text()

    return train


def seen(folder: Path) -> str:
    return (folder / "seen").read_text() if (folder / "seen").exists() else ""


def test_a_second_program_of_a_job_does_not_take_the_first_ones_training_for_its_own(trains):
    assert trains(2)[:2] == (0, "000111")
    status, made, said = trains(2, processes=2)
    assert (status, made) == (1, "")
    assert (
        said.count("RuntimeError: checkpoints/42: another program of this Slurm job has completed this training") == 2
    )
    assert "px.start('checkpoints/42/second')" in said
    assert trains(3)[:2] == (0, "222"), "more epochs are something to train"
    assert trains(3)[0] == 1


def test_a_run_that_is_started_again_after_the_end_is_done(trains):
    assert trains(1)[:2] == (0, "000")
    assert trains(1, SLURM_RESTART_COUNT="2")[:2] == (0, ""), "Slurm requeued the job"
    assert trains(1, SLURM_RESTART_COUNT="2", TORCHELASTIC_RESTART_COUNT="1")[:2] == (0, ""), "torchrun restarted it"


def test_in_another_job_it_is_done(trains, tmp_path: Path):
    assert trains(1)[:2] == (0, "000")
    (tmp_path / "checkpoints" / "42").rename(tmp_path / "checkpoints" / "43")
    assert trains(1, SLURM_JOB_ID="43")[:2] == (0, "")


def test_a_program_that_fails_after_the_training_may_be_tried_again(trains):
    assert trains(1, "--fail")[:2] == (1, "000")
    assert trains(1, "--fail")[:2] == (1, "")
    assert trains(1)[:2] == (0, "")


def test_a_program_that_was_stopped_may_be_started_again(trains):
    assert trains(2, "--stop")[0] == 143
    assert trains(2)[0] == 0


def test_a_new_job_goes_on_from_one_that_has_ended_and_a_third_from_the_second(trains, tmp_path: Path):
    assert trains(3, "--stop")[:2] == (143, "000")
    second = {"SLURM_JOB_ID": "43", "PENSTOCK_CONTINUE": "42"}
    for options, ends in ((("--stop",), (143, "000")), ((), (0, "000111"))):  # Slurm requeues it
        status, made, said = trains(2, *options, processes=2, **second)
        assert (status, made) == ends, said
        assert "epoch=0 position=0 continues" in said
    assert trains(3, SLURM_JOB_ID="44", PENSTOCK_CONTINUE="43")[:2] == (0, "222")
    assert (tmp_path / "checkpoints/44").resolve() == (tmp_path / "checkpoints/42").resolve()


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("41", "checkpoints/41 has no checkpoint to continue from"),
        ("checkpoints/42", "checkpoints/43 has checkpoints of its own"),
    ],
)
def test_a_job_that_cannot_go_on_from_another_says_why_and_begins_nothing(trains, before: str, told: str):
    assert trains(3, "--stop")[:2] == (143, "000")
    if before != "41":
        assert trains(3, "--stop", SLURM_JOB_ID="43")[0] == 143
    status, made, said = trains(3, processes=2, SLURM_JOB_ID="43", PENSTOCK_CONTINUE=before)
    assert (status, made) == (1, ""), said
    assert said.count(f"RuntimeError: {told}") == 2
