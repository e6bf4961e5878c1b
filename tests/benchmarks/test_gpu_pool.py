"""A pool of GPUs that jobs share: worked by hand, and Gandiva's promises on generated tables."""

from __future__ import annotations

import random

import pytest
from benchmarks.replays.gpu_pool import (
    Alone,
    Introspection,
    Outcome,
    Pool,
    PoolJob,
    PoolSettings,
    RandomPairs,
    Sharing,
)

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import JobId


def _jobs(*kinds: str, work_s: float = 600.0, arrival_s: float = 0.0) -> list[PoolJob]:
    return [PoolJob(JobId(f"j{i}"), kind, work_s, arrival_s) for i, kind in enumerate(kinds)]


def _table(totals: dict[tuple[str, str], float]) -> Colocation:
    """Pairs whose two shares are alike."""
    return Colocation(
        {("v100", a, b): Pair(share=total / 2) for one in totals.items() for (a, b), total in _both(*one)}
    )


def _both(pair: tuple[str, str], total: float) -> list[tuple[tuple[str, str], float]]:
    return [(pair, total), (pair[::-1], total)]


def _introspection(**used: float) -> Introspection:
    return Introspection(Colocation(), "v100", used)


def test_six_jobs_on_four_gpus_get_four_sixths_and_lose_less_than_a_fiftieth():
    jobs = _jobs("a", "a", "a", "a", "a", "a", work_s=1e9)
    pool = Pool(jobs, Colocation(), Alone(slices=True), PoolSettings(gpus=4, switch_s=0.1))
    pool.run(until_s=36000)
    parts = [progress_s / 36000 for progress_s in pool.progress_s().values()]
    assert parts == pytest.approx([4 / 6] * 6, rel=0.02)
    assert sum(parts) > 0.98 * 4


def test_exclusive_jobs_wait_and_time_slices_begin_soon():
    """Two jobs of 600 s on one GPU: one after the other, or in time slices of 60 s, where the second ends at 1,200 s too."""
    settings = PoolSettings(gpus=1, switch_s=0.0)
    exclusive = Pool(_jobs("a", "a"), Colocation(), Alone(slices=False), settings).run()
    assert exclusive.ended_s == {"j0": 600.0, "j1": 1200.0}
    assert exclusive.first_slice_s == {"j0": 60.0, "j1": 660.0}
    slices = Pool(_jobs("a", "a"), Colocation(), Alone(slices=True), settings).run()
    assert slices.first_slice_s == {"j0": 60.0, "j1": 120.0}
    assert sorted(slices.ended_s.values()) == [1140.0, 1200.0]


def test_who_resumes_pays_for_it():
    """A job alone on a GPU resumes once, at its start: it ends 5 s later."""
    outcome = Pool(_jobs("a"), Colocation(), Alone(slices=True), PoolSettings(gpus=1, switch_s=5.0)).run()
    assert outcome.ended_s == {"j0": 605.0}
    assert outcome.resumes == 1


def test_a_pack_that_pays_stays_and_both_end_sooner():
    """Each runs a window alone (120 s in all), then both at 0.8: 540 s of work left take 675 s."""
    outcome = Pool(
        _jobs("a", "b"), _table({("a", "b"): 1.6}), _introspection(a=0.3, b=0.3), PoolSettings(gpus=1, switch_s=0.0)
    ).run()
    assert outcome.ended_s == pytest.approx({"j0": 795.0, "j1": 795.0})
    assert [(trial.windows, trial.undone) for trial in outcome.trials] == [(12, False)]


def test_a_pack_that_does_not_fit_costs_one_window():
    """Nobody gets on for 60 s, and never again: 1,260 s for the two jobs of 600 s."""
    outcome = Pool(
        _jobs("a", "b"), Colocation(), _introspection(a=0.3, b=0.3), PoolSettings(gpus=1, switch_s=0.0)
    ).run()
    assert max(outcome.ended_s.values()) == pytest.approx(1260.0)
    assert [(trial.total, trial.windows, trial.undone) for trial in outcome.trials] == [(0.0, 1, True)]


def _mixed(sharing: Sharing, seed: int, noise: float = 0.0) -> tuple[Outcome, float]:
    """24 jobs of 8 kinds on 8 GPUs; a pair's total is drawn from 0.5 to 1.9. Also their average JCT, seconds."""
    source = random.Random(seed)
    kinds = "abcdefgh"
    totals = {(a, b): source.uniform(0.5, 1.9) for a in kinds for b in kinds if a <= b}
    jobs = [
        PoolJob(JobId(f"j{i}"), source.choice(kinds), source.uniform(1200, 7200), source.uniform(0, 1800))
        for i in range(24)
    ]
    outcome = Pool(jobs, _table(totals), sharing, PoolSettings(gpus=8, noise=noise), seed).run()
    assert set(outcome.ended_s) == {job.id for job in jobs}
    return outcome, sum(outcome.ended_s[job.id] - job.arrival_s for job in jobs) / len(jobs)


@pytest.mark.parametrize("seed", range(5))
def test_every_pack_that_does_not_pay_is_undone_after_one_window_and_no_other_is(seed: int):
    outcome, _ = _mixed(_introspection(**dict.fromkeys("abcdefgh", 0.6)), seed)
    bad = [trial for trial in outcome.trials if trial.total <= 1]
    assert bad, "the lists have such pairs"
    assert all(trial.windows == 1 for trial in bad)
    assert len({tuple(sorted(trial.kinds)) for trial in bad}) >= len(bad) / 4, (
        "it learns, and does not try them forever"
    )


def test_introspection_beats_random_pairs_on_the_same_lists():
    mine = [_mixed(_introspection(**dict.fromkeys("abcdefgh", 0.6)), seed)[1] for seed in range(5)]
    random_pairs = [_mixed(RandomPairs(random.Random(seed)), seed)[1] for seed in range(5)]
    assert sum(mine) < sum(random_pairs)


def test_random_pairs_few_pair_no_more_than_must_be():
    """Three jobs on two GPUs, all of which get on together: Gavel's leaves one GPU idle half of the time, or a job out."""
    jobs, table = _jobs("a", "a", "a", work_s=6000.0), _table({("a", "a"): 1.8})
    few = Pool(jobs, table, RandomPairs(random.Random(0), only_excess=True), PoolSettings(gpus=2)).run()
    assert len(few.trials) >= 1
    assert max(few.ended_s.values()) < 7000


def test_same_seed_same_outcome_also_with_noise():
    outcomes = [_mixed(_introspection(**dict.fromkeys("abcdefgh", 0.6)), 3, noise=0.05) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
