"""Jobs that are held, wait for something else than GPUs, or are not Penstock's: what the commands say of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_scheduler.api.ports import Unmanaged
from penstock_scheduler.model import ClusterState, Phase, Refusal, WaitingJob
from tests.scheduler.builders import job, snapshot
from tests.scheduler.cli.commands import penstock
from tests.scheduler.service.api import ADAS, BOBS, Api, serving

TEXT = "is held by an admin in Slurm (JobHeldAdmin); an admin can release it with `penstock release 1`"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with serving(tmp_path) as api:
        yield api


def look(api: Api, *waiting: WaitingJob, refused: tuple[Refusal, ...] = ()) -> None:
    state = ClusterState(snapshot("t4:2x4", []).nodes, (BOBS,), refused, waiting=waiting)
    api.board.observed(state, time.time())


def test_a_held_job_is_listed_and_says_who_holds_it(api: Api) -> None:
    """It ran before and is still known; once it is released, it is a job as any other."""
    held = dataclasses.replace(ADAS, phase=Phase.QUEUED, allocation=None, restarts=1)
    look(api, WaitingJob(held, "held", TEXT))
    assert "held" in penstock(api, "list", who="ada").output
    shown = " ".join(penstock(api, "show", "1", who="ada").output.split())
    assert "is held by an admin in Slurm" in shown
    assert TEXT in penstock(api, "explain", "1", who="ada").output
    assert penstock(api, "cancel", "1", who="ada").exit_code == 0
    assert api.submitter.cancelled == ["1"]
    api.look(held, BOBS)
    assert "is held" not in penstock(api, "show", "1", who="ada").output


def test_a_job_that_no_round_has_seen_is_known_while_it_waits_for_its_dependency(api: Api) -> None:
    new = job("5", user="ada", max_gpus=1)
    look(api, WaitingJob(new, "waiting-cluster", "waits for its dependency afterok:3(unfulfilled)"))
    assert "waiting-cluster" in penstock(api, "list", who="ada").output
    assert "Job 5 waits for its dependency afterok:3" in penstock(api, "explain", "5", who="ada").output


def test_a_job_whose_spec_was_overwritten_says_so(api: Api) -> None:
    look(api, refused=(Refusal("1", "train", "ada", "its AdminComment no longer has the job spec"),))
    assert "no longer has the job spec" in penstock(api, "show", "1", who="ada").output
    assert "refused" in penstock(api, "list", who="ada").output


def test_users_hold_and_release_their_own_jobs_and_operators_all(api: Api) -> None:
    told = penstock(api, "hold", "1", who="ada")
    assert told.output == "Job 1 goes on; after a stop it is not started again until `penstock release`.\n"
    assert api.submitter.held == {"1": ("ada", False)}
    assert penstock(api, "release", "1", who="ada").exit_code == 0
    assert api.submitter.held == {}
    refused = penstock(api, "release", "1", who="ada")
    assert (refused.exit_code, "nobody holds it" in refused.stderr) == (1, True)
    assert penstock(api, "hold", "2", who="ada").exit_code == 1, "it is bob's"
    assert penstock(api, "hold", "1", who="oz").exit_code == 0
    assert "an admin holds it" in penstock(api, "release", "1", who="ada").stderr
    assert penstock(api, "release", "1", who="oz").exit_code == 0
    assert "is held" not in penstock(api, "hold", "9", who="ada").output


def test_a_plain_job_and_an_array_say_what_they_are_to_their_user(api: Api) -> None:
    api.submitter.others["7"] = Unmanaged("ada", "is an array: ask for its elements, such as 7_1")
    for words in (("show", "7"), ("explain", "7")):
        assert "job 7 is an array: ask for its elements, such as 7_1" in str(penstock(api, *words, who="ada").exception)
        assert "array" not in str(penstock(api, *words, who="bob").exception)
    assert "is an array" in penstock(api, "cancel", "7", who="ada").stderr


def test_refused_jobs_are_in_list_and_queue_with_their_reason(api):
    """A job that was never managed has no place in the table of jobs; nobody would learn why it waits."""
    look(api, refused=(Refusal("7", "big", "bob", "min_gpus=9 is above max_gpus=8: correct one of them"),))
    for command in (["list"], ["list", "--waiting"]):
        told = penstock(api, *command, who="bob").output
        assert "Penstock refuses these jobs" in told
        assert "min_gpus=9 is above max_gpus=8" in told
        assert "Penstock refuses" not in penstock(api, *command, who="ada").output
    assert "Penstock refuses" not in penstock(api, "list", "--name", "small").output
    assert "Penstock refuses" not in penstock(api, "list", "--state", "running").output
