"""The book of free GPUs: which nodes a job may have, under which limits, and copies that do not disturb each other."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock_scheduler.model import Configuration, GpuLimit, Job, Node, Placement, Share
from penstock_scheduler.rounds.free_gpus import FreeGpus, Timeline
from tests.scheduler.builders import job, on


def node(name: str, gpus: int = 4, **fields: object) -> Node:
    return Node(**({"name": name, "gpu_type": "t4", "gpus": gpus, "partitions": ("all",)} | fields))  # type: ignore[arg-type]


def in_partition(name: str, **fields: object) -> Job:
    return dataclasses.replace(job("j"), partitions=(name,), **fields)  # type: ignore[arg-type]


ONE, FOUR, WHOLE_TWO = Configuration(1, 1, "t4"), Configuration(1, 4, "t4"), Configuration(2, 8, "t4")


@pytest.mark.parametrize(
    ("there", "free"),
    [
        (node("n"), 4),
        (node("n", gpus_others=1), 3),
        (node("n", gpus_others=4), 0),
        (node("n", gpus_others=5), 0),
        (node("n", may_start=False), 0),
    ],
    ids=["idle", "one is taken by others", "all are", "others have more than there are", "out of service"],
)
def test_free_is_what_others_leave_on_a_usable_node(there: Node, free: int):
    book = FreeGpus([there])
    assert book.on("n") == free
    assert book.by_type() == {"t4": free}
    assert (book.find(job("j"), [ONE]) is not None) is (free > 0)


def test_a_job_gets_exactly_as_many_gpus_as_are_left():
    book = FreeGpus([node("n")])
    book.take(job("a"), on("t4", n=1))
    assert book.find(job("j"), [FOUR]) is None
    assert book.find(job("j"), [FOUR, Configuration(1, 3, "t4")]) == on("t4", n=3)
    book.give_back(job("a"), on("t4", n=1))
    assert book.find(job("j"), [FOUR]) == on("t4", n=4)


def test_part_of_a_node_comes_from_the_fullest():
    book = FreeGpus([node("a"), node("b", gpus_others=2), node("c", gpus_others=1)])
    assert book.find(job("j"), [ONE]) == Placement("t4", "all", (Share("b", 1),))


def test_of_equally_full_nodes_the_first_by_name_is_taken():
    assert FreeGpus([node("b"), node("a")]).find(job("j"), [ONE]) == on("t4", a=1)


def test_a_job_gets_the_gpus_that_it_would_rather_have_if_it_may_have_them():
    """Node a is the fullest, so that the job would come there otherwise."""
    book = FreeGpus(
        [node("a", gpus_others=1), node("b"), node("c", reservation="night")], [GpuLimit("user", "cleo", 2)]
    )
    assert book.find(job("j"), [ONE], on("t4", b=1)) == on("t4", b=1)
    assert book.find(job("j"), [ONE], on("t4", b=4)) == on("t4", a=1), "not what was asked for"
    assert book.find(job("j"), [ONE], on("t4", c=1)) == on("t4", a=1), "kept for the reservation"
    assert book.find(job("j"), [ONE], on("t4", "gpu", b=1)) == on("t4", a=1), "of a partition that is not the job's"
    assert book.find(job("j", user="cleo"), [FOUR, ONE], on("t4", b=4)) == on("t4", a=1), "more than the limit allows"
    book.take(job("other"), on("t4", b=4))
    assert book.find(job("j"), [ONE], on("t4", b=1)) == on("t4", a=1), "taken"


def test_partitions_and_reservations_open_nodes_to_their_jobs_alone():
    book = FreeGpus([node("a", partitions=("gpu",)), node("b", partitions=("debug",), reservation="night")])
    assert book.find(in_partition("gpu"), [ONE]) == on("t4", "gpu", a=1)
    assert book.find(in_partition("gpu"), [FOUR, WHOLE_TWO]) == on("t4", "gpu", a=4)
    assert book.find(in_partition("debug"), [ONE]) is None, "kept for the reservation"
    assert book.find(in_partition("debug", reservation="night"), [ONE]) == on("t4", "debug", b=1)
    assert book.find(in_partition("gpu", reservation="night"), [ONE]) is None, "not of the reservation's partition"


def test_a_job_comes_by_the_first_of_its_partitions_that_has_room():
    either = dataclasses.replace(job("j"), partitions=("full", "free"))
    book = FreeGpus([node("a", partitions=("full",), gpus_others=4), node("b", partitions=("free",))])
    assert book.find(either, [ONE]) == on("t4", "free", b=1)


def test_several_nodes_are_taken_whole_and_from_one_switch():
    nodes = [node("a", switch="x"), node("b", switch="y"), node("c", switch="y"), node("d", switch="x", gpus_others=1)]
    assert FreeGpus(nodes).find(job("j"), [WHOLE_TWO]) == on("t4", b=4, c=4)
    assert FreeGpus(nodes[:2]).find(job("j"), [WHOLE_TWO]) == on("t4", a=4, b=4), "two switches are better than nothing"
    assert FreeGpus([nodes[0], nodes[3]]).find(job("j"), [WHOLE_TWO]) is None


def test_a_number_that_no_whole_nodes_have_is_the_same_part_of_each():
    found = FreeGpus([node("a", 8), node("b", 8)]).find(job("j"), [Configuration(2, 10, "t4")])
    assert found == on("t4", a=5, b=5)


def test_a_limit_counts_the_gpus_of_the_jobs_that_it_covers():
    """ada may hold 3 more GPUs, 1 of them an a100; bob is not limited."""
    ada, bob = (dataclasses.replace(job(name), user=name) for name in ("ada", "bob"))
    book = FreeGpus(
        [node("a"), node("b", gpu_type="a100")], [GpuLimit("user", "ada", 3), GpuLimit("user", "ada", 1, "a100")]
    )
    a100 = [Configuration(1, gpus, "a100") for gpus in (2, 1)]
    assert book.find(ada, [FOUR]) is None
    assert book.find(bob, [FOUR]) == on("t4", a=4)
    assert book.find(ada, a100) == on("a100", b=1)
    assert book.find_nodes(ada, [FOUR]) == on("t4", a=4), "whatever the limits say"
    trial = book.copy()
    trial.take(ada, on("t4", a=2))
    assert trial.find(ada, [Configuration(1, 2, "t4")]) is None
    assert trial.find(ada, [ONE]) == on("t4", a=1)
    trial.charge(ada, 1, "t4")  # it shares a GPU
    assert trial.find(ada, [ONE]) is None
    trial.give_back(ada, on("t4", a=2))
    assert trial.find(ada, [Configuration(1, 2, "t4")]) == on("t4", a=2)
    assert [limit.gpus for limit in trial.allowance.left()] == [2, 1]
    assert [limit.gpus for limit in book.allowance.left()] == [3, 1], "the copy has limits of its own"


@pytest.mark.parametrize(
    ("limit", "covered"),
    [
        (GpuLimit("user", "ada", 1), True),
        (GpuLimit("user", "bob", 1), False),
        (GpuLimit("account", "maths", 1), True),
        (GpuLimit("account", "science", 1, below=("maths", "physics")), True),
        (GpuLimit("account", "arts", 1, below=("history",)), False),
        (GpuLimit("qos", "high", 1), True),
        (GpuLimit("qos", "high", 1, user="ada", account="maths"), True),
        (GpuLimit("qos", "high", 1, user="bob"), False),
        (GpuLimit("qos", "high", 1, account="physics"), False),
        (GpuLimit("account", "maths", 1, spared_qos=("high",)), False),
        (GpuLimit("account", "maths", 1, spared_qos=("low",)), True),
        (GpuLimit("partition", "gpu", 1), True),
        (GpuLimit("partition", "debug", 1), False),
    ],
    ids=str,
)
def test_which_jobs_a_limit_covers(limit: GpuLimit, covered: bool):
    """The partition is the first one that the job was submitted to."""
    one = dataclasses.replace(job("j"), user="ada", account="maths", qos="high", partitions=("gpu", "debug"))
    assert limit.covers(one) is covered
    book = FreeGpus([node("a", partitions=("gpu",))], [dataclasses.replace(limit, gpus=0)])
    assert (book.find(one, [ONE]) is None) is covered


def test_what_does_not_fit_was_never_there():
    book = FreeGpus([node("a")])
    assert book.has(on("t4", a=4))
    assert not book.has(on("t4", a=5))
    assert not book.has(on("t4", gone=1))


def test_a_job_may_stay_where_its_gpus_are_free_but_for_itself_or_the_node_is_out_of_service():
    """What runs on a node that is drained or gone is not this book's to stop."""
    book = FreeGpus([node("a", gpus_others=2), node("down", may_start=False)])
    assert book.may_stay(on("t4", a=2))
    assert not book.may_stay(on("t4", a=3))
    assert book.may_stay(on("t4", down=4))
    assert book.may_stay(on("t4", gone=4))
    assert not book.may_stay(on("t4", a=3, down=4)), "one of its nodes is too full"


