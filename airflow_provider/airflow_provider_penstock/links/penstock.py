"""Links from a task to its job."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import BaseOperatorLink, XCom

JOB_URL = "job_url"
"""XCom key of the job's URL in the API. The URL of its page begins with it."""


def push_links(ti: Any, hook: Any, job_id: str) -> None:
    """Store what a task's links are made of."""
    ti.xcom_push(key=JOB_URL, value=hook.job_url(job_id))


class PenstockJobLink(BaseOperatorLink):
    """Link to the job's page."""

    name = "Penstock job"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The URL; empty until the job is submitted."""
        url = XCom.get_value(key=JOB_URL, ti_key=ti_key)
        return f"{url}/page" if url else ""


class PenstockExplainLink(BaseOperatorLink):
    """Link to the explanation of the job's GPUs on its page."""

    name = "Why it has these GPUs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The URL; empty until the job is submitted."""
        url = XCom.get_value(key=JOB_URL, ti_key=ti_key)
        return f"{url}/page#explain" if url else ""


JOB_LINKS: tuple[BaseOperatorLink, ...] = (PenstockJobLink(), PenstockExplainLink())
"""The links of every operator that has a job."""
