"""Finds the processes of a loopback cluster, and ends them without touching others.

A process is identified by its pid and its start time, because a pid may have been reused. Processes that were not recorded are
found by what only this cluster can have given them:

- daemons that a crashed `up` had started but not yet recorded: the variable `PENSTOCK_LOOPBACK`;
- slurmstepds, which outlive their slurmd and whose process title overwrites their environment: an open file in the cluster's log
  folder;
- jobs' processes: `SLURM_CONF` together with `SLURMD_NODENAME`, which Slurm sets only inside a job (a shell may have only the
  first), and all descendants of a slurmstepd.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

MARK = "PENSTOCK_LOOPBACK"
"""Environment variable of the daemons, with the folder of their cluster."""


class Process(NamedTuple):
    """A process. `start_ticks` is its start in clock ticks since boot (/proc/PID/stat, field 22)."""

    pid: int
    start_ticks: int


class _Stat(NamedTuple):
    state: str
    parent: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        # The name, in parentheses, may hold spaces and parentheses itself: split after the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[19]))


def identify(pid: int) -> Process:
    """The process that has `pid` now. If there is none, the result has a start time that no process has."""
    stat = _stat(pid)
    return Process(pid, -1 if stat is None else stat.start_ticks)


def alive(process: Process) -> bool:
    """Whether the process runs. A zombie does not: in a container, PID 1 may never reap it."""
    stat = _stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks and stat.state not in "ZX"


def find(folder: Path, slurm_conf: Path) -> set[Process]:
    """The live processes of the cluster in `folder`, recorded or not (see the top of this file)."""
    stats = {int(entry): stat for entry in os.listdir("/proc") if entry.isdigit() and (stat := _stat(int(entry)))}
    steps = {process.pid for process in find_steps(folder)}
    mark, conf = f"{MARK}={folder}".encode(), f"SLURM_CONF={slurm_conf}".encode()
    ours = {pid for pid in stats if pid not in steps and _is_ours(pid, mark, conf)} | steps | _below(steps, stats)
    return {
        Process(pid, stats[pid].start_ticks)
        for pid in ours
        if pid in stats and stats[pid].state not in "ZX" and pid != os.getpid()
    }


def find_steps(folder: Path) -> set[Process]:
    """The live slurmstepds of the cluster in `folder`. They ignore SIGTERM and wait a long time for a slurmctld that died."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {process for pid in pids if _is_step(pid, folder / "log") and alive(process := identify(pid))}


def _is_step(pid: int, log_folder: Path) -> bool:
    proc = Path(f"/proc/{pid}")
    try:
        if not (proc / "exe").readlink().name.startswith("slurmstepd"):
            return False
        return any(entry.readlink().parent == log_folder for entry in (proc / "fd").iterdir())
    except OSError:
        return False  # it has ended, or belongs to another user and so not to this cluster


def _is_ours(pid: int, mark: bytes, conf: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    in_job = conf in environment and any(variable.startswith(b"SLURMD_NODENAME=") for variable in environment)
    return in_job or mark in environment


def _below(roots: set[int], stats: dict[int, _Stat]) -> set[int]:
    below: set[int] = set()
    while more := {pid for pid, stat in stats.items() if stat.parent in roots | below} - below:
        below |= more
    return below


def end(processes: Iterable[Process], grace_s: float) -> set[Process]:
    """Send SIGTERM, and SIGKILL after `grace_s` seconds. Returns the processes that are alive 5 s after that."""
    left = set(processes)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for process in left:
            send(process, number)
        deadline_s = time.monotonic() + patience_s
        while (left := {process for process in left if alive(process)}) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    return left


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended or its pid has been reused."""
    if alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


T = TypeVar("T")


def wait_for(
    predicate: Callable[[], T],
    timeout_s: float,
    what: str,
    *,
    poll_s: float = 0.1,
    details: Callable[[], object] | None = None,
) -> T:
    """The first true value of `predicate`, which is called every `poll_s` seconds.

    `what` names the condition ("job 3 runs"). `details` is called once, after the time-out, for the message.

    Raises:
        TimeoutError: not true within `timeout_s` seconds; the message has `what`, the last value and the details.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline_s:
            more = "" if details is None else f"\n{details()}"
            raise TimeoutError(f"waited {timeout_s:g} s in vain until {what}; last value: {value!r}{more}")
        time.sleep(poll_s)
