"""Futures played with the policy, and the ranges made of them. Worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock_profiles.estimators import LinearEstimator
from penstock_scheduler.model import JobFacts, Phase
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator.estimates import futures
from penstock_scheduler.simulator.estimates.estimating import estimate, range_of
from penstock_scheduler.simulator.estimates.futures import play
from penstock_scheduler.simulator.estimates.past import FEWEST, Past, PastJob
from tests.scheduler.builders import job, on, snapshot

NOBODY = Past([], 1000.0)


def facts(jobs):
    return {each.id: JobFacts(LinearEstimator(), 30.0) for each in jobs}


def a_round(policy="fifo", remaining=None, attained=None, b=None):
    """Job a holds all 4 GPUs, and job b waits for them."""
    a = job("a", phase=Phase.RUNNING, min_gpus=4, max_gpus=4, allocation=on("t4", t4_00=4))
    b = b or job("b", min_gpus=4, max_gpus=4, submit_s=500.0)
    state = snapshot("t4:1x4", [a, b], remaining=remaining, attained=attained)
    decider, choice = make_policy(policy)
    return RoundRecord(state, choice, decider.decide(state)), decider


def past(*lengths_s, gpus=4, now_s=1000.0):
    """Jobs of this many GPUs that ran for these times, one ended each minute."""
    jobs = [
        PastJob(job(f"p{at}", max_gpus=gpus, submit_s=at * 60.0), gpus * length_s, at * 60.0 + length_s)
        for at, length_s in enumerate(lengths_s)
    ]
    return Past(jobs, now_s)


def test_a_job_starts_when_the_one_before_it_ends(monkeypatch):
    """a has 2,400 GPU-seconds left on 4 GPUs: 600 s. b then restarts for 30 s and works 1,200 / 4 = 300 s."""
    monkeypatch.setattr(futures, "OFF", 0.0)
    record, policy = a_round(remaining={"a": 2400.0, "b": 1200.0})
    found = play(record.snapshot, record.plan, policy, NOBODY, facts, np.random.default_rng(0), by_events=True)
    assert found.jobs["a"].end_s == 1600.0
    assert (found.jobs["b"].start_s, found.jobs["b"].end_s) == (1600.0, 1930.0)
    assert found.until_s == math.inf


def test_jobs_that_came_later_than_now_do_no_harm():
    """The daemon's clock was set back by an hour after they came."""
    record, policy = a_round(remaining={"a": 2400.0, "b": 1200.0})
    later = Past([PastJob(job("p", max_gpus=4, submit_s=4600.0), 100.0, None)], 1000.0)
    found = play(record.snapshot, record.plan, policy, later, facts, np.random.default_rng(0), by_events=True)
    assert found.jobs["b"].start_s > 1000.0


def test_a_future_that_must_stop_says_how_far_it_came():
    record, policy = a_round(remaining={"a": 2400.0, "b": 1200.0})
    found = play(record.snapshot, record.plan, policy, NOBODY, facts, np.random.default_rng(0), expired=lambda: True)
    assert found.jobs["b"].start_s == math.inf
    assert found.until_s == 1000.0


def test_a_length_is_that_of_an_earlier_job_that_ran_for_longer():
    """The job is 100 s old. Of the earlier jobs, those of 50 s tell nothing about it."""
    earlier = past(*[50.0] * 30, *[500.0] * 30)
    like = job("x", max_gpus=4)
    lengths = {earlier.length_s(like, 100.0, np.random.default_rng(seed)) for seed in range(50)}
    assert 500.0 in lengths
    assert min(lengths) > 100.0
    assert sum(length == 500.0 for length in lengths) / len(lengths) > 0  # longer than all others is possible, too


def test_jobs_of_the_same_user_tell_more_than_those_of_others():
    theirs = [PastJob(job(f"t{n}", user="bob", max_gpus=1, submit_s=n), 1000.0, 2000.0) for n in range(50)]
    own = [PastJob(job(f"o{n}", user="ada", max_gpus=1, submit_s=n), 10.0, 20.0) for n in range(12)]
    assert set(Past([*theirs, *own], 3000.0).like(job("x", user="ada", max_gpus=1), 0.0)) == {(10.0, True)}


def test_what_still_runs_makes_lengths_longer():
    """Half of the jobs ended after 50 s, and the other half have run for 500 s and go on. So half of all need more than 500 s."""
    ended = [PastJob(job(f"e{n}", max_gpus=1, submit_s=n), 50.0, 60.0 + n) for n in range(30)]
    running = [PastJob(job(f"r{n}", max_gpus=1, submit_s=n), 500.0, None) for n in range(30)]
    known = Past([*ended, *running], 1000.0)
    lengths = [known.length_s(job("x", max_gpus=1), 0.0, np.random.default_rng(seed)) for seed in range(400)]
    assert 0.4 < sum(length > 500.0 for length in lengths) / len(lengths) < 0.6
    assert set(lengths) & {500.0} == set()


