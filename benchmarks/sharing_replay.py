"""Gandiva on 100 GPUs, by the round loop on the simulated cluster: `python benchmarks/sharing_replay.py TABLE`, and --help.

TABLE is `simulation_throughputs.json` of stanford-futuredata/gavel (docs/developer/data.md), compressed with gzip or not: how
much pairs of jobs of 1, 2 and 4 GPUs slow each other down. The agents measure it, and no policy knows it from the start. Nodes
have 4 GPUs.

Jobs: 70 % of 1 GPU, 15 % of 2, 15 % of 4; kinds at random from the table; durations lognormal, from 5 minutes to `--longest`
hours; arrivals at random within `--hours`. Slurm's backfill plans with time limits: the durations rounded up to whole hours. All
policies see the same lists. Utilisation covers the time in which jobs arrive: used GPU-seconds, each job's weighted by its
utilisation alone, divided by all GPU-seconds.

The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

from penstock_profiles.colocation import Colocation, read_table
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.simulator import nodes_from_spec
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind, SimulatedAgents
from penstock_scheduler.simulator.cluster_sharing import gpus_of, utilisation
from penstock_scheduler.simulator.run import Driving, Simulation, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec

SIZES, WEIGHTS = (1, 2, 4), (0.7, 0.15, 0.15)
POLICIES: dict[str, tuple[PolicyChoice | str, dict[str, object]]] = {
    "fifo, exclusive": ("fifo", {}),
    "gandiva, reactive": ("gandiva", {"mode": "reactive"}),
    "gandiva": ("gandiva", {}),
    "fifo+gandiva-share": (PolicyChoice(name="fifo", stages=("gandiva-share",)), {}),
    "EASY": ("fifo", {"backfill": "easy"}),
    "EASY+gandiva-share": (
        PolicyChoice(name="fifo", stages=("gandiva-share",), settings={"fifo": {"backfill": "easy"}}),
        {},
    ),
    "slurm-backfill": ("slurm-backfill", {}),
    "sia+gandiva-share": (PolicyChoice(name="sia", stages=("gandiva-share",)), {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="TABLE", type=Path)
    parser.add_argument("--gpu-type", default="p100", help="GPU type of the table; the paper's cluster had P100s")
    parser.add_argument("--nodes", type=int, default=25, help="of 4 GPUs")
    parser.add_argument("--jobs", type=int, default=750)
    parser.add_argument("--hours", type=float, default=8.0, help="hours in which the jobs arrive")
    parser.add_argument("--mean-h", type=float, default=1.2, help="mean duration before it is cut, hours")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of its logarithm")
    parser.add_argument("--longest", type=float, default=8.0, help="hours")
    parser.add_argument("--switch", type=float, default=1.0, help="seconds that a resumed job loses")
    parser.add_argument(
        "--max-height", type=float, help="setting of gandiva and of its reactive mode; its default if absent"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    options = parser.parse_args()
    started = time.monotonic()
    truth = read_table(options.table)
    used: dict[int, dict[str, float]] = {size: {} for size in SIZES}
    for kind in truth.kinds(options.gpu_type):
        if (gpus := gpus_of(kind)) in SIZES:
            used[gpus][kind] = utilisation(truth, [options.gpu_type], kind) or 1.0
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for seed in range(options.seeds):
        jobs, kinds = workload(random.Random(seed), options, used)
        load = sum(job.gpus * (job.duration_s or 0) for job in jobs) / 3600 / (4 * options.nodes * options.hours)
        print(f"list {seed}: {len(jobs)} jobs, {load:.2f} times what the GPUs can do while they arrive", flush=True)
        for name in options.only:
            rows[name].append(measure(name, jobs, kinds, truth, options))
            print(f"{name:>20} " + " ".join(f"{key} {value:.3f}" for key, value in rows[name][-1].items()), flush=True)
    result: dict[str, Any] = {
        name: {key: statistics.fmean(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }
    result |= {"python": platform.python_version(), "machine": platform.machine(), "gpu_type": options.gpu_type}
    result["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(result))


def measure(
    name: str, jobs: list[WorkloadJob], kinds: dict[str, SharingKind], truth: Colocation, options: argparse.Namespace
) -> dict[str, float]:
    """Average JCT, makespan, time to the first slice's end, and utilisation of the GPUs."""
    policy, settings = POLICIES[name]
    if policy == "gandiva" and options.max_height is not None:
        settings = settings | {"max_height": options.max_height}
    scenario = prepare(nodes_from_spec(f"{options.gpu_type}:{options.nodes}x4"), Workload("replay", tuple(jobs)))
    agents = SimulatedAgents(kinds, Colocation.load(truth.dump(), "the table"), AgentSettings(switch_s=options.switch))
    done: list[float] = []
    until_s = options.hours * 3600

    def observe(simulation: Simulation) -> None:
        if simulation.ticks[-1].time_s >= until_s and not done:
            done.extend(kinds[job.id].utilisation * job.progress for job in simulation.jobs)

    begun = time.process_time()
    simulation = simulate_policy(scenario, policy, settings, Driving(as_requested=True), observe, agents=agents)
    assert simulation.failed_rounds == 0, "every plan can be carried out"
    finish_s = {job.id: job.finish_s for job in simulation.jobs}
    assert None not in finish_s.values(), "all jobs end"
    bad = [trial for trial in agents.trials if trial.total <= 1]
    return {
        "jct_h": statistics.fmean((job.finish_s or 0) - job.submit_s for job in simulation.jobs) / 3600,
        "makespan_h": simulation.end_s / 3600,
        "first_min": statistics.fmean(agents.first_slice_s[job.id] - job.submit_s for job in simulation.jobs) / 60,
        "utilisation": sum(done) / (4 * options.nodes * until_s),
        "restarts": sum(job.restarts for job in simulation.jobs),
        "packs": len(agents.trials),
        "not_paying": len(bad),
        "undone_at_once": sum(trial.slices <= 1 for trial in bad),
        "rounds": simulation.rounds,
        "cpu_s": time.process_time() - begun,
    }


def workload(
    source: random.Random, options: argparse.Namespace, used: dict[int, dict[str, float]]
) -> tuple[list[WorkloadJob], dict[str, SharingKind]]:
    """A list of jobs, and the kind of each, for the table of pairs."""
    jobs, kinds = [], {}
    for number in range(options.jobs):
        (gpus,) = source.choices(SIZES, WEIGHTS)
        hours = options.mean_h * math.exp(source.gauss(-(options.sigma**2) / 2, options.sigma))
        seconds = min(max(hours * 3600, 300.0), options.longest * 3600)
        arrival_s = source.uniform(0.0, options.hours * 3600)
        kind = source.choice(sorted(used[gpus]))
        limit_s = math.ceil(seconds / 3600 + 0.1) * 3600.0
        spec = rigid_spec(gpus)
        jobs.append(WorkloadJob(f"j{number:04d}", arrival_s, gpus, spec, duration_s=seconds, time_limit_s=limit_s))
        kinds[jobs[-1].id] = SharingKind(kind, used[gpus][kind])
    return sorted(jobs, key=lambda job: job.submit_s), kinds


if __name__ == "__main__":
    main()
