"""Waiting for jobs in the triggerer: one poller for each connection, however many tasks wait."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import logging
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from airflow.providers.common.compat.connection import get_async_connection
from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from airflow_provider_penstock.exceptions import PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import OPEN, Job, client_options, read

try:
    from airflow.triggers.base import BaseEventTrigger
except ImportError:  # before Airflow 3
    BaseEventTrigger = BaseTrigger

log = logging.getLogger(__name__)

TELLS = hasattr(BaseTrigger, "on_kill")
"""Whether Airflow tells a trigger that a person stopped its task; from 3.3 on."""

RECHECK_S = 30.0
"""While penstockd tells what happens, all jobs are asked for only so often; if it does not, so often it is asked to tell."""
SILENCE_S = 60.0
"""Without a word penstockd is taken to have gone; it says every 15 s that it is there."""
PAGE = 500
FEW = 5
"""Jobs that are asked for one by one."""
SETTLE_S = 10.0
"""From its start a trigger fires no sooner. A task that is to go on while its worker is still on its way out, Airflow
takes for one that was killed: with Airflow 3.3 on a busy machine a worker took 5 s, and tasks of jobs of a few seconds failed.
"""
LOGS_PER_S = 5.0
"""Looks at outputs, of all tasks that wait on a connection: for each of them penstockd asks Slurm where the output is."""


class Poller:
    """Listens to what penstockd tells of the jobs of a connection.

    When somebody begins to wait, and in case something was not heard, it asks for all open jobs at once, and for a job that is
    not among them by its id; every `poll_interval_s` while penstockd does not tell.
    """

    def __init__(self, conn_id: str, poll_interval_s: float) -> None:
        self.conn_id = conn_id
        self.poll_interval_s = poll_interval_s
        self.seen: dict[str, Job] = {}
        """Jobs that are waited for, as last seen."""
        self.client: httpx.AsyncClient | None = None
        """While it polls."""
        self._waiting: dict[str, set[asyncio.Future[Job]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ask = asyncio.Event()
        """Set when it is time to ask, whatever was heard."""
        self._listening = False

    async def ended(self, job_id: str) -> Job:
        """The job, once it has ended. Raises PenstockRefused if the API does not know it."""
        future: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(future)
        self._ask.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            return await future
        finally:
            waiting = self._waiting.get(job_id, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(job_id, None)
                self.seen.pop(job_id, None)

    async def _poll(self) -> None:
        while self._waiting:
            try:
                async with await connect(self.conn_id) as self.client:
                    listener = asyncio.create_task(self._listen(self.client))
                    try:
                        while self._waiting:
                            self._ask.clear()
                            await self._look(self.client)
                            await asyncio.sleep(self.poll_interval_s)
                            if self._listening:
                                with contextlib.suppress(TimeoutError):
                                    await asyncio.wait_for(self._ask.wait(), RECHECK_S)
                    finally:
                        listener.cancel()
            except (httpx.TransportError, PenstockAway) as error:
                log.warning("penstockd does not answer (%s); waiting on", error)
                await asyncio.sleep(self.poll_interval_s)
            except Exception as error:  # a wrong token, a connection that is gone: all who wait are told
                for job_id in list(self._waiting):
                    self._tell(job_id, error)
                return

    async def _listen(self, client: httpx.AsyncClient) -> None:
        """Take in what penstockd tells of jobs, and again when it has gone and is back."""
        while True:
            try:
                async with client.stream("GET", "/v1/events", timeout=SILENCE_S) as answer:
                    self._listening = answer.is_success
                    self._ask.set()  # what happened before is not told
                    kind = ""
                    async for line in answer.aiter_lines():
                        word, _, text = line.partition(": ")
                        if word == "event":
                            kind = text
                        elif word == "data" and kind == "job":
                            self._hear(json.loads(text))
            except httpx.TransportError as error:
                log.debug("penstockd does not tell what happens: %s", error)
            finally:
                self._listening = False
                self._ask.set()
            await asyncio.sleep(RECHECK_S)

    def _hear(self, job: Job) -> None:
        if job["id"] not in self._waiting:
            return
        if job["state"] == "ended":
            self._tell(job["id"], job)
        else:
            self.seen[job["id"]] = job

    @property
    def log_round_s(self) -> float:
        """Seconds in which each job's output is looked at once."""
        return len(self._waiting) / LOGS_PER_S

    async def _look(self, client: httpx.AsyncClient) -> None:
        watched = set(self._waiting)
        async for page in pages(client, {"state": list(OPEN)}):
            self.seen |= {job["id"]: job for job in page if job["id"] in watched}
            watched -= {job["id"] for job in page}
            if not watched:
                break
        if len(watched) > FEW:  # very many have ended at once: most of them are among the newest
            for job in await anext(pages(client, {"state": ["ended"]})):
                if job["id"] in watched:
                    self._tell(job["id"], job)
                    watched.discard(job["id"])
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


