"""A run of two launchers, one on each of two nodes, gives up a node: the next run begins on the other one."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from penstock_executor.checkpoint import epoch_folder
from penstock_executor.launch import main
from penstock_profiles import wire
from tests.executor.elastic import SCRIPT, assert_each_sample_once, environment, steps
from tests.executor.spool import JOB, bodies, send_to_all, wait_for
from tests.executor.test_launch import STEP
from tests.forking import FORKING

NODES = ("t4-00", "t4-01")
SCONTROL = (
    f"#!/bin/sh\necho 'JobId={JOB} Nodes=t4-[00-01] CPU_IDs=0 Mem=1 GRES=gpu:t4:1(IDX:0)"
    " NodeAddr=127.0.0.1 Gres=gpu:t4:1'\n"
)
"""Slurm counts both nodes for the whole time, as it does until it has taken one."""


Launch = Callable[..., BaseProcess]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts launchers, which end with the test."""
    made: list[BaseProcess] = []

    def start(*arguments: object, **flags: object) -> BaseProcess:
        made.append(launched(tmp_path, *arguments, **flags))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.kill()
        each.join()


def launched(folder: Path, node: int, script: Path, *arguments: str, flags: tuple[str, ...]) -> BaseProcess:
    """The launcher of this node; each node has one GPU."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "scontrol").write_text(SCONTROL)
    (commands / "scontrol").chmod(stat.S_IRWXU)
    both = dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "t4-[00-01]")
    both |= dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_JOB_NUM_NODES"), "2")
    here = {"SLURMD_NODENAME": NODES[node], "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}
    gpus = {"SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_GPUS": "0", "SLURM_RESTART_COUNT": "3"}
    inherited = environment(folder / "spool") | STEP | both | here | gpus | {"PATH": f"{commands}:/usr/bin:/bin"}
    process = FORKING.Process(target=_launch, args=([*flags, str(script), *arguments], inherited))
    process.start()
    return process


def _launch(arguments: list[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.exit(main(arguments))


def ask(folder: Path, kept: tuple[str, ...], request: str = "5-1-keep") -> None:
    path = wire.control_file(folder / "spool", JOB)
    asked = wire.Request(id=request, asked_s=1.0, keep_nodes=kept)
    message = wire.ControlMessage(job_id=JOB, epoch=1, round=5, request=asked)
    path.with_suffix(".tmp").write_text(message.model_dump_json())
    path.with_suffix(".tmp").rename(path)


def begin(launch: Launch, folder: Path, flags: tuple[str, ...] = ("--gives-up-nodes",)) -> list[BaseProcess]:
    """Both launchers, once their run has made some steps."""
    (folder / "spool" / JOB).mkdir(parents=True)
    options = (str(folder), "--size=500", "--epochs=6", "--batch=8", "--sleep=0.1")
    made = [launch(node, SCRIPT, *options, flags=flags) for node in range(2)]
    wait_for(lambda: len(steps(folder)) > 8, "steps", 120)
    (started,) = bodies(folder / "spool", 1, "started")
    assert (started.gives_up_nodes, started.left_nodes, started.restarts) == (bool(flags), (), 3 if flags else None)
    return made


def finish(folder: Path, launchers: list[BaseProcess]) -> list[int | None]:
    """Their exit statuses."""
    (folder / "fast").touch()
    for each in launchers:
        each.join(240)
    return [each.exitcode for each in launchers]


def test_the_next_run_begins_on_the_node_that_stays(launch: Launch, tmp_path: Path):
    first, second = begin(launch, tmp_path)
    ask(tmp_path, NODES[:1])
    second.join(240)
    assert second.exitcode == 0
    assert wire.left_file(tmp_path / "spool", JOB, 3, "t4-01").exists()
    (started,) = wait_for(lambda: bodies(tmp_path / "spool", 2, "started"), "the next run", 120)
    assert (started.gives_up_nodes, started.left_nodes, started.restarts) == (True, ("t4-01",), 3)
    assert started.gpu_ids == {"t4-00": (0,)}, "not those that Slurm still counts"
    assert finish(tmp_path, [first]) == [0]
    assert not wire.left_file(tmp_path / "spool", JOB, 3, "t4-00").exists()
    worlds = {(record["run"], record["world"]) for record in steps(tmp_path)}
    assert worlds == {(1, 2), (2, 1)}, "the same request is served once"
    ends = [max(record["step"] for record in steps(tmp_path) if record["run"] == 1)]
    assert ends[0] + 1 == min(record["step"] for record in steps(tmp_path) if record["run"] == 2), "no step is lost"
    assert_each_sample_once(tmp_path, 6, 500)


@pytest.mark.parametrize("reason", ["cannot save", "not asked for it"])
def test_a_run_that_cannot_trains_on_with_all_its_nodes(launch: Launch, tmp_path: Path, reason: str):
    """Its checkpoints cannot be written; or it was not started with the flag."""
    flags = ("--gives-up-nodes",) if reason == "cannot save" else ()
    launchers = begin(launch, tmp_path, flags)
    if reason == "cannot save":
        folder = epoch_folder(tmp_path / "checkpoints", 1)
        folder.rename(tmp_path / "away")
        folder.touch()
    ask(tmp_path, NODES[:1])
    count = len(steps(tmp_path))
    wait_for(lambda: len(steps(tmp_path)) > count + 40, "more steps", 120)
    assert all(each.is_alive() for each in launchers)
    assert finish(tmp_path, launchers) == [0, 0]
    assert {record["run"] for record in steps(tmp_path)} == {1}


def test_the_same_status_of_a_script_that_gives_up_nothing_is_a_failure(launch: Launch, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(76)")
    launcher = launch(0, script, flags=("--gives-up-nodes",))
    launcher.join(240)
    assert launcher.exitcode == 76


def test_a_signal_between_two_runs_stops_the_next_one(launch: Launch, tmp_path: Path):
    """Slurm sends it once, and no process of the next run is there yet. Without it, the job would be killed."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from penstock_executor import giving_up\n"
        "if os.environ.get('PENSTOCK_LEFT_NODES'):\n"
        "    time.sleep(600)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "open(sys.argv[1] + '/ready', 'w')\n"
        "signal.pause()\n"
        "giving_up.tell(['t4-00'])\n"
        "sys.exit(76)\n"
    )
    first = launch(0, script, str(tmp_path), flags=("--gives-up-nodes",))
    wait_for((tmp_path / "ready").exists, "the script", 120)
    send_to_all(first.pid or 0, signal.SIGTERM)
    first.join(240)
    assert first.exitcode == 143
