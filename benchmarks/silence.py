"""What the rules for silent jobs cost honest ones: `python benchmarks/silence.py WORKLOADS_DIR --profiles DIR`; see --help.

Simulates every WORKLOADS_DIR/**/*.csv under `sia`. No job reports anything to the scheduler, although each chooses its batch size
by what it measures itself. Either nothing is known of a job, or its job spec has a table of its true speed in its first epoch,
or names its family of the catalogue.
Each is run with claims as they are, and as they count (`claims`). One trial: it is deterministic.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator
from penstock_scheduler.jobs.claims import SILENT_POWER, as_silent, bounded_table, usual_ratio_of
from penstock_scheduler.model import Job, JobFacts, JobId, Promise
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.metrics import job_rows, summarise
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import Scenario, driving_of, prepare, simulate_policy
from penstock_scheduler.simulator.truth import ModelledJob
from penstock_scheduler.simulator.workloads import read_workload

Told = Literal["nothing", "table", "family"]

RULES: dict[str, tuple[Told, bool]] = {
    f"{name}, {rule}": (told, checked)
    for name, told in (("nothing known", "nothing"), ("true table", "table"), ("true family", "family"))
    for rule, checked in (("as it is", False), ("as it counts", True))
}
"""Name -> what job specs tell, and whether claims are checked."""

FAMILIES = {"cifar10": "resnet18-cifar10", "imagenet": "resnet50-imagenet", "bert": "bert-squad"}
"""Model of a window -> its family, where the names differ."""


class Silence:
    """The `ModelSource` of a site whose jobs report nothing."""

    def __init__(self, scenario: Scenario, *, told: Told, checked: bool) -> None:
        self.scenario, self.told, self.checked = scenario, told, checked
        self.jobs = {job.id: job for job in scenario.workload.jobs}
        self.types = sorted(scenario.node_gpus)
        self.speeds = scenario.site_families.speeds(self.types)
        self.most: dict[JobId, int] = {}
        self.ratio = usual_ratio_of(scenario.site_families, self.types)
        self.known: dict[tuple[JobId, bool], AnyEstimator] = {}
        self.silent: dict[JobId, AnyEstimator] = {}

    def facts(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> dict[JobId, JobFacts]:
        """See `ports.ModelSource`."""
        found = {}
        for job in jobs:
            held = 0 if job.allocation is None else job.allocation.gpus
            most = self.most[job.id] = max(held, self.most.get(job.id, 0))
            key, truth = (job.id, most > 0), self.scenario.truth.of(self.jobs[job.id])
            assert isinstance(truth, ModelledJob), "the windows tell each job's model"
            if key not in self.known:
                self.known[key] = self.model(job, truth, SILENT_POWER if self.checked and most else 1.0)
            grows_by_and_by = self.told == "nothing" or (self.told == "table" and self.checked)
            said = None
            if self.told == "family" and self.checked and most:
                silent = self.silent.setdefault(job.id, as_silent(self.known[key], self.ratio))
                said = Promise(0.0, 0.0, most, {}, silent)
            found[job.id] = JobFacts(
                self.known[key],
                truth.model.restart_cost_s,
                most if grows_by_and_by else None,
                tuple(self.types) if self.told == "nothing" else (),
                promise=said,
            )
        return found

    def model(self, job: Job, truth: ModelledJob, power: float) -> AnyEstimator:
        """What counts of a job's speed at first."""
        if self.told == "nothing":
            return LinearEstimator(self.speeds, power)
        if self.told == "family":
            name = self.jobs[job.id].model
            assert name is not None, "the windows tell each job's model"
            return self.scenario.site_families[FAMILIES.get(name, name)].estimator()
        table: dict[str, dict[int, float]] = {}
        for name in self.types:
            node = self.scenario.node_gpus[name]
            for gpus in (2**n for n in range(7) if 2**n <= node or 2**n % node == 0):
                shape = (gpus,) if gpus <= node else (node,) * (gpus // node)
                if (rate := float(truth.best_rates(name, shape)[0])) > 0:
                    table.setdefault(name, {})[gpus] = rate
        if self.checked:
            table = bounded_table(table, self.ratio, power)
        return TableEstimator(table)


def main() -> None:
    """Print a row for each window and rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="WORKLOADS_DIR", type=Path)
    parser.add_argument("--profiles", type=Path, required=True, help="measured tables of the windows' models")
    parser.add_argument("--cluster", default="t4:6x4,rtx:3x8,a100:2x8")
    options = parser.parse_args()
    nodes, tables = nodes_from_spec(options.cluster), Profiles(options.profiles)
    print(f"{'window':<24}{'rule':<30}{'avg_jct_h':>10}{'p99_jct_h':>10}{'restarts':>10}")
    for file in sorted(options.folder.rglob("*.csv")):
        scenario = prepare(nodes, read_workload(file), tables)
        for rule, (told, checked) in RULES.items():
            models = Silence(scenario, told=told, checked=checked)
            driving = dataclasses.replace(driving_of("sia"), learner="unprofiled")
            simulation = simulate_policy(scenario, "sia", driving=driving, models=models)
            assert all(job.finish_s is not None for job in simulation.jobs), "all jobs end"
            found = summarise(simulation, job_rows(simulation))
            figures = f"{found.avg_jct_h:>10.3f}{found.p99_jct_h:>10.2f}{found.restarts_per_job:>10.2f}"
            print(f"{file.stem:<24}{rule:<30}{figures}", flush=True)


if __name__ == "__main__":
    main()
