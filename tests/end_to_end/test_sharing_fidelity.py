"""The same jobs share GPUs on a real Slurm with real agents and in the simulator: who ran where, and when each job moved.

No figure of the simulator says more than this comparison, so it has what the two do not share: starts that take time, processes
that are suspended and resumed, checkpoints. `interval_s` and the time slices are one piece of code for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.colocation import Colocation
from penstock_profiles.estimators import TableEstimator
from penstock_profiles.families import load_families
from penstock_profiles.gpus import load_gpus
from penstock_profiles.wire import Observation
from penstock_scheduler.api.ports import ClusterParts
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.loop import RoundLoop, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import (
    EstimatedJob,
    Latencies,
    SimulatedClock,
    SimulatedCluster,
    SimulatedJob,
    nodes_from_spec,
)
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind, SimulatedAgents
from penstock_scheduler.store.sql import open_store
from tests.constants import constants
from tests.end_to_end.site import Site

NODES = "t4:2x1"
RATE = 50.0
"""Samples and steps per second, so that a short slice has enough steps to be measured."""
RATES = {"t4": {"1": RATE}}
START_S = 3.0
"""From the order to start a job until it trains, on a loopback Slurm."""


@dataclass(frozen=True)
class Arrival:
    """A job: when it comes, and the seconds that it takes alone, as multiples of `Scene.unit_s`."""

    name: str
    at: float
    work: float


ARRIVALS = (Arrival("a", 0.0, 5.5), Arrival("b", 0.4, 1.2), Arrival("c", 1.2, 30.0), Arrival("d", 5.0, 30.0))
"""b ends soon, so its GPU is free while a and c have time slices on the other one. a has not rested for `interval_s` then."""


@dataclass
class Scene:
    """The scenario at a pace."""

    unit_s: float
    end: float = 12.0
    moves: list[tuple[str, str]] = field(default_factory=list)
    """Job and node, in the order of the rounds."""
    times_s: list[float] = field(default_factory=list)
    trained_s: dict[str, float] = field(default_factory=dict)
    """Seconds of training alone that each job has done in the end."""
    runs: dict[str, int] = field(default_factory=dict)
    """How often each job began."""

    @property
    def settings(self) -> dict[str, object]:
        """Of `gandiva`: no packs, so that nothing depends on a measurement."""
        return {"slice_s": 0.4 * self.unit_s, "max_height": 2.0}

    @property
    def constants(self) -> dict[str, dict[str, object]]:
        """Constants of it for this test."""
        return {"policy.gandiva": {"interval_s": 3.0 * self.unit_s, "pack_interval_s": 1e6}}

    def read(self, rounds: Iterable[RoundRecord], names: Mapping[str, str], begun_s: float) -> None:
        """Take the moves from the rounds: each new node of a job."""
        where: dict[str, str] = {}
        for record in rounds:
            for job, assignment in sorted(record.plan.assignments.items(), key=lambda item: names[item[0]]):
                (node,) = assignment.placement.nodes
                if where.get(job) != node:
                    where[job] = node
                    self.moves.append((names[job], node))
                    self.times_s.append(record.snapshot.time_s - begun_s)


def simulated(unit_s: float) -> Scene:
    """The scenario in the simulator."""
    scene = Scene(unit_s)
    clock, store = SimulatedClock(), MemoryStore()
    spec = JobSpec.model_validate({"max_gpus": 1, "goodput_table": RATES, "checkpointable": True})
    truth = {
        each.name: EstimatedJob(TableEstimator({"t4": {1: RATE}}), RATE * each.work * unit_s, START_S)
        for each in ARRIVALS
    }
    jobs = [SimulatedJob(each.name, each.name, spec, truth[each.name], each.at * unit_s) for each in ARRIVALS]
    agents = SimulatedAgents(
        {each.name: SharingKind(each.name, 1.0) for each in ARRIVALS}, Colocation({}), AgentSettings(switch_s=0.5)
    )
    latencies = Latencies(launch_s=1.0, leave_s=2.0, lost_s=0.5, pause_s=0.5, exit_s=0.2)
    cluster = SimulatedCluster(nodes_from_spec(NODES), jobs, clock, latencies=latencies, agents=agents)
    policy, choice = make_policy("gandiva", scene.settings)
    models = SpecModels(load_families(), START_S, load_gpus())
    parts = ClusterParts(cluster, agents=cluster)
    loop = RoundLoop(parts, clock, store, RoundTiming(Period(1.0), 0.2), policy, models, choice)
    with constants(scene.constants):
        loop.run(lambda: clock.now_s() >= scene.end * unit_s)
    cluster.close()
    scene.read(store.rounds, {each.name: each.name for each in ARRIVALS}, 0.0)
    scene.trained_s = {job.name: job.progress / RATE for job in jobs}
    scene.runs = {job.name: len(job.runs) for job in jobs}
    return scene


def lived(site: Site, unit_s: float) -> Scene:
    """The scenario on a real Slurm."""
    scene = Scene(unit_s)
    site.extra = "\n[policy.gandiva]\n" + "".join(f"{key} = {value}\n" for key, value in scene.settings.items())
    site.constants = scene.constants
    site.start()
    begun_s, names = time.time(), dict[str, str]()
    for each in ARRIVALS:
        time.sleep(max(begun_s + each.at * unit_s - time.time(), 0.0))
        names[site.submit(each.work * unit_s * RATE, rates=RATES)] = each.name
    time.sleep(max(begun_s + scene.end * unit_s - time.time(), 0.0))
    for job, name in names.items():
        seen = [report.body.progress for report in site.reports(job) if isinstance(report.body, Observation)]
        scene.trained_s[name] = max(seen, default=0.0) / RATE
        scene.runs[name] = len(site.starts(job))
    site.slurm.command("scancel", *names)
    store = open_store(site.state)
    rounds = [store.round(number) for number in store.round_numbers()]
    scene.read(
        (each for each in rounds if each.snapshot.time_s <= begun_s + scene.end * unit_s),
        names,
        begun_s,
    )
    return scene


def test_simulated_jobs_rest_for_the_interval() -> None:
    """a begins at once and has a free GPU to move to from 1.1 units on, but moves only 3 units after its start."""
    scene = simulated(10.0)
    print(scene)
    a, again = [at_s for (job, _), at_s in zip(scene.moves, scene.times_s, strict=True) if job == "a"]
    assert again - a >= 30.0


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.parametrize("unit_s", [8.0, 50.0])
def test_who_runs_where_and_when_is_the_same_on_a_real_slurm(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], unit_s: float
) -> None:
    """For a quiet machine: with starts that take 10 s, moves come later than in the simulator.

    `interval_s` holds in both, and a job is as far in both in the end.

    A job begins again only where it goes to another node, not when the time slices around it begin or end.
    """
    slurm = make_loopback(NODES, agents=True)
    site = make_site(slurm, policy="gandiva", round_s=1.0)
    site.spool = slurm.spool
    site.slurm_settings |= {"agents": True}
    expected = simulated(unit_s)
    real = lived(site, unit_s)
    print(f"simulated: {expected}\nreal: {real}")
    assert real.moves == expected.moves, site.tail()
    late_s = dict.fromkeys(expected.trained_s, 0.0)
    for (job, node), at_s, its_s in zip(real.moves, real.times_s, expected.times_s, strict=True):
        late_s[job] = max(late_s[job], abs(at_s - its_s))
        assert late_s[job] <= 5.0 + 0.05 * its_s, f"{job} goes to {node} after {at_s:.1f} s, simulated {its_s:.1f} s"
    assert real.runs == expected.runs == {"a": 2, "b": 1, "c": 2, "d": 1}
    for name, trained_s in expected.trained_s.items():
        assert abs(real.trained_s[name] - trained_s) <= 6.0 + late_s[name] + 0.1 * trained_s, name
