"""Jobs that NVIDIA's driver suspends, with real processes, a stand-in for Slurm that sends its signals, and a stand-in for the
driver (`fake_cuda.c`), which as the real one can do nothing with a process that is stopped."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock_profiles
from penstock_profiles.nvml import Device, Process, Reading, Sample
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import cuda_checkpoints
from tests.profiles.fake_cuda import FakeCuda

from .node import Node, alone, at_once, steps

USED_MB = 2000
GPU = Device(0, "GPU-0", "Tesla V100", "v100", 16_000)


class Gpus:
    """NVML's view: the CUDA processes whose memory is on the GPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.pids, self.taken_mb = cuda, list[int](), 0
        self.shown_mb: int | None = USED_MB
        """What it says of a process."""

    def __call__(self) -> Sample:
        there = [pid for pid in self.pids if Path(f"/proc/{pid}").exists() and self.cuda.state(pid) != "checkpointed"]
        processes = tuple(Process(pid, self.shown_mb, None) for pid in there)
        return Sample((Reading(GPU, self.taken_mb + USED_MB * len(there), None, None, processes),), ())


@pytest.fixture
def make(make_node: Callable[..., Node], cuda: FakeCuda) -> Callable[..., Node]:
    """A node with two jobs in time slices on one GPU, which use CUDA and say nothing."""

    def make_with_jobs(slice_s: float = 0.6, options: tuple[str, ...] = ("--mute",), **settings: object) -> Node:
        node = make_node(**{"start_wait_s": 0.0, "cuda_checkpoint": "auto", **settings})
        gpus = node.sample = Gpus(cuda)
        node.start()
        for number in (1, 2):
            process = node.job(number, *options)
            gpus.pids.append(process.pid)
            cuda.add(process.pid)
        assert_ignores_sigtstp(*gpus.pids)
        node.order(alone(1, 2), (0,), slice_s)
        return node

    return make_with_jobs


def assert_ignores_sigtstp(*pids: int) -> None:
    """The programs have begun."""
    end_s = time.monotonic() + 60
    for pid in pids:
        while not (ignored(pid) >> (signal.SIGTSTP - 1)) & 1:
            assert time.monotonic() < end_s
            time.sleep(0.02)


def ignored(pid: int) -> int:
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("SigIgn"))
    return int(line.split()[1], 16)


def state(node: Node, cuda: FakeCuda, number: int) -> str:
    return cuda.state(node.slurm.processes[number].pid)


def both_ran(node: Node, cuda: FakeCuda, times: int = 1) -> Callable[[], bool]:
    """Whether both jobs have been resumed so often."""
    return lambda: all(node.slurm.calls.count(("resume", number)) >= times for number in (1, 2))


def test_the_driver_moves_a_job_that_knows_nothing_of_us_and_back(make: Callable[..., Node], cuda: FakeCuda):
    """Before another job has the GPU, the memory of the one before is off it. What runs is never locked."""
    node = make()
    seen: list[tuple[str, ...]] = []

    def look() -> None:
        jobs = node.agent.state.jobs
        assert not at_once(node)
        for number in (1, 2):
            local = jobs.get(JobId(f"j{number}"))
            if local is not None and local.state == "suspended":
                assert state(node, cuda, number) == "checkpointed"
                assert (local.left_mb, local.moved_mb, local.off) == (0, USED_MB, True)
                assert [each.cuda_checkpointed for each in node.agent.status().jobs if each.job == f"j{number}"] == [
                    True
                ]
        seen.append(tuple(state(node, cuda, number) for number in (1, 2)))

    while not both_ran(node, cuda, 2)():
        node.run(0.2, look)
    assert ("checkpointed", "running") in seen
    assert ("running", "checkpointed") in seen
    assert cuda.calls()[:4] == ["lock", "checkpoint", "lock", "checkpoint"]
    node.order([], ())
    node.until(lambda: [state(node, cuda, number) for number in (1, 2)] == ["running"] * 2, "restored jobs")
    assert "T" not in {node.slurm.letter(number) for number in (1, 2)}


