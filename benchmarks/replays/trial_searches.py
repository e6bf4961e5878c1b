"""Gandiva's AutoML experiment: how soon a search finds a configuration that is good enough, and how many it has tried by then.

A list of configurations has one that qualifies, at a given place. Run to completion, they train one after another on each GPU.
With early results (`sharing.groups`), trials replace one another after each time slice. `by_early_results` models only that
decision, and a change of GPUs costs a second of training. `by_policy` runs the policy `gandiva` in the round loop, as on a
cluster. A trial's metric approaches its final value as 1 - exp(-t / tau). All tau, and the final values of the trials that do
not qualify, are random. Trials of one search train the same model, so their tau are similar: 0.08 to 0.16 of the training.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock_profiles.colocation import Colocation
from penstock_scheduler.model import JobId
from penstock_scheduler.rounds.sharing.groups import GroupSettings, TrialSeen, judge
from penstock_scheduler.simulator.agents import SharingKind, SimulatedAgents
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.run import RESTART_COST_S, Simulation, prepare, simulate_policy
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob, rigid_spec

TARGET = 0.9
"""Metric that is good enough."""

NODE_GPUS = 4


@dataclass(frozen=True, slots=True)
class Configuration:
    """The learning curve of one trial."""

    final: float
    tau_s: float
    training_s: float
    """Time after which it ends."""
    noise: tuple[float, ...] = ()
    """Noise of each slice's result."""

    def metric(self, trained_s: float, slices: int) -> float:
        """The metric that it reports after this much training."""
        noise = self.noise[slices % len(self.noise)] if self.noise else 0.0
        return self.final * (1 - math.exp(-trained_s / self.tau_s)) + noise


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    found_s: float
    """When a trial first reported at least the target."""
    seen: int
    """Number of configurations that had begun to train by then."""


def configurations(
    count: int,
    at: float,
    source: random.Random,
    training_s: float = 7200.0,
    tau: tuple[float, float] = (0.08, 0.16),
) -> list[Configuration]:
    """A list of configurations with one that qualifies.

    Args:
        count: length of the list.
        at: place of the one that qualifies; 0.25 is the 25th percentile.
        source: of random numbers.
        training_s: duration of each training.
        tau: smallest and largest tau, as parts of that.
    """
    made = []
    for index in range(count):
        good = index == min(int(at * count), count - 1)
        final = 0.95 if good else source.uniform(0.1, 0.85)
        noise = tuple(source.gauss(0.0, 0.01) for _ in range(16))
        made.append(Configuration(final, source.uniform(*tau) * training_s, training_s, noise))
    return made


def run_to_completion(trials: Sequence[Configuration], gpus: int, slice_s: float = 60.0) -> Found:
    """One after another, in the order of the list."""
    free_s = [0.0] * gpus
    starts_s = []
    found_s = math.inf
    for trial in trials:
        start_s = min(free_s)
        free_s[free_s.index(start_s)] = start_s + trial.training_s
        starts_s.append(start_s)
        for slices in range(1, int(trial.training_s / slice_s) + 1):
            if trial.metric(slices * slice_s, slices) >= TARGET:
                found_s = min(found_s, start_s + slices * slice_s)
                break
    return Found(found_s, sum(start_s < found_s for start_s in starts_s))


def by_early_results(
    trials: Sequence[Configuration],
    gpus: int,
    settings: GroupSettings,
    slice_s: float = 60.0,
    switch_s: float = 1.0,
) -> Found:
    """The search with trials that `judge` lets continue, slice by slice."""
    jobs = {JobId(f"t{index:04d}"): trial for index, trial in enumerate(trials)}
    trained_s = dict.fromkeys(jobs, 0.0)
    results: dict[JobId, tuple[tuple[float, float], ...]] = dict.fromkeys(jobs, ())
    running: set[JobId] = set()
    now_s = 0.0
    while True:
        seen = [
            TrialSeen(job, trained_s[job], results[job])
            for job, trial in jobs.items()
            if trained_s[job] < trial.training_s
        ]
        chosen = judge(seen, settings).order[:gpus]
        if not chosen:
            return Found(math.inf, len(jobs))
        now_s += slice_s
        for job in chosen:
            trained_s[job] += slice_s - (0.0 if job in running else switch_s)
            metric = jobs[job].metric(trained_s[job], len(results[job]))
            results[job] = (*results[job], (trained_s[job], metric))
            if metric >= TARGET:
                return Found(now_s, sum(seconds > 0 for seconds in trained_s.values()))
        running = set(chosen)


class _Over(Exception):
    """A trial has reported the target."""


def by_policy(
    trials: Sequence[Configuration], gpus: int, settings: Mapping[str, object] | None = None, slice_s: float = 60.0
) -> Found:
    """The policy `gandiva` on nodes of 4 GPUs of the simulated cluster, by the round loop and its agents.

    A trial that rests releases its GPU, and starts again to continue. In each round, a trial reports the metric for its running
    time, less the duration of its starts.

    Args:
        trials: all are submitted at the beginning.
        gpus: a multiple of 4.
        settings: of the policy; None: its defaults.
        slice_s: time for which a trial reports the same metric.
    """
    known = {JobId(f"t{index:04d}"): trial for index, trial in enumerate(trials)}
    spec = rigid_spec(1).model_copy(update={"trial_group": "search"})
    workload = Workload(
        "search", tuple(WorkloadJob(name, 0.0, 1, spec, duration_s=trial.training_s) for name, trial in known.items())
    )
    jobs: dict[JobId, SimulatedJob] = {}
    now_s = 0.0

    def metric(name: JobId, ran_s: float) -> float:
        trained_s = max(ran_s - RESTART_COST_S * jobs[name].starts, 0.0)
        return known[name].metric(trained_s, int(trained_s / slice_s))

    agents = SimulatedAgents(
        dict.fromkeys(known, SharingKind("trial")),
        Colocation(),
        metrics={name: partial(metric, name) for name in known},
    )

    def observe(simulation: Simulation) -> None:
        nonlocal now_s
        jobs.update((job.id, job) for job in simulation.jobs)
        now_s = simulation.ticks[-1].time_s
        if any(results[-1][1] >= TARGET for results in agents.results.values()):
            raise _Over

    scenario = prepare(nodes_from_spec(f"v100:{gpus // NODE_GPUS}x{NODE_GPUS}"), workload)
    try:
        simulate_policy(scenario, "gandiva", settings, on_tick=observe, agents=agents)
    except _Over:
        return Found(now_s, sum(seconds > 0 for seconds in agents.ran_s.values()))
    return Found(math.inf, len(known))
