"""Builds the API's answers from what the daemon knows: the board, the store and the records of rounds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler.accounts.limits import LimitSettings, by_partition, site_limits
from penstock_scheduler.accounts.rules import drained
from penstock_scheduler.accounts.usage import add_up, between
from penstock_scheduler.api.health_messages import LOST, REFUSED
from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.ledger_messages import Usage, UsageBy
from penstock_scheduler.api.messages import (
    MAX_PAGE,
    ClusterView,
    ConfigurationView,
    Decision,
    Drain,
    ExplanationView,
    Forecast,
    History,
    JobView,
    NodeJob,
    NodeView,
    OutcomeView,
    PlanOrder,
    RoundView,
    ShareOption,
    ShareView,
)
from penstock_scheduler.api.ports import ModelSource
from penstock_scheduler.daemon.service.board import Board, allocation_view
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.known import Known
from penstock_scheduler.daemon.service.port import Daemon
from penstock_scheduler.model import Job, Node, NodeChoice, Phase, ReasonCode, Snapshot, host_of
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.errors import BadJobSpec, RoundFailed
from penstock_scheduler.people.units import duration, moment
from penstock_scheduler.rounds.explain import explain, words
from penstock_scheduler.rounds.forecast import ask, with_job
from penstock_scheduler.rounds.forecast import describe as describe_forecast
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.shares import ShareUse
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.rounds import summarise
from penstock_scheduler.store.sql import SqlStore

OBSERVATIONS = 200
"""Newest observations of a job that its history shows."""
RESULTS = MAX_PAGE
NAMES_SHOWN = 8
FORECAST = "forecast"
"""Id of the job that a forecast adds to the snapshot."""


def drainable(board: Known) -> dict[str, list[str]]:
    """Kind of drain -> names on this cluster that can be drained."""
    nodes = board.state.nodes if board.state else ()
    return {
        "node": sorted({name for node in nodes for name in (node.name, host_of(node.name))}),
        "gpu-type": sorted({node.gpu_type for node in nodes}),
        "partition": sorted({name for node in nodes for name in node.partitions}),
    }


def node_views(board: Known, drains: Sequence[Drain]) -> list[NodeView]:
    """The nodes as last observed, as adaptive jobs may use them."""
    state = board.state
    if state is None:
        return []
    return [
        NodeView(
            name=node.name,
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            allocated=board.held.get(node.name, 0),
            others=node.gpus_others,
            out_of_reach=node.gpus_out_of_reach,
            may_start=node.may_start,
            leave=node.leave.cause if node.leave is not None else "",
            state=node.state,
            reservation=node.reservation,
            boot_s=node.boot_s,
            note=node.note,
        )
        for node in (drained(each, drains) for each in state.nodes)
    ]


def with_jobs(nodes: Sequence[NodeView], spans: Iterable[AllocationSpan]) -> list[NodeView]:
    """The nodes with the jobs of these spans, in the order of their GPUs."""
    jobs: dict[str, list[NodeJob]] = {}
    for span in spans:
        for node, gpus in span.nodes.items():
            ids = None if span.gpu_ids is None else list(span.gpu_ids.get(node, ()))
            there = NodeJob(job=span.job, user=span.user, gpus=gpus, gpu_ids=ids, shared=span.shared)
            jobs.setdefault(node, []).append(there)

    def order(each: NodeJob) -> tuple[list[int], str]:
        return each.gpu_ids or [], each.job

    return [node.model_copy(update={"jobs": sorted(jobs.get(node.name, ()), key=order)}) for node in nodes]


def warnings(board: Board) -> list[str]:
    """What an admin should look at: values of the cluster that cannot be read, nodes that did not boot, a refused plan, and
    moves that failed. They name no jobs."""
    found = []
    for each in board.state.unknown if board.state is not None else ():
        count = len(each.names)
        if each.kind == "message":
            found.append(
                f"Slurm has answered {count} times with a message that Penstock does not know: {each.text}; report this line"
            )
            continue
        if each.kind == "reader":
            found.append(each.text)
            continue
        what = f"{count} {each.kind}{'' if count == 1 else 's'}" if each.kind == "job" else _some(each.kind, each.names)
        found.append(
            f"{each.text} of {what} is not known to Penstock, which leaves {'it' if count == 1 else 'them'} alone; run "
            "`penstock slurm check`"
        )
    unusable = (
        node for node in (board.state.nodes if board.state is not None else ()) if node.note and not node.may_start
    )
    found += [f"node {node.name} {node.note}" for node in unusable][:NAMES_SHOWN]
    if board.record is not None and board.record.gate.refused:
        number = board.record.snapshot.round
        found.append(f"{REFUSED} of round {number}, and every running job keeps what it has; see `penstock plan`")
    if board.record is not None and board.record.snapshot.no_gain:
        found.append(f"{LOST}: {board.record.snapshot.no_gain}; penstockd's log names the jobs")
    return found


def _some(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{kind} {shown}" + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")


def usage(
    board: Known, prices: Mapping[str, float], by: UsageBy, from_s: float, to_s: float | None, user: str | None
) -> Usage:
    """What jobs used between two times, in s since 1970, or until now; with `user`, that user's jobs alone."""
    now_s, store = site_time_s(), board.store
    to_s = now_s if to_s is None else to_s
    rows = store.used(by, from_s, to_s, user)
    live = [board.shown(view) for view in board.live() if user is None or view.user == user]
    spans = store.spans_of([view.id for view in live])
    used = [between(view, spans.get(view.id, ()), from_s, to_s, now_s) for view in live]
    return Usage(by=by, from_s=from_s, to_s=to_s, prices=dict(prices), lines=add_up(by, rows, used, prices))


