"""Who gains when only some users change their scripts: `python benchmarks/adoption.py WORKLOADS_DIR --profiles DIR`; see --help.

In each window a share of the jobs, drawn by the window's name, is elastic; the others are rigid, as the trace has them, and are
never stopped. The window runs under `sia`, which knows nothing of a job's speed beforehand, and under `slurm-backfill`, where
all jobs are rigid. For each class of jobs: its mean completion time and 99th percentile under `sia`, over the same jobs' under
backfill. With `--draws`, the arrivals of each window are drawn so often, and the last table has the standard error of the mean
over all runs. With `--memory`, jobs learn from those of their kind that have ended in the window, as with penstockd's
`recall_models`; the memory is empty at first. A run is deterministic. The last line is a JSON list of the rows.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.learning import SimulatedMemory
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import Driving, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import read_workload
from penstock_scheduler.simulator.workloads.workload import Workload

WINDOWS = "philly/workload-1,philly/workload-2,philly/workload-3,philly/workload-4,saturn/workload-1,saturn/workload-2"
SHARES = "0,0.25,0.5,1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="WORKLOADS_DIR", type=Path)
    parser.add_argument("--profiles", type=Path, required=True, help="measured tables of the windows' models")
    parser.add_argument("--windows", default=WINDOWS)
    parser.add_argument("--cluster", default="t4:6x4,rtx:3x8,a100:2x8")
    parser.add_argument("--shares", default=SHARES, help="shares of the jobs that are elastic")
    parser.add_argument("--draws", type=int, default=1, help="how often each window's arrivals are drawn")
    parser.add_argument("--memory", action="store_true", help="jobs learn from ended ones of their kind")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    tables, found = Profiles(options.profiles), list[Row]()
    shares = [float(share) for share in options.shares.split(",")]
    for window, seed in product(options.windows.split(","), range(options.draws)):
        whole = read_workload(options.folder / f"{window}.csv")
        order = np.random.default_rng([ord(letter) for letter in window]).permutation(len(whole.jobs))
        how = Runs(options.cluster, tables, seed, options.memory)
        before_s = how.completion_s(whole, set(), "slurm-backfill")
        for share in shares:
            elastic = {whole.jobs[n].id for n in order[: round(share * len(whole.jobs))].tolist()}
            after_s = how.completion_s(whole, elastic, "sia")
            for name, ids in (("elastic", elastic), ("rigid", before_s.keys() - elastic)):
                if ids:
                    times = (np.array([each[job] for job in ids]) for each in (before_s, after_s))
                    found.append(Row.of(f"{window} {seed}", share, name, *times))
                    if not options.json:
                        print(found[-1], flush=True)
    if not options.json:
        for share, name in product(shares, ("elastic", "rigid")):
            if of := [each for each in found if (each.share, each.name) == (share, name)]:
                means = map(geometric_mean, zip(*(each[3:] for each in of), strict=True))
                error = np.std([each.mean for each in of], ddof=1) / len(of) ** 0.5 if len(of) > 1 else float("nan")
                print(f"{Row('all runs', share, name, *means)}; standard error of the mean {error:.3f}")
    print(json.dumps(found))


class Row(NamedTuple):
    """A class of jobs in a window."""

    window: str
    share: float
    """Share of the window's jobs that are elastic."""
    name: str
    mean_h: float
    mean: float
    """Mean completion time over that under backfill."""
    p99: float
    """The same of the 99th percentile."""

    @classmethod
    def of(
        cls, window: str, share: float, name: str, before_s: NDArray[np.float64], after_s: NDArray[np.float64]
    ) -> Row:
        p99 = float(np.quantile(after_s, 0.99) / np.quantile(before_s, 0.99))
        return cls(window, share, name, float(after_s.mean()) / 3600, float(after_s.mean() / before_s.mean()), p99)

    def __str__(self) -> str:
        return (
            f"{self.window:<20} {self.share:4.0%} elastic: {self.name:<8} mean {self.mean_h:5.2f} h, {self.mean:4.2f} of "
            f"backfill; p99 {self.p99:4.2f}"
        )


class Runs(NamedTuple):
    """How the jobs of a window are run."""

    cluster: str
    tables: Profiles
    seed: int
    """0: the jobs arrive as the window says."""
    memory: bool

    def completion_s(self, whole: Workload, elastic: set[str], policy: str) -> dict[str, float]:
        """Job -> from submission to end, s, where only these jobs are elastic and the others are never stopped."""
        jobs = tuple(
            job if job.id in elastic else replace(job, spec=job.as_requested.model_copy(update={"preemptible": False}))
            for job in whole.jobs
        )
        scenario = prepare(nodes_from_spec(self.cluster), replace(whole, jobs=jobs), self.tables, seed=self.seed)
        scenario.check()
        learns = policy == "sia"
        simulation = simulate_policy(
            scenario,
            policy,
            {},
            Driving(learner="unprofiled") if learns else None,
            memory=SimulatedMemory() if learns and self.memory else None,
        )
        return {job.id: job.finish_s - job.submit_s for job in simulation.jobs if job.finish_s is not None}


if __name__ == "__main__":
    main()
