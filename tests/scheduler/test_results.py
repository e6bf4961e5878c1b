"""What trials have reached, and after how much running."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock_profiles.wire import Body, Checkpointed, Ended, Report, Result, Resumed, Started, Suspended
from penstock_scheduler.api.messages import ResultView
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.jobs.results import MOST, Results
from penstock_scheduler.model import ClusterState, JobUse, Phase, ReasonCode, SharingState
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on, snapshot

STARTED = Started(gpu_type="t4", gpu_ids={"a": (0,)})


def said(epoch: int, number: int, time_s: float, body: Body, job_id: str = "1") -> Report:
    return Report(job_id=job_id, epoch=epoch, sequence=number, time_s=time_s, body=body)


def result(metric: float, progress: float = 0.0) -> Result:
    return Result(metric=metric, progress=progress)


LIFE = (
    said(1, 0, 100.0, STARTED),
    said(1, 1, 110.0, result(0.1)),  # 10 s
    said(1, 2, 120.0, Suspended(moved_bytes=0, left_bytes=0, seconds=0.1)),
    said(1, 3, 500.0, Resumed(seconds=0.1)),
    said(1, 4, 505.0, result(0.3)),  # 25 s
    said(1, 5, 515.0, Checkpointed(progress=1.0, seconds=0.1)),  # and dies: 35 s
    said(2, 0, 7.0, STARTED),  # on a node whose clock is another
    said(2, 1, 12.0, result(0.2, 64.0)),  # 40 s
    said(2, 2, 13.0, Ended(outcome="stopped", progress=64.0)),  # 41 s
    said(3, 0, 1000.0, STARTED),
    said(3, 1, 1004.0, result(0.4)),  # 45 s
)


def judged(results: Results, **uses: JobUse) -> dict[str, tuple[tuple[float, float], ...]]:
    """Results of each job in a snapshot in which the agents tell `uses`, named like `j1`."""
    state = SharingState(uses={name[1:]: use for name, use in uses.items()})
    seen = results.on(dataclasses.replace(snapshot("t4:1x4", [job("1"), job("2")]), sharing=state)).sharing
    assert seen is not None
    return {name: use.results for name, use in seen.uses.items()}


@pytest.mark.parametrize("live", [True, False])
def test_time_counts_while_a_run_trains_and_only_what_is_better_is_kept(live):
    results = Results()
    for report in LIFE:
        results.take(report, live=live)
        results.take(report, live=live)  # what is read again changes nothing
    assert judged(results) == {"1": ((10.0, 0.1), (25.0, 0.3), (45.0, 0.4))}
    assert results.newest("1") == ResultView(metric=0.4, progress=0.0, ran_s=45.0)
    results.forget("1")
    assert results.newest("1") is None
    assert judged(results) == {}


def test_a_job_that_was_frozen_and_did_not_say_so_is_not_older_than_its_agent_says():
    results = Results()
    results.take(said(1, 0, 0.0, STARTED))
    results.take(said(1, 1, 900.0, result(0.5)), live=True)
    assert judged(results, j1=JobUse("k", ran_s=300.0)) == {"1": ((300.0, 0.5),)}
    assert judged(results, j1=JobUse("k", ran_s=400.0)) == {"1": ((300.0, 0.5),)}, "it does not move afterwards"
    assert judged(results, j1=JobUse("k"), j2=JobUse("other")) == {"1": ((300.0, 0.5),), "2": ()}


def test_of_very_many_results_some_are_kept_the_best_among_them():
    results = Results()
    results.take(said(1, 0, 0.0, STARTED))
    for number in range(1, 10_001):
        results.take(said(1, number, number / 2, result(float(number))))
    kept = judged(results)["1"]
    assert MOST / 2 <= len(kept) <= MOST
    assert kept[-1] == (5000.0, 10_000.0)
    assert list(kept) == sorted(kept)


def test_without_agents_a_snapshot_stays_as_it_is():
    results, seen = Results(), snapshot("t4:1x4", [job("1")])
    results.take(said(1, 0, 0.0, result(1.0)))
    assert results.on(seen) is seen


def test_a_daemon_that_starts_again_knows_them(tmp_path: Path):
    running = job("1", max_gpus=2, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
    state = ClusterState(snapshot("t4:2x4", []).nodes, (running,))
    store = open_store(tmp_path, writer=True)
    board = Board(store, None)
    board.observed(state, 0.0)
    board.take_reports(LIFE)
    store.add_reports(LIFE)
    board.observed(state, 1.0)
    view = board.job("1")
    assert view is not None
    assert view.result == ResultView(metric=0.4, progress=0.0, ran_s=45.0)
    assert view.version == 2, "a client that waits for news is told"
    again = Board(store, None)
    again.take_reports(LIFE[-2:])  # the spool is read from its beginning
    assert judged(again.results) == judged(board.results)
    again.observed(state, 2.0)
    assert again.job("1") == view
    store.close()


def test_by_what_is_reported_the_policy_lets_the_hopeless_rest():
    """Three trials that ran alike; the two worse rest, and the policy says so. Without results no trial does."""
    trials = [
        job(str(i), submit_s=float(i), trial_group="night", phase=Phase.RUNNING, allocation=on("t4", t4_00=1))
        for i in range(3)
    ]
    uses = {each.id: JobUse("k", 0.5, ran_s=400.0) for each in trials}
    seen = dataclasses.replace(snapshot("t4:1x4", trials), sharing=SharingState(uses=uses))
    results = Results()
    policy, _ = make_policy("gandiva")
    assert not policy.decide(results.on(seen)).waiting
    for each, metric in zip(trials, (0.2, 0.9, 0.3), strict=True):
        results.take(said(1, 0, 0.0, STARTED, each.id), live=True)
        results.take(said(1, 1, 250.0, result(metric), each.id), live=True)
    resting = {name: why.code for name, why in policy.decide(results.on(seen)).waiting.items()}
    assert resting == dict.fromkeys(("0", "2"), ReasonCode.STOPPED_BY_GROUP)
