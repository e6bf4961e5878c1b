"""Triggers that wait for jobs. All tasks that wait on one connection share one poller."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import logging
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent
from asgiref.sync import sync_to_async

from airflow_provider_penstock.exceptions import UNAUTHENTICATED, PenstockAway, PenstockRefused
from airflow_provider_penstock.hooks.penstock import OPEN, Job, final_summary, read
from airflow_provider_penstock.news import ending
from airflow_provider_penstock.triggers.poller import FEW, RECHECK_S, OutputLog, connect, pages, poller

try:
    from airflow.triggers.base import BaseEventTrigger
except ImportError:  # before Airflow 3
    BaseEventTrigger = BaseTrigger  # type: ignore[misc,assignment]

log = logging.getLogger(__name__)

HAS_ON_KILL = hasattr(BaseTrigger, "on_kill")
"""Whether Airflow calls a trigger's `on_kill` when a user stops its task, as from 3.3 on."""

SETTLE_S = 10.0
"""A trigger fires no sooner than this after its start. If it fires before the task's worker has ended, Airflow takes the task
for killed. With Airflow 3.3 on a busy machine a worker took 5 s to end, and tasks with jobs of a few seconds failed.
"""


_cancelling: set[asyncio.Task[None]] = set()
"""Requests to cancel jobs that penstockd has not answered yet. The event loop itself keeps no tasks."""


async def cancel(conn_id: str, job_id: str, key: str | None = None) -> None:
    """Cancel a job for its own task. Repeats the request while penstockd is away or does not know the token.

    `key` is as in `PenstockHook.own`.
    """
    pause_s = 1.0
    while True:
        try:
            async with connect(conn_id) as client:
                ids = [job_id]
                if key is not None:
                    ids = [job["id"] for job in read(await client.get("/v1/jobs", params={"key": key}))["jobs"]]
                for each in ids:
                    read(await client.post(f"/v1/jobs/{each}/cancel", params={"for_owner": True}))
            return
        except (httpx.TransportError, PenstockAway, PenstockRefused) as error:
            if isinstance(error, PenstockRefused) and error.code != UNAUTHENTICATED:
                log.error("job %s of a task that was stopped cannot be cancelled: %s", job_id, error)
                return
            log.warning("job %s of a task that was stopped is not cancelled yet; trying again: %s", job_id, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RECHECK_S)


def state_of(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """A task's state; None if it was cleared or no longer exists."""
    try:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
    except ImportError:  # Airflow 2, where triggers may read the database
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session

        names = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
        with create_session() as session:
            state: str | None = session.query(TaskInstance.state).filter_by(**names).scalar()
            return state
    states = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, run_ids=[run_id], task_ids=[task_id], map_index=map_index
    )
    return next(iter(states.get(run_id, {}).values()), None)


