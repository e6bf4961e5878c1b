"""Why a job has what it has, from the record of a round: for `penstock explain`, the API and the job's page.

Everything here is read off the round, or found by deciding the same round again with another job spec. So what a job "would
get" is what the policy would have given it. What nobody can know, such as which jobs will be submitted, is said as a range with a
probability (`estimates`). What only the policy knows, it says itself (`ports.Explainer`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from penstock_scheduler.api.estimate_messages import JobEstimate, estimate_lines
from penstock_scheduler.api.ports import Policy
from penstock_scheduler.burst.deciding.choices import CloudForecast, forecast
from penstock_scheduler.model import (
    Adaptivity,
    Assignment,
    Configuration,
    GpuBudget,
    Job,
    JobId,
    JobSpec,
    NodeChoice,
    Phase,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
    Stop,
)
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import RoundFailed
from penstock_scheduler.people.units import duration, shortened
from penstock_scheduler.rounds.free_gpus import open_nodes
from penstock_scheduler.rounds.policies import common, make_policy
from penstock_scheduler.rounds.policies.wrapper import remarks
from penstock_scheduler.rounds.shares import ShareUse, describe_share, share_use

MOST_HOLDERS = 5
"""Jobs that are named as holders of the GPUs that a waiting job could use."""

MOST_REMEDIES = 3
"""Job specs that are tried for a job that waits. Each decides the round once more."""


SAVING_PAGE = "The page docs/user/saving.md"


@dataclass(frozen=True, slots=True)
class OpenConfiguration:
    """A configuration that the job's spec and the cluster allow."""

    configuration: Configuration
    goodput: float
    """Expected goodput, in the job's own unit per second."""
    price: float | None
    """Price of its GPUs in this round, in the unit of the solver's objective; None: the policy has no prices."""
    held: bool
    """Whether the plan gives the job this one."""


@dataclass(frozen=True, slots=True)
class TypeUse:
    """How the GPUs of one type that the job may use are used."""

    gpu_type: str
    gpus: int
    """On nodes that take new work and are open to the job."""
    allocated: int
    """Allocated by the plan to other jobs of Penstock."""
    others: int
    """Held by jobs that Penstock does not manage."""

    @property
    def free(self) -> int:
        """GPUs that no job holds."""
        return max(self.gpus - self.allocated - self.others, 0)


@dataclass(frozen=True, slots=True)
class Holder:
    """A job to which the plan gives GPUs that the waiting job could use."""

    job: JobId
    gpus: int
    gpu_type: str
    until_s: float | None
    """When it is expected to end, s since 1970, if it stays where it is; None: not known."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A job spec with which the job would have started in this round."""

    change: str
    """As flags, such as `--min-gpus=1`."""
    gets: Configuration


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a round says about one job."""

    job: Job
    round: int
    decided_s: float
    reason: Reason
    assignment: Assignment | None
    options: tuple[OpenConfiguration, ...]
    """Best goodput first."""
    uses: tuple[TypeUse, ...]
    restart_cost_s: float
    saves: bool = True
    """Whether it may be moved as far as saving goes: see `JobFacts.saves`."""
    save_failure: str = ""
    """See `JobFacts.save_failure`."""
    doubts: tuple[str, ...] = ()
    """See `JobFacts.doubts`."""
    remarks: tuple[str, ...] = ()
    """Sentences of the policy, about a job that has GPUs."""
    limits: tuple[str, ...] = ()
    """Limits that cover the job, in words."""
    holders: tuple[Holder, ...] = ()
    """Soonest end first; only for a job that waits."""
    remedies: tuple[Remedy, ...] = ()
    """Only for a job that waits."""
    stop: Stop | None = None
    """Why the round stops the job's present run; None: it does not."""
    share: ShareUse | None = None
    """CPU and memory; None: the policy does not allocate them, or the job waits."""
    cloud: CloudForecast | None = None
    """Only for a job that waits and may leave for the cloud."""
    notes: tuple[str, ...] = ()
    """Remarks about its nodes before it runs; for a job that waits, about nodes that are out of service."""


