"""Orders that the agent takes, with real processes as jobs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_profiles.node_channel import JobStatus, control_path, statuses_dir
from penstock_scheduler.api.agent_messages import order_file
from penstock_slurm.agent import node_state
from penstock_slurm.agent.channel import Channels
from penstock_slurm.gateway import ControllerAway

from .node import Node, alone


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


def test_nothing_that_a_job_writes_stops_the_agent(make_node: Callable[..., Node]):
    """Odd names, huge numbers, and nested folders. The other job is still served."""
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
    node.until(lambda: "suspended" in node.states().values(), "time slice")
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


def test_a_running_job_is_found_again_when_the_state_is_lost(make_node: Callable[..., Node]):
    """No other job gets its GPU, and it is bound to the same GPU as before."""
    node = make_node()
    node.job(1)
    node.order(alone(1), (3,))
    node.until(lambda: node.states() == {"j1": "running"}, "start")
    node.order([], ())
    node.agent.tick(time.time())  # the daemon misses it in one observation
    shutil.rmtree(node.run_dir.with_name("state"))
    node.start()
    node.job(2)
    node.order(alone(2, 1), (3,), slice_s=60.0)
    node.agent.tick(time.time())
    assert node.devices()["j1"] == (3,)
    assert node.states() in ({"j1": "running", "j2": "waiting"}, {"j1": "suspending", "j2": "waiting"})
