"""The page of a job: what it held and why, how fast it is, what else it could have, its output, and what its owner may do."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock_scheduler.api.history_messages import AllocationSpan, JobSample
from penstock_scheduler.api.messages import ExplanationView, JobView, LogPart
from penstock_scheduler.daemon.service import views
from penstock_scheduler.daemon.service.api import Call
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.web import drawings
from penstock_scheduler.daemon.service.web.cells import World
from penstock_scheduler.daemon.service.web.queue import progress
from penstock_scheduler.daemon.service.web.render import Fragments, block
from penstock_scheduler.people.units import dollars, duration
from penstock_scheduler.store.leadership.site_clock import site_time_s

TEMPLATE = "job.html"

TAIL_BYTES = 16 * 1024
"""Bytes from the end of the job's output."""
POINTS = 300
"""Points of a series."""
SPANS = 40
"""Newest allocation spans in the list."""
SAMPLES_S, LOG_S = 20.0, 2.0
"""How often samples and the output are read."""
KEPT = 400
"""Explanations and series that are kept for the next viewer of the same job."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A job, read for its page."""

    view: JobView
    explanation: ExplanationView
    spans: Sequence[AllocationSpan]
    samples: Sequence[JobSample]
    log: LogPart | None
    usd: float | None
    """What it has cost so far; None: the site has no prices."""
    note: str = ""
    """Why the output is not shown."""


class Reader:
    """Reads what a job's page needs, for all its viewers. Answers of the same job are kept for as long as they hold."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[object, float, object]] = OrderedDict()
        """(kind, job) -> what it holds for, when it was read, and the answer."""

    async def read(self, call: Call, job: str) -> Facts:
        """The job as the viewer may see it. Raises Refusal 404 and PenstockError."""
        view = await call.job(job)
        api, newest = call.api, call.api.known.round
        spans = await asyncio.to_thread(api.store.job_spans, job)

        async def explain() -> ExplanationView:
            async with api.deciding.turn(call.identity.user):
                return await asyncio.to_thread(lambda: views.explanation_view(api.known, view))

        async def samples() -> list[JobSample]:
            # A job that penstockd took over has held GPUs for longer than it has been known.
            begin_s = min([view.start_s or view.submit_s, *(span.from_s for span in spans)])
            end_s = view.end_s or site_time_s()
            step = max(int((end_s - begin_s) / POINTS), 1)
            return await asyncio.to_thread(api.store.samples, job, begin_s, end_s + 1, step)

        async def log() -> LogPart | str:
            try:
                return await api.daemon.read_log(call, view, "stdout", -TAIL_BYTES, TAIL_BYTES)
            except Refusal as refusal:
                return str(refusal)

        round_ = None if newest is None else newest[0]
        explanation = await self._get("explain", job, (round_, view.version, view.state), 600.0, explain)
        sampled = await self._get("samples", job, view.state, SAMPLES_S, samples)
        output = await self._get("log", job, view.state, LOG_S, log)
        return Facts(
            view=view,
            explanation=explanation,
            spans=spans,
            samples=sampled,
            log=output if isinstance(output, LogPart) else None,
            usd=cost(view, api.daemon.chosen.prices),
            note="" if isinstance(output, LogPart) else output,
        )

    async def _get(self, kind: str, job: str, holds_for: object, life_s: float, read):  # type: ignore[no-untyped-def]
        kept = self._kept.get((kind, job))
        if kept is not None and kept[0] == holds_for and time.monotonic() - kept[1] < life_s:
            return kept[2]
        found = await read()
        self._kept[kind, job] = holds_for, time.monotonic(), found
        self._kept.move_to_end((kind, job))
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found


def cost(view: JobView, prices: Mapping[str, float]) -> float | None:
    """What a job has cost at the site's prices, USD; None: a type has no price."""
    if not prices or any(name not in prices for name in view.gpu_seconds):
        return None
    return sum(held / 3600 * prices[name] for name, held in view.gpu_seconds.items())


