"""Policies and stages by which jobs share GPUs: what every plan keeps to, round after round; and each of them worked by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import Phase as Drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_scheduler.model import (
    GpuClass,
    GpuLimit,
    Job,
    JobUse,
    KnownPair,
    Limit,
    Pack,
    PackSeen,
    Phase,
    Plan,
    ReasonCode,
    SharedGpus,
    SharingState,
    Snapshot,
)
from penstock_scheduler.policies import REGISTRY, STAGES, common, make_policy, sharing_parts
from penstock_scheduler.policies.colocation import in_transit
from penstock_scheduler.policy_choice import PolicyChoice
from penstock_scheduler.sharing.packing import most_used_mb
from penstock_scheduler.sharing.rules import broken
from penstock_scheduler.sharing.slices import next_packs
from tests.scheduler.builders import job, on, snapshot, staged
from tests.scheduler.policies.test_properties import TYPES, snapshots

NAMES: list[tuple[PolicyChoice | str, dict[str, object]]] = [
    ("gandiva", {}),
    ("gandiva", {"interval_s": 0.0, "pack_interval_s": 0.0, "max_height": 2.0}),
    ("gandiva", {"mode": "reactive"}),
    ("antman", {"interval_s": 0.0, "quotas": {"maths": 3}}),
    ("antman", {"default_class": "opportunistic"}),
    (staged("sia", "gandiva-share"), {}),
    (staged("fifo", "gandiva-share", gandiva_share={"first_slices": 1.0}), {}),
    (staged("las", "antman-share", antman_share={"default_class": "opportunistic"}), {}),
    (staged("sia", "antman-share"), {}),
]
MEMORY_MB = 16_000


@st.composite
def uses(draw: st.DrawFn, jobs: Iterable[Job], now_s: float) -> dict[str, JobUse]:
    kinds = st.sampled_from(["a", "b", "c"])
    found = {}
    for each in jobs:
        profiled = draw(st.booleans())
        found[each.id] = JobUse(
            draw(kinds),
            draw(st.sampled_from([0.2, 0.5, 1.0])) if profiled else None,
            draw(st.sampled_from([0, 4_000, 9_000, 15_500])) if profiled else 0,
            draw(st.sampled_from([0.0, 30.0, 600.0])),
            draw(st.sampled_from([None, now_s - 60, now_s - 5000])),
        )
    return found


@st.composite
def sharing(draw: st.DrawFn) -> tuple[Snapshot, list[dict[str, JobUse]], list[float], list[Phase]]:
    state = draw(snapshots())
    classes = [draw(st.sampled_from([None, *GpuClass])) for _ in state.jobs]
    grows = [draw(st.booleans()) for _ in state.jobs]
    jobs = tuple(
        dataclasses.replace(each, spec=each.spec.model_copy(update={"gpu_class": its, "grow_shrink": grow}))
        for each, its, grow in zip(state.jobs, classes, grows, strict=True)
    )
    pairs = tuple(
        KnownPair(gpu_type, mine, theirs, draw(st.sampled_from([0.3, 0.5, 0.8])))
        for gpu_type in TYPES
        for mine in "ab"
        for theirs in "ab"
    )
    memory = draw(st.sampled_from([{}, dict.fromkeys(TYPES, MEMORY_MB)]))
    rounds = [draw(uses(jobs, state.time_s)) for _ in range(3)]
    idle_s = {node.name: (state.time_s - draw(st.sampled_from([0.0, 1000.0])),) * node.gpus for node in state.nodes}
    told = SharingState(pairs=pairs, gpu_memory_mb=memory)
    state = dataclasses.replace(state, jobs=jobs, sharing=told, idle_since_s=idle_s)
    speeds = [draw(st.sampled_from([0.2, 0.4, 0.7])) for _ in range(3)]
    ways = [draw(st.sampled_from([Phase.RUNNING, Phase.STARTING, Phase.QUEUED])) for _ in range(3)]
    return state, rounds, speeds, ways


def followed(state: Snapshot, plan: Plan, its_uses: dict[str, JobUse], speed: float, there: Phase) -> Snapshot:
    """The next round's snapshot, if all that was planned was done; `there`: how far those are who were sent somewhere."""
    jobs = []
    for each in state.jobs:
        given = plan.assignments.get(each.id)
        where = None if given is None else given.placement
        stays = each.phase is Phase.RUNNING and each.allocation == where
        phase = Phase.QUEUED if given is None else Phase.RUNNING if stays else there
        target = None if phase is Phase.RUNNING else where
        held = None if phase is Phase.QUEUED else where
        jobs.append(dataclasses.replace(each, phase=phase, allocation=held, target=target))
    assert state.sharing is not None
    seen = tuple(
        PackSeen(pack.jobs, plan.assignments[pack.jobs[0]].placement.gpu_type, (speed, speed))
        for group in plan.shared
        for pack in group.packs
        if len(pack.jobs) == 2 and pack.guaranteed is None
        if all(each.phase is Phase.RUNNING for each in jobs if each.id in pack.jobs)
    )
    told = dataclasses.replace(state.sharing, groups=plan.shared, uses=its_uses, seen=seen)
    return dataclasses.replace(state, round=state.round + 1, time_s=state.time_s + 60, jobs=tuple(jobs), sharing=told)


