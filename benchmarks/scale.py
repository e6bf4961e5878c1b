"""How long one decision of `sia` takes on clusters of up to 102,400 GPUs: `python benchmarks/scale.py [--jobs N ...] [--json]`.

For each N a generated snapshot: 64 GPUs (6 nodes of 4 T4, 3 of 8 RTX, 2 of 8 A100) for every 30 jobs, jobs of the catalogue's
families with parameters of their own (within 10 %), a quarter new and the others running somewhere. The whole `decide()` is
timed: goodput of every job on 40 configurations, the solver, the placement, and a reason for each job. The plan is checked
first: it contains every job, it allocates no GPU twice, and its gap is proven. Times are CPU seconds of one thread, and garbage
is collected as in penstockd. "next" is a round in which the plan has been carried out and nothing else has happened, and
"steady" the one after it, in which one job in a hundred has a new model.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import resource
import time
from pathlib import Path

import numpy as np

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.families import load_families
from penstock_scheduler.daemon.service.server import FULL_COLLECTIONS
from penstock_scheduler.model import Job, JobFacts, JobSpec, Node, Phase, Placement, Plan, Share, Snapshot
from penstock_scheduler.rounds.policies import make_policy

SIZES = [30, 120, 480, 960, 4_800, 15_000, 48_000]
UNIT = {"t4": (6, 4), "rtx": (3, 8), "a100": (2, 8)}
"""Nodes, and GPUs of each, for every 30 jobs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=SIZES)
    parser.add_argument("--plot", type=Path, help="draw the times to this file")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)  # as in penstockd
    rows = []
    if not options.json:
        print(
            f"{'jobs':>7} {'GPUs':>8} {'first s':>8} {'next s':>8} {'steady s':>8} {'solve s':>8} {'gap %':>8} {'moved':>7} "
            f"{'stops later':>11} {'peak MB':>8}"
        )
    for jobs in options.jobs:
        rows.append(row := measure(jobs))
        if not options.json:
            print(
                f"{row['jobs']:7d} {row['gpus']:8d} {row['first_s']:8.2f} {row['next_s']:8.2f} {row['steady_s']:8.2f} "
                f"{row['solve_s']:8.2f} {100 * row['gap']:8.4f} {row['moved']:7d} {row['stops_later']:11d} "
                f"{row['peak_mb']:8.0f}"
            )
    if not options.json:
        print(
            f"targets at 48,000 jobs: 3 s first, 1 s steady, 2,048 MB; Python {platform.python_version()}, one of "
            f"{os.cpu_count()} cores"
        )
    if options.plot:
        plot(rows, options.plot)
    print(json.dumps(rows))


