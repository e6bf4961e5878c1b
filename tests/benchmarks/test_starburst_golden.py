"""Starburst's public results to the last digit."""

import os
from pathlib import Path

import pytest
from benchmarks.replays.starburst import figures, replay
from benchmarks.replays.starburst_golden import golden_jobs, golden_outcomes, golden_rows

DATA = os.environ.get("PENSTOCK_TEST_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="PENSTOCK_TEST_DATA names no folder with Starburst's data (docs/developer/data.md)"
)
FOLDER = Path(DATA or ".") / "starburst"


@needs_data
@pytest.mark.parametrize("file", ["golden.json", "golden_phillygen.json"])
def test_every_row_of_the_reference_comes_out_the_same(file):
    """Cost, all other figures, and for each job where it runs, on which GPUs, and the very bits of when it starts."""
    known, jobs = {}, {}
    for row in golden_rows(FOLDER / file):
        jobs.setdefault(row.jobs, golden_jobs(FOLDER, row.jobs))
        known.setdefault(row.jobs, golden_outcomes(FOLDER, row.jobs))
        outcomes = replay(jobs[row.jobs], row.policy, row.site)
        worst, of = row.worst(figures(outcomes, row.warmup_jobs))
        assert worst < 1e-9, (row.jobs, row.name, of)
        for index, theirs in enumerate((known[row.jobs] or {}).get(row.name, [])):
            assert outcomes.cloud[index] == theirs.cloud, (row.name, index)
            assert outcomes.start_h[index] == theirs.start_h, (row.name, index)
            assert theirs.cloud or outcomes.allocation[index] == theirs.allocation, (row.name, index)


@needs_data
def test_compute_wait_saves_60_percent_for_8_percent_of_jct():
    rows = {row.name: row for row in golden_rows(FOLDER / "golden.json") if row.jobs == "fidelity_s1.1"}
    jobs = golden_jobs(FOLDER, "fidelity_s1.1")
    none, compute = (
        figures(replay(jobs, rows[name].policy, rows[name].site), 5) for name in ("no_wait_15s", "compute_wait_OO_P25")
    )
    assert 1 - compute.total_cloud_cost / none.total_cloud_cost >= 0.60
    assert compute.avg_jct / none.avg_jct <= 1.08
