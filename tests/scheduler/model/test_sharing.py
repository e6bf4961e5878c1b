"""Shared GPUs: who takes part, who has which limits, and when they run in time slices."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import JobUse, Limit, Pack, SharedGpus, SharingState


def test_each_job_of_a_pack_has_its_own_limit():
    tight, loose = Limit(0.25, 4000), Limit(0.5)
    pack = Pack(("1", "2"), limits=(tight, loose))
    assert (pack.limit("1"), pack.limit("2")) == (tight, loose)


def test_a_pack_without_limits_limits_no_job():
    assert Pack(("1",)).limit("1") == Limit(compute=1.0, memory_mb=0)


@pytest.mark.parametrize(("gpus", "time_sliced"), [(2, True), (3, False), (4, False)])
def test_packs_take_turns_only_if_they_do_not_fit_together(gpus: int, time_sliced: bool):
    """A pack of 2 GPUs and one of 1 need 3 together."""
    group = SharedGpus("n1", gpus, (Pack(("1", "2"), gpus=2), Pack(("3",))))
    assert group.wanted == 3
    assert group.time_sliced is time_sliced
    assert group.jobs == ("1", "2", "3")


def test_a_pack_that_says_no_more_has_one_gpu_and_no_privilege():
    pack = Pack(("1",))
    assert (pack.gpus, pack.priority, pack.guaranteed, pack.search, pack.rank) == (1, 0, None, "", 0)
    assert SharedGpus("n1", 1, (pack,)).slice_s == 60.0


def test_a_job_is_profiled_once_it_has_run_alone_even_if_it_used_nothing():
    assert not JobUse("bert").profiled
    assert JobUse("bert", utilisation=0.0).profiled
    assert JobUse("bert", utilisation=0.7).profiled


def test_nothing_is_known_of_a_job_that_no_agent_has_observed():
    seen = JobUse("bert", 0.5, 4000, 60.0)
    state = SharingState(uses={"1": seen})
    assert state.use("1") == seen
    unseen = state.use("2")
    assert unseen.kind == "2", "it is its own kind"
    assert (unseen.utilisation, unseen.memory_mb, unseen.ran_s, unseen.moved_s) == (None, 0, 0.0, None)
    assert (unseen.results, unseen.answers) == ((), None)
