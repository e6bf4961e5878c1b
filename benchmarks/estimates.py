"""How often ranges of 80 % contain what happens: `python benchmarks/estimates.py TRACE --account NAME --cluster SPEC`.

Simulates a trace under each policy and keeps the round at every `--every` hours. Then it estimates the starts and ends of the
jobs of these rounds from nothing but the round and the jobs submitted before it, as penstockd does, and compares with what the
simulation did later. Widths are learnt from the rounds before, as far as it is known by then what happened. The first half of the
time is for tuning, the second half is held out. Jobs whose end lies after the end of
the simulation count as far as that is known. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock_profiles.families import load_families
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Job, Phase
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.estimates.estimating import JobRanges, Range, Widths, estimate
from penstock_scheduler.simulator.estimates.held import Held
from penstock_scheduler.simulator.estimates.past import Past, PastJob
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import RESTART_COST_S, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, read_workload

HOUR_S = 3600.0


@dataclass
class Score:
    """Ranges, and how many held what happened."""

    ranges: int = 0
    held: int = 0
    early: int = 0
    """What happened before the range."""
    unknown: int = 0
    widths: list[float] | None = None

    def add(self, found: Range | None, after_s: float) -> None:
        """Count a range for what happened `after_s` after the round."""
        if found is None:
            self.unknown += 1
            return
        self.ranges += 1
        self.held += found.holds(after_s)
        self.early += after_s < found.low_s
        self.widths = [*(self.widths or []), (found.high_s + 60) / (found.low_s + 60)]

    def figures(self) -> dict[str, float]:
        """For people and programs."""
        widths = sorted(self.widths or [math.nan])
        return {
            "ranges": self.ranges,
            "held": round(self.held / max(self.ranges, 1), 3),
            "early": round(self.early / max(self.ranges, 1), 3),
            "unknown": self.unknown,
            "median_ratio": round(widths[len(widths) // 2], 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--account", help="only jobs of this account")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--policies", default="slurm-backfill,las,fifo")
    parser.add_argument("--from-day", type=float, default=0.0)
    parser.add_argument("--days", type=float, default=28.0)
    parser.add_argument("--every", type=float, default=12.0, help="hours from one round that is estimated to the next")
    parser.add_argument("--halves", default="tuning,held-out")
    parser.add_argument(
        "--width", type=float, help="a fixed factor on the widths of ranges, in place of what is learnt"
    )
    parser.add_argument("--at-most", type=int, default=10**6, help="jobs in the workload")
    options = parser.parse_args()
    workload = read_workload(options.trace)
    if options.account:
        workload = replace(workload, jobs=tuple(job for job in workload.jobs if job.account == options.account))
    workload = workload.window(options.from_day * 86_400, options.days * 86_400)
    workload = replace(workload, jobs=workload.jobs[: options.at_most])
    print(f"{len(workload.jobs)} jobs in {options.days:g} days", flush=True)
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for policy in options.policies.split(","):
        figures[policy] = run(workload, policy, options)
    print(json.dumps(figures))


def run(workload: Workload, policy: str, options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Simulate one policy, estimate, and compare."""
    tables = None if options.profiles is None else Profiles(options.profiles)
    scenario = prepare(nodes_from_spec(options.cluster), workload, tables)
    scenario.check()
    records: list[RoundRecord] = []
    every_s = options.every * HOUR_S

    def keep(record: RoundRecord) -> None:
        if record.snapshot.jobs and record.snapshot.time_s >= (len(moments) + 1) * every_s:
            moments.append(record.snapshot.time_s)
            while record.snapshot.time_s >= (len(moments) + 1) * every_s:
                moments.append(math.nan)
            records.append(record)

    moments: list[float] = []
    begun_s = time.process_time()
    simulation = simulate_policy(scenario, policy, on_record=keep)
    sim_s = time.process_time() - begun_s
    span_s = workload.span_s
    scores = {half: {"start": Score(), "end": Score()} for half in ("tuning", "held-out")}
    jobs = {job.id: job for job in simulation.jobs}
    spent: list[float] = []
    specs = SpecModels(load_families(), RESTART_COST_S)
    types = {node.gpu_type for node in scenario.nodes}
    held = Held()
    for record in records:
        now_s = record.snapshot.time_s
        half = "tuning" if now_s < span_s / 2 else "held-out"
        if now_s > span_s:
            continue
        begun_s = time.process_time()
        past = Past(past_jobs(jobs.values(), now_s), now_s)
        drawn = estimate(record, past, lambda new: specs.facts(new, types))
        found = drawn.widened(held.widths(past) if options.width is None else Widths(options.width, options.width))
        held.note(record.snapshot.jobs, drawn.jobs, now_s, np.random.default_rng(record.snapshot.round))
        spent.append(time.process_time() - begun_s)
        for job in record.snapshot.jobs if now_s >= span_s * 0.1 and half in options.halves.split(",") else ():
            score(found.jobs[job.id], job, record, jobs[job.id], scores[half])
    result = {half: {what: each.figures() for what, each in its.items()} for half, its in scores.items()}
    for half, its in result.items():
        for what, each in its.items():
            print(f"{policy:<16}{half:<10}{what:<7}{each}", flush=True)
    took = f"{sum(spent) / max(len(spent), 1):.1f} s CPU each, at most {max(spent, default=0):.1f}"
    print(f"{policy}: {len(spent)} rounds, {took}; simulation {sim_s:.0f} s", flush=True)
    return result


def score(found: JobRanges, job: Job, record: RoundRecord, lived: SimulatedJob, scores: dict[str, Score]) -> None:
    now_s = record.snapshot.time_s
    assert lived.finish_s is not None
    scores["end"].add(found.end, lived.finish_s - now_s)
    if job.phase is Phase.QUEUED and job.id not in record.plan.assignments:
        start_s = next(run.start_s for run in lived.runs if run.start_s >= now_s)
        scores["start"].add(found.start, start_s - now_s)


def past_jobs(jobs: Iterable[SimulatedJob], now_s: float) -> list[PastJob]:
    """The jobs submitted until now, with what they have had."""
    found = []
    for job in jobs:
        if job.submit_s > now_s:
            continue
        gpu_seconds = sum(
            run.placement.gpus * max(min(run.end_s, now_s) - run.start_s, 0.0)
            for run in job.runs
            if run.start_s < now_s
        )
        ended_s = job.finish_s if job.finish_s is not None and job.finish_s <= now_s else None
        started_s = min((run.start_s for run in job.runs if run.start_s < now_s), default=None)
        seen = Job(
            job.id,
            job.name if job.name != job.id else "",
            job.user,
            job.spec,
            ("all",),
            Phase.QUEUED,
            job.submit_s,
            account=job.account,
        )
        found.append(PastJob(seen, gpu_seconds, ended_s, started_s))
    return found


if __name__ == "__main__":
    main()
