"""Which jobs are clients of the site's MPS. The files of a control daemon stand in for the daemon itself."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import JobStatus, mps_file, statuses_dir
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import mps
from penstock_slurm.agent.settings import AgentSettings

from .node import Node, alone

NOBODY = 65534


def pack(*numbers: int) -> Pack:
    return Pack(tuple(JobId(f"j{number}") for number in numbers))


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    """The folder of a running control daemon."""
    folder = tmp_path / "mps"
    folder.mkdir()
    os.mkfifo(folder / "control")
    (folder / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    return folder


@pytest.fixture
def node(tmp_path: Path, pipes: Path) -> Iterator[Node]:
    made = Node(tmp_path, mps_dir=str(pipes), suspend_wait_s=0.5)
    yield made
    made.close()


def clients(node: Node) -> set[str]:
    """Jobs that are clients, by the status and by their files."""
    told = {each.job for each in node.agent.status().jobs if each.mps}
    assert told == {each for each in node.states() if mps_file(node.run_dir, int(each[1:])).exists()}
    return told


def begin(node: Node, *packs: Pack, gpus: int = 1, running: list[int] | None = None, **more: object) -> set[str]:
    """Carry out an order. Returns the clients afterwards."""
    node.order(packs, tuple(range(gpus)), 60.0, running=running, **more)  # type: ignore[arg-type]
    node.agent.tick(time.time())
    return clients(node)


def test_a_pack_that_begins_together_uses_mps_and_a_job_alone_does_not(node: Node, pipes: Path) -> None:
    """The second starts later. What matters is that the order names both."""
    assert begin(node, pack(1, 2), pack(3), gpus=2, running=[1, 3]) == {"j1"}
    assert begin(node, pack(1, 2), pack(3), gpus=2) == {"j1", "j2"}
    assert mps_file(node.run_dir, 2).read_text() == f"{pipes}\n"
    assert begin(node, pack(1, 2, 4), pack(3), gpus=2) == {"j1", "j2", "j4"}
    assert begin(node, pack(3), pack(1), gpus=2) == {"j1"}, "it stays a client or not"


def test_who_comes_to_one_that_began_alone_does_not(node: Node) -> None:
    assert begin(node, pack(1)) == set()
    assert begin(node, pack(1, 2)) == set()
    assert begin(node, pack(5, 6), fields={6: {"own_devices": (0,)}}) == set(), (
        "Slurm has started it with a GPU of its own"
    )


def test_time_sliced_jobs_are_no_clients(node: Node) -> None:
    assert begin(node, pack(1, 2), pack(3)) == set()


def test_packs_of_two_users_do_not(node: Node) -> None:
    assert begin(node, pack(1, 2), fields={2: {"uid": NOBODY}}) == set()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_all_clients_of_a_node_are_of_one_user_until_the_last_has_ended(node: Node) -> None:
    """The control daemon lets clients of another user wait, on any GPU."""
    job = node.job(1)
    theirs: dict[int, dict[str, object]] = {number: {"uid": NOBODY} for number in (3, 4, 5, 6, 7, 8)}
    assert begin(node, pack(1, 2), pack(3, 4), gpus=2, fields=theirs) == {"j1", "j2"}
    node.until(lambda: 1 in node.agent.state.living, "the job to be seen")
    node.order([pack(5, 6)], (1,), 60.0, fields=theirs)
    node.agent.tick(time.time())
    assert clients(node) == set(), "the processes of one live on"
    job.kill()
    job.wait()
    node.order([], (), 60.0)
    node.until(lambda: not mps_file(node.run_dir, 1).exists(), "its folder to go")
    assert begin(node, pack(7, 8), fields=theirs) == {"j7", "j8"}


def test_without_a_control_daemon_jobs_run_without_it_and_the_status_says_so(
    node: Node, pipes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (pipes / "control").unlink()
    with caplog.at_level(logging.WARNING):
        assert begin(node, pack(1, 2)) == set()
    assert node.states() == {"j1": "running", "j2": "running"}
    assert node.agent.status().lacks == ("no-mps",)
    (record,) = [record for record in caplog.records if record.getMessage() == "the node lacks what sharing needs"]
    assert f"{pipes}/control: No such file or directory" in record.__dict__["text"]
    os.mkfifo(pipes / "control")
    node.agent.tick(time.time() + 60)
    assert node.agent.status().lacks == ()
    assert begin(node, pack(3, 4)) == {"j3", "j4"}


def test_a_client_is_never_suspended(node: Node) -> None:
    """A group without time slices begins to use them. The clients keep their GPUs, and the new job waits until they have ended.

    The time slices in between are theirs, and count as theirs.
    """
    for number in (1, 2):
        node.job(number)
    node.order([pack(1, 2)], (0,), 0.5)
    node.until(lambda: node.said(1) and node.said(2), "steps")
    assert clients(node) == {"j1", "j2"}
    node.job(3)
    node.order([pack(1, 2), pack(3)], (0,), 0.5)
    node.until(lambda: "MPS is not suspended" in node.agent.status().jobs[0].why, "reason")
    had_s = dict(node.agent.state.saved.account.served_s)
    slices: set[tuple[Pack, ...]] = set()
    served_s = node.agent.state.saved.account.served_s

    def two_slices_pass() -> bool:
        slices.update(group.running for group in node.agent.status().groups)
        return max(served_s[job] - had_s[job] for job in had_s) > 1.0

    node.until(two_slices_pass, "two slices")
    assert slices == {(pack(1, 2),)}
    assert [job for job in ("j1", "j2", "j3") if served_s[job] > had_s[job]] == ["j1", "j2"]
    assert node.slurm.calls == []
    assert node.states() == {"j1": "running", "j2": "running", "j3": "waiting"}
    for number in (1, 2):
        node.slurm.processes[number].kill()
        node.slurm.processes[number].wait()
    node.until(lambda: node.states()["j3"] == "running", "time slice of the new job")
    assert "j3" not in clients(node)


def test_a_client_is_not_moved_though_it_says_that_it_can_be(node: Node) -> None:
    """A job without MPS that has nothing on its GPU while it is suspended may continue on another GPU."""
    begin(node, pack(1, 2), pack(3), gpus=2)
    for number in (1, 2, 3):
        status = JobStatus(pid=9, time_s=time.time(), anywhere=True)
        write_whole(statuses_dir(node.run_dir, number) / "0.json", status.model_dump_json())
    node.agent.tick(time.time())
    assert [node.agent.view.pinned(JobId(f"j{number}")) for number in (1, 2, 3)] == [{0}, {0}, set()]


def test_one_that_goes_while_its_mate_saves_is_not_suspended_either(node: Node) -> None:
    """A departing job has the next time slice on its partner's GPU, as the daemon orders it for a suspended job."""
    for number in (1, 2):
        node.job(number)
    node.order([pack(1, 2)], (0,), 60.0)
    node.until(lambda: node.said(1) and node.said(2), "steps")
    departing = Pack((JobId("j2"),), 1, 1)
    node.order([*alone(1), departing], (0,), 0.5)
    node.agent.tick(time.time())
    served_s = node.agent.state.saved.account.served_s
    had_s = served_s[JobId("j1")]
    node.until(lambda: served_s[JobId("j1")] - had_s > 1.0, "two slices")
    assert node.slurm.calls == []
    assert set(node.states().values()) == {"running"}


