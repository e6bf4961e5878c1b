"""Start one process for each GPU of this node, all forked from one that has imported PyTorch.

    srun --ntasks-per-node=1 --cpu-bind=none python -m penstock_executor.launch train.py [ARGUMENT ...]
    srun --ntasks-per-node=1 --cpu-bind=none python -m penstock_executor.launch -m package.train [ARGUMENT ...]

Importing PyTorch takes a process some seconds of a core and thousands of files. With a process for each GPU, all of them do it at
once, in each move of the job. Here one process does it and then forks, so the others begin with everything imported. They see the
variables of an srun that starts one task for each GPU. They also see those of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), so a script that was written for torchrun needs no other. Outside Slurm,
the script runs in one process.

With `--gives-up-nodes`, a run on several nodes can give up some of them without a restart in Slurm: its processes save and end,
the launchers of the nodes that stay fork those of the next run, and the others end before Slurm takes their nodes:

    exec srun --wait=0 --ntasks-per-node=1 ... -m penstock_executor.launch --gives-up-nodes train.py

`--import NAME` also imports another module first, such as torchvision. It must neither use a GPU nor start threads when it is
imported. If it does, the command fails and says so.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import math
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock_executor import giving_up
from penstock_executor.allocation import address_of_first, find_allocation
from penstock_executor.client import note_left, report_killed
from penstock_executor.environment import EnvironmentDisagrees, expand_hostlist, read_environment, read_ranks
from penstock_executor.node_channel import devices_of_job
from penstock_executor.training.siblings import killed
from penstock_executor.training.status import BEGIN_ANEW, STOPPED, SUPERSEDED

PRELOADED = ("torch", "torch._dynamo", "torch.distributed", "penstock_executor.training.starting")
"""What an elastic script imports in any case: PyTorch's optimisers import `torch._dynamo`."""

PATIENCE_S = 10.0
"""Time between the failure of a process and SIGTERM to the others, and between that and SIGKILL. Most others fail for the same
reason, and say so; the rest would wait for the one that failed."""

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends signals to all processes of a step. The script's own processes decide what they mean."""

ORDERLY = (0, BEGIN_ANEW, STOPPED, SUPERSEDED)
"""Exit statuses of a process that has not failed; of several, the last one here is the launcher's."""

PR_SET_PDEATHSIG = 1

KEPT: list[socket.socket] = []
"""Sockets that keep ports as long as this process lives."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. The exit status is that of the first process that failed, else 75 or 143 if the run was superseded or
    stopped, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock_executor.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="NAME", help="another module to import first"
    )
    parser.add_argument(
        "--gives-up-nodes",
        action="store_true",
        help="give up nodes without a restart in Slurm, if Penstock asks for them",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the script")
    options = parser.parse_args(arguments)
    try:
        tasks = tasks_of_node(os.environ)
    except RuntimeError as error:
        parser.error(str(error))
    try:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // len(tasks), 1)))  # read when PyTorch is imported
        preload((*PRELOADED, *options.imports))
        _check_that_it_may_fork(options.imports)
    except (EnvironmentDisagrees, ImportError) as error:
        parser.error(str(error))
    terminated: list[int] = []
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED), {each: signal.getsignal(each) for each in IGNORED}
    while True:
        file = os.memfd_create("penstock")
        sys.stdout.flush()
        sys.stderr.flush()
        pids, parent = [], os.getpid()
        for task in tasks:
            pid = os.fork()
            if pid == 0:
                if options.gives_up_nodes:
                    giving_up.to_launcher(file)
                _begin(task, parent, *signals)
                end(status_of(options.script, options.arguments, module=options.module))
            pids.append(pid)
        # SIGTERM is never ignored, even for a moment: the kernel would drop one that came while the processes began.
        signal.signal(signal.SIGTERM, lambda number, _frame: terminated.append(number))
        for number in set(IGNORED) - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals[0])
        for pid in pids if terminated else ():  # it came before they began
            os.kill(pid, signal.SIGTERM)
        status, kept = _wait(dict(zip(pids, tasks, strict=True)), file, terminated), giving_up.told(file)
        if status != BEGIN_ANEW or not kept:
            return status
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        os.close(file)
        if os.environ["SLURMD_NODENAME"] not in kept:
            note_left(read_environment())
            return 0
        os.environ.update(giving_up.variables(os.environ, kept))
        tasks = tasks_of_node(os.environ)


def tasks_of_node(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables of each process of this node, as srun and torchrun would set them: one for each GPU, and one without
    GPUs.

    Raises:
        EnvironmentDisagrees: the step does not have one task on each node, or Slurm does not say which GPUs it has, or
            torchrun's variables are set already.
        RuntimeError: the address of the first node is not known.
    """
    if environ.get("RANK"):
        raise EnvironmentDisagrees("RANK is set: this launcher takes the place of torchrun, so do not use both")
    if not environ.get("SLURM_JOB_ID"):
        return [_as_torchrun({}, rank=0, world=1, local=0, local_world=1, master=("127.0.0.1", _free_port()))]
    nodes = expand_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    if not nodes or environ.get("SLURM_STEP_NUM_TASKS") != str(len(nodes)):
        raise EnvironmentDisagrees(
            "start one launcher on each node: srun --ntasks-per-node=1 --cpu-bind=none python -m ..."
        )
    counts = _gpus_of(nodes)
    node = int(environ.get("SLURM_NODEID", "0"))
    world, before, text = sum(counts), sum(counts[:node]), ",".join(map(str, counts))
    whole = dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), str(world))
    whole |= dict.fromkeys(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), text)
    if "SLURM_NTASKS_PER_NODE" in environ:  # 1, from the srun of this launcher
        whole["SLURM_NTASKS_PER_NODE"] = str(counts[node])
    tasks = [whole | {"SLURM_PROCID": str(before + n), "SLURM_LOCALID": str(n)} for n in range(counts[node])]
    ranks = read_ranks({**environ, **tasks[0]})
    port = ranks.port if len(nodes) > 1 or environ.get("MASTER_PORT") else _free_port()
    master = (ranks.master or address_of_first(ranks), port)
    return [
        _as_torchrun(task, rank=before + n, world=world, local=n, local_world=counts[node], master=master)
        for n, task in enumerate(tasks)
    ]