@pytest.mark.parametrize(("name", "chosen"), NAMES)
@settings(max_examples=12, phases=[Drawing.explicit, Drawing.reuse, Drawing.generate])  # shrinking takes minutes
@given(given_=sharing())
def test_every_plan_keeps_the_rules_round_after_round(
    name: str, chosen: dict[str, object], given_: tuple[Snapshot, list[dict[str, JobUse]], list[float], list[Phase]]
) -> None:
    state, rounds, speeds, ways = given_
    state = dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, uses=rounds[0]))  # type: ignore[type-var]
    for its_uses, speed, there in zip([*rounds[1:], rounds[0]], speeds, ways, strict=True):
        assert state.sharing is not None
        plan = make_policy(name, chosen)[0].decide(state)
        jobs = {each.id: each for each in state.jobs}
        assert broken(state, plan) == ()
        assert not set(plan.assignments) & set(plan.waiting)
        assert set(plan.assignments) | set(plan.waiting) == set(jobs)
        placements = {job_id: given.placement for job_id, given in plan.assignments.items()}
        for group in plan.shared:
            assert not group.time_sliced or all(jobs[each].movable for each in group.jobs)
            memory_mb = state.sharing.gpu_memory_mb.get(placements[group.jobs[0]].gpu_type, 0)
            for pack in group.packs:
                together = most_used_mb(pack, state.sharing.uses, placements)
                assert len(pack.jobs) == 1 or not memory_mb or together <= memory_mb
                if len(pack.jobs) > 1 and memory_mb:
                    for each in set(pack.jobs) - {pack.guaranteed}:
                        assert pack.limit(each).memory_mb >= max(state.sharing.use(each).memory_mb, 1)
                    if pack.guaranteed is None:
                        assert sum(pack.limit(each).memory_mb for each in pack.jobs) <= memory_mb
                its = [] if pack.guaranteed else [_class(jobs[each]) for each in pack.jobs]
                assert pack.priority >= max(its, default=0)
        for job_id, where in placements.items():
            each = jobs[job_id]
            if where != each.allocation and job_id not in common.pinned(state):
                assert each.spec.allows(where.gpu_type, where.gpus)
                assert where.partition in each.partitions
        bad = {frozenset(seen.jobs) for seen in state.sharing.seen if sum(seen.speeds) <= 1}
        kept = {frozenset(pack.jobs) for group in plan.shared for pack in group.packs if len(pack.jobs) == 2}
        assert not bad & kept, "packs that do not pay are undone after one slice"
        again = make_policy(name, chosen)[0].decide(dataclasses.replace(state, jobs=state.jobs[::-1]))
        assert again.chosen == plan.chosen, "whatever the order of the jobs"
        assert set(again.shared) == set(plan.shared)
        for job_id in in_transit(state):
            going = jobs[job_id].target
            assert job_id not in placements or going is None or placements[job_id].suits(going)
        state = followed(state, plan, its_uses, speed, there)


