"""What Slurm's records say of the CPUs and memory that jobs need, and of the nodes where these may run out."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import Job, Node, ResourceRequest
from penstock_scheduler.simulator import nodes_from_spec
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.jobs.notes import Request
from penstock_slurm.observe.amounts import Narrowed, resource_request, with_amounts, with_partition_limits
from tests.scheduler.builders import job, on
from tests.slurm_plugin.gateway.test_parse import HELD, MARKS, OF_22_05, answer, parse_jobs

SIZES_MB = frozenset({256_000, 512_000})


def record(state: str = "PENDING", **fields: object) -> SlurmJob:
    """A job of one node, two GPUs and one CPU. `memory_mb` is what its tres-alloc says, as squeue prints it."""
    (held,) = parse_jobs(answer(HELD), MARKS, OF_22_05)
    plain = {"gpus_per_node": 2, "cpus": 1, "cpus_per_task": 1, "cpus_per_gpu": None, "memory_mb": 256_000}
    plain["exclusive"] = False
    return dataclasses.replace(held, state=state, **(plain | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "asked", "cpus", "memory_mb"),
    [
        ({}, Request(), (1, 1), (256_000, 512_000)),  # DefMemPerNode=UNLIMITED, or --mem=0: all of the node's
        ({"cpus_per_task": 6, "cpus": 6}, Request(), (6, 6), None),
        ({"cpus_per_gpu": 3}, Request(), (6, 12), None),
        ({"cpus_per_task": 5}, Request(tasks=1, gpus=2), (5, 10), None),
        ({}, Request(cpus=16, node_gpus=8), (4, 8), None),
        ({"memory_mb": 3000, "least_memory_mb": 3000}, Request(), None, (3000, 3000)),
        ({"memory_mb": 4000, "least_memory_mb": 1000, "cpus": 4, "cpus_per_task": 4}, Request(), None, (4000, 4000)),
        ({"memory_mb": 4000, "least_memory_mb": 1000, "cpus_per_gpu": 2}, Request(), None, (4000, 8000)),
        ({"memory_mb": 4000}, Request(), None, (4000, 8000)),  # --mem-per-gpu
        ({"memory_mb": 8000, "least_memory_mb": 8000}, Request(memory_mb=64_000, node_gpus=8), None, (16_000, 32_000)),
        ({}, Request(whole_nodes=True), (64, 64), None),
        ({"state": "RUNNING", "cpus": 2, "nodes": ("t4-00",)}, Request(), (2, 2), None),  # Slurm gave it a whole core
    ],
)
def test_a_request_follows_the_gpus_as_penstock_sends_it(
    fields: dict[str, object], asked: Request, cpus: tuple[int, int] | None, memory_mb: tuple[int, int] | None
) -> None:
    """On a node with 64 CPUs where the job has 2 GPUs, and 4. The second node has 512,000 MB."""
    found = resource_request(record(**fields), asked, SIZES_MB)  # type: ignore[arg-type]
    if cpus is not None:
        assert (found.cpus_on(2, 64), found.cpus_on(4, 64)) == cpus
    if memory_mb is not None:
        assert (found.memory_mb_on(2, 256_000), found.memory_mb_on(4, 512_000)) == memory_mb


def test_memory_that_slurm_does_not_allocate_is_not_counted() -> None:
    assert resource_request(record(), Request(), ()) == ResourceRequest(cpus=1)


def waiting(request: ResourceRequest | None, **fields: object) -> Job:
    """A queued job of one GPU."""
    return dataclasses.replace(job("1", **({"max_gpus": 1} | fields)), request=request)


def node(**fields: object) -> Node:
    """A node with 8 GPUs and 64 CPUs, and with these values."""
    return dataclasses.replace(nodes_from_spec("t4:1x8:64c:256g")[0], **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("there", "requests", "scarce", "out_of_reach"),
    [
        (node(), [ResourceRequest(cpus=8)], False, 0),
        (node(), [ResourceRequest(cpus=9)], True, 0),
        (node(), [None], False, 0),
        (node(cpus_others=64, gpus_others=1), [ResourceRequest()], True, 7),
        (node(cpus_others=63, gpus_others=1), [ResourceRequest(cpus=2), ResourceRequest()], True, 0),
        (node(cpus_others=60, gpus_others=1), [ResourceRequest(cpus=2, cpus_gpus=1)], True, 5),
        (node(cpus_others=1), [ResourceRequest(all_cpus=True)], True, 8),
        (node(), [ResourceRequest(all_memory=True)], True, 0),
        (node(memory_others_mb=1), [ResourceRequest(all_memory=True), ResourceRequest(memory_mb=1000)], True, 0),
        (node(memory_others_mb=1), [ResourceRequest(all_memory=True)], True, 8),
        (node(memory_others_mb=255_000), [ResourceRequest(memory_mb=1001)], True, 8),
        (node(memory_mb=0, memory_others_mb=0), [ResourceRequest(all_memory=True)], False, 0),
        (node(may_start=False, cpus_others=64), [ResourceRequest()], False, 0),
        (node(cpus_together=8), [ResourceRequest(cpus=8)], False, 0),
        (node(cpus_together=32), [ResourceRequest()], True, 0),
        (node(cpus_together=32, cpus_others=32), [ResourceRequest(cpus=33)], True, 8),
        (node(cpus_together=32, cpus=62), [ResourceRequest(all_cpus=True)], True, 0),
    ],
)
def test_a_node_is_scarce_where_some_job_may_find_gpus_without_cpus_or_memory(
    there: Node, requests: list[ResourceRequest | None], scarce: bool, out_of_reach: int
) -> None:
    jobs = [waiting(each) for each in requests]
    (found,) = with_amounts((there,), jobs)
    assert (found.scarce, found.gpus_out_of_reach) == (scarce, out_of_reach)
    assert scarce or found is there, "a node with enough of all stays the same object"


def test_slurm_gives_whole_cores_or_sockets() -> None:
    """Some CPUs of the node may be kept from jobs (CoreSpecCount), and a job may ask for more than there are."""
    halves = node(cpus_together=32, cpus=62)
    assert [halves.whole(cpus) for cpus in (1, 32, 33, 62, 63)] == [32, 32, 62, 62, 63]
    assert [node().whole(cpus) for cpus in (1, 64, 65)] == [1, 64, 65]
    (share,) = on("t4", t4_00=2).shares
    assert share.amounts(ResourceRequest(cpus=4, cpus_gpus=1), halves) == (32, 0)
    assert dataclasses.replace(share, cpus=40).amounts(ResourceRequest(), halves) == (62, 0)


def test_gpus_that_a_job_holds_are_within_reach() -> None:
    """The node would show too few CPUs for its own job, if Slurm counts them late. Its GPUs are not taken from it."""
    runs = dataclasses.replace(waiting(ResourceRequest(cpus=2)), allocation=on("t4", t4_00=4))
    (found,) = with_amounts((node(cpus_others=64),), [runs])
    assert found.gpus_for_us == 4


def test_a_job_is_kept_off_nodes_without_its_cpus_and_stays_the_same_object() -> None:
    narrowed, full, fits = Narrowed(), waiting(ResourceRequest(cpus=9)), waiting(ResourceRequest(cpus=1))
    nodes = with_amounts((node(cpus_others=56),), [full, fits])
    found = narrowed.look({"full": full, "fits": fits}, nodes)
    assert list(found) == ["full"]
    choice = found["full"].nodes
    assert choice is not None
    assert not choice.admits(nodes[0])
    assert narrowed.look({"full": full, "fits": fits}, nodes)["full"] is found["full"]
    assert narrowed.look({"full": full}, (node(),)) == {}


def test_all_jobs_of_a_partition_together_have_its_most_cpus_of_a_node():
    """MaxCPUsPerNode=8 in `gpu`, and plain jobs of another partition hold 58 of the 64 CPUs of n1, one of `gpu` 3 of n0."""
    nodes = [
        Node("n0", "t4", 4, ("gpu",), cpus=64, cpus_others=3),
        Node("n1", "t4", 4, ("gpu",), cpus=64, cpus_others=58),
    ]
    free = Node("n2", "t4", 4, ("gpu", "wide"), cpus=64)
    plain = record("RUNNING", id="1", partition=("gpu",), nodes=("n0",), cpus=3)
    ours = dataclasses.replace(plain, id="2", cpus=4)
    found = with_partition_limits([*nodes, free], [plain, ours], {"2"}, {"gpu": (8, None)})
    assert [(node.cpus, node.cpus_for_us) for node in found] == [(8, 5), (8, 6), (64, 64)]
    assert with_partition_limits(nodes, [plain], (), {"gpu": (None, 100)}) == tuple(nodes)
