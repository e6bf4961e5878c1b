"""Pollux: a genetic search for the GPUs of all jobs at once, by goodput, for elastic jobs.

After *Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning* (Qiao et al., OSDI '21). Each round performs
these steps:

1. **Compare configurations by speed-up.** A job's speed-up on a configuration is its goodput there, relative to that on the
   smallest configuration that it can have: one GPU, as in the paper, and of the slowest type where there are several. A job
   that waits has speed-up 0.
2. **Count the restart.** For a running job, the speed-up on each configuration other than its own is multiplied by the
   restart factor (T - R d) / (T + d), where T is the job's age, R its number of restarts, and d the cost of one more.
   (The authors' code counts the first start as a restart, too, so that a new job is not worth starting.)
3. **Define the fitness** of an allocation as the power mean of all speed-ups with exponent p. With p = -1, the harmonic mean,
   the jobs that have least count most. Each speed-up is increased by `FLOOR`, so that a waiting job does not make the
   allocation infinitely bad.
4. **Search.** The first population contains what the jobs hold now and random allocations. Each generation picks pairs of
   parents by tournament and crosses them at one point in the list of jobs. In a child, jobs may return to what they hold,
   lose their GPUs, or get a random configuration. A child that allocates more GPUs than exist is repaired. The fittest
   allocations, without duplicates, form the next population.
5. **Place** (`settling`). The fittest allocation gives each job a configuration; `penstock_scheduler.rounds.placement` finds the
   nodes.

Departures from the paper:

- An allocation gives each job one of Sia's configurations (nodes, GPUs, type), all of one GPU type. In the paper, an
  allocation says how many GPUs the job gets on which node. Here a job on several nodes takes whole nodes, which has the
  effect of the paper's rule "at most one distributed job per node". Nodes of a type then differ by name only, so a search
  over nodes would gain nothing.
- The authors' second objective, which sets the size of a cloud cluster, is left out.

As in the paper, a job whose scaling is unknown at most doubles its number of GPUs.

The random numbers are seeded with the number of the round, so the same snapshot gives the same plan. The search
gives no bound: on large clusters the plan may be far from the best.

Axes: P allocations, J jobs, C configurations with "none" as the last one, T GPU types, G numbers of GPUs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.matrix import GoodputMatrix
from penstock_scheduler.model import (
    Assignment,
    Configuration,
    Job,
    JobId,
    Placement,
    Plan,
    Reason,
    Snapshot,
)
from penstock_scheduler.people.units import times
from penstock_scheduler.rounds.free_gpus import open_nodes
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.never_fits import never_fits
from penstock_scheduler.rounds.policies.settling import settle
from penstock_scheduler.rounds.policies.sia import restart_factor

FLOOR = 1e-3
"""Added to every speed-up, as in the authors' code."""

RETURN, LEAVE = 0.1, 0.01
"""Probabilities that a job in a child returns to what it holds, or loses its GPUs. The authors use 0.1, and 0.1 of 0.1."""

GROWTH = 2
"""A job whose scaling is unknown may get this many times its largest number of GPUs so far."""

POPULATION, GENERATIONS = 100, 100
"""Allocations in a population, and generations in a round. More give better plans and take proportionally longer."""

