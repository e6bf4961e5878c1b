"""The book of the cloud: open runs, the ledger, budgets, and the jobs' times in the queue. The store has all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock_cloud.fleet import DescribedInstance
from penstock_cloud.regions import MISSED
from penstock_cloud.runs import BurstRun, Slot, cost_usd, entries
from penstock_scheduler.burst.ledger import BudgetSettings, budget_lines
from penstock_scheduler.burst.queue_times import QueueTime, counted, returned
from penstock_scheduler.ledger_messages import LedgerLine
from penstock_scheduler.model import BudgetLine, Job, JobId
from penstock_scheduler.store import CloudRunRow, SqlStore

QUEUE_TIMES = "cloud.queue_times"
"""Name of the stored control with the jobs' times outside the queue. It is written when a job enters or leaves the queue."""


class Book:
    """What the store has, in memory. Every change is in the store before it is here."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self.runs = {run.id: run for row in store.cloud_runs() for run in [BurstRun.model_validate_json(row.record)]}
        """Id -> open run."""
        self._lines = store.cloud_ledger()
        kept = store.control(QUEUE_TIMES) or {}
        self._queue_times = {job: QueueTime.model_validate(time) for job, time in kept.items()}
        self._saved_times: dict[JobId, QueueTime] | None = None

    def save(self, run: BurstRun, now_s: float, *lines: LedgerLine) -> None:
        """Save a run and what it costs, both or neither. A run that is over leaves the open runs."""
        over = run.state == "over"
        row = CloudRunRow(run.id, run.job, run.state, run.ordered_s, now_s if over else None, run.model_dump_json())
        self._store.save_cloud_run(row, lines)
        self._lines.extend(lines)
        self.runs[run.id] = run
        if over:
            del self.runs[run.id]

    def of_job(self, job: JobId) -> list[BurstRun]:
        """All runs of a job, also those that are over; oldest first."""
        return [BurstRun.model_validate_json(row.record) for row in self._store.cloud_runs(job=job)]

    def budgets(self, settings: BudgetSettings, now_s: float, accounts: Iterable[str]) -> tuple[BudgetLine, ...]:
        """The caps that apply to these accounts, with what is used of each."""
        return budget_lines(settings, entries(self._lines), now_s, accounts)

    def settle(self, seen: DescribedInstance) -> None:
        """Charge an instance that has ended and belongs to no open run, unless it is paid for."""
        slots = [slot for run in self.of_job(seen.tags.get("job", "")) for slot in run.slots]
        line = _unpaid(seen, next((slot for slot in slots if slot.instance == seen.id), None))
        if line is None:
            return
        self._store.charge([line])
        if all(line.key != known.key for known in self._lines):
            self._lines.append(line)

    def count_queue_times(self, jobs: Sequence[Job], now_s: float) -> None:
        """Note which jobs have entered or left the queue."""
        self._queue_times = times = counted(self._queue_times, jobs, now_s)
        if times != self._saved_times:
            self._saved_times = times
            self._store.set_control(QUEUE_TIMES, {job: time.model_dump() for job, time in times.items()})

    def comes_back(self, job: Job, now_s: float) -> None:
        """A job has come back from the cloud: its waiting budget begins anew."""
        self._queue_times[job.id] = returned(job, now_s)

    def waits_since_s(self, jobs: Sequence[Job], now_s: float) -> dict[JobId, float]:
        """See `CloudState.waits_since_s`. To be called after `count_queue_times`."""
        return {job.id: self._queue_times[job.id].waits_since_s(job.submit_s, now_s) for job in jobs}


def _unpaid(seen: DescribedInstance, billed: Slot | None) -> LedgerLine | None:
    """The charge for an instance that has ended and belongs to no open run. None if it is paid for.

    An instance that EC2 had forgotten was charged until its committed dollars were spent. The difference is credited.
    """
    tags = seen.tags
    usd_per_h = float(tags.get("usd_per_h", "0"))
    seconds = max((seen.ended_s or seen.launched_s) - seen.launched_s, 0.0)
    usd, text = cost_usd(seconds, usd_per_h), f"for {seen.id} {seconds:.0f} s of {seen.instance_type}"
    if billed is None:
        text = f"{text}, which belonged to no run"
    elif billed.missed >= MISSED:
        usd -= cost_usd(billed.seconds, usd_per_h)
        text = f"{text}, which EC2 did not list, in place of {billed.seconds:.0f} s"
    else:
        return None
    return LedgerLine(
        id=0,
        key=f"cloud:orphan-{seen.id}:usd",
        time_s=seen.ended_s or seen.launched_s,
        account=tags.get("account", ""),
        user=tags.get("user", ""),
        job=tags.get("job", ""),
        kind="usd",
        amount=usd,
        text=text,
    )