def cluster_view(board: Known, daemon: Daemon) -> ClusterView:
    """The cluster in numbers."""
    chosen = daemon.chosen
    jobs = Counter(view.state for view in board.live())
    # Many clients ask this often, so no view of each node is made: with 2,000 nodes that took 50 ms.
    gpus, allocated, others, unusable = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for each in board.state.nodes if board.state is not None else ():
        node = drained(each, chosen.drains) if chosen.drains else each
        gpus[node.gpu_type] += node.gpus
        allocated[node.gpu_type] += board.held.get(node.name, 0)
        others[node.gpu_type] += node.gpus_others
        unusable[node.gpu_type] += node.gpus_out_of_reach if node.may_start else node.gpus
    number, prices = board.round or (None, {})
    return ClusterView(
        observed_s=board.observed_s,
        round=number,
        policy=str(chosen.policy),
        paused=chosen.paused,
        gpus=gpus,
        allocated=allocated,
        others=others,
        unusable=unusable,
        jobs=jobs,
        prices=prices,
        new_jobs=[] if board.estimates is None else board.estimates.new,
        daemon_silent_since_s=daemon.silent_since_s,
    )


def round_view(record: RoundRecord, may_see: Callable[[str], bool]) -> RoundView:
    """A round and its decisions on the jobs of users that the caller `may_see`."""
    visible = {job.id for job in record.snapshot.jobs if may_see(job.user)}
    decisions = [
        Decision(
            job=job,
            allocation=allocation_view(assignment.placement),
            code=assignment.reason.code.value,
            text=assignment.reason.text,
            goodput=assignment.goodput,
        )
        for job, assignment in record.plan.assignments.items()
    ]
    decisions += [
        Decision(job=job, code=reason.code.value, text=reason.text) for job, reason in record.plan.waiting.items()
    ]
    return RoundView(
        summary=summarise(record),
        decisions=[each for each in decisions if each.job in visible],
        refused=list(record.gate.refused),
        would_stop={job: str(stop) for job, stop in record.gate.stops.items() if job in visible},
    )


def history_view(store: SqlStore, job: str) -> History:
    """What happened to a job. Raises StoreError."""
    outcomes = list(store.outcomes(job))
    observations = store.observations(job, OBSERVATIONS)
    results = store.newest_reports(job, ("result",), RESULTS)
    return History(
        job=job,
        outcomes=[
            OutcomeView(
                time_s=line.time_s,
                round=line.action.round,
                job=job,
                action=line.action.kind,
                progress=line.progress.value,
                text=line.text,
                stop=str(line.stop or ""),
                allocation=allocation_view(placement)
                if (placement := getattr(line.action, "placement", None))
                else None,
            )
            for line in outcomes[-MAX_PAGE:]
        ],
        observations=[report.model_dump(mode="json") for report in observations],
        results=[report.model_dump(mode="json") for report in results],
    )


