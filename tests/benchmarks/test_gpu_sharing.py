"""The checks of sharing on a real GPU, as far as they run without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(*arguments: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "benchmarks.gpu.sharing", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_check_says_that_it_cannot_run():
    names = ["driver", "rough", "kinds"]
    ends = check("--dry", *names)
    assert [(each["check"], each["figure"], each["how"]) for each in ends] == [(n, "end", "skip: dry") for n in names]


def test_a_check_that_fails_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where torch is missing."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, second = check("--dry", "nvml", "driver")
    assert str(first["how"]).startswith("failed: RuntimeError:")
    assert "no torch" in str(first["how"])
    assert second["how"] == "skip: dry"


def test_a_name_that_is_unknown_is_an_error():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.sharing", "mig"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no check is called mig; there are nvml," in done.stderr


@pytest.mark.long
def test_programs_compute_what_is_known_although_they_are_suspended():
    """The agent as a process of its own, with a stand-in for Slurm. Without a GPU it freezes the programs in place."""
    pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[executor]'")
    figures = check("--dry", "slices")
    assert figures[-1]["how"] == "done"
    assert [each["right"] for each in figures if each["figure"] == "result"] == [True, True]
