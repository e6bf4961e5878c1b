"""A job on an emulated GPU, for tests of the guarantee: it keeps to its share, or does what a job should not do.

    behaving.py RUN_DIR NUMBER GPU BEHAVIOUR [--step S] [--every S] [--evaluates S]

Half of a step needs the GPU. BEHAVIOUR: `honest`; `silent`: never talks to its agent, and never pauses; `lying`: answers every
message, reports no steps and never pauses; `evaluating`: honest, but uses the GPU without steps for `--evaluates` seconds
`--every` so many; `forking`: honest, while children of it use the GPU and are replaced by others every three seconds.
"""

import argparse
import contextlib
import os
import random
import time
from pathlib import Path

from penstock_executor.node_channel import Channel
from tests.slurm_plugin.agent.emulated_gpu import EmulatedGpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("gpu", type=Path)
    parser.add_argument("behaviour", choices=["honest", "silent", "lying", "evaluating", "forking"])
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--every", type=float, default=180.0)
    parser.add_argument("--evaluates", type=float, default=60.0)
    options = parser.parse_args()
    with contextlib.suppress(PermissionError):  # a GPU does not wait for other programs
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    half_s, draw = options.step / 2, random.Random(options.number)
    if options.behaviour == "forking":
        fork_workers(options.gpu, half_s)
    gpu = EmulatedGpu(options.gpu)
    channel = Channel(options.run_dir, options.number, anywhere=True)
    evaluates_s = time.monotonic() + options.every - options.evaluates
    while True:
        gpu.rest(half_s * draw.gauss(1, 0.05))
        gpu.use(half_s)
        if options.behaviour == "evaluating" and time.monotonic() > evaluates_s:
            until_s = time.monotonic() + options.evaluates
            while time.monotonic() < until_s:
                gpu.use(half_s)
            evaluates_s = time.monotonic() + options.every - options.evaluates
            channel.begin()
        if options.behaviour == "silent":
            continue
        if options.behaviour == "lying":
            channel.poll()
            continue
        channel.step_done(8)
        if channel.compute < 1:
            gpu.begin()
        request = channel.request
        if request is not None:
            channel.suspended(request)
            while channel.wants(request):
                time.sleep(0.02)
            channel.resumed()
            gpu.begin()


def fork_workers(path: Path, half_s: float) -> None:
    """Two children, each of which uses the GPU for three seconds and leaves it to a child of its own."""
    for _ in range(2):
        if os.fork() == 0:
            while True:
                gpu, until_s = EmulatedGpu(path), time.monotonic() + 3.0
                while time.monotonic() < until_s:
                    gpu.use(half_s)
                if os.fork():
                    os._exit(0)


if __name__ == "__main__":
    main()