def explanation_view(known: Known, view: JobView) -> ExplanationView:
    """Why a job has what it has, by the newest round, and why its last run was stopped. Raises StoreError."""
    if view.state == "ended":
        found = _end_explained(view, known.store.newest_reports(view.id, ("checkpointed",), 1))
    else:
        found = _explanation_view(view, known.record)
    if not view.stopped or any(view.stopped.partition(": ")[2] in line for line in found.lines):
        return found
    return found.model_copy(
        update={"lines": [*found.lines, f"Its run was last stopped for this reason: {view.stopped}."]}
    )


def _end_explained(view: JobView, checkpoints: Sequence[Report]) -> ExplanationView:
    """How a job ended, and where a new job can go on. `checkpoints`: the newest report of one, if there is any."""
    status = f", exit code {view.exit_code}" if view.exit_code else ""
    lines = [f"Job {view.id} has ended: {view.ended}{status}."]
    lines += [f"It {view.ended_text}."] if view.ended_text else []
    lines += describe_result(view)
    for report in checkpoints if view.ended != "COMPLETED" else ():
        assert isinstance(report.body, Checkpointed)
        of_all = f" of {view.total:.0f}" if view.total else ""
        age = "" if view.end_s is None else f", saved {duration(max(view.end_s - report.time_s, 0.0))} before its end"
        lines.append(
            f"Its newest checkpoint has {report.body.progress:.0f}{of_all} samples{age}. With penstock_executor, a "
            f"new job goes on from there: sbatch --export=ALL,PENSTOCK_CONTINUE={view.id} SCRIPT."
        )
    text = f"it has ended: {view.ended}" + (f": it {view.ended_text}" if view.ended_text else "")
    return ExplanationView(job=view, code="ended", text=text, lines=lines)


def _explanation_view(view: JobView, record: RoundRecord | None) -> ExplanationView:
    if view.note:
        since = [] if view.note_s is None else [f"Penstock has seen this since {moment(view.note_s)}."]
        lines = [f"Job {view.id} {view.note}.", *since, *describe_result(view)]
        return ExplanationView(job=view, code=view.reason, text=view.note, lines=lines)
    found = explain(record, view.id) if record else None
    if record is None or found is None:
        refusal = next((each for each in record.snapshot.refused if each.job == view.id), None) if record else None
        if refusal is not None:
            lines = [f"Penstock does not manage job {view.id}: {refusal.text}."]
            return ExplanationView(job=view, code="refused", text=refusal.text, lines=lines)
        text = "no round has considered the job yet; the next round will"
        lines = [f"No round has considered job {view.id} yet. The next round will."]
        return ExplanationView(job=view, code="not-seen", text=text, lines=lines)
    # The round's snapshot is older than its actions. The user wants to read of the job as it is now.
    found = dataclasses.replace(
        found, job=dataclasses.replace(found.job, phase=Phase(view.state), suspension=view.suspended)
    )
    return ExplanationView(
        job=view,
        round=found.round,
        decided_s=found.decided_s,
        code=found.reason.code.value,
        text=found.reason.text,
        lines=[*words(found, now_s=site_time_s(), estimate=view.estimate), *describe_result(view)],
        needs=found.reason.needs,
        estimated_start_s=found.reason.estimated_start_s,
        goodput=found.assignment.goodput if found.assignment else None,
        prices=record.plan.prices,
        restart_cost_s=found.restart_cost_s,
        configurations=[
            ConfigurationView(
                gpu_type=option.configuration.gpu_type,
                nodes=option.configuration.nodes,
                gpus=option.configuration.gpus,
                goodput=option.goodput,
                price=option.price,
            )
            for option in found.options
        ],
        limits=list(found.limits),
        share=None if found.share is None else share_view(found.share),
    )


