"""Adding up the GPU time of a job whose processes come and go."""

from __future__ import annotations

import os
import time

import pytest

from penstock_slurm.agent.gpu_time import Meter, ProcessorTimes
from penstock_slurm.agent.processes import Processes


def test_the_gpu_that_a_job_used_most_counts_and_a_new_process_counts_whole():
    """Process 1 uses 1 s of GPU a and 2 s of GPU b; process 2, which is new, 0.5 s of a. Then process 1 has ended."""
    meter = Meter()
    assert meter.used_s({("a", 1): 5.0, ("b", 1): 5.0}) == 0.0, "what it used before the first look is unknown"
    assert meter.used_s({("a", 1): 6.0, ("b", 1): 7.0, ("a", 2): 0.5}) == pytest.approx(2.0)
    assert meter.used_s({("a", 2): 0.75}) == pytest.approx(0.25)
    assert meter.used_s({}) == 0.0


def test_where_gpus_are_emulated_processor_time_counts():
    times, meter, pid = ProcessorTimes(Processes("n1")), Meter(), os.getpid()
    meter.used_s(times([pid]) or {})
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    assert meter.used_s(times([pid, 2**22 + 1]) or {}) == pytest.approx(0.2, abs=0.1)
