"""Synergy's stages: CPU and memory behind any policy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile
from penstock_scheduler.model import Phase, Placement, Plan, Share, Snapshot, StopCode
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord, dump_round, load_round
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.tuning import (
    PAPER,
    REFERENCE,
    Amount,
    Claim,
    NodeCapacity,
    TuneSettings,
    ask,
    optimum,
    relative_speed,
    tune,
)
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import job, snapshot, staged, with_facts

IMAGE = Sensitivity(1, (1, 3, 6, 9, 12), (60_000, 120_000), ((0.3, 0.3), (1, 1), (1.75, 1.75), (2, 2), (2, 3)))
LANGUAGE = Sensitivity(1, (1, 3), (20_000, 60_000), ((1, 1), (1, 1)))
ROOM = NodeCapacity("n0", 4, 12, 240_000, 3.0, 60_000.0)


def profile(table: Sensitivity) -> SensitivityProfile:
    return SensitivityProfile("model", (table,))


def test_a_demand_is_met_from_what_others_do_not_need():
    """12 CPUs: the image model wants 12 and 120 GB, the language model 1: 13 > 12, so the first has them, and gives back."""
    claims = [Claim("image", 1, IMAGE, (0,)), Claim("language", 1, LANGUAGE, (0,))]
    grants = tune(claims, [ROOM], TuneSettings.model_validate(PAPER))
    assert grants is not None
    assert grants["image"].amount == Amount(3, 60_000)
    assert grants["language"].amount == Amount(1, 20_000)


def test_what_is_spare_is_handed_out():
    """As above, but of the 8 CPUs that are left the image model takes 6 - 3: with 9 of 11 CPUs it is at 2."""
    claims = [Claim("image", 1, IMAGE, (0,)), Claim("language", 1, LANGUAGE, (0,))]
    grants = tune(claims, [ROOM], TuneSettings())
    assert grants is not None
    assert grants["image"].amount == Amount(9, 60_000)


def test_the_tightest_node_is_taken_and_by_the_reference_the_first():
    rooms = [ROOM, dataclasses.replace(ROOM, name="n1", gpus=2, cpus=6, memory_mb=120_000)]
    claim = [Claim("language", 1, LANGUAGE, (0, 1))]
    tight, first = tune(claim, rooms, TuneSettings()), tune(claim, rooms, TuneSettings.model_validate(REFERENCE))
    assert tight is not None
    assert first is not None
    assert (tight["language"].node, first["language"].node) == (1, 0)


def test_nodes_of_another_ratio_have_other_parts():
    rich = NodeCapacity("rich", 4, 48, 240_000, 12.0, 60_000.0)
    assert ask(Claim("j", 1, None, (0,)), rich) == Amount(12, 60_000)
    assert ask(Claim("j", 1, IMAGE, (0,)), rich) == Amount(12, 120_000)
    assert ask(Claim("j", 1, IMAGE, (0,), may_exceed=False), ROOM) == Amount(3, 60_000)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Claim], list[NodeCapacity]]:
    """Jobs that fit by GPUs on nodes of mixed ratios, some of them running."""
    rooms = []
    for index in range(draw(st.integers(1, 4))):
        gpus, per_gpu = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 3, 5, 6.5]))
        memory = draw(st.sampled_from([20_000, 62_500, 100_001]))
        rooms.append(
            NodeCapacity(f"n{index}", gpus, int(gpus * per_gpu), gpus * memory, int(gpus * per_gpu) / gpus, memory)
        )
    claims = []
    for index, room in enumerate(rooms):
        for number in range(draw(st.integers(0, room.gpus))):
            table = draw(st.sampled_from([IMAGE, LANGUAGE, None]))
            movable = draw(st.booleans())
            claims.append(Claim(f"{index}-{number}", 1, table, tuple(range(len(rooms))), None, movable))
    return claims, rooms


@settings(max_examples=80)
@given(rounds(), st.sampled_from([{}, PAPER, REFERENCE]))
def test_no_job_is_below_its_proportional_speed_and_no_node_gives_more_than_it_has(
    generated: tuple[list[Claim], list[NodeCapacity]], rules: dict[str, object]
):
    claims, rooms = generated
    grants = tune(claims, rooms, TuneSettings.model_validate(rules))
    assert grants is not None, "single GPUs always find a node"
    assert grants.keys() == {claim.job for claim in claims}
    for index, room in enumerate(rooms):
        here = [(claim, grants[claim.job].amount) for claim in claims if grants[claim.job].node == index]
        assert sum(claim.gpus for claim, _ in here) <= room.gpus
        assert sum(amount.cpus for _, amount in here) <= room.cpus
        assert sum(amount.memory_mb for _, amount in here) <= room.memory_mb
        for claim, amount in here:
            part = room.proportional(claim.gpus)
            assert claim.table is None or (
                claim.table.speed(amount.cpus, amount.memory_mb) >= claim.table.speed(part.cpus, part.memory_mb)
            )
            assert claim.table is not None or amount == part
            assert claim.may_exceed or amount.within(part)


@settings(max_examples=40)
@given(st.integers(1, 4), st.lists(st.sampled_from([IMAGE, LANGUAGE, None]), max_size=16), st.integers(1, 7))
def test_no_round_beats_the_optimum_and_none_is_worse_than_proportional(
    nodes: int, tables: list[Sensitivity | None], cpus_per_gpu: int
):
    rooms = [
        NodeCapacity(f"n{index}", 4, 4 * cpus_per_gpu, 240_000, float(cpus_per_gpu), 60_000.0) for index in range(nodes)
    ]
    claims = [Claim(str(number), 1, table, tuple(range(nodes))) for number, table in enumerate(tables[: 4 * nodes])]
    best, _ = optimum(claims, rooms)
    for rules in ({}, PAPER, REFERENCE):
        grants = tune(claims, rooms, TuneSettings.model_validate(rules))
        assert grants is not None
        value = sum(
            relative_speed(claim.table, 1, rooms[grants[claim.job].node], grants[claim.job].amount) for claim in claims
        )
        assert best.report.bound >= value - 1e-6
        assert value >= len(claims) - 1e-9, "1 for each with the proportional share"


# Behind a policy.


def on(node: str, cpus: int = 0, memory_mb: int = 0) -> Placement:
    return Placement("v100", "all", (Share(node, 1, cpus, memory_mb),))


def known(shot: Snapshot, **tables: Sensitivity) -> Snapshot:
    return with_facts(shot, sensitivity={name: profile(table) for name, table in tables.items()})


def decide(shot: Snapshot, stage: str = "synergy-tune") -> Plan:
    return make_policy(staged("fifo", stage))[0].decide(shot)


def share(plan: Plan, job_id: str) -> tuple[str, int, int]:
    found = plan.assignments[job_id].placement.shares[0]
    return found.node, found.cpus, found.memory_mb


NODES = nodes_from_spec("v100:2x4:12c:240g")


def test_a_job_starts_with_its_demand_and_the_reason_says_so():
    shot = known(
        snapshot(NODES, [job("i", max_gpus=1), job("l", max_gpus=1), job("x", max_gpus=1)]), i=IMAGE, l=LANGUAGE
    )
    plan = decide(shot)
    assert share(plan, "i")[1:] == (12, 120_000)
    assert share(plan, "l")[1:] == (1, 20_000)
    assert share(plan, "x")[1:] == (3, 60_000), "its need is unknown"
    assert share(plan, "i")[0] != share(plan, "l")[0], "the image model takes a node's CPUs"
    assert "12 CPUs and 120000 MB, 3.00 times as fast" in plan.assignments["i"].reason.text
    assert "no profile" in plan.assignments["x"].reason.text


def test_every_stage_gives_the_parts_if_nothing_is_known():
    shot = snapshot(NODES, [job("a", max_gpus=1), job("b", max_gpus=4)])
    for stage in ("proportional", "synergy-tune", "synergy-opt"):
        plan = decide(shot, stage)
        assert share(plan, "a")[1:] == (3, 60_000)
        assert share(plan, "b")[1:] == (12, 240_000)


def test_a_running_job_keeps_its_share():
    running = job("l", max_gpus=1, phase=Phase.RUNNING, allocation=on("v100-00", 2, 30_000))
    plan = decide(known(snapshot(NODES, [running]), l=LANGUAGE))
    assert share(plan, "l") == ("v100-00", 2, 30_000)
    assert plan.assignments["l"].placement.suits(on("v100-00", 2, 30_000))


def test_a_running_job_gives_back_what_a_new_job_needs():
    """One node; the image model holds all 12 CPUs, and a job of 1 GPU comes, whose part is 3."""
    nodes = nodes_from_spec("v100:1x4:12c:240g")
    greedy = job("i", max_gpus=1, phase=Phase.RUNNING, allocation=on("v100-00", 12, 120_000))
    plan = decide(known(snapshot(nodes, [greedy, job("x", max_gpus=1)]), i=IMAGE), "synergy-tune:paper")
    assert share(plan, "i") == ("v100-00", 3, 60_000)
    assert share(plan, "x") == ("v100-00", 3, 60_000)
    assert "restarts for another share" in plan.assignments["i"].reason.text
    assert not plan.assignments["i"].placement.suits(greedy.allocation)  # type: ignore[arg-type]
    stop = plan.stops["i"]
    assert (stop.code, stop.makes_room_for) == (StopCode.PREEMPTED, "x")
    assert stop.text == "from 12 CPUs and 120000 MB to 3 CPUs and 60000 MB on node v100-00: makes room for job x"


def test_a_running_job_gives_back_what_other_users_jobs_have_taken():
    (node,) = nodes_from_spec("v100:1x4:12c:240g")
    greedy = job("i", max_gpus=1, phase=Phase.RUNNING, allocation=on("v100-00", 12, 120_000))
    plan = decide(known(snapshot((dataclasses.replace(node, cpus_others=8),), [greedy]), i=IMAGE))
    assert share(plan, "i")[1] < 12
    assert plan.stops["i"].text.endswith("jobs that Penstock does not manage need the rest")


def test_a_job_that_may_not_be_restarted_gets_no_more_than_its_part():
    plan = decide(known(snapshot(NODES, [job("i", max_gpus=1, preemptible=False)]), i=IMAGE))
    assert share(plan, "i")[1:] == (3, 60_000)


def test_a_restart_for_more_must_pay():
    """From 3 CPUs to 12 it is three times as fast: worth it for one that ran an hour, not for one that has just come."""
    for ran_s, expected in ((3600.0, 12), (10.0, 3)):
        held = job("i", max_gpus=1, phase=Phase.RUNNING, allocation=on("v100-00", 3, 60_000))
        shot = known(snapshot(NODES, [held], attained={"i": {"v100": ran_s}}), i=IMAGE)
        plan = decide(shot)
        assert share(plan, "i")[1] == expected
        assert ["on node v100-00: about 3 times as fast" in stop.text for stop in plan.stops.values()] == [True] * (
            expected == 12
        )


def test_a_gain_of_three_percent_is_no_reason_for_a_restart_however_long_the_job_ran():
    table = Sensitivity(1, (3, 12), (60_000,), ((1,), (1.03,)))
    held = job("i", max_gpus=1, phase=Phase.RUNNING, allocation=on("v100-00", 3, 60_000))
    plan = decide(known(snapshot(NODES, [held], attained={"i": {"v100": 1e6}}), i=table))
    assert share(plan, "i")[1] == 3
    assert not plan.stops


def test_a_running_job_of_unknown_share_keeps_running():
    """It runs with what its user asked Slurm for, as before the stage was switched on."""
    running = job("i", max_gpus=1, phase=Phase.RUNNING, allocation=on("v100-00"))
    plan = decide(known(snapshot(NODES, [running]), i=IMAGE))
    assert share(plan, "i") == ("v100-00", 0, 0)
    assert plan.assignments["i"].placement.suits(on("v100-00", 7, 1))


def test_a_cluster_that_gives_out_no_memory_is_tuned_by_cpus():
    nodes = nodes_from_spec("v100:1x4:24c")
    plan = decide(known(snapshot(nodes, [job("i", max_gpus=1), job("l", max_gpus=1)]), i=IMAGE, l=LANGUAGE))
    assert share(plan, "i")[1:] == (12, 0)
    assert share(plan, "l")[1:] == (1, 0)


def test_where_memory_is_not_given_out_a_demand_is_no_slower_than_the_proportional_part():
    """A second CPU brings 1.8 %: less than counts as saturated (2 %), so that one CPU is the demand. Memory of 0 means that the
    cluster gives out none, not that the job has none: by that speed, any demand would do."""
    table = Sensitivity(1, (1, 2), (20_000, 60_000), ((0.982, 0.982), (1, 1)))
    room = NodeCapacity("n0", 1, 2, 0, 2.0, 0.0)
    claim = Claim("j", 1, table, (0,))
    wants = ask(claim, room)
    assert relative_speed(table, 1, room, wants) >= 1
    grants = tune([claim], [room], TuneSettings())
    assert grants is not None
    assert relative_speed(table, 1, room, grants["j"].amount) >= 1


def test_the_optimum_of_a_node_beats_the_rules():
    """12 CPUs, two image models: the rules give one 9 and the other 3, worth 3; the program 6 and 6, worth 3.5."""
    nodes = nodes_from_spec("v100:1x2:12c:480g")
    shot = known(snapshot(nodes, [job("a", max_gpus=1), job("b", max_gpus=1)]), a=IMAGE, b=IMAGE)
    tuned, best = decide(shot), decide(shot, "synergy-opt")

    def value(plan: Plan) -> float:
        return sum(IMAGE.speed(*share(plan, name)[1:]) for name in ("a", "b"))

    assert value(best) == 3.5
    assert value(tuned) <= value(best)


def test_a_round_with_stages_is_decided_again_to_the_same_plan():
    shot = known(snapshot(NODES, [job("i", max_gpus=1), job("l", max_gpus=1)]), i=IMAGE, l=LANGUAGE)
    policy, in_full = make_policy(staged("sia", "synergy-tune:reference"))
    plan = policy.decide(shot)
    record = load_round(dump_round(RoundRecord(shot, in_full, plan)), "here")
    again, _ = make_policy(record.policy)
    assert dataclasses.replace(again.decide(record.snapshot), solve=None) == dataclasses.replace(plan, solve=None)


def test_settings_are_by_part():
    _, in_full = make_policy(staged("sia", "synergy-tune:reference", sia={"fairness_p": -1.0}))
    assert in_full.settings["sia"]["fairness_p"] == -1.0
    assert in_full.settings["synergy-tune:reference"]["variant"] == "reference"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (staged("synergy-tune"), r"is a stage, .* stages = \['synergy-tune'\]"),
        (staged("sia", "fifo"), "'fifo' is a policy, not a stage"),
        (staged("sia", "synergy-tune", solver={"gap": 0.1}), "no part 'solver'"),
        (staged("sia", "synergy-tune", synergy_tune={"variant": "x"}), "policy.synergy-tune"),
        (staged("sia", "synergy-tune", synergy_tune={"spare": False}), "use synergy-tune:paper"),
    ],
)
def test_a_wrong_name_or_setting_is_explained(choice: PolicyChoice, said: str):
    with pytest.raises(ConfigError, match=said):
        make_policy(choice)
