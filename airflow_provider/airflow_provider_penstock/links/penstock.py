"""Links from a task to its job."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import BaseOperatorLink, XCom

JOB_URL = "job_url"
"""XCom key: where the job is in the API. Its page, for people, is under it."""


class PenstockJobLink(BaseOperatorLink):
    """To the job's page."""

    name = "Penstock job"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Empty until the job is submitted."""
        url = XCom.get_value(key=JOB_URL, ti_key=ti_key)
        return f"{url}/page" if url else ""


class PenstockExplainLink(BaseOperatorLink):
    """To the part of its page that says why the job has what it has."""

    name = "Why it has these GPUs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Empty until the job is submitted."""
        url = XCom.get_value(key=JOB_URL, ti_key=ti_key)
        return f"{url}/page#explain" if url else ""
