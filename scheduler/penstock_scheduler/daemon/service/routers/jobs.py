"""Endpoints about jobs: submit, list, wait, cancel, explain, history, output, reports."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse

from penstock_scheduler.api.lease_messages import Renewal, Renewed
from penstock_scheduler.api.messages import (
    MAX_LOG_BYTES,
    MAX_PAGE,
    MAX_WAIT_S,
    ExplanationView,
    Forecast,
    History,
    JobPage,
    JobView,
    LogPart,
    OwnerView,
    PlanOrder,
    ReportBatch,
    ReportReceipt,
    Submission,
)
from penstock_scheduler.daemon.service import reporting, submitting, views
from penstock_scheduler.daemon.service.api import AnyRole, Call, User, storable
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.forwarding import Route
from penstock_scheduler.daemon.service.output import Stream

router = APIRouter(prefix="/v1", route_class=Route)


@router.post("/jobs", status_code=201, responses={200: {"model": JobView}})
async def submit(order: Submission, call: User, response: Response) -> JobView:
    """Submit a job as yourself. Answers 200 with the job of the same key if there is one."""
    view, submitted = await submitting.submit(call, order)
    if not submitted:
        response.status_code = 200
    return view


@router.post("/jobs/plan")
async def plan(order: PlanOrder, call: User) -> Forecast:
    """Show what a job would get now. Nothing is submitted."""
    api = call.api
    api.here.check_spec(order.spec)
    record = api.board.record
    if record is None:
        raise Refusal(503, "not-ready", "no round has been decided yet; try again", retry_after_s=5)
    async with api.deciding.turn(call.identity.user):
        limits = api.controls.rules.limits
        return await asyncio.to_thread(views.forecast, record, order, call.identity.user, api.here.models, limits)


@router.get("/owner")
async def get_owner(name: Annotated[str, Query(max_length=200)], call: User) -> OwnerView:
    """Show an owner of your own jobs, and its newest job."""
    found = await asyncio.to_thread(call.api.store.owner, call.identity.user, name) if storable(name) else None
    if found is None:
        raise Refusal(404, "no-such-owner", "no job of yours was submitted for this owner")
    return found


@router.get("/jobs")
def list_jobs(
    call: User,
    user: Annotated[str | None, Query(max_length=255)] = None,
    state: Annotated[list[Literal["queued", "starting", "running", "stopping", "ended"]], Query()] = [],  # noqa: B006
    name: Annotated[str | None, Query(max_length=1000)] = None,
    key: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
) -> JobPage:
    """List jobs, newest first. Users see only their own jobs."""
    if not call.sees_all:
        if user not in (None, call.identity.user):
            return JobPage(jobs=[])
        user = call.identity.user
    if not all(storable(text) for text in (user, name, key)):
        return JobPage(jobs=[])
    found = call.api.store.jobs(user=user, states=state, name=name, key=key, after=after, limit=limit)
    shown = [call.api.known.shown(view) for _, view in found]
    silent_since_s = call.api.daemon.silent_since_s
    return JobPage(
        jobs=shown, next=str(found[-1][0]) if len(found) == limit else None, daemon_silent_since_s=silent_since_s
    )


@router.get("/jobs/{job}")
async def get_job(
    job: str,
    call: User,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
    since: Annotated[int | None, Query(ge=0, le=2**62)] = None,
) -> JobView:
    """Show a job. With `wait` and `since`: as soon as its version is above `since`, at the latest after `wait` seconds."""
    view = await call.job(job)
    if wait and since is not None and view.state != "ended" and view.version <= since:
        with call.api.place_to_wait(call.identity.user):
            await call.api.known.wait_for_change(job, since, wait)
        view = await call.job(job)
    return view


@router.post("/jobs/renew")
async def renew(order: Renewal, call: User) -> Renewed:
    """Renew the leases of own jobs."""
    leases = call.api.leases
    assert leases is not None, "penstockd has them"
    return Renewed(jobs=leases.renew(call.identity.user, order.jobs))


async def _may_act(call: Call, view: JobView) -> bool:
    """Whether there still is a job to act on. Raises Refusal if it is another user's."""
    await call.audit(allowed=True)
    return await call.expect_owner(view)


