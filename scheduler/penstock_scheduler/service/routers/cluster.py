"""Endpoints about the cluster and the rounds: rounds, numbers, metrics, nodes, prices."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from penstock_scheduler.errors import StoreError
from penstock_scheduler.messages import MAX_PAGE, ClusterView, NodeView, RefusedJob, RoundPage, RoundView
from penstock_scheduler.service import metrics, views
from penstock_scheduler.service.api import Operator, User

RoundNumber = Annotated[int, Path(ge=0, le=2**62)]

router = APIRouter(prefix="/v1")


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
    """Show the whole record of a round, as `penstock replay` reads it."""
    record: dict[str, Any] = json.loads(call.api.store.round_json(number))
    return record


@router.get("/cluster")
def get_cluster(call: User) -> ClusterView:
    """Show the cluster in numbers."""
    return views.cluster_view(call.api.board, call.api.controls)


@router.get("/metrics", response_class=Response)
def get_metrics(call: User) -> Response:
    """Show the cluster and the daemon in numbers, in Prometheus' text format."""
    api, now_s = call.api, time.time()
    try:
        spent_usd = sum(api.store.ledger_totals("usd").values())
        committed_usd: float | None = sum(api.store.committed_usd().values())
    except StoreError:
        spent_usd, committed_usd = None, None  # the other numbers say that the store is away
    cluster = views.cluster_view(api.board, api.controls)
    live, counters = api.board.live(), api.board.counters
    unknown = api.board.state.unknown if api.board.state is not None else ()
    health = api.controls.health(now_s)
    body = metrics.metrics(
        cluster, live, api.board.record, counters, api.board.counts, unknown, spent_usd, committed_usd, health, now_s
    )
    return Response(body, media_type=metrics.CONTENT_TYPE)


@router.get("/nodes")
def get_nodes(call: User) -> list[NodeView]:
    """List the nodes, with the jobs that hold GPUs on them."""
    nodes = views.node_views(call.api.board, call.api.controls.rules.drains)
    spans = (span for span in call.api.store.open_spans() if call.may_see_of("jobs", span.user))
    return views.with_jobs(nodes, spans)


@router.get("/refused")
def get_refused(call: User) -> list[RefusedJob]:
    """List jobs that ask for Penstock and cannot be managed, and why. Users see their own."""
    board = call.api.board
    refused = board.state.refused if board.state is not None else ()
    return [
        RefusedJob(id=each.job, name=each.name[:1000], user=each.user, text=each.text)
        for each in refused
        if call.may_see(each.user) and board.live_job(each.job) is None  # a job that was managed is in the list of jobs
    ]


@router.get("/prices")
def get_prices(call: User) -> dict[str, float]:
    """Show the price of each GPU type in the newest round."""
    record = call.api.board.record
    return record.plan.prices if record else {}
