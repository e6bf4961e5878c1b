"""What pictures show, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_scheduler.people.drawing.svg import ticks
from penstock_scheduler.simulator.figures import binned, figures, history
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.page import render
from penstock_scheduler.simulator.results import SeedResult, over_seeds
from penstock_scheduler.simulator.run import simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec
from tests.scheduler.simulator.test_run import scenario


def results(folder, *submit_s: float) -> list[SeedResult]:
    """A job of 20 s after a start of 30 s on all GPUs, and a second one that waits for it; seeds differ in when that comes."""
    found = []
    for seed, at_s in enumerate(submit_s):
        jobs = tuple(WorkloadJob(name, at, 4, rigid_spec(4), duration_s=20.0) for name, at in (("a", 0.0), ("b", at_s)))
        simulation = simulate_policy(scenario(folder, Workload("w", jobs), "t4:1x4"), "fifo")
        rows = job_rows(simulation)
        found.append(SeedResult("fifo", seed, simulation, rows, summarise(simulation, rows)))
    return found


def drawn(found: list[SeedResult]):
    document = over_seeds(found, workload="w", cluster="t4:1x4")
    return figures(found, document), document


def test_bins_hold_the_mean_over_their_time():
    """0 before 1, then 4 until 3, then 2: over [0, 2], [2, 4] and [4, 6] that is 2, 3 and 2."""
    assert binned([(1.0, 4.0), (3.0, 2.0)], np.array([0.0, 2.0, 4.0, 6.0])) == pytest.approx([2, 3, 2])


def test_lines_over_time_by_hand(tmp_path):
    """Both come at 0 and end at 50 and 100: one waits until 50; all GPUs are held until 100 s, which is 1.67 minutes."""
    picture, _ = drawn(results(tmp_path, 0.0))
    times, queue, used, goodput = picture.lines
    half = len(queue.x) // 2
    assert queue.x[-1] == pytest.approx(100 / 60, rel=0.01)
    assert queue.lines[0].mean[: half - 1] == pytest.approx(1)
    assert queue.lines[0].mean[half + 1 :] == pytest.approx(0)
    assert used.lines[0].mean == pytest.approx(100)
    assert used.lines[0].low is None
    assert goodput.lines[0].mean.mean() * 100 / 60 == pytest.approx(2, rel=0.01)  # two whole jobs
    share = times.lines[0].mean
    assert (share[0], share[-1]) == (0, 100)
    assert set(share.tolist()) == {0, 50, 100}


def test_the_history_of_a_job_that_never_ran_is_empty(tmp_path):
    """It asks for more GPUs than there are."""
    jobs = tuple(WorkloadJob(name, 0.0, gpus, rigid_spec(gpus), duration_s=20.0) for name, gpus in (("a", 4), ("b", 8)))
    simulation = simulate_policy(scenario(tmp_path, Workload("w", jobs), "t4:1x4"), "fifo")
    shown = {job.name: job for job in history(simulation.scenario.nodes, simulation.jobs, 100.0, "w").jobs}
    assert (shown["b"].spans, shown["b"].goodput, shown["b"].state) == ((), (), "PENDING")


def test_bands_are_intervals_of_the_mean_over_seeds(tmp_path):
    """The second job comes at 0, 10 and 20 s: it takes 100, 90 and 80 s. Means: 75, 70, 65 s, +- 4.303 x 5 / sqrt 3."""
    picture, document = drawn(results(tmp_path, 0.0, 10.0, 20.0))
    average = next(bars for bars in picture.comparison if bars.label.startswith("Average"))
    assert average.bars[0].mean * 3600 == pytest.approx(70)
    assert average.bars[0].half is not None
    assert average.bars[0].half * 3600 == pytest.approx(4.303 * 5 / 3**0.5, rel=1e-3)
    line = picture.lines[0].lines[0]
    assert line.low is not None
    assert line.high is not None
    assert (line.low <= line.mean).all()
    assert (line.mean <= line.high).all()
    assert line.high.max() <= 100
    assert (line.high > line.low).any()
    page = render(picture, document)
    assert "95 % confidence intervals of the mean over 3 seeds" in page
    assert page.count('class="band"') == len(picture.lines)


def test_ticks_are_round_and_few():
    assert [value for value, _ in ticks(76.4, 5)] == [0, 20, 40, 60]
    for span in (0.003, 1.0, 7.3, 12.0, 99999.0):
        values = [value for value, _ in ticks(span, 12)]
        assert 3 <= len(values) <= 13
        assert values[-1] <= span
