"""Configurations, placements and nodes: what suits a job, and what is left of a node."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import Configuration, Node, Placement, Share
from tests.scheduler.builders import on

NODE = Node("n1", "a100", 8, ("all",), cpus=64, memory_mb=500_000)


def test_a_configuration_reads_as_users_write_it():
    assert str(Configuration(1, 4, "a100")) == "4 a100"
    assert str(Configuration(2, 16, "a100")) == "16 a100 on 2 nodes"


def test_configurations_are_in_the_order_of_nodes_then_gpus_then_type():
    ordered = [
        Configuration(1, 2, "t4"),
        Configuration(1, 4, "a100"),
        Configuration(1, 4, "t4"),
        Configuration(2, 2, "t4"),
    ]
    assert sorted([ordered[2], ordered[0], ordered[3], ordered[1]]) == ordered


def test_a_placement_counts_its_gpus_and_nodes():
    placement = on("a100", n1=8, n2=4)
    assert (placement.gpus, placement.nodes) == (12, ("n1", "n2"))
    assert placement.configuration == Configuration(2, 12, "a100")
    assert str(placement) == "a100 n1:8,n2:4"


@pytest.mark.parametrize(
    ("wanted", "stays"),
    [
        (Share("n1", 4), True),
        (Share("n1", 4, 16, 32_000), True),
        (Share("n1", 4, 16), True),
        (Share("n1", 4, memory_mb=32_000), True),
        (Share("n2", 4), False),
        (Share("n0", 4), False),
        (Share("n1", 3), False),
        (Share("n1", 5), False),
        (Share("n1", 4, 8), False),
        (Share("n1", 4, 24), False),
        (Share("n1", 4, memory_mb=16_000), False),
        (Share("n1", 4, memory_mb=64_000), False),
    ],
)
def test_a_job_stays_only_if_nodes_gpus_and_the_wanted_cpus_and_memory_are_the_same(wanted: Share, stays: bool):
    """The job holds 4 GPUs, 16 CPUs and 32,000 MB on n1. A job spec without CPUs or memory accepts any amount."""
    held = Share("n1", 4, 16, 32_000)
    assert wanted.suits(held) is stays
    assert Placement("a100", "all", (wanted,)).suits(Placement("a100", "all", (held,))) is stays


def test_no_amount_held_is_not_any_amount_wanted():
    assert not Share("n1", 4, 16).suits(Share("n1", 4))
    assert not Share("n1", 4, memory_mb=1).suits(Share("n1", 4))


def test_every_node_of_a_placement_must_suit():
    held = on("a100", n1=4, n2=4)
    assert on("a100", n1=4, n2=4).suits(held)
    assert not on("a100", n1=4, n3=4).suits(held)
    assert not on("a100", n0=4, n2=4).suits(held)
    assert not on("a100", n1=4).suits(held)
    assert not on("a100", n1=4, n2=4, n3=4).suits(held)


def test_a_node_offers_what_other_jobs_leave_and_nothing_when_no_work_may_start():
    shared = dataclasses.replace(NODE, gpus_others=3, cpus_others=14, memory_others_mb=200_000)
    assert (NODE.gpus_for_us, NODE.cpus_for_us, NODE.memory_mb_for_us) == (8, 64, 500_000)
    assert (shared.gpus_for_us, shared.cpus_for_us, shared.memory_mb_for_us) == (5, 50, 300_000)
    drained = dataclasses.replace(shared, may_start=False)
    assert (drained.gpus_for_us, drained.cpus_for_us, drained.memory_mb_for_us) == (0, 0, 0)


def test_a_node_that_others_overcommit_offers_nothing_rather_than_less():
    full = dataclasses.replace(NODE, gpus_others=9, cpus_others=65, memory_others_mb=500_001)
    assert (full.gpus_for_us, full.cpus_for_us, full.memory_mb_for_us) == (0, 0, 0)


def test_a_node_that_says_no_more_is_empty_and_open_to_all_and_asks_no_job_to_leave():
    node = Node("n1", "a100", 8, ("all",))
    assert (node.may_start, node.gpus_for_us, node.cpus_for_us) == (True, 8, 1)
    assert (node.reservation, node.leave, node.memory_mb_for_us) == ("", None, 0)
