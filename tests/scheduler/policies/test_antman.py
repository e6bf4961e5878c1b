"""AntMan: worked by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import (
    JobUse,
    Pack,
    Phase,
    SharedGpus,
    Snapshot,
)
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, on, snapshot

from .sharing_cases import known_pair, limits_mb, paired_jobs, running, shared, with_memory

# AntMan, worked by hand.


def test_antman_gives_guaranteed_jobs_gpus_under_opportunistic_ones_within_the_quota() -> None:
    low = running("low", "t4-00", gpu_class="opportunistic")
    high = job("high", max_gpus=1, gpu_class="guaranteed", account="maths")
    over = job("over", max_gpus=1, gpu_class="guaranteed", account="maths", submit_s=1.0)
    state = shared(snapshot("t4:1x1", [low, high, over]))
    plan = make_policy("antman", {"quotas": {"maths": 1}})[0].decide(state)
    (group,) = plan.shared
    assert group.packs[0].jobs == ("high", "low")
    assert group.packs[0].guaranteed == "high"
    assert "quota of account maths" in plan.waiting["over"].text


def test_antman_prefers_gpus_that_no_job_has() -> None:
    low = running("low", "t4-00", gpu_class="opportunistic")
    plan = make_policy("antman")[0].decide(shared(snapshot("t4:2x1", [low, job("high", max_gpus=1)])))
    assert plan.assignments["high"].placement.nodes == ("t4-01",)
    assert plan.shared == ()


def test_antman_puts_opportunistic_jobs_on_the_least_loaded_gpus_with_what_memory_is_left() -> None:
    jobs = [running("a", "t4-00"), running("b", "t4-01"), job("low", max_gpus=1, gpu_class="opportunistic")]
    used = {"a": JobUse("a", 0.9, 6000, 900.0), "b": JobUse("b", 0.3, 7000, 900.0)}
    state = shared(snapshot("t4:2x1", jobs), **used)
    assert state.sharing is not None
    told = dataclasses.replace(state.sharing, gpu_memory_mb={"t4": 16_000})
    plan = make_policy("antman")[0].decide(dataclasses.replace(state, sharing=told))
    (group,) = plan.shared
    assert (group.node, group.packs[0].jobs, group.packs[0].guaranteed) == ("t4-01", ("b", "low"), "b")
    assert group.packs[0].limit("low").memory_mb == 9000
    tight = dataclasses.replace(told, gpu_memory_mb={"t4": 7500})
    plan = make_policy("antman")[0].decide(dataclasses.replace(state, sharing=tight))
    assert plan.assignments["low"].placement.nodes == ("t4-00",), "500 MB are too little on the other one"


@pytest.mark.parametrize(("answers", "invited"), [(None, True), (True, True), (False, False)])
def test_antman_puts_no_job_beside_a_guaranteed_one_that_cannot_be_told_its_share(
    answers: bool | None, invited: bool
) -> None:
    jobs = [running("a", "t4-00"), job("low", max_gpus=1, gpu_class="opportunistic")]
    used = {"a": JobUse("a", 0.3, 6000, 900.0), "low": JobUse("low", answers=answers)}
    plan = make_policy("antman")[0].decide(shared(snapshot("t4:1x1", jobs), **used))
    assert ("low" in plan.assignments, "low" in plan.waiting) == (invited, not invited)


def test_a_joining_opportunistic_job_has_room_for_all_that_it_has_used() -> None:
    """Of 16,000 MB `b` leaves 9,000 and `a` 10,000; a new job of unknown need leaves the least, 1,024."""
    jobs = [running("a", "t4-00"), running("b", "t4-01"), job("low", max_gpus=1, gpu_class="opportunistic")]
    used = {"a": JobUse("a", 0.9, 6000, 900.0), "b": JobUse("b", 0.3, 7000, 900.0)}
    for low_mb, nodes in ((9000, ("t4-01",)), (9001, ("t4-00",)), (10_001, None)):
        state = shared(snapshot("t4:2x1", jobs), **used | {"low": JobUse("low", 0.5, low_mb, 900.0)})
        plan = make_policy("antman")[0].decide(with_memory(state, 16_000))
        given = plan.assignments.get("low")
        assert (given and given.placement.nodes) == nodes
    low, new = running("low", "t4-00", gpu_class="opportunistic"), job("new", max_gpus=1, gpu_class="guaranteed")
    for low_mb, limits in ((1024, [(0, 1024)]), (1025, [])):
        its_uses = {"low": JobUse("low", 0.5, low_mb, 900.0), "new": JobUse("new")}
        state = with_memory(shared(snapshot("t4:1x1", [low, new]), **its_uses), 16_000)
        assert limits_mb(make_policy("antman")[0].decide(state)) == limits


def _opportunists(totals: dict[tuple[str, str], float], running_: Iterable[str], waiting: Iterable[str]) -> Snapshot:
    """One GPU for each of those that run, and what pairs of resident and joining job train together, relative to alone."""
    jobs = [running(name, f"t4-{n:02d}", gpu_class="opportunistic") for n, name in enumerate(running_)]
    nodes = f"t4:{len(jobs)}x1"
    jobs += [job(name, max_gpus=1, gpu_class="opportunistic", submit_s=n + 1.0) for n, name in enumerate(waiting)]
    state = shared(snapshot(nodes, jobs), **{each.id: JobUse(each.id, 0.5, 1000, 600.0) for each in jobs})
    assert state.sharing is not None
    pairs = [known_pair(one, other, total / 2) for both, total in totals.items() for one, other in (both, both[::-1])]
    return dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, pairs=tuple(pairs)))


def test_antman_pairs_opportunistic_jobs_so_that_all_together_train_most() -> None:
    """1.4 + 1.9 beats 1.5 + 1.1, though `c` has waited longer and would have more beside `a`."""
    totals = {("a", "c"): 1.5, ("b", "c"): 1.4, ("a", "d"): 1.9, ("b", "d"): 1.1}
    plan = make_policy("antman")[0].decide(_opportunists(totals, "ab", "cd"))
    assert paired_jobs(plan) == {("a", "d"), ("b", "c")}
    assert plan.waiting == {}
    alone = make_policy("antman")[0].decide(_opportunists({("a", "c"): 1.0, ("a", "d"): 0.9}, "a", "cd"))
    assert (paired_jobs(alone), set(alone.waiting)) == (set(), {"c", "d"}), "time slices are as good"


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_antman_finds_the_best_of_all_pairings(residents: int, joiners: int, data: st.DataObject) -> None:
    """Up to six jobs, all pairings tried: none gains more than the plan's."""
    names = "abc"[:residents], "xyz"[:joiners]
    total = st.sampled_from([0.7, 1.0, 1.1, 1.25, 1.5, 1.6, 1.9])
    totals = {(resident, joining): data.draw(total) for resident in names[0] for joining in names[1]}
    plan = make_policy("antman")[0].decide(_opportunists(totals, *names))
    assert all(totals[pair] > 1 for pair in paired_jobs(plan))  # type: ignore[index]
    gained = sum(totals[pair] - 1 for pair in paired_jobs(plan))  # type: ignore[index]
    places = [*names[0], *[None] * joiners]
    best = max(
        sum(
            max(totals[resident, joining] - 1, 0.0)
            for joining, resident in zip(names[1], taken, strict=True)
            if resident is not None
        )
        for taken in itertools.permutations(places, joiners)
    )
    assert gained == pytest.approx(best)


def test_a_joining_opportunistic_job_on_its_way_keeps_its_gpus_when_its_resident_job_has_gone() -> None:
    where = on("t4", t4_01=1)
    joining = job(
        "joining", phase=Phase.STARTING, allocation=where, target=where, max_gpus=1, gpu_class="opportunistic"
    )
    packed = SharedGpus("t4-01", 1, (Pack(("resident", "joining"), guaranteed="resident"),))
    plan = make_policy("antman")[0].decide(shared(snapshot("t4:2x1", [joining]), packed))
    assert plan.shared == ()
    assert plan.assignments["joining"].placement == where
