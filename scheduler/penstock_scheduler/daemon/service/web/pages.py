"""The addresses of the pages. Each page has a stream beside it, which sends what changes on it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from penstock_scheduler.api.messages import MAX_PAGE, JobView
from penstock_scheduler.daemon.service import sessions
from penstock_scheduler.daemon.service.api import Api, Call, Operator, User
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.stream import Answer
from penstock_scheduler.daemon.service.vitals import LATE_S
from penstock_scheduler.daemon.service.web import cluster, job, queue, site
from penstock_scheduler.daemon.service.web.cells import World
from penstock_scheduler.daemon.service.web.live import Live, Page
from penstock_scheduler.daemon.service.web.render import HEADERS, Fragments, block, render, safe, static
from penstock_scheduler.store.leadership.site_clock import site_time_s

router = APIRouter(include_in_schema=False)

DAY_S = 86_400.0
MOST_SPANS = 20_000
"""Most allocation spans of one moment."""

Name = Annotated[str, Query(max_length=255)]


def live_of(api: Api) -> Live:
    """The world for pages, which the API's process keeps from the first page on."""
    if api.live is None:
        api.live = Live(api)
    return api.live


async def answer(call: Call, page: Page) -> HTMLResponse:
    """The whole page."""
    live = live_of(call.api)
    world = await live.world()
    drawn = page.draw(world, await page.prepare(world))
    path = call.request.url.path
    query = call.request.url.query
    html = render(
        page.template,
        viewer=call.identity,
        csrf=_csrf(call),
        pages=_pages(call),
        here=path,
        live=f"{path}/live" + (f"?{query}" if query else ""),
        at=live.at,
        status=status(world),
        parts=drawn.parts,
        **drawn.more,
    )
    return HTMLResponse(html, headers=HEADERS)


def stream(call: Call, page: Page) -> Answer:
    """The page's events. Raises Refusal 503 if the viewer has too many open."""
    places, user = call.api.listening, call.identity.user
    if not places.take(user):
        text = f"{places.held(user)} of your pages and programs listen already, and others need the rest; close some"
        raise Refusal(503, "busy", text, retry_after_s=60)
    with_status = Page(page.template, _with_status(page.draw), page.prepare)
    shows = call.request.headers.get("last-event-id") or call.request.query_params.get("shows", "")
    return Answer(live_of(call.api).stream(with_status, shows), lambda: places.give_back(user))


def _with_status(draw: Callable[[World, Any], Any]) -> Callable[[World, Any], Any]:
    def both(world: World, facts: Any) -> Any:
        drawn = draw(world, facts)
        return drawn.extended({"status": status(world)})

    return both


def status(world: World) -> str:
    """What every page says first if it is so: penstockd is silent, rounds are paused, or one of several penstockd leads."""
    leader = None if world.leader is None or world.leader.alone else world.leader
    since_s = None if leader is None or leader.since_age_s is None else world.time_s - leader.since_age_s
    # Whole seconds, rounded up, so that the line seldom changes.
    lease_s = None if leader is None or leader.lease_age_s is None else math.ceil(max(leader.lease_age_s, 0.1))
    return block(
        "status.html", "status", cluster=world.cluster, leader=leader, since_s=since_s, lease_s=lease_s, late_s=LATE_S
    )


def _csrf(call: Call) -> str:
    """What requests of a session must carry; empty: the viewer is identified in another way."""
    cookie = call.api.gatekeeper.cookies.read(call.request)
    return "" if call.identity.session is None or cookie is None else sessions.csrf(cookie[1])


def _pages(call: Call) -> list[tuple[str, str]]:
    pages = [("Cluster", "/cluster"), ("Queue", "/queue")]
    return [*pages, ("Site", "/site")] if call.sees_all else pages


@router.get("/")
async def home(call: User) -> RedirectResponse:
    """The first page."""
    return RedirectResponse("/cluster", 303)


@router.get("/login")
async def get_login(next: Annotated[str, Query(max_length=2000)] = "/") -> HTMLResponse:
    """The page to log in on."""
    return HTMLResponse(render("login.html", next=safe(next), viewer=None, live="", status=""), headers=HEADERS)