@router.post("/jobs/{job}/cancel")
async def cancel(job: str, call: User, for_owner: bool = False) -> JobView:
    """End a job. A job that has ended stays as it is.

    With `for_owner`, the job's owner itself gives it up, and its next try submits another one. Without, no later try of the same
    generation does.
    """
    view = await call.job(job)
    if view.state != "ended" and await _may_act(call, view):
        owner = await asyncio.to_thread(call.api.store.owner_of, job) if for_owner else None
        if owner is None or owner[0] != view.user:  # the owner's was a former job of this id
            await submitting.cancel(call.api, job, call.identity.user, admin=call.sees_all)
        else:
            await submitting.give_up(call.api, job, owner)
    return view


async def _not_ended(call: Call, job: str) -> JobView:
    """The job to hold or release. Raises Refusal if it has ended, or is another user's."""
    view = await call.job(job)
    if view.state == "ended" or not await _may_act(call, view):
        raise Refusal(409, "job-ended", f"job {job} has ended, so nothing of it can be held or released")
    return view


@router.post("/jobs/{job}/hold")
async def hold(job: str, call: User) -> JobView:
    """Keep a job from being started until it is released. A running job continues."""
    view = await _not_ended(call, job)
    ask = functools.partial(call.api.submitter.hold, job, call.identity.user, admin=call.sees_all)
    await submitting.ask_cluster(call.api, call.identity.user, ask)
    return view


@router.post("/jobs/{job}/release")
async def release(job: str, call: User) -> JobView:
    """Let a held job start again. Only operators release a job that an admin holds."""
    view = await _not_ended(call, job)
    ask = functools.partial(call.api.submitter.release, job, admin=call.sees_all)
    await submitting.ask_cluster(call.api, call.identity.user, ask)
    return view


@router.get("/jobs/{job}/explain")
async def get_explanation(job: str, call: User) -> ExplanationView:
    """Explain why a job has what it has."""
    return await _explain(call, await call.job(job))


async def _explain(call: Call, view: JobView) -> ExplanationView:
    async with call.api.deciding.turn(
        call.identity.user
    ):  # an explanation decides the round again with other job specs
        return await asyncio.to_thread(lambda: views.explanation_view(call.api.known, view))


@router.get("/jobs/{job}/history")
async def history(job: str, call: User) -> History:
    """Show what happened to a job: actions of rounds, newest observations and results."""
    await call.job(job)
    return await asyncio.to_thread(views.history_view, call.api.store, job)


@router.get("/jobs/{job}/page", response_class=RedirectResponse, status_code=303)
async def get_page(job: str, call: User) -> str:
    """Go to the job's page."""
    await call.job(job)
    return f"/jobs/{quote(job, safe='')}"


@router.get("/jobs/{job}/log")
async def get_log(
    job: str,
    call: User,
    offset: Annotated[int, Query(ge=-(2**62), le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = MAX_LOG_BYTES,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
    stream: Stream = "stdout",
) -> LogPart:
    """Show a part of a job's output. With `wait`: as soon as there is some, at the latest after `wait` seconds."""
    view = await call.job(job)
    until_s = time.monotonic() + wait
    while True:
        part = await call.api.daemon.read_log(call, view, stream, offset, limit)
        if part.text or part.ended or time.monotonic() >= until_s:
            return part
        await asyncio.sleep(min(1.0, max(until_s - time.monotonic(), 0.01)))
        view = await call.job(job)


@router.post("/jobs/{job}/reports")
async def report(job: str, batch: ReportBatch, call: AnyRole) -> ReportReceipt:
    """Take in reports of a job. Only the job's owner, or a token of the job, may send them."""
    return await reporting.accept(call, job, batch)
