"""`python -m penstock_executor.launch`: several processes from one that has imported PyTorch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from penstock_executor.environment import read_ranks
from penstock_executor.launch import main, tasks_of_node
from tests.executor.elastic import environment
from tests.executor.spool import bodies, process, send_to_all, tell, wait_for
from tests.forking import FORKING

SHOWS = """
import gc, json, os, random, sys
imported = "torch._dynamo" in sys.modules
import numpy, torch
import penstock_executor as px
run = px.start(os.environ["FOLDER"] + "/checkpoints")
print(json.dumps({"rank": run.rank, "world": run.world, "local": os.environ.get("SLURM_LOCALID"), "imported": imported,
    "per_node": os.environ.get("SLURM_NTASKS_PER_NODE"), "collects": [gc.isenabled(), gc.get_freeze_count() > 100_000],
    "argv": sys.argv[1:], "main": __name__, "path": sys.path[0], "draws": [random.random(), numpy.random.rand()],
    "seed": torch.initial_seed(), "threads": torch.get_num_threads(), "sum": run._group.from_first(run.rank)}) + "\\n", end="")
"""
STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "t4-00",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_JOB_NODELIST": "t4-00",
    "SLURM_GPUS_ON_NODE": "3",
    "SLURM_JOB_GPUS": "0,1,2",
}


def launched(folder: Path, code: str, *, signalled: bool = False, **environ: str) -> BaseProcess:
    """The launcher with three processes of this script, forked from a process that has imported PyTorch.

    `signalled`: SIGTERM comes before the first of them begins.
    """
    (folder / "train.py").write_text(code)
    inherited = environment() | STEP | {"FOLDER": str(folder)} | environ
    process = FORKING.Process(target=_launch, args=(str(folder / "train.py"), inherited, signalled))
    process.start()
    return process


def _launch(script: str, environ: dict[str, str], signalled: bool) -> None:
    os.environ.clear()
    os.environ.update(environ)
    if signalled:
        fork = os.fork
        os.fork = lambda: (os.kill(os.getpid(), signal.SIGTERM), setattr(os, "fork", fork), fork())[-1]
    sys.exit(main([script]))


def launcher(folder: Path, code: str, *arguments: str, name: str = "train.py", **environ: str):
    """The command, in an environment that says of which processes it is."""
    (folder / name).write_text(code)
    inherited = environment() | {"FOLDER": str(folder)}
    inherited.pop("OMP_NUM_THREADS")
    return process("-m", "penstock_executor.launch", *arguments, environment=inherited | environ)


def test_each_gpu_has_a_process_with_everything_imported_and_the_variables_of_srun(tmp_path: Path):
    script = str(tmp_path / "train.py")
    with launcher(tmp_path, SHOWS, script, "--lr", "1", "-m", **STEP | {"OMP_NUM_THREADS": "1"}) as child:
        out, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    said = sorted(map(json.loads, out.splitlines()), key=lambda each: each["rank"])
    assert [(each["rank"], each["world"], each["local"]) for each in said] == [(0, 3, "0"), (1, 3, "1"), (2, 3, "2")]
    assert {each["per_node"] for each in said} == {"3"}
    assert all(each["collects"] == [True, True] for each in said), (
        "garbage is collected, but not among what was imported"
    )
    assert all(each["imported"] and each["main"] == "__main__" and each["sum"] == 0 for each in said)
    assert all(each["argv"] == ["--lr", "1", "-m"] and each["path"] == str(tmp_path) for each in said)
    draws = [draw for each in said for draw in each["draws"]]
    assert len(set(draws)) == 6, "no two processes draw the same numbers"
    assert len({each["seed"] for each in said}) == 1, "PyTorch's seed is what it is without the launcher"


def test_a_script_written_for_torchrun_joins_its_processes(tmp_path: Path):
    code = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "place = [dist.get_rank(), int(os.environ['LOCAL_RANK']), int(os.environ['LOCAL_WORLD_SIZE'])]\n"
        "open(f\"{os.environ['FOLDER']}/{place}\", 'w').write(str(total.item()))\n"
    )
    child = launched(tmp_path, code)
    child.join(120)
    assert child.exitcode == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("[[]*")} == {
        f"[{n}, {n}, 3]": "3.0" for n in range(3)
    }


def test_several_nodes_have_the_ranks_that_srun_would_give(tmp_path: Path):
    """Slurm has given one GPU on the first node and two on the second: this is the second."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(
        "#!/bin/sh\necho 'JobId=42 Nodes=t4-00 CPU_IDs=0 Mem=1 GRES=gpu:t4:1(IDX:0)"
        " Nodes=t4-01 CPU_IDs=0-1 Mem=1 GRES=gpu:t4:2(IDX:0-1) NodeAddr=10.0.0.7'\n"
    )
    (commands / "scontrol").chmod(stat.S_IRWXU)
    both = {"SLURM_STEP_NODELIST": "t4-[00-01]", "SLURM_JOB_NODELIST": "t4-[00-01]", "SLURM_STEP_NUM_TASKS": "2"}
    here = {"SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "0,1"}
    show = (
        "from penstock_executor.environment import read_ranks\nr = read_ranks()\n"
        "said = map(str, [r.rank, r.world, r.local_rank, r.local_world, r.nodes, r.master, r.port])\n"
        "print(' '.join(said) + '\\n', end='')"
    )
    port = read_ranks(STEP | both | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}).port
    path = f"{commands}:/usr/bin:/bin"
    with launcher(tmp_path, show, str(tmp_path / "train.py"), **STEP | both | here | {"PATH": path}) as child:
        out, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    assert sorted(out.splitlines()) == [f"1 3 0 2 1 10.0.0.7 {port}", f"2 3 1 2 1 10.0.0.7 {port}"]