def test_an_agent_that_has_lost_its_state_knows_its_clients(node: Node) -> None:
    for number in (1, 2):
        node.job(number)
    assert begin(node, pack(1, 2)) == {"j1", "j2"}
    shutil.rmtree(node.run_dir.with_name("state"))
    node.start()
    node.agent.tick(time.time())
    assert clients(node) == {"j1", "j2"}


def test_each_later_run_is_judged_again(node: Node) -> None:
    assert begin(node, pack(1, 2)) == {"j1", "j2"}
    assert begin(node, pack(1), running=[]) == set()
    assert begin(node, pack(1)) == set()


def test_a_site_without_mps_has_no_clients(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert begin(node, pack(1, 2)) == set()
    assert node.agent.status().lacks == ()


def test_whether_a_control_daemon_answers(pipes: Path) -> None:
    assert mps.trouble(pipes) == ""
    pid = pipes / "nvidia-cuda-mps-control.pid"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for text, words in ((f"{ended.pid}\n", f"process {ended.pid}"), ("none", "invalid literal")):
        pid.write_text(text)
        assert words in mps.trouble(pipes)
    pid.unlink()
    assert mps.trouble(pipes) == "", "releases differ in what they leave"
    assert "No such file" in mps.trouble(pipes / "elsewhere")


def test_the_control_daemons_number_is_read_from_a_file_and_not_waited_for(pipes: Path) -> None:
    pid = pipes / "nvidia-cuda-mps-control.pid"
    elsewhere = pid.rename(pipes / "elsewhere")
    os.mkfifo(pid)
    reader = threading.Thread(target=mps.trouble, args=(pipes,), daemon=True)
    reader.start()
    reader.join(120.0)
    assert not reader.is_alive(), "it waits for a writer"
    assert "is not a regular file" in mps.trouble(pipes)
    pid.unlink()
    pid.symlink_to(elsewhere)
    assert "symbolic links" in mps.trouble(pipes)
    pid.unlink()
    pid.write_text("1" * 10_000)
    assert "11, which" in mps.trouble(pipes), "no more of it is read than a number can have"


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("run/mps", "must be an absolute path"),
        ("/tmp/nvidia-mps/", "every CUDA process uses MPS"),
        ("/" + 200 * "x", "190"),
    ],
)
def test_folders_that_cannot_be(folder: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AgentSettings(mps_dir=folder)
