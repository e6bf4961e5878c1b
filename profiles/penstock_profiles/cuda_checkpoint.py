"""Moves what a CUDA process has on its GPU to the host and back, by NVIDIA's driver. The program needs no change.

::

    python -m penstock_profiles.cuda_checkpoint suspend PID     # its GPU memory is free, and its CUDA calls wait
    python -m penstock_profiles.cuda_checkpoint resume PID...

The driver (570 or later) does that: `cuCheckpointProcess...` in `libcuda.so.1`, as its manual's section "CUDA
Checkpointing" describes. It has four states of a process::

    running ──lock──> locked ──checkpoint──> checkpointed
       ^                │  ^                      │
       └────unlock──────┘  └───────restore────────┘

Threads of the process itself do the work, so it must not be frozen meanwhile. A call may hang, so each command is a
process of its own that its caller can give up. It may be repeated: what is done already is not done again. With
`--lock N` it waits until no other command has the file that it has inherited as descriptor N.

It runs as the user of the process: that needs no privileges.

**A restore without room on the GPU loses the process**: with driver 580 on an H100, each later restore failed, too. So
`--free MB` says how much memory is free there (by default, NVML does), and a process that needs more stays as it is.

Exit status: 0: done; 1: not done, and each process runs as before (`suspend`) or can be tried again (`resume`);
3: `suspend` is not done and could not be undone, so `resume` must be tried; 4: there is no driver that could do it;
5: there is no room for it yet.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

FIRST_DRIVER = 570
LIBRARY = "libcuda.so.1"
LOCK_MS = 10_000
"""For how long the driver tries to lock a process: work that was submitted must end first."""

NOT_UNDONE, NO_DRIVER, NO_ROOM = 3, 4, 5
"""Exit status."""
SPARE_MB = 256.0
"""Memory of a GPU that must be free beside what a process needs."""


class State(IntEnum):
    """`CUprocessState`."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CannotCheckpoint(RuntimeError):
    """The driver cannot do it. The message says why."""


class NoDriver(CannotCheckpoint):
    """There is no driver here, or it is too old."""


class NoRoom(CannotCheckpoint):
    """Its GPU has too little free memory now."""


class NotUndone(CannotCheckpoint):
    """A process may be left locked, or worse."""


class _LockArgs(ctypes.Structure):
    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


_NoArgs = ctypes.c_uint64 * 8
"""`CUcheckpointCheckpointArgs`, `CUcheckpointRestoreArgs` and `CUcheckpointUnlockArgs` are 64 bytes, here all zero."""


class Driver:
    """NVIDIA's driver. Raises NoDriver."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NoDriver(f"NVIDIA's driver is not here: {error}") from None
        if not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise NoDriver(f"NVIDIA's driver is too old; {FIRST_DRIVER} or later is needed")
        self._cuda.cuInit(0)  # its failure shows in the calls that follow

    def state(self, pid: int) -> State:
        """State of a process. Raises CannotCheckpoint, as for a process that does not use CUDA."""
        state = ctypes.c_int(-1)
        self._call("GetState", pid, ctypes.byref(state))
        try:
            return State(state.value)
        except ValueError:
            raise CannotCheckpoint(
                f"process {pid} is in a state that this version does not know: {state.value}"
            ) from None

    def lock(self, pid: int) -> None:
        """Have the process's CUDA calls wait. After `LOCK_MS` it goes on instead. Raises CannotCheckpoint."""
        self._call("Lock", pid, ctypes.byref(_LockArgs(timeout_ms=LOCK_MS)))

    def checkpoint(self, pid: int) -> None:
        """Move a locked process's GPU memory to the host. Raises CannotCheckpoint."""
        self._call("Checkpoint", pid, ctypes.byref(_NoArgs()))

    def restore(self, pid: int) -> None:
        """Undo `checkpoint`; the process stays locked. Raises CannotCheckpoint."""
        self._call("Restore", pid, ctypes.byref(_NoArgs()))

    def unlock(self, pid: int) -> None:
        """Undo `lock`. Raises CannotCheckpoint."""
        self._call("Unlock", pid, ctypes.byref(_NoArgs()))

    def _call(self, name: str, pid: int, argument: object) -> None:
        code = getattr(self._cuda, f"cuCheckpointProcess{name}")(pid, argument)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            said = (text.value or b"unknown error").decode(errors="replace")
            raise CannotCheckpoint(f"the driver's {name.lower()} of process {pid} failed: {said} ({code})")


def too_old(driver: str | None) -> bool:
    """Whether a driver of this version, such as `550.54.15`, cannot checkpoint. An unknown version is not too old."""
    major = (driver or "").partition(".")[0]
    return major.isdigit() and int(major) < FIRST_DRIVER


