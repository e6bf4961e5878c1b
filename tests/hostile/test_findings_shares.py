"""What a review found in the shares of users: jobs that keep others from GPUs, and claims that count for other users' jobs."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from penstock_profiles.families import load_families
from penstock_profiles.wire import ControlMessage, Report, Started
from penstock_scheduler.jobs.models import MOST_COST_S, SpecModels
from penstock_scheduler.model import NodeChoice
from penstock_scheduler.rounds.policies import pollux
from penstock_scheduler.rounds.policies.turns import LARGE_TURN_S, TURN_S
from penstock_slurm.observe.reporting import measured
from tests.hostile.floods import ROUND_S, Flood, Lived
from tests.scheduler.builders import job

NODES = ("t4-00", "t4-01", "t4-02", "t4-03")
FOR_EVER = 1e9


@pytest.fixture(autouse=True, scope="module")
def quick_search() -> Iterator[None]:
    """A search that is stopped early has to keep the rules, too."""
    with mock.patch.multiple(pollux, GENERATIONS=10, POPULATION=20):
        yield


def test_one_small_job_on_each_node_does_not_block_jobs_of_a_whole_node() -> None:
    """One user holds 4 of 32 GPUs, each on a node of her choice; 28 are idle."""
    small = [
        Lived(job(f"small-{node}", user="mallory", max_gpus=1, nodes=NodeChoice(only=frozenset([node]))), FOR_EVER)
        for node in NODES
    ]
    whole = Lived(job("whole", user="bob", submit_s=60.0, min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    Flood("t4:4x8", [*small, whole], "sia").run(3600.0)
    assert whole.longest_wait_s <= TURN_S + 2 * ROUND_S
    assert sum(lived.stops for lived in small) == 1


@pytest.mark.parametrize("policy", ["las", "gavel", "ftf"])
@pytest.mark.parametrize("most", [1, 8])
def test_two_users_take_turns_where_one_needs_all_gpus(policy: str, most: int) -> None:
    """Neither a job of all GPUs nor one of a single GPU keeps the other waiting for ever, and neither is stopped all the time.

    Gavel gives GPUs anew in every round, by its definition.
    """
    gang = Lived(job("gang", user="mallory", min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    small = Lived(job("small", user="bob", submit_s=60.0, max_gpus=most), FOR_EVER)
    Flood("t4:1x8", [gang, small], policy).run(4 * 3600.0)
    assert max(gang.longest_wait_s, small.longest_wait_s) <= 7200.0
    assert policy == "gavel" or max(gang.stops, small.stops) <= 4 * 3600.0 / TURN_S


@pytest.mark.parametrize("policy", ["sia", "pollux", "srtf", "ftf", "las", "gavel"])
def test_no_gpu_is_idle_beside_two_elastic_jobs(policy: str) -> None:
    """A turn gives a job its minimum. Under a policy that does not resize running jobs, both jobs kept one GPU of eight."""
    jobs = [
        Lived(job(user, user=user, submit_s=submit_s, max_gpus=8), FOR_EVER)
        for user, submit_s in (("ada", 0.0), ("bob", 60.0))
    ]
    cluster = Flood("t4:1x8", jobs, policy)
    for hour in (1, 2, 3):
        cluster.run(hour * 3600.0)
        assert sum(each.job.allocation.gpus for each in jobs if each.job.allocation is not None) == 8


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("policy", ["sia", "pollux"])
def test_a_job_of_all_gpus_keeps_no_small_job_waiting_for_ever(policy: str, most: int) -> None:
    """The small job is within its share of four GPUs, but the other user has nothing left if it makes room."""
    gang = Lived(job("gang", user="mallory", min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    small = Lived(job("small", user="bob", submit_s=60.0, max_gpus=most), FOR_EVER)
    cluster = Flood("t4:1x8", [gang, small], policy)
    cluster.run(4 * 3600.0)
    assert small.longest_wait_s <= LARGE_TURN_S + TURN_S
    assert gang.stops <= 3
    assert any("has been without GPUs for 60 min" in text for _, _, text in cluster.stop_texts) or most == 8


def test_aging_bounds_the_wait_for_all_gpus() -> None:
    """Under sia: see docs/developer/sia.md#aging."""
    gang = Lived(job("gang", user="bob", submit_s=60.0, min_gpus=8, max_gpus=8, adaptivity="rigid"), FOR_EVER)
    small = Lived(job("small", user="mallory", max_gpus=1), FOR_EVER)
    Flood("t4:1x8", [small, gang], "sia").run(3 * 3600.0)
    assert gang.attained_gpu_s > 0


def test_pauses_of_one_user_do_not_pin_the_jobs_of_others() -> None:
    """A job reports that it has begun when it likes, so a move of it seems to have cost it days."""
    liars = [job(f"liar-{n}", user="mallory", model_family="bert-squad", pauses_s=(1e6,)) for n in range(3)]
    honest = [
        job("moved", user="bob", model_family="bert-squad", pauses_s=(40.0,)),
        job("other", user="cleo", model_family="bert-squad", pauses_s=(60.0,)),
        job("new", user="dan", model_family="bert-squad"),
    ]
    models = SpecModels(load_families(), 30.0)
    assert models.facts([*liars, *honest], ["t4"])["new"].restart_cost_s == 60.0
    assert models.facts([*liars, honest[-1]], ["t4"])["new"].restart_cost_s == MOST_COST_S


def test_no_pause_ends_after_it_was_reported() -> None:
    moved = ControlMessage(job_id="7", epoch=2, round=4, moved_s=1000.0)
    report = Report(job_id="7", epoch=2, sequence=0, time_s=1e11, body=Started(gpu_type="t4", gpu_ids={}, progress=0.0))
    found = measured(moved, report, now_s=1060.0)
    assert found is not None
    assert found.pauses_s == (60.0,)
