"""Reports of many requests, handed from an API process to penstockd in one request.

A report is a small request, and thousands of jobs send one every half a minute. Each hand-over costs more than the report itself,
so those that come while one is under way go together in the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import httpx
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock_profiles.wire import read
from penstock_scheduler.api.access_messages import Identity
from penstock_scheduler.api.messages import Body, ReportBatch
from penstock_scheduler.daemon.service import reporting
from penstock_scheduler.daemon.service.api import Call, api_of
from penstock_scheduler.daemon.service.errors import Refusal
from penstock_scheduler.daemon.service.identity import is_private

PATH = "/v1/report-batches"
"""On penstockd's private socket only."""

AT_ONCE = 2
"""Batches under way at the same time: one waits for the disk while another is checked."""
MOST_REQUESTS = 256
MOST_BYTES = 1024 * 1024
"""Bodies in one batch, together. A larger body goes alone."""

_ROUTE = SimpleNamespace(path="/v1/jobs/{job}/reports")
"""The endpoint to which the requests came, for the audit log."""


class Forwarded(Body):
    """A request of a known caller."""

    identity: Identity
    job: str
    body: str


class Batch(Body):
    """Requests, in the order in which they came."""

    requests: tuple[Forwarded, ...]


class Answered(Body):
    """The answer to one of them."""

    status: int
    body: str
    headers: dict[str, str]


class Answers(Body):
    """The answers, in the order of the requests."""

    answers: tuple[Answered, ...]


class ReportSender:
    """The side of the API process. Belongs to its event loop.

    Args:
        ask: sends a batch to penstockd, and returns its answer. Raises Refusal.
        alone: sends one request as it is. For a penstockd of the release before, which takes no batches.
    """

    def __init__(
        self,
        ask: Callable[[bytes], Awaitable[httpx.Response]],
        alone: Callable[[Forwarded], Awaitable[httpx.Response]],
    ) -> None:
        self._ask, self._alone = ask, alone
        self._waiting: list[tuple[Forwarded, asyncio.Future[Answered]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, request: Forwarded) -> Answered:
        """penstockd's answer. Raises Refusal if there is none."""
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if len(self._sending) < AT_ONCE:
            task = asyncio.create_task(self._send())
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return await future

    async def _send(self) -> None:
        while batch := self._next():
            try:
                answers = await self._answers([request for request, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # the client has left
                    future.set_result(answer)

    def _next(self) -> list[tuple[Forwarded, asyncio.Future[Answered]]]:
        """Take the oldest requests, as many as go together."""
        size = count = 0
        for request, _ in self._waiting[:MOST_REQUESTS]:
            size += len(request.body)
            if count and size > MOST_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _answers(self, requests: Sequence[Forwarded]) -> Sequence[Answered]:
        answer = await self._ask(Batch(requests=tuple(requests)).model_dump_json().encode())
        if answer.status_code in (401, 404):
            alone = [await self._alone(request) for request in requests]
            return [Answered(status=one.status_code, body=one.text, headers=_headers(one.headers)) for one in alone]
        if answer.status_code != 200:
            text = f"penstockd answered {answer.status_code} to a batch of reports; look into its log"
            raise Refusal(503, "daemon-away", text, retry_after_s=5)
        return read(Answers, answer.content).answers


class TakeBatches:
    """ASGI middleware of penstockd that answers each request of a batch as if it had come alone.

    Args:
        problem: the answer to a request that failed.
    """

    def __init__(self, app: ASGIApp, problem: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self._app, self._problem = app, problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] != PATH or not is_private(Request(scope)):
            await self._app(scope, receive, send)
            return
        batch = read(Batch, await Request(scope, receive).body())
        answers = await asyncio.gather(*(self._answer(scope, each) for each in batch.requests))
        found = Answers(answers=tuple(answers)).model_dump_json()
        await Response(found, media_type="application/json")(scope, receive, send)

    async def _answer(self, scope: Scope, given: Forwarded) -> Answered:
        path = _ROUTE.path.replace("{job}", given.job)
        request = Request(dict(scope) | {"path": path, "route": _ROUTE, "state": {"identity": given.identity}})
        api = api_of(request)
        api.known.counters["requests"] += 1
        try:
            call = Call(api, request, given.identity)
            receipt = await reporting.accept(call, given.job, _batch(given.body))
        except Exception as error:
            answer = await self._problem(request, error)
            return Answered(
                status=answer.status_code, body=bytes(answer.body).decode(), headers=_headers(answer.headers)
            )
        return Answered(status=200, body=receipt.model_dump_json(), headers={})


def _batch(body: str) -> ReportBatch:
    try:
        return ReportBatch.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(
            [dict(each) | {"loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        ) from None


def _headers(given: Mapping[str, str]) -> dict[str, str]:
    return {name: given[name] for name in ("retry-after",) if name in given}


def forwarded(request: Request, body: bytes) -> Forwarded | None:
    """A request that brings reports, for a batch; None: it is another one, or goes alone."""
    route = request.scope.get("route")
    if getattr(route, "path", None) != _ROUTE.path or len(body) > MOST_BYTES:
        return None
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return Forwarded(identity=cast("Identity", request.state.identity), job=request.path_params["job"], body=text)
