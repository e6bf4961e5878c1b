"""Writes reports of many requests to the store with one commit."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from penstock_profiles.wire import Report
from penstock_scheduler.store.sql import SqlStore


class ReportWriter:
    """Commits the reports of all waiting requests together, so that many requests share one commit."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._waiting: list[tuple[list[Report], asyncio.Future[list[bool]]]] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "reports")
        """A thread of its own: a commit does not queue behind the other work of the service's threads."""

    async def add(self, reports: list[Report]) -> list[bool]:
        """Store the reports and return, for each, whether it was new. All are on disk when this returns.

        Raises:
            StoreError: nothing was stored.
        """
        future: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
        self._waiting.append((reports, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        return await future

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                news = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._store.add_reports, [report for reports, _ in batch for report in reports]
                )
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            at = 0
            for reports, future in batch:
                if not future.done():
                    future.set_result(news[at : at + len(reports)])
                at += len(reports)
