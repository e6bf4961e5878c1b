"""Endpoints about what was. They read the store alone, so they answer alike in every process, also while no round is decided."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from penstock_scheduler.api.history_messages import (
    Allocations,
    AllocationSpan,
    JobSeries,
    Queue,
    QueueEntry,
    Series,
)
from penstock_scheduler.api.messages import MAX_PAGE
from penstock_scheduler.daemon.service.api import Call, User, storable
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.waits import numbered
from penstock_scheduler.store.leadership.site_clock import site_time_s

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[str | None, Query(max_length=300)]

From = Annotated[float | None, Query(alias="from", ge=0, le=2**53, allow_inf_nan=False)]
To = Annotated[float | None, Query(alias="to", ge=0, le=2**53, allow_inf_nan=False)]
Step = Annotated[int | None, Query(alias="step", ge=1, le=366 * 86_400)]
Name = Annotated[str, StringConstraints(max_length=255)]

DAY_S = 86_400.0
POINTS, MOST_POINTS = 500, 2000
"""Points of a series, by default and at most."""

router = APIRouter(prefix="/v1")


@router.get("/jobs/{job}/allocations")
async def get_job_allocations(job: str, call: User, after: After = None, limit: Limit = MAX_PAGE) -> Allocations:
    """Show which GPUs a job held when, and what changed that."""
    await call.job(job)
    after_s = None if after is None else _cursor(after)[1]
    return _page(await asyncio.to_thread(call.api.store.job_spans, job, after_s, limit), limit)


@router.get("/allocations")
def get_allocations(
    call: User,
    from_s: From = None,
    to_s: To = None,
    after: After = None,
    limit: Limit = MAX_PAGE,
) -> Allocations:
    """Show which jobs held which GPUs between two times, in s since 1970; by default now. Causes are shown of own jobs."""
    end_s = site_time_s() if to_s is None else to_s
    begin_s = end_s if from_s is None else from_s
    cursor = None if after is None else _cursor(after)
    page = _page(call.api.store.spans_between(begin_s, math.nextafter(end_s, math.inf), limit, cursor), limit)
    spans = [_for(call, span) for span in page.spans if call.may_see_of("jobs", span.user)]
    return page.model_copy(update={"spans": spans})


@router.get("/jobs/{job}/series")
async def get_job_series(job: str, call: User, from_s: From = None, to_s: To = None, step_s: Step = None) -> JobSeries:
    """Show how a job ran over time: progress, goodput measured and expected, batch size, use of its GPUs."""
    view = await call.job(job)
    end_s = site_time_s() if to_s is None else to_s
    begin_s = (view.start_s or view.submit_s) if from_s is None else from_s
    step = _step(begin_s, min(end_s, site_time_s()), step_s)
    samples = await asyncio.to_thread(call.api.store.samples, job, begin_s, end_s, step)
    return JobSeries(job=job, step_s=step, samples=samples)


@router.get("/series")
def get_series(
    call: User,
    from_s: From = None,
    to_s: To = None,
    step_s: Step = None,
    name: Annotated[list[Name], Query(max_length=100)] = [],  # noqa: B006
) -> Series:
    """Show the cluster over time: GPUs by type, jobs, prices, rounds. By default the last day, and all names."""
    now_s = site_time_s()
    end_s = now_s if to_s is None else to_s
    begin_s = max(end_s - DAY_S, 0.0) if from_s is None else from_s
    step = _step(begin_s, min(end_s, now_s), step_s)
    wanted = [each for each in name if storable(each)]
    if name and not wanted:
        return Series(step_s=step, series={})
    return Series(step_s=step, series=call.api.store.series(wanted, begin_s, end_s, step))


@router.get("/queue")
def get_queue(
    call: User,
    user: Annotated[str | None, Query(max_length=255)] = None,
    account: Annotated[str | None, Query(max_length=255)] = None,
    partition: Annotated[str | None, Query(max_length=255)] = None,
    code: Annotated[str | None, Query(max_length=32)] = None,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Limit = MAX_PAGE,
) -> Queue:
    """Show which jobs hold no GPUs, and why, in the order of submission. Reasons are shown as sentences of own jobs."""
    entries = numbered(call.api.store.waits())
    wanted = {"user": user, "account": account, "partition": partition, "code": code}
    shown = [
        (place, entry)
        for place, entry in enumerate(entries, 1)
        if place > after
        and all(value is None or getattr(entry, field) == value for field, value in wanted.items())
        and call.may_see_of("jobs", entry.user)
    ]
    page = [_estimated(call, entry if call.may_see(entry.user) else _outside(entry)) for _, entry in shown[:limit]]
    return Queue(entries=page, waiting=len(entries), next=shown[limit - 1][0] if len(shown) > limit else None)


def _estimated(call: Call, entry: QueueEntry) -> QueueEntry:
    estimates = call.api.known.estimates
    found = None if estimates is None else estimates.of(entry.job, entry.submit_s, waits=True)
    return entry if found is None else entry.model_copy(update={"estimate": found})


def _outside(entry: QueueEntry) -> QueueEntry:
    """A job of another user in the queue, as squeue shows it."""
    return entry.model_copy(update={"text": "", "needs": ""})


def _step(from_s: float, to_s: float, wanted_s: int | None) -> int:
    """Seconds from point to point: as wanted, but not so short that an answer has more than `MOST_POINTS`."""
    least = math.ceil(max(to_s - from_s, 0.0) / MOST_POINTS)
    return max(wanted_s or math.ceil(max(to_s - from_s, 0.0) / POINTS), least, 1)


def _page(spans: Sequence[AllocationSpan], limit: int) -> Allocations:
    last = spans[-1] if len(spans) == limit else None
    return Allocations(spans=list(spans), next=None if last is None else f"{last.job}:{last.from_s!r}")


def _cursor(after: str) -> tuple[str, float]:
    """(job, beginning) of the span that the page before ended with. Raises Refusal."""
    job, _, begin = after.rpartition(":")
    try:
        begin_s = float(begin)
    except ValueError:
        begin_s = math.nan
    if not job or not math.isfinite(begin_s) or not storable(job):
        raise Refusal(422, "bad-body", "after: give the value of `next` of the page before")
    return job, begin_s


def _for(call: Call, span: AllocationSpan) -> AllocationSpan:
    """A span as the caller may see it: why others got and lost their GPUs is theirs to know."""
    if call.may_see(span.user):
        return span
    return span.model_copy(update={"cause": "", "end": "", "end_text": ""})
