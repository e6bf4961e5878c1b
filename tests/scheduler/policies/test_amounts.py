"""CPUs and memory beside the GPUs, under every policy."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import Job, Node, NodeChoice, Phase, ReasonCode, ResourceRequest
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator import nodes_from_spec
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.policies.documented import NAME
from tests.scheduler.policies.test_properties import VARIANTS


def stages(choice: object) -> tuple[str, ...]:
    """The stages of a choice."""
    return tuple(getattr(choice, "stages", ()))


POLICIES = pytest.mark.parametrize(
    ("name", "chosen"),
    [
        each
        for each in VARIANTS
        if each[0] != NAME and not {"proportional", "synergy-tune", "synergy-opt"} & {*stages(each[0])}
    ],
)
"""All but those with a stage that allocates CPUs and memory itself, whatever jobs request."""


def scarce(spec: str, **others: int) -> tuple[Node, ...]:
    """Nodes whose CPUs may run out; `others`: CPUs of each that other jobs have."""
    return tuple(
        dataclasses.replace(node, scarce=True, cpus_others=others.get(node.name.replace("-", "_"), 0))
        for node in nodes_from_spec(spec)
    )


def needing(request: ResourceRequest, job_id: str, **fields: object) -> Job:
    """A job of one GPU that needs this, unless `fields` say otherwise."""
    made = job(job_id, **({"min_gpus": 1, "max_gpus": 1, "adaptivity": "rigid"} | fields))
    choice = NodeChoice(request=request, gpus=made.spec.min_gpus)
    return dataclasses.replace(made, request=request, nodes=choice)


@POLICIES
def test_jobs_go_where_their_cpus_are_free(name: str, chosen: dict[str, object]) -> None:
    """60 of 64 CPUs for each job: one job a node, although each node has four GPUs; a node with 10 CPUs in use has none."""
    nodes = scarce("t4:3x4:64c", t4_00=10)
    jobs = [needing(ResourceRequest(cpus=60), job_id) for job_id in "abc"]
    plan = make_policy(name, chosen)[0].decide(snapshot(nodes, jobs))
    places = sorted(assignment.placement.nodes for assignment in plan.assignments.values())
    assert places == [("t4-01",), ("t4-02",)], plan
    assert len(plan.waiting) == 1


@POLICIES
def test_a_job_beside_which_no_cpus_are_left_waits_and_says_so(name: str, chosen: dict[str, object]) -> None:
    nodes = scarce("t4:2x4:8c", t4_00=8, t4_01=7)
    waits, never = needing(ResourceRequest(cpus=2), "waits"), needing(ResourceRequest(cpus=9), "never")
    fits = needing(ResourceRequest(cpus=1), "fits")
    plan = make_policy(name, chosen)[0].decide(snapshot(nodes, [never, waits, fits]))
    assert plan.assignments["fits"].placement.nodes == ("t4-01",)
    assert plan.waiting["never"].code is ReasonCode.NEVER_FITS
    assert "has more than 8 CPUs for jobs: ask for less" in plan.waiting["never"].text
    assert plan.waiting["waits"].code is ReasonCode.WAITING_CAPACITY
    assert "needs 2 CPUs on each node, and jobs that Penstock does not manage leave less" in plan.waiting["waits"].text


@POLICIES
def test_a_running_job_stays_whatever_its_node_says_of_cpus(name: str, chosen: dict[str, object]) -> None:
    """Slurm has given it its CPUs. A node that shows too few for it is no reason to stop it."""
    held = on("t4", t4_00=1)
    runs = needing(ResourceRequest(cpus=60), "runs", phase=Phase.RUNNING, allocation=held)
    plan = make_policy(name, chosen)[0].decide(snapshot(scarce("t4:1x4:64c", t4_00=20), [runs]))
    assert plan.assignments["runs"].placement == held
    assert not plan.stops


@POLICIES
def test_cpus_that_follow_the_gpus_bound_the_gpus(name: str, chosen: dict[str, object]) -> None:
    """16 CPUs for each GPU on nodes with 32 CPUs and 4 GPUs: two such GPUs a node at most."""
    request = ResourceRequest(cpus=16, cpus_gpus=1)
    jobs = [needing(request, job_id) for job_id in "abcde"]
    plan = make_policy(name, chosen)[0].decide(snapshot(scarce("t4:2x4:32c"), jobs))
    places = sorted(assignment.placement.nodes[0] for assignment in plan.assignments.values())
    assert places == ["t4-00", "t4-00", "t4-01", "t4-01"], plan
