"""Adding up the GPU time of a job whose processes come and go."""

from __future__ import annotations

import pytest

from penstock_slurm.agent.gpu_time import Meter


def test_the_gpu_that_a_job_used_most_counts_and_a_new_process_counts_whole():
    """Process 1 uses 1 s of GPU a and 2 s of GPU b; process 2, which is new, 0.5 s of a. Then process 1 has ended."""
    meter = Meter()
    assert meter.used_s({("a", 1): 5.0, ("b", 1): 5.0}) == 0.0, "what it used before the first look is unknown"
    assert meter.used_s({("a", 1): 6.0, ("b", 1): 7.0, ("a", 2): 0.5}) == pytest.approx(2.0)
    assert meter.used_s({("a", 2): 0.75}) == pytest.approx(0.25)
    assert meter.used_s({}) == 0.0
