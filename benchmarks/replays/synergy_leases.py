"""Synergy's replay traces, as the authors' simulator runs them: in leases of one round.

It reproduces the published figures one by one; to predict how a cluster performs, use `simulate`. Jobs hold their GPUs for
whole rounds. At the end of each round, all jobs release their GPUs and are placed again, at no cost. A job makes a whole number
of iterations in a round; the rest of the round is lost, also after the job's last iteration. The policies are those of
`penstock_scheduler.rounds.policies.tuning`. docs/decisions/0007-synergy-replay.md says
why the simulated cluster cannot do this.

The orders are the authors': `srtf` uses the speed of a job's last round; `ftf` serves the best-treated jobs first (Themis and
Penstock's policy `ftf` serve the worst-treated first); `las` considers only as many jobs as there are GPUs.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock_profiles.sensitivity import Option, Sensitivity
from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.policies.tuning import (
    Claim,
    NodeCapacity,
    TuneSettings,
    ask,
    optimum,
    relative_speed,
    tune,
)
from penstock_scheduler.rounds.solver import Limits
from penstock_scheduler.rounds.solver.problem import SolveFailed

ROUND_S = 300.0

Order = Literal["fifo", "srtf", "las", "ftf"]
Mechanism = Literal["proportional", "greedy", "tune", "opt", "opt-points"]
"""`opt` and `opt-points` solve the same program in two forms: see `choose_points`."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the published profiles, on one number of GPUs."""

    iteration_s: float
    """Duration of a mini-batch with the proportional share."""
    table: Sensitivity
    """Speeds relative to the proportional share."""


@dataclass(slots=True, eq=False)
class LeaseJob:
    """A job of a trace, and its progress."""

    id: str
    model: Model
    arrival_s: float
    iterations: int
    gpus: int
    done: int = 0
    """Iterations."""
    attained_s: float = 0.0
    speed: float = 1.0
    """Speed in the last round. Before the first round, the speed with its demand."""
    finish_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds of work left at the proportional share."""
        return self.model.iteration_s * (self.iterations - self.done)


@dataclass(slots=True)
class Replay:
    """The result of a replay."""

    jobs: list[LeaseJob]
    begin_s: float
    rounds: int = 0
    objectives: list[dict[str, float]] = field(default_factory=list)
    """For each round, the sum of its jobs' speeds by mechanism; only with `compare`."""
    slower: int = 0
    """How many times a job was slower in a round than with the proportional share."""

    @property
    def jct_h(self) -> list[float]:
        """Hours from arrival to finish, of each job."""
        return [((job.finish_s or math.nan) - job.arrival_s) / 3600 for job in self.jobs]

    @property
    def makespan_h(self) -> float:
        """Hours until the last job has finished."""
        return max(job.finish_s or math.nan for job in self.jobs) / 3600


def read_models(path: Path, cpus_per_gpu: int = 3) -> dict[tuple[str, int], Model]:
    """The published profiles for servers with this many CPUs per GPU: (model, GPUs) -> model. A GB is 1000 MB in them."""
    document = json.loads(path.read_text(encoding="utf-8"))
    cpus = tuple(map(float, document["grid"]["cpus_per_gpu"]))
    memory = tuple(1000.0 * gb for gb in document["grid"]["mem_gb_per_gpu"])
    return {
        (entry["model"], entry["gpus"]): Model(
            entry["iter_time_s"],
            Sensitivity(
                entry["gpus"],
                cpus,
                memory[len(memory) - len(entry["tput"][0]) :],
                tuple(tuple(map(float, line)) for line in entry["tput"]),
            ),
        )
        for entry in document[f"cpu_per_gpu_{cpus_per_gpu}"].values()
    }


def read_trace(path: Path, models: Mapping[tuple[str, int], Model]) -> list[LeaseJob]:
    """A trace: job, model, arrival in s, iterations, GPUs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            _job(number, models[model, int(gpus)], float(arrival), int(iterations), int(gpus))
            for number, model, arrival, iterations, gpus in csv.reader(file)
        ]


def _job(number: str, model: Model, arrival_s: float, iterations: int, gpus: int) -> LeaseJob:
    return LeaseJob(number, model, arrival_s, iterations, gpus)


def servers(count: int, gpus: int = 8, cpus: int = 24, memory_mb: int = 500_000) -> list[NodeCapacity]:
    """The paper's servers."""
    return [NodeCapacity(f"node-{n}", gpus, cpus, memory_mb, cpus / gpus, memory_mb / gpus) for n in range(count)]


