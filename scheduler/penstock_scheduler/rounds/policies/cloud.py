"""The cloud beside a policy: which jobs leave for the cloud, and which jobs come back.

`make_policy` wraps every policy in `WithCloud`. Without a cloud in the snapshot, the policy decides alone, and queued jobs
that run only in the cloud get nothing. The rules are those of `penstock_scheduler.burst.deciding`:

1. A job that runs in the cloud, or is on its way there or back, gets no GPUs on site. A job is never in both places. Idle
   GPUs are kept for one on its way back, a few minutes at most, while all jobs that wait came later.
2. Short jobs leave at once, even if GPUs are free, where the waiting policy says so.
3. The policy decides about all other jobs. A policy that solves a program (`sia`) compares the cloud's offers with the
   site's GPUs in that program. Under other policies, a job that gets no GPUs leaves for the cheapest offer once its waiting
   budget is over.
4. If more jobs than `max_queue` still wait, the newest of them leave.
5. A round never commits more dollars than any budget has left. A job that would exceed a budget waits, and its reason names
   the budget.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property

from penstock_scheduler.burst.deciding.choices import (
    NO_CLOUD,
    CloudChoice,
    choices,
    choices_of,
    leaves_at_once,
    leaves_s,
    may_leave,
    needs_usd,
    recalls,
    within,
)
from penstock_scheduler.model import (
    Burst,
    CloudAssignment,
    CloudRun,
    CloudState,
    Configuration,
    Job,
    JobId,
    Offer,
    Phase,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
)
from penstock_scheduler.people.units import dollars
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.common import smallest_need
from penstock_scheduler.rounds.policies.pools import place_of
from penstock_scheduler.rounds.policies.staying import without
from penstock_scheduler.rounds.policies.wrapper import Wrapper


class WithCloud(Wrapper):
    """Applies the rules of this module. `policy` decides what happens on site."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The plan on site and in the cloud."""
        cloud = snapshot.cloud
        if cloud is None:
            return self._without_cloud(snapshot)
        away = {run.job for run in cloud.runs}
        found, closed = choices(snapshot)
        only = {job.id for job in snapshot.jobs if job.spec.burst is Burst.ONLY and job.id not in away}
        leaving = _Leaving(snapshot, cloud)
        for job in snapshot.jobs:
            if job.id in found and leaves_at_once(job, snapshot):
                leaving.send(job, found[job.id])
        elsewhere = away | only | leaving.bursts.keys()
        here = tuple(job for job in snapshot.jobs if job.id not in elsewhere)
        rest = dataclasses.replace(snapshot, jobs=here, cloud=leaving.rest())
        kept = _kept_for_returning(snapshot, cloud)
        plan = self._policy.decide(without(rest, {}, {}, (), kept) if kept else rest)
        leaving.bursts |= plan.bursts
        for job in snapshot.jobs:
            if job.id in only or job.id in plan.waiting:
                leaving.send(job, found.get(job.id, []))
        leaving.shorten([job for job in here if job.id in plan.waiting and job.phase is Phase.QUEUED])
        waiting = _waiting(snapshot, plan, only, closed, leaving.bursts)
        back = _coming_back(snapshot, plan, queue_empty=not waiting)
        bursts = leaving.bursts | _in_the_cloud(snapshot, cloud, back)
        return dataclasses.replace(plan, waiting=waiting, bursts=bursts, recalls=back)

    def _without_cloud(self, snapshot: Snapshot) -> Plan:
        """The plan of a site without a cloud. A job that runs there already, although it asked for the cloud only, stays."""
        never = {
            job.id: Reason(ReasonCode.NEVER_FITS, NO_CLOUD, smallest_need(job))
            for job in snapshot.jobs
            if job.spec.burst is Burst.ONLY and job.phase is Phase.QUEUED
        }
        if not never:
            return self._policy.decide(snapshot)
        here = tuple(job for job in snapshot.jobs if job.id not in never)
        plan = self._policy.decide(dataclasses.replace(snapshot, jobs=here))
        waiting = plan.waiting | never
        ordered = {job.id: waiting[job.id] for job in snapshot.jobs if job.id in waiting}
        return dataclasses.replace(plan, waiting=ordered)


