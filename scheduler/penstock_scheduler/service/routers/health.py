"""Endpoints about the daemon itself: whether it lives, whether it is ready, and how it identifies the caller."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock_scheduler import __version__
from penstock_scheduler.errors import StoreError
from penstock_scheduler.messages import Health, Identity
from penstock_scheduler.service import views
from penstock_scheduler.service.api import User, api_of

STALE_S = 120.0
"""A daemon whose newest observation of the cluster is older than this is not ready."""

router = APIRouter(prefix="/v1")


@router.get("/health")
async def get_health() -> Health:
    """Answer 200 while the process lives."""
    return Health(status="ok", version=__version__)


@router.get("/ready", responses={503: {"model": Health}})
def get_ready(request: Request, response: Response) -> Health:
    """Tell whether the daemon can do its work: 200 if the store answers and the cluster was observed lately, else 503."""
    api = api_of(request)
    board = api.board
    problems = []
    age_s = None if board.observed_s is None else max(time.time() - board.observed_s, 0.0)
    if age_s is None or age_s > STALE_S:
        problems.append(f"the cluster was not observed in the last {STALE_S:.0f} s; see the daemon's log")
    try:
        api.store.ping()
    except StoreError as error:
        problems.append(str(error))
    response.status_code = 503 if problems else 200
    return Health(
        status="not-ready" if problems else "ok",
        version=__version__,
        round=board.record.snapshot.round if board.record else None,
        observed_age_s=age_s,
        problems=problems,
        warnings=views.warnings(board),
        counters=dict(board.counters),
    )


@router.get("/me")
async def get_me(call: User) -> Identity:
    """Show the user and the role as which the daemon identifies you."""
    return call.identity
