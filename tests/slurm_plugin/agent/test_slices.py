"""Time slices, with real processes as jobs that the agent suspends and resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock_profiles.nvml import Device, Process, Reading, Sample
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import node_view

from .node import Node, alone, at_once, steps


def test_three_jobs_share_two_gpus_in_time_slices_and_never_overlap(make_node: Callable[..., Node]):
    """Each job progresses, no GPU ever has two jobs, and the next job runs on whichever GPU becomes free."""
    node = make_node()
    for number in (1, 2, 3):
        node.job(number)
    node.order(alone(1, 2, 3), (0, 1), slice_s=0.6)
    crowds: list[str] = []

    def all_have_run() -> bool:
        crowds.extend(at_once(node))
        return min(steps(node, number) for number in (1, 2, 3)) > 20 and len(node.slurm.calls) >= 8

    node.until(all_have_run, "time slices of all")
    assert not crowds
    assert {call for call, _ in node.slurm.calls} == {"suspend", "resume"}
    node.until(lambda: all(each.use.ran_s > 0 for each in node.told().jobs), "time run of all")
    frozen = [each.job for each in node.agent.status().jobs if each.state == "suspended"]
    assert len(frozen) <= 2


def test_the_better_of_two_trials_has_the_slices(make_node: Callable[..., Node]):
    """Ranks come with a later order and count from the next slice on, for as long as they stay so."""
    node = make_node()
    for number in (1, 2):
        node.job(number)

    def trials(*ranks: int) -> None:
        packs = [Pack((JobId(f"j{n}"),), search="ada:s", rank=rank) for n, rank in enumerate(ranks, start=1)]
        node.order(packs, (0,), slice_s=0.5)

    trials(0, 0)
    node.until(lambda: min(steps(node, 1), steps(node, 2)) > 20, "time slices of both")
    for better, worse, ranks in ((2, 1, (1, 0)), (1, 2, (0, 1))):
        trials(*ranks)
        node.until(
            lambda job=f"j{worse}": node.states()[job] == "suspended",
            "the end of the time slice of the job with the worse rank",
        )
        before, had = steps(node, worse), steps(node, better)
        calls = len(node.slurm.calls)
        node.until(lambda job=better, had=had: steps(node, job) > had + 200, "slices of the job with the better rank")
        assert steps(node, worse) == before
        assert not {("suspend", better), ("resume", worse)} & set(node.slurm.calls[calls:]), "it keeps its GPU"


def test_a_job_that_reports_no_step_still_ends_its_time_slice(make_node: Callable[..., Node]):
    """It hangs, or its program does not use agents. Its first time slice lasts as long as a job may take to start."""
    node = make_node(start_wait_s=1.5)
    node.job(1)
    node.job(2, "--mute")
    node.order(alone(2, 1), (0,), slice_s=0.3)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the mute one")
    node.until(lambda: node.states()["j2"] != "running", "end of its first time slice")
    mute = node.agent.state.jobs["j2"]
    assert mute.asked_s - mute.resumed_s >= 1.5
    node.until(lambda: node.slurm.calls.count(("suspend", 2)) >= 3 and steps(node, 1) > 0, "time slices of both")
    assert next(each.use for each in node.agent.status().jobs if each.job == "j2").ran_s >= 1.5


def test_a_job_whose_state_does_not_fit_into_host_memory_keeps_its_time_slice(make_node: Callable[..., Node]):
    """The first reports 8 MB more with each step, and its limit is 100 MB. It continues, and the status says why."""
    node = make_node(host_memory_mb=100)
    node.job(1, "--leak", "8", "--step", "0.02")
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: (said := node.said(1)) is not None and said.memory_mb > 100, "memory")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.run(1.5)
    assert node.states() == {"j1": "running", "j2": "waiting"}
    assert "100 MB" in next(each.why for each in node.agent.status().jobs if each.job == "j1")
    assert node.slurm.calls == []


def test_no_job_gets_a_gpu_on_which_frozen_jobs_hold_too_much(make_node: Callable[..., Node]):
    """The first holds 10,000 of 16,160 MB and never moves off. The second is tried and takes 8,000, and waits from then on."""
    node = make_node(suspend_wait_s=0.3)
    first = node.job(1, "--deaf")
    held_mb: dict[int, float] = {}
    device = Device(0, "GPU-1", "Tesla V100-SXM2-16GB", "v100", 16_160.0)

    def sample() -> Sample:
        using = tuple(Process(pid, mb, 0.1) for pid, mb in held_mb.items())
        return Sample((Reading(device, 1.0, 0.1, 0.1, using, ()),), ())

    def why() -> str:
        return next(each.why for each in node.agent.status().jobs if each.job == "j2")

    held_mb[first.pid] = 10_000.0
    node.sample = sample
    node.start()
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: steps(node, 1) > 0, "steps")
    held_mb[node.job(2, "--here").pid] = 8_000.0
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.agent.state.jobs["j2"].memory_mb == 8_000, "a sample of the second")
    held_mb.popitem()
    node.until(lambda: "10000 MB" in why(), "no room")
    node.until(lambda: node.states() == {"j1": "running", "j2": "suspended"}, "time slice of the first again")
    resumed = node.slurm.calls.count(("resume", 2))
    had = node.slurm.calls.count(("resume", 1))
    idle: list[bool] = []

    def more() -> bool:
        (group,) = node.agent.groups.groups
        idle.append(node.states()["j1"] == "suspended" and group.running == (Pack((JobId("j2"),)),))
        return node.slurm.calls.count(("resume", 1)) > had + 1

    node.until(more, "more time slices of the first")
    assert any(idle)
    assert not any(map(all, pairwise(idle))), "the time slice of a job that does not fit ends at once"
    assert node.slurm.calls.count(("resume", 2)) == resumed
    assert "8000 of the 16160 MB" in why()
    del held_mb[first.pid]
    first.kill()
    first.wait()
    node.until(lambda: node.states()["j2"] == "running", "time slice of the second, once there is room")
    assert why() == ""


def test_a_job_that_reports_no_room_keeps_its_time_slice_only_for_a_while(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """It reports more memory than the host may take. After two more slices it is frozen in place, and uses no host memory."""
    monkeypatch.setattr(node_view, "MOST_REFUSALS", 2)
    node = make_node(host_memory_mb=100)
    node.job(1, "--leak", "500")
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: (said := node.said(1)) is not None and said.memory_mb > 100, "memory")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert ("suspend", 1) in node.slurm.calls


def test_a_clock_that_is_set_back_delays_no_time_slice(make_node: Callable[..., Node]):
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.agent.tick(time.time() + 3600)
    node.until(lambda: "suspended" in node.states().values(), "time slice")
