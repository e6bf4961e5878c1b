"""The longer a job waits for its minimum, the more its wait weighs; and what a job that is never moved starts on."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Phase, Snapshot
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.sia import costs
from penstock_scheduler.rounds.policies.sia.costs import aging
from tests.scheduler.builders import job, on, snapshot, table, with_facts

PERFECT = table(t4={1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})


def tried(waited_s: float, holders: int = 1) -> Snapshot:
    """Tried: a job with at least 8 GPUs waits, while jobs of 1 to 4 GPUs hold half of the nodes or more, for a day."""
    now_s = 100_000.0
    held = [
        job(f"small-{i}", phase=Phase.RUNNING, max_gpus=4, allocation=on("t4", **{f"t4_0{i // (4 // size)}": size}))
        for size in [4 if holders <= 2 else 1]
        for i in range(holders)
    ]
    big = job("big", submit_s=now_s - waited_s, min_gpus=8, max_gpus=8)
    attained = {each.id: {"t4": now_s * (each.allocation.gpus if each.allocation else 0)} for each in held}
    models = dict.fromkeys(["big", *attained], PERFECT)
    return snapshot("t4:2x4", [*held, big], models, time_s=now_s, attained=attained)


def starts(state: Snapshot, **settings: object) -> bool:
    return "big" in make_policy("sia", settings)[0].decide(state).assignments


@pytest.mark.parametrize("holders", [1, 2, 8])
def test_a_job_waits_at_most_three_times_aging_s_for_gpus_of_jobs_that_have_not_waited(
    holders: int, monkeypatch: pytest.MonkeyPatch
):
    assert starts(tried(3 * 3600.0, holders))
    assert not starts(tried(3600.0, holders)), "until then its wait adds nothing"
    assert not starts(tried(80_000.0, holders), aging_s=None)
    assert starts(tried(3 * 60.0, holders), aging_s=60.0), "the bound can be set"
    monkeypatch.setattr(costs, "AGING_MOST", 0.0)
    assert not starts(tried(80_000.0, holders))


def test_the_weight_of_a_wait_is_bounded():
    assert [aging(wait_s, 100.0, 4.0) for wait_s in (-50.0, 0.0, 100.0, 150.0, 500.0, 900.0)] == [0, 0, 0, 0.5, 4, 4]


def test_a_job_that_waited_keeps_its_place_once_it_runs():
    """It waited 3 h and has run for 10 min on its 8 GPUs; the job that it displaced has waited since then."""
    now_s = 100_000.0
    big = job(
        "big",
        phase=Phase.RUNNING,
        submit_s=now_s - 11_400.0,
        min_gpus=8,
        max_gpus=8,
        allocation=on("t4", t4_00=4, t4_01=4),
    )
    attained = {"big": {"t4": 600.0 * 8}, "small": {"t4": (now_s - 600.0) * 4}}
    state = snapshot(
        "t4:2x4",
        [big, job("small", restarts=1, max_gpus=4)],
        {"big": PERFECT, "small": PERFECT},
        time_s=now_s,
        attained=attained,
    )
    assert set(make_policy("sia")[0].decide(state).assignments) == {"big"}


@pytest.mark.parametrize(
    "policy", ["sia", "gavel", "gandiva", "antman", "fifo", "srtf", "las", "ftf", "slurm-backfill"]
)
def test_a_non_preemptible_job_starts_on_the_best_of_its_range(policy: str):
    """Nothing is known about how it scales, and it can never grow later. Pollux lets every job begin on few GPUs."""
    state = with_facts(snapshot("t4:1x4", [job("1", max_gpus=4, preemptible=False)]), largest_run_gpus={"1": 0})
    assert make_policy(policy)[0].decide(state).assignments["1"].placement.gpus == 4
