"""Which plain jobs Slurm preempts for a managed job: by partition and by QOS, and while it stops them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock_scheduler.model import (
    Job,
    JobSpec,
    Node,
    Outranks,
    Phase,
    Placement,
    Preemptible,
    ResourceRequest,
    Share,
)
from penstock_slurm.gateway import SlurmFeatures, SlurmJob, SlurmPartition, SlurmQos
from penstock_slurm.observe.plain_jobs import Attempts, with_room
from penstock_slurm.observe.preemption import Preemption, with_preemptible
from tests.slurm_plugin.test_states import job as slurm_job

NOW_S = 1000.0


def partition(name: str, tier: int, *, frees: bool = True, grace_s: float = 0.0) -> SlurmPartition:
    return SlurmPartition(name, ("n0",), True, False, None, tier=tier, frees=frees, grace_s=grace_s)


def by_partition(*partitions: SlurmPartition, **features: Any) -> Preemption:
    return Preemption.of(
        SlurmFeatures(preempts_by="partition", **features), {each.name: each for each in partitions}, {}
    )


def by_qos(*qos: SlurmQos, **features: Any) -> Preemption:
    return Preemption.of(SlurmFeatures(preempts_by="qos", **features), {}, {each.name: each for each in qos})


SITE = by_partition(partition("owners", 20), partition("scavenge", 1, grace_s=30.0), partition("kept", 1, frees=False))


def plain(job_id: str = "7", **changes: Any) -> SlurmJob:
    """A plain job that runs with two GPUs of node n0."""
    fields = {"id": job_id, "partition": ("scavenge",), "nodes": ("n0",), "gpus_per_node": 2, "start_s": 500.0}
    more = {"cpus": 8, "memory_mb": 100, "node_count": 1}
    return dataclasses.replace(slurm_job("RUNNING"), **(fields | more | changes))


def managed(phase: Phase, gpus: int = 0, outranks: Outranks | None = None, **spec: Any) -> Job:
    held = Placement("t4", "owners", (Share("n0", gpus),)) if gpus else None
    return Job(
        *("9", "j", "u", JobSpec(**({"max_gpus": 4} | spec)), ("owners",), phase, 900.0),
        allocation=held,
        outranks=outranks,
        request=ResourceRequest(cpus=4, memory_mb=60),
    )


def test_a_partition_preempts_those_of_lower_tiers_whose_jobs_leave_their_gpus() -> None:
    job = slurm_job("PENDING")
    assert SITE.outranked(job, ["owners"]) == Outranks(frozenset({"scavenge"}), "owners", 90.0)
    assert SITE.outranked(job, ["scavenge", "owners"]) == SITE.outranked(job, ["owners"])
    assert SITE.outranked(job, ["scavenge"]) is SITE.outranked(job, []) is SITE.outranked(job, ["gone"]) is None
    assert SITE.rank(plain()) == "scavenge"
    assert Preemption.of(SlurmFeatures(), {"owners": partition("owners", 9)}, {}).outranked(job, ["owners"]) is None


def test_a_qos_preempts_those_that_it_names() -> None:
    high = SlurmQos("high", frozenset({"low", "stays", "cut", "gone"}), None, None, 0.0)
    others = SlurmQos("low", frozenset(), None, None, 5.0), SlurmQos("stays", frozenset(), False, None, 500.0)
    rules = by_qos(high, *others, SlurmQos("cut", frozenset(), True, None, 0.0), preempted_frees=True)
    above = dataclasses.replace(slurm_job("PENDING"), qos="high")
    assert rules.outranked(above, ["p"]) == Outranks(frozenset({"low", "cut"}), "p", 65.0)
    assert rules.outranked(dataclasses.replace(above, qos="low"), ["p"]) is None
    assert rules.rank(plain(qos="low")) == "low"
    kept = by_qos(high, *others)
    assert kept.outranked(above, ["p"]) is None, "PreemptMode of slurm.conf lets them stay, or suspends them"


@pytest.mark.parametrize(
    ("site_s", "qos_s", "start_s", "exempt"),
    [
        (0.0, None, NOW_S, False),
        (0.0, None, None, True),
        (100.0, None, 901.0, True),
        (100.0, None, 900.0, False),
        (100.0, 0.0, 901.0, False),
        (0.0, 100.0, 901.0, True),
        (float("inf"), None, 0.0, True),
    ],
)
def test_slurm_spares_young_jobs(site_s: float, qos_s: float | None, start_s: float | None, exempt: bool) -> None:
    rules = by_qos(SlurmQos("low", frozenset(), True, qos_s, 0.0), preempt_exempt_s=site_s)
    assert rules.exempt(plain(qos="low", start_s=start_s), NOW_S) is exempt


NODE = Node("n0", "t4", 4, ("owners", "scavenge"), gpus_others=4, cpus=64, cpus_others=16, memory_others_mb=200)
ABOVE = SITE.outranked(slurm_job("PENDING"), ["owners"])


def seen(*jobs: Job, plain_jobs: list[SlurmJob] | None = None, rules: Preemption = SITE) -> Node:
    given = [plain(), plain("8", partition=("kept",))] if plain_jobs is None else plain_jobs
    (node,) = with_preemptible((NODE,), given, jobs, rules, NOW_S)
    return node


def test_a_node_shows_what_others_may_have_there() -> None:
    node = seen()
    assert node.preemptible == (Preemptible("kept", 2, 8, 100), Preemptible("scavenge", 2, 8, 100))
    assert node.gpus_for_us == 0
    empty = node.without(frozenset({"scavenge"}))
    assert (empty.gpus_for_us, empty.cpus_for_us, empty.memory_others_mb) == (2, 56, 100)
    assert seen(plain_jobs=[plain("5", state="PENDING", nodes=())]) is NODE
    assert seen(rules=Preemption()) is NODE


def test_what_slurm_empties_for_a_job_counts_as_that_one_s_and_is_offered_to_no_other() -> None:
    node = seen(managed(Phase.STARTING, 1, ABOVE))
    assert (node.gpus_others, node.cpus_others, node.memory_others_mb) == (3, 12, 140)
    assert node.preemptible == ()
    assert seen(managed(Phase.STARTING, 1)).gpus_others == 4, "it preempts nobody"
    assert seen(managed(Phase.RUNNING, 1, ABOVE)).gpus_others == 4
    gone = dataclasses.replace(NODE, gpus_others=2)
    (node,) = with_preemptible((gone,), [plain()], [managed(Phase.STARTING, 2, ABOVE)], SITE, NOW_S)
    assert node.gpus_others == 2, "there is room for both"


@pytest.mark.parametrize(("outranks", "aside"), [(None, 2), (ABOVE, 0)])
def test_no_job_makes_room_for_the_job_that_slurm_stopped_for_it(outranks: Outranks | None, aside: int) -> None:
    """Otherwise Slurm would stop that one again, and so on."""
    waits = plain(state="PENDING", nodes=(), reason="Resources", start_s=None, eligible_s=100.0, priority=9)
    empty = dataclasses.replace(NODE, gpus_others=0)
    (node,) = with_room(
        *((empty,), [waits], [managed(Phase.RUNNING, 4, outranks)], ["scavenge"]),
        **{
            "now_s": NOW_S,
            "patience_s": 60.0,
            "attempts": Attempts(100.0),
            "rank": SITE.rank,
            "moves": lambda _: False,
        },
    )
    assert node.gpus_others == aside
