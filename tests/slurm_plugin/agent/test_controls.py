"""Limits that the agent sends to jobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_scheduler.model import JobId, Limit, Pack

from .node import Node, alone, at_once, control, steps


def test_three_jobs_of_one_pack_run_at_once_each_with_its_limits(make_node: Callable[..., Node]):
    """The policies make pairs. The node accepts any number."""
    node = make_node()
    for number in (1, 2, 3):
        node.job(number)
    limits = (Limit(memory_mb=6000), Limit(0.5, 5000), Limit(memory_mb=4000))
    node.order([Pack((JobId("j1"), JobId("j2"), JobId("j3")), limits=limits)], (0,), slice_s=0.5)
    node.until(lambda: min(steps(node, number) for number in (1, 2, 3)) > 20, "steps of all")
    assert set(at_once(node)) == {"j1", "j2", "j3"}
    assert set(node.devices().values()) == {(0,)}
    assert [(control(node, n).compute, control(node, n).memory_mb) for n in (1, 2, 3)] == [
        (limit.compute, limit.memory_mb) for limit in limits
    ]
    assert not node.slurm.calls


@pytest.mark.parametrize(("options", "start_wait_s"), [(("--late", "1"), 1000.0), (("--mute",), 2.0)])
def test_an_opportunistic_job_that_has_said_nothing_is_not_taken_for_one_that_keeps_to_its_limit(
    make_node: Callable[..., Node], options: tuple[str, ...], start_wait_s: float
):
    """The guaranteed job waits until the opportunistic job has reported, or for as long as a job that never reports is
    given."""
    node = make_node(start_wait_s=start_wait_s, suspend_wait_s=1000)
    node.job(1, *options)
    node.order(alone(1), (0,), slice_s=60.0)
    node.until(lambda: node.states()["j1"] == "running", "start of the opportunistic job")
    node.job(2)
    pack = Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j2"), limits=(Limit(memory_mb=400), Limit()))
    node.order([pack], (0,), slice_s=60.0)
    node.until(lambda: node.states()["j2"] == "running", "start of the guaranteed one")
    said, jobs = node.said(1), node.agent.state.jobs
    if "--mute" in options:
        assert jobs["j2"].resumed_s - jobs["j1"].resumed_s >= start_wait_s
    else:
        assert said is not None
        assert said.number == control(node, 1).number


def test_two_that_are_new_and_limited_do_not_wait_for_one_anothers_message(make_node: Callable[..., Node]):
    """Their tasks begin once they are bound to GPUs, and do not report before."""
    node = make_node(suspend_wait_s=1000)
    node.order([Pack((JobId("j1"), JobId("j2")), limits=(Limit(memory_mb=50), Limit(memory_mb=50)))], (0,))
    node.until(lambda: node.states() == {"j1": "running", "j2": "waiting"}, "start of the first")
    node.job(1)
    node.until(lambda: node.states() == {"j1": "running", "j2": "running"}, "start of both")


def test_two_whose_limits_rise_do_not_wait_for_one_another(make_node: Callable[..., Node]):
    """For example because a third job has left the GPU, or because the GPU's memory was unknown until now."""
    node = make_node()
    for number in (1, 2):
        node.job(number)
    for limits_mb in ((50, 60), (80, 90)):
        limits = tuple(Limit(memory_mb=limit) for limit in limits_mb)
        node.order([Pack((JobId("j1"), JobId("j2")), limits=limits)], (0,), slice_s=60.0)
        node.until(lambda: set(node.states().values()) == {"running"}, "start of both")
        node.until(
            lambda: tuple(control(node, number).memory_mb for number in (1, 2)) == limits_mb,  # noqa: B023 - at once
            "limits",
        )
