"""Rounds, outcomes and reports: what the round loop leaves behind."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import sqlalchemy as sa
from pydantic import BaseModel
from pydantic_core import from_json
from sqlalchemy import Connection, Engine

from penstock_profiles.wire import Report, read
from penstock_scheduler.api.messages import RoundSummary
from penstock_scheduler.model import Action, CloudAction, Outcome, Progress, Stop
from penstock_scheduler.model.records import RoundRecord, UnreadableRound, dump_round, load_round
from penstock_scheduler.store import packing
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database, NoSuchRow
from penstock_scheduler.store.leadership.site_clock import site_time_s

REFUSED_KEPT = 100_000
"""Newest lines about refused requests that the audit log keeps."""

log = logging.getLogger(__name__)


class OutcomeLine(BaseModel):
    """The outcome of an action, and its time."""

    time_s: float
    action: Action | CloudAction
    progress: Progress
    text: str = ""
    stop: Stop | None = None


def summarise(record: RoundRecord) -> RoundSummary:
    """A round in numbers."""
    plan = record.plan
    return RoundSummary(
        round=record.snapshot.round,
        time_s=record.snapshot.time_s,
        policy=str(record.policy),
        jobs=len(record.snapshot.jobs),
        placed=len(plan.assignments),
        waiting=len(plan.waiting),
        seconds=record.seconds,
        gap=plan.solve.gap if plan.solve else None,
        prices=plan.prices,
    )


class RoundStore(Database):
    """The store's rounds, outcomes and reports; see `ports.Store`.

    Args:
        keep_rounds: newest rounds that are kept, with those from which they differ.
        keep_s: how long a job's history is kept after its end, seconds.
        keep_audit_s: how long the audit log is kept, seconds.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        lock: TextIO | Connection | None,
        *,
        keep_rounds: int,
        keep_s: float,
        keep_audit_s: float,
    ) -> None:
        super().__init__(engine, name, lock)
        self._keep_rounds = keep_rounds
        self._keep_s, self._keep_audit_s = keep_s, keep_audit_s
        self._key_round: packing.KeyRound | None = None
        """From which the next rounds may differ; None: the next round is whole."""
        self._unpacked: packing.Packed | None = None
        """The newest round, as it is stored from the next one on; None: it stays whole."""
        self._saved: tuple[int, float] | None = None
        """Number and time of the round that was saved last."""
        self._read: tuple[bytes, Any] | None = None
        """The whole round that was unpacked last, and its tree."""

    def last_round(self) -> RoundRecord | None:
        """The newest round that can be read. A damaged round is logged and skipped."""
        for number in reversed(self.round_numbers()):
            try:
                return self.round(number)
            except UnreadableRound as error:
                log.warning("round skipped", extra={"text": str(error)})
        return None

    def round_numbers(self) -> list[int]:
        """Numbers of the rounds in the store, ascending."""
        with self.read() as db:
            return list(db.scalars(sa.select(t.rounds.c.round).order_by(t.rounds.c.round)))

    def round(self, number: int) -> RoundRecord:
        """One round. Raises StoreError if it is not there, UnreadableRound if it is damaged."""
        return load_round(self.round_json(number), f"round {number} in {self.name}")

    def round_json(self, number: int) -> bytes:
        """One round as JSON. Raises StoreError if it is not there, UnreadableRound if it is damaged."""
        c, key = t.rounds.c, None
        with self.read() as db:
            row = db.execute(sa.select(c.record, c.key_round).where(c.round == number)).one_or_none()
            if row is not None and row.key_round is not None:
                key = db.scalar(sa.select(c.record).where(c.round == row.key_round, c.key_round.is_(None)))
        if row is None:
            raise NoSuchRow(f"{self.name} has no round {number}; older rounds are deleted")
        try:
            if row.key_round is None:
                return packing.unpack(row.record)
            if key is None:
                raise packing.Damaged(f"round {row.key_round}, from which it differs, is not there")
            return packing.unpack_difference(self._tree(key), row.record)
        except packing.Damaged as error:
            raise UnreadableRound(f"round {number} in {self.name} is damaged: {error}") from None

    def _tree(self, packed: bytes) -> Any:
        """The tree of a whole round. The last one is kept, since many rounds differ from the same one."""
        kept = self._read
        if kept is None or kept[0] != packed:
            kept = self._read = packed, from_json(packing.unpack(packed))
        return kept[1]

    def save_round(self, record: RoundRecord) -> None:
        """Save a round whole, replace one of the same number, pack the one before it, and delete rounds that are too old."""
        number, text = record.snapshot.round, dump_round(record)
        key, before = self._key_round, self._unpacked
        if key is not None and key.number >= number:
            key, before = None, None
        packed = None if key is None else packing.pack_difference(key, number, text)
        whole = packing.pack(text)
        row = {
            "round": number,
            "time_s": record.snapshot.time_s,
            "policy": str(record.policy),
            "record": whole,
            "summary": summarise(record).model_dump_json(),
            "key_round": None,
        }
        with self.write() as db:
            c = t.rounds.c
            newest = db.execute(sa.select(c.round, c.time_s).order_by(c.round.desc()).limit(1)).one_or_none()
            if newest is None or tuple(newest) != self._saved:  # another penstockd has led since
                packed, before = None, None
            db.execute(t.rounds.delete().where(c.round == number))
            if before is not None and before.number < number:
                smaller = {"record": before.record, "key_round": before.key_round}
                db.execute(t.rounds.update().where(c.round == before.number).values(smaller))
            old = number - self._keep_rounds
            needed = sa.select(c.key_round).where(c.round > old, c.key_round.is_not(None))
            kept = [] if packed is None else [packed.key_round]
            db.execute(t.rounds.delete().where(c.round <= old, c.round.not_in(needed), c.round.not_in(kept)))
            db.execute(t.rounds.insert(), row)
            if number % 100 == 0:
                self._drop_old(db, record.snapshot.time_s)
        self._saved = number, record.snapshot.time_s
        if packed is None:
            self._key_round, self._unpacked = packing.KeyRound(number, from_json(text), len(whole)), None
        elif key is not None:
            size = key.difference_bytes + len(packed.record)
            self._key_round, self._unpacked = dataclasses.replace(key, difference_bytes=size), packed

    def export(self) -> Iterator[dict[str, Any]]:
        """See `Database.export`. Every round is whole."""
        for row in super().export():
            if row["table"] == t.rounds.name and row.pop("key_round") is not None:
                row["record"] = json.loads(self.round_json(row["round"]))
            yield row

    def summaries(self, before: int | None, limit: int) -> list[RoundSummary]:
        """Rounds in numbers, newest first."""
        chosen = sa.select(t.rounds.c.summary).order_by(t.rounds.c.round.desc()).limit(limit)
        if before is not None:
            chosen = chosen.where(t.rounds.c.round < before)
        with self.read() as db:
            return [read(RoundSummary, row) for row in db.scalars(chosen)]

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append to the history of actions."""
        rows = [
            {
                "time_s": time_s,
                "job": each.action.job,
                "line": OutcomeLine(
                    time_s=time_s, action=each.action, progress=each.progress, text=each.text, stop=each.stop
                ).model_dump_json(),
            }
            for each in outcomes
        ]
        if rows:
            with self.write() as db:
                db.execute(t.outcomes.insert(), rows)

    def outcomes(self, job: str | None = None) -> Iterator[OutcomeLine]:
        """The history of actions, oldest first; of one job or of all."""
        where = sa.true() if job is None else t.outcomes.c.job == job
        for row in self._rows(t.outcomes.c.id, t.outcomes.c.line, where):
            yield read(OutcomeLine, row)

    def newest_stop(self, job: str, since_s: float) -> Stop | None:
        """Why a run of the job was stopped last, of the stops since then; None: nothing that Penstock did stopped it."""
        c = t.outcomes.c
        chosen = sa.select(c.line).where(c.job == job, c.time_s >= since_s).order_by(c.id.desc())
        with self.read() as db:
            lines = [read(OutcomeLine, line) for line in db.scalars(chosen)]
        return next((line.stop for line in lines if line.stop is not None), None)

    def add_reports(self, reports: Sequence[Report]) -> list[bool]:
        """Append to the history of reports. Returns whether each report was new; a known one changes nothing."""
        if not reports:
            return []
        now_s = site_time_s()
        rows = [
            {
                "job": report.job_id,
                "epoch": report.epoch,
                "sequence": report.sequence,
                "kind": report.body.kind,
                "received_s": now_s,
                "report": report.model_dump_json(),
            }
            for report in reports
        ]
        once = self._insert(t.reports).on_conflict_do_nothing()
        columns = t.reports.c.job, t.reports.c.epoch, t.reports.c.sequence
        with self.write() as db:
            added = {tuple(row) for row in db.execute(once.returning(*columns), rows)}
        news = []
        for row in rows:
            key = row["job"], row["epoch"], row["sequence"]
            news.append(key in added)
            added.discard(key)
        return news

    def reports(self, job: str | None = None) -> Iterator[Report]:
        """The history of reports in the order of their arrival; of one job or of all."""
        where = sa.true() if job is None else t.reports.c.job == job
        for row in self._rows(t.reports.c.id, t.reports.c.report, where):
            yield read(Report, row)

    def observations(self, job: str, newest: int) -> list[Report]:
        """The newest measurements of a job, oldest first."""
        return self.newest_reports(job, ("observation",), newest)

    def observed_since(self, row: int | None) -> tuple[int, frozenset[str]]:
        """The newest stored report, and the jobs with measurements that came after the report `row`; None: no job."""
        c = t.reports.c
        with self.read() as db:
            newest = db.scalar(sa.select(sa.func.max(c.id))) or 0
            if row is None or newest <= row:
                return newest, frozenset()
            # Another process may write, too, and a row may appear after one with a higher number.
            chosen = sa.select(c.job).where(c.id > row - 1000, c.id <= newest, c.kind == "observation").distinct()
            return newest, frozenset(db.scalars(chosen))

    def newest_reports(self, job: str, kinds: Sequence[str], newest: int | None = None) -> list[Report]:
        """The newest reports of a job of these kinds, oldest first; None: all of them."""
        chosen = (
            sa.select(t.reports.c.report)
            .where(t.reports.c.job == job, t.reports.c.kind.in_(kinds))
            .order_by(t.reports.c.id.desc())
            .limit(newest)
        )
        with self.read() as db:
            return [read(Report, row) for row in reversed(list(db.scalars(chosen)))]

    def newest_epoch(self, job: str) -> int | None:
        """The highest epoch that has reported."""
        with self.read() as db:
            found: int | None = db.scalar(sa.select(sa.func.max(t.reports.c.epoch)).where(t.reports.c.job == job))
            return found

    def _drop_old(self, db: Connection, now_s: float) -> None:
        before_s = now_s - self._keep_s
        gone = sa.select(t.jobs.c.job).where(t.jobs.c.end_s < before_s)
        # An owner outlives its job's history by the same time, so that a late try hears that its job is unknown.
        db.execute(t.owners.update().where(t.owners.c.job.in_(gone)).values(noted_s=now_s))
        for table in (t.reports, t.outcomes, t.models, t.allocations, t.waits, t.samples):
            db.execute(table.delete().where(table.c.job.in_(gone)))
        db.execute(t.jobs.delete().where(t.jobs.c.end_s < before_s))
        # Jobs that were only ever refused have spans of waiting, and are in no other table.
        written = (
            (t.owners, t.owners.c.noted_s),
            (t.submissions, t.submissions.c.created_s),
            (t.waits, t.waits.c.to_s),
        )
        for table, written_s in written:
            kept = sa.exists().where(t.jobs.c.job == table.c.job)
            db.execute(table.delete().where(written_s < before_s, ~kept))
        c = t.audit.c
        db.execute(t.audit.delete().where(c.time_s < now_s - self._keep_audit_s))
        # Whoever floods the daemon with refused requests pushes out older refusals, but nothing that was done.
        refused = sa.select(c.id).where(c.allowed.is_(False)).order_by(c.id.desc())
        if (oldest := db.scalar(refused.offset(REFUSED_KEPT - 1).limit(1))) is not None:
            db.execute(t.audit.delete().where(c.allowed.is_(False), c.id < oldest))
