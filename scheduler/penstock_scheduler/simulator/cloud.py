"""A cloud in a simulation: the burst manager as the daemon runs it, over a simulated provider, with the simulated cluster's jobs.

Here is what surrounds the manager: instances that boot, the cluster's cloud nodes, a store in memory, and the times at which
something happens, so that the clock can jump to them. What leaves when, for how much, and what comes back, the manager and the
policy decide by the same code as in life.

A job that has no `--runtime` counts as if its user had said its recorded duration. The provider has any number of instances,
but only as many can be used as the cluster has cloud nodes. An instance works `[cloud] boot_s` after its order, and later by the
time that the job's data takes; the job begins when Slurm looks next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.ports import Clock, CloudNode, Trigger
from penstock_scheduler.burst.deciding.choices import leaves_at_once, leaves_s, may_leave
from penstock_scheduler.burst.deciding.ledger import Caps, CloudBudgets
from penstock_scheduler.burst.manager.facts import LEAVE_S
from penstock_scheduler.burst.manager.manager import BurstManager
from penstock_scheduler.burst.manager.places import Places
from penstock_scheduler.burst.manager.provider import Machine
from penstock_scheduler.burst.manager.runs import BurstRun
from penstock_scheduler.burst.manager.settings import BurstSettings
from penstock_scheduler.burst.manager.share import NodeRequest, SharedFolder
from penstock_scheduler.model import ClusterState, JobId, JobSpec, Outcome, Phase, Placement
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.model.waiting import Averages
from penstock_scheduler.simulator.cloud_place import Simulated
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.workloads import Workload
from penstock_scheduler.store.cloud_runs import CloudRunRow

SITE = UUID("00000000-0000-4000-8000-000000000000")
TICK_S = 1.0
"""Seconds between two ticks: the daemon's default."""

ROUND_S = 60.0
"""Longest time between two rounds, s: the daemon's default. A wait that is over is seen by the next round."""

BEGINS_EVERY_S = 30.0
"""Seconds between two looks of slurmctld for jobs whose nodes have booted (its PERIODIC_TIMEOUT)."""

ENDS_S = 2.0
"""Seconds from the order to end an instance until a listing has it as ended: 2.1 on average over 65 runs on moto, with a real
Slurm (docs/measurements/bursting.md)."""

ROOM = 8
"""Free cloud nodes of each kind: as many as the largest gang has."""


@dataclass(frozen=True, slots=True)
class CloudSpec:
    """A cloud behind a simulated site.

    Attributes:
        settings: section `[cloud]`, as the daemon would have it.
        gpu_type: GPU type of its instances.
        usd_per_gpu_h: price of a GPU-hour, US dollars.
        sizes: GPUs of each kind of instance.
        tick_s: seconds between two ticks of the daemon (`[daemon] tick_s`), > 0.
        nodes: cloud nodes of each kind, >= 1, or None without a limit.
        suspend_s: Slurm's SuspendTimeout: seconds after a run until its nodes can be used again.
        begins_every_s: seconds between two times at which jobs begin on nodes that have booted, > 0.
        ends_s: seconds from the order to end an instance until the provider says that it has ended. They are not billed.
    """

    settings: BurstSettings
    gpu_type: str
    usd_per_gpu_h: float
    sizes: tuple[int, ...]
    tick_s: float = TICK_S
    nodes: int | None = None
    suspend_s: float = 0.0
    begins_every_s: float = BEGINS_EVERY_S
    ends_s: float = ENDS_S

    def machines(self) -> Iterator[Machine]:
        """The kinds of instances."""
        for gpus in self.sizes:
            usd_per_h = gpus * self.usd_per_gpu_h
            yield Machine(f"{gpus}-gpu", "on-demand", self.gpu_type, gpus, gpus, 1, usd_per_h)


def averages_of(workload: Workload) -> Averages:
    """Mean running time and GPUs of a workload's jobs. Jobs without a recorded duration count with an hour."""
    jobs = workload.jobs
    hours = sum(1.0 if job.duration_s is None else job.duration_s / 3600 for job in jobs)
    return Averages(max(len(jobs), 1), hours / max(len(jobs), 1), sum(job.gpus for job in jobs) / max(len(jobs), 1))


def cloud_settings(given: Mapping[str, Any], workload: Workload, **constants: float) -> BurstSettings:
    """Section `[cloud]` of a simulation. What it does not name is the daemon's default, but for the following.

    Every job may leave, the budget has no cap, and the averages are the workload's.
    Raises ValidationError.

    Args:
        given: settings.
        workload: the jobs.
        constants: constants of the burst manager that are others in this simulation, such as `boot_s`.
    """
    mean = averages_of(workload)
    defaults = {
        "site": SITE,
        "name": "simulated",
        "by_default": True,
        "budget": CloudBudgets(site=Caps()),
    }
    others = {"mean_runtime_h": mean.runtime_h, "mean_gpus": mean.gpus, "reconcile_s": 3600.0}
    return BurstSettings.model_validate(defaults | dict(given)).model_copy(update=others | constants)


