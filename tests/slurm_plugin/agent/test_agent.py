"""The agent of a node, with real processes as jobs that it suspends and resumes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobControl, JobStatus, control_path, devices_file, statuses_dir
from penstock_profiles.nvml import Device, Lost, Process, Reading, Sample
from penstock_scheduler.model import JobId, Limit, Pack, SharedGpus
from penstock_scheduler.sharing.control import ControlSettings, ShareControl, Steps, advance
from penstock_scheduler.sharing.messages import NodeStatus, OrderedJob, order_file, status_file
from penstock_scheduler.sharing.node import Account, Group
from penstock_slurm.agent import measuring, node_state, node_view, state
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.observed import steps_between
from penstock_slurm.agent.processes import IN_CGROUP, Processes
from penstock_slurm.agent.state import LocalJob, SavedState, StateFile, load
from penstock_slurm.gateway import ControllerAway, SlurmError
from penstock_slurm.loopback.waiting import wait_for
from tests.profiles import fake_nvml
from tests.slurm_plugin.boards import TWO_PAIRS

from .node import Node, alone


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(**settings: object) -> Node:
        nodes.append(Node(tmp_path, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def steps(node: Node, number: int) -> int:
    said = node.said(number)
    return said.steps if said is not None else 0


def control(node: Node, number: int) -> JobControl:
    return JobControl.model_validate_json(control_path(node.run_dir, number).read_bytes())


def at_once(node: Node) -> list[str]:
    """Jobs that may use a GPU on which another one may, too."""
    users: dict[int, list[str]] = {}
    for each in node.agent.status().jobs:
        for device in each.devices if each.state in ("running", "suspending") else ():
            users.setdefault(device, []).append(each.job)
    return [job for jobs in users.values() if len(jobs) > 1 for job in jobs]


def test_three_jobs_on_two_gpus_take_turns_and_none_meets_another(make_node: Callable[..., Node]):
    """Each progresses, no GPU ever has two, and the next in line runs on whichever comes free."""
    node = make_node()
    for number in (1, 2, 3):
        node.job(number)
    node.order(alone(1, 2, 3), (0, 1), slice_s=0.6)
    crowds: list[str] = []

    def all_have_run() -> bool:
        crowds.extend(at_once(node))
        return min(steps(node, number) for number in (1, 2, 3)) > 20 and len(node.slurm.calls) >= 8

    node.until(all_have_run, "turns of all")
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
    node.until(lambda: min(steps(node, 1), steps(node, 2)) > 20, "turns of both")
    for better, worse, ranks in ((2, 1, (1, 0)), (1, 2, (0, 1))):
        trials(*ranks)
        node.until(lambda job=f"j{worse}": node.states()[job] == "suspended", "the end of the worse one's turn")
        before, had = steps(node, worse), steps(node, better)
        calls = len(node.slurm.calls)
        node.until(lambda job=better, had=had: steps(node, job) > had + 200, "slices of the better one")
        assert steps(node, worse) == before
        assert not {("suspend", better), ("resume", worse)} & set(node.slurm.calls[calls:]), "it keeps its GPU"


def test_three_jobs_of_one_pack_run_at_once_each_with_its_limits(make_node: Callable[..., Node]):
    """The policies make pairs; the node takes any number."""
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


def test_an_agent_that_starts_again_goes_on_without_a_daemon(make_node: Callable[..., Node]):
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (3,), slice_s=0.5)
    node.until(lambda: "suspended" in node.states().values() and "running" in node.states().values(), "turn")
    before = node.agent.status()
    shutil.rmtree(node.spool)
    node.start()
    after = node.agent.status()
    assert (after.history, after.order, node.states()) == (
        before.history,
        before.order,
        {j.job: j.state for j in before.jobs},
    )
    had = [steps(node, 1), steps(node, 2)]
    node.until(lambda: steps(node, 1) > had[0] + 20 and steps(node, 2) > had[1] + 20, "turns without a daemon")
    assert set(node.devices().values()) == {(3,)}


def test_the_first_slice_of_a_job_counts_from_its_first_step(make_node: Callable[..., Node]):
    """It takes 1.5 s to start, three slices: it is not put back before it has run for a whole one, and is measured."""
    node = make_node()
    node.job(1)
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: steps(node, 1) > 0, "steps of the first")
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running", "turn of the newcomer")
    began_s = time.time()
    node.job(2, "--late", "1.5")
    node.until(lambda: node.states()["j2"] != "running", "end of its first turn")
    held_s = time.time() - began_s
    assert steps(node, 2) > 0
    account = node.agent.state.saved.account
    assert "j2" in account.profiled
    assert 0.5 <= account.ran_s[JobId("j2")] <= held_s - 1.5
    assert account.first_slice_s[JobId("j2")] >= began_s + 2.0
    node.until(lambda: node.states()["j2"] == "running", "next turn")
    node.until(lambda: node.states()["j2"] != "running", "end of its next turn, a usual one")
    node.until(lambda: next(each.use for each in node.agent.status().jobs if each.job == "j2").profiled, "measurement")


def test_a_job_that_tells_no_step_gives_its_turn_up_all_the_same(make_node: Callable[..., Node]):
    """It hangs, or is of a program that knows nothing of agents: once, its turn is as long as it may take to start."""
    node = make_node(start_wait_s=1.5)
    node.job(1)
    node.job(2, "--mute")
    node.order(alone(2, 1), (0,), slice_s=0.3)
    node.until(lambda: node.states()["j2"] == "running", "turn of the mute one")
    node.until(lambda: node.states()["j2"] != "running", "end of its first turn")
    mute = node.agent.state.jobs["j2"]
    assert mute.asked_s - mute.resumed_s >= 1.5
    node.until(lambda: node.slurm.calls.count(("suspend", 2)) >= 3 and steps(node, 1) > 0, "turns of both")
    assert next(each.use for each in node.agent.status().jobs if each.job == "j2").ran_s >= 1.5


def test_a_job_that_is_alone_has_not_run_before_it_has_started(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measuring, "ALONE_S", 0.5)
    node = make_node()
    node.job(5, "--late", "1")
    own = OrderedJob(job=JobId("j5"), slurm_job=5, uid=os.getuid(), gpus=1, running=True, own_devices=(4,))
    node.order([], (), more=[own])
    node.until(lambda: node.agent.status().jobs and node.agent.status().jobs[0].use.ran_s > 0, "time that it ran")
    assert steps(node, 5) > 0
    node.until(lambda: node.agent.status().jobs[0].use.profiled, "measurement")


@pytest.mark.parametrize(("guest", "start_wait_s"), [(("--late", "1"), 1000.0), (("--mute",), 2.0)])
def test_a_guest_that_has_said_nothing_is_not_taken_for_one_that_keeps_to_its_limit(
    make_node: Callable[..., Node], guest: tuple[str, ...], start_wait_s: float
):
    """The guaranteed job waits until the guest has spoken, or for so long that it is one that never does."""
    node = make_node(start_wait_s=start_wait_s, suspend_wait_s=1000)
    node.job(1, *guest)
    node.order(alone(1), (0,), slice_s=60.0)
    node.until(lambda: node.states()["j1"] == "running", "start of the guest")
    node.job(2)
    pack = Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j2"), limits=(Limit(memory_mb=400), Limit()))
    node.order([pack], (0,), slice_s=60.0)
    node.until(lambda: node.states()["j2"] == "running", "start of the guaranteed one")
    said, hosted = node.said(1), node.agent.state.jobs
    if "--mute" in guest:
        assert hosted["j2"].resumed_s - hosted["j1"].resumed_s >= start_wait_s
    else:
        assert said is not None
        assert said.number == control(node, 1).number


def test_two_that_are_new_and_limited_do_not_wait_for_one_anothers_word(make_node: Callable[..., Node]):
    """Their tasks begin once they are bound to GPUs, and say nothing before."""
    node = make_node(suspend_wait_s=1000)
    node.order([Pack((JobId("j1"), JobId("j2")), limits=(Limit(memory_mb=50), Limit(memory_mb=50)))], (0,))
    node.until(lambda: node.states() == {"j1": "running", "j2": "waiting"}, "start of the first")
    node.job(1)
    node.until(lambda: node.states() == {"j1": "running", "j2": "running"}, "start of both")


def test_two_whose_limits_rise_do_not_wait_for_one_another(make_node: Callable[..., Node]):
    """As when a third has left the GPU, or it is known only now how much memory that has."""
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


@pytest.mark.parametrize("goes", ["guaranteed", "pack"])
def test_a_guest_that_never_says_anything_stands_still_while_the_guaranteed_job_is_there(
    make_node: Callable[..., Node], goes: str
):
    """It cannot be told its share. Also after a restart of the agent. It goes on when the other ends, or has another
    place."""
    node = make_node(start_wait_s=0.5, suspend_wait_s=0.3)
    guaranteed = node.job(1, "--step", "0.02")
    node.job(2, "--mute")
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=0.3)
    node.until(lambda: node.states() == {"j1": "running", "j2": "suspended"}, "containment")
    for _ in range(2):
        (contained,) = node.agent.status().contained
        assert (contained.job, contained.cause, contained.killed) == ("j2", "share", False)
        assert "Penstock's executor" in contained.text
        node.until(lambda: [each.use.answers for each in node.agent.status().jobs] == [True, False], "who answers")
        assert "keep to its share" in node.agent.status().jobs[1].why
        node.run(1.2)
        assert node.states() == {"j1": "running", "j2": "suspended"}
        assert node.agent.status().groups[0].share == 0, "what is measured with nobody beside says nothing of a share"
        node.start()
    if goes == "guaranteed":
        guaranteed.kill()
        guaranteed.wait()
    else:
        node.order(alone(1, 2), (0, 1), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running", "end of its standing still")


@pytest.mark.parametrize("misuse", ["tell", "kill"])
def test_a_guest_that_trains_beyond_its_share_is_frozen_or_ended(make_node: Callable[..., Node], misuse: str):
    """It says that it has share 0, in a slice that does not end, and makes step after step."""
    node = make_node(misuse_s=1.0, misuse=misuse)
    node.job(1, "--step", "0.02")
    node.job(2, "--greedy")
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=600.0)
    node.until(lambda: node.agent.status().contained, "containment")
    (contained,) = node.agent.status().contained
    assert (contained.job, contained.killed) == ("j2", misuse == "kill")
    assert contained.cause == ("lies" if misuse == "kill" else "share")
    assert "more than its share" in contained.text
    if misuse == "tell":
        node.until(lambda: node.states() == {"j1": "running", "j2": "suspended"}, "suspension")
    assert (("cancel", 2) in node.slurm.calls) == (misuse == "kill")


class Guest:
    """A guest that tells what a job with steps of so many seconds would: at share 0 it pauses for so long after
    each."""

    def __init__(self, node: Node, step_s: float, pause_s: float) -> None:
        self._node, self._step_s, self._cycle_s = node, step_s, step_s + pause_s
        self._begun_s = 0.0

    def tell(self, now_s: float, number: int) -> None:
        self._begun_s = self._begun_s or now_s
        made = int((now_s - self._begun_s + self._cycle_s - self._step_s) / self._cycle_s)
        status = JobStatus(number=number, pid=9, time_s=now_s, steps=made, seconds=made * self._step_s)
        write_whole(statuses_dir(self._node.run_dir, 2) / "0.json", status.model_dump_json())


@pytest.mark.parametrize(
    ("step_s", "pause_s", "keeps"),
    [(0.1, 30.0, True), (20.0, 30.0, True), (100.0, 30.0, True), (20.0, 0.0, False), (2.0, 2.0, False)],
)
def test_a_guest_of_several_processes_that_makes_a_step_now_and_then_is_no_liar(
    make_node: Callable[..., Node], step_s: float, pause_s: float, keeps: bool
):
    """It pauses for 30 s at most. For 20 minutes it is told share 0, in steps of whatever length."""
    node = make_node(start_wait_s=5.0, misuse="tell", sample_s=60.0)
    guest, now_s = Guest(node, step_s, pause_s), time.time()
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=1e4)
    for _ in range(600):
        now_s += 2.0
        node.agent.tick(now_s)
        guest.tell(now_s, control(node, 2).number)
        if node.agent.status().contained:
            break
    assert [each.cause for each in node.agent.status().contained] == ([] if keeps else ["share"])


def test_a_guest_that_takes_no_new_word_is_frozen_after_a_while(make_node: Callable[..., Node]):
    """It carries out the first word for ever. Late files are no matter: only after 150 s and two steps it stands
    still."""
    node = make_node(start_wait_s=120.0, suspend_wait_s=30.0, sample_s=60.0)
    guest, began_s = Guest(node, 4.0, 0.0), time.time()
    node.order([Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))], (0,), slice_s=1e4)
    now_s = began_s
    while not node.agent.status().contained and now_s < began_s + 1000:
        now_s += 0.5
        node.agent.tick(now_s)
        guest.tell(now_s, 0)
    assert 150 <= now_s - began_s < 200
    (contained,) = node.agent.status().contained
    assert (contained.job, contained.cause, contained.killed) == ("j2", "share", False)
    assert "has not taken up its share" in contained.text


def test_a_job_waits_for_its_gpus_until_those_before_it_are_off_them(make_node: Callable[..., Node]):
    """Its file of devices comes with its first turn, and before Slurm has started it it has none."""
    node = make_node()
    node.job(1)
    node.order(alone(1, 2), (0,), slice_s=30.0, running=[1])
    node.until(lambda: node.states()["j1"] == "running", "start of the first")
    assert node.states()["j2"] == "waiting"
    assert not devices_file(node.run_dir, 2).exists()
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=30.0)
    node.until(lambda: node.states() == {"j1": "suspended", "j2": "running"}, "turn of the newcomer")
    assert devices_file(node.run_dir, 2).read_text() == "0\n"


def test_a_state_that_would_not_fit_into_the_hosts_memory_keeps_its_turn(make_node: Callable[..., Node]):
    """The first says that it holds 8 MB more with each step, of 100 MB that are allowed: it runs on, and the status
    says why."""
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


def test_nobody_comes_to_a_gpu_on_which_frozen_ones_hold_too_much(make_node: Callable[..., Node]):
    """The first holds 10,000 of 16,160 MB and never moves off. The second is tried, and takes 8,000: from then on it
    waits."""
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
    node.until(lambda: node.agent.state.jobs["j2"].memory_mb == 8_000, "a look at the second")
    held_mb.popitem()
    node.until(lambda: "10000 MB" in why(), "no room")
    node.until(lambda: node.states() == {"j1": "running", "j2": "suspended"}, "turn of the first again")
    resumed = node.slurm.calls.count(("resume", 2))
    had = node.slurm.calls.count(("resume", 1))
    idle: list[bool] = []

    def more() -> bool:
        (group,) = node.agent.groups.groups
        idle.append(node.states()["j1"] == "suspended" and group.running == (Pack((JobId("j2"),)),))
        return node.slurm.calls.count(("resume", 1)) > had + 1

    node.until(more, "more turns of the first")
    assert any(idle)
    assert not any(map(all, pairwise(idle))), "the turn of one that cannot come ends at once"
    assert node.slurm.calls.count(("resume", 2)) == resumed
    assert "8000 of the 16160 MB" in why()
    del held_mb[first.pid]
    first.kill()
    first.wait()
    node.until(lambda: node.states()["j2"] == "running", "turn of the second, once there is room")
    assert why() == ""


def test_what_a_job_has_had_is_what_it_held_its_gpu_for(make_node: Callable[..., Node]):
    """The first is slow to leave. By the agent's own notes: until it is off it is charged, and then the second."""
    node = make_node(suspend_wait_s=0.5)
    node.job(1, "--deaf")
    node.order(alone(1), (0,), slice_s=60.0)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=60.0)
    hosted, account = node.agent.state.jobs, node.agent.groups.account
    node.until(lambda: hosted["j1"].state == "suspending", "spec")
    before_s, asked_s = dict(account.served_s), hosted["j1"].asked_s
    node.until(lambda: hosted["j2"].state == "running", "turn of the second")
    node.agent.groups.left(JobId("j1"), node.agent.state.now_s)
    assert account.served_s["j1"] - before_s["j1"] == pytest.approx(hosted["j1"].free_s - asked_s)
    assert account.served_s["j2"] - before_s["j2"] == pytest.approx(node.agent.state.now_s - hosted["j2"].resumed_s)
    assert hosted["j2"].resumed_s >= hosted["j1"].free_s >= asked_s + 0.5


