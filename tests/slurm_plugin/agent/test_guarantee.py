"""The guarantee by the guaranteed job's own speed. Observations are written by the test, and go through the whole agent."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobStatus, statuses_dir
from penstock_profiles.nvml import SAMPLED_S
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import duty_cycles
from penstock_slurm.agent.agent import DRIVE_S

from .node import Node, alone

HIGH, LOW = 1, 2
PAIR = Pack((JobId("j1"), JobId("j2")), guaranteed=JobId("j1"))
SLICE_S, TICK_S = 10.0, 1.0


class Scene:
    """A guaranteed job that does ten steps a second alone, and an opportunistic one that answers and reports no steps. Time is
    the test's: it passes a second at a time."""

    def __init__(self, node: Node) -> None:
        self.node, self.now_s = node, time.time()
        self.steps = 0.0
        self.slow = 1.0
        """Speed of the guaranteed job in each second."""
        self.because_of_low = 1.0
        """The same, while the opportunistic job runs."""
        self.low_steps = 1.0
        """Steps that the opportunistic job reports, each of 0.1 s."""
        self.low_step_s = self.high_step_s = 0.1
        """Mean duration of the steps of each, by its report."""
        for number in (HIGH, LOW):
            self.begin(number)
        node.slurm.freeze_after_s = 0.0

    def begin(self, number: int) -> None:
        """Begin a program of this job. The one before ends."""
        environment = os.environ | {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": self.node.name}
        before = self.node.slurm.processes.get(number)
        self.node.slurm.processes[number] = subprocess.Popen(["sleep", "600"], env=environment)
        if before is not None:
            before.kill()
            before.wait()

    def say(self, number: int, steps: int) -> None:
        told = self.node.agent.state.jobs.get(f"j{number}")
        if told is None or not statuses_dir(self.node.run_dir, number).is_dir():
            return
        step_s = self.low_step_s if number == LOW else self.high_step_s
        status = JobStatus(
            number=told.control.number,
            pid=self.node.slurm.processes[number].pid,
            time_s=self.now_s,
            compute=told.control.compute,
            steps=steps,
            seconds=steps * step_s,
            squares=steps * step_s**2,
            suspends=False,
        )
        write_whole(statuses_dir(self.node.run_dir, number) / "0.json", status.model_dump_json())

    def frozen(self) -> bool:
        job = self.node.agent.state.jobs.get("j2")
        return job is not None and job.state == "suspended"

    def pass_s(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.now_s += TICK_S
            beside = 1.0 if self.frozen() else self.because_of_low
            self.steps += 10 * TICK_S * self.slow * beside
            self.say(HIGH, int(self.steps))
            if not self.frozen():
                self.say(LOW, int(self.low_steps))
            self.node.agent.tick(self.now_s)

    def until(self, done: Callable[[], bool], most_s: float) -> float:
        """Seconds until then."""
        began_s = self.now_s
        while not done():
            assert self.now_s - began_s < most_s, self.node.agent.status().model_dump_json()
            self.pass_s(TICK_S)
        return self.now_s - began_s

    def texts(self) -> list[str]:
        return [each.text for each in self.node.agent.state.saved.contained]


@pytest.fixture
def scene(make_node: Callable[..., Node]) -> Scene:
    """The guaranteed job has run alone for two minutes; the other one has just joined it."""
    made = Scene(make_node(start_wait_s=0.0))
    made.node.order(alone(HIGH), (0,), slice_s=SLICE_S)
    made.pass_s(120)
    assert made.node.agent.state.jobs["j1"].rate == pytest.approx(10, rel=0.15)
    made.node.order([PAIR], (0,), slice_s=SLICE_S)
    made.pass_s(5)
    return made


def test_a_job_that_reports_no_steps_and_trains_is_frozen_within_three_periods(scene: Scene):
    """It makes the guaranteed job 2.5 times slower, at share 0 as well, so that the control sees no difference. It gets a second
    chance, and no third one."""
    scene.because_of_low = 0.4
    assert scene.until(scene.frozen, 60) <= 3 * SLICE_S + 5
    assert "was there while guaranteed job j1 had 40% of the speed that it has alone" in scene.texts()[0]
    assert "it was frozen until it may try a smaller share" in scene.texts()[0]
    scene.pass_s(10 * SLICE_S)
    assert scene.frozen()
    scene.until(lambda: not scene.frozen(), 20 * SLICE_S)
    scene.until(scene.frozen, 60)
    scene.pass_s(20 * SLICE_S)
    assert scene.frozen()


def test_a_frozen_job_comes_back_although_the_guaranteed_job_runs_its_next_program(scene: Scene):
    """It says nothing while it changes from training to evaluation, by which the other job seems to be the cause."""
    scene.because_of_low = 0.0
    scene.until(scene.frozen, 60)
    scene.begin(HIGH)
    scene.because_of_low = 1.0
    assert scene.until(lambda: not scene.frozen(), 30 * SLICE_S) > 5 * SLICE_S


def test_a_frozen_job_comes_back_although_the_guaranteed_job_stops_reporting(scene: Scene):
    scene.because_of_low = 0.4
    scene.until(scene.frozen, 60)
    scene.say = lambda number, steps: None  # type: ignore[method-assign]
    (statuses_dir(scene.node.run_dir, HIGH) / "0.json").unlink()
    scene.until(lambda: not scene.frozen(), 30 * SLICE_S)


def test_a_frozen_job_comes_back_although_the_agent_starts_again(scene: Scene):
    scene.because_of_low = 0.4
    scene.until(scene.frozen, 60)
    scene.pass_s(5 * SLICE_S)
    scene.node.start()
    scene.pass_s(10 * SLICE_S)
    assert scene.frozen()
    scene.until(lambda: not scene.frozen(), 20 * SLICE_S)


def test_an_honest_job_is_not_frozen(scene: Scene):
    """Three percent is within the tolerance. One slow period is none of its business: the guaranteed job loads data."""
    scene.because_of_low = 0.97
    for _ in range(6):
        scene.pass_s(5 * SLICE_S)
        scene.slow = 0.3
        scene.pass_s(SLICE_S / 2)
        scene.slow = 1.0
        assert not scene.frozen()
    assert scene.texts() == []


def test_a_job_that_takes_a_little_more_in_each_cycle_is_not_driven(scene: Scene):
    """0.2 s more than its share in the 40 s of a cycle, as where a pause has passed while the share was 0. The control has
    measured that. 0.3 s more would be too much, but what cycles leave does not add up."""
    credit_s = 2 * scene.node.settings.sample_s  # that much of a second counts here
    for _ in range(150):
        share = scene.node.agent.status().groups[0].share
        if share > 0:
            scene.low_steps += 10 * (credit_s * share + 0.2 / 40)
        scene.pass_s(1)
    assert scene.low_steps > 10
    assert scene.node.agent.state.jobs["j2"].driven_times == 0


def test_a_job_that_is_tried_again_may_take_less_than_at_first(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """Its steps take 20 s while it is frozen most of the time. They do not need so much of the GPU."""
    monkeypatch.setattr(duty_cycles, "TRIAL_S", 20.0)
    node, used_s = make_node(start_wait_s=0.0, poll_s=0.25), 0.0
    node.gpu_times = lambda pids: {("gpu", pid): used_s for pid in pids if pid == node.slurm.processes[LOW].pid}
    node.start()
    scene = Scene(node)
    node.order([PAIR], (0,), slice_s=SLICE_S)
    for _ in range(5):
        scene.low_steps += 1
        scene.pass_s(1)
    job, took_s, began_s, end_s = node.agent.state.jobs["j2"], list[float](), 0.0, scene.now_s + 600
    while len(took_s) < 3:
        assert scene.now_s < end_s, f"no trial: {took_s}"
        scene.now_s += 0.1
        scene.steps += 1
        scene.say(HIGH, int(scene.steps))
        scene.low_steps += 0.005
        scene.say(LOW, int(scene.low_steps))
        was_driven = job.driven
        used_s += 0.0 if job.stopped else 0.1
        node.agent.tick(scene.now_s)
        if was_driven and not job.driven:
            began_s = used_s
            assert node.agent.pause_s == DRIVE_S
        elif job.driven and not was_driven:
            took_s.append(used_s - began_s)
            scene.low_step_s = 20.0
    assert took_s[1] <= duty_cycles.DEBT_S / 2 + 0.2, took_s
    assert took_s[2] <= duty_cycles.DEBT_S / 3 + 0.2, took_s


def test_what_a_guaranteed_job_did_before_a_period_does_not_count_in_it(make_node: Callable[..., Node]):
    """It reports once a second, and the agent gives the silent job beside it another share at once."""
    node = make_node(start_wait_s=0.0, poll_s=0.25)
    scene, shares = Scene(node), set[float]()
    node.order([PAIR], (0,), slice_s=SLICE_S)
    for tick in range(400):
        scene.now_s += 0.25
        scene.steps += 2.5
        if tick % 4 == 2:
            scene.say(HIGH, int(scene.steps))
        node.agent.tick(scene.now_s)
        for group in node.agent.groups.groups:
            mark = node.agent.state.observed(JobId("j1")).mark
            assert mark is None or mark.time_s >= group.since_s
            shares.add(group.control.share)
    assert node.agent.state.jobs["j2"].driven
    assert len(shares) > 2


def test_beside_a_guaranteed_job_with_steps_longer_than_two_periods_the_others_train_too(
    make_node: Callable[..., Node],
):
    """A period lasts until such a job has made a step in it."""
    step_s = 25
    node = make_node(start_wait_s=0.0)
    scene, most = Scene(node), 0.0
    scene.high_step_s = float(step_s)
    node.order([PAIR], (0,), slice_s=SLICE_S)
    for second in range(30 * step_s + 300):
        scene.now_s += 1
        if second % step_s == 0:
            scene.steps += 1
            scene.say(HIGH, int(scene.steps))
        for group in node.agent.groups.groups:
            scene.low_steps += 10 * group.control.share
            most = max(most, group.control.share)
        scene.say(LOW, int(scene.low_steps))
        node.agent.tick(scene.now_s)
    assert most > 0


def test_a_guaranteed_job_without_news_in_a_short_period_is_no_failure(scene: Scene, caplog: pytest.LogCaptureFixture):
    """Periods of a second, and it has written no status for two."""
    scene.node.order([PAIR], (0,), slice_s=1.0)
    for _ in range(2):
        scene.now_s += 1.0
        scene.node.agent.tick(scene.now_s)
    assert "ZeroDivisionError" not in caplog.text
    assert not scene.frozen()


def test_where_the_guaranteed_job_is_as_slow_alone_the_others_come_back_at_once(scene: Scene):
    """It evaluates, or the machine is slow. Its new speed is what counts from then on."""
    scene.pass_s(2 * SLICE_S)
    scene.slow = 0.5
    scene.until(scene.frozen, 60)
    assert scene.until(lambda: not scene.frozen(), 60) <= 4 * SLICE_S + 5
    scene.pass_s(10 * SLICE_S)
    assert not scene.frozen()


def test_a_job_that_falls_silent_has_no_speed(scene: Scene):
    """Whatever keeps it from reporting may be the other one."""
    scene.pass_s(2 * SLICE_S)
    scene.because_of_low = 0.0
    assert scene.until(scene.frozen, 60) <= 3 * SLICE_S + 5


def test_a_process_with_a_number_that_had_used_the_gpu_before_costs_its_job_a_moment(make_node: Callable[..., Node]):
    """The driver's counter goes on from the hour that an earlier process with this number had."""
    node, seen = make_node(start_wait_s=0.0, poll_s=0.25), False
    node.gpu_times = lambda pids: {("gpu", pid): 3600.0 for pid in pids} if seen else {}
    node.start()
    scene = Scene(node)
    node.order([PAIR], (0,), slice_s=SLICE_S)
    scene.pass_s(10)
    seen = True
    scene.pass_s(1)
    debt_s = -node.agent.state.observed(JobId("j2")).credit_s
    assert debt_s <= TICK_S + SAMPLED_S + duty_cycles.TURN_S
