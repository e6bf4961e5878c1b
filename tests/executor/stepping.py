"""A process that makes steps as a job under its node's agent, for tests of both ends of the channel.

    stepping.py RUN_DIR NUMBER [--step S] [--busy | --gpu FILE [--gpu-part P]] [--late S | --mute] [--deaf] [--lie]
                [--greedy] [--here] [--leak MB]

A step sleeps (a GPU works, the processor waits) or, with --busy, computes. With --gpu, half of the step, or the part P, needs a
GPU, which does one thing at a time, in the order of requests. The file says when the GPU is free again. A real GPU does not
wait for the processor to notice that it has finished, so time slept too long is deducted from the next sleeps.

--late: takes this long to start, and reports nothing before its first step. --mute: never reports and never makes a step.
--deaf: never answers a request to suspend. --lie: reports that it stands still, and continues. --greedy: reads its share, and
trains as if it were 1. --here: like a CUDA job, it must continue on the GPU that it had. --leak: reports with each step that it
holds this much more of its GPU's memory.
"""

import argparse
import fcntl
import os
import signal
import struct
import time
from pathlib import Path

from penstock_executor.node_channel import Channel


class Gpu:
    """See --gpu in the module's docstring."""

    def __init__(self, path: Path, step_s: float, part: float) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._own_s, self._shared_s = step_s * (1 - part), step_s * part
        self.begin()

    def begin(self) -> None:
        """The next step begins now, not at the end of the last one."""
        self._due_s = time.monotonic()

    def step(self) -> None:
        self._sleep_until(self._due_s + self._own_s)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        free_s = struct.unpack("d", os.pread(self._file, 8, 0) or bytes(8))[0]
        done_s = max(self._due_s, free_s) + self._shared_s
        os.pwrite(self._file, struct.pack("d", done_s), 0)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._sleep_until(done_s)

    def _sleep_until(self, due_s: float) -> None:
        self._due_s = due_s
        time.sleep(max(due_s - time.monotonic(), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("--step", type=float, default=0.01)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--gpu", type=Path)
    parser.add_argument("--gpu-part", type=float, default=0.5)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--lie", action="store_true")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--leak", type=int, default=0)
    options = parser.parse_args()
    leaked: list[bytes] = []
    gpu = Gpu(options.gpu, options.step, options.gpu_part) if options.gpu is not None else None
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    time.sleep(options.late)
    while options.mute:
        time.sleep(1.0)
    channel = Channel(
        options.run_dir,
        options.number,
        anywhere=not options.here,
        memory_mb=lambda: float(options.leak * len(leaked)),
        utilisation=0.5,
    )
    while True:
        if options.busy:
            until_s = time.thread_time() + options.step
            while time.thread_time() < until_s:
                pass
        elif gpu is not None:
            gpu.step()
        else:
            time.sleep(options.step)
        leaked.append(bytes(options.leak))
        if options.greedy:
            channel.count(1, options.step, 8)
            channel.poll()
        else:
            channel.step_done(8)
        if gpu is not None and channel.compute < 1:
            gpu.begin()
        request = channel.request
        if request is None or options.deaf:
            continue
        channel.suspended(request, moved_mb=100)
        if options.lie:
            continue
        while channel.wants(request):
            time.sleep(0.02)
        channel.resumed()
        if gpu is not None:
            gpu.begin()


if __name__ == "__main__":
    main()