@pytest.mark.parametrize("no_answer", ["freeze", "kill"])
def test_a_job_that_does_not_answer_is_frozen_or_ended(make_node: Callable[..., Node], no_answer: str):
    node = make_node(suspend_wait_s=0.5, no_answer=no_answer)
    node.job(1, "--deaf")
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.agent.status().contained, "containment")
    node.until(lambda: node.states()["j2"] == "running", "turn of the other")
    contained = node.agent.status().contained[0]
    assert (contained.job, contained.cause, contained.killed) == ("j1", "no-answer", no_answer == "kill")
    assert "within 0.5 s" in contained.text
    assert (("cancel", 1) in node.slurm.calls) == (no_answer == "kill")
    assert (("suspend", 1) in node.slurm.calls) == (no_answer == "freeze")


def test_a_gpu_is_free_when_the_job_on_it_is_seen_to_stand_still(make_node: Callable[..., Node]):
    """A busy node freezes it later than `freeze_s`: until then nobody else has its GPU."""
    node = make_node(start_wait_s=0.0)
    node.slurm.freeze_after_s = 3.0
    process = node.job(1, "--mute")
    node.order(alone(1), (0,), slice_s=0.5)

    def deaf() -> bool:
        ignored = re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGTSTP - 1) & 1)

    node.until(lambda: 1 in node.agent.state.living and deaf(), "its process")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running", "turn of the other")
    assert node.slurm.letter(1) == "T"
    assert node.agent.state.jobs["j2"].resumed_s >= node.agent.state.jobs["j1"].free_s