def replay(
    jobs: Sequence[LeaseJob],
    rooms: Sequence[NodeCapacity],
    order: Order,
    mechanism: Mechanism,
    settings: TuneSettings,
    *,
    static: bool = False,
    limits: Limits | None = None,
    compare: bool = False,
) -> Replay:
    """Run a trace to its end.

    Args:
        jobs: of the trace. They are not changed.
        rooms: the servers, all alike.
        order: the order in which jobs are served.
        mechanism: how CPU and memory are shared out.
        settings: of TUNE: `REFERENCE` for the published runs.
        static: whether all jobs exist from the beginning, with the first round at 1 s.
        limits: of each program of `opt`.
        compare: whether to record the sum of speeds under each mechanism in each round.
    """
    todo = sorted(jobs, key=lambda job: job.arrival_s)
    now_s = 1.0 if static else math.ceil(todo[0].arrival_s / ROUND_S) * ROUND_S
    result = Replay(list(jobs), now_s)
    full_speed = {job.id: _demand(job, rooms[0]).speed for job in jobs}
    for job in jobs:
        job.speed = full_speed[job.id]
    runnable: list[LeaseJob] = []
    gpus = sum(room.gpus for room in rooms)
    while todo or runnable:
        while todo and todo[0].arrival_s <= now_s:
            runnable.append(todo.pop(0))
        if not runnable:
            now_s += ROUND_S
            continue
        runnable.sort(key=_key(order, now_s, shared=mechanism != "proportional"))
        chosen, left = [], gpus
        for job in runnable:
            if job.gpus <= left:
                chosen.append(job)
                left -= job.gpus
        # With the authors' other orders, greedy skips a job that does not fit and continues with later ones.
        asked = chosen if order == "las" or mechanism != "greedy" else runnable
        speeds = _speeds(mechanism, asked, rooms, settings, limits)
        result.slower += sum(speed < 1 - 1e-9 for speed in speeds.values())
        if compare:
            sums = {
                name: sum(_speeds(name, chosen, rooms, settings, limits).values())
                for name in ("proportional", "tune", "opt")
            }
            result.objectives.append(sums)
        end_s = now_s + ROUND_S
        for job in runnable:
            # The authors' optimal program leaves this as it is.
            job.speed = speeds.get(job.id, full_speed[job.id]) if mechanism == "tune" else full_speed[job.id]
            if job.id in speeds:
                job.attained_s += ROUND_S
                iterations = math.floor(ROUND_S / (job.model.iteration_s / speeds[job.id]))
                job.done = min(job.done + iterations, job.iterations)
                if job.done == job.iterations:
                    job.finish_s = end_s
        runnable = [job for job in runnable if job.finish_s is None]
        result.rounds += 1
        now_s = end_s
    return result


def _key(order: Order, now_s: float, *, shared: bool) -> Callable[[LeaseJob], tuple[float, float]]:
    def left_s(job: LeaseJob) -> float:
        return job.left_s / job.speed if shared else job.left_s

    def first(job: LeaseJob) -> float:
        if order == "srtf":
            return left_s(job)
        if order == "las":
            return job.attained_s * job.gpus
        if order == "ftf":
            return (now_s - job.arrival_s + left_s(job)) / (job.model.iteration_s * job.iterations)
        return 0.0

    return lambda job: (first(job), job.arrival_s)


def _demand(job: LeaseJob, room: NodeCapacity) -> Option:
    demand = job.model.table.demand(room.cpus, room.memory_mb)
    assert demand is not None, "every published model runs on a published server"
    return demand


def _claims(jobs: Sequence[LeaseJob], rooms: Sequence[NodeCapacity]) -> list[Claim]:
    everywhere = tuple(range(len(rooms)))
    return [Claim(job.id, job.gpus, job.model.table, everywhere) for job in jobs]


def _speeds(
    mechanism: Mechanism,
    jobs: Sequence[LeaseJob],
    rooms: Sequence[NodeCapacity],
    settings: TuneSettings,
    limits: Limits | None,
) -> dict[str, float]:
    """Speed in this round of every job that runs, relative to the proportional share."""
    if mechanism == "proportional":
        return {job.id: 1.0 for job in jobs}
    claims = _claims(jobs, rooms)
    if mechanism == "opt-points":
        return _points(jobs, rooms, limits or Limits())
    if mechanism == "opt":
        shares, choices = optimum(claims, rooms, limits)
        return {job.id: choice.options[o].value for job, choice, o in zip(jobs, choices, shares.option_J, strict=True)}
    if mechanism == "greedy":
        return _greedy(jobs, rooms)
    grants = tune(claims, rooms, settings)
    if grants is None:
        raise ValueError("the GPUs of these jobs do not fit on the servers one by one")
    given = ((claim, grants[claim.job]) for claim in claims)
    return {
        claim.job: relative_speed(claim.table, claim.gpus, rooms[grant.node], grant.amount) for claim, grant in given
    }