def _class(each: Job) -> int:
    return 1 if each.spec.gpu_class is GpuClass.GUARANTEED else 0


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.floats(0, 1000)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_a_higher_priority_is_never_suspended_for_a_lower(packs: list[tuple[int, int, float]], gpus: int) -> None:
    """Nobody who waits would find room if all who are less important left."""
    line = [Pack((str(n),), wanted, priority) for n, (wanted, priority, _) in enumerate(packs)]
    served = {pack: packs[n][2] for n, pack in enumerate(line)}
    chosen = next_packs(line, served, gpus)
    for pack in line:
        rest = [other for other in chosen if other.priority >= pack.priority]
        if pack not in chosen and pack.gpus <= gpus:
            assert sum(other.gpus for other in rest) + pack.gpus > gpus


def test_without_agents_nobody_shares() -> None:
    jobs = [job(str(n), min_gpus=1, max_gpus=1) for n in range(6)]
    for name, _ in NAMES:
        plan = make_policy(name)[0].decide(snapshot("t4:1x4", jobs))
        assert plan.shared == ()
        assert len(plan.assignments) == 4, name


def test_parts_that_need_agents_are_known_by_name() -> None:
    composed = staged("sia", "synergy-tune", "antman-share", partitions={"debug": "gandiva"})
    assert sharing_parts(composed) == ["gandiva", "antman-share"]
    assert sharing_parts("sia") == []
    assert {name for name in (*REGISTRY, *STAGES) if sharing_parts(name)} == {
        "gandiva",
        "antman",
        "gandiva-share",
        "antman-share",
    }


# Gandiva, worked by hand.


def shared(state: Snapshot, *groups: SharedGpus, seen: Iterable[PackSeen] = (), **its_uses: JobUse) -> Snapshot:
    known = {each.id: JobUse("any", 0.5, 1000, 600.0, None) for each in state.jobs} | its_uses
    return dataclasses.replace(state, sharing=SharingState(groups, known, tuple(seen)))


def running(job_id: str, node: str, gpus: int = 1, **more: object) -> Job:
    held = on("t4", **{node.replace("-", "_"): gpus})
    fields = {"min_gpus": gpus, "max_gpus": gpus} | more
    return job(job_id, phase=Phase.RUNNING, allocation=held, **fields)  # type: ignore[arg-type]


def test_gandiva_gives_turns_when_all_gpus_are_taken() -> None:
    """Six jobs of one GPU on one node of four: all of them are on it, in turns."""
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
    turns = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    state = shared(snapshot("t4:1x1", jobs), turns)
    packed = make_policy("gandiva")[0].decide(state)
    assert [pack.jobs for group in packed.shared for pack in group.packs] == [("a", "b")]
    new = shared(snapshot("t4:1x1", jobs), turns, b=JobUse("any"))
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


def with_memory(state: Snapshot, memory_mb: int, *pairs: KnownPair) -> Snapshot:
    """With GPUs of so much memory."""
    assert state.sharing is not None
    told = dataclasses.replace(state.sharing, gpu_memory_mb={"t4": memory_mb}, pairs=(*state.sharing.pairs, *pairs))
    return dataclasses.replace(state, sharing=told)


def limits_mb(plan: Plan) -> list[tuple[int, ...]]:
    """Of each pack of several jobs."""
    packs = [pack for group in plan.shared for pack in group.packs if len(pack.jobs) > 1]
    return [tuple(pack.limit(each).memory_mb for each in pack.jobs) for pack in packs]


def test_gandiva_never_packs_more_than_the_memory() -> None:
    """1,000 MB and a tenth more of each are 2,200; what else there is they share."""
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    turns = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    state = shared(snapshot("t4:1x1", jobs), turns)
    for memory_mb, limits in ((2199, []), (2200, [(1100, 1100)]), (16_000, [(8000, 8000)])):
        plan = make_policy("gandiva")[0].decide(with_memory(state, memory_mb))
        assert limits_mb(plan) == limits
        assert len(plan.shared[0].packs) == (1 if limits else 2)
    unknown = shared(snapshot("t4:1x1", jobs), turns, b=JobUse("any", 0.5, 0, 600.0, None))
    assert limits_mb(make_policy("gandiva")[0].decide(with_memory(unknown, 16_000))) == []
    assert limits_mb(make_policy("gandiva")[0].decide(unknown)) == [(0, 0)], "nobody knows what the GPU has either"


