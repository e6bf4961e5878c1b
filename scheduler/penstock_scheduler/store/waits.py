"""The queue: which jobs wait, since when, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from penstock_scheduler.api.history_messages import QueueEntry
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database, named


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
                db.execute(upsert, [_row(entry) for entry in entries])

    def waits(self) -> list[QueueEntry]:
        """Jobs that wait now, in the order of their submission. Their positions are not filled in."""
        c = t.waits.c
        chosen = sa.select(t.waits).where(c.to_s.is_(None)).order_by(c.submit_s, c.job)
        with self.read() as db:
            return [_entry(row) for row in db.execute(chosen)]


def _row(entry: QueueEntry) -> dict[str, Any]:
    return entry.model_dump(exclude={"user", "position", "estimate"}) | {"user_name": entry.user, "to_s": None}


def _entry(row: Any) -> QueueEntry:
    values = named(row)
    del values["to_s"]
    return QueueEntry.model_construct(position=None, estimate=None, **values)