def test_copies_change_independently_in_both_directions():
    book = FreeGpus([node("a")])
    trial = book.copy()
    trial.take(job("j"), on("t4", a=3))
    assert (book.on("a"), trial.on("a")) == (4, 1)
    book.take(job("k"), on("t4", a=1))
    assert (book.on("a"), trial.on("a")) == (3, 1)
    again = trial.copy()
    trial.give_back(job("j"), on("t4", a=3))
    assert (trial.on("a"), again.on("a")) == (4, 1)


def test_a_book_made_like_an_earlier_one_is_a_new_one():
    first = FreeGpus([node("a"), node("b")])
    first.take(job("j"), on("t4", a=4))
    changed = [first.nodes[0], node("b", gpus_others=3)]
    book = FreeGpus(changed, like=first)
    assert (book.on("a"), book.on("b")) == (4, 1)
    assert FreeGpus([node("a", 8), node("b")], like=first).on("a") == 8, "another size"


def test_gpus_on_an_unusable_node_do_not_come_free():
    book = FreeGpus([node("a", may_start=False)])
    book.give_back(job("j"), on("t4", a=2))
    assert book.on("a") == 0
    assert not book.has(on("t4", a=1))


def test_a_timeline_finds_the_earliest_time_and_keeps_what_is_reserved():
    """4 GPUs: 2 are free, 1 comes free at 200 s, 1 at 300 s, as worked on paper."""
    book = FreeGpus([node("a", gpus_others=0)])
    book.take(job("x"), on("t4", a=1))
    book.take(job("y"), on("t4", a=1))
    line = Timeline(book, 100.0, [(200.0, on("t4", a=1)), (300.0, on("t4", a=1)), (math.inf, on("t4", a=0))])
    two, three, four = (Configuration(1, gpus, "t4") for gpus in (2, 3, 4))

    def fits(option: Configuration, seconds: float = 50.0, *, now: bool = False) -> tuple[float, float] | None:
        found = line.earliest(job("j"), [option], lambda _: seconds, now=now)
        return None if found is None else found[:2]

    assert fits(two) == (100.0, 150.0)
    assert fits(three) == (200.0, 250.0)
    assert fits(three, now=True) is None
    assert fits(four) == (300.0, 350.0)
    line.reserve(200.0, 300.0, on("t4", a=3))
    assert fits(two, 100.0) == (100.0, 200.0), "ends when the reservation begins"
    assert fits(two, 101.0) == (300.0, 401.0), "would run into it"
    assert fits(four) == (300.0, 350.0), "the reservation is over then"
    assert book.on("a") == 2, "the book itself stays as it is"


