"""Held jobs name no nodes of former runs, by one command that is not repeated in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from penstock_slurm.gateway import CliGateway, ControllerAway, SlurmJob
from penstock_slurm.jobs.holds import MOST, LeftNodes
from tests.slurm_plugin.test_cluster import pending


class Writer:
    """Notes the jobs of each command."""

    def __init__(self) -> None:
        self.cleared: list[list[str]] = []
        self.away = False

    def name_no_nodes(self, job_ids: Sequence[str]) -> None:
        self.cleared.append([*job_ids])
        if self.away:
            raise ControllerAway("connection refused", command="scontrol")


def left(job: int, **fields: Any) -> SlurmJob:
    """A job that is held after a run on n0."""
    return pending("gpu", id=str(job), number=job, **{"priority": 0, "restarts": 1, "required_nodes": ("n0",)} | fields)


def test_only_jobs_that_are_held_after_a_run_and_that_no_round_acts_on_lose_their_nodes() -> None:
    writer = Writer()
    jobs = [
        left(1),
        left(2, priority=9),
        left(3, required_nodes=()),
        left(4, restarts=0),  # a user's own choice, or the reason to believe that slurmctld has forgotten a start
        left(5, state="RUNNING"),
        left(6),
        left(7),
    ]
    LeftNodes(cast(CliGateway, writer)).clear(jobs, {"6"})
    assert writer.cleared == [["1", "7"]]
    LeftNodes(cast(CliGateway, writer)).clear([left(2, priority=9)], ())
    assert len(writer.cleared) == 1, "nothing to do takes no process"


def test_a_command_that_changes_nothing_is_not_repeated_before_the_next_run() -> None:
    writer = Writer()
    nodes = LeftNodes(cast(CliGateway, writer))
    nodes.clear([left(1)], ())
    nodes.clear([left(1)], ())
    nodes.clear([left(1, restarts=2)], ())
    assert writer.cleared == [["1"], ["1"]]
    nodes.clear([], ())
    nodes.clear([left(1, restarts=2)], ())
    assert len(writer.cleared) == 3, "a job that was gone is another one"


def test_a_command_that_fails_is_repeated_and_one_command_is_for_some_jobs() -> None:
    writer = Writer()
    writer.away = True
    nodes = LeftNodes(cast(CliGateway, writer))
    jobs = [left(each) for each in range(1, MOST + 3)]
    nodes.clear(jobs, ())
    writer.away = False
    nodes.clear(jobs, ())
    nodes.clear(jobs, ())
    assert [len(each) for each in writer.cleared] == [MOST, MOST, 2]
