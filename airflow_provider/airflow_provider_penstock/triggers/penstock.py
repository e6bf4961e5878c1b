"""Waiting for jobs in the triggerer: one poller for each connection, however many tasks wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from airflow.providers.common.compat.connection import get_async_connection
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_penstock.exceptions import PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import Job, client_options, read

log = logging.getLogger(__name__)

OPEN = ("queued", "starting", "running", "stopping")
PAGE = 500


class Poller:
    """Asks for all open jobs of a connection at once; for a job that is not among them, by its id."""

    def __init__(self, conn_id: str, poll_interval_s: float) -> None:
        self.conn_id = conn_id
        self.poll_interval_s = poll_interval_s
        self._waiting: dict[str, set[asyncio.Future[Job]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ended(self, job_id: str) -> Job:
        """The job, once it has ended. Raises PenstockRefused if the API does not know it."""
        future: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(future)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            return await future
        finally:
            waiting = self._waiting.get(job_id, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(job_id, None)

    async def _poll(self) -> None:
        while self._waiting:
            try:
                options = client_options(await get_async_connection(self.conn_id))
                async with httpx.AsyncClient(**options) as client:
                    while self._waiting:
                        await self._look(client)
                        await asyncio.sleep(self.poll_interval_s)
            except (httpx.TransportError, PenstockAway) as error:
                log.warning("penstockd does not answer (%s); waiting on", error)
                await asyncio.sleep(self.poll_interval_s)
            except Exception as error:  # a wrong token, a connection that is gone: all who wait are told
                for job_id in list(self._waiting):
                    self._tell(job_id, error)
                return

    async def _look(self, client: httpx.AsyncClient) -> None:
        watched = set(self._waiting)
        query: dict[str, Any] = {"state": list(OPEN), "limit": PAGE}
        while watched:
            page = read(await client.get("/v1/jobs", params=query))
            watched -= {job["id"] for job in page["jobs"]}
            if page["next"] is None:
                break
            query["after"] = page["next"]
        for job_id in watched:
            try:
                job = read(await client.get(f"/v1/jobs/{job_id}"))
            except PenstockRefused as error:
                self._tell(job_id, error)
                continue
            if job["state"] == "ended":
                self._tell(job_id, job)

    def _tell(self, job_id: str, news: Job | Exception) -> None:
        for future in self._waiting.pop(job_id, set()):
            if future.done():
                continue
            if isinstance(news, Exception):
                future.set_exception(news)
            else:
                future.set_result(news)


_pollers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, float], Poller]] = WeakKeyDictionary()


def poller(conn_id: str, poll_interval_s: float) -> Poller:
    """The running event loop's poller for a connection."""
    own = _pollers.setdefault(asyncio.get_running_loop(), {})
    return own.setdefault((conn_id, poll_interval_s), Poller(conn_id, poll_interval_s))


class PenstockJobTrigger(BaseTrigger):
    """Fires once a job has ended; the event's payload is `{"job_id": ...}`, or has an `error` as well."""

    def __init__(self, penstock_conn_id: str, job_id: str, poll_interval_s: float = 2.0, cancel: bool = True) -> None:
        super().__init__()
        self.penstock_conn_id = penstock_conn_id
        self.job_id = job_id
        self.poll_interval_s = poll_interval_s
        self.cancel = cancel

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and its arguments; no secret is among them."""
        names = ("penstock_conn_id", "job_id", "poll_interval_s", "cancel")
        return f"{__name__}.PenstockJobTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the end."""
        try:
            await poller(self.penstock_conn_id, self.poll_interval_s).ended(self.job_id)
        except Exception as error:
            yield TriggerEvent({"job_id": self.job_id, "error": f"{type(error).__name__}: {error}"})
        else:
            yield TriggerEvent({"job_id": self.job_id})

    async def on_kill(self) -> None:
        """A person stopped the task (Airflow 3.3 tells): cancel its job. A triggerer that restarts does not come here."""
        if not self.cancel:
            return
        async with httpx.AsyncClient(**client_options(await get_async_connection(self.penstock_conn_id))) as client:
            read(await client.post(f"/v1/jobs/{self.job_id}/cancel"))
