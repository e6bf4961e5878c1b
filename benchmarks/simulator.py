"""The cost of a simulation: `python benchmarks/simulator.py DATA_DIR [--cases window,newtrace,philly] [--json]`.

DATA_DIR holds `sia/workloads`, `sia/profiles` and `philly` (docs/developer/data.md). Each case runs in a process of its
own, for its own peak memory: CPU seconds of reading, simulating and all figures; one trial. A case that takes longer than
`--limit` CPU seconds is stopped, as by Ctrl-C, says how many jobs had ended, and counts as a miss. The last line is a JSON
object: case -> figures. Set OMP_NUM_THREADS=1 for figures of one core. Targets are those of docs/admin/simulator.md; exit
status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import resource
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import Simulation, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import read_workload

MEMORY_MB = 1024


@dataclass(frozen=True)
class Case:
    workload: str
    cluster: str
    policy: str
    target_s: float


CASES = {
    "window": Case("sia/workloads/philly/workload-2.csv", "t4:6x4,rtx:3x8,a100:2x8", "sia", 8),
    "newtrace": Case("sia/workloads/newtrace/workload-1.csv", "t4:6x4,rtx:3x8,a100:2x8", "sia", 40),
    "philly": Case("philly/philly_82k_jobs.csv.gz", "v100:64x8", "fifo", 20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DATA_DIR", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--limit", type=float, default=120.0, help="CPU seconds after which a case is stopped")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"no case {min(unknown)}; there are {', '.join(CASES)}")
    if not options.json:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "scipy", "highspy")]
        print(
            f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {', '.join(versions)}"
        )
    figures = {}
    for name in options.cases.split(","):
        with get_context("spawn").Pool(1) as pool:
            figures[name] = pool.apply(measured, (options.folder, CASES[name], options.limit))
        if not options.json:
            told = ", ".join(f"{key} {value:.6g}" for key, value in figures[name].items())
            print(f"{name:<10}target {CASES[name].target_s:g} s: {told}", flush=True)
    print(json.dumps(figures))
    met = [
        mine["ended"] == mine["jobs"] and mine["cpu_s"] <= CASES[name].target_s and mine["peak_mb"] <= MEMORY_MB
        for name, mine in figures.items()
    ]
    raise SystemExit(0 if all(met) else 1)


def measured(folder: Path, case: Case, limit_s: float) -> dict[str, float]:
    begun_s = time.process_time()
    workload = read_workload(folder / case.workload)
    tables = Profiles(folder / "sia" / "profiles") if case.policy == "sia" else None
    scenario = prepare(nodes_from_spec(case.cluster), workload, tables)
    scenario.check()

    def stop(simulation: Simulation) -> None:
        if time.process_time() - begun_s > limit_s:
            raise KeyboardInterrupt

    simulation = simulate_policy(scenario, case.policy, on_tick=stop)
    summary = summarise(simulation, job_rows(simulation))
    return {
        "jobs": summary.jobs,
        "ended": summary.ended,
        "rounds": summary.rounds,
        "cpu_s": time.process_time() - begun_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
