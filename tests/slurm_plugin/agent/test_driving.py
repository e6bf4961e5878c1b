"""Jobs that the agent freezes and thaws itself, and what becomes of them if it cannot, or stops."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from penstock_loopback.fixtures import skip_without_slurm
from penstock_loopback.processes import wait_for
from penstock_scheduler.model import JobId, Pack
from penstock_slurm.agent import duty_cycles, main, observing
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.agent.state import DepartingJob
from penstock_slurm.gateway import Refused

from .node import Node, alone

HIGH, LOW = 1, 2
HINDRANCE = "the agent may not write to /sys/fs/cgroup/freezer.state"


class Hindered(Freezer):
    """Fails to freeze or to thaw, and may know it before."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.text, self.fails, self.calls = trouble, True, list[str]()

    def trouble(self, pids: Collection[int]) -> str:
        return self.text if pids else ""

    def freeze(self, pids: Collection[int]) -> None:
        self.calls.append("freeze")
        super().freeze(pids)
        if self.fails:
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), "freezer.state")

    def thaw(self, pids: Collection[int]) -> None:
        self.calls.append("thaw")
        super().thaw(pids)


def begin(node: Node, *, freezer: Freezer | None = None, others: Sequence[int] = (LOW,)) -> None:
    """A guaranteed job, and beside it others that do not report, which the agent drives as soon as it can."""
    node.freezer = freezer
    node.start()
    numbers = (HIGH, *others)
    for number in numbers:
        environment = os.environ | {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": node.name}
        node.slurm.processes[number] = subprocess.Popen(["sleep", "600"], env=environment)
    pack = Pack(tuple(JobId(f"j{number}") for number in numbers), guaranteed=JobId("j1"))
    node.order([pack], (0,), slice_s=30.0)


def told(node: Node) -> list[str]:
    return [each.text for each in node.agent.state.saved.contained]


def test_a_job_that_cannot_be_frozen_is_not_driven_and_its_user_is_told(make_node: Callable[..., Node]):
    node, freezer = make_node(start_wait_s=0.0), Hindered(HINDRANCE)
    begin(node, freezer=freezer)
    node.until(lambda: told(node), "word to its user")
    node.run(0.5)
    assert [each.partition(": ")[2].partition(";")[0] for each in told(node)] == [
        f"it was left as it is, since {HINDRANCE}"
    ]
    assert not node.agent.state.jobs["j2"].driven
    assert "freeze" not in freezer.calls
    assert node.slurm.letter(LOW) == "S"


def test_the_status_says_that_jobs_cannot_be_frozen(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(observing, "INSPECT_S", 0.2)
    node, freezer = make_node(start_wait_s=0.0), Hindered(HINDRANCE)
    begin(node, freezer=freezer)
    node.until(lambda: node.told().lacks == ("no-freezer",), "word to the admin")
    (text,) = {each.__dict__["text"] for each in caplog.records if each.__dict__.get("lack") == "no-freezer"}
    assert text == f"jobs cannot be held to their shares: {HINDRANCE}"
    freezer.text = ""
    node.until(lambda: node.told().lacks == (), "an end of it")


def test_a_job_that_is_not_frozen_as_a_whole_is_thawed(make_node: Callable[..., Node]):
    """The agent did not foresee it. Nothing of the job stays frozen, the status says why, and it is tried again."""
    node, freezer, stopped = make_node(start_wait_s=0.0), Hindered(), set[bool]()
    begin(node, freezer=freezer)
    job = node.agent.state.jobs

    def frozen_once() -> bool:
        stopped.add("j2" in job and (job["j2"].stopped or job["j2"].driven))
        return "freeze" in freezer.calls

    node.until(frozen_once, "a try")
    assert stopped == {False}
    assert freezer.calls[:2] == ["freeze", "thaw"]
    assert "cannot hold it to its share: freezer.state: Read-only file system" in job["j2"].why
    freezer.fails = False
    node.until(lambda: job["j2"].stopped, "a second try")


def test_a_job_that_could_not_be_thawed_is_thawed_later(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    node, freezer = make_node(start_wait_s=0.0), Hindered()
    begin(node, freezer=freezer)

    def fails(pids: Collection[int]) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), "freezer.state")

    with monkeypatch.context() as patch:
        patch.setattr(freezer, "thaw", fails)
        node.until(lambda: "freeze" in freezer.calls, "a try")
        wait_for(lambda: node.slurm.letter(LOW) == "T", 120, "its end")
        freezer.text = HINDRANCE
        node.run(0.3)
        assert node.agent.state.jobs["j2"].stopped
    node.until(lambda: node.slurm.letter(LOW) == "S", "an end of it")
    assert not node.agent.state.jobs["j2"].stopped


def refuses(job_id: str) -> None:
    raise Refused("Requested operation is presently disabled", command="scontrol resume", job_id=job_id)


def test_a_departing_job_that_cannot_be_thawed_does_not_keep_the_others_frozen(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """Slurm knows nothing of it: the agent itself has frozen them."""
    node = make_node()
    begin(node)
    for number in (HIGH, LOW):
        node.slurm.processes[number].send_signal(signal.SIGSTOP)
        node.agent.state.saved.departing[number] = DepartingJob(os.getuid(), (0,), frozen=True)
    first, thaw = node.slurm.processes[HIGH].pid, node.agent._orders._freezer.thaw

    def fails(pids: Collection[int]) -> None:
        if first in pids:
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), "freezer.state")
        thaw(pids)

    monkeypatch.setattr(node.slurm, "resume", refuses)
    monkeypatch.setattr(node.agent._orders._freezer, "thaw", fails)
    node.order([], ())
    node.until(lambda: node.slurm.letter(LOW) != "T", "thawing")
    departing = node.agent.state.saved.departing
    assert departing[HIGH].frozen, "it is tried again"
    node.slurm.processes[HIGH].send_signal(signal.SIGCONT)
    node.until(lambda: not departing[HIGH].frozen, "word that it runs, which needs no thawing")