def test_what_the_driver_moves_counts_although_it_was_not_seen_before(make: Callable[..., Node], cuda: FakeCuda):
    """On a busy machine a time slice may end before NVML is asked."""
    node = make(slice_s=1000.0)
    node.sample.shown_mb = None
    node.until(lambda: node.states().get("j1") == "running", "first slice")
    node.order(alone(1, 2), (0,), 0.6)
    local = node.agent.state.jobs[JobId("j1")]
    node.until(lambda: local.state == "suspending", "end of its time slice")
    node.sample.shown_mb = USED_MB
    node.until(lambda: local.state == "suspended", "time slice of the other")
    assert local.moved_mb == USED_MB


def test_memory_that_is_moved_makes_room_for_a_job_that_needs_the_whole_gpu(make: Callable[..., Node], cuda: FakeCuda):
    node = make()
    node.until(lambda: JobId("j2") in node.agent.state.jobs, "order")
    node.agent.state.jobs[JobId("j2")].memory_mb = 15_000
    node.until(lambda: node.states()["j2"] == "running", "time slice of the large one")
    assert state(node, cuda, 1) == "checkpointed"


def test_a_job_waits_until_its_gpu_has_room_for_it(make: Callable[..., Node], cuda: FakeCuda):
    """A process outside Slurm has taken the memory. A restore without room would lose the job."""
    node = make(slice_s=1000.0)
    node.until(lambda: node.states().get("j1") == "running", "first slice")
    node.order(alone(2), (0,), 1000.0)
    node.order(alone(1, 2), (0,), 0.6)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    node.sample.taken_mb = 15_500
    node.until(lambda: "MB are free" in node.agent.state.jobs[JobId("j1")].why, "reason")
    assert state(node, cuda, 1) == "checkpointed"
    assert "restore" not in cuda.calls()
    node.sample.taken_mb = 0
    node.until(lambda: state(node, cuda, 1) == "running", "restored job")
    node.until(lambda: not node.agent.state.jobs[JobId("j1")].why, "no reason any more")


@pytest.mark.parametrize(("call", "how"), [("lock", "600"), ("checkpoint", "801")])
def test_a_job_that_the_driver_cannot_move_is_frozen_in_place(
    make: Callable[..., Node], cuda: FakeCuda, call: str, how: str
):
    """It is tried once: NVIDIA does not promise that a process survives a failure. The reason is where users look."""
    node = make()
    cuda.set(call, how)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    local = node.agent.state.jobs[JobId("j1")]
    assert (state(node, cuda, 1), local.left_mb, local.moved_mb) == ("running", USED_MB, 0)
    why = next(each.why for each in node.agent.status().jobs if each.job == "j1")
    assert why.startswith("other jobs have its GPUs in this time slice, and its memory stays there: the driver's")
    node.until(both_ran(node, cuda, 2), "time slices")
    assert cuda.calls().count("lock") == 2  # once for each job
    assert "restore" not in cuda.calls()


def test_a_driver_that_hangs_is_given_up_and_the_job_is_unlocked(make: Callable[..., Node], cuda: FakeCuda):
    node = make(suspend_wait_s=6.0)
    cuda.set("checkpoint", "hang")
    node.until(lambda: state(node, cuda, 1) == "locked", "locked process")
    ticks = time.monotonic()
    node.agent.tick(time.time())
    assert time.monotonic() - ticks < 4
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert (state(node, cuda, 1), node.slurm.letter(1)) == ("running", "T")
    assert "did not do it within 6 s" in node.agent.state.jobs[JobId("j1")].no_cuda_checkpoint


def test_a_job_that_cannot_be_unlocked_is_frozen_and_unlocked_later(make: Callable[..., Node], cuda: FakeCuda):
    """It does not hold up the other job, and it does not stay locked."""
    node = make()
    cuda.set("checkpoint", "801")
    cuda.set("unlock", "999")
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert state(node, cuda, 1) == "locked"
    cuda.unset("unlock")
    node.until(lambda: node.slurm.letter(1) == "S" and state(node, cuda, 1) == "running", "unlocked process")


