"""CONTRIBUTING.md as a newcomer follows it: its files, its lines and its commands, in a copy of the repository.

`script/test` and `script/generate` run here without their set-up, with the Python of these tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language; empty: of none."""
    return [block for name, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text) if name == language]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the files that git knows, with changes that are not committed."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def run_as_printed(commands: str, copy: Path) -> None:
    """Run the commands of a page, one after the other."""
    packages = [str(copy / name) for name in ("profiles", "scheduler", "slurm_plugin", "cloud", "executor", "loopback")]
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        if program == "script/test":
            first = f"tests/{words[0]}" if (copy / "tests" / words[0]).exists() else words[0]
            argv = ["-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", first, *words[1:]]
        elif program == "script/generate":
            argv = ["script/generate.py"]
        elif program == "penstock":
            argv = ["-c", "from penstock_scheduler.cli import main; main()", *words]
        else:
            assert program == "source", line
            continue
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": ":".join([str(copy), *packages])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-5000:]}\n{done.stderr[-2000:]}"


def test_the_policy_of_the_page_works_as_the_page_says(copy: Path) -> None:
    text = section("Add a policy in one file")
    source, line = blocks(text, "python")
    path = copy / re.search(r"# (scheduler/\S+\.py)", source).group(1)  # type: ignore[union-attr]
    path.write_text(source)
    registry = path.parent / "__init__.py"
    lines, count = re.subn(r"(?m)^(REGISTRY: .* = \{\n)", lambda match: match.group(0) + line, registry.read_text())
    assert count == 1
    registry.write_text(lines)
    run_as_printed(blocks(text, "")[0], copy)
    assert (copy / "result").exists()


def test_the_field_of_the_page_works_as_the_page_says(copy: Path) -> None:
    """The command that compares the readers of flags on a real Slurm is left to `script/test slurm_plugin`."""
    text = section("Add a field to the job spec")
    path = copy / "scheduler/penstock_scheduler/model/spec.py"
    before, opening, after = path.read_text().partition("    checkpointable: ")
    assert opening
    path.write_text(before + blocks(text, "python")[0] + opening + after)
    commands = [line for line in blocks(text, "")[0].splitlines() if "flags/test_values" not in line]
    run_as_printed("\n".join(commands), copy)
    assert "priority-boost" in (copy / "slurm_plugin/spank/flags.def").read_text()