def _points(jobs: Sequence[LeaseJob], rooms: Sequence[NodeCapacity], limits: Limits) -> dict[str, float]:
    tables = [job.model.table for job in jobs]
    value_JCM = np.array([table.speed_CM for table in tables])
    least = [rooms[0].proportional(job.gpus) for job in jobs]
    least_J = np.array([table.speed(part.cpus, part.memory_mb) for table, part in zip(tables, least, strict=True)])
    chosen_J2 = choose_points(
        value_JCM,
        least_J,
        np.array([[cpus * table.gpus for cpus in table.cpus_C] for table in tables]),
        np.array([[memory * table.gpus for memory in table.memory_mb_M] for table in tables]),
        sum(room.cpus for room in rooms),
        sum(room.memory_mb for room in rooms),
        limits.seconds,
    )
    speed_J = value_JCM[np.arange(len(jobs)), chosen_J2[:, 0], chosen_J2[:, 1]] / least_J
    return {job.id: float(speed) for job, speed in zip(jobs, speed_J, strict=True)}


def _greedy(jobs: Sequence[LeaseJob], rooms: Sequence[NodeCapacity]) -> dict[str, float]:
    """The authors' Greedy: the first server with room for the demand. A job without such a server is skipped in this round."""
    free = np.array([[room.gpus, room.cpus, room.memory_mb] for room in rooms])
    speeds = {}
    for claim, job in zip(_claims(jobs, rooms), jobs, strict=True):
        wants = ask(claim, rooms[0])
        need = np.array([job.gpus, wants.cpus, wants.memory_mb])
        fits = np.flatnonzero((free >= need).all(axis=1))
        if len(fits):
            free[fits[0]] -= need
            speeds[job.id] = _demand(job, rooms[0]).speed
    return speeds


def choose_points(
    value_JCM: NDArray[np.float64],
    least_J: NDArray[np.float64],
    cpus_JC: NDArray[np.float64],
    memory_mb_JM: NDArray[np.float64],
    cpus: float,
    memory_mb: float,
    seconds: float = 60.0,
) -> NDArray[np.int64]:
    """The first program in the authors' own form, with a binary variable for each point of each job's table.

    Its value is that of `choose_shares`. Often several answers have that value, and the form decides which one HiGHS finds. The
    published replays follow from the answers to this form, with the rows in the order of the authors' modelling tool.

    Args:
        value_JCM: speed of each job at each point.
        least_J: the least speed of each job.
        cpus_JC: CPUs of each row of its table, in total.
        memory_mb_JM: MB of each column.
        cpus: CPUs of all nodes together.
        memory_mb: memory of all nodes together, MB.
        seconds: time limit.

    Returns:
        Row and column of each job's point, J x 2.

    Raises:
        SolveFailed: the program has no solution, or none was found in time.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second to load
    from scipy.sparse import coo_array, vstack

    jobs, rows, columns = value_JCM.shape
    # Points column by column, as the tool flattens matrices.
    value_V = value_JCM.transpose(0, 2, 1).ravel()
    cpus_V = np.repeat(cpus_JC[:, None, :], columns, axis=1).ravel()
    memory_V = np.repeat(memory_mb_JM[:, :, None], rows, axis=2).ravel()
    own = (np.repeat(np.arange(jobs), rows * columns), np.arange(len(value_V)))
    matrix = vstack(
        [
            coo_array((np.ones(len(value_V)), own), shape=(jobs, len(value_V))),
            coo_array(cpus_V[None, :]),
            coo_array(memory_V[None, :]),
            coo_array((-value_V, own), shape=(jobs, len(value_V))),
        ]
    ).tocsr()
    solved = milp(
        -value_V,
        integrality=np.ones(len(value_V), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            matrix,
            np.concatenate([np.ones(jobs), np.full(2 + jobs, -np.inf)]),
            np.concatenate([np.ones(jobs), [cpus, memory_mb], -least_J]),
        ),
        options={"time_limit": seconds},
    )
    if solved.x is None:
        raise SolveFailed(SolveStatus.NUMERICAL, f"HiGHS finds no shares: {solved.message}")
    point_J = solved.x.reshape(jobs, rows * columns).argmax(axis=1)
    return np.stack([point_J % rows, point_J // rows], axis=1)
