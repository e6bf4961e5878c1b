"""Spans of time: which job held which GPUs, and which jobs waited for which reason."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from penstock_scheduler.api.history_messages import AllocationSpan, QueueEntry
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database, named

AT_ONCE = 500
"""Most values in one condition. SQLite takes 32,766."""


class SpanStore(Database):
    """The store's allocation spans. A span is known by its job and its beginning."""

    def save_spans(self, spans: Sequence[AllocationSpan], once: Sequence[AllocationSpan] = ()) -> None:
        """Save spans, in one transaction. Those that are there change.

        A span that is there already gets what may change: its run's beginning, its end, and its GPUs' indices.

        Args:
            spans: these replace what is there.
            once: these are added if the job has no span with this beginning.
        """
        if not spans and not once:
            return
        changing = ("run_s", "to_s", "exact", "suspended_s", "gpu_ids", "end_code", "end_text")
        upsert = self._upsert(t.allocations, ["job", "from_s"], changing)
        with self.write() as db:
            if spans:
                db.execute(upsert, [_row(span) for span in spans])
            if once:
                add = self._insert(t.allocations).on_conflict_do_nothing()
                db.execute(add, [_row(span) for span in once])

    def open_spans(self) -> list[AllocationSpan]:
        """Spans that have not ended."""
        return self._spans(sa.select(t.allocations).where(t.allocations.c.to_s.is_(None)))

    def job_spans(self, job: str, after_s: float | None = None, limit: int | None = None) -> list[AllocationSpan]:
        """The spans of a job, oldest first; with `after_s`, those that began later."""
        c = t.allocations.c
        chosen = sa.select(t.allocations).where(c.job == job).order_by(c.from_s).limit(limit)
        return self._spans(chosen if after_s is None else chosen.where(c.from_s > after_s))

    def spans_between(
        self, from_s: float, to_s: float, limit: int, after: tuple[str, float] | None = None
    ) -> list[AllocationSpan]:
        """Spans of all jobs that overlap this time, by job and beginning; with `after`, those behind it in this order."""
        c = t.allocations.c
        overlap = sa.and_(c.from_s < to_s, sa.or_(c.to_s.is_(None), c.to_s > from_s))
        chosen = sa.select(t.allocations).where(overlap).order_by(c.job, c.from_s).limit(limit)
        if after is not None:
            chosen = chosen.where(sa.or_(c.job > after[0], sa.and_(c.job == after[0], c.from_s > after[1])))
        return self._spans(chosen)

    def estimated_spans(self, since_s: float, limit: int) -> list[AllocationSpan]:
        """Spans with an estimated end, of those that ended since then, newest first."""
        c = t.allocations.c
        where = sa.and_(c.to_s >= since_s, c.exact.is_(False))
        return self._spans(sa.select(t.allocations).where(where).order_by(c.to_s.desc()).limit(limit))

    def spans_of(self, jobs: Collection[str]) -> dict[str, list[AllocationSpan]]:
        """Job -> its spans, oldest first; jobs without a span are left out."""
        found: dict[str, list[AllocationSpan]] = {}
        names, c = sorted(jobs), t.allocations.c
        for at in range(0, len(names), AT_ONCE):
            chosen = sa.select(t.allocations).where(c.job.in_(names[at : at + AT_ONCE])).order_by(c.job, c.from_s)
            for span in self._spans(chosen):
                found.setdefault(span.job, []).append(span)
        return found

    def _spans(self, chosen: Any) -> list[AllocationSpan]:
        with self.read() as db:
            return [_span(row) for row in db.execute(chosen)]


def _row(span: AllocationSpan) -> dict[str, Any]:
    row = span.model_dump(exclude={"user", "end", "where"})
    row |= {
        "user_name": span.user,
        "end_code": span.end,
        "place": span.where,
        "gpus": span.gpus,
        "nodes": json.dumps(span.nodes),
    }
    return row | {"gpu_ids": None if span.gpu_ids is None else json.dumps(span.gpu_ids)}


def _span(row: Any) -> AllocationSpan:
    values = named(row)
    del values["gpus"]
    values |= {"end": values.pop("end_code"), "where": values.pop("place"), "nodes": json.loads(values["nodes"])}
    values["gpu_ids"] = None if values["gpu_ids"] is None else json.loads(values["gpu_ids"])
    return AllocationSpan.model_validate(values)


class WaitStore(Database):
    """The store's spans of waiting. A span is known by its job and its beginning, and lasts for as long as its reason."""

    def save_waits(self, entries: Sequence[QueueEntry], over: Mapping[tuple[str, float], float]) -> None:
        """Save spans that have begun or whose reason has another text, and end others, in one transaction.

        Args:
            entries: the former.
            over: (job, beginning) -> end.
        """
        if not entries and not over:
            return
        upsert = self._upsert(t.waits, ["job", "since_s"], ["text", "needs", "estimated_start_s"])
        c = t.waits.c
        ending = (
            t.waits.update()
            .where(c.job == sa.bindparam("of_job"), c.since_s == sa.bindparam("of_since_s"))
            .values(to_s=sa.bindparam("of_to_s"))
        )
        with self.write() as db:
            if over:
                ends = [
                    {"of_job": job, "of_since_s": since_s, "of_to_s": to_s} for (job, since_s), to_s in over.items()
                ]
                db.execute(ending, ends)
            if entries:
                db.execute(upsert, [_waiting_row(entry) for entry in entries])

    def waits(self) -> list[QueueEntry]:
        """Jobs that wait now, in the order of their submission. Their positions are not filled in."""
        c = t.waits.c
        chosen = sa.select(t.waits).where(c.to_s.is_(None)).order_by(c.submit_s, c.job)
        with self.read() as db:
            return [_entry(row) for row in db.execute(chosen)]


def _waiting_row(entry: QueueEntry) -> dict[str, Any]:
    return entry.model_dump(exclude={"user", "position", "estimate"}) | {"user_name": entry.user, "to_s": None}


def _entry(row: Any) -> QueueEntry:
    values = named(row)
    del values["to_s"]
    return QueueEntry.model_construct(position=None, estimate=None, **values)
