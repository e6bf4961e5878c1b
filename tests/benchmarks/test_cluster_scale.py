"""`benchmarks/cluster_scale.py` in small: it runs, and what it counts does not grow with the number of jobs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cluster_scale.py"


def measured(running: int, waiting: int) -> dict[str, Any]:
    words = ("--nodes", "4", "--running", str(running), "--waiting", str(waiting), "--ticks", "2", "--rounds", "1")
    done = subprocess.run(
        [sys.executable, BENCHMARK, *words, "--call-us", "0", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a library that counts calls on files")
def test_benchmark_measures_ticks_and_rounds() -> None:
    found = measured(running=8, waiting=16)
    assert found["running"] == 8
    assert found["waiting"] == 16
    assert found["idle"]["cpu_s"]["median"] > 0
    assert found["idle"]["calls"]["median"] > 0
    assert found["round"]["bytes"]["median"] >= 0
