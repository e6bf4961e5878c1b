"""The book of the cloud: open runs, the ledger, budgets, and the jobs' times in the queue. The store has all of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.burst.deciding.ledger import CloudBudgets, Used, month
from penstock_scheduler.burst.manager.places import MISSED
from penstock_scheduler.burst.manager.provider import DescribedInstance
from penstock_scheduler.burst.manager.runs import BurstRun, Slot, added, entries, split
from penstock_scheduler.model import BudgetLine, CloudRun, Job, JobId, Offer, Phase
from penstock_scheduler.people.errors import NoSuchRun
from penstock_scheduler.store.cloud_runs import CloudRunRow, RunStore

IN_QUEUE = frozenset({Phase.QUEUED, Phase.STARTING})


class QueueTime(BaseModel):
    """A job's time outside the queue, since its submission."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out_s: float = 0.0
    """Seconds that it has spent outside the queue, in runs that are over."""
    left_s: float | None = None
    """When its present run began, s since 1970; None: it is in the queue."""

    def waits_since_s(self, submit_s: float, now_s: float) -> float:
        """The time at which a wait of the same length without any run would have begun. It stands still in the queue."""
        return submit_s + self.out_s + (0.0 if self.left_s is None else max(now_s - self.left_s, 0.0))


def counted(known: Mapping[JobId, QueueTime], jobs: Iterable[Job], now_s: float) -> dict[JobId, QueueTime]:
    """The queue times of these jobs now. Unchanged entries are the same objects; other jobs are forgotten.

    A job that is not known and has run before counts from its return to the queue, so it waits too long rather than too
    short: leaving costs money.
    """
    found = {}
    for job in jobs:
        time = known.get(job.id)
        if time is None:
            before_s = max(job.requeued_s or job.submit_s, job.submit_s) - job.submit_s
            time = QueueTime(out_s=before_s)
        if job.phase in IN_QUEUE and time.left_s is not None:
            time = QueueTime(out_s=time.out_s + max(now_s - time.left_s, 0.0))
        elif job.phase not in IN_QUEUE and time.left_s is None:
            time = QueueTime(out_s=time.out_s, left_s=now_s if job.started_s is None else min(job.started_s, now_s))
        found[job.id] = time
    return found


def returned(job: Job, now_s: float) -> QueueTime:
    """The queue time of a job that comes back from the cloud now: star-wait counts from its return."""
    return QueueTime(out_s=max(now_s - job.submit_s, 0.0))


log = logging.getLogger(__name__)

ORPHAN = "orphan-"
"""How the ledger names the cost of an instance of no run."""

QUEUE_TIMES = "cloud.queue_times"
"""Name of the stored control with the jobs' times outside the queue. It is written when a job enters or leaves the queue."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An open run whose record in the store cannot be read. Nothing is done with it, and its commitment stays.

    Attributes:
        run: its id.
        job: its job.
        since_s: when it was ordered, s since 1970.
        why: what is wrong with the record.
    """

    run: str
    job: JobId
    since_s: float
    why: str

    @property
    def trouble(self) -> str:
        """What is wrong, with the remedy, as a sentence."""
        return (
            f"the record of run {self.run} of job {self.job} in the cloud cannot be read: {self.why}; look for its "
            f"instances with `penstock cloud list`, and when they have ended, run `penstock cloud forget {self.run}`"
        )


@dataclass(frozen=True, slots=True)
class OfJob:
    """All runs of a job, also those that are over.

    Attributes:
        count: their number.
        runs: those that can be read, oldest first.
        paid: ids of those that cannot be read and are over, so that their instances are paid for.
    """

    count: int
    runs: tuple[BurstRun, ...]
    paid: frozenset[str]