def test_gandiva_takes_a_pack_apart_that_has_grown_beyond_the_memory() -> None:
    """Limits stay while they do; 9,000 MB are more than 8,000, and a tenth more of each makes 9,900 + 1,100 of 16,000."""
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


@pytest.mark.parametrize("name", [staged("fifo", "gandiva-share"), "antman", staged("fifo", "antman-share")], ids=str)
def test_packs_of_a_host_and_its_guest_have_limits_too(name: str) -> None:
    """4,400 and 6,600 MB leave 2,500 each of 16,000."""
    spec = {} if str(name) == "fifo+gandiva-share" else {"gpu_class": "opportunistic"}
    host, guest = running("host", "t4-00", **spec), job("guest", max_gpus=1, submit_s=1.0, **spec)
    used = {"host": JobUse("host", 0.5, 4000, 600.0), "guest": JobUse("guest", 0.5, 6000, 600.0)}
    pairs = _pair("host", "guest", 0.7), _pair("guest", "host", 0.7)
    state = shared(snapshot("t4:1x1", [host, guest]), **used)
    assert limits_mb(make_policy(name)[0].decide(with_memory(state, 16_000, *pairs))) == [(6900, 9100)]
    assert limits_mb(make_policy(name)[0].decide(with_memory(state, 10_999, *pairs))) == []
    unknown = shared(snapshot("t4:1x1", [host, guest]), **used | {"host": JobUse("host", 0.5, 0, 600.0)})
    assert limits_mb(make_policy(name)[0].decide(with_memory(unknown, 16_000, *pairs))) == []


def test_gandiva_migrates_off_nodes_with_turns_but_not_soon_after_a_move() -> None:
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    turns = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x1", jobs), turns))
    assert {a.placement.nodes for a in plan.assignments.values()} == {("t4-00",), ("t4-01",)}
    assert plan.shared == ()
    rested = {name: JobUse("any", None, 0, 600.0, 700.0) for name in "ab"}
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:2x1", jobs), turns, **rested))
    assert plan.shared == (turns,)


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


def test_gandiva_grows_1_2_4_and_shrinks_when_somebody_comes() -> None:
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


def test_who_is_between_two_runs_goes_on_to_where_gandiva_sent_it() -> None:
    """A round may come when it has left its GPUs and not begun on others: it grows all the same, or makes room for another."""
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
    """At 1000 s, five minutes after 700 and ten after 400: from one GPU to two takes one that is idle, to four takes three."""
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
    """Of nodes of four: one that has grown keeps its GPUs while others are free, or where the one who waits may not go."""
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
    state = shared(snapshot("t4:2x2", [a, job("c", max_gpus=1)]))
    for gpus, has in ((2, {"a": 1, "c": 1}), (1, {"a": 2})):
        limited = dataclasses.replace(state, limits=(GpuLimit("user", "ada", gpus),))
        plan = make_policy("gandiva")[0].decide(limited)
        assert {job_id: given.placement.gpus for job_id, given in plan.assignments.items()} == has


def test_gandiva_never_lets_a_job_take_turns_that_may_not_be_stopped() -> None:
    """Not while it waits, nor with one that comes after it, nor while it starts."""
    firm = job("b", max_gpus=1, preemptible=False)
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", [running("a", "t4-00"), firm])))
    assert (plan.shared, set(plan.assignments), set(plan.waiting)) == ((), {"a"}, {"b"})
    others = [running("a", "t4-00"), firm, job("c", max_gpus=1, submit_s=1.0)]
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", others)))
    assert (plan.shared[0].jobs, set(plan.waiting)) == (("a", "c"), {"b"}), "who may be stopped does not wait with it"
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
    turns = SharedGpus("t4-00", 2, tuple(Pack((name,)) for name in "abcd"))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x2", jobs), turns, **told))
    assert set(plan.assignments) == {"b", "d"}
    assert {reason.code for reason in plan.waiting.values()} == {ReasonCode.STOPPED_BY_GROUP}
    assert plan.shared == ()