def _as_torchrun(
    task: Mapping[str, str], *, rank: int, world: int, local: int, local_world: int, master: tuple[str, int]
) -> dict[str, str]:
    """The process's variables, with those that torchrun would set."""
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_world}
    return {
        **task,
        **{name: str(place) for name, place in places.items()},
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def _free_port() -> int:
    """A port for the processes of a single node. Those of several nodes compute the same one, which may be in use.

    This process keeps it, because the import takes seconds, in which another process could get it. PyTorch listens there
    nevertheless: Linux allows that if both sockets have SO_REUSEADDR and the other one does not listen.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    KEPT.append(kept)
    return int(kept.getsockname()[1])


def _gpus_of(nodes: Sequence[str]) -> list[int]:
    """Number of processes for each node of the step."""
    environment = read_environment()
    if len(nodes) == 1:
        return [len(devices_of_job(environment)) or environment.gpus_on_node or 1]
    found = find_allocation(environment, gpu_type="gpu").gpu_ids
    if missing := [node for node in nodes if node not in found]:
        raise EnvironmentDisagrees(f"Slurm does not say which GPUs the job has on {', '.join(missing)}")
    return [len(found[node]) or 1 for node in nodes]


def preload(names: Sequence[str]) -> None:
    """Import these modules, without collecting garbage: that takes a sixth of the time, and finds next to nothing.

    What is there afterwards stays. So no collection goes through it again, which would also copy its memory in each process.
    """
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _check_that_it_may_fork(imported: Sequence[str]) -> None:
    """Raise EnvironmentDisagrees if a process forked from this one would not work."""
    torch = sys.modules["torch"]
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    what = "used a GPU" if torch.cuda.is_initialized() else f"started threads ({', '.join(others)})" if others else ""
    if what:
        raise EnvironmentDisagrees(f"the import of {', '.join(imported)} has {what}: leave that to the script")


def _begin(
    task: Mapping[str, str], parent: int, mask: Collection[signal.Signals | int], handlers: Mapping[signal.Signals, Any]
) -> None:
    """In a new process: make it one of the script's, with the signals' mask and handlers of before."""
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(STOPPED)
    os.environ.update(task)
    if "numpy" in sys.modules:  # Python's own generator draws a new seed by itself
        sys.modules["numpy"].random.seed()


def status_of(script: str, arguments: Sequence[str], *, module: bool) -> int:
    """What `python SCRIPT` or `python -m SCRIPT` does, and its exit status."""
    try:
        _run(script, arguments, module=module)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(status: int) -> NoReturn:
    """End this process as Python does, but leave its memory to the kernel: freeing PyTorch's modules takes a second."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _run(script: str, arguments: Sequence[str], *, module: bool) -> None:
    sys.orig_argv = [sys.executable, *(("-m",) if module else ()), script, *arguments]
    sys.argv = [script, *arguments]
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


def _wait(pids: Mapping[int, Mapping[str, str]], file: int, terminated: Sequence[int]) -> int:
    """Wait for all processes. If one has failed, the others are ended after a while. Returns the exit status.

    That of a run which gives up nodes means so only if a process has told this one by `file`. If the first that fails was killed,
    and nobody has asked for the end (`terminated`), it is reported.
    """
    left, ends, failure, failed_s, sent = set(pids), {0}, 0, math.inf, 0
    while left:
        pid, raw = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.discard(pid)
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code
            if status in ORDERLY and (status != BEGIN_ANEW or giving_up.told(file)):
                ends.add(status)
            elif not failure:
                failure, failed_s = status, time.monotonic()
                if code < 0 and not terminated:
                    _tell_of_killed(int(pids[pid]["RANK"]), -code)
        elif time.monotonic() > failed_s + (sent + 1) * PATIENCE_S:
            for each in left:
                os.kill(each, (signal.SIGTERM, signal.SIGKILL)[min(sent, 1)])
            sent += 1
        else:
            time.sleep(0.05)
    return failure or max(ends, key=ORDERLY.index)


def _tell_of_killed(rank: int, number: int) -> None:
    """Say that a signal has ended a process, which could not say it itself: in the job's output, and to the daemon."""
    environment = read_environment()
    text = killed(rank, environment.node or socket.gethostname(), number)
    sys.stderr.write(f"penstock: {text}\n")
    with contextlib.suppress(OSError):
        report_killed(environment, text)


if __name__ == "__main__":
    end(main())