def measure(jobs: int) -> dict[str, float]:
    state = generate(jobs)
    policy = make_policy("sia")[0]
    took_s, plans = [], []
    for changed in (0, 0, jobs // 100 + 1):
        state = with_new_models(state, changed)
        gc.collect()
        begun = time.process_time()
        plan = policy.decide(state)
        took_s.append(round(time.process_time() - begun, 3))
        plans.append(plan)
        check(state, plan)
        state = carried_out(state, plan)
    first, plan = plans[0], plans[-1]
    assert first.solve is not None
    return {
        "jobs": jobs,
        "gpus": sum(node.gpus for node in state.nodes),
        **dict(zip(("first_s", "next_s", "steady_s"), took_s, strict=True)),
        "solve_s": round(first.solve.seconds, 3),
        "gap": first.solve.gap,
        "moved": sum(
            a.reason.text.startswith("keeps") and "other nodes" in a.reason.text for a in first.assignments.values()
        ),
        "left_over": sum(reason.code.value == "waiting-fragments" for reason in first.waiting.values()),
        "stops_later": len(plans[1].stops) + len(plan.stops),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def with_new_models(state: Snapshot, number: int) -> Snapshot:
    """The same, with a little more noise in the gradients of this many jobs."""
    facts = dict(state.facts)
    for job in list(facts)[:: len(facts) // number] if number else ():
        model = facts[job].model
        assert isinstance(model, TrainingEstimator)
        facts[job] = dataclasses.replace(facts[job], model=dataclasses.replace(model, grad_var=1.5 * model.grad_var))
    return dataclasses.replace(state, facts=facts)


def carried_out(state: Snapshot, plan: Plan) -> Snapshot:
    """The next round's snapshot, a minute later: all jobs run where the plan has them."""

    def after(job: Job) -> Job:
        given = plan.assignments.get(job.id)
        if given is None:
            stopped_s = job.stopped_s if job.allocation is None else state.time_s
            return dataclasses.replace(job, phase=Phase.QUEUED, allocation=None, stopped_s=stopped_s)
        if job.allocation is not None and given.placement.suits(job.allocation):
            return job
        return dataclasses.replace(
            job,
            phase=Phase.RUNNING,
            allocation=given.placement,
            started_s=state.time_s,
            restarts=job.restarts + (job.allocation is not None),
        )

    jobs = tuple(map(after, state.jobs))
    return dataclasses.replace(state, jobs=jobs, round=state.round + 1, time_s=state.time_s + 60.0)


def generate(jobs: int) -> Snapshot:
    """A snapshot that only depends on the number of jobs."""
    generator = np.random.default_rng(jobs)
    families = load_families()
    scale = max(round(jobs / 30), 1)
    nodes = tuple(
        Node(f"{name}-{index:05d}", name, gpus, ("all",), switch=f"{name}-{index // 32}")
        for name, (count, gpus) in UNIT.items()
        for index in range(count * scale)
    )
    free = {name: [node for node in nodes if node.gpu_type == name] for name in UNIT}
    left = {node.name: node.gpus for node in nodes}
    made, facts = [], {}
    names = sorted(families)
    for number in range(jobs):
        family = families[names[generator.integers(len(names))]]
        job = f"{number:06d}"
        facts[job] = JobFacts(vary(family.estimator(), generator), float(family.restart_cost_s))
        age, allocation = float(generator.exponential(20_000)), None
        if generator.random() < 0.75:
            name = list(UNIT)[generator.integers(3)]
            gpus = int(2 ** generator.integers(0, UNIT[name][1].bit_length()))
            start = int(generator.integers(len(free[name])))
            for node in (free[name][(start + step) % len(free[name])] for step in range(8)):
                if left[node.name] >= gpus:
                    left[node.name] -= gpus
                    allocation = Placement(name, "all", (Share(node.name, gpus),))
                    break
        made.append(
            Job(
                job,
                f"job-{job}",
                f"user{number % 200}",
                JobSpec(max_gpus=64),
                ("all",),
                Phase.QUEUED if allocation is None else Phase.RUNNING,
                1e6 - age,
                int(generator.integers(0, 4)) if allocation is not None else 0,
                allocation,
            )
        )
    return Snapshot(1, 1e6, nodes, tuple(made), facts)


def vary(estimator: TrainingEstimator, generator: np.random.Generator) -> TrainingEstimator:
    """The same job, a little faster or slower on each type."""
    models = {}
    for name in UNIT:
        model = estimator.models[name]
        times = ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n")
        factors = dict(zip(times, generator.uniform(0.9, 1.1, len(times)), strict=True))
        step = dataclasses.replace(model.step, **{key: f * getattr(model.step, key) for key, f in factors.items()})
        models[name] = dataclasses.replace(model, step=step)
    return dataclasses.replace(estimator, models=models)


def check(state: Snapshot, plan: Plan) -> None:
    assert set(plan.assignments) | set(plan.waiting) == {job.id for job in state.jobs}
    used: dict[str, int] = {}
    for assignment in plan.assignments.values():
        for share in assignment.placement.shares:
            used[share.node] = used.get(share.node, 0) + share.gpus
    assert all(used.get(node.name, 0) <= node.gpus for node in state.nodes), "no GPU is allocated twice"
    assert plan.solve is not None
    assert plan.solve.gap <= 1.01e-4, "the choice is proven"


def plot(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6))
    jobs = [row["jobs"] for row in rows]
    for key, label, colour in (("first_s", "first round", "#1f6feb"), ("steady_s", "1 % of the models new", "#2da44e")):
        axis.plot(jobs, [row[key] for row in rows], "o-", color=colour, label=label)
    axis.plot(jobs, [rows[-1]["first_s"] * n / jobs[-1] for n in jobs], ":", color="0.6", label="in proportion to jobs")
    axis.axhline(3, color="#c44e52", linewidth=0.8)
    axis.text(jobs[0], 3.2, "target at 48,000 jobs: 3 s", color="#c44e52", fontsize=8)
    axis.set(xscale="log", yscale="log", xlabel="jobs (2.13 GPUs each)", ylabel="CPU seconds of a decision")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
