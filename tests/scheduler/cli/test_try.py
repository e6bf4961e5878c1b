"""`penstock try` runs the executor's own program, in the Python of the script."""

import os
import subprocess
import sys
from pathlib import Path


def test_it_becomes_the_executors_program_in_the_python_of_the_path(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    python.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "penstock_scheduler.cli",
        "try",
        "--seed=3",
        "train.py",
        "--seed",
        "5",
        "--epochs=2",
    ]
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    options = "--processes=2 --seed=3 --timeout=600.0"
    assert done.stdout == f"-m penstock_executor.try_run {options} train.py --seed 5 --epochs=2\n"
