"""A GPU that several processes share, without a GPU: it does one thing at a time, in the order of requests, and counts the GPU
time of each process, as NVIDIA's driver does.

A process reserves the GPU for some seconds and sleeps until they are over. So hardly any processor time is needed. Lateness of
the machine is not the GPU's: a process that wakes up late is taken to have asked in time, up to `LATE_S`. A process that
was frozen longer than that begins anew: a GPU does no work for a frozen process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Collection, Hashable
from pathlib import Path

from penstock_slurm.agent.gpu_time import Counters

LATE_S = 0.5
ROWS, ROW = 256, struct.Struct("dd")
"""Row 0: when the GPU is free again. Other rows: a process, and its GPU time, s."""


class EmulatedGpu:
    """One process's view of the GPU in a file. Not for several threads."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        if os.fstat(self._file).st_size < ROWS * ROW.size:
            os.ftruncate(self._file, ROWS * ROW.size)
        self._memory = mmap.mmap(self._file, ROWS * ROW.size)
        self.begin()

    def begin(self) -> None:
        """What follows begins now."""
        self._due_s = time.monotonic()

    def rest(self, seconds: float) -> None:
        """Do something for which no GPU is needed."""
        self._sleep_until(self._present_s() + seconds)

    def use(self, seconds: float) -> None:
        """Use the GPU."""
        asked_s = self._present_s()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        free_s = ROW.unpack_from(self._memory, 0)[0]
        done_s = max(asked_s, free_s) + seconds
        ROW.pack_into(self._memory, 0, done_s, 0.0)
        row = self._row(os.getpid())
        ROW.pack_into(self._memory, row, float(os.getpid()), ROW.unpack_from(self._memory, row)[1] + seconds)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._sleep_until(done_s)

    def counters(self, pids: Collection[int]) -> Counters:
        """`penstock_slurm.agent.gpu_time.GpuTimes`."""
        found: dict[tuple[Hashable, int], float] = {}
        for row in range(1, ROWS):
            pid, seconds = ROW.unpack_from(self._memory, row * ROW.size)
            if not pid:
                break
            if int(pid) in pids:
                found["emulated", int(pid)] = seconds
        return found

    def others_s(self, pid: int) -> float:
        """GPU time of all processes but one, also of those that have ended."""
        rows = (ROW.unpack_from(self._memory, row * ROW.size) for row in range(1, ROWS))
        return float(sum(seconds for there, seconds in rows if there != pid))

    def _row(self, pid: int) -> int:
        for row in range(1, ROWS):
            there = ROW.unpack_from(self._memory, row * ROW.size)[0]
            if there in (0, pid):
                return row * ROW.size
        raise OverflowError(f"more than {ROWS} processes used the GPU")

    def _present_s(self) -> float:
        now_s = time.monotonic()
        return self._due_s if now_s - self._due_s < LATE_S else now_s

    def _sleep_until(self, due_s: float) -> None:
        self._due_s = due_s
        time.sleep(max(due_s - time.monotonic(), 0.0))
