"""What the scripts need of this machine, and what they say if it is not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def find_python(tmp_path: Path, version: str) -> subprocess.CompletedProcess[str]:
    """What the set-up makes of a `python3` of this version."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    script = f'source {ROOT}/script/lib.sh; find_python; echo "takes $version"'
    command = ["env", f"PENSTOCK_PYTHON={python}", "bash", "-c", script, "script/test"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["3.11.2", "3.12.0", "3.13.5", "3.14.10"])
def test_a_tested_python_is_taken_without_a_word(tmp_path: Path, version: str) -> None:
    done = find_python(tmp_path, version)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"takes {version}\n", "")


@pytest.mark.parametrize("version", ["2.7.18", "3.9.2", "3.10.14"])
def test_a_python_that_is_too_old_is_refused_with_the_remedy(tmp_path: Path, version: str) -> None:
    done = find_python(tmp_path, version)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"is Python {version}; Penstock needs Python 3.11 or newer" in done.stderr
    assert "PENSTOCK_PYTHON=/path/to/python3.14 script/test" in done.stderr


def test_a_newer_python_is_tried_and_said_to_be_untested(tmp_path: Path) -> None:
    done = find_python(tmp_path, "3.15.0")
    assert (done.returncode, done.stdout) == (0, "takes 3.15.0\n")
    assert "has not been tested with (3.11 to 3.14 have)" in done.stderr
    assert "PENSTOCK_PYTHON=/path/to/python3.14 script/test" in done.stderr
