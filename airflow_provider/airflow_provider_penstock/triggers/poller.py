"""The poller of a connection, which all triggers share that wait for jobs on it, and its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from airflow.providers.common.compat.connection import get_async_connection

from airflow_provider_penstock.exceptions import UNAUTHENTICATED, PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import OPEN, Job, client_options, did_not_answer, read
from airflow_provider_penstock.news import News, of_part
from airflow_provider_penstock.silence import Silence

log = logging.getLogger(__name__)

RECHECK_S = 30.0
"""Interval at which all jobs are read while penstockd's event stream is open, and at which a closed stream is reopened."""
SILENCE_S = 60.0
"""An event stream without data for this long counts as dead. penstockd sends data at least every 15 s."""
RENEW_S = 60.0
"""Interval at which leases are renewed."""
MAX_RENEWED = 1000
"""Most leases that one request renews."""
PAGE = 500
FEW = 5
"""Up to this many jobs are requested one by one."""
LOGS_PER_S = 5.0
"""Requests for jobs' output per second and connection. For each of them penstockd asks Slurm for the output's path."""
LOGS_AT_ONCE = 25
"""Jobs whose output is read before any of it is logged. Each time that something is logged, Airflow's triggerer reads all
triggers from its database, so single lines of many jobs would keep it busy."""


@dataclass(frozen=True)
class Output:
    """Lines of a job's output."""

    lines: list[str]
    shown: int
    """The byte up to which the output was read once they are logged."""


class OutputLog:
    """Logs a job's output in the log of the task that waits for the job.

    Args:
        job_id: of the job.
        log: of the task.
        interval_s: seconds between two readings while the job runs; 0: the output is read only after the job's end.
        key: the job's; see `PenstockHook.own`.
    """

    def __init__(self, job_id: str, log: Any, interval_s: float, key: str | None = None) -> None:
        self.job_id = job_id
        self.key = key
        self.log = log
        self.interval_s = interval_s
        self.shown = 0
        """The byte up to which the output was logged."""

    async def read(self, client: httpx.AsyncClient) -> Output | None:
        """The output from byte `shown` on; None if penstockd does not answer. Then the next reading, or the end of the job,
        shows it."""
        try:
            query = {"offset": self.shown}
            part = read(await client.get(f"/v1/jobs/{self.job_id}/log", params=query))
        except (httpx.TransportError, PenstockAway, PenstockRefused):
            return None
        lines, _, shown = of_part(part)
        return Output(lines, shown)

    def write(self, output: Output | None) -> None:
        """Log what `read` returned."""
        if output is not None:
            for line in output.lines:
                self.log.info("%s", line)
            self.shown = output.shown


@dataclass(eq=False)
class Waiting:
    """A task that waits for a job."""

    output: OutputLog
    leased: bool
    """Whether the poller renews the job's lease."""
    end: asyncio.Future[Job]
    context: Context = field(default_factory=copy_context)
    """With it, what the poller logs is in the log of the task."""
    job: Job | None = None
    """The latest view."""
    news: News = field(default_factory=News)
    read_s: float = float("-inf")
    """When the job's output was last read."""
    reading: asyncio.Task[Output | None] | None = None
    """A request for the job's output."""

    def __post_init__(self) -> None:
        self.silence = Silence(self.output.log, f"the task keeps waiting for job {self.output.job_id}")

    def take(self, job: Job) -> None:
        """Take in a view of the job, and log what has changed."""
        for line in self.news.of(job):
            self.context.run(self.output.log.info, "%s", line)
        self.job = job

    def hear(self, error: Exception | None) -> None:
        """Note whether Penstock answers. The task's own log tells of a silence."""
        if error is None:
            self.context.run(self.silence.ends)
        else:
            self.context.run(self.silence.goes_on, error)

    def wants_output(self, now_s: float) -> bool:
        """Whether the output of a running job is to be read again."""
        runs = self.job is not None and self.job["state"] in ("running", "stopping")
        return runs and 0 < self.output.interval_s <= now_s - self.read_s and not self.end.done()


