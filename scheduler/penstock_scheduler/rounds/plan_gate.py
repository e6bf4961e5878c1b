"""The plan gate: a last check between deciding a plan and acting on it, so that no fault stops many jobs at once.

A plan is refused if it

1. stops a running job without a reason;
2. empties too much: it stops jobs, gives them nothing, and leaves idle more than a share of the GPUs on which jobs run, within
   one round or within any ten minutes. That is what a fault looks like; a policy that makes room for other jobs, or moves a
   job to GPUs on which it trains faster, leaves no GPU idle. Stops that a person asked for (`StopCode.is_asked_for`: a drain,
   a reservation, the job's user or an admin) do not count;
3. stops a job while the view of the cluster is incomplete: for a while after penstockd has started, or after Slurm or the store
   was away, or after a large part of the cluster vanished at once, as long as nodes or running jobs are missing that were there
   before.

The gate judges outcomes, too: while jobs that were moved hold nothing, no job is moved for a gain (`lost_moves.py`).

What the loop does with a refused plan: every running job keeps what it has, jobs that wait start where GPUs are free, and
admins are told. An admin may approve the stops of a refused round: `penstock plan --approve ROUND`.

`refusals` and `lacks` are pure functions. `PlanGate` remembers what they need from one tick to the next.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from penstock_scheduler.model import ClusterState, Job, JobId, Kept, Phase, Plan, Snapshot, Stop, StopCode
from penstock_scheduler.model.records import GateRecord, RoundRecord, StoppedThen
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import duration
from penstock_scheduler.rounds.lost_moves import LostMoves
from penstock_scheduler.rounds.policies.stops import stopped

NAMED = 5
"""Jobs and nodes that a text names."""


class SafetySettings(BaseModel):
    """Section `[safety]` of the settings file: how many running jobs Penstock may stop by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stop_share: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Largest share of the GPUs of running jobs that plans may take away and leave idle within "
        "ten minutes. Stops that a person asked for (drains, reservations, changed job specs) do not count.",
    )
    stop_jobs: NonNegativeInt = Field(
        default=4, description="Jobs that plans may stop within ten minutes in any case, whatever their share."
    )
    move_share: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Largest share of the GPU-time of running jobs that exchanges of GPUs between running jobs may cost in any "
        "hour. Moves to idle GPUs, and for jobs that start, do not count. 1: no bound.",
    )
    grace_s: NonNegativeFloat = Field(
        default=300.0,
        description="Longest time for which no job is stopped while nodes or running jobs are missing, after penstockd has "
        "started or Slurm or the store was away, seconds.",
    )

    stop_window_s: ClassVar[float] = 600.0
    """Time over which stops are counted, s: ten rounds, so that a fault which repeats itself cannot stop a few jobs in each.
    A site sets how many stops it bears in this time."""


@dataclass(frozen=True, slots=True)
class View:
    """What an observation shows: nodes in order, and running jobs."""

    nodes: frozenset[str] = frozenset()
    running: frozenset[JobId] = frozenset()
    jobs: frozenset[JobId] = frozenset()
    """All jobs."""

    @classmethod
    def of(cls, state: ClusterState | Snapshot) -> View:
        """A node is in order if it takes new work, or if an admin has taken it out of service."""
        return cls(
            frozenset(node.name for node in state.nodes if node.may_start or node.leave is not None),
            frozenset([job.id for job in state.jobs if job.phase is Phase.RUNNING]),
            frozenset([job.id for job in state.jobs]),
        )


def lacks(before: View, now: View) -> str:
    """What was there before and is missing now, in words; empty: nothing."""
    nodes, jobs = before.nodes - now.nodes, before.running - now.jobs
    parts = []
    if nodes:
        parts.append(f"{len(nodes)} of {len(before.nodes)} nodes do not answer or are missing ({_names(nodes)})")
    if jobs:
        parts.append(f"{len(jobs)} of {len(before.running)} running jobs are missing ({_names(jobs)})")
    return ", and ".join(parts)


def much_lacks(before: View, now: View, settings: SafetySettings) -> bool:
    """Whether a large part of the nodes or of the running jobs is missing at once."""
    nodes, jobs = len(before.nodes - now.nodes), len(before.running - now.jobs)
    return nodes > max(settings.stop_share * len(before.nodes), 1) or jobs > max(
        settings.stop_share * len(before.running), settings.stop_jobs
    )


