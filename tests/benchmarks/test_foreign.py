"""The scripts of others that are made elastic (`benchmarks/foreign`). Running them takes packages and half an hour."""

import os
from pathlib import Path

import pytest
from benchmarks.foreign.scripts import DIFFS, SCRIPTS
from benchmarks.foreign.tried import NAMES, tried


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_takes_at_most_ten_changed_lines(name: str):
    assert 1 <= SCRIPTS[name].added(name) <= 10


def test_each_diff_belongs_to_a_script():
    assert {path.name.split(".")[0] for path in DIFFS.iterdir()} == set(SCRIPTS)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_penstock_try_finds_no_difference(name: str):
    """PENSTOCK_FOREIGN is the folder with the clones (`benchmarks/foreign/scripts.py` names them). A minute each."""
    if (sources := os.environ.get("PENSTOCK_FOREIGN")) is None:
        pytest.skip("needs the scripts of others: PENSTOCK_FOREIGN names no folder")
    status, said = tried(Path(sources), name)
    assert status == 0, said
