"""Which jobs are packed, and which packs are undone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import JobId, Limit
from penstock_scheduler.rounds.sharing.packing import (
    Measured,
    PackingSettings,
    Tenant,
    choose,
    learn,
    memory_limits,
    undo,
)

SETTINGS = PackingSettings()


def _tenant(name: str, **others: float) -> Tenant:
    return Tenant(JobId(name), name, **others)  # type: ignore[arg-type]


def _known(**used: float) -> Colocation:
    return Colocation(utilisation={("t4", kind): value for kind, value in used.items()})


def _chosen(tenants: list[Tenant], excess: int, known: Colocation, memory_mb: int = 0, now_s: float = 0.0) -> list[str]:
    pairs = choose(tenants, excess, known, "t4", memory_mb, now_s, SETTINGS)
    return ["".join(sorted(tenant.job for tenant in pair)) for pair in pairs]


def test_the_least_used_are_packed_first_and_no_more_than_must_be():
    """0.1 + 0.2 and 0.3 + 0.6 all fit; one GPU too many jobs means one pack."""
    tenants = [_tenant(kind) for kind in "abcd"]
    known = _known(a=0.6, b=0.2, c=0.3, d=0.1)
    assert _chosen(tenants, 1, known) == ["bd"]
    assert _chosen(tenants, 2, known) == ["bd", "ac"]
    assert _chosen(tenants, 0, known) == []


def test_what_was_measured_counts_more_than_utilisation():
    tenants = [_tenant(kind) for kind in "abc"]
    known = _known(a=0.1, b=0.1, c=0.5)
    learn(known, "t4", [Measured((tenants[0], tenants[1]), (0.4, 0.5))])
    assert _chosen(tenants, 1, known) == ["ac"], "a and b were seen to be slower together than in time slices"


def test_the_last_resort_is_a_pair_that_promises_nothing_and_one_never_profiled_is_left_alone():
    tenants = [_tenant(kind) for kind in "abc"]
    assert _chosen(tenants, 3, _known(a=1.0, b=1.0)) == ["ab"]
    assert _chosen([*tenants, _tenant("d")], 1, _known(a=1.0, b=1.0, d=0.9)) == ["ad"]


@pytest.mark.parametrize(
    ("other", "packed"),
    [
        ({}, ["ab"]),
        ({"memory_mb": 9000}, []),
        ({"memory_mb": 6600}, []),
        ({"memory_mb": 0}, []),
        ({"priority": 1}, []),
        ({"gpus": 2}, []),
        ({"moved_s": 900.0}, []),
        ({"moved_s": 880.0}, ["ab"]),
    ],
)
def test_which_jobs_are_not_packed_together(other: dict[str, float], packed: list[str]):
    """8,000 and 6,500 MB and a tenth more are 15,950 of 16,000; 1,000 s - 900 s is less than the least interval of 120 s."""
    tenants = [_tenant("a", memory_mb=8000), _tenant("b", **{"memory_mb": 6500} | other)]
    assert _chosen(tenants, 2, _known(a=0.2, b=0.2), memory_mb=16000, now_s=1000.0) == packed


def _limits(*limits_mb: int) -> tuple[Limit, ...]:
    return tuple(Limit(memory_mb=mb) for mb in limits_mb)


def test_jobs_of_a_pack_share_the_memory_that_neither_uses():
    """4,000 and 6,000 MB and a tenth more are 11,000 of 16,000, which leaves 2,500 for each."""
    assert memory_limits([4000, 6000], 16_000) == _limits(6900, 9100)
    assert memory_limits([4000, 6000], 11_000) == _limits(4400, 6600)
    assert memory_limits([4000, 6000], 10_999) is None
    assert memory_limits([4000, 0], 16_000) is None, "the other job's need is unknown"
    assert memory_limits([4000, 0], 0) == (), "nor what there is"


def test_limits_stay_while_they_do():
    """7,000 MB are more than 6,900: 7,700 + 6,600 leave 850 each of 16,000."""
    now = _limits(6900, 9100)
    assert memory_limits([6900, 6000], 16_000, now) == now
    assert memory_limits([7000, 6000], 16_000, now) == _limits(8550, 7450)
    assert memory_limits([7000, 9000], 16_000, now) is None
    assert memory_limits([4000, 6000], 14_000, now) == _limits(5900, 8100), "on another GPU"


@given(st.lists(st.integers(0, 20_000), min_size=2, max_size=4), st.integers(1, 40_000), st.data())
def test_limits_are_together_no_more_than_the_gpu_has_and_each_no_less_than_was_seen(
    seen_mb: list[int], memory_mb: int, data: st.DataObject
):
    now = data.draw(st.just(()) | st.tuples(*(st.builds(Limit, memory_mb=st.integers(0, 20_000)) for _ in seen_mb)))
    limits = memory_limits(seen_mb, memory_mb, now)
    if limits is None:
        assert 0 in seen_mb or 1.1 * sum(seen_mb) > memory_mb - len(seen_mb)
    else:
        assert sum(limit.memory_mb for limit in limits) <= memory_mb
        assert all(limit.memory_mb >= max(mb, 1) for limit, mb in zip(limits, seen_mb, strict=True))
        assert memory_limits(seen_mb, memory_mb, limits) == limits, "they stay"


def _measured(name: str, *shares: float) -> Measured:
    return Measured((_tenant(name), _tenant(name + "'")), (shares[0], shares[1]))


def test_a_pack_stays_only_if_it_beats_time_slices():
    """0.5 + 0.5 is what time slices give, so such a pack does not pay. If one job does not fit, the other's does not count."""
    good, even, bad, burst = (
        _measured("good", 0.6, 0.5),
        _measured("even", 0.5, 0.5),
        _measured("bad", 0.2, 0.5),
        _measured("burst", 0.0, 1.2),
    )
    assert undo([good, even, bad, burst], 0, SETTINGS) == (burst, bad, even)


