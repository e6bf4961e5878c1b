"""The scripts of others that are made elastic (`benchmarks/foreign`). Running them takes packages and half an hour."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarks.foreign.scripts import DIFFS, SCRIPTS
from benchmarks.foreign.tried import NAMES, tried

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_takes_at_most_ten_changed_lines(name: str):
    assert 1 <= SCRIPTS[name].added(name) <= 10


def test_each_diff_belongs_to_a_script():
    assert {path.name.split(".")[0] for path in DIFFS.iterdir()} == set(SCRIPTS)


def test_the_page_lists_each_script_with_its_number_of_lines():
    page = (ROOT / "docs" / "user" / "scripts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\d+) \|", page, re.MULTILINE)
    assert dict(rows) == {name: str(script.added(name)) for name, script in SCRIPTS.items()}
    assert f"the changed lines in {len(SCRIPTS)} scripts" in page


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_diff_made_anew_from_its_script_is_the_one_we_show(name: str, tmp_path: Path):
    """A diff with lines that the script does not have, or has elsewhere, is none of that script at its commit."""
    clone = sources() / SCRIPTS[name].repository.folder
    if not clone.exists():
        pytest.skip(f"{clone} is missing")
    source = (clone / SCRIPTS[name].path).parent
    for kind in ("here", "elastic"):  # each changes what the one before has left
        if not (diff := DIFFS / f"{name}.{kind}.diff").exists():
            continue
        after = tmp_path / kind
        shutil.copytree(source, after, ignore=shutil.ignore_patterns(".git"))
        patched = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-i", diff]
        done = subprocess.run(patched, cwd=after, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout
        compared = ["diff", "-r", "-U0", "--exclude=.git", source, after]
        made = subprocess.run(compared, text=True, capture_output=True, check=False).stdout
        assert sorted(changed(made)) == sorted(changed(diff.read_text()))
        source = after


def changed(diff: str) -> list[str]:
    """Its lines that come or go."""
    return [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def sources() -> Path:
    """The folder with the clones (`benchmarks/foreign/scripts.py` names them)."""
    if (folder := os.environ.get("PENSTOCK_FOREIGN")) is None:
        pytest.skip("needs the scripts of others: PENSTOCK_FOREIGN names no folder")
    return Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_penstock_try_finds_no_difference(name: str):
    """A minute each."""
    status, said = tried(sources(), name)
    assert status == 0, said
