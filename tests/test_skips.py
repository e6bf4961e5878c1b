"""A test that skips for an unheard-of reason fails the run, so that what CI no longer tests is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import allowed

ROOT = Path(__file__).parent.parent

SKIPPING = """
import pytest

def test_passes():
    pass

def test_skips():
    pytest.skip("no valgrind [here]")
"""

WHOLE_FILE = 'import pytest\npytest.skip("no PyTorch", allow_module_level=True)\n'


def run(folder: Path, listed: str, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest with our plugin over a small suite and a list of allowed skips."""
    (folder / "test_skipping.py").write_text(SKIPPING)
    (folder / "test_whole_file.py").write_text(WHOLE_FILE)
    (folder / "allowed").write_text(listed)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            "/dev/null",
            "-p",
            "tests.skips",
            "-p",
            "no:cacheprovider",
            *options,
            folder,
        ],
        cwd=ROOT,
        env=os.environ | {"PENSTOCK_ALLOWED_SKIPS": f"{folder}/allowed"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_a_reason_that_is_not_listed_fails_the_run_and_is_named(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, "# not everybody has valgrind\nno valgrind.*\n", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 skipped: no PyTorch\n" in done.stdout
    assert "skipped: no valgrind" not in done.stdout
    assert "1 passed, 2 skipped" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_listed_reasons_pass(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, "# not everybody has them\nno valgrind.*\nno PyTorch\n", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is not on the list" not in done.stdout


def test_a_part_of_a_reason_is_not_enough(tmp_path: Path) -> None:
    assert run(tmp_path, "# why\nno valgrind\nno PyTorch\n").returncode == 1


def test_each_listed_reason_says_why() -> None:
    with pytest.raises(ValueError, match="line 4 has no comment above it"):
        allowed("# why\nfirst\n\nsecond\n")
    assert allowed((ROOT / ".ci/allowed-skips").read_text(encoding="utf-8"))