@router.get("/static/{name:path}")
async def get_static(name: str, request: Request) -> Response:
    """A file of the pages. Its address changes with its content."""
    try:
        content, kind = static(name)
    except KeyError:
        raise Refusal(404, "no-such-path", "there is no such file") from None
    keep = "public, max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
    return Response(content, media_type=kind, headers={"Cache-Control": keep, "X-Content-Type-Options": "nosniff"})


def _cluster(call: Call, gpu_type: str, node: str) -> Page:
    query = cluster.Query(gpu_type, node)
    return Page(cluster.TEMPLATE, lambda world, facts: cluster.fragments(call, world, query))


@router.get("/cluster")
async def get_cluster(call: User, type: Name = "", node: Name = "") -> HTMLResponse:
    """Every GPU a cell."""
    return await answer(call, _cluster(call, type, node))


@router.get("/cluster/live")
async def get_cluster_live(call: User, type: Name = "", node: Name = "") -> Answer:
    """What changes there."""
    return stream(call, _cluster(call, type, node))


@router.get("/cluster/at")
async def get_cluster_at(
    call: User, ago: Annotated[float, Query(ge=0, le=DAY_S)], type: Name = "", node: Name = ""
) -> JSONResponse:
    """The map some seconds ago: id of an element -> what belongs into it."""
    at_s = site_time_s() - ago
    world = await live_of(call.api).world()
    spans = await asyncio.to_thread(call.api.store.spans_between, at_s, math.nextafter(at_s, math.inf), MOST_SPANS)
    return JSONResponse(
        cluster.past(call, world, cluster.Query(type, node), spans), headers={"Cache-Control": "no-store"}
    )


After = Annotated[int, Query(ge=0, le=1_000_000)]


def _query(
    state: queue.State = "waiting",
    user: Name = "",
    account: Name = "",
    partition: Name = "",
    code: Name = "",
    after: After = 0,
) -> queue.Query:
    return queue.Query(state, user, account, partition, code, after)


Asked = Annotated[queue.Query, Depends(_query)]


def _queue(call: Call, query: queue.Query) -> Page:
    async def ended(world: World) -> list[JobView]:
        mine = None if call.sees_all else call.identity.user
        found = await asyncio.to_thread(call.api.store.jobs, user=mine, states=["ended"], limit=MAX_PAGE)
        return [view for _, view in found]

    def draw(world: World, facts: list[JobView] | None) -> Fragments:
        return queue.fragments(call, world, query, facts or ())

    return Page(queue.TEMPLATE, draw, ended) if query.state == "ended" else Page(queue.TEMPLATE, draw)


@router.get("/queue")
async def get_queue(call: User, query: Asked) -> HTMLResponse:
    """Jobs that wait, run, are refused or have ended."""
    return await answer(call, _queue(call, query))


@router.get("/queue/live")
async def get_queue_live(call: User, query: Asked) -> Answer:
    """What changes there."""
    return stream(call, _queue(call, query))


def _job(call: Call, name: str) -> Page:
    async def read(world: World) -> job.Facts:
        return await live_of(call.api).jobs.read(call, name)

    return Page(job.TEMPLATE, lambda world, facts: job.fragments(call, world, facts), read)


@router.get("/jobs/{name}")
async def get_job(name: str, call: User) -> HTMLResponse:
    """A job."""
    return await answer(call, _job(call, name))


@router.get("/jobs/{name}/live")
async def get_job_live(name: str, call: User) -> Answer:
    """What changes there."""
    await call.job(name)
    return stream(call, _job(call, name))


def _site(call: Call) -> Page:
    async def read(world: World) -> site.Facts:
        return await live_of(call.api).site.read(call.api)

    return Page(site.TEMPLATE, lambda world, facts: site.fragments(call, world, facts), read)


@router.get("/site")
async def get_site(call: Operator) -> HTMLResponse:
    """The site: figures over time, rounds, accounts, budgets, the cloud, drains, the audit log."""
    return await answer(call, _site(call))


@router.get("/site/live")
async def get_site_live(call: Operator) -> Answer:
    """What changes there."""
    return stream(call, _site(call))