def test_gandiva_gives_turns_to_trials_by_what_they_have_shown() -> None:
    """Of six that reached the first rung the best two go on; a first slice comes before them, and who is not judged yet after."""
    names = ["new", "young", "other", *"abcdef"]
    groups = [None if name == "other" else "search" for name in names]
    jobs = [running(name, "t4-00", trial_group=its) for name, its in zip(names, groups, strict=True)]
    told = {name: JobUse("t", ran_s=400.0, results=((60.0, n / 10),)) for n, name in enumerate("abcdef")}
    told |= {"new": JobUse("t", ran_s=30.0), "young": JobUse("t", ran_s=100.0, results=((60.0, 1.0),))}
    turns = SharedGpus("t4-00", 2, tuple(Pack((name,)) for name in names))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x2", jobs), turns, **told))
    (group,) = plan.shared
    assert {pack.jobs[0]: (pack.search, pack.rank) for pack in group.packs} == {
        "new": ("ada:search", 0),
        "f": ("ada:search", 1),
        "e": ("ada:search", 2),
        "young": ("ada:search", 3),
        "other": ("", 0),
    }


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


def test_antman_prefers_gpus_that_nobody_has() -> None:
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


def test_an_antman_guest_has_room_for_all_that_it_has_used() -> None:
    """Of 16,000 MB `b` leaves 9,000 and `a` 10,000; a newcomer of whom nothing is known leaves the least, 1,024."""
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
    """One GPU for each of those that run, and what pairs of host and guest train together, relative to alone."""
    jobs = [running(name, f"t4-{n:02d}", gpu_class="opportunistic") for n, name in enumerate(running_)]
    nodes = f"t4:{len(jobs)}x1"
    jobs += [job(name, max_gpus=1, gpu_class="opportunistic", submit_s=n + 1.0) for n, name in enumerate(waiting)]
    state = shared(snapshot(nodes, jobs), **{each.id: JobUse(each.id, 0.5, 1000, 600.0) for each in jobs})
    assert state.sharing is not None
    pairs = [_pair(one, other, total / 2) for both, total in totals.items() for one, other in (both, both[::-1])]
    return dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, pairs=tuple(pairs)))


def _paired(plan: Plan) -> set[tuple[str, ...]]:
    return {pack.jobs for group in plan.shared for pack in group.packs if len(pack.jobs) > 1}


def test_antman_pairs_opportunistic_jobs_so_that_all_together_train_most() -> None:
    """1.4 + 1.9 beats 1.5 + 1.1, though `c` has waited longer and would have more beside `a`."""
    totals = {("a", "c"): 1.5, ("b", "c"): 1.4, ("a", "d"): 1.9, ("b", "d"): 1.1}
    plan = make_policy("antman")[0].decide(_opportunists(totals, "ab", "cd"))
    assert _paired(plan) == {("a", "d"), ("b", "c")}
    assert plan.waiting == {}
    alone = make_policy("antman")[0].decide(_opportunists({("a", "c"): 1.0, ("a", "d"): 0.9}, "a", "cd"))
    assert (_paired(alone), set(alone.waiting)) == (set(), {"c", "d"}), "turns are as good"


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_antman_finds_the_best_of_all_pairings(hosts: int, guests: int, data: st.DataObject) -> None:
    """Up to six jobs, all pairings tried: none gains more than the plan's."""
    names = "abc"[:hosts], "xyz"[:guests]
    total = st.sampled_from([0.7, 1.0, 1.1, 1.25, 1.5, 1.6, 1.9])
    totals = {(host, guest): data.draw(total) for host in names[0] for guest in names[1]}
    plan = make_policy("antman")[0].decide(_opportunists(totals, *names))
    assert all(totals[pair] > 1 for pair in _paired(plan))  # type: ignore[index]
    gained = sum(totals[pair] - 1 for pair in _paired(plan))  # type: ignore[index]
    places = [*names[0], *[None] * guests]
    best = max(
        sum(max(totals[host, guest] - 1, 0.0) for guest, host in zip(names[1], taken, strict=True) if host is not None)
        for taken in itertools.permutations(places, guests)
    )
    assert gained == pytest.approx(best)


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
    seen = dataclasses.replace(after.sharing, pairs=(_pair("new", "host", 0.4), _pair("host", "new", 0.4)))  # type: ignore[type-var]
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(dataclasses.replace(after, sharing=seen))
    assert plan.shared == ()
    assert set(plan.waiting) == {"new"}
    good = dataclasses.replace(after.sharing, pairs=(_pair("new", "host", 0.7), _pair("host", "new", 0.7)))  # type: ignore[type-var]
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(dataclasses.replace(after, sharing=good))
    assert [pack.jobs for pack in plan.shared[0].packs] == [("host", "new")], "its profile shows that they go together"


