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
from penstock_scheduler.rounds.sharing.control import ControlSettings, ShareControl, Steps
from penstock_scheduler.rounds.sharing.node import Group, Groups

SLICE_S = 60.0


class Starts:
    """A ground on which jobs take their time to start."""

    def __init__(self) -> None:
        self.began_s: dict[JobId, float] = {}
        self.came_s: dict[JobId, float] = {}
        """Who waited for the one before it to leave."""
        self.left_s: dict[JobId, float] = {}
        self.crowds: set[JobId] = set()

    def begun_s(self, job: JobId) -> float:
        return self.began_s.get(job, math.inf)

    def on_s(self, job: JobId) -> float:
        return self.came_s.get(job, -math.inf)

    def off_s(self, job: JobId) -> float:
        return self.left_s.get(job, -math.inf)

    def crowded(self, pack: Pack) -> bool:
        return not self.crowds.isdisjoint(pack.jobs)

    def seen(self, pack: Pack) -> PackSeen | None:
        return PackSeen(pack.jobs, "t4", (0.6,) * len(pack.jobs))

    def steps(self, pack: Pack, group: Group) -> Steps:
        return Steps()

    def refused(self, leaving: Collection[JobId]) -> Collection[JobId]:
        return ()

    def pinned(self, job: JobId) -> frozenset[int]:
        return frozenset()


def test_a_job_that_starts_has_its_gpus_and_does_not_run():
    """b has its time slice from 60 to 160 s and starts for 40 of them: served 100 s, of which it ran for 60, one slice."""
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


def test_a_job_that_is_slow_to_leave_is_charged_for_it_and_its_neighbour_is_not():
    """a takes 25 s to leave; b comes at 0, counts as having had 60 s less, and has its GPU from 25 s on.

    At 85 s a has had 25 s and b 60 - 60 = 0: b goes on, and has 60 at 145. Then a has the GPU to 205 s, and 25 s more until it is
    off: 110 s by 290, where b has 120. So they have had 110 and 180 s of the 290 together.
    """
    ground = Starts()
    ground.began_s |= {"a": 0.0, "b": 25.0}
    groups = Groups(ground, ControlSettings())
    both = SharedGpus("n0", 1, (Pack(("a",)), Pack(("b",))), SLICE_S)
    (group,) = groups.order([both], 0.0, {"a": True, "b": False})
    time_slices, account = [group.running], groups.account
    for ends_s, came, left, at_s in [(85.0, "b", "a", 25.0), (145.0, "b", "a", 25.0), (205.0, "a", "b", 145.0)]:
        ground.came_s[came], ground.left_s[left] = at_s, at_s
        groups.end_slice(group, ends_s)
        time_slices.append(group.running)
    assert [pack.jobs for (pack,) in time_slices] == [("b",), ("b",), ("a",), ("b",)]
    assert account.served_s == {"a": 85.0, "b": 60.0}
    ground.came_s["b"], ground.left_s["a"] = 230.0, 230.0
    groups.end_slice(group, 290.0)
    assert account.served_s == {"a": 110.0, "b": 120.0}
    assert account.ran_s == {"a": 110.0, "b": 180.0}
    assert account.first_slice_s == {"a": 180.0, "b": 85.0}


def test_a_group_that_is_changed_while_one_leaves_goes_on_charging_it():
    """a leaves from 0 to 25 s; at 10 s another job comes. Neither b, whose time slice it was, nor c has had anything by 25 s."""
    ground = Starts()
    ground.began_s["a"] = 0.0
    groups = Groups(ground, ControlSettings())
    packs = Pack(("a",)), Pack(("b",)), Pack(("c",))
    groups.order([SharedGpus("n0", 1, packs[:2], SLICE_S)], 0.0, {"a": True, "b": False})
    ground.came_s["b"], ground.left_s["a"] = math.inf, math.inf
    (group,) = groups.order([SharedGpus("n0", 1, packs, SLICE_S)], 10.0, {"a": False, "b": False, "c": False})
    assert groups.account.served_s["a"] == 10.0
    before_s = {job: groups.account.served_s[job] for job in ("b", "c")}
    (turn,) = group.running
    ground.came_s[turn.jobs[0]] = ground.left_s["a"] = 25.0
    groups.end_slice(group, 25.0)
    assert groups.account.served_s == before_s | {"a": 25.0}
    assert groups.account.ran_s["a"] == 25.0


def test_a_pack_that_does_not_fit_has_its_time_slice_only_if_no_other_can():
    ground = Starts()
    ground.began_s |= {"a": 0.0, "b": 0.0}
    groups = Groups(ground, ControlSettings())
    both = SharedGpus("n0", 1, (Pack(("a",)), Pack(("b",), priority=1)), SLICE_S)
    ground.crowds = {"b"}
    (group,) = groups.order([both], 0.0, {"a": True, "b": False})
    assert (groups.pack_of("a"), group.crowded) == (both.packs[0], frozenset())
    left = groups.left("a", 60.0)
    assert left is not None
    assert (groups.pack_of("b"), left.crowded) == (both.packs[1], {"b"})


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


def test_a_guaranteed_job_that_comes_has_the_gpu_to_itself_at_first():
    """The opportunistic job trained for a third of the time beside the one before it. The same
    jobs in a new order are not new jobs."""
    ground = Starts()
    ground.began_s |= dict.fromkeys("abg", 0.0)
    groups = Groups(ground, ControlSettings())

    def beside(guaranteed: JobId, slice_s: float) -> Group:
        pack = Pack((guaranteed, "g"), 1, guaranteed=guaranteed)
        (group,) = groups.order([SharedGpus("n0", 1, (pack,), slice_s)], 60.0, {guaranteed: False, "g": True})
        return group

    beside("a", 10.0).control = ShareControl(share=0.3)
    assert groups.compute("g") == 0.3
    beside("a", 20.0)
    assert groups.compute("g") == 0.3
    beside("b", 20.0)
    assert (groups.compute("b"), groups.compute("g")) == (1.0, 0.0)


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


def test_a_better_trial_has_the_time_slices_of_a_worse_one_and_no_other_job_has_less():
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


def test_a_job_that_comes_alone_has_moved_when_its_group_forms():
    """On a node, its shell forms a group of one for it. So `interval_s` counts from then on, as in a simulation, whose shell says
    when a job starts. What it was told counts."""
    groups = Groups(Starts(), ControlSettings())
    alone = SharedGpus("n", 1, (Pack(("a",)),), SLICE_S)
    groups.order([alone], 100.0, {"a": False})
    assert groups.account.moved_s == {"a": 100.0}
    groups.order([alone], 200.0, {})
    assert groups.account.moved_s == {"a": 100.0}
    told = Groups(Starts(), ControlSettings())
    told.started("a", 90.0)
    told.order([alone], 100.0, {"a": True})
    assert told.account.moved_s == {"a": 90.0}
