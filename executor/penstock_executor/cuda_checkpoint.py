"""Suspends and resumes a single-GPU process that does not use this library, with NVIDIA's `cuda-checkpoint`.

::

    python -m penstock_executor.cuda_checkpoint suspend PID     # moves its GPU memory to the host, and releases its GPU
    python -m penstock_executor.cuda_checkpoint resume PID

The program itself needs no change: the driver moves its state, and CUDA calls wait meanwhile. The tool comes from
github.com/NVIDIA/cuda-checkpoint and needs NVIDIA's driver 550 or later. Its README lists what it does not support,
such as processes that share GPU memory (NCCL over several GPUs). The tests of this module use a stand-in for the tool.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TOOL = "cuda-checkpoint"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
FIRST_DRIVER = 550
TIMEOUT_S = 300.0


class CannotSuspend(RuntimeError):
    """The tool or the driver is missing, or it failed. The message says which, and the remedy."""


def find_tool(driver_file: Path = DRIVER_FILE) -> str:
    """Path of the tool.

    Raises:
        CannotSuspend: the tool or the driver is missing, or the driver is too old.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        raise CannotSuspend(f"{TOOL} is not on the PATH; get it from github.com/NVIDIA/cuda-checkpoint")
    try:
        text = driver_file.read_text()
    except OSError:
        raise CannotSuspend(
            f"{driver_file} does not exist, so NVIDIA's driver is not loaded; run this on a GPU node"
        ) from None
    version = re.search(r"\s(\d+)\.\d+", text)
    if version is None or int(version[1]) < FIRST_DRIVER:
        found = version[1] if version else "unknown"
        raise CannotSuspend(
            f"NVIDIA's driver has version {found}, but {TOOL} needs {FIRST_DRIVER} or later; update the driver"
        )
    return tool


def suspend(pid: int, tool: str) -> float:
    """Move the process's GPU memory to the host; returns the seconds that it took.

    A process that is suspended already stays so, if the tool can tell (with driver 570 or later).

    Raises:
        CannotSuspend: the tool failed.
    """
    return _toggle(pid, tool) if _state(pid, tool) in (None, "running") else 0.0


def resume(pid: int, tool: str) -> float:
    """Undo `suspend`; returns the seconds that it took. Raises CannotSuspend."""
    return _toggle(pid, tool) if _state(pid, tool) in (None, "checkpointed") else 0.0


def _state(pid: int, tool: str) -> str | None:
    """The state of the process; None if the tool is too old to tell."""
    try:
        return _ask(tool, "--get-state", "--pid", str(pid)).strip()
    except CannotSuspend:
        return None


def _toggle(pid: int, tool: str) -> float:
    began_s = time.monotonic()
    _ask(tool, "--toggle", "--pid", str(pid))
    return time.monotonic() - began_s


def _ask(tool: str, *arguments: str) -> str:
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotSuspend(f"{TOOL} {' '.join(arguments)}: {error}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise CannotSuspend(f"{TOOL} {' '.join(arguments)}: {said}; does the process use one GPU, and is it yours?")
    return done.stdout


def main(arguments: Sequence[str] | None = None, driver_file: Path = DRIVER_FILE) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m penstock_executor.cuda_checkpoint")
    parser.add_argument("verb", choices=["suspend", "resume"])
    parser.add_argument("pid", type=int)
    options = parser.parse_args(arguments)
    try:
        seconds = {"suspend": suspend, "resume": resume}[options.verb](options.pid, find_tool(driver_file))
    except CannotSuspend as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(f"{options.verb} of {options.pid} took {seconds:.3f} s")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
