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
from penstock_scheduler.policies import make_policy
from tests.scheduler.builders import job, on, snapshot, staged

from .sharing_cases import known_pair, limits_mb, paired_jobs, running, shared, with_memory


@pytest.mark.parametrize("name", [staged("fifo", "gandiva-share"), "antman", staged("fifo", "antman-share")], ids=str)
def test_packs_of_a_resident_and_a_joining_job_have_limits_too(name: str) -> None:
    """4,400 and 6,600 MB leave 2,500 each of 16,000."""
    spec = {} if str(name) == "fifo+gandiva-share" else {"gpu_class": "opportunistic"}
    host, guest = running("host", "t4-00", **spec), job("guest", max_gpus=1, submit_s=1.0, **spec)
    used = {"host": JobUse("host", 0.5, 4000, 600.0), "guest": JobUse("guest", 0.5, 6000, 600.0)}
    pairs = known_pair("host", "guest", 0.7), known_pair("guest", "host", 0.7)
    state = shared(snapshot("t4:1x1", [host, guest]), **used)
    assert limits_mb(make_policy(name)[0].decide(with_memory(state, 16_000, *pairs))) == [(6900, 9100)]
    assert limits_mb(make_policy(name)[0].decide(with_memory(state, 10_999, *pairs))) == []
    unknown = shared(snapshot("t4:1x1", [host, guest]), **used | {"host": JobUse("host", 0.5, 0, 600.0)})
    assert limits_mb(make_policy(name)[0].decide(with_memory(unknown, 16_000, *pairs))) == []


# Stages, worked by hand.


def test_a_new_job_gets_a_slice_at_once_though_the_cluster_is_full() -> None:
    host = running("host", "t4-00", preemptible=True)
    new = job("new", max_gpus=1, submit_s=900.0)
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(
        shared(snapshot("t4:1x1", [host, new]), new=JobUse("new"))
    )
    (group,) = plan.shared
    assert [pack.jobs for pack in group.packs] == [("host",), ("new",)]
    assert plan.assignments["new"].reason.code is ReasonCode.FIRST_SLICE
    had = JobUse("new", 0.9, 0, 60.0, 990.0)
    now = running("new", "t4-00", submit_s=900.0)
    after = shared(snapshot("t4:1x1", [host, now]), group, new=had, host=JobUse("host", 0.9, 0, 900.0))
    seen = dataclasses.replace(after.sharing, pairs=(known_pair("new", "host", 0.4), known_pair("host", "new", 0.4)))  # type: ignore[type-var]
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(dataclasses.replace(after, sharing=seen))
    assert plan.shared == ()
    assert set(plan.waiting) == {"new"}
    good = dataclasses.replace(after.sharing, pairs=(known_pair("new", "host", 0.7), known_pair("host", "new", 0.7)))  # type: ignore[type-var]
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(dataclasses.replace(after, sharing=good))
    assert [pack.jobs for pack in plan.shared[0].packs] == [("host", "new")], "its profile shows that they go together"


def test_a_joining_job_gets_gpus_of_its_own_from_the_policy_in_front() -> None:
    host, guest = running("host", "t4-00"), running("guest", "t4-00", submit_s=1.0)
    packed = SharedGpus("t4-00", 1, (Pack(("host", "guest")),))
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(shared(snapshot("t4:2x1", [host, guest]), packed))
    assert plan.shared == ()
    assert {a.placement.nodes for a in plan.assignments.values()} == {("t4-00",), ("t4-01",)}


def test_a_joining_job_stays_for_a_while_though_others_would_be_better_beside_its_resident_job() -> None:
    """`early` beside `a` and `guest` beside `b` gain 0.9 + 0.6; `guest` where it is 0.3, and that it need not move
    counts 1."""
    hosts = [running("a", "t4-00"), running("b", "t4-01")]
    guest, early = running("guest", "t4-00", submit_s=2.0), job("early", max_gpus=1, submit_s=1.0)
    packed = SharedGpus("t4-00", 1, (Pack(("a", "guest")),))
    totals = {("a", "guest"): 1.3, ("b", "guest"): 1.6, ("a", "early"): 1.9, ("b", "early"): 0.9}
    pairs = tuple(known_pair(*pair, total / 2) for both, total in totals.items() for pair in (both, both[::-1]))

    def paired(moved_s: float, chosen: dict[str, object] | None = None, *seen: PackSeen) -> set[tuple[str, ...]]:
        used = {name: JobUse(name, 0.5, 1000, 600.0) for name in ("a", "b", "early")}
        used["guest"] = JobUse("guest", 0.5, 1000, 600.0, moved_s)
        state = shared(snapshot("t4:2x1", [*hosts, guest, early]), packed, seen=seen, **used)
        assert state.sharing is not None
        state = dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, pairs=pairs))
        return paired_jobs(make_policy(staged("fifo", "gandiva-share", gandiva_share=chosen or {}))[0].decide(state))

    assert paired(881.0) == {("a", "guest")}, "119 s ago"
    assert paired(880.0) == {("a", "early"), ("b", "guest")}
    assert paired(881.0, {"pack_interval_s": 60.0}) == {("a", "early"), ("b", "guest")}
    bad = PackSeen(("a", "guest"), "t4", (0.4, 0.4))
    assert paired(881.0, None, bad) == {("a", "early"), ("b", "guest")}, "it must leave"


