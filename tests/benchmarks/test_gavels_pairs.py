"""Gandiva's promises on pairs that were measured: those of Gavel's table (docs/developer/data.md)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from benchmarks.replays.gpu_pool import Introspection, Outcome, Pool, PoolJob, PoolSettings, RandomPairs

from penstock_profiles.colocation import Colocation, read_table
from penstock_scheduler.model import JobId
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind
from penstock_scheduler.simulator.cluster_sharing import gpus_of, utilisation
from tests.scheduler.simulator.test_agents import recorded, run

pytestmark = [
    pytest.mark.skipif(
        "PENSTOCK_TEST_DATA" not in os.environ, reason="needs the public data: see docs/developer/data.md"
    ),
    pytest.mark.parametrize("gpu_type", ["v100", "p100", "k80"]),
]


@pytest.fixture(scope="module")
def truth() -> Colocation:
    return read_table(Path(os.environ["PENSTOCK_TEST_DATA"]) / "gavel" / "simulation_throughputs.json.gz")


def kinds_of(truth: Colocation, gpu_type: str) -> dict[str, float]:
    """Those of one GPU, and the part of it that each uses alone."""
    return {kind: utilisation(truth, [gpu_type], kind) or 1.0 for kind in truth.kinds(gpu_type) if gpus_of(kind) == 1}


def listed(truth: Colocation, gpu_type: str, seed: int) -> list[PoolJob]:
    """24 jobs of the table's kinds, of 20 to 120 minutes, that come within half an hour."""
    source, kinds = random.Random(seed), sorted(kinds_of(truth, gpu_type))
    return [
        PoolJob(JobId(f"j{n:02d}"), source.choice(kinds), source.uniform(1200, 7200), source.uniform(0, 1800))
        for n in range(24)
    ]


def test_six_jobs_on_four_gpus_get_four_sixths_each(truth: Colocation, gpu_type: str) -> None:
    """Of a kind that gains nothing beside itself, which the policy finds out: it tries one pair, for a slice."""
    kind, used = next(
        (kind, used)
        for kind, used in kinds_of(truth, gpu_type).items()
        if 0 < (truth.total(gpu_type, kind, kind) or 0) < 1
    )
    jobs = [recorded(f"j{n}", 36_000.0) for n in range(6)]
    kinds = {job.id: SharingKind(kind, used) for job in jobs}
    simulation, agents = run("gandiva", f"{gpu_type}:1x4", jobs, kinds, truth, AgentSettings(switch_s=0.1))
    assert simulation.failed_rounds == 0
    assert {trial.slices for trial in agents.trials} == {1}
    for job in simulation.jobs:
        assert job.finish_s is not None
        assert 36_000 / job.finish_s == pytest.approx(4 / 6, rel=0.02)


def test_the_policy_undoes_every_pack_that_does_not_pay_after_one_slice(truth: Colocation, gpu_type: str) -> None:
    """On two nodes of four GPUs."""
    listing, used = listed(truth, gpu_type, seed=0), kinds_of(truth, gpu_type)
    jobs = [recorded(job.id, job.work_s, 1, job.arrival_s) for job in listing]
    kinds = {job.id: SharingKind(job.kind, used[job.kind]) for job in listing}
    simulation, agents = run("gandiva", f"{gpu_type}:2x4", jobs, kinds, truth)
    assert simulation.failed_rounds == 0
    assert all(job.finish_s is not None for job in simulation.jobs)
    bad = [trial for trial in agents.trials if trial.total < 1]
    assert bad, "the list has such pairs"
    assert all(trial.slices <= 1 for trial in bad)


def test_introspection_beats_random_pairs_on_the_same_lists(truth: Colocation, gpu_type: str) -> None:
    """Average JCT of five lists on 8 GPUs."""
    mine = theirs = 0.0
    for seed in range(5):
        jobs = listed(truth, gpu_type, seed)
        settings = PoolSettings(gpus=8, gpu_type=gpu_type)
        ours = Pool(jobs, truth, Introspection(Colocation(), gpu_type, kinds_of(truth, gpu_type)), settings).run()
        assert all(trial.windows == 1 for trial in ours.trials if trial.total < 1)
        mine += jct_s(jobs, ours)
        theirs += jct_s(jobs, Pool(jobs, truth, RandomPairs(random.Random(seed)), settings).run())
    assert mine < theirs


def jct_s(jobs: list[PoolJob], outcome: Outcome) -> float:
    return sum(outcome.ended_s[job.id] - job.arrival_s for job in jobs) / len(jobs)
