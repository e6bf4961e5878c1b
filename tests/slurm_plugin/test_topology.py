"""Which GPUs are chosen together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_slurm.share import topology
from penstock_slurm.share.topology import choose

from .boards import DGX_1, TWO_PAIRS

ALL = range(8)


@pytest.mark.parametrize(
    ("free", "count", "found"),
    [
        ((0, 1, 2, 3), 2, (0, 2)),  # 5; 0 and 1 would be 1
        ((0, 1, 3), 2, (1, 3)),
        ((0, 1, 2), 1, (1,)),  # leaves 0 and 2: 5. Without 0 or 2 it would be 1
        ((1, 2, 3), 1, (2,)),
        ((0, 1, 2, 3), 3, (0, 1, 2)),  # in any three 5 + 1 + 1
        ((0, 1), 1, (0,)),
    ],
)
def test_two_pairs_on_pcie(free: tuple[int, ...], count: int, found: tuple[int, ...]):
    assert choose(free, count, TWO_PAIRS) == found


@pytest.mark.parametrize(
    ("free", "count", "found"),
    [
        # Each GPU is connected to the others by 7 + 7 + 8 + 8 + 1 + 1 + 1: whichever goes, the rest is as good.
        (ALL, 1, (0,)),
        (ALL, 2, (0, 3)),  # the first two with two NVLinks: 8
        # No three have two NVLinks each. 0, 2, 3 have 7 + 8 + 8; 0, 1, 2, which come before them, 7 + 7 + 8.
        (ALL, 3, (0, 2, 3)),
        (ALL, 4, (0, 1, 2, 3)),  # a square: all have one at least
        ((2, 3, 4, 5, 6, 7), 4, (4, 5, 6, 7)),  # the only square that is whole
        # Leaves the square: 7 + 7 + 8 + 8 + 7 + 8 = 45. Without 0 it would be 8 + 7 + 8 + 1 + 1 + 1 = 26.
        ((0, 1, 2, 3, 4), 1, (4,)),
        # Two NVLinks have 0-3, 1-2, 1-5 and 2-3. Without 1 and 5 is left 7 + 8 + 8 = 23; else 8 + 8 + 1, 8 + 1 + 1, 7 + 1 + 8.
        ((0, 1, 2, 3, 5), 2, (1, 5)),
        # Among any five, two have no NVLink, so the sum decides: a square (45), and a GPU with two NVLinks to it: 8 + 1 + 1 +
        # 1.
        (ALL, 5, (0, 1, 2, 3, 4)),
        # Here, too: 7 + 1 + 8. The others have 7 + 1 + 1, 7 + 1 + 7 and 1 + 1 + 8, and what is left is one in any case.
        ((1, 3, 4, 7), 3, (3, 4, 7)),
        (ALL, 8, tuple(ALL)),
    ],
)
def test_the_cube_mesh_of_a_dgx_1(free: range | tuple[int, ...], count: int, found: tuple[int, ...]):
    assert choose(free, count, DGX_1) == found


def test_those_that_are_there_already_count():
    """Two NVLinks go from 0 to 3, one to 1 and 2, none to 5, which alone would be taken: 1, 2 and 3 are close."""
    assert choose((1, 2, 3, 5), 1, DGX_1, beside=(0,)) == (3,)
    assert choose((1, 2, 3, 5), 1, DGX_1) == (5,)


def test_the_worst_pair_counts_before_the_sum():
    """0 has two NVLinks to 1 and to 2, between which is the system: 8 + 8 + 1. 2, 3 and 4 are on one switch: 5 + 5 + 5."""
    links = ((0, 8, 8, 1, 1), (8, 0, 1, 1, 1), (8, 1, 0, 5, 5), (1, 1, 5, 0, 5), (1, 1, 5, 5, 0))
    assert choose(range(5), 3, links) == (2, 3, 4)


def test_on_an_nvswitch_all_are_equal():
    links = [[0 if a == b else 24 for b in ALL] for a in ALL]
    assert [choose((1, 4, 6, 7), count, links) for count in (1, 2, 3)] == [(1,), (1, 4), (1, 4, 6)]


def test_where_nothing_is_known_the_lowest_are_taken():
    """Also for GPUs that the driver does not report."""
    assert choose({3, 1, 2}, 2, ()) == (1, 2)
    assert choose((5, 6, 7), 2, TWO_PAIRS) == (5, 6)
    assert choose((0, 2, 5), 2, TWO_PAIRS) == (0, 2)
    assert choose((1, 0), 5, TWO_PAIRS) == (0, 1)
    assert choose((0, 1), 0, TWO_PAIRS) == choose((0, 1), -1, TWO_PAIRS) == choose((), 1, TWO_PAIRS) == ()


def test_of_many_gpus_sets_are_grown():
    """Sixteen GPUs. Even indexes are well connected among each other, and so are odd ones: 8,008 sets of six."""
    links = [[0 if a == b else 8 if a % 2 == b % 2 else 1 for b in range(16)] for a in range(16)]
    assert choose(range(16), 6, links) == (0, 2, 4, 6, 8, 10)
    assert choose(range(1, 16), 8, links) == (1, 3, 5, 7, 9, 11, 13, 15)


@given(st.sets(st.integers(0, 9), max_size=8), st.integers(0, 9), st.randoms(use_true_random=False), st.booleans())
def test_as_many_as_asked_for_of_those_that_are_free(free: set[int], count: int, random, grown: bool):
    """For any connections, with both algorithms, and in any order of the GPUs."""
    links = [[random.randint(0, 9) for _ in range(8)] for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "MOST_SETS", 0 if grown else 2000)
        found = choose(free, count, links)
        assert set(found) <= free
        assert found == tuple(sorted(set(found)))
        assert len(found) == min(count, len(free))
        assert choose(sorted(free, reverse=True), count, links) == found