def test_a_job_that_runs_is_not_shown_as_suspended_because_it_cannot_be_thawed(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """An admin has resumed it, so that Slurm refuses, and the agent may not thaw it, which need not be."""
    node = make_node(start_wait_s=0.0)

    def fails(pids: Collection[int]) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), "freezer.state")

    for number in (1, 2):
        node.job(number, "--mute")
    node.order(alone(1, 2), (0,), slice_s=0.5)
    node.until(lambda: "suspended" in node.states().values(), "a time slice")
    monkeypatch.setattr(node.agent._transitions._freezer, "thaw", fails)
    monkeypatch.setattr(node.slurm, "resume", refuses)
    job = next(job for job, state in node.states().items() if state == "suspended")
    node.until(
        lambda: "the agent may not thaw it: Read-only file system" in node.agent.state.jobs[job].why, "the reason"
    )
    assert node.states()[job] == "suspended", "it is still frozen"
    node.slurm.processes[int(job[1:])].send_signal(signal.SIGCONT)
    node.until(lambda: node.states()[job] == "running", "word that it runs")


@pytest.mark.parametrize("ticks", [True, False])
def test_an_agent_that_stops_lets_the_jobs_go_that_it_has_frozen(make_node: Callable[..., Node], *, ticks: bool):
    """Also one that stops before its first tick, and has that from its saved state. The next agent drives the job on."""
    node = make_node(start_wait_s=0.0)
    begin(node)
    node.until(lambda: node.slurm.letter(LOW) == "T", "freezing")
    if not ticks:
        node.start()
    node.agent.close()
    wait_for(lambda: node.slurm.letter(LOW) == "S", 120, "thawing")
    node.start()
    job = node.agent.state.jobs["j2"]
    assert (job.driven, job.stopped) == (True, False)
    node.until(lambda: node.slurm.letter(LOW) == "T", "freezing by the next agent")