def test_a_restore_that_fails_is_repeated_and_said(
    make: Callable[..., Node], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cuda_checkpoints, "RETRY_S", 0.3)
    node = make(slice_s=5.0)
    caplog.set_level("WARNING")
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    cuda.set("restore", "2")
    node.until(lambda: "restore" in cuda.calls(), "restore")
    node.until(lambda: "has not restored its GPU memory" in node.agent.state.jobs[JobId("j1")].why, "reason")
    assert (node.states()["j1"], state(node, cuda, 1)) == ("running", "checkpointed")
    node.until(lambda: cuda.calls().count("restore") >= 3, "repetition")
    told = [each for each in caplog.records if each.getMessage() == "GPU memory not moved"]
    assert [each.__dict__["slurm_job"] for each in told].count(1) == 1
    cuda.unset("restore")
    job = node.agent.state.jobs[JobId("j1")]
    node.until(lambda: state(node, cuda, 1) == "running" and job.why == "", "restored process")


@pytest.mark.parametrize("call", [pytest.param("lock", marks=pytest.mark.long), "checkpoint"])
def test_an_agent_that_is_killed_while_the_driver_suspends(make: Callable[..., Node], cuda: FakeCuda, call: str):
    """Its helper goes on, and the next agent's helper waits for it."""
    node = make()
    cuda.set(call, "slow 1000")
    node.until(lambda: call in cuda.calls(), "call")
    node.start()
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert state(node, cuda, 1) == "checkpointed"
    node.until(both_ran(node, cuda), "time slices")


def test_an_agent_and_its_helper_that_are_killed_while_the_driver_suspends(make: Callable[..., Node], cuda: FakeCuda):
    """The process is left locked. The next agent goes on."""
    node = make(slice_s=1.0)
    cuda.set("checkpoint", "hang")
    node.until(lambda: state(node, cuda, 1) == "locked", "locked process")
    node.agent._checkpoints._helpers[1].process.kill()
    cuda.unset("checkpoint")
    node.start()
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert state(node, cuda, 1) == "checkpointed"
    node.until(lambda: state(node, cuda, 1) == "running", "restored process")


@pytest.mark.parametrize("lost", [False, True])
def test_an_agent_that_is_killed_while_a_job_is_checkpointed(make: Callable[..., Node], cuda: FakeCuda, lost: bool):
    """The next agent restores it, also without its saved state."""
    node = make(slice_s=2.0)
    node.until(lambda: node.states()["j2"] == "running" and node.slurm.letter(1) == "T", "time slice of the other")
    if lost:
        (node.run_dir.with_name("state") / "state.json").unlink()
    node.start()
    node.until(lambda: node.slurm.letter(1) == "S" and state(node, cuda, 1) == "running", "restored process")
    assert not at_once(node)


