"""Reproduces Starburst's results: `python benchmarks/starburst.py DATA_DIR --golden FILE`; see --help.

Replays every row of a golden file and prints the reference's cost, Penstock's cost and the worst deviation of any figure. If
DATA_DIR has the outcome of each job, it also prints how many jobs run elsewhere or start at another time. Then it prints how
much compute-wait saves compared with no-wait on each set, both with the reference's rule for jobs that pass others and with
Penstock's. `--philly FILE` times compute-wait on the trace of 82,247 jobs with 64 nodes of 8 GPUs (the reference: 150 to 310
s). The last line is a JSON object. One trial: it is deterministic.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import Any

from replays.starburst import Outcomes, RigidJob, SiteSpec, figures, replay
from replays.starburst_golden import GoldenRow, golden_jobs, golden_outcomes, golden_rows

from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from penstock_scheduler.simulator.workloads import read_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DATA_DIR", type=Path)
    parser.add_argument(
        "--golden", metavar="FILE", type=Path, help="a golden file; a name without a folder is searched in DATA_DIR"
    )
    parser.add_argument("--philly", metavar="FILE", type=Path, help="the trace, such as philly_82k_jobs.csv.gz")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    if options.golden is None and options.philly is None:
        parser.error("nothing to do: give --golden or --philly")
    say = (lambda text: None) if options.json else print
    say(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    document: dict[str, object] = {}
    if options.golden is not None:
        file = options.golden if options.golden.is_file() else options.folder / options.golden
        document |= golden(options.folder, golden_rows(file), say)
    if options.philly is not None:
        document["philly"] = philly(options.philly, say)
    print(json.dumps(document))


def golden(folder: Path, rows: list[GoldenRow], say) -> dict[str, object]:  # type: ignore[no-untyped-def]
    say(
        f"{'jobs':<20}{'policy':<34}{'reference':>12}{'ours':>12}{'worst':>10}  {'of':<20}{'other jobs':>10}{'cpu s':>8}"
    )
    done: dict[str, dict[str, object]] = {}
    for row in rows:
        jobs, known = golden_jobs(folder, row.jobs), golden_outcomes(folder, row.jobs)
        begun = time.process_time()
        outcomes = replay(jobs, row.policy, row.site)
        cpu_s = time.process_time() - begun
        found = figures(outcomes, row.warmup_jobs)
        worst, of = row.worst(found)
        elsewhere = others(outcomes, known[row.name]) if known and row.name in known else None
        done[f"{row.jobs}/{row.name}"] = {
            "cost_gpu_h": found.total_cloud_cost,
            "avg_jct_h": found.avg_jct,
            "worst": worst,
            "of": of,
            "other_outcomes": elsewhere,
            "cpu_s": cpu_s,
        }
        say(
            f"{row.jobs:<20}{row.name:<34}{row.stats['total_cloud_cost']:>12.4f}{found.total_cloud_cost:>12.4f}"
            f"{worst:>10.1e}  {of:<20}{'-' if elsewhere is None else elsewhere:>10}{cpu_s:>8.2f}"
        )
    worst_of_all = max(float(row["worst"]) for row in done.values())  # type: ignore[arg-type]
    other = sum(int(row["other_outcomes"] or 0) for row in done.values())  # type: ignore[call-overload]
    say(f"worst deviation of {len(done)} rows: {worst_of_all:.1e}; jobs with another outcome: {other}")
    return {"rows": done, "worst": worst_of_all, "other_outcomes": other, "savings": savings(folder, rows, say)}


def savings(folder: Path, rows: list[GoldenRow], say) -> dict[str, dict[str, float]]:  # type: ignore[no-untyped-def]
    """Set and way to pass others -> shares of no-wait's cost saved and of its JCT added by compute-wait."""
    ways: dict[str, dict[str, Any]] = {
        "out of order": {"out_of_order": True, "easy": False},
        "EASY": {"out_of_order": False, "easy": True},
        "EASY, shortest first": {"out_of_order": False, "easy": True, "order": "sjf", "corrected": True},
    }
    found: dict[str, dict[str, float]] = {}
    waits = {row.jobs: row for row in rows if row.policy.kind is Wait.COMPUTE and row.name.endswith("OO_P25")}
    none = {row.jobs: row.stats for row in rows if row.name.startswith("no_wait")}
    for name, row in waits.items():
        if name not in none:
            continue
        for way, changed in ways.items():
            outcomes = replay(golden_jobs(folder, name), row.policy, dataclasses.replace(row.site, **changed))
            mine = figures(outcomes, row.warmup_jobs)
            saved = 1 - mine.total_cloud_cost / none[name]["total_cloud_cost"]
            longer = mine.avg_jct / none[name]["avg_jct"] - 1
            found[f"{name}, {way}"] = {"saved": saved, "longer": longer}
            say(f"{name}: compute-wait, {way}: {saved:.1%} less than no-wait, for {longer:.1%} longer completion")
    return found


def others(outcomes: Outcomes, known: list) -> int:  # type: ignore[type-arg]
    """Jobs that run elsewhere than in the reference (cloud, node, GPU), or start at another time."""
    mine = zip(outcomes.cloud, outcomes.start_h, outcomes.allocation, strict=True)
    return sum(
        theirs.cloud != cloud or theirs.start_h != start_h or (not cloud and theirs.allocation != on)
        for (cloud, start_h, on), theirs in zip(mine, known, strict=True)
    )


def philly(file: Path, say) -> dict[str, float]:  # type: ignore[no-untyped-def]
    trace = read_workload(file)
    first_s = trace.jobs[0].submit_s
    jobs = [
        RigidJob((job.submit_s - first_s) / 3600, job.duration_s / 3600, job.gpus)
        for job in trace.jobs
        if job.duration_s is not None
    ]
    figures_of: dict[str, float] = {}
    for name, policy, out_of_order in (
        ("no-wait", WaitingPolicy(Wait.NONE), False),
        ("constant 1 h", WaitingPolicy(Wait.CONSTANT, 1.0), False),
        ("compute-wait", WaitingPolicy(Wait.COMPUTE, 0.076), True),
        ("star-wait", WaitingPolicy(Wait.STAR, 0.77, None, 0.25, 3), True),
    ):
        begun = time.process_time()
        site = SiteSpec(64, out_of_order=out_of_order, max_queue=30 if out_of_order else None)
        found = figures(replay(jobs, policy, site), 5000)
        cpu_s = time.process_time() - begun
        say(
            f"Philly, {len(jobs)} jobs, 64x8 GPUs, {name}: {found.total_cloud_cost:,.0f} GPU-h, average JCT "
            f"{found.avg_jct:.4f} h, utilisation {found.cluster_utilization:.3f}, {cpu_s:.1f} s CPU"
        )
        figures_of |= {
            f"{name} cost_gpu_h": found.total_cloud_cost,
            f"{name} avg_jct_h": found.avg_jct,
            f"{name} cpu_s": cpu_s,
        }
    return figures_of


if __name__ == "__main__":
    main()
