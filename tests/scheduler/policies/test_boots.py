"""Nodes that have to boot first: awake ones are taken before them, and a boot is a price and no reason to wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from penstock_scheduler.model import Assignment, Configuration, Node, Phase, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.placement import place
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.stops import with_reasons
from tests.scheduler.builders import job, on, snapshot, table

POLICIES = ("sia", "pollux", "gavel", "fifo", "srtf", "las", "ftf", "slurm-backfill", "gandiva", "antman")


def node(name: str, boot_s: float = 0.0, gpu_type: str = "t4", **more: object) -> Node:
    return Node(name, gpu_type, 4, ("all",), boot_s=boot_s, **more)  # type: ignore[arg-type]


def fits(nodes: tuple[Node, ...], option: Configuration) -> set[tuple[str, ...]]:
    """The nodes that the two ways to find some give a job."""
    found = FreeGpus(nodes).find(job("j"), [option])
    placed = place(nodes, {"j": option}, {"j": ("all",)}, {}, {}).placements["j"]
    assert found is not None
    return {found.nodes, placed.nodes}


def test_an_awake_node_is_taken_before_one_that_sleeps():
    """Also where the one that sleeps would be left with fewer free GPUs."""
    nodes = (node("a", 90.0, gpus_others=3), node("b"), node("c", 60.0))
    assert fits(nodes, Configuration(1, 1, "t4")) == {("b",)}


def test_of_nodes_that_sleep_the_one_that_is_ready_soonest_is_taken_and_of_these_the_fullest():
    """A node that boots for another job is ready sooner, so that its free GPUs are used before a further node is woken."""
    nodes = (node("a", 90.0), node("b", 40.0), node("c", 40.0, gpus_others=1), node("d", gpus_others=4))
    assert fits(nodes, Configuration(1, 2, "t4")) == {("c",)}
    assert fits(nodes, Configuration(1, 4, "t4")) == {("b",)}


def test_several_nodes_are_those_that_are_ready_soonest_also_across_switches():
    nodes = (
        node("a", 90.0, switch="s0"),
        node("b", 90.0, switch="s0"),
        node("c", 0.0, switch="s1"),
        node("d", 30.0, switch="s1"),
        node("e", 0.0, switch="s2"),
    )
    assert fits(nodes, Configuration(2, 8, "t4")) == {("c", "e")}
    assert fits(nodes, Configuration(3, 12, "t4")) == {("c", "d", "e")}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_starts_on_a_node_that_sleeps_if_no_other_is_free_and_on_an_awake_one_otherwise(policy: str):
    model = {"j": table(t4={1: 1.0, 2: 1.9, 4: 3.5})}
    decide = make_policy(policy, {})[0].decide
    asleep = snapshot((node("a", 1800.0), node("b", 1800.0)), [job("j", min_gpus=2, max_gpus=2)], model)
    assert decide(asleep).assignments.keys() == {"j"}
    awake = dataclasses.replace(asleep, nodes=(node("a", 1800.0), node("b")))
    assert decide(awake).assignments["j"].placement.nodes == ("b",)


def given(boot_s: Mapping[str, float], left: float) -> str:
    """The GPU type that `sia` gives a job with so much work, s on one T4. An A100 does four times as much."""
    nodes = tuple(node(f"{name}-0", boot_s.get(name, 0.0), name) for name in ("a100", "t4"))
    model = {"j": table(t4={1: 1.0}, a100={1: 4.0})}
    state = snapshot(nodes, [job("j", max_gpus=1)], model, remaining={"j": left})
    return make_policy("sia", {})[0].decide(state).assignments["j"].placement.gpu_type


def test_a_faster_type_that_sleeps_is_worth_its_boot_to_a_long_job_only():
    """With 600 s on a T4, an A100 needs 150 s and 600 s of boot: 150 / 750 of a gain of 4 is 0.8, less than 1."""
    assert given({"a100": 600.0}, 600.0) == "t4"
    assert given({"a100": 600.0}, 36_000.0) == "a100"
    assert given({}, 600.0) == "a100"
    assert given({"a100": 600.0, "t4": 600.0}, 600.0) == "a100", "both have to boot, so the faster one"


@pytest.mark.parametrize(("boot_s", "stopped"), [(0.0, True), (300.0, True), (1200.0, False)])
def test_a_running_job_is_moved_to_a_node_that_sleeps_only_if_it_makes_up_for_the_boot(boot_s: float, stopped: bool):
    """From 1.0 to 1.2: a restart of 30 s and the boot may cost 0.2 * 3600 s at most."""
    runs = job("j", phase=Phase.RUNNING, allocation=on("t4", b=1), max_gpus=1)
    state: Snapshot = snapshot((node("a", boot_s, "a100"), node("b")), [runs], {"j": table(t4={1: 1.0}, a100={1: 1.2})})
    moved = Assignment(on("a100", a=1), Reason(ReasonCode.CHOSEN, "why"), 1.2)
    assert bool(with_reasons(state, Plan(1, {"j": moved}, {})).stops) is stopped


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_whose_nodes_boot_keep_them_and_no_job_is_stopped_for_them(policy: str):
    """The loop gives a job that is on its way its target."""
    going = on("t4", a=4)
    starts = job("s", phase=Phase.STARTING, allocation=going, target=going, min_gpus=4, max_gpus=4)
    runs = job("r", phase=Phase.RUNNING, allocation=on("t4", b=4), min_gpus=4, max_gpus=4, submit_s=500.0)
    waits = job("w", min_gpus=4, max_gpus=4, submit_s=900.0)
    state = snapshot((node("a", 60.0, state="MIXED+POWERING_UP"), node("b")), [starts, runs, waits])
    plan = make_policy(policy, {})[0].decide(state)
    assert plan.assignments["s"].placement == going
    assert plan.assignments["r"].placement == on("t4", b=4)
    assert plan.stops == {}
