"""What an agent has frozen is thawed without it: if it is killed, and if it hangs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_loopback.fixtures import skip_without_slurm
from penstock_loopback.processes import wait_for
from penstock_slurm.agent.freezer import GuardedFreezer

from .node import Node
from .test_driving import HIGH, LOW, begin
from .test_freezer import frozen, process, step  # noqa: F401

GUESTS = (LOW, LOW + 1)


def stand_still(node: Node) -> bool:
    """Whether the agent holds both guests frozen now."""
    return all(node.slurm.letter(each) == "T" for each in GUESTS)


def run_on(node: Node) -> bool:
    return all(node.slurm.letter(each) == "S" for each in GUESTS)


@pytest.fixture
def agent(make_node: Callable[..., Node], tmp_path: Path) -> Iterator[tuple[Node, subprocess.Popen[bytes]]]:
    """The program penstock-agent on a node where a guaranteed job runs beside two guests that do not report."""
    skip_without_slurm(accounting=False)  # the program finds Slurm's commands before it begins
    node = make_node(start_wait_s=0.0)
    begin(node, others=GUESTS)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[slurm]\npartitions = ["gpu"]\nspool_dir = "{node.spool}"\n'
        f'[agent]\nstart_wait_s = 0.0\nrun_dir = "{node.run_dir}"\nstate_dir = "{node.run_dir.with_name("state")}"\n'
    )
    command = [sys.executable, "-m", "penstock_slurm.agent.main", "--config", str(config), "--node", node.name]
    with subprocess.Popen(command) as running:
        yield node, running
        running.kill()


def test_the_guests_of_an_agent_that_is_killed_run_on(agent: tuple[Node, subprocess.Popen[bytes]]):
    """Without its unit, and without another agent."""
    node, running = agent
    wait_for(lambda: stand_still(node), 120, "freezing of both guests")
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    wait_for(lambda: run_on(node), 10, "thawing")
    time.sleep(1.0)
    assert run_on(node)
    assert node.slurm.letter(HIGH) == "S"


def guard_of(freezer: GuardedFreezer) -> subprocess.Popen[bytes]:
    assert freezer._guard is not None
    return freezer._guard


def test_the_guests_of_an_agent_that_hangs_run_on_until_it_is_back(make_node: Callable[..., Node]):
    """At its return the agent knows that they may run, although Slurm and NVML tell it nothing."""
    node, freezer = make_node(start_wait_s=0.0), GuardedFreezer(patience_s=2.0)
    begin(node, freezer=freezer, others=GUESTS)
    node.until(lambda: stand_still(node), "freezing of both guests")
    node.run(3.0)
    assert stand_still(node), "an agent that ticks does not hang"
    wait_for(lambda: run_on(node), 30, "thawing")
    node.until(lambda: stand_still(node), "freezing again")
    node.agent.close()
    wait_for(lambda: run_on(node), 30, "thawing")
    assert freezer._guard is None


def test_the_next_agent_freezes_again(make_node: Callable[..., Node]):
    """The saved state calls the guests frozen, and they run."""
    node, freezer = make_node(start_wait_s=0.0), GuardedFreezer()
    begin(node, freezer=freezer, others=GUESTS)
    node.until(lambda: stand_still(node), "freezing of both guests")
    freezer.close()
    wait_for(lambda: run_on(node), 30, "thawing")
    node.freezer = None
    node.start()
    assert all(node.agent.state.jobs[f"j{each}"].stopped for each in GUESTS)
    node.until(lambda: stand_still(node), "freezing by the next agent")
    node.agent.close()


def test_a_guard_that_is_killed_is_replaced_and_no_signal_of_a_service_manager_ends_it():
    freezer = GuardedFreezer()
    with process() as pid:
        freezer.freeze([pid])
        first = guard_of(freezer)
        wait_for(lambda: "SigIgn:\t0000000000000000" not in Path(f"/proc/{first.pid}/status").read_text(), 30, "it")
        wait_for(lambda: frozen(pid), 30, "freezing")
        first.terminate()
        freezer.beat()
        assert first.poll() is None
        first.kill()
        first.wait()
        freezer.beat()
        assert guard_of(freezer).pid != first.pid
        assert frozen(pid)
        freezer.close()
        wait_for(lambda: not frozen(pid), 30, "thawing")


def test_a_guard_that_takes_no_lines_does_not_hold_the_agent_up():
    freezer = GuardedFreezer()
    with process() as pid:
        freezer.freeze([pid])
        first = guard_of(freezer)
        first.send_signal(signal.SIGSTOP)
        for _ in range(200_000):
            freezer.beat()
            if guard_of(freezer) is not first:
                break
        assert guard_of(freezer) is not first
        freezer.close()
        wait_for(lambda: not frozen(pid), 30, "thawing")


def test_nothing_is_frozen_without_a_guard(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        GuardedFreezer().freeze([os.getpid()])


KILLED = """
import os, signal, sys
from penstock_slurm.agent.freezer import GuardedFreezer
freezer = GuardedFreezer()
freezer.freeze([int(each) for each in sys.argv[1:]])
freezer.thaw([int(sys.argv[1])])
os.kill(int(sys.argv[1]), signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_cgroups_of_slurm_are_thawed_and_what_was_thawed_before_is_left_alone(step: Path):  # noqa: F811
    """The first process, which no cgroup of Slurm's has, has been stopped by another since then."""
    task = step / ("user/task_0" if (step / "user").exists() else "task_0")
    with process() as other, process(task) as inside:
        with subprocess.Popen([sys.executable, "-c", KILLED, str(other), str(inside)], stderr=subprocess.PIPE) as agent:
            assert agent.stderr is not None
            said = agent.stderr.read().decode()  # the guard has ended, too
        assert agent.returncode == -signal.SIGKILL
        assert 'text="the agent has ended"' in said, said
        wait_for(lambda: not frozen(inside), 30, "thawing")
        assert frozen(other)
