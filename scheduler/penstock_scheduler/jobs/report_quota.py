"""How much of a job's reports is stored, so that no job fills the store.

Each job has an allowance of bytes that refills with time, and a large one at first. Of a job that has used it up, the newest
report of each kind is stored once a minute: its progress stays known, and so do its starts, checkpoints and ends. The rest is
dropped. Requests to save are answered all the same, because the spool reads every report before this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_profiles.wire import Report
from penstock_scheduler.model import JobId

BYTES_PER_MIN = 32 * 1024
"""What a job may report for ever: about 60 observations a minute, 46 MB a day."""

BURST_BYTES = 4 * 1024 * 1024
"""What a job may report at once."""

SUMMARY_S = 60.0
"""How often a report of each kind is stored of a job that has used up its allowance."""

SUMMARY_BYTES = 4096
"""Largest such report."""

TEXT = (
    f"it reports more than {BYTES_PER_MIN // 1024} KiB a minute, so Penstock stores only its newest report of each kind once a "
    "minute; let it report less often"
)
"""For the job's user."""


@dataclass(slots=True)
class _Allowance:
    bytes_left: float
    at_s: float
    stored_s: dict[str, float] = field(default_factory=dict)
    """Kind of report -> when one was stored beyond the allowance."""


class ReportQuota:
    """What has been stored of each job's reports. Times are s since 1970."""

    def __init__(self) -> None:
        self._of: dict[JobId, _Allowance] = {}

    def admit(self, reports: Iterable[Report], now_s: float) -> tuple[list[Report], set[JobId]]:
        """The reports to store, in their order, and the jobs of which some are dropped."""
        found: list[Report | None] = []
        beyond: dict[tuple[JobId, str], tuple[int, Report]] = {}
        over: set[JobId] = set()
        for at, report in enumerate(reports):
            size, mine = len(report.model_dump_json()), self._refilled(report.job_id, now_s)
            if size <= mine.bytes_left:
                mine.bytes_left -= size
                found.append(report)
                continue
            over.add(report.job_id)
            found.append(None)
            if size <= SUMMARY_BYTES and now_s - mine.stored_s.get(report.body.kind, -SUMMARY_S) >= SUMMARY_S:
                beyond[report.job_id, report.body.kind] = at, report
        for (job_id, kind), (at, report) in beyond.items():
            found[at] = report
            self._of[job_id].stored_s[kind] = now_s
        return [report for report in found if report is not None], over

    def forget(self, keep: Iterable[JobId]) -> None:
        """Forget all jobs but these."""
        kept = set(keep)
        self._of = {job_id: each for job_id, each in self._of.items() if job_id in kept}

    def _refilled(self, job_id: JobId, now_s: float) -> _Allowance:
        mine = self._of.setdefault(job_id, _Allowance(BURST_BYTES, now_s))
        passed_s = max(now_s - mine.at_s, 0.0)
        mine.bytes_left = min(mine.bytes_left + passed_s / 60 * BYTES_PER_MIN, BURST_BYTES)
        mine.at_s = now_s
        return mine