async def connect(conn_id: str) -> httpx.AsyncClient:
    """A client for a connection, to be used with `async with`."""
    return httpx.AsyncClient(**client_options(await get_async_connection(conn_id)))


async def pages(client: httpx.AsyncClient, query: dict[str, Any]) -> AsyncIterator[list[Job]]:
    """Jobs, newest first, a page at a time."""
    while True:
        page = read(await client.get("/v1/jobs", params=query | {"limit": PAGE}))
        yield page["jobs"]
        if page["next"] is None:
            return
        query = query | {"after": page["next"]}


def describe(job: Job) -> str:
    """Where a job stands, in a line for the task's log."""
    held = job["allocation"]
    has = f" on {held['gpus']} {held['gpu_type']} ({', '.join(held['nodes'])})" if held else ""
    return f"job {job['id']} is {job['ended'] or job['state']}{has}{': ' + job['reason'] if job['reason'] else ''}"


def state_of(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """A task's state; None if it has been cleared, or is gone."""
    try:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
    except ImportError:  # Airflow 2: triggers may look into the database
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session

        names = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
        with create_session() as session:
            return session.query(TaskInstance.state).filter_by(**names).scalar()
    states = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, run_ids=[run_id], task_ids=[task_id], map_index=map_index
    )
    return next(iter(states.get(run_id, {}).values()), None)


