"""CPU slots: nodes without GPUs, for jobs that name them. No policy gives one to a job that needs a GPU."""

from __future__ import annotations

import pytest

from penstock_scheduler.rounds.policies import make_policy
from tests.scheduler.builders import job, snapshot, table

RATES = {"cpu": {1: 9.0, 2: 18.0}, "t4": {1: 1.0, 2: 2.0}}
"""A CPU slot would be the fastest for both jobs."""


@pytest.mark.parametrize("excluded", [None, ("a100",)])
@pytest.mark.parametrize("name", ["sia", "fifo", "srtf", "las", "pollux", "gavel", "slurm-backfill", "gandiva"])
def test_a_cpu_slot_is_for_jobs_that_name_it(name: str, excluded: tuple[str, ...] | None) -> None:
    """One T4 and four CPU slots: of two jobs that need a GPU one waits, beside free CPU slots."""
    jobs = [
        job("1", max_gpus=1, gpu_types=("cpu",)),
        job("2", max_gpus=1, excluded_gpu_types=excluded),
        job("3", max_gpus=1, excluded_gpu_types=excluded),
    ]
    state = snapshot("cpu:1x4,t4:1x1", jobs, {each.id: table(**RATES) for each in jobs})
    policy, _ = make_policy(name)
    plan = policy.decide(state)
    given = {each: assignment.placement.gpu_type for each, assignment in plan.assignments.items()}
    assert given.pop("1") == "cpu"
    assert list(given.values()) == ["t4"]
    assert len(plan.waiting) == 1