def _pair(mine: str, theirs: str, share: float) -> KnownPair:
    return KnownPair("t4", mine, theirs, share)


def test_a_guest_gets_gpus_of_its_own_from_the_policy_in_front() -> None:
    host, guest = running("host", "t4-00"), running("guest", "t4-00", submit_s=1.0)
    packed = SharedGpus("t4-00", 1, (Pack(("host", "guest")),))
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(shared(snapshot("t4:2x1", [host, guest]), packed))
    assert plan.shared == ()
    assert {a.placement.nodes for a in plan.assignments.values()} == {("t4-00",), ("t4-01",)}


def test_a_guest_stays_for_a_while_though_others_would_be_better_beside_its_host() -> None:
    """`early` beside `a` and `guest` beside `b` gain 0.9 + 0.6; `guest` where it is 0.3, and that it need not move counts 1."""
    hosts = [running("a", "t4-00"), running("b", "t4-01")]
    guest, early = running("guest", "t4-00", submit_s=2.0), job("early", max_gpus=1, submit_s=1.0)
    packed = SharedGpus("t4-00", 1, (Pack(("a", "guest")),))
    totals = {("a", "guest"): 1.3, ("b", "guest"): 1.6, ("a", "early"): 1.9, ("b", "early"): 0.9}
    pairs = tuple(_pair(*pair, total / 2) for both, total in totals.items() for pair in (both, both[::-1]))

    def paired(moved_s: float, chosen: dict[str, object] | None = None, *seen: PackSeen) -> set[tuple[str, ...]]:
        used = {name: JobUse(name, 0.5, 1000, 600.0) for name in ("a", "b", "early")}
        used["guest"] = JobUse("guest", 0.5, 1000, 600.0, moved_s)
        state = shared(snapshot("t4:2x1", [*hosts, guest, early]), packed, seen=seen, **used)
        assert state.sharing is not None
        state = dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, pairs=pairs))
        return _paired(make_policy(staged("fifo", "gandiva-share", gandiva_share=chosen or {}))[0].decide(state))

    assert paired(881.0) == {("a", "guest")}, "119 s ago"
    assert paired(880.0) == {("a", "early"), ("b", "guest")}
    assert paired(881.0, {"pack_interval_s": 60.0}) == {("a", "early"), ("b", "guest")}
    bad = PackSeen(("a", "guest"), "t4", (0.4, 0.4))
    assert paired(881.0, None, bad) == {("a", "early"), ("b", "guest")}, "it must leave"


@pytest.mark.parametrize("name", ["antman", staged("fifo", "antman-share")], ids=str)
def test_a_guest_of_a_guaranteed_job_stays_for_a_while_beside_it(name: str) -> None:
    """`early` would get the GPU that is used less."""
    hosts = [running("a", "t4-00", gpu_class="guaranteed"), running("b", "t4-01", gpu_class="guaranteed")]
    guest = running("guest", "t4-00", submit_s=2.0, gpu_class="opportunistic")
    early = job("early", max_gpus=1, submit_s=1.0, gpu_class="opportunistic")
    beside = SharedGpus("t4-00", 1, (Pack(("a", "guest"), guaranteed="a"),))
    used = {"a": JobUse("a", 0.2, 1000, 600.0), "b": JobUse("b", 0.8, 1000, 600.0)}
    for moved_s, paired in ((881.0, {("a", "guest"), ("b", "early")}), (880.0, {("a", "early"), ("b", "guest")})):
        its_use = JobUse("guest", 0.5, 1000, 600.0, moved_s)
        state = shared(snapshot("t4:2x1", [*hosts, guest, early]), beside, guest=its_use, **used)
        assert _paired(make_policy(name)[0].decide(state)) == paired
    gone = shared(snapshot("t4:2x1", [hosts[1], guest, running("c", "t4-00")]), beside, guest=its_use, **used)
    assert _paired(make_policy(name)[0].decide(gone)) == {("c", "guest")}, "its host has ended"


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
def test_a_guest_on_its_way_is_not_sent_elsewhere(name: str, phase: Phase) -> None:
    """A node beside its host's is free: it goes on to its host, and waits if that is gone and others have its GPUs."""
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


