"""A small cluster in rounds, on which one user floods others: for `test_starving`.

It knows what floods need and the simulator has not: weights by fair share, jobs that have not shown that they can save, and
jobs that are submitted again at once. A round is decided every `ROUND_S`, and what it decides happens at once; a job that is
moved stands still for `RESTART_S`. All jobs run at the speed of their GPUs, whatever their models claim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from penstock_profiles.estimators import AnyEstimator, LinearEstimator
from penstock_scheduler.model import Job, JobFacts, Phase, Plan, Snapshot, StopCode
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator import nodes_from_spec

ROUND_S = 60.0
RESTART_S = 30.0


@dataclasses.dataclass
class Lived:
    """A job and what it still needs."""

    job: Job
    left_gpu_s: float
    saves: bool = True
    again: int = 0
    """How often it is submitted again when it ends."""
    model: AnyEstimator = dataclasses.field(default_factory=LinearEstimator)
    attained_gpu_s: float = 0.0
    ready_s: float = 0.0
    without_since_s: float = 0.0
    longest_wait_s: float = 0.0
    stops: int = 0

    def waits_until(self, now_s: float) -> None:
        """It has had no GPUs until now."""
        self.longest_wait_s = max(self.longest_wait_s, now_s - self.without_since_s)


class Flood:
    """The cluster, and the jobs on it.

    Args:
        nodes: a spec of nodes, such as t4:2x8.
        jobs: all jobs, also those that are submitted later.
        policy: decides.
        settings: of the policy.
    """

    def __init__(
        self, nodes: str, jobs: list[Lived], policy: str, settings: Mapping[str, object] | None = None
    ) -> None:
        self._nodes = nodes_from_spec(nodes)
        self.jobs = {lived.job.id: lived for lived in jobs}
        for lived in jobs:
            lived.without_since_s = lived.job.submit_s
        self._policy = make_policy(PolicyChoice(name=policy, settings={policy: dict(settings or {})}))[0]
        self._round = 0
        self.now_s = 0.0
        self.over: list[Lived] = []
        self.stop_texts: list[tuple[Job, StopCode, str]] = []

    def run(self, until_s: float) -> None:
        """Live until then, or until all jobs are over."""
        while self.now_s < until_s and self.jobs:
            here = {name: lived for name, lived in self.jobs.items() if lived.job.submit_s <= self.now_s}
            self._apply(here, self._policy.decide(self.snapshot(here)))
            self.now_s += ROUND_S
            self._live()
        for lived in self.jobs.values():
            if lived.job.phase is Phase.QUEUED and lived.job.submit_s <= self.now_s:
                lived.waits_until(self.now_s)

    def snapshot(self, here: Mapping[str, Lived]) -> Snapshot:
        """What the policy sees of these jobs."""
        self._round += 1
        return Snapshot(
            self._round,
            self.now_s,
            self._nodes,
            tuple(lived.job for lived in here.values()),
            {
                name: JobFacts(lived.model, RESTART_S, saves=lived.saves, attained_gpu_s={"t4": lived.attained_gpu_s})
                for name, lived in here.items()
            },
        )

    def _apply(self, here: Mapping[str, Lived], plan: Plan) -> None:
        for name, lived in here.items():
            job, given = lived.job, plan.assignments.get(name)
            runs = job.phase is Phase.RUNNING
            if runs and given is not None and job.allocation == given.placement:
                continue
            if runs:
                assert job.movable, f"job {name} may not be stopped"
                assert lived.saves, f"job {name} would lose all its work"
                lived.stops += 1
                self.stop_texts.append((job, plan.stops[name].code, plan.stops[name].text))
            if given is None:
                if runs:
                    lived.without_since_s = self.now_s
                    job = dataclasses.replace(
                        job,
                        phase=Phase.QUEUED,
                        allocation=None,
                        started_s=None,
                        stopped_s=self.now_s,
                        restarts=job.restarts + 1,
                    )
            else:
                if not runs:
                    lived.waits_until(self.now_s)
                lived.ready_s = self.now_s + (RESTART_S if runs or job.restarts else 0.0)
                job = dataclasses.replace(
                    job,
                    phase=Phase.RUNNING,
                    allocation=given.placement,
                    started_s=self.now_s,
                    restarts=job.restarts + (1 if runs else 0),
                )
            lived.job = job
        held = plan.gpus_held()
        assert all(held[node.name] <= node.gpus for node in self._nodes)

    def _live(self) -> None:
        for name, lived in list(self.jobs.items()):
            where = lived.job.allocation
            if where is None:
                continue
            lived.attained_gpu_s += ROUND_S * where.gpus
            lived.left_gpu_s -= max(self.now_s - max(lived.ready_s, self.now_s - ROUND_S), 0.0) * where.gpus
            if lived.left_gpu_s <= 0:
                del self.jobs[name]
                self.over.append(lived)
                if lived.again:
                    fresh = dataclasses.replace(
                        lived.job,
                        id=f"{name}r",
                        phase=Phase.QUEUED,
                        submit_s=self.now_s,
                        allocation=None,
                        started_s=None,
                        stopped_s=None,
                        restarts=0,
                    )
                    next_one = Lived(fresh, 120.0 * where.gpus, lived.saves, lived.again - 1, lived.model)
                    next_one.without_since_s = self.now_s
                    self.jobs[fresh.id] = next_one
