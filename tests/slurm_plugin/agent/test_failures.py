"""What fails on a node concerns the job, or the part of the tick, that it belongs to."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_profiles.node_channel import JobStatus
from penstock_profiles.nvml import Device, Process, Reading, Sample
from penstock_scheduler.api.agent_messages import Lack, status_file
from penstock_slurm.agent import observing
from tests.profiles import fake_nvml

from .node import Node, alone, steps


def test_a_job_whose_reports_cannot_be_read_does_not_stop_the_others(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """Reading job 1's reports fails in a way that nobody foresaw. The GPU goes round among all three."""
    node = make_node(start_wait_s=0.0)
    channels = node.agent._measuring._channels
    read = channels.statuses

    def fails(number: int, uid: int) -> dict[int, JobStatus]:
        if number == 1:
            raise RuntimeError("no idea")
        return read(number, uid)

    monkeypatch.setattr(channels, "statuses", fails)
    for number in (1, 2, 3):
        node.job(number)
    node.order(alone(1, 2, 3), (0,), slice_s=0.3)
    said: set[str] = set()

    def all_in_turn() -> bool:
        said.add({each.job: each.why for each in node.agent.status().jobs}["j1"])
        return {("suspend", number) for number in (1, 2, 3)} <= {*node.slurm.calls}

    node.until(all_in_turn, "slices of all")
    assert "the agent of its node cannot read its reports: RuntimeError: no idea" in said


@pytest.mark.parametrize("part", ["plugin", "sample"])
def test_a_check_that_fails_does_not_stop_time_slices(
    make_node: Callable[..., Node], part: str, caplog: pytest.LogCaptureFixture
):
    """It is logged once, and the status tells the admin."""
    node = make_node()

    def fails() -> tuple[Lack, str] | None:
        raise RuntimeError("no idea")

    if part == "plugin":
        node.plugin = fails
    else:
        node.sample = fails  # type: ignore[assignment]
    node.start()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1, 2), (0,), slice_s=0.4)
    node.until(lambda: min(steps(node, n) for n in (1, 2)) > 20, "time slices of both")
    assert node.told().lacks == (("unknown",) if part == "plugin" else ())
    failures = [each for each in caplog.records if each.levelno == logging.WARNING and each.getMessage() == "failed"]
    assert len(failures) == (part == "plugin")


def test_an_order_that_cannot_be_taken_changes_nothing_and_is_tried_again(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """Half an order would be another one, which nobody gave."""
    node = make_node()
    for number in (1, 2):
        node.job(number)
    node.order(alone(1), (0,), slice_s=30.0)
    node.until(lambda: node.states() == {"j1": "running"}, "start of the first")
    channels = node.agent._orders._channels
    bound = channels.bound

    def fails(number: int) -> tuple[int, ...]:
        if number == 2:
            raise RuntimeError("no idea")
        return bound(number)

    monkeypatch.setattr(channels, "bound", fails)
    node.order(alone(2), (0,), slice_s=30.0)
    node.run(0.5)
    assert node.states() == {"j1": "running"}
    assert not node.agent.state.saved.departing
    monkeypatch.setattr(channels, "bound", bound)
    node.until(lambda: set(node.states()) == {"j2"}, "the order")


def test_a_second_agent_for_a_node_does_not_start(tmp_path: Path):
    """The program itself. The kernel releases the lock of an agent that is killed."""
    (tmp_path / "spool").mkdir()
    settings = tmp_path / "penstock.toml"
    settings.write_text(
        f'[slurm]\npartitions = ["gpu"]\nspool_dir = "{tmp_path}/spool"\nconf = "{tmp_path}/slurm.conf"\n'
        f'[agent]\nrun_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
    )
    node = f"n{os.getpid()}"
    command = [sys.executable, "-m", "penstock_slurm.agent.main", "--config", str(settings), "--node", node]
    told = status_file(tmp_path / "spool", node)
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(told.exists, 120, "a status of the first")
        second = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        assert second.returncode == 1
        assert f"another penstock-agent (process {first.pid})" in second.stderr
        assert "end that one first" in second.stderr
    finally:
        first.kill()
        first.wait()
    told.unlink()
    third = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(told.exists, 120, "a status of the next")
    finally:
        third.kill()
        third.wait()
    assert time.time() - told.stat().st_mtime < 120


def test_an_agent_does_not_run_where_gpus_are_divided_into_mig_devices(tmp_path: Path):
    """It would bind jobs to whole GPUs by the numbers of devices. Status 2: its unit does not start it again."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    device = "0.mig 1\n0.m0.name NVIDIA A100-SXM4-40GB MIG 1g.5gb\n0.m0.uuid MIG-0\n0.m0.total 4864\n"
    (tmp_path / "gpus").write_text(fake_nvml.TWO_GPUS + device)
    settings = tmp_path / "penstock.toml"
    settings.write_text(
        f'[slurm]\npartitions = ["a"]\nspool_dir = "{tmp_path}/spool"\n'
        f'[agent]\nrun_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
    )
    ended = subprocess.run(
        [sys.executable, "-m", "penstock_slurm.agent.main", "--config", settings, "--node", "n1"],
        env=fake_nvml.environment(fake_nvml.build(tmp_path), tmp_path / "gpus"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "GPUs of n1 are divided into MIG devices" in ended.stderr
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize("program", ["sleep", "nvidia-cuda-mps-server"])
def test_a_process_that_has_left_its_job_is_named_while_it_uses_a_shared_gpu(
    make_node: Callable[..., Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str,
):
    """As with proctrack/linuxproc: it has a session of its own, and nothing of the job's environment. A server of MPS works
    for jobs."""
    monkeypatch.setattr(observing, "INSPECT_S", 0.3)
    copy = tmp_path / program
    shutil.copy("/bin/sleep", copy)
    node = make_node(mps_dir=str(tmp_path / "mps"))
    job = node.job(1)
    gone = subprocess.Popen([copy, "600"], env={}, start_new_session=True)
    elsewhere = subprocess.Popen([copy, "600"], env={}, start_new_session=True)
    using = {0: [job, gone], 1: [elsewhere]}

    def sample() -> Sample:
        return Sample(
            tuple(
                Reading(
                    Device(index, f"GPU-{index}", "Tesla T4", "t4", 15_360.0),
                    *(100.0, 0.5, 0.1),
                    tuple(Process(each.pid, 100.0, 0.5) for each in there),
                )
                for index, there in using.items()
            ),
            (),
        )

    node.sample = sample
    try:
        node.start()
        node.order(alone(1), (0,))
        if program != "sleep":
            node.until(lambda: steps(node, 1) > 20, "steps")
            assert node.agent.status().lacks == ("no-mps",)
            return
        node.until(lambda: "strangers" in node.agent.status().lacks, "word of it")
        told = [each.__dict__["text"] for each in caplog.records if each.__dict__.get("lack") == "strangers"]
        assert told == [f"process {gone.pid} (sleep) uses GPU 0, which jobs share, and belongs to none of them"]
        using[0] = [job]
        node.until(lambda: "strangers" not in node.agent.status().lacks, "an end of it")
    finally:
        for each in (gone, elsewhere):
            each.kill()
            each.wait()