def explain(record: RoundRecord, job_id: JobId, *, remedies: int = MOST_REMEDIES) -> Explanation | None:
    """What the round says about the job; None if the round did not have the job.

    Args:
        record: the round.
        job_id: the job.
        remedies: most job specs to try in place of the job's own, if it waits. Each takes as long as the round took.
    """
    snapshot, plan = record.snapshot, record.plan
    job = next((job for job in snapshot.jobs if job.id == job_id), None)
    if job is None:
        return None
    assignment = plan.assignments.get(job_id)
    waits = assignment is None and job_id not in plan.bursts
    policy, _ = make_policy(record.policy)
    return Explanation(
        job,
        snapshot.round,
        snapshot.time_s,
        _reason(plan, job),
        assignment,
        _options(record, job, assignment),
        _uses(record, job),
        snapshot.facts[job_id].restart_cost_s,
        snapshot.facts[job_id].saves,
        snapshot.facts[job_id].save_failure,
        snapshot.facts[job_id].doubts,
        tuple(remarks(policy, snapshot, plan, job)) if assignment is not None else (),
        (
            *(str(limit) for limit in snapshot.limits if limit.covers(job)),
            *(
                _under(budget, job, saves=snapshot.facts[job_id].saves)
                for budget in snapshot.budgets
                if budget.covers(job.account)
            ),
        ),
        _holders(record, job) if waits else (),
        _remedies(record, policy, job, remedies) if waits and remedies > 0 else (),
        plan.stops.get(job_id),
        None if assignment is None else share_use(snapshot, job_id, assignment.placement),
        forecast(job, snapshot) if waits and job.phase is Phase.QUEUED else None,
        _notes(snapshot, job, assignment),
    )


def _notes(snapshot: Snapshot, job: Job, assignment: Assignment | None) -> tuple[str, ...]:
    if job.phase not in (Phase.QUEUED, Phase.STARTING):
        return ()
    if assignment is not None:
        names = set(assignment.placement.nodes)
        there = [node for node in snapshot.nodes if node.name in names]
    else:
        usable = (node for node in open_nodes(snapshot.nodes, job) if job.spec.allows_type(node.gpu_type))
        there = [node for node in usable if not node.may_start]
    notes = [f"Node {node.name} {node.note}." for node in there if node.note][:MOST_HOLDERS]
    if job.nodes is not None and job.nodes.tried:
        tried = shortened(", ".join(sorted(job.nodes.tried)))
        notes.append(
            f"The cluster did not start it on {tried}. Other nodes are tried first; its history has the reasons."
        )
    if job.nodes is not None and job.nodes.kept:
        kept = shortened(", ".join(sorted(job.nodes.kept)))
        notes.append(f"Jobs that Penstock does not manage came before it and start first on {kept}.")
    return tuple(notes)


def _reason(plan: Plan, job: Job) -> Reason:
    if job.id in plan.assignments:
        return plan.assignments[job.id].reason
    if job.id in plan.waiting:
        return plan.waiting[job.id]
    if job.id in plan.bursts:
        return plan.bursts[job.id].reason
    return Reason(ReasonCode.WAITING_CAPACITY, "the round's plan does not mention it", common.smallest_need(job))


def words(explanation: Explanation, *, now_s: float, estimate: JobEstimate | None = None) -> list[str]:
    """The explanation in sentences, the answer first.

    Args:
        now_s: s since 1970.
        estimate: when the job is expected to start and end; None: this has not been estimated.
    """
    said = explanation
    lines = [_headline(said)]
    if said.stop is not None:
        lines.append(f"Round {said.round} stops its run ({said.stop.code.value}): {said.stop.text}.")
    if said.reason.code in (ReasonCode.BURST, ReasonCode.RECALLED):
        return lines
    if said.assignment is None:
        lines += _waiting_words(said, now_s, estimate)
    else:
        if estimate is not None:
            lines += estimate_lines(estimate, said.job.phase.value, now_s)
        if said.saves or not said.job.movable:
            cost = f"A restart costs it about {duration(said.restart_cost_s)} of training"
            lines.append(f"{cost}; so far {_moved(said.job.restarts)}.")
            lines += said.remarks
        else:
            lines.append(_unsaved(said.job, said.decided_s, said.save_failure))
        lines += describe_share(said.share) if said.share is not None else []
    lines += said.notes
    lines += [f"A claim of the job does not hold: {doubt}." for doubt in said.doubts]
    if (named := said.job.nodes and said.job.nodes.named) is not None:
        lines.append(f"Its user allows only some nodes: {shortened(str(named))}.")
    if said.job.nodes is not None and said.job.nodes.able is not None:
        lines.append(f"It runs only on hosts with {said.job.nodes.able_for}.")
    lines += [f"It is under {limit}." for limit in said.limits]
    if len(said.options) > 1:
        best = said.options[0]
        shown = ", ".join(f"{o.configuration}: {o.goodput / best.goodput:.0%}" for o in said.options[:6])
        lines.append(f"Its expected speed, relative to its best configuration: {shown}.")
    return lines