def counted(snapshot: Snapshot, plan: Plan, approved: Iterable[JobId] = ()) -> StoppedThen:
    """The running jobs that the plan leaves with nothing though nobody asked for it, and how many of their GPUs become idle."""
    spared = set(approved)
    jobs = [
        job
        for job in stopped(snapshot, plan)
        if job.id not in plan.assignments
        and job.id not in spared
        and not ((stop := plan.stops.get(job.id)) is not None and stop.code.is_asked_for)
    ]
    before, freed = Counter[str](), Counter[str]()
    for job in snapshot.jobs:
        for share in job.running_on.shares if job.running_on is not None else ():
            before[share.node] += share.gpus
    for job in jobs:
        for share in job.running_on.shares if job.running_on is not None else ():
            freed[share.node] += share.gpus
    gpus_on = {node.name: node.gpus for node in snapshot.nodes}  # jobs that share GPUs hold them together
    after = plan.gpus_held()
    idle = sum(min(gpus, max(min(before[name], gpus_on.get(name, 0)) - after[name], 0)) for name, gpus in freed.items())
    in_cloud = sum(gpus_of(snapshot, job) for job in jobs if job.running_on is None)
    return StoppedThen(snapshot.time_s, len(jobs), idle + in_cloud)


def gpus_of(snapshot: Snapshot, job: Job) -> int:
    """GPUs of a running job, on site or in the cloud."""
    runs = snapshot.cloud.runs if snapshot.cloud is not None else ()
    away = next((run.offer.gpus for run in runs if run.job == job.id), None)
    held = job.running_on
    return away if away is not None else held.gpus if held is not None else 0


def refusals(
    snapshot: Snapshot,
    plan: Plan,
    recent: Sequence[StoppedThen],
    settings: SafetySettings,
    *,
    incomplete: str = "",
    approved: Iterable[JobId] = (),
) -> tuple[str, ...]:
    """Why a plan is refused, as sentences; empty: it is not.

    Args:
        snapshot: the round's.
        plan: the plan.
        recent: stops of the accepted plans within `stop_window_s`.
        settings: the site's.
        incomplete: why the view of the cluster is incomplete; empty: it is complete.
        approved: jobs whose stop an admin has approved.
    """
    spared = set(approved)
    stops = [job for job in stopped(snapshot, plan) if job.id not in spared]
    found = []
    if unexplained := [job.id for job in stops if job.id not in plan.stops]:
        found.append(
            f"it stops {_jobs(len(unexplained))} without a reason ({_names(unexplained)}); please report this as a bug"
        )
    if incomplete and stops:
        found.append(f"it stops {_jobs(len(stops))} while the view of the cluster is incomplete: {incomplete}")
    now = counted(snapshot, plan, spared)
    jobs, gpus = now.jobs + sum(each.jobs for each in recent), now.gpus + sum(each.gpus for each in recent)
    running = sum(gpus_of(snapshot, job) for job in snapshot.jobs)
    if now.gpus and jobs > settings.stop_jobs and gpus > settings.stop_share * running:
        before = f" and {_jobs(jobs - now.jobs)} before, within {duration(settings.stop_window_s)}" if recent else ""
        found.append(
            f"it stops {_jobs(now.jobs)} and leaves {now.gpus} of their GPUs idle{before}: together {gpus} of the {running} GPUs "
            f"that jobs run on, and [safety] stop_share = {settings.stop_share:g} allows {settings.stop_share * running:.0f}"
        )
    return tuple(found)


APPROVED_S = 900.0
"""How long an admin's approval holds, seconds."""


class Approval(BaseModel):
    """The stops that an admin has approved."""

    model_config = ConfigDict(frozen=True)

    round: int
    jobs: frozenset[JobId]
    by: str
    until_s: float

    @classmethod
    def of(cls, record: RoundRecord, by: str, now_s: float) -> Approval:
        """The stops of a refused round. Raises NothingToApprove if the gate did not refuse the round, or too long ago."""
        number = record.snapshot.round
        if not record.gate.refused:
            raise NothingToApprove(f"the plan of round {number} was not refused, so there is nothing to approve")
        if now_s - record.snapshot.time_s > APPROVED_S:
            raise NothingToApprove(
                f"round {number} is {duration(now_s - record.snapshot.time_s)} old, and the cluster has changed since: "
                "penstock plan names the newest refused round"
            )
        return cls(round=number, jobs=frozenset(record.gate.stops), by=by, until_s=now_s + APPROVED_S)


class NothingToApprove(PenstockError):
    """The round has no stops that an admin could approve."""


