"""How the agent moves jobs on and off GPUs, with real processes as jobs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock_loopback.processes import wait_for
from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import devices_file
from penstock_scheduler.api.agent_messages import NodeStatus, status_file
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import containment, node_state, state
from penstock_slurm.agent.channel import Channels
from penstock_slurm.gateway import SlurmError
from tests.profiles import fake_nvml
from tests.slurm_plugin.boards import TWO_PAIRS

from .node import Node, alone, steps


def test_a_job_waits_for_its_gpus_until_those_before_it_are_off_them(make_node: Callable[..., Node]):
    """Its devices file appears with its first time slice. Before Slurm has started the job, there is none."""
    node = make_node()
    node.job(1)
    node.order(alone(1, 2), (0,), slice_s=30.0, running=[1])
    node.until(lambda: node.states()["j1"] == "running", "start of the first")
    assert node.states()["j2"] == "waiting"
    assert not devices_file(node.run_dir, 2).exists()
    node.job(2)
    node.order(alone(1, 2), (0,), slice_s=30.0)
    node.until(lambda: node.states() == {"j1": "suspended", "j2": "running"}, "time slice of the new job")
    assert devices_file(node.run_dir, 2).read_text() == "0\n"


def test_a_gpu_is_free_when_the_job_on_it_is_seen_to_stand_still(make_node: Callable[..., Node]):
    """A busy node freezes it later than `freeze_s`. Until then, no other job gets its GPU."""
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
    node.until(lambda: node.states()["j2"] == "running", "time slice of the other")
    assert node.slurm.letter(1) == "T"
    assert node.agent.state.jobs["j2"].resumed_s >= node.agent.state.jobs["j1"].free_s


def test_slurm_is_asked_for_nothing_before_the_node_has_done_what_it_was_asked_before(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """slurmd may do both in any order. Slices are shorter than the time that it takes to resume or freeze a job."""
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
    node.until(lambda: [call for call, _ in seen].count("resume") > 3, "time slices")
    letters = {call: {letter for name, letter in seen if name == call} for call in ("suspend", "resume")}
    assert "T" not in letters["suspend"]
    assert letters["resume"] == {"T"}


def test_gpus_are_given_out_as_they_are_connected(make_node: Callable[..., Node]):
    """GPUs 0 and 2 share a switch, and so do 1 and 3. Two new jobs get a pair each, and the status reports it."""
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
    """The program itself, on a stand-in for NVIDIA's library: two GPUs with three NVLinks. If the site names the device files,
    NVML's indexes may differ from Slurm's."""
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


def test_a_full_folder_stops_neither_time_slices_nor_other_jobs(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """The first job's folder is full, and the state cannot be saved. The second job still gets its GPU."""
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


def test_a_gpu_is_free_only_when_the_job_before_has_ended(make_node: Callable[..., Node]):
    """The daemon no longer names a job whose processes still live, as in Slurm's state COMPLETING."""
    node = make_node()
    before = node.job(1)
    node.order(alone(1), (0,))
    node.until(lambda: node.states() == {"j1": "running"}, "start")
    node.job(2)
    node.order(alone(2), (0,))
    node.run(0.5)
    assert node.states() == {"j2": "waiting"}
    assert not devices_file(node.run_dir, 2).exists()
    (told,) = node.agent.status().jobs
    assert told.why == f"waits until process {before.pid} of Slurm's job 1, which leaves its GPUs, ends"
    node.order(alone(2), (1,))
    node.until(lambda: node.states() == {"j2": "running"}, "start on another GPU")
    (told,) = node.agent.status().jobs
    assert told.why == ""
    node.job(3)
    node.order(alone(2, 3), (1, 0))
    node.until(lambda: node.agent.state.jobs["j3"].why, "the reason")
    node.order(alone(2, 3), (1,))
    node.until(lambda: not node.agent.state.jobs["j3"].why, "an end of it: it waits for its time slice now")
    node.order(alone(2, 3), (1, 0))
    before.kill()
    before.wait()
    node.until(lambda: node.states() == {"j2": "running", "j3": "running"}, "start of the next")


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


def test_slurm_is_asked_once_to_suspend_a_job_that_it_has_yet_to_freeze(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """A busy node freezes a job long after `freeze_s`, and the job computes until then. slurmd may do what it is asked
    meanwhile in any order, so that a job may run that Slurm shows as suspended."""
    monkeypatch.setattr(containment, "IDLE_CPU", 0.001)  # on a busy machine, it gets little of a core
    node = make_node(start_wait_s=0.0)
    node.slurm.freeze_after_s = 3.0
    program = "import signal; signal.signal(signal.SIGTSTP, signal.SIG_IGN); print(flush=True)\nwhile True: pass"
    for number in (1, 2):
        environment = os.environ | {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": node.name}
        process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
        node.slurm.processes[number] = process
        with process.stdout:
            process.stdout.readline()
    node.order(alone(1, 2), (0,), slice_s=1.0)
    node.until(lambda: node.slurm.calls, "the end of a time slice")
    (asked,) = node.slurm.calls
    node.until(lambda: node.slurm.letter(asked[1]) == "T", "the freeze")
    assert [call for call in node.slurm.calls if call[1] == asked[1]] == [asked]