class PenstockJobTrigger(BaseTrigger):
    """Fires once a job has ended. Meanwhile its moves and its output go to the task's log.

    The event's payload is `{"job_id": ..., "shown": ...}`, `shown` being the byte up to which its output was shown, or has an
    `error` instead.
    """

    def __init__(
        self,
        penstock_conn_id: str,
        job_id: str,
        poll_interval_s: float = 2.0,
        cancel: bool = True,
        log_interval_s: float = 30.0,
    ) -> None:
        super().__init__()
        self.penstock_conn_id = penstock_conn_id
        self.job_id = job_id
        self.poll_interval_s = poll_interval_s
        self.cancel = cancel
        self.log_interval_s = log_interval_s
        self._shown = 0

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and its arguments; no secret is among them."""
        names = ("penstock_conn_id", "job_id", "poll_interval_s", "cancel", "log_interval_s")
        return f"{__name__}.PenstockJobTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the end."""
        ours = poller(self.penstock_conn_id, self.poll_interval_s)
        telling = asyncio.create_task(self._tell(ours))
        settled = asyncio.create_task(asyncio.sleep(SETTLE_S))
        try:
            await ours.ended(self.job_id)
            await settled
        except asyncio.CancelledError:
            if not TELLS and await self._is_stopped():
                await self.on_kill()
            raise
        except Exception as error:
            yield TriggerEvent({"job_id": self.job_id, "error": f"{type(error).__name__}: {error}"})
        else:
            yield TriggerEvent({"job_id": self.job_id, "shown": self._shown})
        finally:
            telling.cancel()
            settled.cancel()

    async def on_kill(self) -> None:
        """A person stopped the task: cancel its job. A triggerer that restarts does not come here."""
        if not self.cancel:
            return
        async with await connect(self.penstock_conn_id) as client:
            read(await client.post(f"/v1/jobs/{self.job_id}/cancel"))

    async def _is_stopped(self) -> bool:
        """Whether it is a person who ends the trigger: then its task waits no longer. In doubt it is a restart."""
        ti = self.task_instance
        try:
            state = await sync_to_async(state_of)(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        except Exception as error:
            self.log.warning("whether the task was stopped is not known (%s): job %s runs on", error, self.job_id)
            return False
        return state != "deferred"

    async def _tell(self, ours: Poller) -> None:
        """Log what becomes of the job, and every `log_interval_s` of its run what it has written since.

        Where very many wait, less often; and not all at once, as after a restart of the triggerer.
        """
        now_s = asyncio.get_running_loop().time
        told, since_s, looked = "", now_s(), False
        place = zlib.crc32(self.job_id.encode()) / 2**32  # of its first look in a round
        while True:
            job = ours.seen.get(self.job_id)
            if job is not None:
                news = describe(job)
                if news != told:
                    self.log.info("%s", news)
                    told = news
                wait_s = max(self.log_interval_s, ours.log_round_s) if looked else ours.log_round_s * place
                if self.log_interval_s and now_s() - since_s >= wait_s and job["state"] in ("running", "stopping"):
                    since_s, looked = now_s(), True
                    await self._show(ours.client)
            await asyncio.sleep(self.poll_interval_s)

    async def _show(self, client: httpx.AsyncClient | None) -> None:
        if client is None or client.is_closed:
            return
        try:
            query = {"offset": self._shown}
            part = read(await client.get(f"/v1/jobs/{self.job_id}/log", params=query))
        except (httpx.TransportError, PenstockAway, PenstockRefused):
            return  # the next look, or the end, will show it
        whole, _, begun = part["text"].rpartition("\n")
        self._shown = part["next"] - len(begun.encode())  # a line that is being written is shown when it is whole
        if part["next"] < part["size"] and not whole:  # a line longer than a part, such as a progress bar's
            whole, self._shown = begun, part["next"]
        for line in whole.splitlines():
            self.log.info("%s", line)


class PenstockJobEventTrigger(BaseEventTrigger):
    """For an `AssetWatcher`: fires each time that a job whose name matches a pattern (such as `train-*`) has ended.

    The event's payload is the job as the API has it. Jobs that end while no triggerer runs are not made up for.
    """

    def __init__(
        self,
        name: str = "*",
        ended: Iterable[str] = ("COMPLETED",),
        penstock_conn_id: str = "penstock_default",
        poll_interval_s: float = 10.0,
    ) -> None:
        super().__init__()
        self.name = name
        self.ended = list(ended)
        self.penstock_conn_id = penstock_conn_id
        self.poll_interval_s = poll_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and its arguments."""
        names = ("name", "ended", "penstock_conn_id", "poll_interval_s")
        return f"{__name__}.PenstockJobEventTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look every `poll_interval_s`, for ever."""
        open_before: set[str] | None = None
        told: set[str] = set()
        while True:
            try:
                async with await connect(self.penstock_conn_id) as client:
                    now_open = {job["id"] async for page in pages(client, {"state": list(OPEN)}) for job in page}
                    recent = await anext(pages(client, {"state": ["ended"]}))
                    if open_before is None:
                        told = {job["id"] for job in recent}
                    else:
                        fresh = {job["id"]: job for job in recent if job["id"] not in told}
                        for job_id in open_before - now_open - fresh.keys() - told:
                            fresh[job_id] = read(await client.get(f"/v1/jobs/{job_id}"))
                        for job_id in sorted(fresh, key=lambda job_id: fresh[job_id]["end_s"] or 0.0):
                            job = fresh[job_id]
                            if job["state"] == "ended" and self._wanted(job):
                                yield TriggerEvent(job)
                        told = {job["id"] for job in recent} | fresh.keys()
                    open_before = now_open
            except (httpx.TransportError, PenstockAway) as error:
                self.log.warning("penstockd does not answer (%s); waiting on", error)
            await asyncio.sleep(self.poll_interval_s)

    def _wanted(self, job: Job) -> bool:
        return job["ended"] in self.ended and fnmatch.fnmatchcase(job["name"], self.name)
