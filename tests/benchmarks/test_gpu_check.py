"""`script/gpu-check` on a machine without a GPU: it runs, skips what needs one, and a check that hangs fails alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

SCRIPT = Path(__file__).parents[2] / "script" / "gpu-check"


def check(folder: Path, *words: str) -> tuple[int, list[dict]]:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [SCRIPT, "--out", folder, *words]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=200)
    report = folder / "report.jsonl"
    assert report.exists(), done.stdout + done.stderr
    return done.returncode, [json.loads(line) for line in report.read_text().splitlines()]


def test_it_checks_what_it_can_and_skips_the_rest(tmp_path: Path) -> None:
    status, found = check(tmp_path, "nvml", "noise")
    assert [(each["check"], each["is"]) for each in found] == [("nvml", "skip"), *[("noise", "pass")] * 3], found
    assert status == 0


def test_a_check_that_takes_too_long_fails_alone(tmp_path: Path) -> None:
    status, found = check(tmp_path, "--limit", "0.2", "noise")
    assert [each["is"] for each in found] == ["FAIL"]
    assert "longer than 0.2 s" in found[0]["what"]
    assert status == 1