class Book:
    """What the store has, in memory. Every change is in the store before it is here."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.runs: dict[str, BurstRun] = {}
        """Id -> open run."""
        self.unreadable: dict[str, Unreadable] = {}
        """Id -> open run that cannot be read."""
        for row in store.cloud_runs():
            run = _read(row)
            if isinstance(run, Unreadable):
                self.unreadable[run.run] = run
                log.error("the record of a run cannot be read", extra={"run": run.run, "text": run.trouble})
            else:
                self.runs[run.id] = run
        self._lines = store.cloud_ledger()
        self._used = Used(entries(self._lines))
        kept = store.control(QUEUE_TIMES) or {}
        self._queue_times = {job: QueueTime.model_validate(time, extra="ignore") for job, time in kept.items()}
        self._saved_times: dict[JobId, QueueTime] | None = None

    def save(self, run: BurstRun, now_s: float, *lines: LedgerLine) -> None:
        """Save a run and what it costs, both or neither. A run that is over leaves the open runs."""
        over = run.state == "over"
        row = CloudRunRow(run.id, run.job, run.state, run.ordered_s, now_s if over else None, run.model_dump_json())
        self._store.save_cloud_run(row, lines)
        self._note(lines)
        self.runs[run.id] = run
        if over:
            del self.runs[run.id]

    def _note(self, lines: Sequence[LedgerLine]) -> None:
        self._lines.extend(lines)
        for entry in entries(lines):
            self._used.add(entry)

    def forget(self, run: str, now_s: float) -> JobId:
        """Close an open run that cannot be read, and return its job. Raises NoSuchRun."""
        bad = self.unreadable.get(run)
        if bad is None:
            raise NoSuchRun(f"{run} is no open run with an unreadable record; `penstock doctor` names those")
        row = next(row for row in self._store.cloud_runs() if row.run == run)
        self._store.save_cloud_run(replace(row, state="over", ended_s=now_s))
        del self.unreadable[run]
        return bad.job

    def unreadable_of(self, job: JobId) -> Unreadable | None:
        """The job's open run that cannot be read; None: there is none."""
        return next((bad for bad in self.unreadable.values() if bad.job == job), None)

    def seen_unreadable(self) -> tuple[CloudRun, ...]:
        """The open runs that cannot be read, as a round sees them: their jobs are in the cloud, and stay as they are."""
        if not self.unreadable:
            return ()
        committed = {line.key: line for line in self._lines if line.kind == "committed"}
        found = []
        for bad in self.unreadable.values():
            line = committed.get(f"cloud:{bad.run}:committed")
            usd, account = (0.0, "") if line is None else (line.amount, line.account)
            nothing_known = Offer("an unreadable record", "unknown", 1, 1, 0.0)
            found.append(
                CloudRun(bad.job, nothing_known, bad.since_s, usd, account, state="unreadable", trouble=bad.trouble)
            )
        return tuple(found)

    def of_job(self, job: JobId) -> OfJob:
        """All runs of a job, also those that are over."""
        rows = self._store.cloud_runs(job=job)
        read = [_read(row) for row in rows]
        over = {row.run for row in rows if row.ended_s is not None}
        bad = {run.run for run in read if isinstance(run, Unreadable)}
        return OfJob(len(read), tuple(run for run in read if isinstance(run, BurstRun)), frozenset(bad & over))

    def budgets(self, settings: CloudBudgets, now_s: float, accounts: Iterable[str]) -> tuple[BudgetLine, ...]:
        """The caps that apply to these accounts, with what is used of each."""
        known = {run.id: run.by_month_usd(*month(now_s)) for run in self.runs.values()}
        return self._used.lines(settings, now_s, accounts, known | dict.fromkeys(self.unreadable, (math.inf, math.inf)))

    def settle(self, seen: DescribedInstance, billed: Callable[[Slot], Slot] = lambda slot: slot) -> None:
        """Charge an instance that has ended and belongs to no open run, unless it is paid for.

        Args:
            seen: the instance.
            billed: gives it the price that its provider bills.
        """
        before = self.of_job(seen.tags.get("job", ""))
        if seen.tags.get("run", "") in before.paid:
            return
        slots = [slot for run in before.runs for slot in run.slots]
        lines = _unpaid(seen, next((slot for slot in slots if slot.instance == seen.id), None), billed)
        self._store.charge(lines)
        known = {line.key for line in self._lines}
        self._note([line for line in lines if line.key not in known])

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


def _read(row: CloudRunRow) -> BurstRun | Unreadable:
    try:
        return BurstRun.model_validate_json(row.record, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        why = f"{where}: {first['msg']}" if where else str(first["msg"])
        return Unreadable(row.run, row.job, row.launched_s, why)


def _unpaid(seen: DescribedInstance, paid: Slot | None, billed: Callable[[Slot], Slot]) -> list[LedgerLine]:
    """The charge for an instance that has ended and belongs to no open run, by month. Empty if it is paid for.

    An instance that its provider had forgotten was charged until its committed dollars were spent. The difference is credited.
    """
    tags = seen.tags
    usd_per_h, end_s = float(tags.get("usd_per_h", "0")), seen.ended_s or seen.launched_s
    slot = Slot(node="", instance=seen.id, launched_s=seen.launched_s, ended_s=end_s, zone=seen.zone, taken=seen.taken)
    slot = billed(slot) if paid is None else slot.model_copy(update={"usd_per_h": paid.usd_per_h})
    usd, text = slot.usd_by_month(usd_per_h, end_s), f"for {seen.id} {slot.seconds:.0f} s of {seen.instance_type}"
    if paid is None:
        text = f"{text}, which belonged to no run"
    elif paid.missed >= MISSED:
        parts = paid.usd_by_month(usd_per_h, end_s)
        usd = added([usd, {month_s: -part for month_s, part in parts.items()}])
        text = f"{text}, which the cloud did not list, in place of {paid.seconds:.0f} s"
    else:
        return []
    line = LedgerLine(
        id=0,
        key=f"cloud:{ORPHAN}{seen.id}:usd",
        time_s=end_s,
        account=tags.get("account", ""),
        user=tags.get("user", ""),
        job=tags.get("job", ""),
        kind="usd",
        amount=0.0,
        text=text,
    )
    return split(line, usd)
