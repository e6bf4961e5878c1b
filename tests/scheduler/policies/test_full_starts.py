"""A job that cannot save starts on the most GPUs that it can use and that are idle, because it cannot grow later."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import GpuLimit, Job, Phase, Snapshot
from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, on, snapshot, table, with_facts


def gpus(name: str, state: Snapshot) -> dict[str, int]:
    plan = make_policy(name)[0].decide(state)
    return {each: given.placement.gpus for each, given in plan.assignments.items()}


def new(*jobs: Job, nodes: str = "t4:2x4", saves: bool = False) -> Snapshot:
    """Jobs that never ran, of unknown scaling."""
    return with_facts(
        snapshot(nodes, list(jobs)),
        saves={each.id: saves for each in jobs},
        largest_run_gpus={each.id: 0 for each in jobs},
    )


@pytest.mark.parametrize("name", ["sia", "pollux"])
def test_on_an_idle_cluster_it_gets_its_maximum(name: str) -> None:
    assert gpus(name, new(job("a", max_gpus=2))) == {"a": 2}
    assert gpus(name, new(job("a", max_gpus=8))) == {"a": 8}
    plan = make_policy(name)[0].decide(new(job("a", max_gpus=2)))
    why = "it has not shown that it can save, so it cannot grow later"
    assert plan.assignments["a"].reason.text == f"starts on 2 t4: {why}"
    assert plan.assignments["a"].goodput == 2.0


def test_a_job_that_saves_grows_later() -> None:
    assert gpus("sia", new(job("a", max_gpus=2), saves=True)) == {"a": 1}


def test_no_other_job_gets_fewer_gpus_for_it() -> None:
    first, second = job("a", max_gpus=8, submit_s=0.0), job("b", max_gpus=8, submit_s=1.0)
    assert gpus("sia", new(second, first)) == {"a": 4, "b": 4}
    runs = job("r", phase=Phase.RUNNING, allocation=on("t4", t4_00=4), max_gpus=4)
    state = new(first)
    state = dataclasses.replace(state, jobs=(*state.jobs, runs), facts=state.facts | {"r": state.facts["a"]})
    assert gpus("sia", state) == {"a": 4, "r": 4}


def test_limits_and_models_count() -> None:
    state = new(job("a", max_gpus=8))
    assert gpus("sia", dataclasses.replace(state, limits=(GpuLimit("user", "ada", 2),))) == {"a": 2}
    slower = with_facts(
        snapshot("t4:2x4", [job("a", max_gpus=8)], {"a": table(t4={1: 1.0, 2: 1.5, 4: 1.4, 8: 1.3})}),
        saves={"a": False},
        largest_run_gpus={"a": 0},
    )
    assert gpus("sia", slower) == {"a": 2}


def test_it_wakes_no_node() -> None:
    state = new(job("a", max_gpus=8))
    nodes = tuple(dataclasses.replace(node, boot_s=60.0 * index) for index, node in enumerate(state.nodes))
    assert gpus("sia", dataclasses.replace(state, nodes=nodes)) == {"a": 4}
