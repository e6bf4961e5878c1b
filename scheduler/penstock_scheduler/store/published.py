"""What penstockd publishes for API processes of their own, and cannot be read from the other tables."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict

from penstock_profiles.wire import read
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database

_NUMBERED = "figures"
"""Under this name: the number of the newest change of any figures."""


class LiveFigures(BaseModel):
    """A live job's progress and GPU-seconds at one time. Its GPU-seconds grow at a constant rate until the next `LiveFigures`."""

    model_config = ConfigDict(frozen=True)

    at_s: float
    progress: float | None = None
    total: float | None = None
    gpu_seconds: dict[str, float] = {}
    per_s: dict[str, float] = {}
    """GPU type -> GPU-seconds per second."""

    def gpu_seconds_at(self, time_s: float) -> dict[str, float]:
        """GPU type -> GPU-seconds at a later time."""
        after_s = max(time_s - self.at_s, 0.0)
        found = {each: amount + self.per_s.get(each, 0.0) * after_s for each, amount in self.gpu_seconds.items()}
        return {each: amount for each, amount in found.items() if amount > 0}


class PublishedStore(Database):
    """The store's tables `published` and `figures`."""

    def publish(
        self, values: Mapping[str, Any], figures: Mapping[str, LiveFigures] | None = None, ended: Collection[str] = ()
    ) -> None:
        """Replace what is published under these names, and the figures of these jobs: all or nothing.

        Args:
            ended: jobs whose figures are deleted.
        """
        rows = [{"name": name, "value": json.dumps(value)} for name, value in values.items()]
        with self.write() as db:
            if ended:
                db.execute(
                    t.figures.delete().where(t.figures.c.job == sa.bindparam("gone")), [{"gone": e} for e in ended]
                )
            if figures:
                # A number is never given twice: the newest row may have been deleted since.
                newest = int(db.scalar(sa.select(t.published.c.value).where(t.published.c.name == _NUMBERED)) or 0)
                lines = [
                    {"job": job, "changed": number, "figures": each.model_dump_json(exclude_defaults=True)}
                    for number, (job, each) in enumerate(figures.items(), newest + 1)
                ]
                db.execute(self._upsert(t.figures, ["job"], ("changed", "figures")), lines)
                rows.append({"name": _NUMBERED, "value": json.dumps(newest + len(lines))})
            if rows:
                db.execute(self._upsert(t.published, ["name"], ("value",)), rows)

    def published(self, name: str) -> Any:
        """What is published under this name; None: nothing."""
        with self.read() as db:
            value = db.scalar(sa.select(t.published.c.value).where(t.published.c.name == name))
        return None if value is None else json.loads(value)

    def figures_changed(self, after: int) -> list[tuple[int, str, LiveFigures]]:
        """(number of the change, job, figures) of figures that have changed after this number."""
        c = t.figures.c
        chosen = sa.select(c.changed, c.job, c.figures).where(c.changed > after).order_by(c.changed)
        with self.read() as db:
            return [(number, job, read(LiveFigures, text)) for number, job, text in db.execute(chosen)]

    def jobs_with_figures(self) -> list[str]:
        """The jobs that have figures."""
        with self.read() as db:
            return list(db.scalars(sa.select(t.figures.c.job)))