class PenstockJobTrigger(BaseTrigger):
    """Fires once a job has ended. Meanwhile it logs the job's changes of state or place, and its output.

    The event's payload is `{"job_id": ..., "key": ..., "shown": ...}`, or has `error` instead of `shown`. `shown` is the byte up
    to which the output was logged. With `key`, the job is that of the submission with this key; see `PenstockHook.own`.
    """

    def __init__(
        self,
        penstock_conn_id: str,
        job_id: str,
        poll_interval_s: float = 2.0,
        cancel: bool = True,
        log_interval_s: float = 30.0,
        leased: bool = False,
        ends_task: bool = False,
        key: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.penstock_conn_id = penstock_conn_id
        self.job_id = job_id
        self.leased = leased
        self.ends_task = ends_task
        self.key = key
        self.poll_interval_s = poll_interval_s
        self.cancel = cancel
        self.log_interval_s = log_interval_s
        self.output = OutputLog(job_id, self.log, log_interval_s, key)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and its arguments, without secrets."""
        names = (
            "penstock_conn_id",
            "job_id",
            "poll_interval_s",
            "cancel",
            "log_interval_s",
            "leased",
            "ends_task",
            "key",
        )
        return f"{__name__}.PenstockJobTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the job's end."""
        settled = asyncio.create_task(asyncio.sleep(SETTLE_S))
        try:
            shared = poller(self.penstock_conn_id, self.poll_interval_s)
            job = await shared.ended(self.output, leased=self.leased)
            await settled
            ending = await self._ending(job, shared.options) if self.ends_task and job["ended"] == "COMPLETED" else None
        except asyncio.CancelledError:
            if not HAS_ON_KILL and await self._is_stopped():
                await self.on_kill()
            raise
        except Exception as error:
            code = getattr(error, "code", "")
            failed = {"error": f"{type(error).__name__}: {error}", "code": code}
            yield TriggerEvent({"job_id": self.job_id, "key": self.key, **failed})
        else:
            yield ending or TriggerEvent({"job_id": self.job_id, "key": self.key, "shown": self.output.shown})
        finally:
            settled.cancel()

    async def _ending(self, job: Job, options: dict[str, Any] | None) -> TriggerEvent | None:
        """The task's success, after the rest of the job's output. None if anything is in the way: a worker ends the task then."""
        try:
            if self.key not in (None, job["key"]):
                raise ValueError(f"job {self.job_id} is another one by now, with the key {job['key']}")
            async with connect(self.penstock_conn_id, options) as client:
                before = -1
                while before != self.output.shown:
                    before = self.output.shown
                    self.output.write(await self.output.read(client))
                result = await final_summary(client, self.job_id)
            event = await self._success(result)
        except Exception as error:
            self.log.info("a worker ends the task, because the triggerer cannot: %s", error)
            return None
        self.log.info("%s", ending(job))
        return event

    async def _success(self, result: dict[str, Any]) -> TriggerEvent:
        try:
            from airflow.sdk.execution_time.xcom import XCom
        except ImportError:  # Airflow 2
            return TaskSuccessEvent(xcoms={"return_value": result})
        # Airflow 3 stores the XComs of an event as JSON within JSON, so that other tasks would read them as text.
        ti = self.task_instance
        assert ti is not None, "Airflow sets it"
        names = {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id}
        await sync_to_async(XCom.set)("return_value", result, **names, map_index=ti.map_index)
        return TaskSuccessEvent()

    async def on_kill(self) -> None:
        """Cancel the job, because a user stopped the task. Airflow does not call this when a triggerer restarts."""
        if not self.cancel:
            return
        # A task of its own: Airflow waits for this method only for `[triggerer] on_kill_timeout`, by default 30 s.
        task = asyncio.create_task(cancel(self.penstock_conn_id, self.job_id, self.key))
        _cancelling.add(task)
        task.add_done_callback(_cancelling.discard)
        await asyncio.shield(task)

    async def _is_stopped(self) -> bool:
        """Whether a user stopped the task, so that it is no longer deferred. If unknown: no."""
        ti = self.task_instance
        if ti is None:
            return False
        try:
            state = await sync_to_async(state_of)(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        except Exception as error:
            self.log.warning("it is unknown whether the task was stopped (%s): job %s runs on", error, self.job_id)
            return False
        return state != "deferred"


@dataclass(frozen=True)
class Seen:
    """All that a watcher has to know of the jobs that it has seen, to find out later which have ended since."""

    newest: str | None
    """The newest job that the connection's user may see."""
    open: frozenset[str]
    """The jobs that had not ended."""

    def stored(self) -> dict[str, Any]:
        """As Airflow's store has it."""
        return {"newest": self.newest, "open": sorted(self.open)}


async def _later(client: httpx.AsyncClient, before: Seen | None) -> tuple[str | None, set[str] | None]:
    """The newest job, and the jobs that came after the newest one of `before`; None if penstockd no longer has that one."""
    newest: str | None = None
    later: set[str] = set()
    async for page in pages(client, {}):
        newest = newest or next((job["id"] for job in page), None)
        if before is None:
            return newest, later
        ids = [job["id"] for job in page]
        if before.newest in ids:
            return newest, later | set(ids[: ids.index(before.newest)])
        later |= set(ids)
    return newest, later if before is None or before.newest is None else None


async def look(client: httpx.AsyncClient, before: Seen | None) -> tuple[Seen, list[Job]]:
    """What is there now, and the jobs that have ended since `before`, in the order of their ends; none without `before`.

    A job has ended since then if it was open, or came later, and is not open now. No clock is compared.
    """
    newest, later = await _later(client, before)
    if later is None:
        log.warning("penstockd has no job %s any more; which jobs ended until now is unknown", before and before.newest)
    now_open = {job["id"] async for page in pages(client, {"state": list(OPEN)}) for job in page}
    gone = set() if before is None or later is None else (before.open | later) - now_open
    known = {}
    if len(gone) > FEW:  # most of them are among the newest
        known = {job["id"]: job for job in await anext(pages(client, {"state": ["ended"]}))}
    ended = []
    for job_id in gone:
        try:
            job = known.get(job_id) or read(await client.get(f"/v1/jobs/{job_id}"))
        except PenstockRefused as error:
            if error.code != "no-such-job":
                raise
            log.warning("penstockd has deleted job %s, which causes no event", job_id)
            continue
        if job["state"] == "ended":
            ended.append(job)
        else:
            now_open.add(job_id)
    return Seen(newest, frozenset(now_open)), sorted(ended, key=lambda job: job["end_s"] or 0.0)


class PenstockJobEventTrigger(BaseEventTrigger):
    """For an `AssetWatcher`: fires each time a job whose name matches a pattern (such as `train-*`) has ended.

    The event's payload is the job as the API has it. From Airflow 3.3 on, jobs that end while no triggerer runs cause their
    events later: the trigger notes in Airflow's database what it has seen. Before 3.3 they cause none.

    .. seealso::
        For more information on how to use this trigger, take a look at the guide: :ref:`howto/trigger:PenstockJobEventTrigger`
    """

    def __init__(
        self,
        name: str = "*",
        ended: Iterable[str] = ("COMPLETED",),
        penstock_conn_id: str = "penstock_default",
        poll_interval_s: float = 10.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.ended = list(ended)
        self.penstock_conn_id = penstock_conn_id
        self.poll_interval_s = poll_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class and its arguments."""
        names = ("name", "ended", "penstock_conn_id", "poll_interval_s")
        return f"{__name__}.PenstockJobEventTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll every `poll_interval_s`, without end."""
        noted = seen = await self._noted()
        while True:
            try:
                async with connect(self.penstock_conn_id) as client:
                    seen, ended = await look(client, seen)
                for job in ended:
                    if self._wanted(job):
                        yield TriggerEvent(job)
            except (httpx.TransportError, PenstockAway) as error:
                self.log.warning("penstockd does not answer (%s); the watcher goes on", error)
            await asyncio.sleep(self.poll_interval_s)
            # Not before: by now Airflow has stored the events. If the triggerer is killed in between, they come twice.
            if seen is not None and seen != noted and await self._note(seen):
                noted = seen

    @property
    def _stores(self) -> Any:
        """Where the trigger may store what it has seen; None before Airflow 3.3."""
        return getattr(self, "asset_state_store", None)

    @property
    def _key(self) -> str:
        """The key of what this trigger has seen: several watchers of an asset have one each."""
        text = json.dumps(self.serialize(), sort_keys=True)
        return f"penstock-{zlib.crc32(text.encode()):08x}"

    async def _noted(self) -> Seen | None:
        """What was stored; None: nothing. Waits until Airflow answers: without it, events would be lost."""
        while self._stores is not None:
            try:
                stored = await self._stores.aget(self._key)
                return None if stored is None else Seen(stored["newest"], frozenset(stored["open"]))
            except (
                ValueError
            ) as error:  # the trigger belongs to several assets, and Airflow's store has a place for one
                self.log.warning("jobs that end while no triggerer runs cause no event: %s", error)
                self.asset_state_store = None
            except Exception as error:
                self.log.warning("what the watcher has seen cannot be read; trying again: %s", error)
                await asyncio.sleep(self.poll_interval_s)
        return None

    async def _note(self, seen: Seen) -> bool:
        """Store what was seen; whether it is stored."""
        try:
            if self._stores is not None:
                await self._stores.aset(self._key, seen.stored())
        except Exception as error:
            self.log.warning("what the watcher has seen cannot be stored; trying again: %s", error)
            return False
        return True

    def _wanted(self, job: Job) -> bool:
        return job["ended"] in self.ended and fnmatch.fnmatchcase(job["name"], self.name)