def test_slurm_is_asked_for_nothing_before_the_node_has_done_what_it_was_asked_before(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """slurmd would do both in any order. Slices are shorter than what it takes to let a job go on, or to freeze it."""
    node = make_node(start_wait_s=0.0)
    node.slurm.freeze_after_s, node.slurm.resume_after_s = 1.0, 3.0
    suspend, resume = node.slurm.suspend, node.slurm.resume
    seen: list[tuple[str, str]] = []

    def asked(call: Callable[[str], None], job_id: str) -> None:
        seen.append((call.__name__, node.slurm.letter(int(job_id))))
        call(job_id)

    monkeypatch.setattr(node.slurm, "suspend", lambda job_id: asked(suspend, job_id))
    monkeypatch.setattr(node.slurm, "resume", lambda job_id: asked(resume, job_id))
    for number in (1, 2):
        node.job(number, "--mute")
    node.until(lambda: all(node.slurm.letter(number) == "S" for number in (1, 2)), "their processes")
    node.order(alone(1, 2), (0,), slice_s=0.2)
    node.until(lambda: [call for call, _ in seen].count("resume") > 3, "turns")
    letters = {call: {letter for name, letter in seen if name == call} for call in ("suspend", "resume")}
    assert "T" not in letters["suspend"]
    assert letters["resume"] == {"T"}


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
    node.until(lambda: node.states()["j2"] == "running", "turn of the other")


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
    assert len(node.agent.status().contained) == 1, "its user is told once"
    assert node.states() == {"j1": "running", "j2": "running"}


def test_a_job_that_dies_while_suspended_leaves_its_place(make_node: Callable[..., Node]):
    node = make_node()
    dead = node.job(1)
    node.order(alone(1), (0,), slice_s=600.0)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=600.0)
    node.until(lambda: node.states() == {"j1": "suspended", "j2": "running"}, "turn of the other")
    node.until(lambda: node.agent.state.is_frozen(1), "SIGSTOP")
    dead.kill()
    dead.wait()
    node.until(lambda: node.agent.status().contained, "containment")
    assert [(each.job, each.cause) for each in node.agent.status().contained] == [("j1", "died")]
    assert [each.shared.jobs for each in node.agent.status().groups] == [("j1", "j2")]
    assert [pack.jobs for pack in node.agent.status().groups[0].running] == [("j2",)]


