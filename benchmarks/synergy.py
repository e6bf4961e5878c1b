"""Synergy's replay traces: `python benchmarks/synergy.py DATA_DIR [--json]`; see --help.

DATA_DIR holds `dynamic_100job.csv`, `static_100job_fifo.csv` and `sensitivity_profiles.json` of the authors' repository
(docs/developer/data.md). Three parts, a row each:

- `replay`: 4 servers of 8 GPUs, 24 CPUs, 500 GB, in leases of 300 s, as in the authors' simulator, with the published figures.
- `rounds`: the number of rounds with OPT >= TUNE >= proportional, and the mean distance of TUNE from OPT.
- `simulate`: the same traces on Penstock's own round loop and simulated cluster, where a restart costs 30 s, by policy and stage.

The last line is a JSON object. `--scale` instead times TUNE for 10,000 jobs on 2,000 nodes on one core, best of 5.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from replays.synergy_leases import read_models, read_trace, replay, servers

from penstock_profiles.sensitivity import SensitivityProfile
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.rounds.policies.tuning import (
    PAPER,
    REFERENCE,
    Claim,
    TuneSettings,
    ask,
    optimum,
    relative_speed,
    tune,
)
from penstock_scheduler.rounds.solver import Limits
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.run import prepare, simulate_policy
from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob, rigid_spec

TRACES = {"dynamic": ("dynamic_100job.csv", False), "static": ("static_100job_fifo.csv", True)}

PUBLISHED: dict[tuple[str, str, str], dict[str, float]] = {
    ("dynamic", "srtf", "proportional"): {"avg_jct_h": 3.9067, "p99_jct_h": 14.19},
    ("dynamic", "srtf", "greedy"): {"avg_jct_h": 3.2326, "p99_jct_h": 11.58},
    ("dynamic", "srtf", "tune:reference"): {"avg_jct_h": 3.1884, "p99_jct_h": 10.27},
    ("dynamic", "srtf", "opt-points"): {"avg_jct_h": 3.0926, "p99_jct_h": 10.26},
    ("dynamic", "fifo", "proportional"): {"avg_jct_h": 4.6226, "p99_jct_h": 12.43},
    ("dynamic", "fifo", "greedy"): {"avg_jct_h": 3.8817, "p99_jct_h": 10.41},
    ("dynamic", "fifo", "tune:reference"): {"avg_jct_h": 3.6751, "p99_jct_h": 9.58},
    ("dynamic", "las", "proportional"): {"avg_jct_h": 4.5551, "p99_jct_h": 12.02},
    ("dynamic", "las", "greedy"): {"avg_jct_h": 4.0534, "p99_jct_h": 10.88},
    ("dynamic", "las", "tune:reference"): {"avg_jct_h": 3.6701, "p99_jct_h": 10.04},
    ("dynamic", "ftf", "proportional"): {"avg_jct_h": 6.2967, "p99_jct_h": 9.86},
    ("dynamic", "ftf", "greedy"): {"avg_jct_h": 6.4117, "p99_jct_h": 10.23},
    ("dynamic", "ftf", "tune:reference"): {"avg_jct_h": 4.9301, "p99_jct_h": 8.90},
    ("static", "fifo", "proportional"): {"makespan_h": 15.25, "avg_jct_h": 5.6311},
    ("static", "fifo", "greedy"): {"makespan_h": 12.33, "avg_jct_h": 5.4944},
    ("static", "fifo", "tune:reference"): {"makespan_h": 11.00, "avg_jct_h": 5.0828},
    ("static", "fifo", "opt-points"): {"makespan_h": 10.58, "avg_jct_h": 4.6619},
}
"""Results of the authors' simulator on these traces (msr-fiddle/synergy @1bb2bed, configs/deployment.ini)."""

RULES = {"tune:reference": REFERENCE, "tune:paper": PAPER, "tune": {}}
"""Settings of synergy-tune. The last is the default: as in the paper, and spare CPUs and memory are shared out."""

