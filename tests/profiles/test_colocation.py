"""Pairs of jobs on one GPU: tables, priors and learning."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.colocation import MOST_WEIGHT, Colocation, ColocationError, Pair, read_pairs, read_table


def test_an_unknown_pair_has_the_prior_of_its_utilisations():
    """0.3 + 0.5 of the GPU slows neither; 0.9 + 0.6 = 1.5 slows both to 2/3, and together they gain a third."""
    pairs = Colocation(
        utilisation={("a100", "small"): 0.3, ("a100", "half"): 0.5, ("a100", "big"): 0.9, ("a100", "more"): 0.6}
    )
    assert pairs.share("a100", "small", "half") == 1.0
    assert pairs.share("a100", "big", "more") == pytest.approx(2 / 3)
    assert pairs.total("a100", "big", "more") == pytest.approx(4 / 3)
    assert pairs.share("a100", "small", "unknown") is None
    assert pairs.total("t4", "small", "half") is None, "another type does not count"
    assert not pairs.measured("a100", "small", "half")


def test_measurements_take_the_place_of_the_prior_at_once_and_of_a_table_by_and_by():
    pairs = Colocation({("t4", "a", "b"): Pair(share=1.0)}, {("t4", "a"): 0.1, ("t4", "b"): 0.1})
    assert pairs.share("t4", "b", "a") == 1.0
    pairs.observe("t4", "b", "a", 0.4)
    assert pairs.share("t4", "b", "a") == pytest.approx(0.4), "a prior is not a measurement"
    pairs.observe("t4", "a", "b", 0.5)
    assert pairs.share("t4", "a", "b") == pytest.approx(0.75), "a table counts for one"
    assert pairs.total("t4", "a", "b") == pytest.approx(1.15)
    assert pairs.measured("t4", "a", "b")


def test_old_measurements_are_forgotten():
    pairs = Colocation()
    for share in [1.0] * 100 + [0.5] * 20:
        pairs.observe("t4", "a", "b", share)
    # Each new one counts for 1 in MOST_WEIGHT: 0.5 + 0.5 * (1 - 1/8) ** 20.
    assert pairs.share("t4", "a", "b") == pytest.approx(0.5 + 0.5 * (1 - 1 / MOST_WEIGHT) ** 20)


def test_a_pair_that_does_not_fit_counts_at_once_and_sums_to_nothing():
    pairs = Colocation({("t4", "a", "b"): Pair(share=0.9), ("t4", "b", "a"): Pair(share=0.9)})
    pairs.observe("t4", "a", "b", 0.0)
    assert pairs.total("t4", "a", "b") == 0.0
    pairs.observe("t4", "a", "b", 0.6)  # it was shrunk
    assert pairs.total("t4", "a", "b") == pytest.approx(1.5)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40))
def test_a_mean_lies_between_its_measurements(shares: list[float]):
    pairs = Colocation()
    for share in shares:
        pairs.observe("t4", "a", "b", share)
    learned = pairs.share("t4", "a", "b")
    assert learned is not None
    assert min(shares) - 1e-9 <= learned <= max(shares) + 1e-9


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share: float):
    with pytest.raises(ColocationError, match="give one from 0 to 1"):
        Colocation().observe("t4", "a", "b", share)
    with pytest.raises(ColocationError, match="utilisation"):
        Colocation().observe_alone("t4", "a", share)


def test_it_is_stored_and_comes_back():
    pairs = Colocation({("t4", "a", "b"): Pair(share=0.5)}, {("t4", "a"): 0.25})
    pairs.observe("t4", "b", "a", 0.75)
    again = Colocation.load(pairs.dump(), "pairs.json")
    assert again.dump() == pairs.dump()
    assert again.total("t4", "a", "b") == pytest.approx(1.25)
    assert again.utilisation("t4", "a") == 0.25
    with pytest.raises(ColocationError, match=r"pairs\.json: pairs\.0\.share"):
        Colocation.load('{"pairs": [{"gpu_type": "t4", "mine": "a", "theirs": "b", "share": -1}]}', "pairs.json")


def test_a_table_is_read_by_our_names_of_types(tmp_path: Path):
    path = tmp_path / "table.json"
    path.write_text(
        json.dumps({"v100": {"a": {"null": 10.0, "b": [5.0, 3.0]}, "b": {"null": 4.0, "a": [3.0, 5.0]}}, "k80": {}})
    )
    pairs = read_table(path, {"v100": "volta"})
    assert pairs.total("volta", "a", "b") == pytest.approx(0.5 + 0.75)
    with pytest.raises(ColocationError, match="no GPU type 'a100'; it has k80, v100"):
        read_table(path, {"a100": "a100"})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"b": [1.0, 1.0]}, 'a beside b: the rate alone is missing; expected a positive number under "null"'),
        ({"null": 1.0, "b": [1.0]}, r"expected two rates, \[mine, theirs\], found \[1\.0\]"),
        ({"null": 1.0, "b": [1.0, -1.0]}, "expected two rates"),
    ],
)
def test_a_damaged_table_is_refused_with_its_entry(tmp_path: Path, row: dict[str, object], said: str):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"v100": {"a": row}}))
    with pytest.raises(ColocationError, match=said):
        read_table(path)


def test_pairs_are_read_from_a_table_or_from_what_was_learned(tmp_path: Path):
    """c has no rate alone, so it does not run there. a beside itself has 0.8, like two jobs that use 1 / 1.6 of the GPU
    each."""
    table = {
        "v100": {"a": {"null": 10.0, "a": [8.0, 8.0], "c": [9.0, 0.0]}, "c": {"null": 0.0, "a": [0.0, 9.0]}},
        "k80": {},
    }
    packed, learned = tmp_path / "table.json.gz", tmp_path / "pairs.json"
    packed.write_bytes(gzip.compress(json.dumps(table).encode()))
    pairs = read_pairs(packed)
    assert (pairs.gpu_types, pairs.kinds("v100")) == (("v100",), ("a",))
    assert pairs.utilisation_by_itself("v100", "a") == pytest.approx(1 / 1.6)
    assert pairs.utilisation_by_itself("v100", "c") is None
    both = pairs.on_types({"t4": "v100", "rtx": "v100"})
    assert both.share("rtx", "a", "a") == both.share("t4", "a", "a") == 0.8
    learned.write_text(both.dump())
    assert read_pairs(learned).dump() == both.dump()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"\x1f\x8b\x08cut", "not JSON"),
        (b"[]", "not a table of pairs"),
        (b'{"v100": {"a": 3}}', "v100, a: expected an object"),
        (b'{"pairs": [{"gpu_type": "t4"}]}', "pairs.0.share"),
    ],
)
def test_what_is_no_file_of_pairs_is_refused(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "pairs.json").write_bytes(content)
    with pytest.raises(ColocationError, match=said):
        read_pairs(tmp_path / "pairs.json")


@pytest.mark.skipif("PENSTOCK_TEST_DATA" not in os.environ, reason="needs the public data: see docs/developer/data.md")
def test_gavels_table_has_the_figures_that_are_known_of_it(tmp_path: Path):
    """V100, pairs of one-GPU jobs that fit: mean 1.313, median 1.371, 78.3 % at least 1, 0.347 to 2.0; 40 of 676 do not
    fit."""
    path = tmp_path / "table.json"
    path.write_bytes(
        gzip.decompress((Path(os.environ["PENSTOCK_TEST_DATA"]) / "gavel/simulation_throughputs.json.gz").read_bytes())
    )
    pairs = read_table(path)
    kinds = [kind for kind in json.loads(path.read_bytes())["v100"] if kind.endswith(", 1)")]
    totals = [pairs.total("v100", one, other) for one, other in itertools.product(kinds, repeat=2)]
    fitting = [total for total in totals if total]
    assert (len(totals), len(totals) - len(fitting)) == (676, 40)
    assert statistics.mean(fitting) == pytest.approx(1.313, abs=5e-4)
    assert statistics.median(fitting) == pytest.approx(1.371, abs=5e-4)
    assert sum(total >= 1 for total in fitting) / len(fitting) == pytest.approx(0.783, abs=5e-4)
    assert (min(fitting), max(fitting)) == (pytest.approx(0.347, abs=5e-4), pytest.approx(2.0))
