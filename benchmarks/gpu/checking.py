"""What the checks on a GPU share: their findings, and the programs that they watch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 2**30
MIB = 2**20
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ROOT = Path(__file__).parents[2]


class Skip(Exception):
    """The check needs something that this machine does not have; the message says what."""


def claim(holds: bool, what: str, **figures: object) -> None:
    """Print whether a claim of the documents holds, with the figures that it rests on."""
    _print("pass" if holds else "FAIL", what, figures)


def figure(what: str, **figures: object) -> None:
    """Print figures about which nothing is claimed."""
    _print("note", what, figures)


def _print(kind: str, what: str, figures: dict[str, object]) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"is": kind, "what": what} | rounded), flush=True)


def synchronize() -> None:
    """Wait until the GPU has done its work."""
    if HAS_GPU:
        torch.cuda.synchronize()


def memory_mb(pid: int | None = None) -> float | None:
    """GPU memory in MiB that NVML gives for a process, or for all if it does not list that process; None without a GPU.

    In a container, NVML may count processes by other numbers.
    """
    if not HAS_GPU:
        return None
    from penstock_profiles.nvml import Nvml

    with Nvml() as nvml:
        reading = nvml.sample().readings[0]
    own = [each.used_mb for each in reading.processes or () if each.pid == pid]
    return own[0] if own else reading.used_mb


class Program:
    """A program of `benchmarks.gpu.programs`, in a process of its own."""

    def __init__(self, name: str, *arguments: object, **environment: object) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.programs", name, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {key: str(value) for key, value in environment.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self.process.pid
        self.lines: list[str] = []

    def until(self, word: str) -> str:
        """Wait for a line with `word` in it. Raises RuntimeError, with the last lines, if the program ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            print(line, end="", file=sys.stderr)
            if word in line:
                return self.lines[-1]
        raise RuntimeError(f"the program ended before it printed {word!r}; its last lines: {self.lines[-8:]}")

    def rest(self) -> int:
        """Wait until it ends; its exit status."""
        with contextlib.suppress(RuntimeError):
            self.until("\0")
        return self.process.wait()


@contextlib.contextmanager
def program(name: str, *arguments: object, **environment: object) -> Iterator[Program]:
    """A program that is killed at the end of the block."""
    made = Program(name, *arguments, **environment)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def figures_in(lines: list[str], *marks: str) -> dict[str, float]:
    """The `name=number` in the lines that contain one of the marks; a later one wins."""
    found: dict[str, float] = {}
    for line in lines:
        if any(mark in line for mark in marks):
            for part in line.split():
                name, _, value = part.partition("=")
                with contextlib.suppress(ValueError):
                    found[name] = float(value)
    return found
