"""Shared GPUs: what every plan keeps to, round after round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import Phase as Drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_scheduler.model import (
    GpuClass,
    Job,
    JobUse,
    KnownPair,
    Limit,
    Pack,
    PackSeen,
    Phase,
    Plan,
    SharedGpus,
    SharingState,
    Snapshot,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import REGISTRY, STAGES, common, make_policy, sharing_parts
from penstock_scheduler.rounds.policies.colocation import in_transit
from penstock_scheduler.rounds.policies.stops import stopped
from penstock_scheduler.rounds.sharing.packing import most_used_mb
from penstock_scheduler.rounds.sharing.rules import broken
from penstock_scheduler.rounds.sharing.slices import next_packs
from tests.constants import constants
from tests.scheduler.builders import job, snapshot, staged
from tests.scheduler.policies.test_properties import TYPES, snapshots

from .sharing_cases import limits_mb, running, shared, with_memory

NAMES: list[tuple[PolicyChoice | str, dict[str, object], dict[str, dict[str, float]]]] = [
    ("gandiva", {}, {}),
    ("gandiva", {"max_height": 2.0}, {"policy.gandiva": {"interval_s": 0.0, "pack_interval_s": 0.0}}),
    ("gandiva", {"mode": "reactive"}, {}),
    ("antman", {"quotas": {"maths": 3}}, {"policy.antman": {"interval_s": 0.0}}),
    ("antman", {"default_class": "opportunistic"}, {}),
    (staged("sia", "gandiva-share"), {}, {}),
    (staged("fifo", "gandiva-share"), {}, {"policy.gandiva-share": {"first_slices": 1.0}}),
    (staged("las", "antman-share", antman_share={"default_class": "opportunistic"}), {}, {}),
    (staged("sia", "antman-share"), {}, {}),
]
"""Policy, its settings, and constants of the test."""


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
    """The next round's snapshot, if all that was planned was done; `there`: how far those are who were sent
    somewhere."""
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


@pytest.mark.parametrize(("name", "chosen", "changed"), NAMES)
@settings(max_examples=12, phases=[Drawing.explicit, Drawing.reuse, Drawing.generate])  # shrinking takes minutes
@given(given_=sharing())
def test_every_plan_keeps_the_rules_round_after_round(
    name: str,
    chosen: dict[str, object],
    changed: dict[str, dict[str, float]],
    given_: tuple[Snapshot, list[dict[str, JobUse]], list[float], list[Phase]],
) -> None:
    with constants(changed):
        keeps_the_rules(name, chosen, *given_)


def keeps_the_rules(
    name: str,
    chosen: dict[str, object],
    state: Snapshot,
    rounds: list[dict[str, JobUse]],
    speeds: list[float],
    ways: list[Phase],
) -> None:
    state = dataclasses.replace(state, sharing=dataclasses.replace(state.sharing, uses=rounds[0]))  # type: ignore[type-var]
    for its_uses, speed, there in zip([*rounds[1:], rounds[0]], speeds, ways, strict=True):
        assert state.sharing is not None
        plan = make_policy(name, chosen)[0].decide(state)
        jobs = {each.id: each for each in state.jobs}
        assert broken(state, plan) == ()
        assert {each.id for each in stopped(state, plan)} <= plan.stops.keys(), "no stop without a reason"
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
    """No waiting job would fit if all less important jobs left."""
    line = [Pack((str(n),), wanted, priority) for n, (wanted, priority, _) in enumerate(packs)]
    served = {pack: packs[n][2] for n, pack in enumerate(line)}
    chosen = next_packs(line, served, gpus)
    for pack in line:
        rest = [other for other in chosen if other.priority >= pack.priority]
        if pack not in chosen and pack.gpus <= gpus:
            assert sum(other.gpus for other in rest) + pack.gpus > gpus


def test_without_agents_no_jobs_share_gpus() -> None:
    jobs = [job(str(n), min_gpus=1, max_gpus=1) for n in range(6)]
    for name, _, _ in NAMES:
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


def test_each_broken_rule_is_named() -> None:
    state = shared(snapshot("t4:1x1", [running("a", "t4-00"), running("b", "t4-00", preemptible=False)]))
    plan = make_policy("gandiva")[0].decide(shared(snapshot("t4:1x1", [running("a", "t4-00")])))
    twice = dataclasses.replace(plan, shared=(SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("a",)), Pack(("b",)))),))
    found = broken(state, twice)
    assert found[:2] == ("job a is in 2 packs", "job b shares GPUs and has no assignment")
    assert any("may not be stopped" in text for text in found)
    queued = shared(snapshot("t4:1x1", [running("a", "t4-00"), job("b", max_gpus=1, preemptible=False)]))
    assert any("may not be stopped" in text for text in broken(queued, twice)), "nor while it waits for its start"
    assert broken(dataclasses.replace(state, sharing=None), twice) == ("jobs share GPUs, but no agent runs",)


def test_packs_without_memory_limits_are_named() -> None:
    """4,000 MB were seen of `a` and 6,000 of `b`, on a GPU that has 16,000."""
    used = {"a": JobUse("a", 0.5, 4000, 600.0), "b": JobUse("b", 0.5, 6000, 600.0)}
    jobs = [running("a", "t4-00"), running("b", "t4-00")]
    time_slices = SharedGpus("t4-00", 1, (Pack(("a",)), Pack(("b",))))
    state = with_memory(shared(snapshot("t4:1x1", jobs), time_slices, **used), 16_000)
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


@pytest.mark.parametrize(("policy", "stage"), [("gandiva", "gandiva-share"), ("antman", "gandiva-share")])
def test_a_stage_that_shares_is_refused_behind_a_policy_that_shares(policy: str, stage: str) -> None:
    """Each would undo the other's time slices in every round: 22,761 restarts of 750 jobs."""
    with pytest.raises(ConfigError, match=f"{policy} shares GPUs itself, and would undo what {stage} decides; leave"):
        make_policy(staged(policy, stage))
