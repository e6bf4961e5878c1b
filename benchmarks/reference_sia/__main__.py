"""Penstock's `sia` inside the simulator of Sia's authors, beside their own policy:

    git clone https://github.com/siasosp23/artifacts; git -C artifacts checkout aaf7a0d
    pip install pandas autograd cvxpy cvxopt
    OMP_NUM_THREADS=1 python -m benchmarks.reference_sia --artifact artifacts

The jobs, their models, progress and restarts, the 64 GPUs and the workloads are theirs; see `artifact` for what is changed in
memory so that their code runs. At each of their rounds, `driving` makes a `Snapshot` of their state, decides it, and gives the
plan to their cluster. Their simulator, like ours, has no cost of measuring, and step times have no errors.

Runs: `theirs` is their own policy, with their batch sizes. `known`: the speed of a job on one GPU of each type is known before
it runs. `unprofiled`: nothing is. `memory`: nothing is, but jobs are recognised by their application's name, and the memory was
filled by the windows `--warm`, one after the other; what a measured window teaches, the next does not know. `both`: as `known`
and as `memory`. `perfect`: as `both`, and the policy is told the true goodput of each configuration, which no site can know.

A row for each window and run, then the means and the ratio to the mean of `theirs`. The last line is a JSON object: window ->
run -> figures. One trial: it is deterministic.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import platform
import statistics
from pathlib import Path
from typing import Any

from benchmarks.reference_sia.artifact import COMMIT, load
from benchmarks.reference_sia.driving import Ours, Truth, run_window

from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator.learning import SimulatedMemory
from penstock_scheduler.simulator.metrics import job_rows, summarise

RUNS = ("theirs", "known", "unprofiled", "memory", "both", "perfect")
REMEMBER = {"memory", "both", "perfect"}
FIGURES = (
    "avg_jct_h",
    "p50_jct_h",
    "p99_jct_h",
    "makespan_h",
    "gpu_h_per_job",
    "restarts_per_job",
    "worst_ftf",
    "cpu_s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", metavar="DIR", type=Path, required=True, help="a checkout of their repository")
    parser.add_argument(
        "--windows", default="philly-1,philly-2,philly-3,philly-4", help="such as saturn-1, or scale/rate_50/workload-1"
    )
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--warm", default="saturn-1", help="the windows that fill the memory (%(default)s)")
    parser.add_argument(
        "--batch", choices=("theirs", "ours"), default="ours", help="who chooses batch sizes (%(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our policy")
    parser.add_argument("--solver", default="GLPK_MI", help="of their policy, by cvxpy's name (%(default)s)")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    runs = options.runs.split(",")
    if unknown := set(runs) - set(RUNS):
        parser.error(f"unknown runs {', '.join(sorted(unknown))}; choose of {', '.join(RUNS)}")
    settings = dict(setting(text) for text in options.set)
    make_policy("sia", settings)
    own = "theirs" in runs
    artifact = load(options.artifact, options.solver if own else None, fits=own or options.batch == "theirs")
    measured, teaching = options.windows.split(","), options.warm.split(",")
    if both := set(measured) & set(teaching):
        parser.error(f"{', '.join(sorted(both))}: a window that is measured must not fill the memory")
    windows = {name: file_of(artifact.workloads, name) for name in [*measured, *teaching]}

    truth = Truth(artifact)

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    say(versions())
    warm = SimulatedMemory()
    if REMEMBER & set(runs):
        for window in teaching:
            simulation = run_window(
                artifact, truth, windows[window], Ours(False, warm, batch=options.batch, settings=settings)
            )
            say(f"memory filled by {window}, average {summarise(simulation, job_rows(simulation)).avg_jct_h:.3f} h")
    say(f"{'window':<28}{'run':<12}" + "".join(f"{name:>17}" for name in FIGURES))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for window in measured:
        for run in runs:
            memory = copy.deepcopy(warm) if run in REMEMBER else None
            profiled, perfect = run in ("known", "both", "perfect"), run == "perfect"
            ours = None if run == "theirs" else Ours(profiled, memory, perfect, options.batch, settings)
            simulation = run_window(artifact, truth, windows[window], ours)
            summary = summarise(simulation, job_rows(simulation))
            mine = {figure: float(getattr(summary, figure)) for figure in FIGURES}
            figures.setdefault(window, {})[run] = mine
            say(f"{window:<28}{run:<12}" + "".join(f"{value:>17.3f}" for value in mine.values()))
    means = {run: [statistics.mean(each[run][name] for each in figures.values()) for name in FIGURES] for run in runs}
    for run in runs:
        say(f"{'mean':<28}{run:<12}" + "".join(f"{value:>17.3f}" for value in means[run]))
        if own and run != "theirs":
            ratios = (value / theirs for value, theirs in zip(means[run], means["theirs"], strict=True))
            say(f"{'of theirs':<28}{run:<12}" + "".join(f"{ratio:>17.3f}" for ratio in ratios))
    print(json.dumps(figures))


def setting(text: str) -> tuple[str, Any]:
    """A setting from NAME=VALUE, where VALUE is JSON, or else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def file_of(workloads: Path, name: str) -> Path:
    """The file of a window, such as philly-1."""
    family, _, number = name.rpartition("-")
    file = workloads / f"{name}.csv" if "/" in name else workloads / family / f"workload-{number}.csv"
    if not file.is_file():
        raise SystemExit(f"there is no window {name!r}: {file} is missing")
    return file


def versions() -> str:
    """What the figures were made with."""
    found = [f"artifact {COMMIT}", f"Python {platform.python_version()}"]
    for name in ("numpy", "scipy", "pandas", "highspy", "autograd", "cvxpy", "cvxopt"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