def _headline(said: Explanation) -> str:
    job, reason = said.job, said.reason
    if reason.code in (ReasonCode.BURST, ReasonCode.RECALLED):
        return f"Job {job.id} {reason.text}."
    if said.assignment is None:
        needs = f" It needs {reason.needs}." if reason.needs else ""
        verb = "cannot start" if reason.code is ReasonCode.NEVER_FITS else "waits"
        return f"Job {job.id} {verb}: {reason.text}.{needs}"
    state = {
        Phase.QUEUED: "is about to start",
        Phase.STARTING: "is starting",
        Phase.STOPPING: "is moving: it saves its state first",
        Phase.RUNNING: "runs",
    }[job.phase]
    if job.suspension is not None:
        since_s = job.suspension.since_s
        since = "" if since_s is None else f" since {time.strftime('%H:%M:%S', time.localtime(since_s))}"
        state = f"is {job.suspension.state}{since}: {job.suspension.text}"
    return f"Job {job.id} {state}. Round {said.round}: {reason.text}."


def _waiting_words(said: Explanation, now_s: float, estimate: JobEstimate | None) -> list[str]:
    lines = []
    for use in said.uses:
        allocated = f"{use.allocated} {_are(use.allocated)} allocated to other jobs"
        others = f", {use.others} to jobs that Penstock does not manage" if use.others else ""
        free = f"{use.free} {_are(use.free)} free"
        lines.append(f"Of {use.gpus} {use.gpu_type} GPUs that it may use, {allocated}{others}, {free}.")
    start_s = said.reason.estimated_start_s
    never = said.reason.code is ReasonCode.NEVER_FITS
    if estimate is not None and not never:
        lines += estimate_lines(estimate, "queued", now_s)
    elif start_s is not None:
        lines.append(f"It is expected to start in {duration(max(start_s - now_s, 0.0))}.")
    elif not never:
        lines.append("Its start time is not known, because nothing has estimated it yet.")
    lines += _holder_words(said.holders, now_s) if not never else []
    if said.cloud is not None and said.cloud.why != said.reason.text:
        lines.append(said.cloud.words(now_s))
    for remedy in said.remedies:
        lines.append(f"With {remedy.change} it would have started in this round, on {remedy.gets}.")
    return lines


def _holder_words(holders: tuple[Holder, ...], now_s: float) -> list[str]:
    lines = []
    for each in holders[:MOST_HOLDERS]:
        until = "its end is not known" if each.until_s is None else f"expected end in {_in(each.until_s, now_s)}"
        lines.append(f"Job {each.job} has {each.gpus} {each.gpu_type}: {until}.")
    if (more := holders[MOST_HOLDERS:]) and len(more) > 1:
        lines.append(f"{len(more)} further jobs have {sum(each.gpus for each in more)} GPUs that it could use.")
    elif more:
        lines.append(f"One further job has {more[0].gpus} GPUs that it could use.")
    return lines


def _in(time_s: float, now_s: float) -> str:
    return duration(max(time_s - now_s, 0.0))


def _options(record: RoundRecord, job: Job, assignment: Assignment | None) -> tuple[OpenConfiguration, ...]:
    snapshot, prices = record.snapshot, record.plan.prices
    given = assignment.configuration if assignment else None
    spec = job.spec
    exact = {spec.min_gpus} if spec.min_gpus == spec.max_gpus else set()
    shapes = common.configurations(open_nodes(snapshot.nodes, job), exact, spec.max_gpus)
    model = snapshot.facts[job.id].model
    found = []
    for shape in dict.fromkeys((*shapes, *([given] if given else []))):
        goodput = common.rate(model, shape)
        if (common.allowed(job, shape) or shape == given) and math.isfinite(goodput) and goodput > 0:
            price = prices[shape.gpu_type] * shape.gpus if shape.gpu_type in prices else None
            found.append(OpenConfiguration(shape, goodput, price, shape == given))
    return tuple(sorted(found, key=lambda option: (-option.goodput, option.configuration)))


def _uses(record: RoundRecord, job: Job) -> tuple[TypeUse, ...]:
    nodes = {
        node.name: node
        for node in open_nodes(record.snapshot.nodes, job)
        if node.may_start and job.spec.allows_type(node.gpu_type)
    }
    given: dict[str, int] = {}
    others = dataclasses.replace(
        record.plan, assignments={other: its for other, its in record.plan.assignments.items() if other != job.id}
    )
    for name, gpus in others.gpus_held().items():
        if name in nodes:
            gpu_type = nodes[name].gpu_type
            given[gpu_type] = given.get(gpu_type, 0) + gpus
    types = sorted({node.gpu_type for node in nodes.values()})
    return tuple(
        TypeUse(
            gpu_type,
            sum(node.gpus for node in nodes.values() if node.gpu_type == gpu_type),
            given.get(gpu_type, 0),
            sum(min(node.gpus_others, node.gpus) for node in nodes.values() if node.gpu_type == gpu_type),
        )
        for gpu_type in types
    )


