"""The agent's measurements, with real processes as jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobStatus, devices_file, statuses_dir
from penstock_profiles.nvml import Device, Lost, Process, Reading, Sample
from penstock_scheduler.api.agent_messages import OrderedJob
from penstock_scheduler.model import JobId, Limit, Pack
from penstock_scheduler.rounds.sharing.control import ControlSettings, Steps
from penstock_slurm.agent import measuring
from penstock_slurm.agent.observed import steps_between

from .node import Node, alone, control, steps


def test_the_first_slice_of_a_job_counts_from_its_first_step(make_node: Callable[..., Node]):
    """It takes 1.5 s to start, which is three slices. It is not suspended before it has run for a whole slice and is
    measured."""
    node = make_node()
    node.job(1)
    node.order(alone(1), (0,), slice_s=0.5)
    node.until(lambda: steps(node, 1) > 0, "steps of the first")
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the new job")
    began_s = time.time()
    node.job(2, "--late", "1.5")
    node.until(lambda: node.states()["j2"] != "running", "end of its first time slice")
    held_s = time.time() - began_s
    assert steps(node, 2) > 0
    account = node.agent.state.saved.account
    assert "j2" in account.profiled
    assert 0.5 <= account.ran_s[JobId("j2")] <= held_s - 1.5
    assert account.first_slice_s[JobId("j2")] >= began_s + 2.0
    node.until(lambda: node.states()["j2"] == "running", "next time slice")
    node.until(lambda: node.states()["j2"] != "running", "end of its next time slice, of the usual length")
    node.until(lambda: next(each.use for each in node.agent.status().jobs if each.job == "j2").profiled, "measurement")


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


def test_what_a_job_has_had_is_what_it_held_its_gpu_for(make_node: Callable[..., Node]):
    """The first is slow to leave. In the agent's state, it is charged until it is off its GPUs, and then the second is."""
    node = make_node(suspend_wait_s=0.5)
    node.job(1, "--deaf")
    node.order(alone(1), (0,), slice_s=60.0)
    node.until(lambda: steps(node, 1) > 0, "steps")
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=60.0)
    jobs, account = node.agent.state.jobs, node.agent.groups.account
    node.until(lambda: jobs["j1"].state == "suspending", "a request")
    before_s, asked_s = dict(account.served_s), jobs["j1"].asked_s
    node.until(lambda: jobs["j2"].state == "running", "time slice of the second")
    node.agent.groups.left(JobId("j1"), node.agent.state.now_s)
    assert account.served_s["j1"] - before_s["j1"] == pytest.approx(jobs["j1"].free_s - asked_s)
    assert account.served_s["j2"] - before_s["j2"] == pytest.approx(node.agent.state.now_s - jobs["j2"].resumed_s)
    assert jobs["j2"].resumed_s >= jobs["j1"].free_s >= asked_s + 0.5


def test_an_opportunistic_job_is_cut_in_the_tick_in_which_a_guaranteed_job_comes(make_node: Callable[..., Node]):
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
    node.until(lambda: node.said(2) is not None, "report of the guaranteed one")
    before, begun_s = steps(node, 1), time.monotonic()
    node.run(1.0)
    took_s = time.monotonic() - begun_s  # on a busy machine more than a second
    assert steps(node, 1) <= before + 1 + took_s, "at most one a second, after the one that was under way"
    assert control(node, 2).compute == 1.0


class Training:
    """Jobs 1 and 2 without processes, after their first step. By its own clock, each reports the steps that it would have
    made."""

    def __init__(self, node: Node) -> None:
        self._node, self._made = node, {1: 1.0, 2: 1.0}
        self.now_s = time.time()
        node.agent.tick(self.now_s)

    def run(self, seconds: float, rates: Callable[[int], float], step_s: float = 0.02) -> None:
        """Make this many steps per second, each of this many seconds."""
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


def test_the_opportunistic_jobs_share_rises_while_the_guaranteed_job_keeps_its_speed(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """An opportunistic job that slows nothing down and keeps to its share. The share rises in steps, with measurements at 0 in
    between."""
    monkeypatch.setattr(ControlSettings, "search_periods", 1)
    node = make_node(misuse_s=1.0, control={"tolerance": 0.3})
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
    """Alone they make 50 and 20 steps per second, together 40 and 10: speeds 0.8 and 0.5, reported with a new number each
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
    """A sample of one GPU with a process of the job on it and an XID."""
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


def test_steps_between_two_statuses():
    """Steps of 0.1, 0.2 and 0.3 s after one of 5 s: mean 0.2, squared distances 0.01 + 0 + 0.01."""
    before = JobStatus(pid=1, time_s=0.0, steps=1, seconds=5.0, squares=25.0)
    after = JobStatus(pid=1, time_s=0.6, steps=4, seconds=5.6, squares=25.14)
    found = steps_between(before, after)
    assert (found.count, found.mean_s, found.squares) == (3, pytest.approx(0.2), pytest.approx(0.02))
    assert steps_between(before, after.model_copy(update={"pid": 2})).count == 0
    assert steps_between(None, after).count == 0
    for seconds in (5.0, 4.0, 5.0 + 1e-9, 1e15):
        assert steps_between(before, after.model_copy(update={"seconds": seconds})) == Steps(), (
            "no duration, or an impossible one"
        )


def test_a_guaranteed_job_that_tells_steps_and_no_time_fails_no_tick(make_node: Callable[..., Node]):
    """Its speed is unknown, so the opportunistic job stays at share 0."""
    node = make_node(start_wait_s=0.1)
    node.order([Pack((JobId("j1"), JobId("j2")), 1, guaranteed=JobId("j1"))], (0,), slice_s=0.2)
    now_s = time.time()
    for tick in range(40):
        now_s += 0.1
        node.agent.tick(now_s)
        status = JobStatus(number=control(node, 1).number, pid=9, time_s=now_s, steps=20 * (tick + 1))
        write_whole(statuses_dir(node.run_dir, 1) / "0.json", status.model_dump_json())
    assert node.told().groups[0].share == 0
