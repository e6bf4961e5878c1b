"""Which job gets which GPU, and time slices of packs that cannot leave their GPUs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import JobId, Pack
from penstock_scheduler.rounds.sharing.slices import next_packs
from penstock_slurm.agent.gpu_access import bind
from tests.slurm_plugin.boards import TWO_PAIRS


def pack(*jobs: str, gpus: int = 1) -> Pack:
    return Pack(tuple(JobId(job) for job in jobs), gpus)


def test_who_runs_stays_and_who_comes_gets_what_is_free():
    found = bind([pack("a"), pack("b"), pack("c")], (4, 5, 6), {"b": (5,)}, {}, {"a": 1, "b": 1, "c": 1})
    assert found == {"a": (4,), "b": (5,), "c": (6,)}


def test_who_is_pinned_goes_before_who_could_move():
    """b runs on the GPU to which a is pinned, so b must move."""
    found = bind([pack("b"), pack("a")], (0, 1), {"b": (1,)}, {"a": frozenset({1})}, {"a": 1, "b": 1})
    assert found == {"a": (1,), "b": (0,)}


def test_guests_of_a_job_on_two_gpus_spread():
    found = bind([pack("big", "x", "y", gpus=2)], (0, 1), {}, {}, {"big": 2, "x": 1, "y": 1})
    assert found["big"] == (0, 1)
    assert {found["x"], found["y"]} == {(0,), (1,)}


def test_two_that_come_together_meet_on_the_gpu_of_one():
    """The jobs of a pack for one GPU ran on two GPUs, so the second must move."""
    found = bind([pack("a", "b")], (0, 1), {"a": (0,), "b": (1,)}, {}, {"a": 1, "b": 1})
    assert found == {"a": (0,), "b": (0,)}


def test_where_a_pinned_pack_needs_more_than_there_is_it_gets_none():
    assert bind([pack("a", gpus=2)], (0,), {}, {}, {"a": 2}) == {"a": ()}


def test_of_two_that_want_the_same_gpu_one_runs_and_a_third_fills_up():
    """a and b are bound to GPU 0, c to GPU 1. b has had the least GPU time, so it precedes a."""
    a, b, c = pack("a"), pack("b"), pack("c")
    pins = {a: frozenset({0}), b: frozenset({0}), c: frozenset({1})}
    assert next_packs([a, b, c], {a: 60.0, b: 0.0, c: 60.0}, 2, (a, c), pinned=pins) == (b, c)
    assert next_packs([a, b, c], {a: 60.0, b: 0.0, c: 60.0}, 2, (a, c), pinned=pins, keep=[a]) == (a, c)


jobs = st.integers(1, 3)


@given(st.lists(st.tuples(jobs, st.booleans()), max_size=5), st.integers(1, 6), st.data())
def test_no_gpu_belongs_to_two_packs_and_all_jobs_that_fit_get_gpus(
    wanted: list[tuple[int, bool]], count: int, data: st.DataObject
):
    """Whatever was held and pinned before, packs that run together have separate GPUs, and pins are kept."""
    packs = [pack(f"j{index}", gpus=gpus) for index, (gpus, _) in enumerate(wanted)]
    pins, held = {}, {}
    for each, (gpus, pinned) in zip(packs, wanted, strict=True):
        if gpus <= count and data.draw(st.booleans()):
            mine = tuple(sorted(data.draw(st.permutations(range(count)))[:gpus]))
            held[each.jobs[0]] = mine
            if pinned:
                pins[each.jobs[0]] = frozenset(mine)
    by_pack = {each: pins.get(each.jobs[0], frozenset()) for each in packs}
    running = next_packs(packs, dict.fromkeys(packs, 0.0), count, (), pinned=by_pack)
    found = bind(running, range(count), held, pins, {each.jobs[0]: each.gpus for each in packs})
    allocated = [device for devices in found.values() for device in devices]
    assert len(allocated) == len(set(allocated))
    for each in running:
        assert len(found[each.jobs[0]]) == each.gpus
        assert pins.get(each.jobs[0], frozenset()) <= set(found[each.jobs[0]])


def test_packs_get_gpus_that_are_connected():
    """0 and 2 share a switch. The job of one GPU is first and takes 1, so that the other job gets these two."""
    one, two = pack("one"), pack("two", gpus=2)
    gpus = {"one": 1, "two": 2}
    assert bind([two], (0, 1, 2, 3), {}, {}, gpus, TWO_PAIRS) == {"two": (0, 2)}
    assert bind([one, two], (0, 1, 2), {}, {}, gpus, TWO_PAIRS) == {"one": (1,), "two": (0, 2)}
    assert bind([one, two], (0, 1, 2), {}, {}, gpus) == {"one": (0,), "two": (1, 2)}


def test_who_runs_does_not_move_to_gpus_that_are_better_connected():
    """A job that has one of its two GPUs gets the other one on the same switch."""
    gpus = {"a": 2, "b": 1}
    running = [pack("a", gpus=2), pack("b")]
    assert bind(running, (0, 1, 2, 3), {"a": (0, 1)}, {}, gpus, TWO_PAIRS) == {"a": (0, 1), "b": (2,)}
    assert bind([pack("a", "b", gpus=2)], (0, 1, 3), {"b": (3,)}, {}, gpus, TWO_PAIRS) == {"a": (1, 3), "b": (3,)}


def test_a_job_co_located_on_some_of_the_resident_jobs_gpus_gets_connected_ones():
    found = bind([pack("big", "x", "y", gpus=4)], (0, 1, 2, 3), {}, {}, {"big": 4, "x": 2, "y": 2}, TWO_PAIRS)
    assert found == {"big": (0, 1, 2, 3), "x": (0, 2), "y": (1, 3)}
