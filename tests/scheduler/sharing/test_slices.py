"""Time slices on a node, Algorithm 1, and what a plan says about sharing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import JobId, Pack, Plan, SharedGpus, Snapshot
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord, dump_round, load_round
from penstock_scheduler.rounds.sharing.gandiva import Landing, height, land
from penstock_scheduler.rounds.sharing.slices import entry_s, handed_on, next_packs


def _packs(*gpus: int) -> list[Pack]:
    return [Pack((JobId(f"j{index}"),), wanted) for index, wanted in enumerate(gpus)]


def _slices(packs: list[Pack], gpus: int, count: int) -> Counter[Pack]:
    """Slices each pack had."""
    had: Counter[Pack] = Counter()
    running: tuple[Pack, ...] = ()
    for _ in range(count):
        running = next_packs(packs, {pack: float(had[pack]) for pack in packs}, gpus, running)
        assert sum(pack.gpus for pack in running) <= gpus
        had.update(running)
    return had


def test_six_jobs_on_four_gpus_get_four_sixths_each():
    """Three slices of four jobs are twelve time slices, two for each of the six."""
    assert set(_slices(_packs(1, 1, 1, 1, 1, 1), 4, 300).values()) == {200}


def test_a_gang_is_not_kept_out_by_small_jobs():
    """Of four GPUs the gang wants all: it and the four small ones have time slices, half of the time each."""
    assert set(_slices(_packs(4, 1, 1, 1, 1), 4, 100).values()) == {50}


def test_among_equals_the_running_pack_stays():
    a, b = _packs(1, 1)
    assert next_packs([a, b], {a: 1.0, b: 1.0}, 1, [b]) == (b,)


def test_a_higher_priority_is_never_suspended_for_a_lower():
    low, high = Pack((JobId("low"),)), Pack((JobId("high"),), priority=1)
    assert next_packs([low, high], {low: 0.0, high: 9000.0}, 1, [high]) == (high,)


def test_a_pack_that_should_not_run_now_is_behind_all_others():
    """Even if it has a higher priority, and has had less; where GPUs are left it runs."""
    a, b = Pack((JobId("a"),)), Pack((JobId("b"),), priority=1)
    served = {a: 60.0, b: 0.0}
    assert next_packs([a, b], served, 1, [b], last=[b]) == (a,)
    assert next_packs([a, b], served, 2, [b], last=[b]) == (a, b)


def test_a_newcomer_has_the_next_slice_and_no_more():
    a, b = _packs(1, 1)
    served = {a: 600.0, b: entry_s([600.0], 60.0)}
    assert next_packs([a, b], served, 1, [a]) == (b,)
    served[b] += 60.0
    assert next_packs([a, b], served, 1, [b]) == (b,), "now they are equals, and it need not be suspended at once"
    assert entry_s([], 60.0) == 0.0
    assert entry_s([600.0, 1200.0], 60.0) == 540.0, "before all others, also where some have had more"


def test_a_better_trial_takes_a_place_in_line_only_of_one_that_is_alike():
    """Of another search, size, priority or GPU it does not; nor does it push aside one that cannot be suspended."""
    worse, better = Pack((JobId("worse"),), search="s", rank=1), Pack((JobId("better"),), search="s")
    served = {worse: 0.0, better: 60.0}
    assert next_packs([worse, better], served, 1) == (better,)
    assert handed_on([worse, better], served, {}) == {worse: 60.0, better: 0.0}
    assert next_packs([worse, better], served, 1, pinned={worse: frozenset({0}), better: frozenset({1})}) == (worse,)
    assert next_packs([worse, better], served, 1, keep=[worse]) == (worse,)
    for its in ({"search": "other"}, {"gpus": 2}):
        unlike = dataclasses.replace(better, **its)
        assert next_packs([worse, unlike], {worse: 0.0, unlike: 60.0}, 2)[0] == worse
        assert handed_on([worse, unlike], {worse: 0.0, unlike: 60.0}, {}) == {worse: 0.0, unlike: 60.0}
    first = dataclasses.replace(worse, priority=1)
    assert next_packs([first, better], {first: 60.0, better: 0.0}, 1) == (first,)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_no_job_starves(sizes: list[int]):
    """The first in line always runs: in as many slices as there are packs each has had one."""
    packs = _packs(*sizes)
    had = _slices(packs, 4, 10 * len(packs))
    assert min(had[pack] for pack in packs) >= 10


def _node(name: str, *gpus: int, of: int = 4) -> SharedGpus:
    return SharedGpus(name, of, tuple(Pack((JobId(f"{name}-{i}"),), wanted) for i, wanted in enumerate(gpus)))


def test_algorithm_1_in_the_papers_order():
    """A 1-GPU job: class of 1 with room, least loaded; an empty node; any free GPU; a turn on its own class; the queue."""
    ones, less, twos, empty = _node("ones", 1, 1), _node("less", 1), _node("twos", 2), _node("empty")
    full_ones, full_twos = _node("full1", 1, 1, 1, 1), _node("full2", 2, 2)
    assert land(1, [ones, less, twos, empty]) == Landing((("less", 1),))
    assert land(1, [full_ones, twos, empty]) == Landing((("empty", 1),))
    assert land(1, [full_ones, twos]) == Landing((("twos", 1),))
    assert land(1, [full_twos, full_ones]) == Landing((("full1", 1),), sliced=True)
    assert land(1, [full_twos, full_ones], max_height=1.0) is None
    assert height(_node("n", 2, 2, 2)) == 1.5


def test_free_gpus_of_several_nodes_come_before_time_slices():
    """3 GPUs: 2 are free on one node and 1 on each of two more; a job for more than any node has is spread or waits."""
    nodes = [_node("a", 3), _node("b", 2), _node("c", 3)]
    assert land(3, nodes) == Landing((("b", 2), ("a", 1)))
    assert land(5, nodes) is None


def test_a_job_of_no_gpus_is_refused():
    with pytest.raises(ValueError, match="1 GPU or more"):
        land(0, [_node("a")])


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([1.0, 1.5, math.inf]),
)
def test_a_landing_has_room_or_time_slices(filled: list[list[int]], gpus: int, most: float):
    nodes = {f"n{index}": _node(f"n{index}", *sizes) for index, sizes in enumerate(filled)}
    landing = land(gpus, list(nodes.values()), most)
    free = sum(max(4 - sum(sizes), 0) for sizes in filled)
    if landing is None:
        assert free < gpus
        return
    assert sum(share for _, share in landing.shares) == gpus
    for name, share in landing.shares:
        after = height(nodes[name]) + share / 4
        assert after <= most if landing.sliced else after <= 1
    assert not landing.sliced or free < gpus


def test_sharing_is_saved_with_the_round():
    plan = Plan(1, shared=(_node("n", 1, 2),))
    record = RoundRecord(Snapshot(1, 0.0, (), (), {}), PolicyChoice(name="gandiva"), plan)
    assert load_round(dump_round(record), "here").plan == plan