def test_without_a_driver_nothing_is_restored_after_the_state_was_lost(
    make: Callable[..., Node], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nonexistent")
    node = make(slice_s=30.0)
    node.until(lambda: node.states()["j1"] == "running", "time slice")
    (node.run_dir.with_name("state") / "state.json").unlink()
    node.start()
    node.until(lambda: node.agent.state.jobs and node.agent.state.jobs[JobId("j1")].cuda_checkpointed == (), "answer")
    assert node.agent.state.jobs[JobId("j1")].why == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a helper as another user")
def test_the_driver_is_asked_as_the_jobs_user(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch):
    """The helper reads what a process of the job tells it, so it has no privileges."""
    nobody, python = 65534, shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no Python that another user can run for sure")
    monkeypatch.setattr(cuda_checkpoints, "PYTHON", python)
    monkeypatch.setenv("PYTHONPATH", str(Path(penstock_profiles.__file__).parents[1]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cuda = FakeCuda(folder)
        for each in (folder, folder / "cuda-states"):
            each.chmod(0o777)
        for variable, value in cuda.variables.items():
            monkeypatch.setenv(variable, value)
        node = make_node(start_wait_s=0.0, cuda_checkpoint="auto")
        gpus = node.sample = Gpus(cuda)
        node.start()
        environment = os.environ | {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": node.name}
        process = subprocess.Popen(["sleep", "600"], env=environment, user=nobody, group=nobody)
        node.slurm.processes[1] = process
        cuda.add(process.pid)
        (folder / "cuda-states" / str(process.pid)).chmod(0o666)
        gpus.pids.append(process.pid)
        node.order(alone(1, 2), (0,), 0.5, running=[1], fields={1: {"uid": nobody}})
        node.until(lambda: node.states()["j1"] == "running", "time slice")
        node.job(2, "--mute")
        node.order(alone(1, 2), (0,), 0.5, fields={1: {"uid": nobody}})
        node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
        assert cuda.state(process.pid) == "checkpointed", node.agent.state.jobs[JobId("j1")].why
        users = {line.split()[2] for line in (folder / "cuda-states" / "calls").read_text().splitlines()}
        assert users == {str(nobody)}


def test_a_helper_that_cannot_be_started_holds_up_nobody(
    make: Callable[..., Node], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As where Python is in a folder that the job's user may not enter."""
    monkeypatch.setattr(cuda_checkpoints, "PYTHON", str(tmp_path))
    node = make()
    node.until(both_ran(node, cuda), "time slices")
    assert "the agent cannot start its helper: [Errno 13]" in node.agent.state.jobs[JobId("j1")].no_cuda_checkpoint


def test_an_agent_that_is_killed_while_the_driver_restores(make: Callable[..., Node], cuda: FakeCuda):
    node = make(slice_s=1.0)
    cuda.set("restore", "slow 700")
    node.until(lambda: "restore" in cuda.calls(), "restore")
    node.start()
    node.until(lambda: state(node, cuda, 1) == "running", "restored process")
    node.until(both_ran(node, cuda), "time slices")


def test_a_job_that_leaves_the_order_while_it_is_checkpointed_is_restored(make: Callable[..., Node], cuda: FakeCuda):
    """Also by an agent that is started meanwhile. The other job is left alone."""
    node = make(slice_s=30.0)
    node.until(lambda: JobId("j1") in node.agent.state.jobs, "order")
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: node.states()["j2"] == "running" and node.slurm.letter(1) == "T", "time slice of the other")
    node.order(alone(2), (0,), slice_s=30.0)
    node.agent.tick(time.time())
    assert node.agent.state.saved.departing[1].cuda_checkpointed == (node.slurm.processes[1].pid,)
    node.start()
    node.until(lambda: state(node, cuda, 1) == "running", "restored process")
    assert node.states() == {"j2": "running"}
    assert state(node, cuda, 2) == "running"


def test_a_job_that_is_cancelled_while_it_is_checkpointed_ends(make: Callable[..., Node], cuda: FakeCuda):
    node = make(slice_s=1.0)
    node.until(lambda: node.states()["j2"] == "running" and node.slurm.letter(1) == "T", "time slice of the other")
    node.slurm.cancel("1")
    node.until(lambda: node.agent.state.jobs[JobId("j1")].gone, "end of the job")
    node.run(2.0)
    assert (node.states()["j2"], state(node, cuda, 2)) == ("running", "running")


def test_a_helper_ends_with_its_job(make: Callable[..., Node], cuda: FakeCuda):
    node = make()
    cuda.set("checkpoint", "hang")
    node.until(lambda: "checkpoint" in cuda.calls(), "call")
    helper = node.agent._checkpoints._helpers[1].process
    node.slurm.cancel("1")
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    node.until(lambda: helper.poll() is not None, "end of the helper")


def test_a_job_whose_time_slice_comes_back_meanwhile_is_restored(make: Callable[..., Node], cuda: FakeCuda):
    """The other job ends while the driver moves the first one."""
    node = make(slice_s=1.0)
    cuda.set("checkpoint", "slow 1500")
    node.until(lambda: "checkpoint" in cuda.calls(), "call")
    node.order(alone(1), (0,), slice_s=30.0)
    node.until(lambda: node.states()["j1"] == "running", "time slice that comes back")
    node.until(lambda: "unlock" in cuda.calls() and state(node, cuda, 1) == "running", "restored process")
    assert node.slurm.letter(1) == "S"
    assert ("suspend", 1) not in node.slurm.calls


@pytest.mark.parametrize("refused", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_helper_that_hangs_in_the_kernel_holds_up_nobody(
    make: Callable[..., Node], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, refused: bool
):
    """It does not end when it is killed, or the agent may not kill it. Its job is frozen in place, and the other one has its
    time slice."""

    def kills_nothing() -> None:
        if refused:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(cuda_checkpoints, "GIVEN_UP_S", 0.5)
    node = make(suspend_wait_s=6.0)
    cuda.set("checkpoint", "hang")
    node.until(lambda: "checkpoint" in cuda.calls(), "call")
    process = node.agent._checkpoints._helpers[1].process
    kill = process.kill
    monkeypatch.setattr(process, "kill", kills_nothing)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert process.poll() is None
    assert node.slurm.letter(1) == "T"
    kill()


def test_an_error_of_nvml_holds_up_nobody(make: Callable[..., Node], cuda: FakeCuda):
    node = make()
    node.until(lambda: node.states()["j1"] == "running", "time slice")

    def fails() -> Sample:
        raise RuntimeError("Unknown Error")

    node.sample = fails
    node.start()
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert node.agent.state.jobs[JobId("j1")].why.endswith("NVML does not say what the job has there: Unknown Error")
    assert cuda.calls() == []


@pytest.mark.parametrize("how", ["off", "no NVML", "several processes", "no CUDA"])
def test_jobs_that_are_not_checkpointed_are_frozen_in_place(
    make: Callable[..., Node], cuda: FakeCuda, how: str, make_node: Callable[..., Node]
):
    node = make(cuda_checkpoint="off" if how == "off" else "auto")
    if how == "no NVML":
        node.sample = None
    if how == "no CUDA":
        node.sample.pids.clear()  # type: ignore[union-attr]
    if how == "several processes":
        node.sample.pids *= 2  # type: ignore[union-attr]  # one process on two GPUs
    node.start()
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert cuda.calls() == []
    why = node.agent.state.jobs[JobId("j1")].why
    assert ("several processes on GPUs or uses several GPUs" in why) == (how == "several processes")


def test_a_job_that_moves_by_itself_is_left_to_it(make: Callable[..., Node], cuda: FakeCuda):
    node = make(options=("--here",), start_wait_s=30.0)
    node.until(lambda: both_ran(node, cuda)() and steps(node, 2) > 0, "time slices")
    assert cuda.calls() == []


def test_a_job_that_does_not_answer_is_moved_by_the_driver(make: Callable[..., Node], cuda: FakeCuda):
    node = make(options=("--deaf",), suspend_wait_s=6.0, start_wait_s=30.0)
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert state(node, cuda, 1) == "checkpointed"
    (contained,) = node.agent.status().contained
    assert contained.text.endswith("it was frozen where it was.")


def test_a_driven_job_is_not_frozen_while_it_is_restored(make: Callable[..., Node], cuda: FakeCuda):
    """An opportunistic job beside a guaranteed one, both in time slices with a third job."""
    node = make(slice_s=30.0)
    process = node.job(3, "--mute")
    node.sample.pids.append(process.pid)  # type: ignore[union-attr]
    cuda.add(process.pid)
    node.order([*alone(1), Pack((JobId("j2"), JobId("j3")), guaranteed=JobId("j2"))], (0,), slice_s=1.5)
    node.until(lambda: ("suspend", 3) in node.slurm.calls, "end of their time slice")
    node.until(lambda: state(node, cuda, 3) == "checkpointed", "moved process")
    cuda.set("restore", "slow 500")
    restored = "restored processes"
    node.until(lambda: cuda.calls().count("unlock") >= 3 and state(node, cuda, 3) == "running", restored)


def test_a_job_whose_limit_has_no_room_for_it_is_frozen_in_place(
    make: Callable[..., Node], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    """Else the kernel would end it."""
    monkeypatch.setattr(cuda_checkpoints, "room_mb", lambda pid: 2100.0)
    node = make()
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert cuda.calls() == []
    assert (
        "it takes 2000 MB, and Slurm lets the job have 1844 MB more on the host"
        in node.agent.state.jobs[JobId("j1")].why
    )


@pytest.mark.parametrize(
    ("driver", "how", "lacks"), [("550.54", "auto", 1), ("550.54", "off", 0), ("580.1", "auto", 0)]
)
def test_the_status_says_that_a_driver_is_too_old(make_node: Callable[..., Node], driver: str, how: str, lacks: int):
    node = make_node(cuda_checkpoint=how)
    node.driver = driver
    node.start().tick(time.time())
    assert node.agent.status().lacks == ("old-driver",) * lacks


def test_an_agent_that_is_stopped_waits_for_its_helpers(make: Callable[..., Node], cuda: FakeCuda):
    node = make()
    cuda.set("checkpoint", "slow 800")
    node.until(lambda: "checkpoint" in cuda.calls(), "call")
    node.agent.close()
    assert state(node, cuda, 1) == "checkpointed"
