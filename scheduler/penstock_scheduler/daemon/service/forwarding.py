"""How an API process of its own hands requests to penstockd: over a private Unix socket, with the identity already checked.

penstockd serves the same application there. It believes the header `Penstock-Identity` if the kernel says that the peer is the
API's user, and runs the endpoint as if the caller had come to it. So each endpoint is written once, and what must be decided in
one place (one job for each key, leases, quotas) is.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote

import httpx
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_profiles.wire import read
from penstock_scheduler import __version__
from penstock_scheduler.api.access_messages import Identity
from penstock_scheduler.api.health_messages import FilesHealth, Health, LeaderHealth
from penstock_scheduler.api.messages import JobView, LogPart
from penstock_scheduler.daemon.service import report_batches, sessions
from penstock_scheduler.daemon.service.errors import Refusal, no_such_job
from penstock_scheduler.daemon.service.guard import Turns
from penstock_scheduler.daemon.service.identity import IDENTITY
from penstock_scheduler.daemon.service.port import Chosen, Daemon
from penstock_scheduler.safety import open_files
from penstock_scheduler.safety.open_files import Places

SILENT_HEADER = "Penstock-Daemon-Silent-Since"
"""Of every answer while penstockd is silent: since when, s since 1970."""

AT_ONCE = 32
"""Requests on which penstockd works at the same time for an API process: as many as it has threads. A user has
at most half, and others wait their turn."""
MOST_WAITING = 1024
"""Requests for penstockd in an API process; fewer if the limit on open files is low. A user holds at most as many as are free."""
ANSWER_S = 120.0
"""How long penstockd may take for an answer: sbatch may wait for a busy slurmctld."""
CONNECT_S = 5.0
IDLE_S = 2.0
"""How long a connection without requests is kept: less than penstockd keeps it, which would end one that is being used."""
HEALTH_S = 1.0
"""How long penstockd's health is remembered: everybody may ask for it."""
LEADER_S = 10.0
"""How long what it said of the leader is shown."""

_PASSED = ("content-type", "retry-after", "content-security-policy", "cache-control", "penstock-leader", "set-cookie")
"""Headers of penstockd's answer that its client gets."""

_JSON = {"Content-Type": "application/json"}

_READS_OF_DAEMON = frozenset({"/v1/settings", "/v1/models", "/v1/models/kind", "/v1/whatif", "/v1/whatif/{task}"})
"""Endpoints that read what only penstockd has."""


def by_daemon(method: str, path: str) -> bool:
    """Whether only penstockd can answer: all that changes something, the settings, and the replays that it runs."""
    return method not in ("GET", "HEAD") or path in _READS_OF_DAEMON


