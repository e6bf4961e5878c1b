"""`penstock rounds solve`: solve the problem of one round and report on the solver."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import typer

from penstock_scheduler.cli.ask import STATE
from penstock_scheduler.cli.replay import read_round
from penstock_scheduler.model import SolveReport
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.solver import Problem
from penstock_scheduler.rounds.solver import solve as solve_problem

_ARRAYS = ("cost", "config_gpus", "config_type", "capacity", "lambda_noalloc")


class SolverName(StrEnum):
    """Values of --solver."""

    AUTO = "auto"
    MILP = "milp"
    DUAL = "dual"


def solve(
    source: str = typer.Argument(
        help="A problem as arrays (.npz), the number of a saved round, or a JSON file with a round."
    ),
    state: str = STATE,
    solver: SolverName = typer.Option(SolverName.AUTO, help="Solver to use."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Solve the problem of a round and show objective, bound, gap, time and (except with milp) a price for each GPU type.

    For a saved round, the recorded policy decides again with this solver, and the time is that of the whole decision.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    if source.endswith(".npz"):
        problem, types = load_problem(Path(source))
        wall, cpu = time.perf_counter(), time.process_time()  # reading the file does not count
        report = solve_problem(problem, solver.value).report
        prices = dict(zip(types, report.prices_T, strict=True)) if report.prices_T else {}
        size = f"{len(problem.cost_JC)} jobs, {len(types)} GPU types with {problem.capacity_T.sum()} GPUs"
    else:
        report, prices, size = _decide(source, state, solver.value)
    seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    if as_json:
        typer.echo(json.dumps(as_dict(report) | {"seconds": seconds, "cpu_s": cpu_s, "prices": prices}))
        return
    typer.echo(f"{Path(source).name}: {size}")
    typer.echo(f"{report.solver}: {report.status.value}")
    typer.echo(f"objective {report.objective:.6g}, bound {report.bound:.6g}, gap {report.gap:.4%}")
    typer.echo(f"{seconds:.3f} s, {cpu_s:.3f} CPU seconds")
    for gpu_type, price in prices.items():
        typer.echo(f"one more GPU of type {gpu_type} would lower the objective by about {price:.4g}")


def as_dict(report: SolveReport) -> dict[str, Any]:
    """The solver's report, for JSON."""
    return {
        "solver": report.solver,
        "status": report.status.value,
        "objective": report.objective,
        "bound": report.bound,
        "gap": report.gap,
    }


def load_problem(file: Path) -> tuple[Problem, list[str]]:
    """A problem and the names of its GPU types, from arrays.

    `cost` (J x C), `config_gpus` and `config_type` (C), `capacity` (T), `lambda_noalloc` (cost of leaving a job out);
    optional `forced_config` (J, -1 where free) and `type_names` (T).

    Raises:
        PenstockError: the file cannot be read, or lacks an array.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            given = {name: arrays[name] for name in (*_ARRAYS, "forced_config", "type_names") if name in arrays}
    except OSError as error:
        raise PenstockError(f"{file}: {error.strerror or error}") from None
    except (ValueError, BadZipFile) as error:
        raise PenstockError(f"{file} has no arrays: {error}; use a file that numpy.savez wrote") from None
    missing = [name for name in _ARRAYS if name not in given]
    if missing:
        raise PenstockError(f"{file} lacks {', '.join(missing)}; a problem has {', '.join(_ARRAYS)}")
    problem = Problem(
        given["cost"].astype(np.float64),
        given["config_gpus"].astype(np.int64),
        given["config_type"].astype(np.int64),
        given["capacity"].astype(np.int64),
        float(given["lambda_noalloc"]),
        forced_J=given["forced_config"].astype(np.int64) if "forced_config" in given else None,
    )
    names = given.get("type_names", np.arange(len(problem.capacity_T)))
    return problem, [str(name) for name in names]


def _decide(source: str, state: str, solver: str) -> tuple[SolveReport, dict[str, float], str]:
    record = read_round(source, state)
    name, settings = record.policy.name, record.policy.settings
    if "solver" not in settings.get(name, {}):
        raise PenstockError(f"{source}: policy {record.policy} decided without a solver; take a round of policy sia")
    with_solver = settings | {name: settings[name] | {"solver": solver}}
    policy, _ = make_policy(record.policy.model_copy(update={"settings": with_solver}))
    plan = policy.decide(record.snapshot)
    assert plan.solve is not None, "a policy with a solver reports on it"
    return plan.solve, plan.prices, f"{len(record.snapshot.jobs)} jobs, {len(record.snapshot.nodes)} nodes"
