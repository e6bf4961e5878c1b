"""A site with a cloud behind it: worked by hand, and properties of the replay."""

import pytest
from benchmarks.replays.starburst import RigidJob, SiteSpec, figures, replay
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_scheduler.model.waiting import Ask, Wait, WaitingPolicy
from penstock_scheduler.people.errors import ConfigError


def test_one_node_of_four_by_hand():
    """A holds all 4 GPUs for 2 h. B (1 h, 4 GPUs) may wait 0.25 x 4 = 1 h from 0.5 on: to the cloud at 1.5, for 4 GPU-hours. C (4
    GPUs, 4 h) may wait 4 h from 0.5 on, and begins at 2. With C's JCT of 5.5 h, the average is (2 + 2 + 5.5) / 3."""
    jobs = [RigidJob(0, 2, 4), RigidJob(0.5, 1, 4), RigidJob(0.5, 4, 4)]
    outcomes = replay(jobs, WaitingPolicy(Wait.COMPUTE, 0.25), SiteSpec(1, 4, out_of_order=True))
    assert outcomes.start_h == [0, 1.5, 2]
    assert outcomes.cloud == [False, True, False]
    found = figures(outcomes)
    assert found.total_cloud_cost == 4
    assert found.avg_jct == pytest.approx(9.5 / 3)


def test_a_wait_that_ends_as_capacity_frees_ends_in_the_cloud():
    """The reference's order: ends of waits come before placement."""
    jobs = [RigidJob(0, 1, 4), RigidJob(0, 1, 4)]
    assert replay(jobs, WaitingPolicy(Wait.CONSTANT, 1.0), SiteSpec(1, 4)).cloud == [False, True]
    assert replay(jobs, WaitingPolicy(Wait.CONSTANT, 1.01), SiteSpec(1, 4)).cloud == [False, False]


def test_the_newest_leaves_when_the_queue_is_full():
    jobs = [RigidJob(0, 1, 4), RigidJob(0.1, 1, 4), RigidJob(0.2, 1, 4)]
    outcomes = replay(jobs, WaitingPolicy(Wait.CONSTANT, 9.0), SiteSpec(1, 4, max_queue=1))
    assert outcomes.cloud == [False, False, True]
    assert outcomes.start_h[2] == 0.2


def test_what_a_run_that_was_taken_back_costs():
    """A blocks the site for 10 h. B (1 GPU, 2 h) runs in the cloud for T_max = 0.5 h, comes back, waits 1 h at most, and goes
    to the cloud for good: 2 GPU-hours in the paper, 2.5 in truth, 2 with checkpoints of half an hour: it has 1.5 h left."""
    jobs = [RigidJob(0, 10, 4), RigidJob(1, 2, 1)]
    policy = WaitingPolicy(Wait.STAR, 1.0, t_max_h=0.5, patience=1.0)
    costs = [
        figures(replay(jobs, policy, SiteSpec(1, 4, corrected=corrected, checkpoint_h=every_h))).total_cloud_cost
        for corrected, every_h in ((False, None), (True, None), (True, 0.5))
    ]
    assert costs == pytest.approx([2.0, 2.5, 2.0])


def test_data_makes_the_cloud_slower_and_more_expensive():
    jobs = [RigidJob(0, 10, 4), RigidJob(1, 2, 3)]
    found = figures(replay(jobs, WaitingPolicy(Wait.NONE), SiteSpec(1, 4, gravity_h=0.5)))
    assert found.total_cloud_cost == pytest.approx(3 * 2.5)
    assert found.avg_jct == pytest.approx((10 + 2.5) / 2)


def test_jobs_out_of_order_are_refused():
    with pytest.raises(ConfigError, match="sort them"):
        replay([RigidJob(1, 1, 1), RigidJob(0, 1, 1)], WaitingPolicy(Wait.NONE), SiteSpec(1))


@st.composite
def traces(draw):
    gaps = draw(st.lists(st.floats(0, 0.5), min_size=1, max_size=40))
    at, jobs = 0.0, []
    for gap in gaps:
        at += gap
        jobs.append(RigidJob(at, draw(st.floats(0.01, 3)), draw(st.sampled_from([0, 1, 2, 4, 8, 12]))))
    return jobs


@settings(max_examples=60)
@given(
    traces(),
    st.sampled_from(list(Wait)),
    st.floats(0, 1),
    st.sampled_from([(False, False), (True, False), (False, True)]),
    st.booleans(),
)
def test_whatever_the_policy(jobs, kind, factor, passing, corrected):
    """No GPU twice; all jobs end; no job on site waits longer than allowed; CPU-only jobs leave at once; the queue is bounded."""
    policy = WaitingPolicy(kind, factor)
    out_of_order, easy = passing
    spec = SiteSpec(2, 8, out_of_order=out_of_order, easy=easy, corrected=corrected, max_queue=5)
    outcomes = replay(jobs, policy, spec)
    held = []
    for job, start_h, cloud, on, ran_h, returned in zip(
        jobs, outcomes.start_h, outcomes.cloud, outcomes.allocation, outcomes.ran_h, outcomes.returned, strict=True
    ):
        assert start_h >= job.arrival_h - 1e-9
        wait_h = policy.wait_h(Ask(job.gpus, job.runtime_h), returned=returned)
        if wait_h is None:
            assert cloud
            continue
        most_h = wait_h + (policy.t_max_h if returned else 0.0)
        assert start_h - job.arrival_h <= most_h + 1e-9
        if not cloud:
            assert sum(map(len, on.values())) == job.gpus
            held += [(start_h, start_h + ran_h, (node, gpu)) for node, gpus in on.items() for gpu in gpus]
    for begin_h, _, gpu in held:
        same = [other for other in held if other[2] == gpu and other[0] <= begin_h < other[1] - 1e-9]
        assert len(same) <= 1
