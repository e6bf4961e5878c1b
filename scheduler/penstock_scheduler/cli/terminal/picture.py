"""What `penstock top` shows at one moment, from penstockd's API or from the record of a round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from penstock_scheduler.api.estimate_messages import in_words
from penstock_scheduler.api.messages import NodeView, RefusedJob
from penstock_scheduler.cli.ask import asks_for
from penstock_scheduler.model import Job, Phase

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client
    from penstock_scheduler.api.messages import JobView, RoundView
    from penstock_scheduler.model.records import RoundRecord

MAX_JOBS = 2000
"""Most jobs on the screen, the newest ones. Fetching 500 takes one request."""

LIVE = ("queued", "starting", "running", "stopping")


@dataclass(frozen=True)
class Line:
    """A job in the table."""

    id: str
    name: str
    user: str
    asks: str
    state: str
    gpus: int
    gpu_type: str
    nodes: dict[str, int]
    """Node -> GPUs of the job on it."""
    why: str
    """Why it waits or has its GPUs, in a sentence."""
    submit_s: float
    placed: bool
    """Whether the newest round gives it GPUs."""
    progress: float | None = None
    """Share of its work that is done; None: not known."""

    @property
    def order(self) -> tuple[bool, float, int, str]:
        """Jobs with GPUs first, then by age, then by number."""
        return not self.placed, self.submit_s, len(self.id), self.id


@dataclass(frozen=True)
class Picture:
    """The cluster and the jobs that the caller may see. Times in s since 1970."""

    round: int | None
    """None: no round has been decided."""
    decided_s: float
    policy: str
    nodes: tuple[NodeView, ...]
    lines: tuple[Line, ...]
    """In `order`."""
    refused: tuple[RefusedJob, ...] = ()
    prices: dict[str, float] = field(default_factory=dict)
    paused: bool = False
    note: str = ""
    """What is special about the round; empty: nothing."""
    more: bool = False
    """Whether there are more jobs than are shown."""

    @property
    def placed(self) -> int:
        """Jobs that have GPUs in the newest round."""
        return sum(line.placed for line in self.lines)


@dataclass(frozen=True)
class GpuCounts:
    """The GPUs of one type."""

    nodes: tuple[NodeView, ...]
    total: int
    allocated: int
    """GPUs that Penstock's jobs hold."""
    others: int
    """GPUs that other jobs hold."""
    out: int
    """GPUs on nodes where nothing may start, and free GPUs that lack CPUs or memory."""

    def __str__(self) -> str:
        text = f"{self.allocated} of {self.total} allocated"
        text += f", {self.others} used by other jobs" if self.others else ""
        return text + (f", {self.out} out of service" if self.out else "")


def by_type(nodes: Sequence[NodeView]) -> dict[str, GpuCounts]:
    """GPU type -> its nodes and GPUs, in the order of the names."""
    found = {}
    for gpu_type in sorted({node.gpu_type for node in nodes}):
        its = tuple(node for node in nodes if node.gpu_type == gpu_type)
        found[gpu_type] = GpuCounts(
            its,
            sum(node.gpus for node in its),
            sum(node.allocated for node in its),
            sum(node.others for node in its),
            sum(node.out_of_reach if node.may_start else node.gpus for node in its),
        )
    return found


class Watcher:
    """Fetches pictures from penstockd. A round's decisions are fetched once."""

    def __init__(self, penstock: Client) -> None:
        self.penstock = penstock
        self._round: RoundView | None = None

    def look(self) -> Picture:
        """The cluster as it is now. Raises what Client raises."""
        cluster = self.penstock.cluster()
        if cluster.round is not None and (self._round is None or self._round.summary.round != cluster.round):
            self._round = self.penstock.round(cluster.round)
        decided = self._round
        reasons = {each.job: each.text for each in decided.decisions} if decided else {}
        placed = {each.job for each in decided.decisions if each.allocation is not None} if decided else set()
        jobs = list(islice(self.penstock.jobs(state=LIVE), MAX_JOBS + 1))
        lines = [_line(view, reasons.get(view.id, ""), placed=view.id in placed) for view in jobs[:MAX_JOBS]]
        return Picture(
            cluster.round,
            decided.summary.time_s if decided else time.time(),
            cluster.policy,
            tuple(self.penstock.nodes()),
            tuple(sorted(lines, key=lambda line: line.order)),
            tuple(self.penstock.refused()),
            cluster.prices,
            paused=cluster.paused,
            more=len(jobs) > MAX_JOBS,
        )


def _line(view: JobView, why: str, *, placed: bool) -> Line:
    where = view.allocation
    return Line(
        view.id,
        view.name,
        view.user,
        asks_for(view.spec),
        view.suspended.state if view.suspended else view.state,
        where.gpus if where else 0,
        where.gpu_type if where else "",
        dict(where.nodes) if where else {},
        view.note or _with_start(view, why) or "no round has considered it yet",
        view.submit_s,
        placed=placed,
        progress=min(view.progress / view.total, 1.0) if view.progress is not None and view.total else None,
    )


def _with_start(view: JobView, why: str) -> str:
    """Why a job waits, with its expected start."""
    found = view.estimate
    if view.state != "queued" or not why or found is None or found.start is None:
        return why
    return f"{why}; it is expected to start {in_words(found.start, found.probability, time.time())}"


def recorded(record: RoundRecord) -> Picture:
    """The cluster as a round saw it, with what the round decided."""
    plan, state = record.plan, record.snapshot
    held: dict[str, int] = {}
    for assignment in plan.assignments.values():
        for share in assignment.placement.shares:
            held[share.node] = held.get(share.node, 0) + share.gpus
    nodes = tuple(
        NodeView(
            name=node.name,
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            allocated=held.get(node.name, 0),
            others=node.gpus_others,
            out_of_reach=node.gpus_out_of_reach,
            may_start=node.may_start,
            leave=node.leave.cause if node.leave is not None else "",
            state=node.state,
            reservation=node.reservation,
            boot_s=node.boot_s,
            note=node.note,
        )
        for node in state.nodes
    )
    lines = []
    for job in state.jobs:
        given = plan.assignments.get(job.id)
        why = given.reason if given else plan.waiting[job.id]
        lines.append(_recorded_line(job, why.text, placed=given is not None))
    note = ""
    if plan.cut_short and plan.solve is not None:
        note = f"stopped at the time limit, within {plan.solve.gap:.1%} of the best plan"
    return Picture(
        plan.round,
        state.time_s,
        str(record.policy),
        nodes,
        tuple(sorted(lines, key=lambda line: line.order)),
        tuple(RefusedJob(id=each.job, name=each.name, user=each.user, text=each.text) for each in state.refused),
        plan.prices,
        note=note,
    )


def _recorded_line(job: Job, why: str, *, placed: bool) -> Line:
    where = job.allocation if job.phase is not Phase.QUEUED else None
    return Line(
        job.id,
        job.name,
        job.user,
        asks_for(job.spec),
        job.suspension.state if job.suspension else job.phase.value,
        where.gpus if where else 0,
        where.gpu_type if where else "",
        {share.node: share.gpus for share in where.shares} if where else {},
        why,
        job.submit_s,
        placed=placed,
    )
