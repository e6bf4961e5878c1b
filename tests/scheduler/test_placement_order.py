"""In which order jobs find nodes when there are too few, and that a job which grows or shrinks does not keep what it had."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Configuration
from penstock_scheduler.rounds.placement import place
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import on


def t4(gpus: int, nodes: int = 1) -> Configuration:
    return Configuration(nodes, gpus, "t4")


def put(nodes: str, wanted: dict[str, Configuration], current=None, pinned=None, move_cost=None):
    partitions = dict.fromkeys(wanted, ("all",))
    return place(nodes_from_spec(nodes), wanted, partitions, current or {}, pinned or {}, move_cost=move_cost)


def test_the_largest_job_comes_first_whatever_its_name():
    found = put("t4:1x4", {"a": t4(2), "b": t4(4)})
    assert found.placements == {"b": on("t4", t4_00=4)}
    assert found.left_over == ("a",)


def test_of_equally_large_jobs_the_one_on_more_nodes_comes_first():
    """On two nodes of 8, 4 + 4 leaves no whole node, and a whole node leaves no 4 + 4."""
    found = put("t4:2x8", {"a": t4(8), "b": t4(8, 2)})
    assert found.placements == {"b": on("t4", t4_00=4, t4_01=4)}
    assert found.left_over == ("a",)


def test_of_equal_jobs_the_first_by_name_comes_first():
    found = put("t4:1x4", {"b": t4(4), "a": t4(4)})
    assert (list(found.placements), found.left_over) == (["a"], ("b",))


def test_jobs_that_made_room_find_new_nodes_from_the_largest_to_the_smallest():
    """The new job needs the first node. 2 GPUs are free elsewhere: enough for the job of 2, or for the job of 1."""
    current = {"a": on("t4", t4_00=1), "b": on("t4", t4_00=2)}
    wanted = {"a": t4(1), "b": t4(2), "new": t4(4)}
    found = put("t4:2x4", wanted, current, {"p": on("t4", t4_01=2)})
    assert found.placements == {"new": on("t4", t4_00=4), "b": on("t4", t4_01=2)}
    assert found.left_over == ("a",)
    assert found.made_room_for == {"b": "new"}, "a has no nodes at all: it is left over"


@pytest.mark.parametrize("gpus", [2, 3], ids=["shrinks", "grows"])
def test_a_job_that_changes_its_size_gets_the_new_one(gpus: int):
    held = on("t4", t4_00=5 - gpus)
    found = put("t4:1x4", {"a": t4(gpus)}, {"a": held})
    assert found.placements == {"a": on("t4", t4_00=gpus)}


def test_what_is_left_over_is_named_in_the_order_of_the_names():
    """They were tried from the largest to the smallest: b, d, a."""
    found = put("t4:1x1", {"c": t4(1), "b": t4(8), "d": t4(4), "a": t4(2)})
    assert found.left_over == ("a", "b", "d")


def test_of_jobs_that_made_room_the_one_on_more_nodes_finds_new_nodes_first():
    """The new job needs two whole nodes. One GPU is left on each of two others: room for b, which runs on two nodes."""
    current = {"a": on("t4", t4_01=2), "b": on("t4", t4_00=1, t4_03=1)}
    wanted = {"a": t4(2), "b": t4(2, 2), "new": t4(4, 2)}
    found = put("t4:4x2", wanted, current, {"p": on("t4", t4_02=1)})
    assert found.placements == {"new": on("t4", t4_00=2, t4_01=2), "b": on("t4", t4_02=1, t4_03=1)}
    assert found.left_over == ("a",)


def test_jobs_that_made_room_are_named_in_the_order_of_their_names():
    """Not in the order of their nodes, nor of a set, which differs from one process to the next."""
    names = "hfdbgeca"
    current = {name: on("t4", t4_00=1) for name in names}
    found = put("t4:1x8,t4:1x4,t4:1x4", dict.fromkeys(names, t4(1)) | {"new": t4(8)}, current)
    assert list(found.made_room_for) == sorted(names)
