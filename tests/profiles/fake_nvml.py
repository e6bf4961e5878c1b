"""Runs programs with `fake_nvml.c` in place of NVIDIA's driver library."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")

TWO_GPUS = """
driver 550.54
count 2
0.name NVIDIA A100-SXM4-40GB
0.uuid GPU-aaaa
0.total 40960
0.used 1024
0.busy 75
0.mem_busy 20
0.xid 0
1.name Tesla T4
1.uuid GPU-tttt
1.total 15360
1.used 3
1.busy 0
1.mem_busy 0
1.xid 0
"""


def build(folder: Path, *options: str) -> Path:
    """The folder, with the library in it. Skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stand-in for NVIDIA's driver library with")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *options, "-o", library, SOURCE]
    subprocess.run(command, check=True, timeout=60)
    return folder


def environment(library: Path, scenario: Path) -> dict[str, str]:
    """The environment of a process with that driver."""
    return os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(scenario)}