def test_a_guest_is_cut_in_the_tick_in_which_a_guaranteed_job_comes(make_node: Callable[..., Node]):
    node = make_node()
    node.job(1)
    node.order(alone(1), (0,), slice_s=60.0)
    node.until(lambda: node.states()["j1"] == "running" and steps(node, 1) > 5, "steps")
    assert control(node, 1).compute == 1.0
    node.job(2)
    pack = Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j2"), limits=(Limit(memory_mb=400), Limit()))
    node.order([pack], (0,), slice_s=60.0)
    node.agent.tick(time.time())
    assert (control(node, 1).compute, control(node, 1).memory_mb) == (0.0, 400)
    node.until(lambda: (said := node.said(1)) is not None and said.number == control(node, 1).number, "answer")
    node.until(lambda: node.states()["j2"] == "running", "start of the guaranteed one")
    node.until(lambda: node.said(2) is not None, "word of the guaranteed one")
    before = steps(node, 1)
    node.run(1.0)
    assert steps(node, 1) <= before + 1
    assert control(node, 2).compute == 1.0


class Training:
    """Jobs 1 and 2 without processes, after their first step: by a clock of its own, each tells how many it would have
    made."""

    def __init__(self, node: Node) -> None:
        self._node, self._made = node, {1: 1.0, 2: 1.0}
        self.now_s = time.time()
        node.agent.tick(self.now_s)

    def run(self, seconds: float, rates: Callable[[int], float], step_s: float = 0.02) -> None:
        """So many steps a second, each of so many seconds."""
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            for number in self._made:
                self._made[number] += rates(number) * 0.1
                made = round(self._made[number])
                status = JobStatus(
                    number=control(self._node, number).number,
                    pid=number,
                    time_s=self.now_s,
                    steps=made,
                    seconds=made * step_s,
                    squares=made * step_s**2,
                    utilisation=0.5,
                )
                write_whole(statuses_dir(self._node.run_dir, number) / "0.json", status.model_dump_json())
            self._node.agent.tick(self.now_s)


