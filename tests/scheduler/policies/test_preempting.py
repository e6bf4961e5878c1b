"""Jobs that start in place of jobs which Penstock does not manage."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import GpuLimit, Job, Node, Outranks, Phase, Plan, Preemptible, Snapshot
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, on, snapshot

LOW = frozenset({"scavenge"})


def node(name: str, free: int, preemptible: int, *, rank: str = "scavenge", gpus: int = 4) -> Node:
    held = (Preemptible(rank, preemptible, 8, 0),) if preemptible else ()
    return Node(name, "t4", gpus, ("all", "owners"), gpus_others=gpus - free, cpus=64, preemptible=held)


def owner(job_id: str = "1", **fields: object) -> Job:
    made = job(job_id, **({"partitions": ("owners", "all"), "min_gpus": 2} | fields))
    return dataclasses.replace(made, outranks=Outranks(LOW, "owners", 60.0))


def decided(nodes: tuple[Node, ...], *jobs: Job, policy: str = "sia", **changes: object) -> Plan:
    state: Snapshot = dataclasses.replace(snapshot(nodes, list(jobs)), **changes)
    return make_policy(policy)[0].decide(state)


@pytest.mark.parametrize("policy", ["sia", "fifo", "las"])
def test_a_job_starts_where_the_cluster_stops_others_for_it_with_its_fewest_gpus(policy: str) -> None:
    nodes = node("n0", 0, 0), node("n1", 0, 4)
    plan = decided(nodes, owner(max_gpus=2), policy=policy)
    assert plan.assignments["1"].placement == on("t4", "owners", n1=2)
    assert "stops jobs of a lower rank" in plan.assignments["1"].reason.text
    assert not plan.waiting


def test_free_gpus_beside_them_count_and_each_gpu_counts_once() -> None:
    plan = decided((node("n0", 1, 3),), owner("1", max_gpus=2), owner("2", max_gpus=2), owner("3", max_gpus=2))
    assert {name: each.placement.gpus for name, each in plan.assignments.items()} == {"1": 2, "2": 2}
    assert list(plan.waiting) == ["3"]


@pytest.mark.parametrize(
    "waits",
    [
        dataclasses.replace(owner(max_gpus=2), outranks=None),
        dataclasses.replace(owner(max_gpus=2), outranks=Outranks(frozenset({"others"}), "owners", 60.0)),
        dataclasses.replace(owner(max_gpus=2), outranks=Outranks(LOW, "elsewhere", 60.0)),
        owner(max_gpus=8, min_gpus=8),
        owner(max_gpus=2, gpu_types=["a100"]),
    ],
    ids=["has no rank", "outranks others", "in another partition", "too large", "another type"],
)
def test_other_jobs_wait(waits: Job) -> None:
    plan = decided((node("n0", 0, 4),), waits)
    assert not plan.assignments
    assert "1" in plan.waiting


def test_limits_hold() -> None:
    limit = GpuLimit("user", "ada", 3, user="ada")
    held = job("0", phase=Phase.RUNNING, allocation=on("t4", n1=2), max_gpus=2, min_gpus=2)
    plan = decided((node("n0", 0, 4), node("n1", 2, 0)), held, owner(max_gpus=2), limits=(limit,))
    assert list(plan.waiting) == ["1"]


def test_what_a_queue_keeps_free_for_the_first_job_stays_free() -> None:
    """The job behind it would fit into what is free, and gets nothing there by rank."""
    nodes = node("n0", 2, 2), node("n1", 4, 0)
    first = job("0", partitions=("all",), min_gpus=8, max_gpus=8)
    behind = dataclasses.replace(owner("1", max_gpus=2), partitions=("owners",))
    plan = decided((*nodes, node("n2", 0, 0)), first, behind, policy="fifo")
    assert not plan.assignments
