"""The scripts of others that are made elastic (`benchmarks/foreign`). Running them takes packages and half an hour."""

import pytest
from benchmarks.foreign.scripts import DIFFS, SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_takes_at_most_ten_changed_lines(name: str):
    assert 1 <= SCRIPTS[name].added(name) <= 10


def test_each_diff_belongs_to_a_script():
    assert {path.name.split(".")[0] for path in DIFFS.iterdir()} == set(SCRIPTS)
