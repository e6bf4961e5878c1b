"""Simulates whole windows of jobs: `python benchmarks/windows.py WORKLOADS_DIR --profiles DIR`; see --help.

Simulates every WORKLOADS_DIR/**/*.csv under every policy on one cluster, in this one process, checks that all jobs ended and
that no more GPUs were held than there are, and prints a row for each. The last line is a JSON object:
window -> policy -> figures. `cpu_s` is CPU time of the simulation, without reading files. One trial: it is deterministic.
Set OMP_NUM_THREADS=1 for figures of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path

from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import Simulation, driving_of, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import read_workload

FIGURES = (
    "avg_jct_h",
    "p50_jct_h",
    "p99_jct_h",
    "makespan_h",
    "gpu_h_per_job",
    "restarts_per_job",
    "worst_ftf",
    "unfair_share",
    "cpu_s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="WORKLOADS_DIR", type=Path)
    parser.add_argument("--profiles", type=Path, required=True, help="measured tables of the windows' models")
    parser.add_argument("--policies", default="sia,sia:artifact,gavel")
    parser.add_argument("--cluster", default="t4:6x4,rtx:3x8,a100:2x8")
    parser.add_argument("--unprofiled", action="store_true", help="nothing is known of a job's speed before it runs")
    parser.add_argument("--measure-gpu-s", type=float, help="sia's setting of this name, for jobs that are unprofiled")
    parser.add_argument("--move-share", type=float, help="as the setting [safety] move_share; absent: no bound")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    files = sorted(options.folder.rglob("*.csv"))
    if not files:
        parser.error(f"{options.folder} has no .csv files")
    policies = options.policies.split(",")
    settings = {} if options.measure_gpu_s is None else {"measure_gpu_s": options.measure_gpu_s}
    for name in policies:
        make_policy(name, settings)
    nodes, tables = nodes_from_spec(options.cluster), Profiles(options.profiles)
    if not options.json:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "scipy", "highspy")]
        print(
            f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {', '.join(versions)}"
        )
        print(f"{'window':<28}{'policy':<14}" + "".join(f"{name:>17}" for name in FIGURES))
    figures: dict[str, dict[str, dict[str, float | None]]] = {}
    for file in files:
        window = str(file.relative_to(options.folder).with_suffix(""))
        scenario = prepare(nodes, read_workload(file), tables)
        scenario.check()
        for name in policies:
            driving = driving_of(name)
            if options.unprofiled:
                driving = dataclasses.replace(driving, learner="unprofiled")
            driving = dataclasses.replace(driving, move_share=options.move_share)
            simulation = simulate_policy(scenario, name, settings, driving)
            if simulation.interrupted:
                raise SystemExit(130)
            check(simulation)
            summary = summarise(simulation, job_rows(simulation))
            mine = {figure: getattr(summary, figure) for figure in FIGURES}
            figures.setdefault(window, {})[name] = mine
            if not options.json:
                row = "".join(f"{value:>17.3f}" if value is not None else f"{'-':>17}" for value in mine.values())
                print(f"{window:<28}{name:<14}{row}", flush=True)
    print(json.dumps(figures))


def check(simulation: Simulation) -> None:
    """Check that all jobs ended and that no more GPUs were held than exist."""
    left = [job.id for job in simulation.jobs if job.finish_s is None]
    assert not left, f"{simulation.policy} left {len(left)} jobs, such as {left[0]}"
    total = simulation.scenario.total_gpus
    assert all(tick.gpus_held <= total for tick in simulation.ticks)


if __name__ == "__main__":
    main()