def test_idle_gpus_take_the_worst_packs_apart():
    packs = [_measured("fine", 0.9, 0.9), _measured("fair", 0.6, 0.6)]
    assert [gone.pack[0].job for gone in undo(packs, 1, SETTINGS)] == ["fair"]


def test_a_pack_of_two_gpus_is_taken_apart_where_two_are_idle():
    two = Measured((_tenant("a", gpus=2), _tenant("b", gpus=2)), (0.6, 0.6))
    one = _measured("better", 0.7, 0.7)
    assert undo([two, one], 1, SETTINGS) == (one,)
    assert undo([two, one], 2, SETTINGS) == (two,)
    assert undo([two, one], 3, SETTINGS) == (two, one)


def test_a_pair_that_did_not_fit_is_not_tried_again():
    tenants = [_tenant(kind) for kind in "ab"]
    known = Colocation({("t4", "a", "b"): Pair(share=0.9), ("t4", "b", "a"): Pair(share=0.9)})
    learn(known, "t4", [Measured((tenants[0], tenants[1]), (0.0, 0.0))])
    assert _chosen(tenants, 1, known) == []


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 2), st.integers(0, 1)), min_size=1, max_size=8),
    st.integers(0, 6),
)
def test_a_job_is_in_one_pack_and_packs_free_no_more_than_is_short(jobs: list[tuple[float, int, int]], excess: int):
    tenants = [Tenant(JobId(f"j{i}"), f"k{i}", gpus, priority=p) for i, (_, gpus, p) in enumerate(jobs)]
    known = Colocation(utilisation={("t4", f"k{i}"): used for i, (used, _, _) in enumerate(jobs)})
    if len(tenants) > 1:
        learn(known, "t4", [Measured((tenants[0], tenants[1]), (0.4, 0.4))])
    pairs = choose(tenants, excess, known, "t4", 0, 0.0, SETTINGS)
    packed = [tenant.job for pair in pairs for tenant in pair]
    assert len(packed) == len(set(packed))
    assert sum(one.gpus for one, _ in pairs) <= excess
    for one, other in pairs:
        assert (one.gpus, one.priority) == (other.gpus, other.priority)
        assert {one.job, other.job} != {"j0", "j1"}, "it was seen not to pay"