def _holders(record: RoundRecord, job: Job) -> tuple[Holder, ...]:
    snapshot = record.snapshot
    open_to_it = {node.name for node in open_nodes(snapshot.nodes, job) if job.spec.allows_type(node.gpu_type)}
    found = []
    for other in snapshot.jobs:
        assignment = record.plan.assignments.get(other.id)
        if assignment is None or other.id == job.id or not open_to_it.intersection(assignment.placement.nodes):
            continue
        left_s = common.remaining_s(snapshot, other, assignment.configuration, assignment.goodput)
        shape, until_s = assignment.configuration, None if left_s is None else snapshot.time_s + left_s
        found.append(Holder(other.id, shape.gpus, shape.gpu_type, until_s))
    # With a known end first, the soonest first; then those with most GPUs.
    return tuple(sorted(found, key=lambda each: (each.until_s or math.inf, -each.gpus, each.job)))


def _remedies(record: RoundRecord, policy: Policy, job: Job, most: int) -> tuple[Remedy, ...]:
    """Decide the round again with job specs that are easier to meet, and return those with which the job would have started."""

    def helps(change: str, fields: Mapping[str, object], nodes: NodeChoice | None = job.nodes) -> Remedy | None:
        changed = dataclasses.replace(job, spec=job.spec.model_copy(update=fields), nodes=nodes)
        try:
            given = policy.decide(_with(record.snapshot, changed)).assignments.get(job.id)
        except RoundFailed:
            return None
        return Remedy(change, given.configuration) if given is not None else None

    singly, together = _easier(job.spec)
    found = [remedy for change in list(singly.items())[:most] if (remedy := helps(*change))]
    if (named := job.nodes and job.nodes.named) is not None and len(found) < most:
        found += [remedy for remedy in [helps(f"any node (no {shortened(str(named))})", {}, None)] if remedy]
    if not found and len(singly) < most and together:
        found = [remedy for remedy in [helps(" and ".join(singly), together)] if remedy]
    if found and len(found) < most and job.spec.adaptivity in (Adaptivity.RIGID, Adaptivity.FIXED):
        # Not every program can change its number of GPUs: a smaller request with a fixed number may start as well.
        gpus = max(remedy.gets.gpus for remedy in found)
        if gpus < job.spec.min_gpus:
            fixed = helps(f"--min-gpus={gpus} --max-gpus={gpus}", {"min_gpus": gpus, "max_gpus": gpus})
            found += [] if fixed is None else [fixed]
    return tuple(found)


def _easier(spec: JobSpec) -> tuple[dict[str, dict[str, object]], dict[str, object]]:
    """Fields that make the job spec easier to meet, by the flags that ask for them; and all together if there are several."""
    changes: dict[str, dict[str, object]] = {}
    if spec.gpu_types is not None or spec.excluded_gpu_types is not None:
        changes["any GPU type (no --gpu-types)"] = {"gpu_types": None, "excluded_gpu_types": None}
    if spec.min_gpus > 1:
        rigid = spec.adaptivity in (Adaptivity.RIGID, Adaptivity.FIXED)
        flag = "--adaptive=strong-scaling --min-gpus=1" if rigid else "--min-gpus=1"
        changes[flag] = {"min_gpus": 1} | ({"adaptivity": Adaptivity.STRONG_SCALING} if rigid else {})
    together = {name: value for fields in changes.values() for name, value in fields.items()}
    return changes, together if len(changes) > 1 else {}


def _with(snapshot: Snapshot, changed: Job) -> Snapshot:
    jobs = tuple(changed if job.id == changed.id else job for job in snapshot.jobs)
    return dataclasses.replace(snapshot, jobs=jobs)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _under(budget: GpuBudget, job: Job, *, saves: bool) -> str:
    """A budget, and what it means for the job if it runs and the hard limit is reached."""
    if not budget.over_hard or job.running_on is None:
        return str(budget)
    leaves = budget.stops and job.movable and not saves
    return f"{budget}; it gets no more GPUs" + (
        ", and once it has saved, it leaves those it has and waits" if leaves else ""
    )


def _unsaved(job: Job, now_s: float, failure: str) -> str:
    """What a stop would cost a job that has not shown that it can save, or has failed to."""
    if failure:
        return (
            f"It could not save its state ({failure}): Penstock neither moves nor resizes it before it has saved again."
        )
    ran = duration(now_s - job.started_s) if job.started_s is not None and now_s > job.started_s else "all"
    return (
        f"It has not shown that it can save its state, so a restart would cost it {ran} of training: Penstock neither moves nor "
        f"resizes it before it has saved once. {SAVING_PAGE} says how to save; --checkpointable says that a job does."
    )


def _moved(restarts: int) -> str:
    return {0: "it was never moved", 1: "it was moved once"}.get(restarts, f"it was moved {restarts} times")