@pytest.mark.parametrize("name", ["antman", staged("fifo", "antman-share")], ids=str)
def test_a_joining_job_of_a_guaranteed_job_stays_for_a_while_beside_it(name: str) -> None:
    """`early` would get the GPU that is used less."""
    hosts = [running("a", "t4-00", gpu_class="guaranteed"), running("b", "t4-01", gpu_class="guaranteed")]
    guest = running("guest", "t4-00", submit_s=2.0, gpu_class="opportunistic")
    early = job("early", max_gpus=1, submit_s=1.0, gpu_class="opportunistic")
    beside = SharedGpus("t4-00", 1, (Pack(("a", "guest"), guaranteed="a"),))
    used = {"a": JobUse("a", 0.2, 1000, 600.0), "b": JobUse("b", 0.8, 1000, 600.0)}
    for moved_s, paired in ((881.0, {("a", "guest"), ("b", "early")}), (880.0, {("a", "early"), ("b", "guest")})):
        its_use = JobUse("guest", 0.5, 1000, 600.0, moved_s)
        state = shared(snapshot("t4:2x1", [*hosts, guest, early]), beside, guest=its_use, **used)
        assert paired_jobs(make_policy(name)[0].decide(state)) == paired
    gone = shared(snapshot("t4:2x1", [hosts[1], guest, running("c", "t4-00")]), beside, guest=its_use, **used)
    assert paired_jobs(make_policy(name)[0].decide(gone)) == {("c", "guest")}, "its resident job has ended"


def test_a_first_slice_is_had_where_it_was_begun() -> None:
    """`early` has waited longer, and there is one host that may give up a slice."""
    host, new = running("host", "t4-00"), running("new", "t4-00", submit_s=2.0)
    early = job("early", max_gpus=1, submit_s=1.0)
    turns = SharedGpus("t4-00", 1, (Pack(("host",)), Pack(("new",))))
    for ran_s, shares in ((30.0, "new"), (60.0, "early")):
        used = {"new": JobUse("new", None, 0, ran_s, 940.0), "early": JobUse("early")}
        plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(
            shared(snapshot("t4:1x1", [host, new, early]), turns, **used)
        )
        assert [group.jobs for group in plan.shared] == [("host", shares)]


@pytest.mark.parametrize("name", [staged("fifo", "gandiva-share"), "antman", staged("fifo", "antman-share")], ids=str)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING])
def test_a_joining_job_on_its_way_is_not_sent_elsewhere(name: str, phase: Phase) -> None:
    """A node beside its resident job's is free: it goes on to its resident job, and waits if that is gone and others
    have its GPUs."""
    gandiva = str(name).endswith("gandiva-share")
    host = running("host", "t4-00", gpu_class="guaranteed", preemptible=True)
    if gandiva:
        host = running("host", "t4-00")
    where = on("t4", t4_00=1)
    spec = {"min_gpus": 1, "max_gpus": 1} | ({} if gandiva else {"gpu_class": "opportunistic"})
    held = where if phase is Phase.STARTING else on("t4", t4_02=1)
    guest = job("guest", phase=phase, allocation=held, target=where, submit_s=1.0, **spec)
    packed = SharedGpus("t4-00", 1, (Pack(("host", "guest"), guaranteed=None if gandiva else "host"),))
    plan = make_policy(name)[0].decide(shared(snapshot("t4:3x1", [host, guest]), packed))
    assert plan.assignments["guest"].placement == where
    assert plan.assignments["guest"].reason.code is ReasonCode.IN_FLIGHT
    assert [pack.jobs for group in plan.shared for pack in group.packs] == [("host", "guest")]
    assert plan.shared[0].packs[0].guaranteed == packed.packs[0].guaranteed
    other = running("other", "t4-00", gpu_class="guaranteed")
    plan = make_policy(name)[0].decide(shared(snapshot("t4:3x1", [other, guest]), packed))
    assert set(plan.waiting) == {"guest"}


def test_a_joining_job_on_its_way_to_its_first_slice_gets_it() -> None:
    host, where = running("host", "t4-00"), on("t4", t4_00=1)
    guest = job("guest", phase=Phase.STARTING, allocation=where, target=where, max_gpus=1, submit_s=1.0)
    turns = SharedGpus("t4-00", 1, (Pack(("host",)), Pack(("guest",))))
    state = shared(snapshot("t4:2x1", [host, guest]), turns, guest=JobUse("guest"))
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(state)
    assert plan.shared == (turns,)
    assert plan.assignments["guest"].placement == where
