"""The API of a penstockd that stands by: it says who leads, and does nothing else."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from penstock_scheduler import __version__
from penstock_scheduler.api.health_messages import Health
from penstock_scheduler.daemon.candidate import StandingBy
from penstock_scheduler.daemon.service import metrics, vitals
from penstock_scheduler.daemon.service.errors import problem
from penstock_scheduler.daemon.service.server import Service
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.daemon.service.web.render import is_page, page_instead
from penstock_scheduler.people.logs import sd_notify
from penstock_scheduler.rounds.settings import Settings
from penstock_scheduler.store.leadership.lease import Lease

if TYPE_CHECKING:
    from penstock_scheduler.daemon.service.known import Known

NOT_LEADER = "not-leader"
"""Code of every refusal by a standby."""

LEADER_HEADER = "Penstock-Leader"
"""Of every answer of a standby: URL of the leader's API, if it is known."""


def stand_by(waiting: StandingBy, settings: Settings, stop: Callable[[], bool]) -> Lease | None:
    """Stand by until this penstockd leads, and answer the API meanwhile. None: `stop()` came before. Raises ConfigError."""
    # What a leader needs is loaded now: it takes a second.
    import penstock_scheduler.daemon.service.app
    import penstock_scheduler.daemon.service.publisher  # noqa: F401

    api = settings.section(ApiSettings)
    service = None
    if api.enabled:
        service = Service(api, standby_app(waiting), cast("Known", _Knows()), private=not api.embedded)
        service.start()
    sd_notify("READY=1")
    sd_notify("STATUS=stands by")
    try:
        return waiting.wait(stop, lambda: sd_notify("WATCHDOG=1"))
    finally:
        if service is not None:
            service.stop()


class _Knows:
    """For `Service`, in place of what is known of jobs and of the daemon: a standby knows nothing of jobs."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """See `Known`."""

    async def close(self) -> None:
        """See `Daemon`."""


def health(waiting: StandingBy) -> Health:
    """Whether a standby could take over, and who leads. A standby is never ready for clients."""
    found = vitals.standing_by(waiting.leader, waiting.standbys, waiting.newest_round, waiting.lease_s)
    if waiting.trouble:
        problem = f"stands by, and could not take over: {waiting.trouble}"
    elif found.name:
        problem = f"stands by: {found.name} leads" + (f" at {found.address}" if found.address else "")
    else:
        problem = "stands by, and nobody leads at the moment"
    return Health(status="not-ready", version=__version__, round=waiting.round, problems=[problem], leader=found)


def standby_app(waiting: StandingBy) -> FastAPI:
    """The API of a standby."""
    app = FastAPI(title="Penstock", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.api = SimpleNamespace(leases=None, close=lambda: None, daemon=_Knows())

    def headers() -> dict[str, str]:
        leader = waiting.leader
        return {"Retry-After": "2"} | ({LEADER_HEADER: leader.address} if leader is not None and leader.address else {})

    @app.get("/v1/health")
    def get_health() -> Health:
        return Health(status="ok", version=__version__, leader=health(waiting).leader)

    @app.get("/v1/metrics")
    def get_metrics() -> Response:
        return Response(metrics.of_standby(health(waiting), time.time()), media_type=metrics.CONTENT_TYPE)

    @app.get("/v1/ready")
    def get_ready(response: Response) -> Health:
        response.status_code = 503
        response.headers.update(headers())
        return health(waiting)

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"])
    def refuse(path: str, request: Request) -> Response:
        del path
        if is_page(request) and waiting.leader is not None and waiting.leader.address.startswith("http"):
            return RedirectResponse(waiting.leader.address + request.url.path, 307, {"Cache-Control": "no-store"})
        text = f"this penstockd {health(waiting).problems[0]}; nothing was done. Ask the leader, or list both in PENSTOCK_URL"
        if is_page(request):
            return page_instead(request, 503, text)
        return problem(503, NOT_LEADER, text, headers())

    return app