def test_the_guests_share_rises_while_the_guaranteed_job_keeps_its_speed(make_node: Callable[..., Node]):
    """A guest that takes nothing, and keeps to its share: that goes up by steps, with looks at 0 between them."""
    node = make_node(misuse_s=1.0, control={"tolerance": 0.3, "search_periods": 1})
    pack = Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))
    node.order([pack], (0,), slice_s=1.0)
    training = Training(node)
    shares: list[float] = []
    for _ in range(300):
        training.run(0.1, lambda number: 50 * control(node, number).compute)
        shares.append(node.agent.status().groups[0].share)
    assert shares[0] == 0.0
    risen_to = [share for share, before in zip(shares[1:], shares, strict=False) if share and share != before]
    assert len(risen_to) > 2
    assert risen_to == sorted(risen_to)
    assert risen_to[-1] > 0.05
    assert 0.0 in shares[shares.index(risen_to[0]) :]
    assert not node.agent.status().contained


def test_what_a_pack_does_to_its_jobs_is_measured_and_numbered(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """Alone they make 50 and 20 steps a second, together 40 and 10: speeds 0.8 and 0.5, told under a new number each
    time."""
    node = make_node()
    for command in ("suspend", "resume"):  # there are no processes
        monkeypatch.setattr(node.slurm, command, lambda job_id: None)
    node.order(alone(1, 2), (0, 1), slice_s=1.2)
    training = Training(node)
    training.run(2.0, lambda number: {1: 50.0, 2: 20.0}[number])
    assert [each.use.utilisation for each in node.agent.status().jobs] == [0.5, 0.5], "measured alone"
    node.order([Pack((JobId("j1"), JobId("j2")))], (0, 1), slice_s=1.2)
    training.run(4.5, lambda number: {1: 40.0, 2: 10.0}[number])
    packs = node.agent.status().packs
    assert [each.number for each in packs] == list(range(1, len(packs) + 1))
    assert len(packs) >= 2
    assert packs[1].seen.gpu_type == "v100"
    assert packs[1].seen.speeds == pytest.approx((0.8, 0.5), rel=0.02)
    training.now_s += 1.5
    node.order(alone(1), (0, 1), slice_s=1.2)
    node.agent.tick(training.now_s)
    assert node.states() == {"j1": "running"}, "one leaves as a slice ends"


def test_an_order_that_is_broken_or_anothers_changes_nothing(make_node: Callable[..., Node]):
    node = make_node()
    node.job(1)
    node.order(alone(1), (0,))
    node.until(lambda: node.states() == {"j1": "running"}, "start")
    path = order_file(node.spool, node.name)
    good = path.read_text()
    for text in (good[:-5], good.replace(node.name, "another"), "[]"):
        path.write_text(text)
        node.agent.tick(time.time())
        assert node.states() == {"j1": "running"}
    path.unlink()
    node.agent.tick(time.time())
    assert node.states() == {"j1": "running"}


def test_files_that_are_not_the_jobs_own_are_not_read(tmp_path: Path):
    channels = Channels(tmp_path / "run")
    channels.open(7, os.getuid())
    folder = statuses_dir(tmp_path / "run", 7)
    whole = JobStatus(pid=1, time_s=1.0).model_dump_json()
    secret = tmp_path / "secret"
    secret.write_text(whole)
    (folder / "0.json").symlink_to(secret)
    (folder / "1.json").write_text(whole + " " * 20_000)
    (folder / "2.json").write_text(whole[:-3])
    (folder / "x.json").write_text(whole)
    os.mkfifo(folder / "3.json")
    (folder / "4.json").write_text(whole)
    assert set(channels.statuses(7, os.getuid())) == {4}
    assert channels.statuses(7, os.getuid() + 1) == {}


def test_a_job_with_gpus_of_its_own_is_measured_and_left_alone(make_node: Callable[..., Node]):
    node = make_node()
    node.job(5)
    own = OrderedJob(
        job=JobId("j5"), slurm_job=5, uid=os.getuid(), gpus=2, running=True, own_devices=(4, 5), kind="bert"
    )
    node.order([], (), more=[own])
    node.until(lambda: steps(node, 5) > 5, "steps")
    assert (node.states(), node.devices()) == ({"j5": "running"}, {"j5": (4, 5)})
    assert not devices_file(node.run_dir, 5).exists()
    assert node.agent.status().jobs[0].use.kind == "bert"


def test_nvml_tells_memory_utilisation_and_errors_of_each_job(make_node: Callable[..., Node]):
    """One GPU, as a driver would tell it, with a process of the job on it and an XID."""
    node = make_node()
    job = node.job(1)
    device = Device(0, "GPU-1", "Tesla V100-SXM2-16GB", "v100", 16_160.0)
    xids = [(31,), ()]
    lost = [(Lost(1, "GPU-2", "XID 79: the GPU has fallen off the bus", (79,)),), (Lost(1, "GPU-2", "the same"),)]

    def sample() -> Sample:
        using = (Process(job.pid, 900.0, 0.25),)
        codes = xids.pop(0) if len(xids) > 1 else ()
        return Sample((Reading(device, 1400.0, 0.25, 0.1, using, codes),), lost.pop(0) if len(lost) > 1 else lost[0])

    node.sample = sample
    node.start()
    node.order(alone(1), (0,), slice_s=1.0)
    node.until(lambda: node.agent.status().jobs and node.agent.status().jobs[0].use.utilisation is not None, "use")
    status = node.agent.status()
    assert (status.jobs[0].use.utilisation, status.jobs[0].use.memory_mb) == (0.25, 900)
    assert status.gpu_memory_mb == {"v100": 16_160}
    assert [(each.number, each.device, each.xid) for each in status.xids] == [(1, 0, 31), (2, 1, 79)]


def test_gpus_are_given_out_as_they_are_connected(make_node: Callable[..., Node]):
    """Of two that begin on a node whose GPUs 0 and 2 share a switch, as 1 and 3 do, each gets a pair; and the daemon is
    told."""
    node = make_node()
    node.links = TWO_PAIRS
    node.start()
    packs = [Pack((JobId("j1"),), 2), Pack((JobId("j2"),), 2)]
    node.order(packs, (0, 1, 2, 3), fields={1: {"gpus": 2}, 2: {"gpus": 2}})
    node.until(lambda: all(node.devices().values()), "devices")
    assert node.devices() == {"j1": (0, 2), "j2": (1, 3)}
    assert devices_file(node.run_dir, 1).read_text() == "0,2\n"
    assert node.told().links == TWO_PAIRS


def test_the_agent_asks_the_driver_how_gpus_are_connected(tmp_path: Path):
    """The program itself, on a stand-in for NVIDIA's library: two GPUs with three NVLinks. Where the site names the
    device files NVML's indexes may not be Slurm's."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install -e '.[nvml]'")
    scenario = tmp_path / "scenario"
    scenario.write_text(fake_nvml.TWO_GPUS + "0.nvlinks 1 1 1\n1.nvlinks 0 0 0\n")
    environment = fake_nvml.environment(fake_nvml.build(tmp_path), scenario)
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    with contextlib.ExitStack() as stack:
        agents: dict[str, subprocess.Popen[bytes]] = {}
        for name, files in (("drivers", ""), ("own", 'gpu_file = "/dev/nvidia[0-1]"')):
            folder = tmp_path / name
            (folder / "spool").mkdir(parents=True)
            settings = folder / "penstock.toml"
            settings.write_text(
                f'[slurm]\npartitions = ["gpu"]\nspool_dir = "{folder}/spool"\nconf = "{folder}/slurm.conf"\n'
                f'[agent]\nrun_dir = "{folder}/run"\nstate_dir = "{folder}/state"\n{files}\n'
            )
            command = [sys.executable, "-m", "penstock_slurm.agent.main", "--config", str(settings), "--node", "n0"]
            agent = stack.enter_context(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            stack.callback(agent.kill)
            agents[name] = agent
        for name, agent in agents.items():
            told = status_file(tmp_path / name / "spool", "n0")
            wait_for(told.exists, 120, "a status")
            agent.terminate()
            assert agent.wait() == 0
            found[name] = NodeStatus.model_validate_json(told.read_bytes()).links
    assert found == {"drivers": ((0, 9), (9, 0)), "own": ()}


def test_steps_between_two_statuses():
    """Of 0.1, 0.2 and 0.3 s after one of 5 s: mean 0.2, squared distances 0.01 + 0 + 0.01."""
    before = JobStatus(pid=1, time_s=0.0, steps=1, seconds=5.0, squares=25.0)
    after = JobStatus(pid=1, time_s=0.6, steps=4, seconds=5.6, squares=25.14)
    found = steps_between(before, after)
    assert (found.count, found.mean_s, found.squares) == (3, pytest.approx(0.2), pytest.approx(0.02))
    assert steps_between(before, after.model_copy(update={"pid": 2})).count == 0
    assert steps_between(None, after).count == 0
    for seconds in (5.0, 4.0, 5.0 + 1e-9, 1e15):
        assert steps_between(before, after.model_copy(update={"seconds": seconds})) == Steps(), (
            "no time, or none that is"
        )


def test_a_guaranteed_job_that_tells_steps_and_no_time_fails_no_tick(make_node: Callable[..., Node]):
    """Nothing is known of its speed, so the guest stays at share 0."""
    node = make_node(start_wait_s=0.1)
    node.order([Pack((JobId("j1"), JobId("j2")), 1, guaranteed=JobId("j1"))], (0,), slice_s=0.2)
    now_s = time.time()
    for tick in range(40):
        now_s += 0.1
        node.agent.tick(now_s)
        status = JobStatus(number=control(node, 1).number, pid=9, time_s=now_s, steps=20 * (tick + 1))
        write_whole(statuses_dir(node.run_dir, 1) / "0.json", status.model_dump_json())
    assert node.told().groups[0].share == 0


def test_nothing_that_a_job_writes_stops_the_agent(make_node: Callable[..., Node]):
    """Odd names, numbers beyond all bounds, and folders in folders: the other job is served all the same."""
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (0, 1), slice_s=30.0)
    node.until(lambda: set(node.states().values()) == {"running"}, "start")
    node.until(lambda: node.said(1) is not None, "word")
    folder = statuses_dir(node.run_dir, 1)
    (folder / "\u00b2").touch()
    fields = {"pid": 9, "time_s": 1.0}
    huge: list[dict[str, object]] = [{"steps": 10**400}, {"seconds": 1e200, "steps": 1}, {"squares": 1e300}]
    for rank, more in enumerate(huge, start=1):
        (folder / f"{rank}.json").write_text(json.dumps(fields | more))
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        node.agent.tick(time.time())
        assert set(Channels(node.run_dir).statuses(1, os.getuid())) == {0}
        node.slurm.processes[1].kill()
        node.slurm.processes[1].wait()
        node.order(alone(2), (0, 1), slice_s=30.0)
        node.until(lambda: not control_path(node.run_dir, 1).exists(), "end of the channel")
        assert node.states() == {"j2": "running"}
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_full_folder_stops_neither_turns_nor_other_jobs(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """The first job's folder takes nothing more, and the state cannot be saved: the second gets its GPU."""
    node = make_node()
    for number in (1, 2):
        node.job(number)

    def bind(channels: Channels, number: int, devices: tuple[int, ...], gpus: Sequence[Path]) -> None:
        if number == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(devices_file(channels.folder, number), str(devices[0]))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Channels, "bind", bind)
    monkeypatch.setattr(state, "write_whole", fail)
    node.order(alone(1, 2), (0, 1), slice_s=30.0)
    node.agent.tick(time.time())
    assert node.states() == {"j1": "waiting", "j2": "running"}
    assert "No space left" in next(each.why for each in node.agent.status().jobs if each.job == "j1")