class Poller:
    """Follows the jobs of a connection through penstockd's event stream, for all triggers that wait on the connection.

    It also reads the list of all open jobs, and jobs that are not in it by id: whenever a task begins to wait, every `RECHECK_S`
    in case an event was lost, and every `poll_interval_s` while there is no stream.
    """

    def __init__(self, conn_id: str, poll_interval_s: float) -> None:
        self.conn_id = conn_id
        self.poll_interval_s = poll_interval_s
        self.client: httpx.AsyncClient | None = None
        """The client while the poller runs."""
        self.options: dict[str, Any] | None = None
        """Those of the client."""
        self._waiting: dict[str, set[Waiting]] = {}
        self._silence = Silence(log, f"the tasks that wait on {conn_id} keep waiting")
        self._renew_at_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ask = asyncio.Event()
        """Set when the list of jobs must be read at once."""
        self._listening = False
        self._is_known = False
        """Whether penstockd has accepted the connection's token."""

    async def ended(self, output: OutputLog, *, leased: bool) -> Job:
        """Wait until the job of `output` has ended, and return it. Meanwhile logs changes and output, and renews the lease of a
        job that is `leased`.

        Raises:
            PenstockRefused: the API does not know the job.
        """
        waiting = Waiting(output, leased, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(output.job_id, set()).add(waiting)
        if leased:
            self._renew_at_s = 0.0
        self._ask.set()
        if self._task is None or self._task.done():
            # In no task's context: what the poller itself logs belongs to no task, and outlives the first one.
            self._task = asyncio.create_task(self._poll(), context=Context())
        try:
            return await waiting.end
        finally:
            if waiting.reading is not None:
                waiting.reading.cancel()
            those = self._waiting.get(output.job_id, set())
            those.discard(waiting)
            if not those:
                self._waiting.pop(output.job_id, None)

    async def _poll(self) -> None:
        while self._waiting:
            try:
                self.options = await self._read_options()
                async with connect(self.conn_id, self.options) as self.client:
                    beside = [
                        asyncio.create_task(each)
                        for each in (self._listen(self.client), self._show_outputs(self.client))
                    ]
                    try:
                        while self._waiting:
                            self._ask.clear()
                            await self._read_all(self.client)
                            self._is_known = True
                            self._hear(None)
                            await self._renew(self.client)
                            await asyncio.sleep(self.poll_interval_s)
                            if self._listening:
                                with contextlib.suppress(TimeoutError):
                                    await asyncio.wait_for(self._ask.wait(), RECHECK_S)
                    finally:
                        for each in beside:
                            each.cancel()
            except (httpx.TransportError, PenstockAway) as error:
                self._hear(error)
                await asyncio.sleep(self.poll_interval_s)
            except Exception as error:  # such as a wrong token or a deleted connection: all waiting tasks fail
                if self._may_have_a_new_token(error):
                    log.warning("%s; reading connection %s again", error, self.conn_id)
                    await asyncio.sleep(self.poll_interval_s)
                    continue
                for job_id in list(self._waiting):
                    self._resolve(job_id, error)
                return

    async def _read_options(self) -> dict[str, Any]:
        """Those of the connection, or the last ones while Airflow does not answer."""
        try:
            return await options_of(self.conn_id)
        except Exception as error:  # of any kind: jobs run on while Airflow has trouble
            if self.options is None:
                raise
            log.warning("connection %s cannot be read, so its last address and token are used: %s", self.conn_id, error)
            return self.options

    def _hear(self, error: Exception | None) -> None:
        """Note whether Penstock answers, and tell the log of each waiting task."""
        if error is None:
            self._silence.ends()
        else:
            self._silence.goes_on(error)
        for those in self._waiting.values():
            for each in those:
                each.hear(error)

    def _may_have_a_new_token(self, error: Exception) -> bool:
        """Whether penstockd knew the connection's token until now: an admin may have replaced it in the connection."""
        was_known, self._is_known = self._is_known, False
        return was_known and isinstance(error, PenstockRefused) and error.code == UNAUTHENTICATED

    async def _renew(self, client: httpx.AsyncClient) -> None:
        """Renew the leases of the jobs that tasks wait for."""
        now_s = asyncio.get_running_loop().time()
        leased = sorted(job for job, those in self._waiting.items() if any(each.leased for each in those))
        if not leased or now_s < self._renew_at_s:
            return
        try:
            for first in range(0, len(leased), MAX_RENEWED):
                read(await client.post("/v1/jobs/renew", json={"jobs": leased[first : first + MAX_RENEWED]}))
        except PenstockRefused as error:
            if error.code == UNAUTHENTICATED:
                raise
            log.warning("leases are not renewed: %s", error)  # an older penstockd ends no job for that
        self._renew_at_s = now_s + RENEW_S

    async def _listen(self, client: httpx.AsyncClient) -> None:
        """Read penstockd's events, and reopen the stream when it ends."""
        while True:
            try:
                async with client.stream("GET", "/v1/events", timeout=SILENCE_S) as answer:
                    self._listening = answer.is_success
                    self._ask.set()  # the stream does not repeat earlier events
                    kind = ""
                    async for line in answer.aiter_lines():
                        key, _, text = line.partition(": ")
                        if key == "event":
                            kind = text
                        elif key == "data" and kind == "job":
                            self._receive(json.loads(text))
            except httpx.TransportError as error:
                log.debug("penstockd's event stream cannot be read: %s", error)
            finally:
                self._listening = False
                self._ask.set()
            await asyncio.sleep(RECHECK_S)

    def _receive(self, job: Job) -> None:
        if job["state"] == "ended":
            self._resolve(job["id"], job)
            return
        for each in list(self._waiting.get(job["id"], ())):
            if each.output.key in (None, job["key"]):
                each.take(job)
            elif not each.end.done():  # Slurm has lost its job, and another one has the id now
                each.end.set_result(job)

    async def _show_outputs(self, client: httpx.AsyncClient) -> None:
        """Log the output of the jobs, `LOGS_AT_ONCE` together, and `LOGS_PER_S` a second at most."""
        now_s = asyncio.get_running_loop().time
        while True:
            due = [each for those in self._waiting.values() for each in those if each.wants_output(now_s())]
            due = sorted(due, key=lambda each: each.read_s)[:LOGS_AT_ONCE]
            read = []
            for each in due:
                each.read_s = now_s()
                each.reading = asyncio.create_task(each.output.read(client), context=each.context)
                await asyncio.wait([each.reading])
                read.append((each, each.reading))
            for each, reading in read:
                if not each.end.done() and not reading.cancelled():  # else the end shows it
                    each.context.run(each.output.write, reading.result())
            await asyncio.sleep(max(self.poll_interval_s, len(due) / LOGS_PER_S))

    async def _read_all(self, client: httpx.AsyncClient) -> None:
        watched = set(self._waiting)
        async for page in pages(client, {"state": list(OPEN)}):
            for job in page:
                self._receive(job)
            watched -= {job["id"] for job in page}
            if not watched:
                break
        if len(watched) > FEW:  # many have ended at once: most of them are among the newest
            for job in await anext(pages(client, {"state": ["ended"]})):
                if job["id"] in watched:
                    self._resolve(job["id"], job)
                    watched.discard(job["id"])
        for job_id in watched:
            try:
                job = read(await client.get(f"/v1/jobs/{job_id}"))
            except PenstockRefused as error:
                self._resolve(job_id, error)
                continue
            if job["state"] == "ended":
                self._resolve(job_id, job)

    def _resolve(self, job_id: str, result: Job | Exception) -> None:
        for each in self._waiting.pop(job_id, set()):
            if each.end.done():
                continue
            if isinstance(result, Exception):
                each.end.set_exception(result)
            else:
                each.end.set_result(result)


_pollers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, float], Poller]] = WeakKeyDictionary()


