"""The HTTP API: its routers, and how errors become answers. See docs/user/api.md."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock_profiles.wire import Report
from penstock_scheduler import __version__
from penstock_scheduler.api.messages import ErrorAnswer
from penstock_scheduler.api.ports import ModelSource
from penstock_scheduler.daemon.service.api import Api, Controls, Parts, api_of
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.counts import Counts
from penstock_scheduler.daemon.service.errors import Refusal, problem
from penstock_scheduler.daemon.service.forwarding import SayWhetherSilent
from penstock_scheduler.daemon.service.known import Known
from penstock_scheduler.daemon.service.limits import LimitBodies
from penstock_scheduler.daemon.service.port import Daemon, InProcess
from penstock_scheduler.daemon.service.report_batches import TakeBatches
from penstock_scheduler.daemon.service.rights import EndWithRight
from penstock_scheduler.daemon.service.routers import ROUTERS
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.daemon.service.web import pages
from penstock_scheduler.daemon.service.web.render import is_page, page_instead
from penstock_scheduler.model import JobSpec
from penstock_scheduler.people.errors import BadJobSpec, ClusterAway, ConfigError, PenstockError, StoreError
from penstock_scheduler.safety.children import Busy
from penstock_scheduler.store.database import NoSuchRow

log = logging.getLogger(__name__)

_FAILURES: tuple[tuple[type[PenstockError], int, str, float | None], ...] = (
    (Busy, 503, "busy", 5),
    (NoSuchRow, 404, "no-such-round", None),
    (StoreError, 503, "store-away", 2),
    (ClusterAway, 503, "cluster-away", 5),
    (BadJobSpec, 422, "bad-spec", None),
    (ConfigError, 422, "bad-body", None),
    (PenstockError, 503, "not-ready", 5),
)
"""Error -> status, code, and the seconds after which the client may try again. The first class that fits counts."""

_HTTP_CODES = {404: "no-such-path", 405: "no-such-method", 408: "too-slow", 413: "too-large", 503: "busy"}

_OPENAPI = "/v1/openapi.json"
_FOR_ANYONE = frozenset({"/v1/health", "/v1/ready", _OPENAPI, "/login"})
"""Paths that need no caller, besides the pages' files."""


def make_app(
    settings: ApiSettings,
    board: Board,
    controls: Controls,
    models: ModelSource,
    check_spec: Callable[[JobSpec], None],
    learn: Callable[[Sequence[Report]], None] = lambda reports: None,
) -> FastAPI:
    """The API over the board of the same process. See `Parts` for the arguments."""
    parts = Parts(board, controls, models, check_spec, learn)
    app = _app(Api(settings, board, InProcess(board, controls), parts))
    app.add_middleware(TakeBatches, problem=_answer_to)
    return app


def make_reading_app(settings: ApiSettings, known: Known, daemon: Daemon) -> FastAPI:
    """The API of a process that is not penstockd: it reads what is known, and hands the rest to penstockd."""
    return _app(Api(settings, known, daemon))


def _app(api: Api) -> FastAPI:
    app = FastAPI(
        title="Penstock",
        version=__version__,
        openapi_url=_OPENAPI,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
        separate_input_output_schemas=False,
        exception_handlers={
            Refusal: _refused,
            RequestValidationError: _bad_body,
            HTTPException: _http_error,
            PenstockError: _failed,
            Exception: _unforeseen,
        },
    )
    app.state.api = api
    app.add_middleware(LimitBodies)
    app.add_middleware(EndWithRight, gatekeeper=api.gatekeeper)
    app.add_middleware(IdentifyFirst)
    app.add_middleware(TimeRequests, counts=api.known.counts)
    app.add_middleware(SayWhetherSilent, daemon=api.daemon)
    for router in (*ROUTERS, pages.router):
        app.include_router(router)
    return app


class IdentifyFirst:
    """ASGI middleware that identifies the caller, and counts the request against the caller's rate, before the body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] not in _FOR_ANYONE and not scope["path"].startswith("/static/"):
            request = Request(scope)
            try:
                await api_of(request).identify(request)
            except PenstockError as error:
                answer = await _answer_to(request, error)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class TimeRequests:
    """ASGI middleware that measures how long requests take, without those that wait for a change or for events."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if (
            scope["type"] != "http"
            or scope["path"] == "/v1/events"
            or scope["path"].endswith("/live")
            or "wait" in Request(scope).query_params
        ):
            await self._app(scope, receive, send)
            return
        begin_s = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            self._counts.request(scope["method"], time.monotonic() - begin_s)


async def _answer_to(request: Request, error: Exception) -> Response:
    """The answer to a request that failed, whatever the error."""
    if isinstance(error, PenstockError):
        return await (_refused if isinstance(error, Refusal) else _failed)(request, error)
    return await (_bad_body if isinstance(error, RequestValidationError) else _unforeseen)(request, error)


def _problem(status: int, code: str, message: str, retry_after_s: float | None = None) -> JSONResponse:
    headers = {} if retry_after_s is None else {"Retry-After": str(max(round(retry_after_s + 0.5), 1))}
    return problem(status, code, message, headers)


async def _refused(request: Request, error: Any) -> Response:
    api_of(request).known.counters[f"refused {error.status}"] += 1
    if is_page(request):
        return page_instead(request, error.status, str(error))
    return _problem(error.status, error.code, str(error), error.retry_after_s)


async def _bad_body(request: Request, error: Any) -> JSONResponse:
    api_of(request).known.counters["refused 422"] += 1
    problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
    return _problem(422, "bad-body", "; ".join(problems)[:2000].encode(errors="replace").decode())


async def _http_error(request: Request, error: Any) -> Response:
    if is_page(request):
        return page_instead(request, error.status_code, str(error.detail))
    answer = _problem(error.status_code, _HTTP_CODES.get(error.status_code, "bad-request"), str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _failed(request: Request, error: Any) -> Response:
    _, status, code, retry_after_s = next(each for each in _FAILURES if isinstance(error, each[0]))
    if code == "store-away":
        api_of(request).known.counters["store away"] += 1
    if is_page(request):
        return page_instead(request, status, str(error))
    return _problem(status, code, str(error), retry_after_s)


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    log.error("a request failed unexpectedly; please report this as a bug", exc_info=error)
    return _problem(500, "internal-error", "an unexpected error occurred in penstockd; see its log")
