"""What a program does whose training another program has completed, or begun in a job that is over."""

import os
import signal
import sys
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster

from ..elastic import environment, gang
from ..spool import JOB, ROOT, wait_for

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


GOES_ON = """\
import json, os, sys, time
from pathlib import Path
import torch
import penstock_executor as px
os.chdir(sys.argv[1])
torch.manual_seed(0)
run = px.start(continue_from=sys.argv[3] if len(sys.argv) > 3 else None)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.arange(40).double().unsqueeze(1) / 40)
model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=4)
for epoch in run.epochs(3):
    for (x,) in loader:
        run.step((model(x) - 3 * x).square().mean())
        with Path("steps").open("a") as file:
            file.write(f"{run.steps} ")
        time.sleep(float(sys.argv[2]))
weights = [each.tolist() for each in model.parameters()]
Path("weights").write_text(json.dumps(weights))
"""
"""Thirty steps. GOES_ON FOLDER PAUSE [JOB]"""


def undisturbed(folder: Path) -> str:
    """The weights of a training in one job."""
    (folder / "goes_on.py").write_text(GOES_ON)
    with gang(folder / "goes_on.py", folder / "whole", "0", environ=environment() | IN_JOB) as job:
        job.finish()
    return (folder / "whole" / "weights").read_text()


def steps(folder: Path) -> list[int]:
    return [int(each) for each in (folder / "steps").read_text().split()] if (folder / "steps").exists() else []


def test_a_job_that_reached_its_time_limit_goes_on_in_a_new_job_at_its_step(tmp_path: Path):
    """Slurm ends it by SIGTERM to all of its processes. The weights are those of a training that was never stopped."""
    whole, folder = undisturbed(tmp_path), tmp_path / "limited"
    with gang(tmp_path / "goes_on.py", folder, "0.1", environ=environment() | IN_JOB) as job:
        wait_for(lambda: len(steps(folder)) > 3, "some steps")
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.said.read_text()
    made = len(steps(folder))
    assert 3 < made < 30
    new = environment() | IN_JOB | {"SLURM_JOB_ID": "43", "SLURM_RESTART_COUNT": "0"}
    with gang(tmp_path / "goes_on.py", folder, "0", JOB, environ=new) as job:
        assert f"step={made} epoch={made // 10}" in job.finish()
    assert steps(folder) == list(range(1, 31)), "each step once"
    assert (folder / "weights").read_text() == whole


@pytest.mark.long
@pytest.mark.slurm
def test_slurms_time_limit_ends_a_job_and_a_new_job_goes_on_at_its_step(loopback: LoopbackCluster, tmp_path: Path):
    """The shortest limit is a minute. The new job gets the command that `penstock explain` prints."""
    whole, folder = undisturbed(tmp_path), tmp_path / "limited"
    folder.mkdir()
    paths = os.pathsep.join(str(ROOT / name) for name in ("profiles", "executor"))

    def submit(pause: str, **variables: str) -> str:
        export = ",".join(["ALL", f"PYTHONPATH={paths}", *(f"{name}={value}" for name, value in variables.items())])
        wrap = f"exec {sys.executable} {tmp_path}/goes_on.py {folder} {pause}"
        return loopback.command(
            *("sbatch", "--parsable", "--partition=t4", "--gres=gpu:1", "--time=1", f"--output={tmp_path}/log-%j"),
            *(f"--export={export}", f"--wrap={wrap}"),
        ).stdout.strip()

    def state(job: str) -> str:
        found = loopback.command("scontrol", "show", "job", "-o", job).stdout
        return found.split("JobState=")[1].split()[0]

    first = submit("4")
    wait_for(lambda: state(first) not in ("PENDING", "RUNNING", "COMPLETING"), "end of the first job")
    assert state(first) == "TIMEOUT", (tmp_path / f"log-{first}").read_text()
    made = steps(folder)
    assert made == list(range(1, len(made) + 1))
    second = submit("0", PENSTOCK_CONTINUE=first)
    wait_for(lambda: state(second) == "COMPLETED", "end of the new job")
    assert f"step={len(made)} epoch=0" in (tmp_path / f"log-{second}").read_text()
    assert steps(folder) == list(range(1, 31))
    assert (folder / "weights").read_text() == whole
