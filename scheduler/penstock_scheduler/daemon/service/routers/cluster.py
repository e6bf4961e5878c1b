"""Endpoints about the cluster and the rounds: rounds, numbers, metrics, nodes, prices."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from penstock_scheduler.api.messages import MAX_PAGE, ClusterView, NodeView, RefusedJob, RoundPage, RoundView
from penstock_scheduler.daemon.service import metrics, views
from penstock_scheduler.daemon.service.api import Api, Operator, User
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.forwarding import Route
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store.leadership.site_clock import site_time_s

RoundNumber = Annotated[int, Path(ge=0, le=2**62)]

router = APIRouter(prefix="/v1", route_class=Route)


@router.get("/rounds")
def list_rounds(
    call: User,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
) -> RoundPage:
    """List rounds, newest first."""
    found = call.api.store.summaries(before, limit)
    return RoundPage(rounds=found, next=found[-1].round if len(found) == limit else None)


@router.get("/rounds/{number}")
def get_round(number: RoundNumber, call: User) -> RoundView:
    """Show a round and its decisions. Users see the decisions on their own jobs."""
    return views.round_view(call.api.store.round(number), call.may_see)


@router.get("/rounds/{number}/record")
def get_record(number: RoundNumber, call: Operator) -> dict[str, Any]:
    """Show the whole record of a round, as `penstock rounds replay` reads it."""
    record: dict[str, Any] = json.loads(call.api.store.round_json(number))
    return record


@router.get("/cluster")
def get_cluster(call: User) -> ClusterView:
    """Show the cluster in numbers."""
    return views.cluster_view(call.api.known, call.api.daemon)


@router.get("/metrics", response_class=Response)
async def get_metrics(call: User) -> Response:
    """Show the cluster and the daemon in numbers, in Prometheus' text format. An API of its own adds its own numbers."""
    api = call.api
    try:
        theirs = await api.daemon.answer(call.request)
    except Refusal:
        return Response(metrics.of_api(api.known.counters, api.known.counts, up=False), media_type=metrics.CONTENT_TYPE)
    if theirs is None:
        return Response(await asyncio.to_thread(_metrics, api), media_type=metrics.CONTENT_TYPE)
    if theirs.status_code == 200:
        theirs = Response(bytes(theirs.body) + metrics.of_api(api.known.counters, api.known.counts, up=True))
        theirs.headers["Content-Type"] = metrics.CONTENT_TYPE
    return theirs


def _metrics(api: Api) -> bytes:
    now_s = site_time_s()
    try:
        spent_usd = sum(api.store.ledger_totals("usd").values())
        committed_usd: float | None = sum(api.store.committed_usd().values())
    except StoreError:
        spent_usd, committed_usd = None, None  # the other numbers say that the store is away
    cluster = views.cluster_view(api.board, api.daemon)
    live, counters = api.board.live(), api.board.counters
    unknown = api.board.state.unknown if api.board.state is not None else ()
    health = api.controls.vitals.health(now_s)
    return metrics.metrics(
        cluster,
        live,
        api.board.record,
        counters,
        api.board.counts,
        unknown,
        spent_usd,
        committed_usd,
        health,
        now_s,
        api.board.silent_agents,
    )


@router.get("/nodes")
def get_nodes(call: User) -> list[NodeView]:
    """List the nodes, with the jobs that hold GPUs on them."""
    nodes = views.node_views(call.api.known, call.api.daemon.chosen.drains)
    spans = (span for span in call.api.store.open_spans() if call.may_see_of("jobs", span.user))
    return views.with_jobs(nodes, spans)


@router.get("/refused")
def get_refused(call: User) -> list[RefusedJob]:
    """List jobs that ask for Penstock and cannot be managed, and why. Users see their own."""
    board = call.api.known
    refused = board.state.refused if board.state is not None else ()
    return [
        RefusedJob(id=each.job, name=each.name[:1000], user=each.user, text=each.text)
        for each in refused
        if call.may_see(each.user) and board.live_job(each.job) is None  # a job that was managed is in the list of jobs
    ]


@router.get("/prices")
def get_prices(call: User) -> dict[str, float]:
    """Show the price of each GPU type in the newest round."""
    newest = call.api.known.round
    return {} if newest is None else newest[1]
