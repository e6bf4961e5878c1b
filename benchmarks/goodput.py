"""How long the goodput of all jobs on all configurations takes: `python benchmarks/goodput.py [--jobs N] [--json]`.

N training jobs (default: 48,000), each with its own parameters on three GPU types, are evaluated on 40 configurations
with 50 batch sizes each: cold, and again when one job in a hundred has a new model. First, a sample of rows is compared
with the plain formulas. The figures are CPU seconds of one thread, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import statistics
import time

import numpy as np

from penstock_profiles.estimators import BATCHES_TRIED, GpuModel, TrainingEstimator
from penstock_profiles.matrix import Configurations, GoodputMatrix
from penstock_profiles.throughput import ThroughputParams, efficiency, throughput

TRIALS = 5
SHAPES = {
    "t4": [(1, 1), (1, 2), (1, 4), *((n, 4 * n) for n in range(2, 17))],
    "rtx": [(1, 1), (1, 2), (1, 4), (1, 8), *((n, 8 * n) for n in range(2, 9))],
    "a100": [(1, 1), (1, 2), (1, 4), (1, 8), *((n, 8 * n) for n in range(2, 9))],
}
CONFIGURATIONS = Configurations(*zip(*((t, n, k) for t, shapes in SHAPES.items() for n, k in shapes), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=48_000)
    parser.add_argument("--json", action="store_true", help="print only the last line")
    options = parser.parse_args()
    if options.jobs < 1:
        raise SystemExit(f"--jobs {options.jobs}: use at least 1 job")
    generator = np.random.default_rng(0)
    jobs = [draw(generator) for _ in range(options.jobs)]
    for job, row in zip(jobs[:50], GoodputMatrix().evaluate(jobs[:50], CONFIGURATIONS), strict=True):
        np.testing.assert_allclose(row, plainly(job), rtol=1e-5)
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cold, warm = [], []
    for _ in range(TRIALS):
        matrix = GoodputMatrix()
        cold.append(cpu_seconds(matrix, jobs))
        changed = list(jobs)
        for row in generator.choice(len(jobs), max(len(jobs) // 100, 1), replace=False):
            changed[row] = dataclasses.replace(jobs[row], grad_var=2 * jobs[row].grad_var)
        warm.append(cpu_seconds(matrix, changed))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {
        "jobs": options.jobs,
        "configurations": len(CONFIGURATIONS.gpus),
        "batches": BATCHES_TRIED,
        "cold_s": round(statistics.median(cold), 4),
        "changed_1_percent_s": round(statistics.median(warm), 4),
        "peak_mb": round(peak_mb),
        "peak_above_jobs_mb": round(peak_mb - before_mb),
    }
    if not options.json:
        print(
            f"{options.jobs} jobs x {len(CONFIGURATIONS.gpus)} configurations x {BATCHES_TRIED} batch sizes, {TRIALS}"
            " trials"
        )
        print(f"  cold                 median {statistics.median(cold):.3f} s, longest {max(cold):.3f} s (target 3)")
        print(f"  1 % of models new    median {statistics.median(warm):.3f} s, longest {max(warm):.3f} s (target 0.1)")
        print(f"  peak memory {peak_mb:.0f} MB, including {before_mb:.0f} MB for Python and the jobs themselves")
        print(
            f"  CPU time of one thread; Python {platform.python_version()}, numpy {np.__version__},"
            f" {platform.machine()}"
        )
    print(json.dumps(result))


def draw(generator: np.random.Generator) -> TrainingEstimator:
    """A job: parameters spread over two orders of magnitude, batches up to 32 times the initial one."""
    initial = int(2 ** generator.integers(3, 9))
    return TrainingEstimator(
        models={
            name: GpuModel(
                ThroughputParams(
                    *10 ** generator.uniform(-3, -1, 6), generator.uniform(1, 8), generator.uniform(-0.5, 0.5)
                ),
                max_atomic_batch=int(2 ** generator.integers(3, 9)),
            )
            for name in SHAPES
        },
        initial_batch=initial,
        max_batch=initial * 32,
        grad_sqr=1.0,
        grad_var=float(10 ** generator.uniform(0, 3)),
    )


def plainly(job: TrainingEstimator) -> list[float]:
    """Goodput of one job on each configuration by the public formulas, one batch at a time."""
    row = []
    for name, N, K in zip(*CONFIGURATIONS, strict=True):
        best, model = 0.0, job.models[name]
        for wanted in np.geomspace(job.initial_batch, job.max_batch, BATCHES_TRIED).round():
            accumulation = np.ceil(wanted / (K * model.max_atomic_batch)) - 1
            atomic = np.ceil(wanted / (K * (accumulation + 1)))
            even = K * atomic * (accumulation + 1)
            total = even if even <= job.max_batch else wanted
            rate = throughput(model.step, N, K, atomic, accumulation) * total / even
            if total >= K:
                best = max(best, float(rate * efficiency(job.grad_sqr, job.grad_var, total, job.initial_batch)))
        row.append(best)
    return row


def cpu_seconds(matrix: GoodputMatrix, jobs: list[TrainingEstimator]) -> float:
    begun = time.process_time()
    matrix.evaluate(jobs, CONFIGURATIONS)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