def test_a_time_limit_bounds_the_end():
    """All earlier jobs took a day. The job may take 600 s, of which it has had 100."""
    record, policy = a_round(attained={"a": {"t4": 400.0}}, remaining={"b": 4.0})
    limited = replace(record.snapshot.jobs[0], time_limit_s=600.0)
    state = replace(record.snapshot, jobs=(limited, record.snapshot.jobs[1]))
    found = play(state, record.plan, policy, past(*[86_400.0] * 30), facts, np.random.default_rng(1), by_events=True)
    assert found.jobs["a"].end_s <= 1500.0


def test_the_range_of_19_futures_leaves_out_one_at_each_end():
    found = range_of([float(each) for each in range(1, 20)])
    assert found is not None
    assert (found.low_s, found.high_s) == pytest.approx((2.0, 18.0))


def test_a_wider_range_keeps_its_middle():
    values = [float(each) for each in range(1, 20)]
    plain = range_of(values)
    assert plain is not None
    wide = plain.widened(2.0)
    assert wide.low_s < plain.low_s < 10 < plain.high_s < wide.high_s


def test_a_range_may_have_no_end_and_no_range_is_none():
    some = [10.0] * 10 + [math.inf] * 9
    found = range_of(some)
    assert found is not None
    assert (found.low_s, found.high_s) == (10.0, math.inf)
    assert range_of([math.inf] * 19) is None


@pytest.mark.parametrize("policy", ["fifo", "slurm-backfill", "las", "sia"])
def test_estimates_of_a_round(policy):
    """a and b report what is left: 10 minutes, and 5 minutes after that."""
    record, _ = a_round(policy, remaining={"a": 2400.0, "b": 1200.0})
    found = estimate(record, NOBODY, facts).jobs
    assert found["a"].start is None
    assert found["a"].end is not None
    assert found["b"].start is not None
    assert found["b"].end is not None
    assert found["b"].start.low_s < 600 + 60
    assert found["b"].start.high_s > 600 - 60
    assert found["b"].end.low_s > found["b"].start.low_s
    assert found == estimate(record, NOBODY, facts).jobs, "the same round, the same estimates"


def test_what_is_not_known_is_said_and_not_guessed():
    record, _ = a_round(remaining={"b": 4.0})
    found = estimate(record, NOBODY, facts).jobs
    assert (found["a"].end, found["b"].start) == (None, None)
    assert found["a"].unknown == (
        f"it does not report how much work is left, and fewer than {FEWEST} jobs have ended here to compare with"
    )
    never, _ = a_round(remaining={"a": 4.0, "b": 4.0}, b=job("b", min_gpus=8, max_gpus=8))
    assert estimate(never, NOBODY, facts).jobs["b"].unknown == "it can never start as it is"
    late = estimate(a_round(remaining={"a": 4e9, "b": 4.0})[0], NOBODY, facts).jobs
    assert late["a"].unknown == "its end is more than 3.0 days away, and no further is estimated"
    clock = iter(range(10**6))
    slow = estimate(a_round(remaining={"a": 4e9, "b": 4.0})[0], NOBODY, facts, most_s=0.0, clock=lambda: next(clock))
    assert slow.jobs["a"].unknown == "this many jobs take too long to estimate"


@pytest.mark.parametrize("policy", ["fifo", "slurm-backfill", "las", "sia"])
def test_when_a_new_job_starts(policy):
    """a works for 10 minutes on 4 GPUs. Two of the 6 GPUs are free, and the earlier jobs needed 2 or 4, for 10 s each."""
    a = job("a", phase=Phase.RUNNING, min_gpus=4, max_gpus=4, preemptible=False, allocation=on("t4", t4_00=4))
    state = snapshot("t4:1x4,t4:1x2", [a], remaining={"a": 2400.0})
    decider, choice = make_policy(policy)
    record = RoundRecord(state, choice, decider.decide(state))
    earlier = [
        PastJob(job(f"p{at}", min_gpus=size, max_gpus=size, submit_s=at - 90_000.0), 10.0 * size, at - 89_990.0)
        for at in range(30)
        for size in (2, 4)
    ]
    new = estimate(record, Past(earlier, 1000.0), facts).new
    assert list(new) == [2, 4]
    assert new[2].high_s < 60, "at once"
    assert 300 < new[4].low_s < 600 < new[4].high_s < 1200, "when a has ended"
    assert estimate(record, NOBODY, facts).new == {}, "nothing is known of the site's jobs"


def test_a_job_that_cannot_save_does_its_work_again(monkeypatch):
    """a works for 100 s, 400 GPU-seconds of 2,400, and is stopped. What it has left then: 2,000, or all of it."""
    monkeypatch.setattr(futures, "OFF", 0.0)
    for saves, left in ((True, 2000.0), (False, 2400.0)):
        record, _ = a_round(remaining={"a": 2400.0, "b": 1200.0})
        known = replace(record.snapshot.facts["a"], saves=saves)
        each = futures._present(record.snapshot.jobs[0], known, NOBODY, np.random.default_rng(0))
        each.leave(1100.0)
        assert each.left == left
        assert each.facts.remaining_work == left
        assert each.facts.attained_gpu_s == {"t4": 400.0}