class _LeftOnSite:
    """The GPUs on site that a plan leaves free."""

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        self._snapshot, self._plan = snapshot, plan

    @cached_property
    def _free(self) -> FreeGpus:
        free = FreeGpus.of(self._snapshot)
        jobs = {job.id: job for job in self._snapshot.jobs}
        for job_id, assignment in self._plan.assignments.items():
            free.take(jobs[job_id], assignment.placement)
        return free

    def fits(self, job: Job, gpu_type: str) -> bool:
        """Whether a job finds nodes for some of its configurations on this type."""
        options = [each for each in common.options(self._snapshot, job) if each.gpu_type == gpu_type]
        return bool(options) and self._free.find(job, options) is not None


class _Leaving:
    """The jobs that leave in this round, within the offers and budgets."""

    def __init__(self, snapshot: Snapshot, cloud: CloudState) -> None:
        self._snapshot, self._cloud = snapshot, cloud
        self._account = {job.id: job.account for job in snapshot.jobs}
        self.bursts: dict[JobId, CloudAssignment] = {}

    def send(self, job: Job, options: Sequence[CloudChoice]) -> None:
        """Send a job to the cheapest of these choices that the offers and budgets still allow, if there is one."""
        for option in options:
            gone = sum(other.offer.id == option.offer.id for other in self.bursts.values())
            to: dict[JobId, CloudChoice | CloudAssignment] = {**self.bursts, job.id: option}
            taken = {leaver: (self._account[leaver], each) for leaver, each in to.items()}
            if gone < option.offer.count and not within(self._cloud.budgets, taken):
                self.bursts[job.id] = sent(option)
                return

    def shorten(self, queue: Sequence[Job]) -> None:
        """Send the newest of the jobs that still wait, as many as exceed `max_queue`."""
        waits = [job for job in queue if job.id not in self.bursts and may_leave(job, self._cloud)]
        for job in _beyond(self._cloud.max_queue, waits):
            self.send(job, choices_of(job, self._snapshot)[0])

    def rest(self) -> CloudState:
        """The cloud for the jobs that are left: with fewer offers and dollars."""
        gone = Counter(burst.offer.id for burst in self.bursts.values())
        used = [(self._account[job], burst) for job, burst in self.bursts.items()]
        return dataclasses.replace(
            self._cloud,
            offers=tuple(
                dataclasses.replace(offer, count=max(offer.count - gone[offer.id], 0)) for offer in self._cloud.offers
            ),
            budgets=tuple(
                dataclasses.replace(line, used_usd=line.used_usd + sum(needs_usd(line, *each) for each in used))
                for line in self._cloud.budgets
            ),
        )


def _kept_for_returning(snapshot: Snapshot, cloud: CloudState) -> Counter[str]:
    """Node -> idle GPUs that are kept for jobs on their way back. Jobs that came later would take them in those seconds, and
    the job would go to the cloud again and be paid for twice."""
    kept: Counter[str] = Counter()
    back = {run.job for run in cloud.runs if run.ending and snapshot.time_s < run.kept_until_s}
    if not back:
        return kept
    away = {run.job for run in cloud.runs}
    here = [job for job in snapshot.jobs if job.id not in away and job.spec.burst is not Burst.ONLY]
    first = min((job.in_order for job in here if job.phase is Phase.QUEUED), default=None)
    free = FreeGpus.of(snapshot)
    for job in here:
        if (held := place_of(job)) is not None:
            free.take(job, held)
    for job in snapshot.jobs:
        if job.id in back and job.spec.burst is not Burst.ONLY and (first is None or job.in_order < first):
            fewest = sorted(common.options(snapshot, job), key=lambda shape: shape.gpus)
            if (where := free.find(job, fewest)) is not None:
                free.take(job, where)
                kept.update({share.node: share.gpus for share in where.shares})
    return kept


