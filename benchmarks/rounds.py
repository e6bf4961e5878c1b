"""How long a round's problem takes: `python benchmarks/rounds.py DIR [--solver NAME] [--json]`; see --help.

Solves every DIR/**/*.npz in one process, checks that each result is feasible and has the stated value, and prints a row for
each; `cpu_s` is the median of the trials. The last line is a JSON object: instance -> figures. `--copies N` makes each instance
N times as large first: N of each job, with all its costs up to 10 % more or less (seed 1), and N times the GPUs. `--quotas N`
deals the jobs to N users, some with many and most with few (seed 1), and limits each user to 80 % of the GPUs that the best
choice without quotas gives to their jobs. Set OMP_NUM_THREADS=1 for figures of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from penstock_scheduler.cli.solve import as_dict, load_problem
from penstock_scheduler.rounds.solver import SOLVERS, Problem, Quota, solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--solver", choices=sorted(SOLVERS), default="auto")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--quotas", type=int, default=0)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    files = sorted(options.folder.rglob("*.npz"))
    if not files:
        parser.error(f"{options.folder} has no .npz files")
    if not options.json:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "highspy", "mip")]
        print(
            f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {', '.join(versions)}"
        )
        print(
            f"{'instance':<42}{'jobs':>6}{'GPUs':>8}  {'solver':<10}{'objective':>12}{'bound':>12}{'gap':>9}{'cpu_s':>9}  status"
        )
    # Loading the libraries is not part of a round.
    solve(Problem(np.zeros((2, 1)), np.ones(1, int), np.zeros(1, int), np.ones(1, int), 1.0), options.solver)
    figures = {}
    for file in files:
        name = str(file.relative_to(options.folder).with_suffix(""))
        problem = limited(enlarged(load_problem(file)[0], options.copies), options.quotas)
        cpu_s = []
        for _ in range(options.trials):
            begun = time.process_time()
            solution = solve(problem, options.solver)
            cpu_s.append(time.process_time() - begun)
        report = solution.report
        assert math.isclose(report.objective, problem.objective(solution.choice_J), rel_tol=1e-12)
        figures[name] = as_dict(report) | {
            "feasible": problem.feasible(solution.choice_J),
            "cpu_s": statistics.median(cpu_s),
            "longest_cpu_s": max(cpu_s),
            "jobs": len(problem.cost_JC),
            "gpus": int(problem.capacity_T.sum()),
        }
        if not options.json:
            row = figures[name]
            print(
                f"{name:<42}{row['jobs']:>6}{row['gpus']:>8}  {report.solver:<10}{report.objective:>12.4f}{report.bound:>12.4f}"
                f"{report.gap:>9.4%}{row['cpu_s']:>9.4f}  {report.status.value}{'' if row['feasible'] else ', NOT FEASIBLE'}",
                flush=True,
            )
    print(json.dumps(figures))


def enlarged(problem: Problem, copies: int) -> Problem:
    """A problem with this many perturbed copies of each job, and as many times the GPUs."""
    if copies == 1:
        return problem
    factor_J = np.random.default_rng(1).uniform(0.9, 1.1, (copies * len(problem.cost_JC), 1))
    return dataclasses.replace(
        problem,
        cost_JC=np.tile(problem.cost_JC, (copies, 1)) * factor_J,
        capacity_T=problem.capacity_T * copies,
        forced_J=None if problem.forced_J is None else np.tile(problem.forced_J, copies),
    )


def limited(problem: Problem, users: int) -> Problem:
    """A problem with a quota for each of this many users. Forced choices always fit into the quotas."""
    if users == 0:
        return problem
    jobs = len(problem.cost_JC)
    user_J = (np.random.default_rng(1).pareto(1.0, jobs) * 3).astype(np.int64) % users
    choice_J = solve(problem, "dual").choice_J
    given_J = np.where(choice_J >= 0, problem.gpus_C[choice_J], 0)
    forced_J = np.where(problem.forced_J >= 0, given_J, 0) if problem.forced_J is not None else np.zeros_like(given_J)
    quotas = []
    for user in np.unique(user_J):
        job_M = np.flatnonzero(user_J == user)
        quotas.append(Quota(job_M, int(max(0.8 * given_J[job_M].sum(), forced_J[job_M].sum()))))
    return dataclasses.replace(problem, quotas=tuple(quotas))


if __name__ == "__main__":
    main()
