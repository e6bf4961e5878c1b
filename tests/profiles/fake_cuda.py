"""`fake_cuda.c` in place of NVIDIA's driver."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cuda.c")
NAMES = {"r": "running", "l": "locked", "c": "checkpointed", "f": "failed"}


class FakeCuda:
    """The driver, and the CUDA processes that it knows."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (cc) to build the stand-in for NVIDIA's driver library with")
        self._library, self._states = folder / "cuda", folder / "cuda-states"
        self._library.mkdir()
        self._states.mkdir()
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*command, "-o", self._library / "libcuda.so.1", SOURCE], check=True, timeout=60)

    def environment(self) -> dict[str, str]:
        """The environment of a process with that driver."""
        return os.environ | self.variables

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self._library), "FAKE_CUDA": str(self._states)}

    def add(self, pid: int, letter: str = "r") -> None:
        (self._states / str(pid)).write_text(letter)

    def state(self, pid: int) -> str:
        return NAMES[(self._states / str(pid)).read_text()]

    def set(self, call: str, how: str) -> None:
        """Have a call fail, hang or be slow."""
        (self._states / call).write_text(how)

    def unset(self, call: str) -> None:
        (self._states / call).unlink()

    def calls(self) -> list[str]:
        """The calls until now, without the processes."""
        path = self._states / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []
