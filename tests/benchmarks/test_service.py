"""The benchmark of the API runs, with the API in penstockd and in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "service.py"


@pytest.mark.parametrize(
    "way", [pytest.param([], id="embedded", marks=pytest.mark.long), pytest.param(["--separate"], id="separate")]
)
def test_no_acknowledged_report_is_lost(way):
    words = [
        "--jobs",
        "20",
        "--waiting",
        "5",
        "--readers",
        "4",
        "--queued",
        "10",
        "--every-s",
        "2",
        "--seconds",
        "4",
        *way,
    ]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["errors"]) == (0, 0)
    assert found["acknowledged"] >= 20
    assert found["reads"] >= 4
    assert len(found["cpu_s_of_each"]) == 1 + len(way)
