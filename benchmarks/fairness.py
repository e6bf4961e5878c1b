"""Finish-time fairness as in Sia's artifact: `python benchmarks/fairness.py WINDOW.csv --profiles DIR`; see --help.

rho = completion time / sum over types g of P(g) x the time alone. P(g) is the share of all GPUs that are of type g. The time
alone comes from a simulation of the same application under the same policy, as the only job of a cluster. That cluster has GPUs
of type g: as many as all GPUs divided by the mean number of concurrent jobs, rounded. So both times include learning and its
restarts. `penstock simulate run` divides by the true time alone with one start, which is stricter.

It runs a few hundred small simulations, which takes minutes. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, read_workload

Key = tuple[str | None, int | None, str, int]
"""Model, batch, GPU type and GPUs: jobs of the same key take the same time alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("window", type=Path)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--cluster", default="t4:6x4,rtx:3x8,a100:2x8")
    parser.add_argument("--policy", default="sia:artifact")
    options = parser.parse_args()
    tables = Profiles(options.profiles)
    scenario = prepare(nodes_from_spec(options.cluster), read_workload(options.window), tables)
    rows = job_rows(simulate_policy(scenario, options.policy))
    needed = []
    for job, row in zip(scenario.workload.jobs, rows, strict=True):
        assert row.jct_s is not None, f"job {job.id} has not ended"
        assert row.contention is not None, "it took some time"
        gpus = max(round(scenario.total_gpus / row.contention), 1)
        needed.append({gpu_type: (job.model, job.batch_size, gpu_type, gpus) for gpu_type in scenario.gpus_by_type})
    jobs = {key: job for job, keys in zip(scenario.workload.jobs, needed, strict=True) for key in keys.values()}
    alone_s: dict[Key, float] = {}
    for key, job in jobs.items():
        _, _, gpu_type, gpus = key
        whole, rest = divmod(gpus, scenario.node_gpus[gpu_type])
        parts = [f"{gpu_type}:{whole}x{scenario.node_gpus[gpu_type]}"] * (whole > 0)
        parts += [f"{gpu_type}:1x{rest}"] * (rest > 0)
        only = Workload("alone", (replace(job, submit_s=0.0),))
        ended_s = (
            simulate_policy(prepare(nodes_from_spec(",".join(parts)), only, tables), options.policy).jobs[0].finish_s
        )
        alone_s[key] = math.inf if ended_s is None else ended_s
        print(f"\r{len(alone_s)} of {len(jobs)} jobs simulated alone", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rhos = []
    for row, keys in zip(rows, needed, strict=True):
        fair_s = sum(scenario.gpus_by_type[gpu_type] * alone_s[key] for gpu_type, key in keys.items())
        rhos.append(row.jct_s / fair_s * scenario.total_gpus)
    figures = {"worst": max(rhos), "unfair_share": float(np.mean(np.array(rhos) > 1)), "simulations": len(jobs)}
    print(json.dumps(figures | {f"p{part}": float(np.percentile(rhos, part)) for part in (50, 95)}))


if __name__ == "__main__":
    main()
