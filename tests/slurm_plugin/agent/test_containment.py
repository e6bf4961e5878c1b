"""Jobs that the agent contains, with real processes as jobs."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import JobId, Limit, Pack
from penstock_slurm.agent import node_state
from penstock_slurm.gateway import ControllerAway

from .node import Node, alone, steps


@pytest.mark.parametrize("goes", ["guaranteed", "pack"])
def test_an_opportunistic_job_that_never_says_anything_is_frozen_beyond_its_share_while_the_guaranteed_job_is_there(
    make_node: Callable[..., Node], goes: str
):
    """It cannot be sent a share, so its agent freezes and thaws it, also after a restart. It continues when the other job ends or
    moves."""
    node = make_node(start_wait_s=0.5, suspend_wait_s=0.3)
    guaranteed = node.job(1, "--step", "0.02")
    node.job(2, "--mute")
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=0.3)
    node.until(lambda: node.slurm.letter(2) == "T", "freezing")
    for _ in range(2):
        (contained,) = node.agent.status().contained
        assert (contained.job, contained.cause, contained.killed) == ("j2", "share", False)
        assert "has reported no step within 0.5 s" in contained.text
        assert "Penstock's executor" in contained.text
        node.until(
            lambda: [each.use.answers for each in node.agent.status().jobs] == [True, False], "the answers of both"
        )
        letters: list[str] = []
        node.run(1.2, lambda: letters.append(node.slurm.letter(2)))  # noqa: B023 - at once
        assert letters.count("T") > len(letters) / 2
        assert node.states() == {"j1": "running", "j2": "running"}
        assert "keep to its share" in node.agent.status().jobs[1].why
        assert node.slurm.calls == [], "Slurm has no part in it"
        node.start()
    if goes == "guaranteed":
        guaranteed.kill()
        guaranteed.wait()
    else:
        node.order(alone(1, 2), (0, 1), slice_s=0.5)
    node.until(lambda: node.slurm.letter(2) != "T", "end of its standing still")
    node.run(1.0, lambda: None)
    assert node.slurm.letter(2) != "T"


def test_an_opportunistic_job_that_trains_beyond_its_share_is_frozen(make_node: Callable[..., Node]):
    """It reports share 0 in a slice that does not end, and continues to make steps."""
    node = make_node(misuse_s=1.0)
    node.job(1, "--step", "0.02")
    node.job(2, "--greedy")
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=600.0)
    node.until(lambda: node.slurm.letter(2) == "T", "freezing")
    node.run(1.0, lambda: None)
    assert node.slurm.letter(2) == "T"
    assert node.agent.status().contained == (), "its user is told if it happens again"
    assert ("cancel", 2) not in node.slurm.calls


def test_a_job_that_somebody_thaws_is_frozen_again(make_node: Callable[..., Node]):
    """Its user can, where Slurm has no cgroups. So does the kernel, when the shell ends that started it. But not at once: Slurm
    thaws a job that it ends, which then saves, and makes few steps."""
    node = make_node(misuse_s=1.0)
    node.job(1, "--step", "0.02")
    job = node.job(2, "--greedy")
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=600.0)
    for _ in range(3):
        node.until(lambda: node.slurm.letter(2) == "T", "freezing")
        made = steps(node, 2)
        job.send_signal(signal.SIGCONT)
        wait_for(lambda: node.slurm.letter(2) != "T", 120, "job 2 runs")
        node.run(0.1)
        assert node.slurm.letter(2) != "T" or steps(node, 2) > made + 10


def test_a_job_that_its_agent_has_frozen_goes_on_when_the_order_no_longer_names_it(make_node: Callable[..., Node]):
    """It is about to be moved, and must be able to save."""
    node = make_node(start_wait_s=0.5, suspend_wait_s=0.3)
    node.job(1, "--step", "0.02")
    node.job(2, "--greedy")
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=600.0)
    node.until(lambda: node.slurm.letter(2) == "T", "freezing")
    node.order(alone(1), (0,), slice_s=600.0)
    node.until(lambda: node.slurm.letter(2) != "T", "thawing")


@pytest.mark.parametrize("no_answer", ["freeze", "kill"])
def test_a_job_that_does_not_answer_is_frozen_or_ended(make_node: Callable[..., Node], no_answer: str):
    node = make_node(suspend_wait_s=0.5, no_answer=no_answer)
    node.job(1, "--deaf")
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.agent.status().contained, "containment")
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    contained = node.agent.status().contained[0]
    assert (contained.job, contained.cause, contained.killed) == ("j1", "no-answer", no_answer == "kill")
    assert "within 0.5 s" in contained.text
    assert (("cancel", 1) in node.slurm.calls) == (no_answer == "kill")
    assert (("suspend", 1) in node.slurm.calls) == (no_answer == "freeze")


def test_a_job_that_says_that_it_stands_still_and_trains_on_is_ended(make_node: Callable[..., Node]):
    node = make_node(misuse_s=1.0)
    node.slurm.freeze_after_s = 600.0
    node.job(1, "--lie")
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=30.0)
    node.until(lambda: node.agent.status().contained, "containment")
    contained = node.agent.status().contained[0]
    assert (contained.job, contained.cause, contained.killed) == ("j1", "lies", True)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")


def test_a_job_over_its_memory_limit_is_ended_or_told(make_node: Callable[..., Node]):
    node = make_node(misuse_s=0.5, misuse="tell")
    node.job(1, "--leak", "10")
    node.job(2)
    pack = Pack((JobId("j1"), JobId("j2")), limits=(Limit(memory_mb=50), Limit(memory_mb=50)))
    node.order([pack], (0,))
    node.until(lambda: node.agent.status().contained, "containment")
    contained = node.agent.status().contained
    assert [(each.job, each.cause, each.killed) for each in contained] == [("j1", "memory", False)]
    assert "50 MB" in contained[0].text
    node.run(1.0)
    assert len(node.agent.status().contained) == 1, "its user gets one message"
    assert node.states() == {"j1": "running", "j2": "running"}


def test_a_job_that_dies_while_suspended_leaves_its_place(make_node: Callable[..., Node]):
    node = make_node()
    dead = node.job(1)
    node.order(alone(1), (0,), slice_s=600.0)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=600.0)
    node.until(lambda: node.states() == {"j1": "suspended", "j2": "running"}, "time slice of the other")
    node.until(lambda: node.agent.state.is_frozen(1), "SIGSTOP")
    dead.kill()
    dead.wait()
    node.until(lambda: node.agent.status().contained, "containment")
    assert [(each.job, each.cause) for each in node.agent.status().contained] == [("j1", "died")]
    assert [each.shared.jobs for each in node.agent.status().groups] == [("j1", "j2")]
    assert [pack.jobs for pack in node.agent.status().groups[0].running] == [("j2",)]


def test_a_job_that_slurm_does_not_cancel_at_first_is_cancelled_later(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    node = make_node(misuse_s=0.3)
    node.job(1, "--leak", "10")
    node.job(2)
    monkeypatch.setattr(node_state, "RETRY_S", 0.1)

    def away(job_id: str) -> None:
        node.slurm.calls.append(("away", int(job_id)))
        raise ControllerAway("no answer", command="scancel", job_id=job_id)

    node.order([Pack((JobId("j1"), JobId("j2")), limits=(Limit(memory_mb=50), Limit(memory_mb=50)))], (0,))
    with monkeypatch.context() as patch:
        patch.setattr(node.slurm, "cancel", away)
        node.until(lambda: ("away", 1) in node.slurm.calls, "attempt")
        assert not node.agent.status().contained
    node.until(lambda: node.agent.status().contained, "containment")
    assert node.agent.status().contained[0].killed