ORDERS = (("dynamic", "srtf"), ("dynamic", "fifo"), ("dynamic", "las"), ("dynamic", "ftf"), ("static", "fifo"))
MECHANISMS = ("proportional", "greedy", "tune:reference", "tune:paper", "tune", "opt-points", "opt")
STAGES = ("proportional", "synergy-tune", "synergy-opt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DATA_DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--replays-only", action="store_true", help="leave out the part on Penstock's own loop")
    parser.add_argument("--scale", action="store_true", help="only time TUNE for 10,000 jobs on 2,000 nodes")
    options = parser.parse_args()

    def show(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "scipy", "mip")]
    show(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {', '.join(versions)}")
    models = read_models(options.folder / "sensitivity_profiles.json")
    if options.scale:
        figures: dict[str, Any] = {"scale": scale(models)}
        show(f"TUNE, 10,000 jobs on 2,000 nodes: {figures['scale']}")
    else:
        figures = {"replay": replays(options.folder, models, show), "rounds": rounds(options.folder, models, show)}
        if not options.replays_only:
            figures["simulate"] = simulations(options.folder, models, show)
    print(json.dumps(figures))


def replays(folder: Path, models: Any, show: Any) -> list[dict[str, Any]]:
    show(
        f"\n{'trace':<9}{'order':<6}{'shares':<16}{'avg JCT h':>10}{'p99':>8}{'makespan':>10}{'seconds':>9}  published"
    )
    rows = []
    for trace, order in ORDERS:
        name, static = TRACES[trace]
        for shares in MECHANISMS:
            begun = time.perf_counter()
            mechanism = "tune" if shares in RULES else shares
            settings = TuneSettings(**RULES.get(shares, {}))
            done = replay(read_trace(folder / name, models), servers(4), order, mechanism, settings, static=static)  # type: ignore[arg-type]
            jct_h = np.array(done.jct_h)
            row = {
                "trace": trace,
                "order": order,
                "shares": shares,
                "avg_jct_h": round(float(jct_h.mean()), 4),
                "p99_jct_h": round(float(np.percentile(jct_h, 99)), 2),
                "makespan_h": round(done.makespan_h, 2),
                "slower_than_proportional": done.slower,
                "seconds": round(time.perf_counter() - begun, 2),
                "published": PUBLISHED.get((trace, order, shares)),
            }
            rows.append(row)
            published = ", ".join(f"{key} {value}" for key, value in (row["published"] or {}).items())
            show(
                f"{trace:<9}{order:<6}{shares:<16}{row['avg_jct_h']:>10.4f}{row['p99_jct_h']:>8.2f}"
                f"{row['makespan_h']:>10.2f}{row['seconds']:>9.2f}  {published}"
            )
    return rows


def rounds(folder: Path, models: Any, show: Any) -> list[dict[str, Any]]:
    show(f"\n{'trace':<9}{'order':<6}{'rules':<16}{'rounds':>7}{'in order':>9}{'TUNE/OPT':>10}{'worst':>8}")
    rows = []
    for trace, order in (("dynamic", "srtf"), ("static", "fifo")):
        name, static = TRACES[trace]
        for rules, settings in RULES.items():
            jobs = read_trace(folder / name, models)
            done = replay(jobs, servers(4), order, "tune", TuneSettings(**settings), static=static, compare=True)  # type: ignore[arg-type]
            in_order = sum(
                each["opt"] >= each["tune"] - 1e-6 >= each["proportional"] - 2e-6 for each in done.objectives
            )
            parts = [each["tune"] / each["opt"] for each in done.objectives]
            row = {
                "trace": trace,
                "order": order,
                "rules": rules,
                "rounds": done.rounds,
                "in_order": in_order,
                "tune_over_opt": round(sum(parts) / len(parts), 4),
                "worst": round(min(parts), 4),
            }
            rows.append(row)
            show(
                f"{trace:<9}{order:<6}{rules:<16}{row['rounds']:>7}{in_order:>9}{row['tune_over_opt']:>10.4f}{row['worst']:>8.4f}"
            )
    return rows


def simulations(folder: Path, models: Any, show: Any) -> list[dict[str, Any]]:
    show(f"\n{'trace':<9}{'policy':<32}{'avg JCT h':>10}{'makespan':>10}{'restarts':>10}{'seconds':>9}")
    profiles = {model: SensitivityProfile(model, (models[model, 1].table,)) for model, gpus in models if gpus == 1}
    rows = []
    for trace, (name, static) in TRACES.items():
        lines = [line.split(",") for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        jobs = tuple(
            WorkloadJob(
                number,
                0.0 if static else float(arrival),
                int(gpus),
                rigid_spec(int(gpus)),
                duration_s=int(iterations) * models[model, 1].iteration_s,
                sensitivity=model,
            )
            for number, model, arrival, iterations, gpus in lines
        )
        scenario = prepare(nodes_from_spec("v100:4x8:24c:500g"), Workload(trace, jobs), sensitivities=profiles)
        for policy in ("fifo",) if static else ("srtf", "las", "ftf", "fifo"):
            rows += [_simulated(scenario, trace, PolicyChoice(name=policy, stages=(stage,)), show) for stage in STAGES]
        rows += [_simulated(scenario, trace, PolicyChoice(name="sia", stages=(stage,)), show) for stage in STAGES]
    return rows


def _simulated(scenario: Any, trace: str, policy: PolicyChoice, show: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    done = simulate_policy(scenario, policy)
    figures = summarise(done, job_rows(done, None))
    row = {
        "trace": trace,
        "policy": str(policy),
        "avg_jct_h": round(figures.avg_jct_h, 4),
        "makespan_h": round(figures.makespan_h, 2),
        "restarts_per_job": round(figures.restarts_per_job, 2),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    show(
        f"{trace:<9}{policy!s:<32}{row['avg_jct_h']:>10.4f}{row['makespan_h']:>10.2f}{row['restarts_per_job']:>10.2f}{row['seconds']:>9.1f}"
    )
    return row


def scale(models: Any) -> dict[str, float]:
    """Seconds of TUNE for 10,000 jobs. Checks that the plan places all jobs, gives none less than its part, and is near OPT."""
    rooms = servers(2000)
    rng = random.Random(1)
    kinds = [kind for kind in models if kind[1] in (1, 2, 4) and (kind[0], 4) in models]
    everywhere = tuple(range(len(rooms)))
    claims = []
    for number in range(10_000):
        model = rng.choice(sorted({kind[0] for kind in kinds}))
        gpus = rng.choices((1, 2, 4), (0.8, 0.15, 0.05))[0]
        claims.append(Claim(str(number), gpus, models[model, gpus].table, everywhere))
    cpu_s = []
    for _ in range(5):
        begun = time.process_time()
        grants = tune(claims, rooms, TuneSettings())
        cpu_s.append(time.process_time() - begun)
    assert grants is not None
    assert len(grants) == len(claims)
    value = 0.0
    for claim in claims:
        grant = grants[claim.job]
        speed = relative_speed(claim.table, claim.gpus, rooms[grant.node], grant.amount)
        assert speed >= 1 - 1e-9
        value += speed
    best, _ = optimum(claims, rooms, Limits(seconds=30))
    asked = [ask(claim, rooms[0]) for claim in claims]
    return {
        "best_cpu_s": round(min(cpu_s), 3),
        "longest_cpu_s": round(max(cpu_s), 3),
        "gpus": sum(claim.gpus for claim in claims),
        "cpus_asked": sum(amount.cpus for amount in asked),
        "objective": round(value, 1),
        "objective_opt": round(best.report.objective, 1),
        "opt_seconds": round(best.report.seconds, 2),
    }


if __name__ == "__main__":
    main()
