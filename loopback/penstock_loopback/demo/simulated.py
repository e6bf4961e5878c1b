"""The demo's jobs on the simulated cluster: for machines without Slurm, and to compare the simulation with a real Slurm.

All times are real seconds of the demo on Slurm. Work is divided by the time scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_loopback.demo.jobs import DEMO_ROUND_S, NODES, TIME_SCALE, DemoJob, draw
from penstock_loopback.demo.site import RESTART_COST_S, ROUND_S
from penstock_profiles.families import Families
from penstock_profiles.wire import Report
from penstock_scheduler.api.ports import ClusterParts, Trigger
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import JobSpec, Outcome
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.drawing.history import History
from penstock_scheduler.rounds.loop import RoundLoop, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import OnEvent, Period
from penstock_scheduler.simulator import (
    EstimatedJob,
    Latencies,
    SimulatedClock,
    SimulatedCluster,
    SimulatedJob,
    nodes_from_spec,
)
from penstock_scheduler.simulator.figures import history

END_OF_TIME_S = 50_000.0
"""A simulation that has not ended by this time never will."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take on the simulated site, in real seconds."""

    time_scale: float = TIME_SCALE
    """Emulated seconds in one real second."""
    round_s: float = ROUND_S
    tick_s: float = 0.5
    start_s: float = RESTART_COST_S
    """From the order to start a job until it trains."""
    latencies: Latencies = field(default_factory=Latencies)


def simulate(seed: int, families: Families) -> list[History]:
    """The two histories of the demo, without Slurm."""
    jobs, arrivals_s = zip(*draw(seed, families), strict=True)
    pace = Pace(round_s=DEMO_ROUND_S)
    note = "no processes ran: progress is computed from the models"
    return [
        simulate_site(f"{title} (simulated)", note, policy, jobs, arrivals_s, NODES, pace, families)[0]
        for title, policy in (("Under Penstock", "sia"), ("Under plain Slurm", "slurm-backfill"))
    ]


def simulate_site(
    title: str,
    note: str,
    policy_name: str,
    jobs: Sequence[DemoJob],
    arrivals_s: Sequence[float],
    spec: str,
    pace: Pace,
    families: Families,
) -> tuple[History, MemoryStore]:
    """The history of `jobs`, and the store with its rounds.

    Under `sia` each job has its job spec, and rounds are periodic. Under other policies it has its plain request.
    """
    plain = policy_name != "sia"
    clock = SimulatedClock()
    nodes = nodes_from_spec(spec)
    simulated = [
        _job(number, job, at_s, pace, families, plain=plain)
        for number, (job, at_s) in enumerate(zip(jobs, arrivals_s, strict=True))
    ]
    cluster = SimulatedCluster(nodes, simulated, clock, latencies=pace.latencies)
    policy, choice = make_policy(policy_name)
    models, store = SpecModels(families, RESTART_COST_S), MemoryStore()
    trigger: Trigger = OnEvent() if plain else Period(pace.round_s)
    parts = ClusterParts(cluster)
    loop = RoundLoop(parts, clock, store, RoundTiming(trigger, pace.tick_s), policy, models, choice)
    loop.run(lambda: cluster.finished or clock.now_s() > END_OF_TIME_S)
    cluster.close()
    return history(nodes, simulated, clock.now_s(), title, note), store


def _job(number: int, job: DemoJob, at_s: float, pace: Pace, families: Families, *, plain: bool) -> SimulatedJob:
    gpu_type, nodes, gpus = job.plain
    fixed: dict[str, object] = {"min_gpus": nodes * gpus, "max_gpus": nodes * gpus, "preemptible": False}
    fixed |= {"adaptivity": "fixed", "gpu_types": [gpu_type]} if gpu_type else {}
    spec = job.spec_fields() | fixed if plain else job.spec_fields()
    truth = EstimatedJob(job.estimator(families), job.work(families) / pace.time_scale, pace.start_s)
    limit_s = None if job.limit_min is None or not plain else job.limit_min * 60.0
    return SimulatedJob(str(number + 1), job.name, JobSpec.model_validate(spec), truth, at_s, time_limit_s=limit_s)


class MemoryStore:
    """Keeps everything, in order."""

    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []
        self.outcomes: list[tuple[float, Outcome]] = []
        self.reports: list[Report] = []

    def last_round(self) -> RoundRecord | None:
        """The newest round."""
        return self.rounds[-1] if self.rounds else None

    def save_round(self, record: RoundRecord) -> None:
        """Keep a round."""
        self.rounds.append(record)

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append outcomes."""
        self.outcomes.extend((time_s, outcome) for outcome in outcomes)

    def add_reports(self, reports: Sequence[Report]) -> None:
        """Append reports."""
        self.reports.extend(reports)
