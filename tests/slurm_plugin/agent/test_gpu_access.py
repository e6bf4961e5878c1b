"""GPUs that the agent opens to jobs, with cgroups like those of Slurm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_profiles.node_channel import devices_file, gpus_file
from penstock_scheduler.model import JobId
from penstock_slurm.agent.device_cgroup import DeviceCgroups

from .cgroups import JOB, UID, Slurm
from .node import Node, alone

# --- with the rest of the agent


@pytest.fixture
def node(tmp_path: Path, slurm: Slurm) -> Iterator[Node]:
    made = Node(tmp_path)
    made.device_cgroups = slurm.cgroups()
    made.start()
    yield made
    made.close()


def order(node: Node, *numbers: int, **fields: object) -> None:
    """A job on GPU 1 with a time slice."""
    of_user = {number: {"uid": UID, **fields} for number in (JOB, JOB + 1)}
    node.order(alone(*numbers), (1,), 60.0, fields=of_user)
    node.agent.tick(time.time())


def test_who_has_a_turn_is_let_at_its_gpus_and_who_waits_is_not(node: Node, slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("batch"))
    order(node, JOB + 1, JOB)
    assert node.states() == {f"j{JOB + 1}": "running", f"j{JOB}": "waiting"}
    assert slurm.sees(process) == set()
    order(node, JOB)
    assert node.states() == {f"j{JOB}": "running"}
    assert slurm.sees(process) == {1}
    assert gpus_file(node.run_dir, JOB).read_text().splitlines() == [str(path) for path in slurm.gpus]
    step = slurm.inside(*slurm.step("0", tasks=1))
    node.agent.tick(time.time())
    assert slurm.sees(step) == {1}
    assert node.agent.status().lacks == ()


def test_a_job_that_the_daemon_names_no_more_keeps_them_as_it_begins_steps(node: Node, slurm: Slurm) -> None:
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    node.order([], ())
    node.agent.tick(time.time())
    assert JOB in node.agent.state.saved.departing
    step = slurm.inside(*slurm.step("0", tasks=1))
    node.agent.tick(time.time())
    assert slurm.sees(step) == {1}


def test_the_cgroups_of_a_job_with_gpus_of_slurms_are_slurms_matter(node: Node, slurm: Slurm) -> None:
    process = slurm.inside(*slurm.step("batch"))
    order(node, JOB, own_devices=(1,))
    assert node.states() == {f"j{JOB}": "running"}
    assert slurm.sees(process) == set()


def test_a_job_to_which_its_gpus_cannot_be_opened_is_not_bound_and_the_status_says_why(
    node: Node, slurm: Slurm, tmp_path: Path
) -> None:
    process = slurm.inside(*slurm.step("batch"))
    elsewhere = [path.rename(tmp_path / path.name) for path in slurm.gpus[1:]]
    order(node, JOB)
    assert node.states() == {f"j{JOB}": "waiting"}
    assert "its GPUs cannot be opened to it" in node.agent.status().jobs[0].why
    assert not devices_file(node.run_dir, JOB).exists()
    node.agent.tick(time.time() + 60)
    assert node.agent.status().lacks == ("no-devices",)
    for path, back in zip(elsewhere, slurm.gpus[1:], strict=True):
        path.rename(back)
    node.agent.tick(time.time() + 120)
    node.agent.tick(time.time() + 180)
    assert node.states() == {f"j{JOB}": "running"}
    assert node.agent.status().lacks == ()
    assert slurm.sees(process) == {1}


def test_a_later_run_of_the_job_is_left_alone_until_the_daemon_names_it(node: Node, slurm: Slurm) -> None:
    """The agent was down meanwhile, and Slurm may have allocated GPUs to it."""
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    slurm.end_job()
    process = slurm.inside(*slurm.step("batch"))
    node.start().tick(time.time())
    assert node.states() == {f"j{JOB}": "running"}
    assert slurm.sees(process) == set()
    order(node, JOB)
    assert slurm.sees(process) == {1}


def test_an_order_written_before_it_was_known_that_a_run_has_ended_names_no_later_one(node: Node, slurm: Slurm) -> None:
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    slurm.end_job()
    node.agent.tick(time.time() + 1)
    mine = node.agent.state.jobs[JobId(f"j{JOB}")]
    assert mine.gone
    order(node, JOB)
    process = slurm.inside(*slurm.step("batch"))
    node.agent.tick(time.time() + 2)
    assert not mine.gone
    assert slurm.sees(process) == set()
    order(node, JOB)
    assert slurm.sees(process) == {1}


def test_a_later_run_of_a_job_that_the_daemon_names_no_more_is_left_alone(node: Node, slurm: Slurm) -> None:
    """A process of the user that claims to belong to the job may outlive the job."""
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    node.order([], ())
    node.agent.tick(time.time())
    slurm.end_job()
    process = slurm.inside(*slurm.step("batch"))
    node.agent.tick(time.time())
    assert JOB in node.agent.state.saved.departing
    assert slurm.sees(process) == set()


def test_a_later_run_with_gpus_of_slurms_is_not_what_the_one_before_was(node: Node, slurm: Slurm) -> None:
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    slurm.end_job()
    process = slurm.inside(*slurm.step("batch"))
    node.start()
    order(node, JOB, own_devices=(2,))
    assert not devices_file(node.run_dir, JOB).exists()
    assert node.agent.state.jobs[JobId(f"j{JOB}")].devices in ((), (2,))
    node.order([], ())
    node.agent.tick(time.time())
    assert JOB in node.agent.state.saved.departing
    assert slurm.sees(process) == set()


def test_that_slurms_cgroups_are_not_found_is_told_once_a_job_runs(node: Node, slurm: Slurm) -> None:
    node.device_cgroups = DeviceCgroups("n2", lambda: True, slurm.pattern, slurm.mount)
    node.start().tick(time.time())
    assert node.agent.status().lacks == ()
    slurm.inside(*slurm.step("batch"))
    order(node, JOB)
    node.agent.tick(time.time() + 60)
    assert node.agent.status().lacks == ("no-devices",)
