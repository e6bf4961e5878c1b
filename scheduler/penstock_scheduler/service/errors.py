"""How the service refuses."""

from __future__ import annotations

from penstock_scheduler.errors import PenstockError


class Refusal(PenstockError):
    """An answer other than 2xx; see the table in docs/user/api.md."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def no_such_job(job: str) -> Refusal:
    """Of a job that is not there, and of another's: who may not see a job does not learn that it is there."""
    return Refusal(
        404, "no-such-job", f"there is no job {job} that you may see; list yours with `penstock list` or GET /v1/jobs"
    )
