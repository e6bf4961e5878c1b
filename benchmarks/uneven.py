"""The cost of equal parts on all nodes for a policy with fixed requests: `python benchmarks/uneven.py WORKLOADS_DIR
--profiles DIR`.

With Slurm's GRES, a job has the same number of GPUs on each node, so Penstock places 10 GPUs on nodes of 8 as 5 and 5.
Sia's artifact takes whole nodes first: 8 and 2. This benchmark simulates `gavel` on every WORKLOADS_DIR/**/*.csv with
both placements. Everything else, including the cost of a job's shape, is the same. The last line is a JSON object:
window -> average completion time in hours (`equal`, `uneven`), and the share of uneven placements.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.model import Configuration, Job, JobId, Node, Placement, Share
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.placement import Placed
from penstock_scheduler.rounds.policies import settling
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import prepare, simulate_policy
from penstock_scheduler.simulator.workloads import read_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="WORKLOADS_DIR", type=Path)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--cluster", default="t4:6x4,rtx:3x8,a100:2x8")
    options = parser.parse_args()
    nodes, tables = nodes_from_spec(options.cluster), Profiles(options.profiles)
    figures = {}
    for file in sorted(options.folder.rglob("*.csv")):
        window = str(file.relative_to(options.folder).with_suffix(""))
        scenario = prepare(nodes, read_workload(file), tables)
        mine: dict[str, float | None] = {}
        equal = simulate_policy(scenario, "gavel")
        with (
            patch.object(settling, "place", place_whatever_is_free),
            patch.object(FreeGpus, "on_several_nodes", on_whatever_is_free),
        ):
            uneven = simulate_policy(scenario, "gavel")
        for name, simulation in (("equal", equal), ("uneven", uneven)):
            mine[name] = summarise(simulation, job_rows(simulation)).avg_jct_h
        runs = [run.placement for job in uneven.jobs for run in job.runs]
        mine["uneven_share"] = sum(len({share.gpus for share in where.shares}) > 1 for where in runs) / len(runs)
        figures[window] = mine
        print(window, mine, flush=True)
    print(json.dumps(figures))


def place_whatever_is_free(
    nodes: Sequence[Node],
    wanted: Mapping[JobId, Configuration],
    partitions: Mapping[JobId, tuple[str, ...]],
    current: Mapping[JobId, Placement],
    pinned: Mapping[JobId, Placement],
    **_: Any,
) -> Placed:
    """Replaces `placement.place`: jobs stay if they can; the others, largest first, get whole nodes and then a rest."""
    free = {node.name: node.gpus_for_us for node in nodes}
    placements: dict[JobId, Placement] = {}
    for placement in pinned.values():
        _take(free, placement)
    for job, held in current.items():
        fits = all(free[share.node] >= share.gpus for share in held.shares)
        if fits and (held.gpu_type, held.gpus) == (wanted[job].gpu_type, wanted[job].gpus):
            placements[job] = held
            _take(free, held)
    for job, option in sorted(wanted.items(), key=lambda item: (-item[1].gpus, item[0])):
        names = [node.name for node in nodes if node.gpu_type == option.gpu_type]
        size = max(node.gpus for node in nodes if node.gpu_type == option.gpu_type)
        if job in placements or sum(free[name] for name in names) < option.gpus:
            continue
        left, got = option.gpus, {}
        while left:
            rest = [name for name in names if name not in got]
            whole = [name for name in rest if free[name] == size <= left]
            enough = [name for name in rest if free[name] >= left]
            if whole or not enough:
                name = min(whole or rest, key=lambda name: (-free[name], name))
            else:
                name = min(enough, key=lambda name: (free[name], name))
            got[name] = min(free[name], left)
            left -= got[name]
        shares = tuple(Share(name, gpus) for name, gpus in sorted(got.items()))
        placements[job] = Placement(option.gpu_type, partitions[job][0], shares)
        _take(free, placements[job])
    return Placed(placements)


def on_whatever_is_free(
    free: FreeGpus, job: Job, option: Configuration, candidates: NDArray[np.int64], free_N: NDArray[np.int64]
) -> Placement | None:
    """Instead of `FreeGpus.on_several_nodes`."""
    nodes = [replace(free.nodes[n], gpus_others=free.nodes[n].gpus - int(free_N[n])) for n in candidates.tolist()]
    return place_whatever_is_free(nodes, {job.id: option}, {job.id: job.partitions}, {}, {}).placements.get(job.id)


def _take(free: dict[str, int], placement: Placement) -> None:
    for share in placement.shares:
        free[share.node] -= share.gpus


if __name__ == "__main__":
    main()