def test_a_state_of_another_boot_is_not_taken_up(tmp_path: Path):
    before = load(tmp_path / "state.json", "a")
    StateFile(tmp_path / "state.json").save(before)
    assert load(tmp_path / "state.json", "a") == before
    assert load(tmp_path / "state.json", "b").history != before.history


OTHER_EVIDENCE = {"cycles": 3.0, "mean": 0.02, "squares": 0.1, "variance": 1e-4}
OTHER_TRIED = {"share": 0.3, "evidence": OTHER_EVIDENCE}


@pytest.mark.parametrize(
    "changed",
    [
        {"good": 0.2, "seen": []},
        {"good": OTHER_TRIED, "bad": OTHER_TRIED},
        {"good": {"share": 0.3}},
        {"good": {"share": 0.3, "evidence": {}}},
        {"base": {"count": 3, "mean_s": 0.1, "squares": 0.0, "least_s": 0.1}},
        {},
    ],
    ids=["control", "evidence", "no evidence", "less evidence", "steps", "same release"],
)
def test_of_what_another_release_remembered_only_the_search_for_a_share_is_begun_anew(
    tmp_path: Path, changed: dict[str, object]
):
    """Whatever of it was otherwise. With the release of that file it goes on."""
    shared = SharedGpus("n0", 1, (Pack(("1", "2"), 1, guaranteed="1"),))
    control = ShareControl()
    for steps in (Steps.of([0.1, 0.11] * 10), Steps.of([0.1, 0.3] * 10)):  # a base, and a share beside it
        control = advance(control, steps, ControlSettings())
    group = Group(shared, since_s=5.0, running=shared.packs, control=control)
    before = SavedState(
        boot="a", history="h", groups=[group], account=Account(served_s={"1": 60.0}), jobs={"1": LocalJob(7)}
    )
    StateFile(tmp_path / "state.json").save(before)
    told = json.loads((tmp_path / "state.json").read_text())
    told["groups"][0]["control"] |= changed
    (tmp_path / "state.json").write_text(json.dumps(told))
    if changed:
        group.control = ShareControl()
    assert load(tmp_path / "state.json", "a") == before


