"""Finish-time fairness as Sia's artifact has it: `python benchmarks/fairness.py WINDOW.csv --profiles DIR`, and --help.

rho = completion time / sum over types g of P(g) x the time alone. P(g) is the share of all GPUs that are of type g. Alone is a
simulation of the same application under the same policy, the only job of a cluster of GPUs of type g, as many as all GPUs
divided by the mean number of jobs that were there with it, as a whole number. So learning on the way, and its restarts, count
for both. `penstock simulate` divides by the time alone by the truth and with one start, which is stricter.

A few hundred small simulations: minutes. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import prepare, simulate
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, read_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("window", type=Path)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--cluster", default="t4:6x4,rtx:3x8,a100:2x8")
    parser.add_argument("--policy", default="sia:artifact")
    options = parser.parse_args()
    tables = Profiles(options.profiles)
    scenario = prepare(nodes_from_spec(options.cluster), read_workload(options.window), tables)
    rows = job_rows(simulate(scenario, options.policy))
    alone: dict[tuple[str | None, int | None, str, int], float] = {}

    def alone_s(job: WorkloadJob, gpu_type: str, gpus: int) -> float:
        key = (job.model, job.batch_size, gpu_type, gpus)
        if key not in alone:
            whole, rest = divmod(gpus, scenario.node_gpus[gpu_type])
            parts = [f"{gpu_type}:{whole}x{scenario.node_gpus[gpu_type]}"] * (whole > 0)
            parts += [f"{gpu_type}:1x{rest}"] * (rest > 0)
            only = Workload("alone", (replace(job, submit_s=0.0),))
            ended = simulate(prepare(nodes_from_spec(",".join(parts)), only, tables), options.policy).jobs[0].finish_s
            alone[key] = math.inf if ended is None else ended
        return alone[key]

    rhos = []
    for job, row in zip(scenario.workload.jobs, rows, strict=True):
        assert row.jct_s is not None, f"job {job.id} has not ended"
        assert row.contention is not None, "it took some time"
        gpus = max(round(scenario.total_gpus / row.contention), 1)
        shares = scenario.gpus_by_type.items()
        fair_s = sum(count * alone_s(job, gpu_type, gpus) for gpu_type, count in shares) / scenario.total_gpus
        rhos.append(row.jct_s / fair_s)
    figures = {"worst": max(rhos), "unfair_share": float(np.mean(np.array(rhos) > 1)), "simulations": len(alone)}
    print(json.dumps(figures | {f"p{part}": float(np.percentile(rhos, part)) for part in (50, 95)}))


if __name__ == "__main__":
    main()
