"""Endpoints about what was. They read the store alone, so they answer alike in every process, also while no round is decided."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from penstock_scheduler.history_messages import Allocations, AllocationSpan
from penstock_scheduler.messages import MAX_PAGE
from penstock_scheduler.service.api import Call, User, storable
from penstock_scheduler.service.errors import Refusal

Time = Annotated[float | None, Query(ge=0, le=2**53, allow_inf_nan=False)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[str | None, Query(max_length=300)]

DAY_S = 86_400.0

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
    from_s: Annotated[Time, Query(alias="from")] = None,
    to_s: Annotated[Time, Query(alias="to")] = None,
    after: After = None,
    limit: Limit = MAX_PAGE,
) -> Allocations:
    """Show which jobs held which GPUs between two times, in s since 1970; by default now. Causes are shown of own jobs."""
    end_s = time.time() if to_s is None else to_s
    begin_s = end_s if from_s is None else from_s
    cursor = None if after is None else _cursor(after)
    page = _page(call.api.store.spans_between(begin_s, math.nextafter(end_s, math.inf), limit, cursor), limit)
    spans = [_for(call, span) for span in page.spans if call.may_see_of("jobs", span.user)]
    return page.model_copy(update={"spans": spans})


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