def fragments(call: Call, world: World, facts: Facts) -> Fragments:
    """The page."""
    view, now_s = facts.view, world.time_s
    end_s = view.end_s if view.state == "ended" and view.end_s is not None else now_s
    most = max((span.gpus for span in facts.spans), default=0)
    busy = world.busy.get(view.id)
    present = None if view.allocation is None else (view.allocation.gpu_type, view.allocation.gpus)
    parts = {
        "head": block(
            TEMPLATE, "head", job=view, busy=busy, done=progress(view), end=_end(facts, now_s), cost=_cost(facts)
        ),
        "explain": block(TEMPLATE, "explain", lines=facts.explanation.lines, limits=facts.explanation.limits, job=view),
        "actions": block(TEMPLATE, "actions", job=view),
        "strip": drawings.strip(facts.spans, view.submit_s, _rounded(end_s, end_s - view.submit_s), most)
        if most
        else "",
        "spans": block(TEMPLATE, "spans", rows=_rows(facts.spans, end_s)),
        "curve": drawings.curve(facts.explanation.configurations, present),
        "options": block(TEMPLATE, "options", options=_options(facts, present)),
        "series": block(TEMPLATE, "series", series=json.dumps(_series(facts.samples))),
        "log": block(TEMPLATE, "log", log=facts.log, note=facts.note),
    }
    return Fragments(parts, "", {"job": view})


def _rounded(end_s: float, length_s: float) -> float:
    """The end of the picture: it moves on by a pixel at a time, so that it need not be sent each second."""
    step = max(length_s / 300, 5.0)
    return (end_s // step + 1) * step


def _end(facts: Facts, now_s: float) -> float | None:
    """When the job will have ended at its present goodput, s since 1970, to the minute; None: not known."""
    view = facts.view
    since_s = facts.spans[-1].from_s if facts.spans else 0.0  # samples from before are of another configuration
    recent = (sample.goodput for sample in reversed(facts.samples) if sample.goodput and sample.time_s > since_s)
    speed = next(recent, facts.explanation.goodput)
    if view.state != "running" or not speed or not view.total or view.progress is None:
        return None
    return round((now_s + max(view.total - view.progress, 0.0) / speed) / 60) * 60.0


def _cost(facts: Facts) -> str:
    held = ", ".join(f"{amount / 3600:.2f} {name}" for name, amount in sorted(facts.view.gpu_seconds.items()))
    money = "" if facts.usd is None else f" ({dollars(facts.usd)})"
    return f"{held or '0'}{money}"


@dataclass(frozen=True, slots=True)
class SpanRow:
    """An allocation span in the list."""

    span: AllocationSpan
    length: str
    restart: bool
    """Whether the run before was stopped for it."""
    without: str
    """For how long the job had held no GPUs before, which is what the restart cost; empty: it did not."""


def _rows(spans: Sequence[AllocationSpan], end_s: float) -> list[SpanRow]:
    rows: list[SpanRow] = []
    for at, span in enumerate(spans):
        before = spans[at - 1] if at else None
        restart = before is not None and before.run_s != span.run_s
        gap_s = span.from_s - before.to_s if restart and before is not None and before.to_s is not None else 0.0
        to_s = end_s if span.to_s is None else span.to_s
        length = duration(max(to_s - span.from_s, 0.0)) if span.to_s is not None else ""
        rows.append(SpanRow(span, length, restart, duration(gap_s) if restart else ""))
    return rows[::-1][:SPANS]


def _options(facts: Facts, present: tuple[str, int] | None) -> str:
    """What the slider needs, as JSON: GPU type -> [GPUs, nodes, goodput, price] of each number of GPUs."""
    view = facts.view
    lines = {
        name: [[gpus, each.nodes, each.goodput, each.price] for gpus, each in line.items()]
        for name, line in drawings.best(facts.explanation.configurations).items()
    }
    left = None if not view.total else max(view.total - (view.progress or 0.0), 0.0)
    return json.dumps({"lines": lines, "left": left, "present": present, "restart_s": facts.explanation.restart_cost_s})


def _series(samples: Sequence[JobSample]) -> dict[str, list[float | int | None]]:
    return {
        "time": [sample.time_s for sample in samples],
        "measured": [sample.goodput for sample in samples],
        "expected": [sample.expected for sample in samples],
        "progress": [sample.progress for sample in samples],
        "busy": [None if sample.utilisation is None else round(100 * sample.utilisation, 1) for sample in samples],
        "memory": [sample.memory_mb for sample in samples],
        "batch": [sample.batch for sample in samples],
        "gpus": [sample.gpus for sample in samples],
    }