def test_where_nodes_of_the_right_size_exist_no_part_of_a_larger_one_stands_for_them():
    """2 x 4 GPUs are two whole nodes of 4. Half of a node of 8 is taken only where the type has no nodes of 4."""
    small, large = [node("a"), node("c")], [node("b", 8), node("d", 8)]
    assert FreeGpus([*large, *small]).find(job("j"), [WHOLE_TWO]) == on("t4", a=4, c=4)
    assert FreeGpus([*large, small[0]]).find(job("j"), [WHOLE_TWO]) is None
    assert FreeGpus(large).find(job("j"), [WHOLE_TWO]) == on("t4", b=4, d=4)
    assert FreeGpus([*large, *small]).find(job("j"), [Configuration(1, 8, "t4")]) == on("t4", b=8)


def test_another_gpu_type_never_stands_in():
    book = FreeGpus([node("a", gpu_type="a100"), node("b", gpu_type="a100")])
    assert book.find(job("j"), [ONE, WHOLE_TWO]) is None


def test_a_node_that_jobs_have_overbooked_has_nothing_and_owes_nothing():
    """Two jobs may still hold the same GPUs for a moment; other nodes of the type stay as they are."""
    book = FreeGpus([node("a"), node("b")])
    book.take_nodes(on("t4", a=4))
    book.take_nodes(on("t4", a=2))
    assert (book.on("a"), book.by_type()) == (0, {"t4": 4})


def test_gpus_of_a_node_that_is_gone_are_not_free():
    book = FreeGpus([node("a")])
    book.take(job("j"), on("t4", a=1, gone=2))
    assert book.by_type() == {"t4": 3}


