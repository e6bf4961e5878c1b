"""Stages by which waiting jobs join resident jobs: worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import (
    JobUse,
    Pack,
    PackSeen,
    Phase,
    ReasonCode,
    SharedGpus,
)
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, on, snapshot, staged

from .sharing_cases import known_pair, limits_mb, paired_jobs, running, shared, with_memory


@pytest.mark.parametrize("name", [staged("fifo", "gandiva-share"), "antman", staged("fifo", "antman-share")], ids=str)
def test_packs_of_a_resident_and_a_joining_job_have_limits_too(name: str) -> None:
    """4,400 and 6,600 MB leave 2,500 each of 16,000."""
    spec = {} if str(name) == "fifo+gandiva-share" else {"gpu_class": "opportunistic"}
    resident, joining = running("resident", "t4-00", **spec), job("joining", max_gpus=1, submit_s=1.0, **spec)
    used = {"resident": JobUse("resident", 0.5, 4000, 600.0), "joining": JobUse("joining", 0.5, 6000, 600.0)}
    pairs = known_pair("resident", "joining", 0.7), known_pair("joining", "resident", 0.7)
    state = shared(snapshot("t4:1x1", [resident, joining]), **used)
    assert limits_mb(make_policy(name)[0].decide(with_memory(state, 16_000, *pairs))) == [(6900, 9100)]
    assert limits_mb(make_policy(name)[0].decide(with_memory(state, 10_999, *pairs))) == []
    unknown = shared(snapshot("t4:1x1", [resident, joining]), **used | {"resident": JobUse("resident", 0.5, 0, 600.0)})
    assert limits_mb(make_policy(name)[0].decide(with_memory(unknown, 16_000, *pairs))) == []


# Stages, worked by hand.


def test_a_new_job_gets_a_slice_at_once_though_the_cluster_is_full() -> None:
    resident = running("resident", "t4-00", preemptible=True)
    new = job("new", max_gpus=1, submit_s=900.0)
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(
        shared(snapshot("t4:1x1", [resident, new]), new=JobUse("new"))
    )
    (group,) = plan.shared
    assert [pack.jobs for pack in group.packs] == [("resident",), ("new",)]
    assert plan.assignments["new"].reason.code is ReasonCode.FIRST_SLICE
    had = JobUse("new", 0.9, 0, 60.0, 990.0)
    now = running("new", "t4-00", submit_s=900.0)
    after = shared(snapshot("t4:1x1", [resident, now]), group, new=had, resident=JobUse("resident", 0.9, 0, 900.0))
    seen = dataclasses.replace(
        after.sharing, pairs=(known_pair("new", "resident", 0.4), known_pair("resident", "new", 0.4))
    )  # type: ignore[type-var]
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(dataclasses.replace(after, sharing=seen))
    assert plan.shared == ()
    assert set(plan.waiting) == {"new"}
    good = dataclasses.replace(
        after.sharing, pairs=(known_pair("new", "resident", 0.7), known_pair("resident", "new", 0.7))
    )  # type: ignore[type-var]
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(dataclasses.replace(after, sharing=good))
    assert [pack.jobs for pack in plan.shared[0].packs] == [("resident", "new")], (
        "its profile shows that they go together"
    )


def test_a_joining_job_gets_gpus_of_its_own_from_the_policy_in_front() -> None:
    resident, joining = running("resident", "t4-00"), running("joining", "t4-00", submit_s=1.0)
    packed = SharedGpus("t4-00", 1, (Pack(("resident", "joining")),))
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(
        shared(snapshot("t4:2x1", [resident, joining]), packed)
    )
    assert plan.shared == ()
    assert {a.placement.nodes for a in plan.assignments.values()} == {("t4-00",), ("t4-01",)}


def test_a_joining_job_stays_for_a_while_though_others_would_be_better_beside_its_resident_job() -> None:
    """`early` beside `a` and `joining` beside `b` gain 0.9 + 0.6; `joining` where it is 0.3, and that it need not move
    counts 1."""
    residents = [running("a", "t4-00"), running("b", "t4-01")]
    joining, early = running("joining", "t4-00", submit_s=2.0), job("early", max_gpus=1, submit_s=1.0)
    packed = SharedGpus("t4-00", 1, (Pack(("a", "joining")),))
    totals = {("a", "joining"): 1.3, ("b", "joining"): 1.6, ("a", "early"): 1.9, ("b", "early"): 0.9}
    pairs = tuple(known_pair(*pair, total / 2) for both, total in totals.items() for pair in (both, both[::-1]))

    def paired(moved_s: float, *seen: PackSeen) -> set[tuple[str, ...]]:
        used = {name: JobUse(name, 0.5, 1000, 600.0) for name in ("a", "b", "early")}
        used["joining"] = JobUse("joining", 0.5, 1000, 600.0, moved_s)
        state = shared(snapshot("t4:2x1", [*residents, joining, early]), packed, seen=seen, **used)
        assert state.sharing is not None
        state = dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, pairs=pairs))
        return paired_jobs(make_policy(staged("fifo", "gandiva-share"))[0].decide(state))

    assert paired(881.0) == {("a", "joining")}, "119 s ago"
    assert paired(880.0) == {("a", "early"), ("b", "joining")}
    bad = PackSeen(("a", "joining"), "t4", (0.4, 0.4))
    assert paired(881.0, bad) == {("a", "early"), ("b", "joining")}, "it must leave"


@pytest.mark.parametrize("name", ["antman", staged("fifo", "antman-share")], ids=str)
def test_a_joining_job_of_a_guaranteed_job_stays_for_a_while_beside_it(name: str) -> None:
    """`early` would get the GPU that is used less."""
    residents = [running("a", "t4-00", gpu_class="guaranteed"), running("b", "t4-01", gpu_class="guaranteed")]
    joining = running("joining", "t4-00", submit_s=2.0, gpu_class="opportunistic")
    early = job("early", max_gpus=1, submit_s=1.0, gpu_class="opportunistic")
    beside = SharedGpus("t4-00", 1, (Pack(("a", "joining"), guaranteed="a"),))
    used = {"a": JobUse("a", 0.2, 1000, 600.0), "b": JobUse("b", 0.8, 1000, 600.0)}
    for moved_s, paired in ((881.0, {("a", "joining"), ("b", "early")}), (880.0, {("a", "early"), ("b", "joining")})):
        its_use = JobUse("joining", 0.5, 1000, 600.0, moved_s)
        state = shared(snapshot("t4:2x1", [*residents, joining, early]), beside, joining=its_use, **used)
        assert paired_jobs(make_policy(name)[0].decide(state)) == paired
    gone = shared(snapshot("t4:2x1", [residents[1], joining, running("c", "t4-00")]), beside, joining=its_use, **used)
    assert paired_jobs(make_policy(name)[0].decide(gone)) == {("c", "joining")}, "its resident job has ended"


def test_a_first_slice_is_had_where_it_was_begun() -> None:
    """`early` has waited longer, and there is one resident that may give up a slice."""
    resident, new = running("resident", "t4-00"), running("new", "t4-00", submit_s=2.0)
    early = job("early", max_gpus=1, submit_s=1.0)
    time_slices = SharedGpus("t4-00", 1, (Pack(("resident",)), Pack(("new",))))
    for ran_s, shares in ((30.0, "new"), (60.0, "early")):
        used = {"new": JobUse("new", None, 0, ran_s, 940.0), "early": JobUse("early")}
        plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(
            shared(snapshot("t4:1x1", [resident, new, early]), time_slices, **used)
        )
        assert [group.jobs for group in plan.shared] == [("resident", shares)]


@pytest.mark.parametrize("name", [staged("fifo", "gandiva-share"), "antman", staged("fifo", "antman-share")], ids=str)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING])
def test_a_joining_job_on_its_way_is_not_sent_elsewhere(name: str, phase: Phase) -> None:
    """A node beside its resident job's is free: it goes on to its resident job, and waits if that is gone and others
    have its GPUs."""
    gandiva = str(name).endswith("gandiva-share")
    resident = running("resident", "t4-00", gpu_class="guaranteed", preemptible=True)
    if gandiva:
        resident = running("resident", "t4-00")
    where = on("t4", t4_00=1)
    spec = {"min_gpus": 1, "max_gpus": 1} | ({} if gandiva else {"gpu_class": "opportunistic"})
    held = where if phase is Phase.STARTING else on("t4", t4_02=1)
    joining = job("joining", phase=phase, allocation=held, target=where, submit_s=1.0, **spec)
    packed = SharedGpus("t4-00", 1, (Pack(("resident", "joining"), guaranteed=None if gandiva else "resident"),))
    plan = make_policy(name)[0].decide(shared(snapshot("t4:3x1", [resident, joining]), packed))
    assert plan.assignments["joining"].placement == where
    assert plan.assignments["joining"].reason.code is ReasonCode.IN_FLIGHT
    assert [pack.jobs for group in plan.shared for pack in group.packs] == [("resident", "joining")]
    assert plan.shared[0].packs[0].guaranteed == packed.packs[0].guaranteed
    other = running("other", "t4-00", gpu_class="guaranteed")
    plan = make_policy(name)[0].decide(shared(snapshot("t4:3x1", [other, joining]), packed))
    assert set(plan.waiting) == {"joining"}


def test_a_joining_job_on_its_way_to_its_first_slice_gets_it() -> None:
    resident, where = running("resident", "t4-00"), on("t4", t4_00=1)
    joining = job("joining", phase=Phase.STARTING, allocation=where, target=where, max_gpus=1, submit_s=1.0)
    time_slices = SharedGpus("t4-00", 1, (Pack(("resident",)), Pack(("joining",))))
    state = shared(snapshot("t4:2x1", [resident, joining]), time_slices, joining=JobUse("joining"))
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(state)
    assert plan.shared == (time_slices,)
    assert plan.assignments["joining"].placement == where