class Route(APIRoute):
    """A route that hands its requests to penstockd where it must. All of the API's routers use it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        here = super().get_route_handler()
        if not any(by_daemon(method, self.path) for method in self.methods or ()):
            return here

        async def handler(request: Request) -> Response:
            daemon = cast("Daemon", request.app.state.api.daemon)
            answer = await daemon.answer(request)
            return await here(request) if answer is None else answer

        return handler


class Published(Protocol):
    """What penstockd has published; see `Replica`."""

    chosen: Chosen

    @property
    def silent_since_s(self) -> float | None:
        """See `Daemon`."""
        ...

    async def refresh(self) -> None:
        """Read it again now."""
        ...


class OverSocket:
    """penstockd in another process; see `port.Daemon`."""

    def __init__(self, socket: Path, published: Published) -> None:
        self._published = published
        self._places = Places(min(MOST_WAITING, open_files.limit() // 8))
        self._turns = Turns(AT_ONCE)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket), limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
            ),
            base_url="http://penstock",
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            trust_env=False,
        )
        self._reports = report_batches.ReportSender(self._ask_batch, self._ask_alone)
        self._health: tuple[float, Health] | None = None
        self._asking = asyncio.Lock()

    @property
    def silent_since_s(self) -> float | None:
        """See `Daemon`."""
        return self._published.silent_since_s

    @property
    def leader(self) -> LeaderHealth | None:
        """See `Daemon`. Not known if nobody has asked for `health` lately."""
        if self._health is None or time.monotonic() - self._health[0] > LEADER_S:
            return None
        return self._health[1].leader

    @property
    def chosen(self) -> Chosen:
        """See `Daemon`."""
        return self._published.chosen

    async def answer(self, request: Request) -> Response:
        """See `Daemon`."""
        identity: Identity = request.state.identity
        body = await request.body()
        target = request.scope.get("raw_path") or quote(request.url.path).encode()
        if request.scope["query_string"]:
            target += b"?" + request.scope["query_string"]
        if (report := report_batches.forwarded(request, body)) is not None:
            with self._place(identity):
                answer = await self._reports.send(report)
            return Response(answer.body, answer.status, answer.headers, "application/json")
        headers = {"Content-Type": given} if (given := request.headers.get("content-type")) else {}
        found = await self._ask(identity, request.method, target, body, headers)
        if request.method != "GET" and not request.url.path.endswith("/reports"):
            await self._published.refresh()  # what the caller has just changed, it must see here
        kept = {name: found.headers[name] for name in _PASSED if name in found.headers}
        return Response(found.content, found.status_code, kept)

    async def health(self, now_s: float) -> Health:
        """See `Daemon`. penstockd is asked once a second at most."""
        async with self._asking:
            if self._health is None or time.monotonic() - self._health[0] > HEALTH_S:
                self._health = time.monotonic(), await self._ask_health()
            return self._health[1]

    async def read_log(self, call: Any, view: JobView, stream: str, offset: int, limit: int) -> LogPart:
        """See `Daemon`. Only penstockd may read the files of all users."""
        target = f"/v1/jobs/{quote(view.id, safe='')}/log?stream={stream}&offset={offset}&limit={limit}"
        found = await self._ask(call.identity, "GET", target.encode())
        if found.status_code != 200:
            raise _refusal(found)
        return read(LogPart, found.content)

    async def begin_session(self, call: Any, found: Identity, response: Response) -> None:
        """See `Daemon`. penstockd writes the store, and takes the log-in as checked."""
        answer = await self._ask(found, "POST", sessions.PATH.encode(), b"{}", _JSON)
        if answer.status_code != 201:
            raise _refusal(answer)
        response.headers.append("set-cookie", answer.headers["set-cookie"])
        await self._published.refresh()

    async def find(self, call: Any, job: str) -> JobView:
        """See `Daemon`. Without penstockd the store is right: it has all jobs that were managed."""
        if self.silent_since_s is not None:
            raise no_such_job(job[:50])
        found = await self._ask(call.identity, "GET", f"/v1/jobs/{quote(job, safe='')}".encode())
        if found.status_code != 200:
            raise _refusal(found)
        return read(JobView, found.content)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask_health(self) -> Health:
        try:
            found = await self._http.get("/v1/ready", timeout=CONNECT_S)
            health = read(Health, found.content)
        except (httpx.HTTPError, ValueError) as error:
            text = f"penstockd does not answer the API ({error or type(error).__name__}); running jobs keep running"
            health = Health(status="not-ready", version=__version__, problems=[text])
        mine = open_files.count("penstock-api")
        files = FilesHealth(open=mine.open, limit=mine.limit, warning=mine.warning)
        warnings = [*health.warnings, *filter(None, [mine.warning])]
        return health.model_copy(update={"api_files": files, "warnings": warnings})

    async def _ask(
        self, identity: Identity, method: str, target: bytes, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """penstockd's answer, whatever it is. Raises Refusal if there is none."""
        with self._place(identity):
            async with self._turns.turn(identity.user or identity.address):
                return await self._request(
                    method, target, body, {IDENTITY: quote(identity.model_dump_json())} | (headers or {})
                )

    @contextmanager
    def _place(self, identity: Identity) -> Iterator[None]:
        """Hold one of the places for requests to penstockd. Raises Refusal 503 if there is none for this caller."""
        client = identity.user or identity.address
        if not self._places.take(client):
            held = self._places.held(client)
            text = f"penstockd works on {held} of your requests already, and others need the rest; wait and try again"
            raise Refusal(503, "busy", text, retry_after_s=2)
        try:
            yield
        finally:
            self._places.give_back(client)

    async def _request(self, method: str, target: bytes, body: bytes, headers: dict[str, str]) -> httpx.Response:
        try:
            return await self._http.request(
                method,
                httpx.URL(scheme="http", host="penstock", raw_path=target),
                content=body,
                headers=headers,
            )
        except (httpx.ConnectError, httpx.ConnectTimeout):
            text = "penstockd does not run or does not answer; nothing was done, and running jobs keep running"
            raise Refusal(503, "daemon-away", text, retry_after_s=5) from None
        except httpx.HTTPError as error:
            text = (
                f"penstockd ended or did not answer in time ({type(error).__name__}); look whether the request was carried "
                "out before you repeat it"
            )
            raise Refusal(504, "daemon-away", text, retry_after_s=5) from None

    async def _ask_batch(self, body: bytes) -> httpx.Response:
        return await self._request("POST", report_batches.PATH.encode(), body, _JSON)

    async def _ask_alone(self, report: report_batches.Forwarded) -> httpx.Response:
        headers = {IDENTITY: quote(report.identity.model_dump_json())} | _JSON
        target = f"/v1/jobs/{quote(report.job, safe='')}/reports".encode()
        return await self._request("POST", target, report.body.encode(), headers)


def _refusal(answer: httpx.Response) -> Refusal:
    """penstockd's refusal, as this process's own."""
    try:
        problem = answer.json()["error"]
        return Refusal(
            answer.status_code, str(problem["code"]), str(problem["message"]), retry_after_s=_pause_s(answer)
        )
    except (ValueError, KeyError, TypeError):
        return Refusal(503, "daemon-away", f"penstockd answered {answer.status_code} without a reason", retry_after_s=5)


def _pause_s(answer: httpx.Response) -> float | None:
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdigit() else None


class SayWhetherSilent:
    """ASGI middleware that says in a header of every answer since when penstockd is silent."""

    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app, self._daemon = app, daemon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start" and (since_s := self._daemon.silent_since_s) is not None:
                MutableHeaders(scope=message)[SILENT_HEADER] = f"{since_s:.0f}"
            await send(message)

        await self._app(scope, receive, say)


class PublishFirst:
    """ASGI middleware of penstockd's private socket: what a request has changed is published before its answer goes out."""

    def __init__(self, app: ASGIApp, publish: Callable[[], None]) -> None:
        self._app, self._publish = app, publish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        changes = scope["type"] == "http" and scope["method"] != "GET" and not scope["path"].endswith("/reports")
        await self._app(scope, receive, functools.partial(self._first, send) if changes else send)

    async def _first(self, send: Callable[[Message], Awaitable[None]], message: Message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.to_thread(self._publish)
        await send(message)