def spec_in_cloud(spec: JobSpec, wanted: JobSpec, duration_s: float | None) -> JobSpec:
    """A job spec with what concerns the cloud.

    Args:
        spec: what the policy is shown.
        wanted: what the user asked for.
        duration_s: how long the job takes; None: not known.
    """
    said_s = duration_s if wanted.runtime_s is None else wanted.runtime_s
    return spec.model_copy(
        update={
            "runtime_s": said_s,
            "burst": wanted.burst,
            "burst_budget_usd": wanted.burst_budget_usd,
            "data_size_bytes": wanted.data_size_bytes,
            "checkpoint_every_s": wanted.checkpoint_every_s,
            "preemptible": wanted.preemptible,
        }
    )


class MemoryRunStore:
    """A `RunStore` in memory."""

    def __init__(self) -> None:
        self.lines: list[LedgerLine] = []
        self.ended: list[SimulatedEnd] = []
        self._keys: set[str] = set()
        self._open: dict[str, CloudRunRow] = {}
        self._of_job: dict[JobId, dict[str, CloudRunRow]] = {}
        self._controls: dict[str, Any] = {}

    def cloud_runs(self, *, job: str | None = None) -> list[CloudRunRow]:
        """See `RunStore`."""
        return list(self._open.values() if job is None else self._of_job.get(job, {}).values())

    def save_cloud_run(self, row: CloudRunRow, lines: Sequence[LedgerLine] = ()) -> None:
        """See `RunStore`."""
        self._of_job.setdefault(row.job, {})[row.run] = row
        self._open[row.run] = row
        if row.ended_s is not None:
            del self._open[row.run]
        self.charge(lines)

    def cloud_ledger(self) -> list[LedgerLine]:
        """See `RunStore`."""
        return [line for line in self.lines if line.kind in ("committed", "usd")]

    def charge(self, lines: Sequence[LedgerLine]) -> None:
        """See `RunStore`."""
        new = [line for line in lines if line.key not in self._keys]
        self.lines += new
        self._keys |= {line.key for line in new}

    def control(self, name: str) -> Any:
        """See `RunStore`."""
        return self._controls.get(name)

    def set_control(self, name: str, value: Any) -> None:
        """See `RunStore`."""
        self._controls[name] = value

    def jobs(self, *, states: Sequence[str] = (), limit: int | None = None) -> Sequence[tuple[int, SimulatedEnd]]:
        """See `RunStore`."""
        newest = self.ended if limit is None else self.ended[-limit:]
        return [(number, job) for number, job in reversed(list(enumerate(newest)))]


@dataclass(frozen=True, slots=True)
class SimulatedEnd:
    """A job that has ended, as the recorded history has it."""

    user: str
    name: str
    start_s: float | None
    end_s: float | None
    gpu_seconds: dict[str, float]
    ended: str = "COMPLETED"

    @classmethod
    def of(cls, job: SimulatedJob) -> SimulatedEnd:
        """The record of a job."""
        seconds: dict[str, float] = {}
        for run in job.runs:
            kind = run.placement.gpu_type
            seconds[kind] = seconds.get(kind, 0.0) + run.gpu_seconds
        return cls(job.user, job.name, job.runs[0].start_s if job.runs else None, job.finish_s, seconds)


class NoShare(SharedFolder):
    """A shared folder that nobody reads."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))

    def say_alive(self) -> None:
        """See `SharedFolder`."""

    def requests(self) -> Iterator[NodeRequest]:
        """See `SharedFolder`."""
        return iter(())

    def notices(self, nodes: Sequence[str]) -> list[str]:
        """See `SharedFolder`."""
        return []

    def forget_notices(self, nodes: Sequence[str]) -> None:
        """See `SharedFolder`."""


@dataclass(frozen=True, slots=True)
class CloudUse:
    """What a simulation used of the cloud.

    Attributes:
        usd: US dollars by job.
        gpu_hours: GPU-hours of instances by job, with the time of their boot.
        away: jobs that ran there.
    """

    usd: Mapping[JobId, float]
    gpu_hours: Mapping[JobId, float]
    away: frozenset[JobId]


@dataclass(slots=True)
class _Instances:
    """The cluster's cloud nodes by kind: those that are used, and some that are free."""

    spec: CloudSpec
    used: dict[str, int] = field(default_factory=dict)
    """Node -> its GPUs."""
    free: dict[int, list[str]] = field(default_factory=dict)
    suspended: dict[str, float] = field(default_factory=dict)
    """Used node -> when Slurm lets it be used again."""
    made: int = 0

    def fill(self) -> None:
        for gpus in self.spec.sizes:
            names = self.free.setdefault(gpus, [])
            most = ROOM if self.spec.nodes is None else self.spec.nodes - [*self.used.values()].count(gpus)
            while len(names) < min(most, ROOM):
                names.append(f"cloud-{self.made}")
                self.made += 1

    def release(self, name: str, now_s: float) -> None:
        """Count a used node that no run has any more as free, once Slurm has suspended it."""
        if now_s >= self.suspended.setdefault(name, now_s + self.spec.suspend_s):
            del self.suspended[name]
            self.free[self.used.pop(name)].append(name)