SEED = 0
"""Seed of the random numbers, with the round's number."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class PolluxSettings(BaseModel):
    """Section `[policy.pollux]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fairness_p: float = Field(default=-1.0, description="Exponent of the power mean; 0: the geometric mean.")


class Pollux:
    """Goodput of all jobs at once, by a genetic search.

    From one round to the next it keeps only the goodput of jobs whose model has not changed.
    """

    name = "pollux"

    def __init__(self, settings: PolluxSettings) -> None:
        self._settings = settings
        self._goodput = GoodputMatrix()

    def decide(self, snapshot: Snapshot) -> Plan:
        """The best allocation that the search finds."""
        pins = common.pinned(snapshot)
        free = [job for job in snapshot.jobs if job.id not in pins]
        jobs = sorted(free, key=lambda job: job.in_order)
        options = _options(snapshot, jobs)
        speedup_JC = self._speedups(snapshot, jobs, options)
        held_J = np.array(
            [options.index(held) if (held := job.running_as) else len(options) for job in jobs], dtype=np.int64
        )
        capacity = common.capacities(snapshot.nodes, pins)
        types = list(capacity)
        score_JC = self._scores(snapshot, jobs, speedup_JC, held_J)
        choice_J = search(
            score_JC,
            np.array([*(option.gpus for option in options), 0], dtype=np.int64),
            np.array([*(types.index(option.gpu_type) for option in options), 0], dtype=np.int64),
            np.array(list(capacity.values()), dtype=np.int64),
            held_J,
            np.random.default_rng([SEED, snapshot.round]),
            population=POPULATION,
            generations=GENERATIONS,
        )
        chosen = {job.id: options[c] for job, c in zip(jobs, choice_J, strict=True) if c < len(options)}
        instead = [
            (job.id, options[c])
            for row, job in enumerate(jobs)
            if job.id in chosen
            for c in np.argsort(-score_JC[row], kind="stable").tolist()
            if c < len(options) and speedup_JC[row, c] > 0
        ]
        placements = settle(snapshot, pins, chosen, instead)
        return self._explained(
            snapshot, pins, placements, dict(zip((job.id for job in jobs), speedup_JC, strict=True)), options
        )

    def _speedups(self, snapshot: Snapshot, jobs: list[Job], options: list[Configuration]) -> FloatArray:
        """Speed-up of each job on each configuration, J x C; 0 where it cannot run."""
        models = [snapshot.facts[job.id].model for job in jobs]
        goodput_JC = self._goodput.evaluate(models, common.columns(options))
        possible_JC = np.isfinite(goodput_JC) & (goodput_JC > 0)
        sizes = {node.gpus for node in snapshot.nodes}
        odd_C = np.array([not common.is_regular(option, sizes) for option in options], dtype=np.bool_)
        open_to: dict[tuple[object, ...], NDArray[np.bool_]] = {}
        for row, job in enumerate(jobs):
            access = (job.partitions, job.reservation, job.nodes)
            if access not in open_to:
                there = common.configurations(open_nodes(snapshot.nodes, job), {option.gpus for option in options})
                open_to[access] = np.array([option in set(there) for option in options], dtype=np.bool_)
            allowed_C = np.array([common.allowed(job, option) for option in options], dtype=np.bool_) & open_to[access]
            held = job.running_as
            if job.spec.min_gpus < job.spec.max_gpus:
                allowed_C &= ~odd_C | np.array([option == held for option in options], dtype=np.bool_)
            possible_JC[row] &= allowed_C
            ran_on = snapshot.facts[job.id].largest_run_gpus
            if ran_on is not None and possible_JC[row].any():
                gpus_C = np.array([option.gpus for option in options])
                most = max(GROWTH * max(ran_on, held.gpus if held else 0), int(gpus_C[possible_JC[row]].min()))
                possible_JC[row] &= gpus_C <= most
        slowest_J = np.where(possible_JC, goodput_JC, np.inf).min(axis=1, initial=np.inf)
        speedup_JC: FloatArray = np.where(possible_JC, goodput_JC, 0.0) / slowest_J[:, None]
        return speedup_JC

    def _scores(self, snapshot: Snapshot, jobs: list[Job], speedup_JC: FloatArray, held_J: IntArray) -> FloatArray:
        """What each entry adds to the fitness, J x (C + 1); -inf where the job cannot have it. Higher is better."""
        p = self._settings.fairness_p
        factor_J = restart_factor(
            [max(snapshot.time_s - job.submit_s, 0.0) for job in jobs],
            [job.restarts for job in jobs],
            [snapshot.facts[job.id].restart_cost_s for job in jobs],
        )
        factor_J[held_J == speedup_JC.shape[1]] = 1.0
        stays_JC = held_J[:, None] == np.arange(speedup_JC.shape[1])
        worth_JC = np.where(stays_JC, 1.0, factor_J[:, None]) * speedup_JC
        worth_JC = np.append(worth_JC, np.zeros((len(jobs), 1)), axis=1) + FLOOR
        # A power mean grows with the sum of the powers, or shrinks if p < 0.
        score_JC: FloatArray = np.log(worth_JC) if p == 0 else np.sign(p) * worth_JC**p
        score_JC *= np.array([job.weight for job in jobs])[:, None]
        score_JC[:, :-1][speedup_JC == 0] = -np.inf
        return score_JC

    def _explained(
        self,
        snapshot: Snapshot,
        pins: dict[JobId, Placement],
        placements: dict[JobId, Placement],
        speedups: dict[JobId, FloatArray],
        options: list[Configuration],
    ) -> Plan:
        assignments: dict[JobId, Assignment] = {}
        waiting: dict[JobId, Reason] = {}
        for job in snapshot.jobs:
            if job.id in pins:
                assignments[job.id] = common.pinned_assignment(job, pins[job.id], snapshot)
            elif (where := placements.get(job.id)) is not None:
                speedup = speedups[job.id][options.index(where.configuration)]
                reason = common.given(job, where, f"about {times(speedup)} as fast as on one GPU of its slowest type")
                assignments[job.id] = common.assign(job, where, reason, snapshot)
            elif not speedups[job.id].any():
                waiting[job.id] = never_fits(job, snapshot.nodes, common.configurations(snapshot.nodes))
            else:
                waiting[job.id] = common.others_have_them(snapshot, job)
        return Plan(snapshot.round, assignments, waiting)


def search(
    score_JC: FloatArray,
    gpus_C: IntArray,
    type_C: IntArray,
    capacity_T: IntArray,
    held_J: IntArray,
    rng: np.random.Generator,
    *,
    population: int,
    generations: int,
) -> IntArray:
    """Search for the fittest choice of a configuration for each job within the capacity of each type.

    Args:
        score_JC: what a choice adds to the fitness; -inf: the job cannot have it. The last column is "none".
        gpus_C: GPUs of each configuration; 0 for "none".
        type_C: index of each configuration's GPU type.
        capacity_T: GPUs of each type.
        held_J: column of the configuration that each job holds now; the last column: none.
        rng: the source of the random numbers.
        population: number of allocations in a population.
        generations: number of generations.

    Returns:
        The column that each job gets, J.
    """
    jobs, none = len(score_JC), score_JC.shape[1] - 1
    held_J = np.where(np.isfinite(score_JC[np.arange(jobs), held_J]), held_J, none)
    if not jobs or not none:
        return np.full(jobs, none)
    possible_JC = np.isfinite(score_JC)
    count_J = possible_JC.sum(axis=1)
    possible_first_JC = np.argsort(~possible_JC, axis=1, kind="stable")
    smaller_JTG = _smaller(score_JC, gpus_C, type_C, len(capacity_T))
    row_J = np.arange(jobs)

    def repaired(choice_PJ: IntArray) -> IntArray:
        """Serve the jobs in a random order. A job that finds too few GPUs left gets the best entry that still fits."""
        left_PT = np.tile(capacity_T, (len(choice_PJ), 1))
        row_P = np.arange(len(choice_PJ))
        for job_P in np.argsort(rng.random(choice_PJ.shape), axis=1).T:
            choice_P = choice_PJ[row_P, job_P]
            type_P = type_C[choice_P]
            left_P = left_PT[row_P, type_P]
            most_P = np.minimum(left_P, smaller_JTG.shape[2] - 1)
            choice_P = np.where(gpus_C[choice_P] <= left_P, choice_P, smaller_JTG[job_P, type_P, most_P])
            choice_PJ[row_P, job_P] = choice_P
            left_PT[row_P, type_P] -= gpus_C[choice_P]
        return choice_PJ

    def fitness(choice_PJ: IntArray) -> FloatArray:
        total_P: FloatArray = score_JC[row_J, choice_PJ].sum(axis=1)
        return total_P

    def at_random() -> IntArray:
        pick_PJ = (rng.random((population, jobs)) * count_J).astype(np.int64)
        choice_PJ: IntArray = possible_first_JC[row_J, pick_PJ]
        return choice_PJ

    pool_PJ = at_random()
    pool_PJ[0] = held_J
    pool_PJ = repaired(pool_PJ)
    fitness_P = fitness(pool_PJ)
    for _ in range(generations):
        rivals = rng.integers(len(pool_PJ), size=(2, 2, population))
        parents = np.where(fitness_P[rivals[0]] >= fitness_P[rivals[1]], rivals[0], rivals[1])
        cut_P = rng.integers(jobs + 1, size=population)
        child_PJ = np.where(row_J < cut_P[:, None], pool_PJ[parents[0]], pool_PJ[parents[1]])
        chance_PJ = rng.random(child_PJ.shape)
        child_PJ = np.where(chance_PJ < RETURN, held_J, child_PJ)
        child_PJ = np.where(chance_PJ > 1 - LEAVE, none, child_PJ)
        child_PJ = np.where(rng.random(child_PJ.shape) < 1 / jobs, at_random(), child_PJ)
        pool_PJ = np.unique(np.concatenate([pool_PJ, repaired(child_PJ)]), axis=0)
        fitness_P = fitness(pool_PJ)
        fittest = np.argsort(-fitness_P, kind="stable")[:population]
        pool_PJ, fitness_P = pool_PJ[fittest], fitness_P[fittest]
    fittest_J: IntArray = pool_PJ[np.argmax(fitness_P)]
    return fittest_J


def _smaller(score_JC: FloatArray, gpus_C: IntArray, type_C: IntArray, types: int) -> IntArray:
    """Each job's best configuration of each type with at most g GPUs, J x T x G; "none" if it has no such configuration."""
    none = score_JC.shape[1] - 1
    best_JTG = np.full((len(score_JC), types, int(gpus_C.max()) + 1), none)
    for c in np.argsort(gpus_C[:-1], kind="stable").tolist():
        now_JG = best_JTG[:, type_C[c], gpus_C[c] :]
        better_J = score_JC[:, c] > np.take_along_axis(score_JC, now_JG[:, :1], axis=1)[:, 0]
        now_JG[better_J] = c
    return best_JTG


def _options(snapshot: Snapshot, jobs: list[Job]) -> list[Configuration]:
    """Sia's configurations, the sizes that only some rigid job asks for, and the configurations that running jobs hold."""
    exact = {job.spec.min_gpus for job in jobs if job.spec.min_gpus == job.spec.max_gpus}
    most = max((job.spec.max_gpus for job in jobs), default=1)
    shared = common.configurations(snapshot.nodes, exact, most)
    held = {held for job in jobs if (held := job.running_as) is not None}
    return [*shared, *sorted(held - set(shared))]