@pytest.mark.parametrize(
    "nodes",
    [[], [node("a")], [node("a"), node("b"), node("c")], [node("a"), node("c")], [node("a"), node("b", 2)]],
    ids=len,
)
def test_a_book_made_like_one_of_other_nodes_counts_its_own(nodes: list[Node]):
    like = FreeGpus([node("a"), node("b")])
    like.take(job("j"), on("t4", b=1))
    assert FreeGpus(nodes, like=like).by_type() == FreeGpus(nodes).by_type()
    for each in nodes:
        assert FreeGpus(nodes, like=like).on(each.name) == each.gpus


def test_what_a_limit_leaves_is_never_less_than_nothing():
    """Jobs may hold more than a limit allows, from before it was set."""
    ada = dataclasses.replace(job("j"), user="ada")
    book = FreeGpus([node("a", 8)], [GpuLimit("user", "ada", 2), GpuLimit("user", "ada", 5)])
    book.take(ada, on("t4", a=3))
    assert [limit.gpus for limit in book.allowance.left()] == [0, 2]
    assert book.find(ada, [ONE]) is None
    book.give_back(ada, on("t4", a=2))
    assert [limit.gpus for limit in book.allowance.left()] == [1, 4]
    assert book.find(ada, [Configuration(1, 2, "t4"), ONE]) == on("t4", a=1)


def test_a_limit_on_a_type_counts_that_type_and_that_users_jobs_alone():
    ada, bob = (dataclasses.replace(job(name), user=name) for name in ("ada", "bob"))
    book = FreeGpus([node("a"), node("b", gpu_type="a100")], [GpuLimit("user", "ada", 2, "a100")])
    book.take(ada, on("t4", a=1))
    book.take(bob, on("a100", b=1))
    assert [limit.gpus for limit in book.allowance.left()] == [2]
    options = {Configuration(1, gpus, "a100"): 1.0 for gpus in (1, 2, 3)}
    assert [option.gpus for option in book.allowance.within(ada, options)[0]] == [1, 2]
    assert book.allowance.within(ada, options)[1] == ""
    assert book.allowance.within(bob, options) == (options, "")
    assert book.allowance.within(ada, {}) == ({}, "")
    book.take(ada, on("a100", b=2))
    allowed, why = book.allowance.within(ada, options)
    assert allowed == {}
    assert "user ada" in why


def test_a_timeline_takes_ends_in_any_order_and_several_at_one_time():
    """Four GPUs are held: two come free at 200 s, in two jobs, one at 150 s and one at 400 s."""
    book = FreeGpus([node("a")])
    for holder in "wxyz":
        book.take(job(holder), on("t4", a=1))
    ends = [(400.0, on("t4", a=1)), (200.0, on("t4", a=1)), (150.0, on("t4", a=1)), (200.0, on("t4", a=1))]
    line = Timeline(book, 100.0, ends)
    starts = {}
    for gpus in (1, 2, 3, 4):
        found = line.earliest(job("j"), [Configuration(1, gpus, "t4")], lambda _: 10.0)
        assert found is not None
        starts[gpus] = found[0]
    assert starts == {1: 150.0, 2: 200.0, 3: 200.0, 4: 400.0}
    line.reserve(150.0, 200.0, on("t4", a=1))
    again = line.earliest(job("j"), [ONE], lambda _: 10.0)
    assert again is not None
    assert again[:2] == (200.0, 210.0), "the reservation ends when others end"
    line.reserve(200.0, math.inf, on("t4", a=3))
    assert line.earliest(job("j"), [Configuration(1, 2, "t4")], lambda _: 10.0) is None, "never again as much"
    last = line.earliest(job("j"), [ONE], lambda _: math.inf)
    assert last is not None
    assert last[:2] == (400.0, math.inf)


def test_a_timeline_prefers_the_first_option_that_fits_at_the_earliest_time():
    book = FreeGpus([node("a"), node("b", gpu_type="a100")])
    book.take(job("x"), on("a100", b=4))
    line = Timeline(book, 100.0, [(300.0, on("a100", b=4))])
    options = [Configuration(1, 4, "a100"), Configuration(1, 4, "t4")]
    found = line.earliest(job("j"), options, lambda _: 10.0)
    assert found is not None
    assert (found[0], found[2]) == (100.0, on("t4", a=4)), "an earlier start beats a preferred option"
    line.reserve(100.0, 300.0, on("t4", a=1))
    found = line.earliest(job("j"), options, lambda _: 10.0)
    assert found is not None
    assert (found[0], found[2]) == (300.0, on("a100", b=4))
