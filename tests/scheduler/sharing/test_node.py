"""Groups as they are carried out: what a job has had."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NoReturn

import pytest

from penstock_scheduler.model import JobId, Pack, PackSeen, SharedGpus
from penstock_scheduler.sharing.control import Control, ControlSettings, Steps
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


def test_a_guaranteed_job_that_comes_has_the_gpu_to_itself_at_first():
    """The guest trained for a third of the time beside the one before it. The same jobs in a new order are no newcomers."""
    ground = Starts()
    ground.began_s |= dict.fromkeys("abg", 0.0)
    groups = Groups(ground, ControlSettings())

    def beside(guaranteed: JobId, slice_s: float) -> Group:
        pack = Pack((guaranteed, "g"), 1, guaranteed=guaranteed)
        (group,) = groups.order([SharedGpus("n0", 1, (pack,), slice_s)], 60.0, {guaranteed: False, "g": True})
        return group

    beside("a", 10.0).control = Control(share=0.3)
    assert groups.compute("g") == 0.3
    beside("a", 20.0)
    assert groups.compute("g") == 0.3
    beside("b", 20.0)
    assert (groups.compute("b"), groups.compute("g")) == (1.0, 0.0)