@dataclass(slots=True)
class PlanGate:
    """Judges each plan by what it has seen so far.

    Args:
        settings: the site's; may change at any time.
        before: the newest round of an earlier process; None: there is none, so nothing can be missing.
        record: what the gate noted then.
        now_s: s since 1970.
    """

    settings: SafetySettings
    before: dataclasses.InitVar[Snapshot | None] = None
    record: dataclasses.InitVar[GateRecord | None] = None
    now_s: dataclasses.InitVar[float] = 0.0
    approval: Approval | None = None
    lost: LostMoves = field(init=False)
    """The jobs that accepted plans have moved."""
    _view: View | None = field(init=False, default=None)
    """The newest complete view; None: there is none yet."""
    _back_s: float | None = field(init=False, default=None)
    """Since when the view may be incomplete, s since 1970; None: it is complete."""
    _cause: str = field(init=False, default="")
    _lacks: str = field(init=False, default="")
    _recent: tuple[StoppedThen, ...] = field(init=False, default=())

    def __post_init__(self, before: Snapshot | None, record: GateRecord | None, now_s: float) -> None:
        self._recent = record.recent if record is not None else ()
        self.lost = LostMoves(record.moved if record is not None else ())
        if before is not None:
            self._view, self._back_s, self._cause = View.of(before), now_s, "penstockd has started"

    def failed(self, now_s: float, error: str) -> None:
        """A tick has failed: Slurm or the store was away."""
        if self._view is not None:
            self._back_s, self._cause = now_s, f"Slurm or the store was away ({error})"

    def saw(self, state: ClusterState, now_s: float) -> None:
        """Take in an observation. Jobs that have ended or are held, as the cluster says, are not missing."""
        self.lost.saw(state, now_s)
        view = View.of(state)
        if self._view is None:
            self._view = view
            return
        ended = frozenset(run.job for run in state.ended) | {each.job.id for each in state.waiting}
        self._view = dataclasses.replace(self._view, running=self._view.running - ended)
        if self._back_s is None and much_lacks(self._view, view, self.settings):
            self._back_s, self._cause = now_s, "a large part of the cluster vanished at once"
        self._lacks = lacks(self._view, view)
        if self._back_s is not None and self._lacks and now_s - self._back_s < self.settings.grace_s:
            return
        self._view, self._back_s, self._lacks = view, None, ""

    @property
    def incomplete(self) -> str:
        """Why the view of the cluster is incomplete; empty: it is complete."""
        if self._back_s is None or not self._lacks:
            return ""
        until = time.strftime("%H:%M:%S UTC", time.gmtime(self._back_s + self.settings.grace_s))
        return f"{self._cause}, and {self._lacks}. Nothing is stopped until they are back, at the latest until {until}"

    def judge(self, snapshot: Snapshot, plan: Plan) -> tuple[str, ...]:
        """Why the plan is refused; empty: it is not."""
        self._forget(snapshot.time_s)
        approved = self.approval.jobs if self.approval is not None else ()
        return refusals(snapshot, plan, self._recent, self.settings, incomplete=self.incomplete, approved=approved)

    def approved(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """The plan with a reason for those of its stops that an admin has approved and that have none."""
        if self.approval is None:
            return plan
        text = f"{self.approval.by} approved the stops of round {self.approval.round}"
        asked = {
            job.id: Stop(StopCode.ASKED, text)
            for job in stopped(snapshot, plan)
            if job.id in self.approval.jobs and job.id not in plan.stops
        }
        return dataclasses.replace(plan, stops=plan.stops | asked) if asked else plan

    def stops(self, snapshot: Snapshot, plan: Plan) -> dict[JobId, Stop]:
        """All stops of a plan, also those without a reason."""
        return {
            job.id: plan.stops.get(job.id, Stop(StopCode.UNEXPLAINED, "the plan gives no reason, which is a bug"))
            for job in stopped(snapshot, plan)
        }

    def kept(self, refused: Sequence[str]) -> Kept:
        """What the running jobs keep in place of a refused plan."""
        return Kept(
            f"the plan gate refused the plan of this round: {'; '.join(refused)}", everything=bool(self.incomplete)
        )

    def accepted(self, snapshot: Snapshot, plan: Plan) -> None:
        """Count the stops of a plan that the loop acts on."""
        self.lost.accepted(snapshot, plan)
        approved = self.approval.jobs if self.approval is not None else ()
        now = counted(snapshot, plan, approved)
        if now.gpus:
            self._recent = (*self._recent, now)

    def note(self, refused: Sequence[str], stops: dict[JobId, Stop]) -> GateRecord:
        """What the record of the round keeps."""
        return GateRecord(self._recent, tuple(refused), stops, self.lost.watched)

    def _forget(self, now_s: float) -> None:
        self._recent = tuple(each for each in self._recent if now_s - each.time_s < self.settings.stop_window_s)
        if self.approval is not None and now_s >= self.approval.until_s:
            self.approval = None


def _names(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} others" if len(found) > NAMED else "")


def _jobs(count: int) -> str:
    return f"{count} running job{'s' if count != 1 else ''}"
