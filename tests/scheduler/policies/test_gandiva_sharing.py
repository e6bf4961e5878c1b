"""Gandiva with shared GPUs: worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import (
    GpuLimit,
    Job,
    JobUse,
    Limit,
    Pack,
    PackSeen,
    Partition,
    Phase,
    ReasonCode,
    SharedGpus,
    Snapshot,
)
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.sharing.rules import broken
from tests.scheduler.builders import job, on, snapshot

from .sharing_cases import limits_mb, running, shared, with_memory


def test_gandiva_gives_time_slices_when_all_gpus_are_taken() -> None:
    """Six jobs of one GPU on one node of four: all of them are on it, in time slices."""
    state = shared(snapshot("t4:1x4", [job(str(n), max_gpus=1, submit_s=n) for n in range(6)]))
    plan = make_policy("gandiva")[0].decide(state)
    (group,) = plan.shared
    assert (group.gpus, len(group.packs), group.time_sliced) == (4, 6, True)
    assert plan.assignments["5"].reason.code is ReasonCode.SHARES
    assert "67% of the time" in plan.assignments["5"].reason.text


def test_gandiva_fills_by_size_and_queues_above_the_height() -> None:
    jobs = [running("a", "t4-00"), running("b", "t4-01", 2), job("c", max_gpus=1), job("d", min_gpus=2, max_gpus=2)]
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x4", jobs)))
    assert plan.assignments["c"].placement.nodes == ("t4-00",)
    assert plan.assignments["d"].placement.nodes == ("t4-01",)
    many = [job(str(n), min_gpus=4, max_gpus=4, submit_s=n) for n in range(3)]
    plan = make_policy("gandiva", {"max_height": 2.0})[0].decide(shared(snapshot("t4:1x4", many)))
    assert set(plan.waiting) == {"2"}


def test_gandiva_packs_what_has_been_profiled_and_undoes_what_does_not_pay() -> None:
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    time_slices = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    state = shared(snapshot("t4:1x1", jobs), time_slices)
    packed = make_policy("gandiva")[0].decide(state)
    assert [pack.jobs for group in packed.shared for pack in group.packs] == [("a", "b")]
    new = shared(snapshot("t4:1x1", jobs), time_slices, b=JobUse("any"))
    alone = make_policy("gandiva")[0].decide(new)
    assert [pack.jobs for group in alone.shared for pack in group.packs] == [("a",), ("b",)]
    for speeds, packs in (((0.6, 0.6), [("a", "b")]), ((0.6, 0.3), [("a",), ("b",)]), ((1.0, 0.0), [("a",), ("b",)])):
        seen = [PackSeen(("a", "b"), "t4", speeds)]
        plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", jobs), *packed.shared, seen=seen))
        assert [pack.jobs for group in plan.shared for pack in group.packs] == packs


def test_gandiva_goes_by_the_last_of_several_slices() -> None:
    """As after a time in which no round was decided."""
    packed = SharedGpus("t4-00", 1, (Pack(("a", "b")),))
    for told, packs in (((0.3, 0.3), [("a",), ("b",)]), ((0.3, 0.7), [("a", "b")]), ((0.7, 0.3), [("a",), ("b",)])):
        seen = [PackSeen(("a", "b"), "t4", (0.6, speed)) for speed in told]
        state = shared(snapshot("t4:1x1", [running("a", "t4-00"), running("b", "t4-00")]), packed, seen=seen)
        plan = make_policy("gandiva")[0].decide(state)
        assert [pack.jobs for group in plan.shared for pack in group.packs] == packs


def test_gandiva_never_packs_more_than_the_memory() -> None:
    """1,000 MB and a tenth more of each are 2,200; what else there is they share."""
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    time_slices = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    state = shared(snapshot("t4:1x1", jobs), time_slices)
    for memory_mb, limits in ((2199, []), (2200, [(1100, 1100)]), (16_000, [(8000, 8000)])):
        plan = make_policy("gandiva")[0].decide(with_memory(state, memory_mb))
        assert limits_mb(plan) == limits
        assert len(plan.shared[0].packs) == (1 if limits else 2)
    unknown = shared(snapshot("t4:1x1", jobs), time_slices, b=JobUse("any", 0.5, 0, 600.0, None))
    assert limits_mb(make_policy("gandiva")[0].decide(with_memory(unknown, 16_000))) == []
    assert limits_mb(make_policy("gandiva")[0].decide(unknown)) == [(0, 0)], "the GPU's memory is unknown, too"


def test_gandiva_takes_a_pack_apart_that_has_grown_beyond_the_memory() -> None:
    """Limits stay while they do; 9,000 MB are more than 8,000, and a tenth more of each makes 9,900 + 1,100 of
    16,000."""
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    packed = SharedGpus("t4-00", 1, (Pack(("a", "b"), limits=(Limit(memory_mb=8000), Limit(memory_mb=8000))),))
    for a_mb, b_mb, limits in ((7000, 8000, [(8000, 8000)]), (9000, 1000, [(12_400, 3600)]), (9000, 6000, [])):
        used = {"a": JobUse("any", 0.5, a_mb, 600.0), "b": JobUse("any", 0.5, b_mb, 600.0)}
        for settings_ in ({}, {"mode": "reactive"}):
            state = with_memory(shared(snapshot("t4:1x1", jobs), packed, **used), 16_000)
            plan = make_policy("gandiva", settings_)[0].decide(state)
            assert limits_mb(plan) == limits
            assert plan.shared[0].time_sliced is not bool(limits)
            assert broken(state, plan) == ()


def test_gandiva_migrates_off_nodes_with_time_slices_but_not_soon_after_a_move() -> None:
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    time_slices = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x1", jobs), time_slices))
    assert {a.placement.nodes for a in plan.assignments.values()} == {("t4-00",), ("t4-01",)}
    assert plan.shared == ()
    rested = {name: JobUse("any", None, 0, 600.0, 700.0) for name in "ab"}
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x1", jobs), time_slices, **rested))
    assert plan.shared == (time_slices,)


def test_gandiva_takes_a_pack_apart_when_gpus_come_free() -> None:
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    packed = SharedGpus("t4-00", 1, (Pack(("a", "b")),))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x1", jobs), packed))
    assert plan.shared == ()
    assert plan.assignments["b"].placement.nodes == ("t4-01",)


def test_gandiva_brings_free_gpus_together() -> None:
    """One GPU is free on each of two nodes of two; a job of two needs both on one."""
    jobs = [running("a", "t4-00"), running("b", "t4-01"), job("c", min_gpus=2, max_gpus=2)]
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x2", jobs)))
    assert plan.shared == ()
    assert plan.assignments["a"].placement.nodes == plan.assignments["b"].placement.nodes
    assert plan.assignments["c"].placement.nodes != plan.assignments["a"].placement.nodes


def idle(state: Snapshot, *since_s: float, node: str = "t4-00") -> Snapshot:
    return dataclasses.replace(state, idle_since_s={node: since_s})


def test_gandiva_grows_1_2_4_and_shrinks_when_a_job_arrives() -> None:
    grows = {"min_gpus": 1, "max_gpus": 4, "grow_shrink": True}
    state = idle(shared(snapshot("t4:1x4", [job("a", **grows)])), 0.0, 0.0, 0.0, 0.0)
    assert make_policy("gandiva")[0].decide(state).assignments["a"].placement.gpus == 1
    alone = running("a", "t4-00", **grows)
    state = idle(shared(snapshot("t4:1x4", [alone])), 0.0, 0.0, 0.0)
    plan = make_policy("gandiva")[0].decide(state)
    assert plan.assignments["a"].placement.gpus == 4
    full = dataclasses.replace(alone, allocation=on("t4", t4_00=4))
    just_moved = JobUse("any", 0.5, 1000, 600.0, 990.0)
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x4", [full, job("b", max_gpus=1)]), a=just_moved))
    assert (plan.assignments["a"].placement.gpus, plan.assignments["b"].placement.gpus) == (1, 1)
    assert plan.shared == ()


def test_a_job_between_two_runs_goes_on_to_where_gandiva_sent_it() -> None:
    """A round may come when it has left its GPUs and not begun on others: it grows all the same, or makes room for
    another."""
    grows = {"min_gpus": 1, "max_gpus": 4, "grow_shrink": True}

    def gpus(nodes: str, *jobs: Job) -> dict[str, dict[str, int]]:
        plan = make_policy("gandiva")[0].decide(shared(snapshot(nodes, list(jobs))))
        return {each: {s.node: s.gpus for s in given.placement.shares} for each, given in plan.assignments.items()}

    grown = job("a", target=on("t4", t4_00=4), **grows)
    assert gpus("t4:1x4", grown) == {"a": {"t4-00": 4}}
    assert gpus("t4:1x4", grown, job("b", max_gpus=1)) == {"a": {"t4-00": 1}, "b": {"t4-00": 1}}
    assert gpus("t4:1x2", grown) == {"a": {"t4-00": 1}}, "there are not as many any more"
    assert gpus("t4:1x4", dataclasses.replace(grown, partitions=("fast",))) == {}
    stays = dataclasses.replace(running("c", "t4-00", max_gpus=2), allocation=on("t4", t4_00=2))
    makes_room = job("a", max_gpus=1, target=on("t4", t4_00=1))
    large = job("b", min_gpus=4, max_gpus=4, submit_s=1.0)
    found = gpus("t4:2x4", stays, makes_room, large)
    assert found == {"a": {"t4-00": 1}, "b": {"t4-01": 4}, "c": {"t4-00": 2}}


@pytest.mark.parametrize(
    ("since_s", "moved_s", "gpus"),
    [
        ((600.0, 650.0, 700.0), 400.0, 4),
        ((600.0, 700.0, 701.0), 400.0, 2),
        ((600.0, 701.0, 701.0), 400.0, 2),
        ((701.0, 701.0, 701.0), 400.0, 1),
        ((), 400.0, 1),
        ((600.0, 600.0, 600.0), 401.0, 1),
    ],
)
def test_gandiva_grows_only_into_gpus_that_have_been_idle_for_long(
    since_s: tuple[float, ...], moved_s: float, gpus: int
) -> None:
    """At 1000 s, five minutes after 700 and ten after 400: from one GPU to two takes one that is idle, to four takes
    three."""
    alone = running("a", "t4-00", min_gpus=1, max_gpus=4, grow_shrink=True)
    state = shared(snapshot("t4:1x4", [alone]), a=JobUse("any", 0.5, 1000, 600.0, moved_s))
    plan = make_policy("gandiva")[0].decide(idle(state, *since_s))
    assert plan.assignments["a"].placement.gpus == gpus


def test_two_that_grow_do_not_get_the_same_idle_gpus() -> None:
    grows = {"min_gpus": 1, "max_gpus": 4, "grow_shrink": True}
    state = shared(snapshot("t4:1x4", [running("a", "t4-00", **grows), running("b", "t4-00", **grows)]))
    for since_s, gpus in (((0.0, 0.0), [2, 2]), ((0.0, 900.0), [1, 2])):
        plan = make_policy("gandiva")[0].decide(idle(state, *since_s))
        assert sorted(given.placement.gpus for given in plan.assignments.values()) == gpus


def test_gandiva_shrinks_no_more_jobs_than_must_be() -> None:
    """Of nodes of four: one that has grown keeps its GPUs while others are free, or where the one who waits may not
    go."""
    grows = {"min_gpus": 1, "max_gpus": 4, "grow_shrink": True}

    def gpus(nodes: str, *jobs: Job) -> dict[str, int]:
        plan = make_policy("gandiva")[0].decide(shared(snapshot(nodes, list(jobs))))
        return {each: given.placement.gpus for each, given in plan.assignments.items()}

    a = dataclasses.replace(running("a", "t4-00", **grows), allocation=on("t4", t4_00=4))
    b = dataclasses.replace(running("b", "t4-01", **grows), allocation=on("t4", t4_01=4))
    new = job("c", max_gpus=1)
    assert gpus("t4:2x4", a, new) == {"a": 4, "c": 1}, "the other node is empty"
    full = running("full", "a10g-00", 4, gpu_types=["a10g"])
    full = dataclasses.replace(full, allocation=on("a10g", a10g_00=4))
    other = job("c", min_gpus=4, max_gpus=4, gpu_types=["a10g"])
    again = dataclasses.replace(other, id="d", submit_s=1.0)
    assert gpus("a10g:1x4,t4:1x4", a, full, other, again) == {"a": 4, "full": 4, "c": 4}, "d waits, and not for t4"
    assert gpus("t4:1x4", a, dataclasses.replace(new, partitions=("fast",))) == {"a": 4}, "of another partition"
    assert gpus("t4:2x4", a, b, new) == {"a": 1, "b": 4, "c": 1}, "one node is enough"


def test_gandiva_shrinks_for_pieces_and_under_a_limit() -> None:
    grows = {"min_gpus": 1, "max_gpus": 2, "grow_shrink": True}
    a = dataclasses.replace(running("a", "t4-00", **grows), allocation=on("t4", t4_00=2))
    b = dataclasses.replace(running("b", "t4-01", **grows), allocation=on("t4", t4_01=2))
    firm = job("c", min_gpus=2, max_gpus=2, preemptible=False)
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x2", [a, b, firm])))
    assert {job_id: given.placement.gpus for job_id, given in plan.assignments.items()} == {"a": 1, "b": 1}
    text = "gives back 1 of its 2 GPUs, by which it has grown, because other jobs need them"
    assert {job_id: stop.text for job_id, stop in plan.stops.items()} == {"a": text, "b": text}
    state = shared(snapshot("t4:2x2", [a, job("c", max_gpus=1)]))
    for gpus, has in ((2, {"a": 1, "c": 1}), (1, {"a": 2})):
        limited = dataclasses.replace(state, limits=(GpuLimit("user", "ada", gpus),))
        plan = make_policy("gandiva")[0].decide(limited)
        assert {job_id: given.placement.gpus for job_id, given in plan.assignments.items()} == has


@pytest.mark.parametrize("fewest", [1, 2])
def test_gandiva_never_migrates_a_job_to_a_size_that_its_spec_does_not_allow(fewest: int) -> None:
    """A job may run with fewer GPUs than its spec allows, for example after its user changed the spec."""
    small = running("a", "t4-00", min_gpus=fewest, max_gpus=2, adaptivity="strong-scaling")
    beside = dataclasses.replace(running("b", "t4-01"), spec=job("b", max_gpus=1, preemptible=False).spec)
    plan = make_policy("gandiva")[0].decide(
        shared(snapshot("t4:2x2", [small, beside, job("c", min_gpus=2, max_gpus=2)]))
    )
    moved = plan.assignments["a"].placement != small.allocation
    assert moved == (fewest == 1), "it makes room for job c only where it still runs as its spec says"


def test_gandiva_never_lets_a_job_have_time_slices_that_may_not_be_stopped() -> None:
    """Not while it waits, nor with one that comes after it, nor while it starts."""
    firm = job("b", max_gpus=1, preemptible=False)
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", [running("a", "t4-00"), firm])))
    assert (plan.shared, set(plan.assignments), set(plan.waiting)) == ((), {"a"}, {"b"})
    others = [running("a", "t4-00"), firm, job("c", max_gpus=1, submit_s=1.0)]
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", others)))
    assert (plan.shared[0].jobs, set(plan.waiting)) == (("a", "c"), {"b"}), (
        "a job that may be stopped does not wait with it"
    )
    where = on("t4", t4_00=1)
    starting = dataclasses.replace(firm, phase=Phase.STARTING, allocation=where, target=where)
    for each in (firm, starting):
        plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", [each, job("c", max_gpus=1, submit_s=1.0)])))
        assert (plan.shared, set(plan.assignments), set(plan.waiting)) == ((), {"b"}, {"c"})


def test_gandiva_lets_the_hopeless_trials_of_a_search_rest() -> None:
    """Three have reached the first rung and one is on the way there: the best of them goes on, with a GPU to itself."""
    jobs = [running(name, "t4-00", trial_group="search", submit_s=n) for n, name in enumerate("abcd")]
    results = {"a": 0.3, "b": 0.7, "c": 0.5, "d": 0.1}
    told = {
        name: JobUse("t", ran_s=100.0 if name == "d" else 400.0, results=((60.0, m),)) for name, m in results.items()
    }
    time_slices = SharedGpus("t4-00", 2, tuple(Pack((name,)) for name in "abcd"))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x2", jobs), time_slices, **told))
    assert set(plan.assignments) == {"b", "d"}
    assert {reason.code for reason in plan.waiting.values()} == {ReasonCode.STOPPED_BY_GROUP}
    assert plan.shared == ()


def test_gandiva_gives_time_slices_to_trials_by_what_they_have_shown() -> None:
    """Of six that reached the first rung the best two go on; a first slice comes before them, and who is not judged yet
    after."""
    names = ["new", "young", "other", *"abcdef"]
    groups = [None if name == "other" else "search" for name in names]
    jobs = [running(name, "t4-00", trial_group=its) for name, its in zip(names, groups, strict=True)]
    told = {name: JobUse("t", ran_s=400.0, results=((60.0, n / 10),)) for n, name in enumerate("abcdef")}
    told |= {"new": JobUse("t", ran_s=30.0), "young": JobUse("t", ran_s=100.0, results=((60.0, 1.0),))}
    time_slices = SharedGpus("t4-00", 2, tuple(Pack((name,)) for name in names))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x2", jobs), time_slices, **told))
    (group,) = plan.shared
    assert {pack.jobs[0]: (pack.search, pack.rank) for pack in group.packs} == {
        "new": ("ada:search", 0),
        "f": ("ada:search", 1),
        "e": ("ada:search", 2),
        "young": ("ada:search", 3),
        "other": ("", 0),
    }


def test_gandiva_decides_although_the_partition_of_a_job_that_starts_goes_down():
    """The job is on its way to its node, so it is not running yet; the policy still sees it there."""
    where = on("t4", t4_00=1)
    starting = job("a", phase=Phase.STARTING, allocation=where, target=where, max_gpus=1)
    state = shared(snapshot("t4:1x1", [starting]))
    closed = dataclasses.replace(state, partitions=(Partition("all", may_start=False, state="DOWN"),))
    plan = make_policy("gandiva")[0].decide(closed)
    assert set(plan.assignments) | set(plan.waiting) == {"a"}
