"""A notifier that cancels jobs, for callbacks such as `on_failure_callback`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from airflow.providers.common.compat.notifier import BaseNotifier

from airflow_provider_penstock.exceptions import PenstockRefused
from airflow_provider_penstock.hooks.penstock import PenstockHook


class PenstockCancelNotifier(BaseNotifier):
    """Cancels jobs that run without a task that waits for them, for example once another task of the DAG run has failed.

    A job that has ended, or that penstockd does not know any more, stays as it is.

    .. seealso::
        For more information on how to use this notifier, take a look at the guide:
        :ref:`howto/notifier:PenstockCancelNotifier`
    """

    template_fields: Sequence[str] = ("job_id", "penstock_conn_id")

    def __init__(
        self,
        job_id: str | Iterable[str] | None,
        penstock_conn_id: str = PenstockHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        """`job_id` is a job's id, or several. None, or a template that gives None, cancels nothing."""
        super().__init__(**kwargs)
        self.job_id = job_id
        self.penstock_conn_id = penstock_conn_id

    def notify(self, context: Any) -> None:
        """Cancel the jobs."""
        hook = PenstockHook(self.penstock_conn_id)
        for job_id in self._jobs():
            try:
                hook.cancel(job_id)
            except PenstockRefused as refused:
                if refused.code != "no-such-job":
                    raise
            self.log.info("job %s is cancelled", job_id)

    async def async_notify(self, context: Any) -> None:
        """Cancel the jobs from a triggerer, as for a deadline of the DAG."""
        await asyncio.to_thread(self.notify, context)

    def _jobs(self) -> list[str]:
        given = [self.job_id] if self.job_id is None or isinstance(self.job_id, str) else list(self.job_id)
        return [job_id for job_id in given if job_id not in (None, "", "None")]
