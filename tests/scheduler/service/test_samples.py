"""Samples of jobs and of the cluster: taken once a minute, thinned out later, and shown in a bounded number of points."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.history_messages import JobSample
from penstock_scheduler.daemon.service.samples import Sampler
from penstock_scheduler.model import ClusterState, Phase, Plan, Reason, ReasonCode, Refusal, Stop, StopCode, WaitingJob
from penstock_scheduler.model.plan import Assignment
from penstock_scheduler.model.records import GateRecord, RoundRecord
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import DaemonSettings
from penstock_scheduler.store.sql import open_store
from tests.constants import with_constants
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import OBSERVED, serving

HOUR, DAY = 3600.0, 86_400.0
NODES = snapshot("t4:2x4", []).nodes
RUNS = job("1", phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
STATE = ClusterState(NODES, (RUNS,))


@pytest.fixture
def store(tmp_path) -> Iterator:
    opened = open_store(tmp_path / "state", writer=True)
    yield opened
    opened.close()


@pytest.fixture
def sampler(store) -> Sampler:
    return Sampler(store, DaemonSettings())


def told(sampler: Sampler, name: str = "1", **fields: object) -> None:
    body = Observation.model_validate(OBSERVED | fields)
    sampler.take_reports([Report(job_id=name, epoch=1, sequence=0, time_s=1.0, body=body)])


def round_of(goodput: float, **fields: object) -> RoundRecord:
    given = Assignment(on("t4", t4_00=2), Reason(ReasonCode.KEPT, "stays"), goodput)
    return RoundRecord(
        snapshot(NODES, [RUNS]), make_policy("fifo")[1], Plan(1, {"1": given}, **fields), {"decide": 0.5}
    )


def test_a_job_is_sampled_once_a_minute_and_only_if_it_has_reported(store, sampler):
    sampler.decided(round_of(40.0))
    for second in range(181):
        if second < 100 and second % 10 == 0:
            told(sampler, progress=float(second), goodput=30.0, utilisation=0.8768, device_memory_mb=99.6)
        sampler.observed(STATE, 1000.0 + second)
    assert [(each.time_s, each.progress) for each in store.samples("1", 0, 9e9, 1)] == [
        (1000, 0),
        (1060, 60),
        (1120, 90),
    ]
    sample = store.samples("1", 0, 9e9, 1)[1]
    assert (sample.goodput, sample.expected, sample.gpus, sample.batch) == (30.0, 40.0, 2, 16)
    assert (sample.utilisation, sample.memory_mb, sample.span_s) == (0.877, 100, 0)
    figures = store.series(["as-expected", "busy"], 0, 9e9, 1)
    assert figures["as-expected"] == [(1000, 0.75), (1060, 0.75), (1120, 0.75)]
    assert figures["busy"][0] == (1000, 0.8768)


@pytest.mark.parametrize("state", [ClusterState(NODES, ()), ClusterState(NODES, (job("1"),))])
def test_a_job_that_does_not_run_is_not_sampled(store, sampler, state):
    told(sampler)
    sampler.observed(state, 1000.0)
    assert store.samples("1", 0, 9e9, 1) == []


def test_a_report_from_before_a_move_is_not_held_against_what_is_expected_after_it(store, sampler):
    told(sampler, gpus=1)
    sampler.observed(STATE, 1000.0)
    assert store.samples("1", 0, 9e9, 1) == []


def test_the_cluster_in_figures(store, sampler):
    others = dataclasses.replace(NODES[1], gpus_others=3, may_start=False)
    shared = [job(str(number), phase=Phase.RUNNING, allocation=on("t4", t4_00=4)) for number in range(2)]
    waiting = (WaitingJob(job("7"), "held", "is held"),)
    state = ClusterState((NODES[0], others), (*shared, job("8")), (Refusal("9", "n", "ada", "no"),), waiting=waiting)
    sampler.decided(round_of(1.0, prices={"t4": 0.5}, stops={"1": Stop(StopCode.GAIN, "faster")}))
    refused = dataclasses.replace(round_of(1.0), gate=GateRecord(refused=("too many",)), seconds={"decide": 2.0})
    sampler.decided(refused)
    sampler.decided(round_of(1.0, prices={"t4": 0.25}))
    sampler.observed(state, 1000.0)
    sampler.observed(state, 1060.0)
    found = {name: [value for _, value in points] for name, points in store.series([], 0, 9e9, 1).items()}
    assert found == {
        "gpus.t4.all": [8, 8],
        "gpus.t4.others": [3, 3],
        "gpus.t4.allocated": [4, 4],
        "gpus.t4.unusable": [4, 4],
        "jobs.queued": [1, 1],
        "jobs.starting": [0, 0],
        "jobs.running": [2, 2],
        "jobs.stopping": [0, 0],
        "jobs.held": [1, 1],
        "jobs.refused": [1, 1],
        "price.t4": [0.25, 0.25],
        "rounds.decided": [3, 0],
        "rounds.stops": [1, 0],
        "rounds.moves": [1, 0],
        "rounds.refused": [1, 0],
        "rounds.decide_s": [2.0],
    }


def fill(store, jobs: int, begin_s: float, end_s: float) -> None:
    """A sample a minute: the goodput is the minute of the hour, and in each one round is decided."""
    for at in range(int(begin_s), int(end_s), 60):
        minute = at // 60 % 60
        sample = JobSample(time_s=0, span_s=0, gpus=2, progress=float(at), goodput=float(minute), memory_mb=minute)
        figures = {"rounds.decided": 1.0, "rounds.gap": minute / 100, "gpus.t4.allocated": float(minute)}
        store.add_samples(at, [(str(number), sample) for number in range(jobs)], figures)


def test_old_samples_become_hourly_averages_a_few_jobs_a_tick_and_then_go(store):
    """Raw for an hour and hourly for three, at 9.5 h: raw is what began at 8 h or later, gone what began before 6.5 h."""
    settings = with_constants(DaemonSettings, {"keep_samples_days": 1 / 24, "keep_days": 3 / 24})
    fill(store, 25, 5 * HOUR, 9.5 * HOUR)
    sampler = Sampler(store, settings)
    for tick in range(2):
        sampler.observed(ClusterState((), ()), 9.5 * HOUR + tick)
    assert len(store.samples("9", 0, 9e9, 1)) == 4.5 * 60, "it is the turn of others"
    for tick in range(2, 6):
        sampler.observed(ClusterState((), ()), 9.5 * HOUR + tick)
    for name in range(25):
        found = store.samples(str(name), 0, 8 * HOUR, 1)
        assert [(each.time_s, each.span_s) for each in found] == [(7 * HOUR, HOUR)]
        assert (found[0].goodput, found[0].progress, found[0].memory_mb) == (29.5, 8 * HOUR - 60, 59)
        assert len(store.samples(str(name), 8 * HOUR, 9e9, 1)) == 90
    figures = store.series(["rounds.decided", "rounds.gap", "gpus.t4.allocated"], 0, 8 * HOUR, 1)
    assert {name: [value for _, value in points] for name, points in figures.items()} == {
        "rounds.decided": [60.0],
        "rounds.gap": [0.59],
        "gpus.t4.allocated": [29.5],
    }
    before = store.samples("1", 0, 9e9, 1)
    for tick in range(10):
        sampler.observed(ClusterState((), ()), 9.5 * HOUR + 4000 + tick)
    again = store.samples("1", 0, 9e9, 1)
    assert again[-30:] == before[-30:]
    assert [each.span_s for each in again[:1]] == [HOUR]


def test_more_old_samples_than_are_read_at_once(store, monkeypatch):
    monkeypatch.setattr("penstock_scheduler.store.series.MOST_ROWS", 100)
    fill(store, 1, 0, 3 * HOUR)
    store.thin(3 * HOUR, 0, "", 10)
    assert [each.span_s for each in store.samples("0", 0, 9e9, 1)] == [HOUR] + [0] * 120
    for _ in range(2):
        store.thin(3 * HOUR, 0, "", 10)
    assert [each.span_s for each in store.samples("0", 0, 9e9, 1)] == [HOUR] * 3
    assert [each.goodput for each in store.samples("0", 0, 9e9, 1)] == [29.5] * 3


@pytest.fixture
def api(tmp_path) -> Iterator:
    with serving(tmp_path) as api:
        yield api


def test_series_are_shown_in_a_bounded_number_of_points(api):
    store = api.board.store
    fill(store, 2, 0, 2 * DAY)
    with api.client("ada") as ada:
        found = ada.job_series("1", from_s=0.0, to_s=2 * DAY)
        assert found.step_s == 346  # 172,800 s in 500 steps
        assert 400 <= len(found.samples) <= 501
        assert found.samples[-1].progress == 2 * DAY - 60
        series = ada.series("rounds.decided", from_s=0.0, to_s=2 * DAY)
        assert sum(value for _, value in series.series["rounds.decided"]) == 2 * 1440
        assert list(series.series) == ["rounds.decided"]
        assert set(ada.series(from_s=0.0, to_s=10.0).series) == {"rounds.decided", "rounds.gap", "gpus.t4.allocated"}
        assert ada.series("no-such").series == {}
