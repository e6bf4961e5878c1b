"""Takes in the reports that a job sends over HTTP."""

from __future__ import annotations

import asyncio

from penstock_profiles.wire import Report
from penstock_scheduler.api.messages import RefusedReport, ReportBatch, ReportReceipt
from penstock_scheduler.daemon.service.api import Api, Call
from penstock_scheduler.daemon.service.errors import Refusal, no_such_job
from penstock_scheduler.daemon.service.guard import check_report
from penstock_scheduler.jobs.report_quota import TEXT
from penstock_scheduler.store.leadership.site_clock import site_time_s

MOST_EPOCHS = 100_000
"""Jobs whose epochs are kept in memory."""


async def accept(call: Call, job: str, batch: ReportBatch) -> ReportReceipt:
    """Store the plausible reports of a batch, and learn from the new ones.

    Raises:
        Refusal: the caller does not own the job, or the job has ended.
        StoreError: nothing was stored.
    """
    api, identity = call.api, call.identity
    board = api.board
    owner = identity.job == job if identity.role == "job" else True
    view = await api.job(job)
    if view is None or not owner or view.user != identity.user:
        if view is not None:
            board.counters["reports of others refused"] += len(batch.reports)
            await call.audit(allowed=False, text="the job belongs to another user")
        raise no_such_job(job[:50])
    if view.state == "ended":
        raise Refusal(409, "job-ended", f"job {job} has ended and takes no more reports")
    present = api.epochs.get(job) if board.submitter is None else None
    if present is None:
        present = await asyncio.to_thread(_present_epoch, api, job)
    good, bad = _check(batch, job, present)
    kept, over = api.quota.admit(good, site_time_s())
    if over:
        good, bad = _without_excess(batch, kept, bad)
    board.counters["reports refused"] += len(bad)
    news = await api.writer.add(good) if good else []
    fresh = [report for report, new in zip(good, news, strict=True) if new]
    board.counters["reports accepted"] += len(fresh)
    if fresh:
        api.epochs[job] = present = max(present, *(report.epoch for report in fresh))
        board.take_reports(fresh)
        api.here.learn(fresh)
    return ReportReceipt(accepted=len(fresh), duplicates=len(good) - len(fresh), refused=bad, epoch=present)


def _check(batch: ReportBatch, job: str, present: int) -> tuple[list[Report], list[RefusedReport]]:
    """The reports of a batch that may be stored, and those that may not."""
    good: list[Report] = []
    bad: list[RefusedReport] = []
    for index, given in enumerate(batch.reports):
        try:
            report = check_report(given, job, site_time_s())
            if report.epoch < present:
                raise ValueError(f"the report is from epoch {report.epoch}; the job's present epoch is {present}")
            good.append(report)
        except ValueError as error:
            bad.append(RefusedReport(index=index, message=str(error).encode(errors="replace").decode()))
    return good, bad


def _without_excess(
    batch: ReportBatch, kept: list[Report], bad: list[RefusedReport]
) -> tuple[list[Report], list[RefusedReport]]:
    """The reports that the job's allowance admits, and those that may not be stored, in the order of the batch."""
    stays, refused = {(each.epoch, each.sequence) for each in kept}, {each.index: each for each in bad}
    for index, given in enumerate(batch.reports):
        if index not in refused and (given.get("epoch"), given.get("sequence")) not in stays:
            refused[index] = RefusedReport(index=index, message=TEXT)
    return kept, [refused[index] for index in sorted(refused)]


def _present_epoch(api: Api, job: str) -> int:
    epochs = api.epochs
    if len(epochs) > MOST_EPOCHS:
        epochs.clear()
        api.quota.forget(())
    if job not in epochs:
        epochs[job] = api.store.newest_epoch(job) or 0
    of_slurm = api.board.submitter.epoch(job) if api.board.submitter else None
    return max(epochs[job], of_slurm or 0)
