"""How the API refuses a request."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse

from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.safe_text import one_line


class Refusal(PenstockError):
    """An answer other than 2xx; see the table in docs/user/api.md."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def no_such_job(job: str) -> Refusal:
    """For a job that does not exist and for a job of another user alike, so that the answer does not tell which it is."""
    return Refusal(
        404,
        "no-such-job",
        f"there is no job {job} that you may see; list your jobs with `penstock list` or GET /v1/jobs",
    )


def problem(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer of a request that failed, as ErrorAnswer describes it."""
    return JSONResponse({"error": {"code": code, "message": one_line(message)}}, status, headers)
