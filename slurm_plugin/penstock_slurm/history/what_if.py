"""The jobs of a history again, in the simulator: under Slurm's backfill, and under Penstock, if more or fewer users changed their
scripts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from penstock_profiles.families import Families, load_families
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.model import Node
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.simulator.results import simulate_each
from penstock_scheduler.simulator.run import prepare
from penstock_scheduler.simulator.workloads.generate import as_training
from penstock_scheduler.simulator.workloads.workload import Workload, WorkloadJob, in_order, rigid_spec
from penstock_slurm.history.reading import History, PastRun

SHARES = (0.0, 0.25, 0.5, 1.0)
"""Shares of the users whose jobs are elastic."""

GROWTH = 4
"""An elastic job may have so many times the GPUs that it had, and as few as one."""

DRAWS = 3
"""Simulations of one share, each with other users and models."""

UNMEASURED_AS = "a100"
"""The type of which an unmeasured one has the speed."""

ASSUMPTIONS = (
    "Each job comes when it was ready, to the nodes of its partition as they are now. CPUs, memory, limits, reservations and "
    "dependencies on each other hold no job back.",
    "A job that nobody changed has as many GPUs as it had, for as long as it ran, of any type of its partition. It is never "
    "stopped.",
    f"An elastic job may have 1 to {GROWTH} times its GPUs. Which model it trains is not known: its GPU-hours choose one of the "
    "catalogue's, at random, and its batch size was the best one on its GPUs. A type on which no model was measured trains as an "
    "A100.",
    "Jobs that came before these, or have not ended, hold their GPUs for as long as they did until now, and are in no mean.",
)
"""For people, beside the figures."""


@dataclass(frozen=True, slots=True)
class WholeJob:
    """All runs of a job together."""

    first: PastRun
    """The record with which it came."""
    gpus: int
    gpu_type: str
    """Of its last run."""
    ran_s: float
    end_s: float
    counts: bool
    """Whether it is in the means: it came in the period, and has ended. Others only hold their GPUs."""

    @property
    def completion_s(self) -> float:
        """From when it was ready to its end."""
        return self.end_s - self.first.ready_s


@dataclass(frozen=True, slots=True)
class Case:
    """The same jobs under a policy. Pairs are the least and the most over the draws."""

    name: str
    completion_h: tuple[float, float]
    """Mean time from ready to ended."""
    wait_h: tuple[float, float]
    """Mean time of these without GPUs."""
    median_completion_h: tuple[float, float]


def jobs_of(history: History, most: int) -> tuple[list[WholeJob], float, int]:
    """The newest jobs that have ended, at most so many, and the others that held GPUs meanwhile.

    A job that still runs has no known length. It holds its GPUs until the end of the history.

    Returns:
        The jobs, when the first of the newest ones came, and how many are left out because their partition has fewer GPUs now.
    """
    by_id: dict[str, list[PastRun]] = {}
    for run in history.runs:
        if run.start_s is not None and (run.end_s is None or run.end_s > run.start_s):
            by_id.setdefault(run.job_id, []).append(run)
    whole = sorted((_job(runs, history.end_s) for runs in by_id.values()), key=lambda job: job.first.ready_s)
    fits = [job for job in whole if job.gpus <= sum(history.gpus.get(name, 0) for name in _types(history, job))]
    newest = [job for job in fits if job.counts and job.first.ready_s >= history.begin_s][-most:]
    begin_s = newest[0].first.ready_s if newest else history.begin_s
    there = [
        replace(job, ran_s=min(job.ran_s, job.end_s - begin_s), counts=job.counts and job.first.ready_s >= begin_s)
        for job in fits
        if job.end_s > begin_s
    ]
    return there, begin_s, len(whole) - len(fits)


def _types(history: History, job: WholeJob) -> list[str]:
    """The GPU types that the job may have, as far as they exist: the one that it asked for, or those of its partition."""
    if job.first.asked_type is not None:
        return [job.first.asked_type] if job.first.asked_type in history.gpus else []
    return history.types_of_partition.get(job.first.partition, [])


def _job(runs: Sequence[PastRun], now_s: float) -> WholeJob:
    last = max(runs, key=lambda run: run.start_s or 0.0)
    end_s = now_s if last.end_s is None else last.end_s
    ran_s = sum((now_s if run.end_s is None else run.end_s) - (run.start_s or 0.0) for run in runs)
    first = min(runs, key=lambda run: run.ready_s)
    return WholeJob(first, last.gpus, last.gpu_type, ran_s, end_s, counts=last.end_s is not None and end_s <= now_s)


def recorded(jobs: Sequence[WholeJob]) -> Case:
    """How it was."""
    came = [job for job in jobs if job.counts]
    completions = [job.completion_s / 3600 for job in came]
    wait_h = fmean((job.completion_s - job.ran_s) / 3600 for job in came)
    return Case("as it was", _same(fmean(completions)), _same(wait_h), _same(median(completions)))


def _same(value: float) -> tuple[float, float]:
    return value, value


def what_if(
    history: History, jobs: Sequence[WholeJob], begin_s: float, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Case]:
    """The jobs under Slurm's backfill, and under `sia` for each of SHARES.

    Args:
        history: the cluster.
        jobs, begin_s: from `jobs_of`.
        progress: called with what is simulated next.
    """
    nodes = nodes_of(history)
    families = _families({node.gpu_type for node in nodes})
    rigid = workload_of(jobs, begin_s, history)
    counted = {job.first.job_id for job in jobs if job.counts}

    def case(name: str, policy: str, workloads: Sequence[Workload]) -> Case:
        means = []
        for number, workload in enumerate(workloads, 1):
            progress(f"{name} ({number} of {len(workloads)})")
            scenario = prepare(nodes, workload, families=families)
            scenario.check()
            (result,) = simulate_each([(scenario, PolicyChoice(name=policy), 0)])
            rows = [row for row in result.rows if row.id in counted]
            completions_h = [row.jct_s / 3600 for row in rows if row.jct_s is not None]
            if len(completions_h) < len(counted):
                raise PenstockError(
                    f"the simulation is wrong: in the case {name!r}, {len(counted) - len(completions_h)} jobs never ended"
                )
            wait_h = fmean(row.queue_s / 3600 for row in rows)
            means.append((fmean(completions_h), wait_h, median(completions_h)))
        completion, wait, middle = ((min(each), max(each)) for each in zip(*means, strict=True))
        return Case(name, completion, wait, middle)

    yield case("Slurm's backfill", "slurm-backfill", [rigid])
    for share in SHARES:
        draws = [_elastic(rigid, share, draw, counted, nodes) for draw in range(DRAWS if share else 1)]
        yield case(f"Penstock, {share:.0%} elastic" if share else "Penstock, as they are", "sia", draws)


def nodes_of(history: History) -> tuple[Node, ...]:
    """The nodes of a history for the simulator: one for each node and GPU type, all in one partition."""
    return tuple(
        Node(f"{node.name}-{gpu_type}", gpu_type, gpus, ("all", gpu_type), cpus=node.cpus, state="IDLE")
        for node in history.nodes
        for gpu_type, gpus in node.gpus.items()
    )


def _families(gpu_types: Collection[str]) -> Families:
    """The catalogue of models, also on types on which none of them was measured."""
    known, families = load_gpus(), load_families()
    missing = [name for name in gpu_types if not any(known.canonical(name) in each.gpus for each in families.values())]
    return Families(
        {
            name: family.model_copy(update={"gpus": family.gpus | dict.fromkeys(missing, family.gpus[UNMEASURED_AS])})
            for name, family in families.items()
        }
    )


def workload_of(jobs: Sequence[WholeJob], begin_s: float, history: History) -> Workload:
    """The jobs as a workload: each as it was, on the GPU types of its partition, never stopped."""
    made = []
    for job in jobs:
        spec = rigid_spec(job.gpus, tuple(_types(history, job)))
        made.append(
            WorkloadJob(
                id=job.first.job_id,
                submit_s=max(job.first.ready_s - begin_s, 0.0),
                gpus=job.gpus,
                spec=spec.model_copy(update={"preemptible": False}),
                user=job.first.user,
                account=job.first.account,
                gpu_type=job.gpu_type or None,
                duration_s=job.ran_s,
                time_limit_s=job.first.limit_s,
            )
        )
    return Workload("history", in_order(made))


def _elastic(workload: Workload, share: float, draw: int, movable: set[str], nodes: Sequence[Node]) -> Workload:
    """The workload in which a share of its users, drawn at random, have elastic jobs."""
    users = sorted({job.user for job in workload.jobs})
    choices = np.random.default_rng(draw)
    chosen = set(choices.permutation(users)[: round(share * len(users))].tolist())
    total = sum(node.gpus for node in nodes)
    jobs = [
        as_training(job, min(job.gpus * GROWTH, total), choices) if job.user in chosen and job.id in movable else job
        for job in workload.jobs
    ]
    return replace(workload, jobs=tuple(jobs))