def test_an_agent_that_stops_and_may_not_thaw_one_job_thaws_the_others(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """What it could not do is in its saved state, for the next agent."""
    node, others = make_node(start_wait_s=0.0), (LOW, LOW + 1)
    begin(node, others=others)
    node.until(lambda: all(node.slurm.letter(each) == "T" for each in others), "freezing of both")
    first, thaw = node.slurm.processes[LOW].pid, node.agent._duty_cycles._freezer.thaw

    def fails(pids: Collection[int]) -> None:
        if first in pids:
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), "freezer.state")
        thaw(pids)

    with monkeypatch.context() as patch:
        patch.setattr(node.agent._duty_cycles._freezer, "thaw", fails)
        node.agent.close()
    wait_for(lambda: node.slurm.letter(LOW + 1) == "S", 120, "thawing")
    assert node.slurm.letter(LOW) == "T"
    node.start()
    assert [node.agent.state.jobs[f"j{each}"].stopped for each in others] == [True, False]


def test_the_status_says_that_a_job_is_driven_and_for_how_long_it_was_frozen(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
):
    """A short pause is a part of being driven, and counts as running."""
    monkeypatch.setattr(duty_cycles, "FROZEN_S", 1.0)
    node = make_node(start_wait_s=0.0)
    begin(node)
    node.until(lambda: node.slurm.letter(LOW) == "T", "freezing")
    job = node.agent.status().jobs[1]
    assert (job.job, job.state, job.driven, job.frozen, job.frozen_s, job.since_s) == (
        "j2", "running", True, False, 0.0, 0.0,
    )  # fmt: skip
    first = node.agent.state.jobs["j2"].stopped_s
    node.until(lambda: node.told().jobs[1].frozen, "word that it is frozen")
    job = node.told().jobs[1]
    assert (job.driven, job.since_s) == (True, first)
    assert 1.0 <= job.frozen_s == node.agent.state.now_s - first
    node.agent.close()
    last = node.agent.status().jobs[1]
    assert (last.frozen, last.frozen_s) == (False, job.frozen_s)


def freezes(make_node: Callable[..., Node]) -> tuple[Node, dict[str, str]]:
    """A node whose agent has frozen a job, and the settings by which another finds its folders."""
    skip_without_slurm(accounting=False)  # the program finds Slurm's commands before it begins
    node = make_node(start_wait_s=0.0)
    begin(node)
    node.until(lambda: node.slurm.letter(LOW) == "T", "freezing")
    return node, {"run_dir": str(node.run_dir), "state_dir": str(node.run_dir.with_name("state"))}


def runs_on(node: Node) -> None:
    wait_for(lambda: node.slurm.letter(LOW) == "S", 120, "thawing")
    node.start()
    assert (node.agent.state.jobs["j2"].driven, node.agent.state.jobs["j2"].stopped) == (True, False)


def test_after_an_agent_that_was_killed_its_unit_thaws_what_it_has_frozen(
    make_node: Callable[..., Node], tmp_path: Path
):
    node, folders = freezes(make_node)
    config = tmp_path / "penstock.toml"
    lines = [f'{name} = "{folder}"' for name, folder in folders.items()]
    config.write_text("\n".join(["[slurm]", "partitions = ['gpu']", "[agent]", *lines]))
    command = [sys.executable, "-m", "penstock_slurm.agent.main", "--config", str(config), "--node", node.name]
    done = subprocess.run([*command, "--thaw"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    runs_on(node)


def test_jobs_are_thawed_by_the_default_settings_if_those_of_the_file_are_wrong(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With wrong settings, no agent starts again."""
    node, folders = freezes(make_node)
    config = tmp_path / "penstock.toml"
    config.write_text("[slurm]\npartitions = 'gpu'\n")
    monkeypatch.setattr(main, "AgentSettings", lambda: AgentSettings.model_validate(folders))
    assert main._thaw(node.name, config) == 0
    runs_on(node)