def test_outside_slurm_and_of_a_module_it_is_one_process_as_python_would_run_it(tmp_path: Path):
    with launcher(
        tmp_path, SHOWS, "-m", "of_a_package", "x", name="of_a_package.py", PYTHONPATH=_paths(tmp_path)
    ) as child:
        out, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    (said,) = map(json.loads, out.splitlines())
    assert (said["rank"], said["world"], said["argv"]) == (0, 1, ["x"])


def _paths(folder: Path) -> str:
    return f"{environment()['PYTHONPATH']}:{folder}"


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "3"}, (), "srun --ntasks-per-node=1"),
        (STEP | {"RANK": "0"}, (), "takes the place of torchrun"),
        ({"SLURM_JOB_ID": "42"}, (), "srun --ntasks-per-node=1"),
        (STEP, ("--import=no_such_module",), "no_such_module"),
        (STEP, ("--import=begins_a_thread",), r"begins_a_thread has started threads \(watcher\)"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    environ: dict[str, str], arguments: tuple[str, ...], words: str, tmp_path: Path
):
    (tmp_path / "begins_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='watcher', daemon=True).start()"
    )
    script = str(tmp_path / "train.py")
    with launcher(tmp_path, "print(1)", *arguments, script, **environ | {"PYTHONPATH": _paths(tmp_path)}) as child:
        out, error = child.communicate(timeout=120)
    assert child.returncode == 2
    assert out == ""
    assert re.search(words, error), error


def test_no_other_process_gets_the_port_before_the_processes_join():
    """PyTorch listens there seconds later, with SO_REUSEADDR."""
    ports = [int(tasks_of_node({})[0]["MASTER_PORT"]) for _ in range(2)]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as first:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(("0.0.0.0", port))
            first.listen()


def test_a_process_that_fails_ends_the_others_and_gives_its_status(tmp_path: Path):
    code = "import os, sys, time\nif os.environ['SLURM_PROCID'] == '1': sys.exit(7)\ntime.sleep(600)"
    child = launched(tmp_path, code)
    child.join(120)
    assert child.exitcode == 7


def test_a_process_that_is_killed_leaves_a_word_by_its_launcher(tmp_path: Path):
    """Slurm's out-of-memory killer lets no process say why it ends."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 3)
    code = "import os, time\nif os.environ['SLURM_PROCID'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    child = launched(tmp_path, code, PENSTOCK_SPOOL=str(spool), SLURMD_NODENAME="t4-00")
    child.join(120)
    assert child.exitcode == 137
    (ended,) = bodies(spool, 3, "ended")
    assert (ended.outcome, ended.text) == ("failed", "rank 1 on t4-00 was killed by signal 9; often out of memory")


SAVES = (
    "import os, signal, sys, time\n"
    "def stop(*_):\n"
    "    time.sleep(1 + int(os.environ['SLURM_PROCID']))\n"
    "    open(os.environ['FOLDER'] + '/saved' + os.environ['SLURM_PROCID'], 'w')\n"
    "    sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "open(os.environ['FOLDER'] + '/ready' + os.environ['SLURM_PROCID'], 'w')\n"
    "for _ in range(6000): time.sleep(0.1)"  # Python loses a signal that comes just before a sleep, until its end
)


def test_slurms_signal_stops_all_and_the_launcher_waits_for_their_checkpoints(tmp_path: Path):
    child = launched(tmp_path, SAVES)
    wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 3, "the processes")
    send_to_all(child.pid, signal.SIGTERM)
    child.join(60)
    assert child.exitcode == 143
    assert len(list(tmp_path.glob("saved*"))) == 3


def test_a_signal_that_comes_while_the_processes_begin_stops_them_too(tmp_path: Path):
    child = launched(tmp_path, "import time\nfor _ in range(6000): time.sleep(0.1)", signalled=True)
    child.join(60)
    assert child.exitcode == 143


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path: Path):
    code = "import os, time\nopen(os.environ['FOLDER'] + '/' + str(os.getpid()) + '.pid', 'w')\ntime.sleep(600)"
    child = launched(tmp_path, code)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 3, "the processes")
    child.kill()
    child.join()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    wait_for(lambda: not any(_lives(pid) for pid in pids), "their ends", 120)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