def poller(conn_id: str, poll_interval_s: float) -> Poller:
    """The running event loop's poller for a connection."""
    own = _pollers.setdefault(asyncio.get_running_loop(), {})
    return own.setdefault((conn_id, poll_interval_s), Poller(conn_id, poll_interval_s))


async def options_of(conn_id: str) -> dict[str, Any]:
    """Arguments for a client of a connection."""
    connection = await get_async_connection(conn_id)
    # In a thread: reading the certificates of TLS takes some 30 ms, in which all triggers would stand still.
    return await asyncio.to_thread(client_options, connection)


@contextlib.asynccontextmanager
async def connect(conn_id: str, options: dict[str, Any] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client for a connection. If penstockd does not answer, the next client asks another one, if there is one.

    `options` are those of a connection that was read before. To read one, a trigger asks the triggerer's other process several
    times, which answers some thirty questions a second.
    """
    async with httpx.AsyncClient(**(options or await options_of(conn_id))) as client:
        try:
            yield client
        except (httpx.TransportError, PenstockAway):
            did_not_answer(client)
            raise


async def pages(client: httpx.AsyncClient, query: dict[str, Any]) -> AsyncIterator[list[Job]]:
    """Jobs, newest first, a page at a time."""
    while True:
        page = read(await client.get("/v1/jobs", params=query | {"limit": PAGE}))
        yield page["jobs"]
        if page["next"] is None:
            return
        query = query | {"after": page["next"]}