def test_a_gpu_is_free_only_when_the_job_before_has_ended(make_node: Callable[..., Node]):
    """The daemon does not name a job any more whose processes still live, as Slurm's in state COMPLETING do."""
    node = make_node()
    before = node.job(1)
    node.order(alone(1), (0,))
    node.until(lambda: node.states() == {"j1": "running"}, "start")
    node.job(2)
    node.order(alone(2), (0,))
    node.run(0.5)
    assert node.states() == {"j2": "waiting"}
    assert not devices_file(node.run_dir, 2).exists()
    before.kill()
    before.wait()
    node.until(lambda: node.states() == {"j2": "running"}, "start of the next")


def test_what_slurm_has_done_without_saying_so_is_found_out(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """`scontrol suspend` times out but takes effect. The job beside it ends: the frozen one is resumed."""
    node = make_node(sample_s=0.2)
    suspend = node.slurm.suspend

    def times_out(job_id: str) -> None:
        suspend(job_id)
        raise SlurmError("timed out", command="scontrol suspend", job_id=job_id)

    monkeypatch.setattr(node.slurm, "suspend", times_out)
    monkeypatch.setattr(node_state, "RETRY_S", 0.3)
    node.job(1)
    node.order(alone(1), (0,), slice_s=60.0)
    node.until(lambda: steps(node, 1) > 0, "steps")
    other = node.job(2)
    node.order(alone(1, 2), (0,), slice_s=60.0)
    node.until(lambda: ("suspend", 1) in node.slurm.calls, "suspension")
    assert node.states()["j1"] == "suspending"
    other.kill()
    other.wait()
    node.order(alone(1), (0,), slice_s=60.0)
    had = steps(node, 1)
    node.until(lambda: steps(node, 1) > had + 10, "steps after it was resumed")
    assert node.states()["j1"] == "running"


def test_an_order_that_cannot_be_carried_out_yet_leaves_the_last_one(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    node = make_node()
    node.order(alone(1), (0,), running=[])
    node.agent.tick(time.time())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Channels, "open", full)
        node.order(alone(1, 2), (0,), running=[])
        node.agent.tick(time.time())
        node.agent.tick(time.time())
        assert node.states() == {"j1": "waiting"}
    node.agent.tick(time.time())
    assert node.states() == {"j1": "waiting", "j2": "waiting"}


def test_a_frozen_job_that_is_dismissed_goes_on_when_slurm_is_back(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: "suspended" in node.states().values(), "turn")
    frozen = int(next(job for job, state in node.states().items() if state == "suspended")[1:])

    def away(job_id: str) -> None:
        raise ControllerAway("no answer", command="scontrol resume", job_id=job_id)

    node.slurm.calls.clear()
    monkeypatch.setattr(node_state, "RETRY_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(node.slurm, "resume", away)
        node.order([], ())
        node.run(0.5)
    node.until(lambda: ("resume", frozen) in node.slurm.calls, "resumption")


def test_only_processes_of_the_jobs_user_are_its():
    """One says that it is of job 7, another of one whose number has no end."""
    with contextlib.ExitStack() as stack:
        mine, odd = (
            stack.enter_context(subprocess.Popen(["sleep", "60"], env=os.environ | {"SLURM_JOB_ID": number}))
            for number in ("7", "9" * 5000)
        )
        stack.callback(odd.kill)
        stack.callback(mine.kill)
        processes = Processes("n")
        assert processes.scan({7: os.getuid() + 1}) == {}
        assert processes.job_of(mine.pid) is None

        def is_found() -> bool:
            nonlocal processes
            processes = Processes("n")
            return processes.scan({7: os.getuid()}) == {7: [mine.pid]}

        wait_for(is_found, 120, "the process to be found")
        assert processes.job_of(mine.pid) == 7


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0", "12"),
        ("3:freezer:/slurm/uid_1000/job_12/step_batch", "12"),
        ("3:freezer:/slurm_n1/uid_1000/job_12", "12"),
        ("0::/user.slice/user-1000.slice/job_12", None),
        ("0::/system.slice/slurmstepd.scope/job_99999999999/step_0", None),
    ],
)
def test_the_jobs_cgroup_is_slurms(path: str, number: str | None):
    found = IN_CGROUP.search(path)
    assert (found[1] if found is not None else None) == number