def test_a_guest_on_its_way_to_its_first_slice_gets_it() -> None:
    host, where = running("host", "t4-00"), on("t4", t4_00=1)
    guest = job("guest", phase=Phase.STARTING, allocation=where, target=where, max_gpus=1, submit_s=1.0)
    turns = SharedGpus("t4-00", 1, (Pack(("host",)), Pack(("guest",))))
    state = shared(snapshot("t4:2x1", [host, guest]), turns, guest=JobUse("guest"))
    plan = make_policy(staged("fifo", "gandiva-share"))[0].decide(state)
    assert plan.shared == (turns,)
    assert plan.assignments["guest"].placement == where


def test_an_antman_guest_on_its_way_keeps_its_gpus_when_its_host_has_gone() -> None:
    where = on("t4", t4_01=1)
    guest = job("guest", phase=Phase.STARTING, allocation=where, target=where, max_gpus=1, gpu_class="opportunistic")
    packed = SharedGpus("t4-01", 1, (Pack(("host", "guest"), guaranteed="host"),))
    plan = make_policy("antman")[0].decide(shared(snapshot("t4:2x1", [guest]), packed))
    assert plan.shared == ()
    assert plan.assignments["guest"].placement == where


def test_rules_that_a_plan_may_break_are_told() -> None:
    state = shared(snapshot("t4:1x1", [running("a", "t4-00"), running("b", "t4-00", preemptible=False)]))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", [running("a", "t4-00")])))
    twice = dataclasses.replace(plan, shared=(SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("a",)), Pack(("b",)))),))
    found = broken(state, twice)
    assert found[:2] == ("job a is in 2 packs", "job b shares GPUs and has no assignment")
    assert any("may not be stopped" in text for text in found)
    queued = shared(snapshot("t4:1x1", [running("a", "t4-00"), job("b", max_gpus=1, preemptible=False)]))
    assert any("may not be stopped" in text for text in broken(queued, twice)), "nor while it waits for its start"
    assert broken(dataclasses.replace(state, sharing=None), twice) == ("jobs share GPUs, but no agent runs",)


def test_packs_without_limits_of_memory_are_told() -> None:
    """4,000 MB were seen of `a` and 6,000 of `b`, on a GPU that has 16,000."""
    used = {"a": JobUse("a", 0.5, 4000, 600.0), "b": JobUse("b", 0.5, 6000, 600.0)}
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    turns = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    state = with_memory(shared(snapshot("t4:1x1", jobs), turns, **used), 16_000)
    plan = make_policy("gandiva")[0].decide(state)
    assert limits_mb(plan) == [(6900, 9100)]

    def found(*memory_mb: int, guaranteed: str | None = None) -> tuple[str, ...]:
        pack = Pack(("a", "b"), 1, 0, guaranteed, tuple(Limit(memory_mb=mb) for mb in memory_mb))
        return broken(state, dataclasses.replace(plan, shared=(SharedGpus("t4-00", 1, (pack,)),)))

    assert found(4000, 6000) == ()
    assert found() == (
        "job a has no memory limit in its pack and has used 4000 MB",
        "job b has no memory limit in its pack and has used 6000 MB",
    )
    assert found(9000, 5999) == ("job b has a memory limit of 5999 MB in its pack and has used 6000 MB",)
    assert found(9000, 7001) == ("jobs a, b use 16001 MB together on a GPU of 16000 MB",)
    assert found(0, 12_000, guaranteed="a") == ()
    assert found(0, 12_001, guaranteed="a") == ("jobs a, b use 16001 MB together on a GPU of 16000 MB",)
