"""Ways of starting the processes of a training, with real processes on CPUs."""

import subprocess
from pathlib import Path

import pytest

from ..elastic import PYTHON, environment, python_path, torchrun
from ..spool import ROOT

SCRIPT = ROOT / "tests" / "executor" / "train_launched.py"
KERNEL = """\
import asyncio, sys

async def kernel(cells):
    for number, cell in enumerate(cells):
        try:
            exec(compile(cell, f"<cell {number}>", "exec"), globals())
        except SystemExit as error:
            print(f"cell {number} ended with {error.code}")

asyncio.run(kernel(sys.argv[2:]))
"""
"""Runs cells as Jupyter does: without a file and in a loop of asyncio, and SystemExit ends a cell and not the kernel."""
CELLS = [
    "import os, torch, penstock_executor as px",
    "run = px.start(sys.argv[1])\n"
    "model = torch.nn.Linear(1, 1)\n"
    "data = torch.utils.data.TensorDataset(torch.ones(16, 1))\n"
    "model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4)",
    "for epoch in run.epochs(2):\n"
    "    for i, (x,) in enumerate(loader, loader.first):\n"
    "        run.step(model(x).square().mean())\n"
    "        print('trained', epoch, i)\n"
    "        if run.steps == 2:\n"
    "            os.kill(os.getpid(), 15)",
    "print('the kernel is there')",
]


def launch(folder: Path, way: str) -> subprocess.CompletedProcess[str]:
    environ = environment() | {"PYTHONPATH": python_path()}
    command = [PYTHON, str(SCRIPT), str(folder), way]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_a_single_process_has_a_group_for_the_barriers_of_a_script(tmp_path: Path):
    done = launch(tmp_path, "plain")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("trained-*"))) == 1


@pytest.mark.parametrize(
    ("way", "found"),
    [
        ("spawn", "torch.multiprocessing.spawn has started at least 2 processes"),
        pytest.param("initialised", "torch.distributed has rank 1 of 2", marks=pytest.mark.long),
    ],
)
def test_processes_of_the_scripts_own_without_ranks_are_refused(tmp_path: Path, way: str, found: str):
    """Each of them would train everything."""
    done = launch(tmp_path, way)
    assert done.returncode != 0
    assert f"{found}, but the environment says rank 0 of 1" in done.stderr.replace("rank 0 of 2", "rank 1 of 2")
    assert "or set RANK, WORLD_SIZE, LOCAL_RANK" in done.stderr


@pytest.mark.long
def test_under_torchrun_a_stop_that_has_saved_ends_in_status_1_and_the_next_run_goes_on(tmp_path: Path):
    """torchrun's own status; its log has that of the process."""
    environ = environment() | {"PYTHONPATH": python_path()}
    script = SCRIPT.with_name("train_around.py")
    command = [PYTHON, *torchrun(1), str(script), str(tmp_path), "--stop-in=1.4"]
    stopped = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert stopped.returncode == 1
    assert "143" in stopped.stderr
    assert "checkpoint written" in stopped.stderr
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "step=15 epoch=1 position=20 continues" in done.stderr


def test_in_a_notebook_a_stop_that_has_saved_ends_the_cell_and_the_kernel_stays(tmp_path: Path):
    environ = environment() | {"PYTHONPATH": python_path()}
    said = []
    for _ in range(2):
        command = [PYTHON, "-c", KERNEL, str(tmp_path / "checkpoints"), *CELLS]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    steps = [f"trained {epoch} {batch}" for epoch in range(2) for batch in range(4)]
    stopped, rest = said
    made = [line for line in stopped if line.startswith("trained")]
    assert made == steps[: len(made)]
    assert stopped[len(made) :] == ["cell 2 ended with 143", "the kernel is there"]
    assert rest == [*steps[len(made) :], "the kernel is there"]