class SimulatedCloud:
    """See the module. It is the cluster's cloud nodes (`ports.CloudNodes`) and has the manager behind `ports.Burst`.

    Args:
        spec: the cloud.
        clock: the simulation's clock.
        seed: for the jitter of pauses.
        store: where runs and ledger are kept; None: in memory.
    """

    partition = "cloud"

    def __init__(self, spec: CloudSpec, clock: Clock, seed: int = 0, store: MemoryRunStore | None = None) -> None:
        self.spec, self._clock = spec, clock
        self.store = MemoryRunStore() if store is None else store
        self.provider = Simulated(str(SITE), spec.machines(), clock.now_s, ends_s=spec.ends_s)
        self.lose: Callable[[Sequence[str]], None] = lambda nodes: None
        """What happens to jobs whose nodes have lost their instance. The cluster sets it."""
        self.held: Callable[[JobId], tuple[Placement, float] | None] = lambda job: None
        """What a job holds, and when it begins to work there. The cluster sets it."""
        self._nodes = _Instances(spec)
        self._nodes.fill()
        self._next_leave_s = math.inf
        self._outcomes: tuple[Outcome, ...] = ()
        self._look_again = False
        rng = random.Random(seed)  # noqa: S311
        self.manager = BurstManager(
            Places([self.provider]), spec.settings, self.store, clock, self, rng, share=NoShare()
        )

    # --- the cluster's cloud nodes

    def cluster(self) -> str:
        """See `CloudNodes`."""
        return ""

    def nodes(self) -> tuple[CloudNode, ...]:
        """See `CloudNodes`. Nodes that runs have, and a few free ones of each kind."""
        now_s = self._clock.now_s()
        taken = {name: run for run in self.manager.runs for name in run.nodes}
        for gpus, names in self._nodes.free.items():
            for name in [name for name in names if name in taken]:
                names.remove(name)
                self._nodes.used[name] = gpus
        for name in [name for name in self._nodes.used if name not in taken]:
            self._nodes.release(name, now_s)
        self._nodes.fill()
        kinds = [(name, gpus) for gpus, names in self._nodes.free.items() for name in names[:ROOM]]
        kinds += [each for each in self._nodes.used.items() if each[0] not in self._nodes.suspended]
        works = {name: self.works_s(run) <= now_s for name, run in taken.items()}
        kind = self.spec.gpu_type
        return tuple(
            CloudNode(name, kind, gpus, gpus, 1, free=name not in taken, up=works.get(name, False))
            for name, gpus in kinds
        )

    def reason(self, job: JobId) -> str:
        """See `CloudNodes`."""
        return ""

    def jobs_on_instances(self) -> dict[JobId, tuple[str, ...]]:
        """See `CloudNodes`: jobs start only where they are sent."""
        return {}

    def job_of(self, number: str) -> JobId:
        """See `CloudNodes`."""
        return number

    def power_down(self, nodes: Sequence[str]) -> None:
        """See `CloudNodes`."""
        self.lose(nodes)

    def refuse(self, job: JobId, text: str) -> None:
        """See `CloudNodes`: nobody sends a job here but the manager."""

    # --- instances, for the simulated cluster

    def run_at(self, placement: Placement) -> BurstRun | None:
        """The run whose nodes a placement is on; None: they are on site."""
        node = placement.shares[0].node
        return next((run for run in self.manager.runs if node in run.nodes), None)

    def works_s(self, run: BurstRun) -> float:
        """When a job begins on a run's instances; infinite: they are not launched."""
        launched_s = max(math.inf if slot.launched_s is None else slot.launched_s for slot in run.slots)
        looks = (launched_s + self.spec.settings.boot_s + run.data_s) / self.spec.begins_every_s
        return looks if math.isinf(looks) else math.ceil(looks) * self.spec.begins_every_s

    def ended(self, job: SimulatedJob) -> None:
        """A job has ended: the recorded history has it from now on."""
        self.store.ended.append(SimulatedEnd.of(job))

    # --- time

    def on_round(self, record: RoundRecord) -> None:
        """Note when the next job may leave."""
        snapshot = record.snapshot
        cloud = snapshot.cloud
        assert cloud is not None, "a site with a cloud has its state in each round"
        away = {run.job for run in cloud.runs}
        times_s = [
            leaves_s(job, snapshot)
            for job in snapshot.jobs
            if job.phase is Phase.QUEUED
            and job.id not in away
            and may_leave(job, cloud)
            and not leaves_at_once(job, snapshot)
        ]
        star_s = self.spec.settings.t_max_h * 3600 + self.spec.tick_s
        if self.spec.settings.wait == "star-wait":
            times_s += [run.since_s + star_s for run in cloud.runs if not run.ending and run.job not in cloud.returned]
        times_s += self._nodes.suspended.values()
        if times_s:
            times_s.append(self.manager.learns_s)  # all waits are other ones then
        if cloud.runs:
            times_s.append(snapshot.time_s + ROUND_S)
        soonest_s = min((each for each in times_s if each > snapshot.time_s), default=math.inf)
        rounds = math.inf if math.isinf(soonest_s) else math.ceil((soonest_s - snapshot.time_s) / ROUND_S)
        self._next_leave_s = snapshot.time_s + rounds * ROUND_S

    def round_due(self, now_s: float) -> bool:
        """Whether a job may leave since the last round, or come back."""
        return now_s >= self._next_leave_s

    def acted(self, outcomes: tuple[Outcome, ...]) -> None:
        """Note what a tick has done. If it is something new, the next tick sees other jobs, and may decide another round."""
        self._look_again = bool(outcomes) and outcomes != self._outcomes
        self._outcomes = outcomes

    def next_event_s(self) -> float:
        """When the cloud needs the next tick."""
        now_s = self._clock.now_s()
        if self._look_again:
            return now_s + self.spec.tick_s
        # The history is read at the same times as in life: with few ended jobs, one more of them changes all waits.
        return min((self.manager.learns_s, *(self._next_step_s(run, now_s) for run in self.manager.runs)))

    def tick_from(self, time_s: float) -> float:
        """The first tick at or after a time. The daemon sees only then what has happened."""
        if math.isinf(time_s):
            return time_s
        tick_s = math.ceil(time_s / self.spec.tick_s) * self.spec.tick_s
        return tick_s if tick_s >= time_s else tick_s + self.spec.tick_s

    @property
    def next_leave_s(self) -> float:
        """When the next job may leave, as of the newest round; infinite: none will."""
        return self._next_leave_s

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way there, and nothing will be unless something happens on site."""
        return not self.manager.runs and self._next_leave_s == math.inf

    def _next_step_s(self, run: BurstRun, now_s: float) -> float:
        if run.state not in ("booting", "running") or self.manager.is_recalled(run):
            return now_s + self.spec.tick_s
        expires_s = math.inf if run.expires_s is None else run.expires_s
        soon_s = expires_s - min(LEAVE_S, run.lifetime_s / 2)
        held = self.held(run.job)
        if run.state == "running":
            return max(soon_s, now_s + self.spec.tick_s)
        if held is None:
            return now_s + self.spec.tick_s
        return max(min(held[1], soon_s), now_s + self.spec.tick_s)

    # --- the end

    def use(self) -> CloudUse:
        """What it came to. Runs that are still open count with what they have cost so far."""
        usd: dict[JobId, float] = {}
        hours: dict[JobId, float] = {}
        for line in self.store.lines:
            if line.kind == "usd":
                usd[line.job] = usd.get(line.job, 0.0) + line.amount
            if line.kind == "cloud-gpu-seconds":
                hours[line.job] = hours.get(line.job, 0.0) + line.amount / 3600
        now_s = self._clock.now_s()
        for run in self.manager.runs:
            for slot in run.slots:
                if slot.launched_s is not None:
                    seconds = (now_s if slot.ended_s is None else slot.ended_s) - slot.launched_s
                    usd[run.job] = usd.get(run.job, 0.0) + seconds / 3600 * run.usd_per_h
                    hours[run.job] = hours.get(run.job, 0.0) + seconds / 3600 * run.offer.gpus / run.offer.nodes
        return CloudUse(usd, hours, frozenset(hours))


class WithWaits:
    """A trigger for rounds by events: also when a job's wait ends, and when a run begins or ends."""

    def __init__(self, trigger: Trigger, cloud: SimulatedCloud) -> None:
        self._trigger, self._cloud = trigger, cloud

    def due(self, now_s: float, state: ClusterState) -> bool:
        """See `Trigger`."""
        return self._trigger.due(now_s, state) or self._cloud.round_due(now_s)

    def decided(self, now_s: float, state: ClusterState) -> None:
        """See `Trigger`."""
        self._trigger.decided(now_s, state)
