"""Groups as they are carried out: what a job has had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.model import JobId, Pack, PackSeen, SharedGpus
from penstock_scheduler.sharing.control import ControlSettings, Steps
from penstock_scheduler.sharing.node import Group, Groups

SLICE_S = 60.0


class Starts:
    """A ground on which jobs take their time to start."""

    def __init__(self) -> None:
        self.began_s: dict[JobId, float] = {}

    def begun_s(self, job: JobId) -> float:
        return self.began_s.get(job, math.inf)

    def seen(self, pack: Pack) -> PackSeen | None:
        return PackSeen(pack.jobs, "t4", (0.6,) * len(pack.jobs))

    def steps(self, pack: Pack, group: Group) -> Steps:
        return Steps()

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        return ()

    def pinned(self, job: JobId) -> frozenset[int]:
        return frozenset()


def test_a_job_that_starts_has_its_gpus_and_does_not_run():
    """b has its turn from 60 to 160 s and starts for 40 of them: served 100 s, of which it ran for 60, one slice."""
    ground = Starts()
    ground.began_s["a"] = 0.0
    groups = Groups(ground, ControlSettings())
    both = SharedGpus("n0", 1, (Pack(("a",)), Pack(("b",))), SLICE_S)
    (group,) = groups.order([both], 60.0, {"a": True, "b": False})
    assert groups.pack_of("b") is not None
    before_s = dict(groups.account.served_s)
    ground.began_s["b"] = 100.0
    groups.end_slice(group, 160.0)
    account = groups.account
    assert account.served_s["b"] - before_s["b"] == 100.0
    assert (account.ran_s["b"], account.first_slice_s["b"], account.profiled) == (60.0, 160.0, {"b"})
    assert groups.pack_of("a") is not None, "its neighbour has the next turn"


@pytest.mark.parametrize("began_s", [math.inf, 90.0])
def test_a_slice_that_is_cut_while_a_job_starts_is_none(began_s: float):
    """b has its GPU for 70 s, longer than a slice, and runs for 40 of them or none: it has had no first slice."""
    ground = Starts()
    ground.began_s |= {"a": 0.0, "b": began_s}
    groups = Groups(ground, ControlSettings())
    groups.order([SharedGpus("n0", 1, (Pack(("a",)), Pack(("b",))), SLICE_S)], 60.0, {"a": True, "b": False})
    groups.left("a", 130.0)
    account = groups.account
    assert account.ran_s["b"] == max(130.0 - began_s, 0.0)
    assert (account.profiled, account.first_slice_s) == (set(), {})


def test_a_pack_is_measured_only_when_both_ran_for_all_of_a_slice():
    ground = Starts()
    ground.began_s |= {"a": 0.0, "b": 30.0}
    groups = Groups(ground, ControlSettings())
    (group,) = groups.order([SharedGpus("n0", 1, (Pack(("a", "b")),), SLICE_S)], 0.0, {"a": True, "b": False})
    groups.end_slice(group, 60.0)
    assert groups.take_seen() == ()
    groups.end_slice(group, 120.0)
    assert [seen.jobs for seen in groups.take_seen()] == [("a", "b")]


@pytest.mark.parametrize("fails", ["steps", "pinned"])
def test_what_fails_while_a_group_is_counted_or_made_drops_no_group(fails: str, monkeypatch: pytest.MonkeyPatch):
    """The order is carried out when it comes again."""
    ground = Starts()
    ground.began_s |= {"a": 0.0, "b": 0.0, "c": 0.0}
    groups = Groups(ground, ControlSettings())
    guarded = SharedGpus("n0", 1, (Pack(("a", "b"), 1, guaranteed="a"),), SLICE_S)
    other = SharedGpus("n0", 1, (Pack(("c",)),), SLICE_S)
    groups.order([guarded, other], 0.0, {"a": True, "b": False, "c": True})
    fewer = SharedGpus("n0", 2, (Pack(("c",)),), SLICE_S)

    def broken(*_: object) -> NoReturn:
        raise RuntimeError(fails)

    with monkeypatch.context() as patch:
        patch.setattr(ground, fails, broken)
        with pytest.raises(RuntimeError):
            groups.order([fewer], 60.0, {"c": True})
    assert ([group.order for group in groups.groups], set(groups.group_of)) == ([guarded, other], {"a", "b", "c"})
    groups.order([fewer], 60.0, {"c": True})
    assert ([group.order for group in groups.groups], set(groups.group_of)) == ([fewer], {"c"})


def trial(name: str, rank: int) -> Pack:
    return Pack((name,), search="ada:s", rank=rank)


def slices(groups: Groups, group: Group, count: int) -> Counter[JobId]:
    """Slices that each job has from now on."""
    had: Counter[JobId] = Counter()
    for _ in range(count):
        had.update(job for pack in group.running for job in pack.jobs)
        groups.end_slice(group, group.since_s + SLICE_S)
    return had


def together(gpus: int, *packs: Pack) -> tuple[Groups, Group]:
    """They all come at once."""
    ground = Starts()
    ground.began_s = dict.fromkeys((job for pack in packs for job in pack.jobs), 0.0)
    groups = Groups(ground, ControlSettings())
    (group,) = groups.order([SharedGpus("n0", gpus, packs, SLICE_S)], 0.0, dict.fromkeys(ground.began_s, False))
    return groups, group


def test_a_better_trial_has_the_turns_of_a_worse_one_and_nobody_else_has_less():
    """Three jobs on one GPU: a third is other's. The two thirds of the search are better's, until worse is the better one.

    When what is known of them changes, the slice goes on: that counts from the next one on.
    """
    groups, group = together(1, trial("worse", 1), trial("better", 0), Pack(("other",)))
    had = slices(groups, group, 30)
    assert (had["better"], had["worse"], had["other"]) == (20, 0, 10)
    began_s, running = group.since_s, [pack.jobs for pack in group.running]
    changed = SharedGpus("n0", 1, (trial("worse", 0), trial("better", 1), Pack(("other",))), SLICE_S)
    assert groups.order([changed], began_s + 7.0, {}) == []
    assert (group.order, group.since_s, [pack.jobs for pack in group.running]) == (changed, began_s, running)
    had = slices(groups, group, 30)
    assert had["worse"] >= 19
    assert had["better"] <= 1
    assert 9 <= had["other"] <= 11


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3))
def test_what_is_known_of_trials_changes_nothing_for_others(ranks: list[int], others: int, gpus: int):
    """In 60 slices each other job has as many as without ranks, but for one or two where it ties; a better trial has no less."""
    rest = [Pack((f"o{index}",)) for index in range(others)]
    had, plain = (
        slices(*together(gpus, *trials, *rest), 60)
        for trials in (
            [trial(f"t{index}", rank) for index, rank in enumerate(ranks)],
            [Pack((f"t{index}",)) for index, _ in enumerate(ranks)],
        )
    )
    for index in range(others):
        assert abs(had[f"o{index}"] - plain[f"o{index}"]) <= 2
    for one, rank in enumerate(ranks):
        for other, its_rank in enumerate(ranks):
            if rank < its_rank:
                assert had[f"t{one}"] >= had[f"t{other}"]