def describe_result(view: JobView) -> list[str]:
    """The newest result of a trial, in a sentence; nothing if the job reports no results."""
    if (result := view.result) is None:
        return []
    ran = duration(result.ran_s)
    return [f"Its newest result is {result.metric:.6g} (higher is better), after it had run for {ran}."]


def share_view(use: ShareUse) -> ShareView:
    """CPU and memory of a job, for clients."""
    return ShareView(
        cpus=use.amount.cpus,
        memory_mb=use.amount.memory_mb,
        part_cpus=use.part.cpus,
        part_memory_mb=use.part.memory_mb,
        profile=use.profile,
        speed=use.speed,
        sensitivity=[ShareOption.model_validate(option._asdict()) for option in use.options],
    )


def _all_are_silent(nodes: Iterable[Node], order: PlanOrder) -> bool:
    """Whether no node of the job's GPU types takes jobs now, as for a moment after a start of slurmctld."""
    own = [node for node in nodes if order.spec.allows_type(node.gpu_type)]
    return bool(own) and not any(node.may_start for node in own)


def forecast(record: RoundRecord, order: PlanOrder, user: str, models: ModelSource, limits: LimitSettings) -> Forecast:
    """What the recorded policy would decide if its last round had one more job.

    Raises:
        BadJobSpec: Penstock does not manage a partition of the job.
        Refusal: the round cannot be decided with this job.
    """
    before, nodes = record.snapshot, order.nodes
    chosen = NodeChoice(frozenset(nodes.only), frozenset(nodes.exclude), frozenset(map(frozenset, nodes.features)))
    job = Job(
        FORECAST,
        order.name or "",
        user,
        order.spec,
        _partitions(before, order.partition),
        Phase.QUEUED,
        before.time_s,
        account=order.account or "",
        qos=order.qos or "",
        reservation=order.reservation or "",
        nodes=None if chosen == NodeChoice() else chosen,
        time_limit_s=order.time_limit_s,
    )
    types = {node.gpu_type for node in before.nodes}
    (job,), known = by_partition(limits.partitions, [job], models.facts([job], types))
    policy, _ = make_policy(record.policy)
    now_s = site_time_s()
    try:
        answer = ask(
            policy,
            with_job(before, job, known, site_limits(limits, [job], before.unseen)),
            FORECAST,
            without=record.plan,
        )
    except RoundFailed as error:
        raise Refusal(503, "not-ready", str(error), retry_after_s=5) from None
    assignment, reason = answer.assignment, answer.reason
    never = reason.code is ReasonCode.NEVER_FITS and not _all_are_silent(before.nodes, order)
    price = answer.plan.prices.get(assignment.placement.gpu_type) if assignment is not None else None
    return Forecast(
        would="start" if assignment is not None else "never" if never else "wait",
        code=reason.code.value,
        text=reason.text,
        needs=reason.needs,
        allocation=None if assignment is None else allocation_view(assignment.placement),
        goodput=None if assignment is None else assignment.goodput,
        price=None if assignment is None or price is None else price * assignment.placement.gpus,
        estimated_start_s=None if never else answer.start_s,
        displaced=len(answer.others),
        lines=[
            *describe_forecast(answer, now_s),
            f"Decided by the policy {policy.name} on round {before.round}, {duration(max(now_s - before.time_s, 0.0))} "
            "old; other jobs may arrive before the real round.",
        ],
    )


def _partitions(snapshot: Snapshot, given: str | None) -> tuple[str, ...]:
    """Managed partitions in which a new job may run, first those to which it is submitted. Raises BadJobSpec."""
    managed = [each.name for each in snapshot.partitions] or sorted(
        {name for node in snapshot.nodes for name in node.partitions}
    )
    asked = tuple(filter(None, (given or "").split(",")))
    if unmanaged := [name for name in asked if name not in managed]:
        raise BadJobSpec(f"Penstock does not manage partition {', '.join(unmanaged)}; it manages {', '.join(managed)}")
    first = asked or tuple(managed[:1])
    return (*first, *(name for name in managed if name not in first))
