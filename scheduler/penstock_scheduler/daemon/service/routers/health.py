"""Endpoints about the daemon itself: whether it lives, whether it is ready, and how it identifies the caller."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from penstock_scheduler import __version__
from penstock_scheduler.api.access_messages import Identity
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.daemon.service.api import User, api_of
from penstock_scheduler.store.leadership.site_clock import site_time_s

router = APIRouter(prefix="/v1")


@router.get("/health")
async def get_health(request: Request) -> Health:
    """Answer 200 while the process lives, with who leads if this process knows."""
    return Health(status="ok", version=__version__, leader=api_of(request).daemon.leader)


@router.get("/ready", responses={503: {"model": Health}})
async def get_ready(request: Request, response: Response) -> Health:
    """Tell whether the daemon can do its work: 200, or 503 with the problems. It waits for neither a disk nor the cluster."""
    health = await api_of(request).daemon.health(site_time_s())
    response.status_code = 200 if health.status == "ok" else 503
    return health


@router.get("/me")
async def get_me(call: User) -> Identity:
    """Show the user and the role as which the daemon identifies you."""
    return call.identity