def _beyond(max_queue: int | None, waits: Sequence[Job]) -> list[Job]:
    """The newest of these waiting jobs, as many as exceed the longest queue; the newest first."""
    if max_queue is None or len(waits) <= max_queue:
        return []
    return sorted(waits, key=lambda job: job.in_order, reverse=True)[: len(waits) - max_queue]


def _waiting(
    snapshot: Snapshot,
    plan: Plan,
    only: Iterable[JobId],
    closed: Mapping[JobId, Reason],
    bursts: Container[JobId],
) -> dict[JobId, Reason]:
    """The jobs that wait, in order, with the cloud's reasons: `closed` by a budget, or what the provider says."""
    nothing = Reason(ReasonCode.WAITING_CAPACITY, "runs in the cloud only, and no offer there suits it")
    reasons = plan.waiting | dict.fromkeys(only, nothing)
    reasons |= {job: why for job, why in closed.items() if job not in plan.assignments}
    waiting = {job.id: reasons[job.id] for job in snapshot.jobs if job.id in reasons and job.id not in bursts}
    for job in snapshot.jobs:
        if job.id in waiting and job.id not in closed and (said := _provider_reasons(job, snapshot)):
            reason = waiting[job.id]
            waiting[job.id] = dataclasses.replace(reason, text=f"{reason.text}; {said}")
    return waiting


def _coming_back(snapshot: Snapshot, plan: Plan, *, queue_empty: bool) -> dict[JobId, Reason]:
    """The jobs that come back to the GPUs on site that the plan leaves free."""
    if snapshot.kept is not None:
        return {}
    idle: Counter[str] = Counter()
    for node in snapshot.nodes:
        idle[node.gpu_type] += node.gpus_for_us
    for assignment in plan.assignments.values():
        idle[assignment.placement.gpu_type] -= assignment.placement.gpus
    return recalls(snapshot, idle, queue_empty=queue_empty, fits=_LeftOnSite(snapshot, plan).fits)


def _in_the_cloud(snapshot: Snapshot, cloud: CloudState, back: Mapping[JobId, Reason]) -> dict[JobId, CloudAssignment]:
    """The jobs that run in the cloud already, or are on their way there or back."""
    known = {job.id for job in snapshot.jobs}
    return {
        run.job: CloudAssignment(run.offer, run.usd, back.get(run.job) or _stays(run), stays=True)
        for run in cloud.runs
        if run.job in known
    }


def in_cloud(offer: Offer) -> Configuration:
    """An offer as a configuration, to record the solver's choice when a time limit cut the round short."""
    return Configuration(offer.nodes, offer.gpus, f"cloud:{offer.id}")


def sent(choice: CloudChoice) -> CloudAssignment:
    """What a job that leaves for the cloud gets there."""
    text = (
        f"runs in the cloud on {choice.offer} for about {dollars(choice.expected_usd)}, at most {dollars(choice.usd)}"
    )
    return CloudAssignment(choice.offer, choice.usd, Reason(ReasonCode.BURST, text), data_usd=choice.data_usd)


def _provider_reasons(job: Job, snapshot: Snapshot) -> str:
    """The provider's reasons why a job that would leave cannot, for its user; empty: none, or the job would not leave yet."""
    cloud = snapshot.cloud
    assert cloud is not None, "only a cloud gives such reasons"
    if not may_leave(job, cloud) or snapshot.time_s < leaves_s(job, snapshot):
        return ""
    own = cloud.words.get(job.id)
    return "; ".join((*([f"the cloud: {own}"] if own else []), *cloud.closed))


def _stays(run: CloudRun) -> Reason:
    if run.trouble:
        return Reason(ReasonCode.BURST, f"runs in the cloud, and nothing is done with it there: {run.trouble}")
    what = "is on its way back from" if run.ending else "runs in the cloud on"
    if run.state in ("ordered", "booting"):
        what = "waits in the cloud for"
    return Reason(ReasonCode.BURST, f"{what} {run.offer}, for at most {dollars(run.usd)}")