def test_a_running_job_is_found_again_when_the_state_is_lost(make_node: Callable[..., Node]):
    """Its GPU is not given to another one, and it is bound to the same as before."""
    node = make_node()
    node.job(1)
    node.order(alone(1), (3,))
    node.until(lambda: node.states() == {"j1": "running"}, "start")
    node.order([], ())
    node.agent.tick(time.time())  # for one look the daemon does not see it
    shutil.rmtree(node.run_dir.with_name("state"))
    node.start()
    node.job(2)
    node.order(alone(2, 1), (3,), slice_s=60.0)
    node.agent.tick(time.time())
    assert node.devices()["j1"] == (3,)
    assert node.states() in ({"j1": "running", "j2": "waiting"}, {"j1": "suspending", "j2": "waiting"})


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


def test_a_job_keeps_its_turn_only_so_long_on_its_own_word(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """It says that it holds more than the host may take: after two more slices it is frozen, and takes nothing of the
    host's."""
    monkeypatch.setattr(node_view, "MOST_REFUSALS", 2)
    node = make_node(host_memory_mb=100)
    node.job(1, "--leak", "500")
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: (said := node.said(1)) is not None and said.memory_mb > 100, "memory")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running", "turn of the other")
    assert ("suspend", 1) in node.slurm.calls


def test_a_clock_that_is_set_back_holds_up_no_turn(make_node: Callable[..., Node]):
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.agent.tick(time.time() + 3600)
    node.until(lambda: "suspended" in node.states().values(), "turn")
