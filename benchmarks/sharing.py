"""Sharing GPUs as Gandiva does, in simulation with Gavel's table of pairs: `python benchmarks/sharing.py TABLE`, and --help.

TABLE is `simulation_throughputs.json` of stanford-futuredata/gavel (docs/developer/data.md), packed with gzip or not. Three
parts:

- `slices`: six jobs on four GPUs in time slices, and the share of each.
- `lists`: random lists of jobs, 3 for each GPU, by kind of sharing: average JCT, makespan, time to the first slice's end, and
  the number of lists with a lower average JCT than Gavel's random pairs. `random, few` pairs no more jobs than necessary;
  `learned before` keeps introspection's knowledge from list to list; `with table` knows all pairs from the start.
- `trials`: packs tried, how many of them do not pay, and how many of these were undone after one window.

The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

from replays.gpu_pool import (
    Alone,
    Introspection,
    Outcome,
    Pool,
    PoolJob,
    PoolSettings,
    RandomPairs,
    Sharing,
)

from penstock_profiles.colocation import Colocation, read_table
from penstock_scheduler.model import JobId
from penstock_scheduler.simulator.cluster_sharing import gpus_of, utilisation

GPU_TYPES = ("v100", "p100", "k80")
GPUS, JOBS_PER_GPU = 16, 3
WORK_S = (1200.0, 7200.0)
"""Shortest and longest running time of a job alone."""
ARRIVE_WITHIN_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="TABLE", type=Path)
    parser.add_argument("--lists", type=int, default=20, help="random lists of jobs per GPU type")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="standard deviation of a measured share, as a part of it"
    )
    options = parser.parse_args()
    started = time.monotonic()
    truth = read_table(options.table)
    kinds = {gpu_type: [kind for kind in truth.kinds(gpu_type) if gpus_of(kind) == 1] for gpu_type in GPU_TYPES}
    result: dict[str, Any] = {"slices": six_on_four(), "lists": {}, "noise": options.noise, "trials": {}}
    print(f"six jobs on four GPUs: {result['slices']}")
    for gpu_type in GPU_TYPES:
        rows, trials = compare(truth, gpu_type, kinds[gpu_type], options.lists, options.noise)
        result["lists"][gpu_type], result["trials"][gpu_type] = rows, trials
        print(f"\n{gpu_type}, {options.lists} lists of {GPUS * JOBS_PER_GPU} jobs on {GPUS} GPUs")
        print(f"{'sharing':>14} {'JCT h':>7} {'sd':>5} {'makespan h':>11} {'first slice min':>16} {'better in':>10}")
        for name, row in rows.items():
            print(
                f"{name:>14} {row['avg_jct_h']:7.3f} {row['sd_jct_h']:5.2f} {row['makespan_h']:11.3f} "
                f"{row['first_slice_min']:16.2f} {row['better_than_gavel']:10d}"
            )
        print(f"packs tried by introspection: {trials}")
    result |= {"python": platform.python_version(), "machine": platform.machine()}
    result["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(result))


def six_on_four() -> dict[str, float]:
    """Smallest and largest share of the time in which one of six equal jobs progressed, and the total loss."""
    settings = PoolSettings(gpus=4, switch_s=0.1)
    hours = 10
    jobs = [PoolJob(JobId(f"j{index}"), "any", 1e9) for index in range(6)]
    pool = Pool(jobs, Colocation(), Alone(slices=True), settings)
    pool.run(until_s=hours * 3600)
    parts = [progress_s / (hours * 3600) for progress_s in pool.progress_s().values()]
    return {"least": min(parts), "most": max(parts), "lost": 1 - sum(parts) / 4}


def compare(
    truth: Colocation, gpu_type: str, kinds: list[str], lists: int, noise: float
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Rows by kind of sharing on the same lists, and the results of introspection's packs."""
    settings = PoolSettings(gpus=GPUS, gpu_type=gpu_type, noise=noise)
    used = {kind: utilisation(truth, [gpu_type], kind) or 1.0 for kind in kinds}
    figures: dict[str, list[tuple[float, float, float]]] = {}
    trials = {"packs": 0, "not_paying": 0, "undone_after_one_window": 0, "paying_undone_at_once": 0}
    learned = Colocation()
    for seed in range(lists):
        jobs = _jobs(random.Random(seed), kinds)
        ways: dict[str, Sharing] = {
            "exclusive": Alone(slices=False),
            "slices": Alone(slices=True),
            "random (Gavel)": RandomPairs(random.Random(seed)),
            "random, few": RandomPairs(random.Random(seed), only_excess=True),
            "introspection": Introspection(Colocation(), gpu_type, used),
            "learned before": Introspection(learned, gpu_type, used),
            "with table": Introspection(Colocation.load(truth.dump(), "the table"), gpu_type, used),
        }
        for name, way in ways.items():
            outcome = Pool(jobs, truth, way, settings, seed).run()
            figures.setdefault(name, []).append(_figures(jobs, outcome))
            if name == "introspection":
                for trial in outcome.trials:
                    once = trial.undone and trial.windows == 1
                    trials["packs"] += 1
                    trials["not_paying"] += trial.total <= 1
                    trials["undone_after_one_window"] += trial.total <= 1 and once
                    trials["paying_undone_at_once"] += trial.total > 1 and once
    rows = {
        name: {
            "avg_jct_h": statistics.fmean(each[0] for each in all_) / 3600,
            "sd_jct_h": statistics.pstdev(each[0] for each in all_) / 3600,
            "makespan_h": statistics.fmean(each[1] for each in all_) / 3600,
            "first_slice_min": statistics.fmean(each[2] for each in all_) / 60,
            "better_than_gavel": sum(
                mine[0] < gavel[0] for mine, gavel in zip(all_, figures["random (Gavel)"], strict=True)
            ),
        }
        for name, all_ in figures.items()
    }
    return rows, trials


def _figures(jobs: list[PoolJob], outcome: Outcome) -> tuple[float, float, float]:
    """Average JCT, makespan, average time from arrival to the end of the first slice, seconds."""
    return (
        statistics.fmean(outcome.ended_s[job.id] - job.arrival_s for job in jobs),
        max(outcome.ended_s.values()),
        statistics.fmean(outcome.first_slice_s[job.id] - job.arrival_s for job in jobs),
    )


def _jobs(source: random.Random, kinds: list[str]) -> list[PoolJob]:
    return [
        PoolJob(JobId(f"j{index}"), source.choice(kinds), source.uniform(*WORK_S), source.uniform(0.0, ARRIVE_WITHIN_S))
        for index in range(GPUS * JOBS_PER_GPU)
    ]


if __name__ == "__main__":
    main()