def suspend(driver: Driver, pid: int) -> None:
    """Move a process's GPU memory to the host.

    Raises:
        CannotCheckpoint: it runs as before.
        NotUndone: it may not.
    """
    state = driver.state(pid)
    if state is State.CHECKPOINTED:
        return
    if state is State.FAILED:
        raise CannotCheckpoint(f"an earlier checkpoint of process {pid} failed")
    try:
        if state is State.RUNNING:
            driver.lock(pid)
        driver.checkpoint(pid)
    except CannotCheckpoint as error:
        try:
            resume(driver, pid)
        except CannotCheckpoint as again:
            raise NotUndone(f"{error}; {again}") from None
        raise


def resume(driver: Driver, pid: int, free_mb: float = math.inf, needs_mb: float = 0.0) -> None:
    """Undo `suspend`. A process that runs is left alone.

    Args:
        free_mb: free memory of its GPU, MB.
        needs_mb: what it had there; 0: unknown, so at most all of its own memory on the host.

    Raises:
        NoRoom: it stays as it is.
        CannotCheckpoint: the driver failed.
    """
    state = driver.state(pid)
    if state is State.CHECKPOINTED:
        needs_mb = (needs_mb or _own_mb(pid)) + SPARE_MB
        if needs_mb > free_mb:
            raise NoRoom(f"process {pid} needs {needs_mb:.0f} MB of its GPU, and {free_mb:.0f} MB are free")
        driver.restore(pid)
    if state in (State.CHECKPOINTED, State.LOCKED):
        driver.unlock(pid)
    if state is State.FAILED:
        raise CannotCheckpoint(f"a checkpoint of process {pid} failed; its CUDA calls fail, too")


def _own_mb(pid: int) -> float:
    """Memory of a process that no file is behind, MB: a checkpoint is a part of it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        return int(next(line for line in text.splitlines() if line.startswith("RssAnon:")).split()[1]) / 1024
    except (OSError, StopIteration, ValueError):
        return 0.0


def _least_free_mb() -> float:
    """Free memory of the fullest GPU here, by NVML, MB; inf without NVML."""
    try:  # here, because the agent's helper, which is told, has only the standard library
        from penstock_profiles.nvml import NoNvml, Nvml
    except ImportError:
        return math.inf
    try:
        with Nvml() as nvml:
            readings = nvml.sample().readings
    except NoNvml:
        return math.inf
    return min((each.free_mb for each in readings if each.free_mb is not None), default=math.inf)


def resume_all(driver: Driver, pids: Sequence[int], free_mb: float = math.inf, needs_mb: float = 0.0) -> None:
    """Undo `suspend` of these processes. Those that have ended or do not use CUDA are skipped. Raises
    CannotCheckpoint."""
    failed: list[CannotCheckpoint] = []
    for pid in pids:
        with contextlib.suppress(CannotCheckpoint):
            driver.state(pid)
            try:
                resume(driver, pid, free_mb, needs_mb)
            except CannotCheckpoint as error:
                failed.append(error)
    if failed:
        kind = NoRoom if all(isinstance(each, NoRoom) for each in failed) else CannotCheckpoint
        raise kind("; ".join(map(str, failed)))


STATUS: dict[type[CannotCheckpoint], int] = {NotUndone: NOT_UNDONE, NoDriver: NO_DRIVER, NoRoom: NO_ROOM}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m penstock_profiles.cuda_checkpoint")
    parser.add_argument("verb", choices=["suspend", "resume"])
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    parser.add_argument("--lock", type=int, metavar="N")
    parser.add_argument("--free", type=float, metavar="MB", help="free memory of the GPU; by default, NVML says it")
    parser.add_argument("--needs", type=float, metavar="MB", default=0.0)
    options = parser.parse_args(arguments)
    if options.verb == "suspend" and len(options.pids) > 1:
        parser.error("one process can be suspended at a time")
    # A process that is between two calls would be left locked.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    does: dict[str, Callable[[Driver], None]] = {
        "suspend": lambda driver: suspend(driver, options.pids[0]),
        "resume": lambda driver: resume_all(
            driver, options.pids, _least_free_mb() if options.free is None else options.free, options.needs
        ),
    }
    try:
        if options.lock is not None:
            fcntl.flock(options.lock, fcntl.LOCK_EX)
        began_s = time.monotonic()
        does[options.verb](Driver())
    except CannotCheckpoint as error:
        print(error, file=sys.stderr)  # noqa: T201
        return next((status for kind, status in STATUS.items() if isinstance(error, kind)), 1)
    print(f"{options.verb} took {time.monotonic() - began_s:.3f} s")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
