"""Samples of jobs and of the cluster, and their down-sampling.

Samples are kept as they were taken for some days (`raw`), then as averages of an hour, and then deleted. `thin` does that for a
few jobs or names at a time, so that no transaction takes long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from penstock_scheduler.api.history_messages import JobSample
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database

HOUR_S = 3600
AT_ONCE = 500
"""Most values in one condition."""
MOST_ROWS = 20_000
"""Most samples of one job or name that `thin` reads at a time: two weeks of one a minute."""

SUMS = ("rounds.decided", "rounds.stops", "rounds.moves", "rounds.refused")
"""Names in the series whose values are added up over an hour. Of those in `LARGEST`, the largest counts. Others are averaged."""
LARGEST = ("rounds.decide_s", "rounds.gap")

Point = tuple[int, float]


class SeriesStore(Database):
    """The store's samples of jobs and of the cluster."""

    def add_samples(self, at: int, jobs: Sequence[tuple[str, JobSample]], figures: dict[str, float]) -> None:
        """Add a sample of each job, and of each figure of the cluster, in one transaction. What is there already stays."""
        samples = [_row(job, at, 0, sample) for job, sample in jobs]
        points = [{"name": name, "at": at, "step_s": 0, "value": value} for name, value in figures.items()]
        with self.write() as db:
            if samples:
                db.execute(self._insert(t.samples).on_conflict_do_nothing(), samples)
            if points:
                db.execute(self._insert(t.series).on_conflict_do_nothing(), points)

    def samples(self, job: str, from_s: float, to_s: float, step_s: int) -> list[JobSample]:
        """Samples of a job in `from_s <= time < to_s`, oldest first: averages of `step_s` seconds each where there are more."""
        c = t.samples.c
        where = (c.job == job, c.at >= math.ceil(from_s), c.at < math.ceil(to_s))
        with self.read() as db:
            rows = db.execute(sa.select(t.samples).where(*where).order_by(c.at)).all()
        return [_merged(group) for group in _groups(rows, step_s)]

    def busy(self, jobs: Collection[str], since_s: float) -> dict[str, float]:
        """Job -> mean utilisation of its GPUs in its samples since then, of those of these jobs that report it."""
        c, found, names = t.samples.c, {}, sorted(jobs)
        with self.read() as db:
            for at in range(0, len(names), AT_ONCE):
                chosen = sa.select(c.job, sa.func.avg(c.busy)).group_by(c.job)
                where = (c.job.in_(names[at : at + AT_ONCE]), c.at >= math.ceil(since_s), c.busy.is_not(None))
                found.update({job: float(busy) / 1000 for job, busy in db.execute(chosen.where(*where))})
        return found

    def series(self, names: Collection[str], from_s: float, to_s: float, step_s: int) -> dict[str, list[Point]]:
        """Name -> points in `from_s <= time < to_s`, oldest first; of these names, or of all if there are none."""
        c = t.series.c
        chosen = sa.select(c.name, c.at, c.value).where(c.at >= math.ceil(from_s), c.at < math.ceil(to_s))
        chosen = chosen.where(c.name.in_(sorted(names or self._names())))
        with self.read() as db:
            rows = db.execute(chosen.order_by(c.name, c.at)).all()
        found: dict[str, list[Any]] = {}
        for row in rows:
            found.setdefault(row.name, []).append(row)
        return {name: [_point(name, group) for group in _groups(points, step_s)] for name, points in found.items()}

    def thin(self, raw_before_s: float, gone_before_s: float, after: str, most: int) -> str:
        """Make hourly averages of samples before `raw_before_s`, and delete those before `gone_before_s`.

        Takes the next jobs or names behind `after`; "" is the beginning. Returns the last one, or "" if there are no more.

        Args:
            most: most jobs or names.
        """
        kind, _, last = after.partition(" ")
        table, key, merge = _KINDS[kind or "job"]
        raw_before, gone_before = math.floor(raw_before_s) // HOUR_S * HOUR_S, math.floor(gone_before_s)
        for _ in range(most):
            with self.read() as db:
                found = db.scalar(sa.select(sa.func.min(key)).where(key > last))
            if found is None:
                return "name " if kind != "name" else ""
            last = found
            self._thin(table, key, merge, last, raw_before, gone_before)
        return f"{kind or 'job'} {last}"

    def _thin(
        self,
        table: sa.Table,
        key: Any,
        merge: Callable[..., dict[str, Any]],
        of: str,
        raw_before: int,
        gone_before: int,
    ) -> None:
        c = table.c
        old = sa.and_(key == of, c.step_s == 0, c.at < raw_before)
        with self.read() as db:
            rows = db.execute(sa.select(table).where(old).order_by(c.at).limit(MOST_ROWS)).all()
            gone = db.scalar(sa.select(sa.func.min(c.at)).where(key == of))
        if len(rows) == MOST_ROWS:  # the last hour may not be whole
            rows = [row for row in rows if row.at < rows[-1].at // HOUR_S * HOUR_S]
        if not rows and (gone is None or gone >= gone_before):
            return
        with self.write() as db:
            if rows:
                self._replace(db, table, sa.and_(old, c.at <= rows[-1].at), merge, of, rows)
            db.execute(table.delete().where(key == of, c.at < gone_before))

    def _replace(
        self,
        db: Connection,
        table: sa.Table,
        old: Any,
        merge: Callable[..., dict[str, Any]],
        of: str,
        rows: Sequence[Any],
    ) -> None:
        db.execute(table.delete().where(old))
        hourly = [merge(of, group[0].at // HOUR_S * HOUR_S, group) for group in _groups(rows, HOUR_S)]
        db.execute(self._insert(table).on_conflict_do_nothing(), hourly)

    def _names(self) -> list[str]:
        """All names in the series, by a search for each rather than by reading all rows."""
        names: list[str] = []
        with self.read() as db:
            while (
                found := db.scalar(sa.select(sa.func.min(t.series.c.name)).where(t.series.c.name > (names or [""])[-1]))
            ) is not None:
                names.append(found)
        return names


def _groups(rows: Iterable[Any], step_s: int) -> list[list[Any]]:
    """Rows in the order of time, by steps of this length."""
    groups: list[list[Any]] = []
    for row in rows:
        if groups and row.at // step_s == groups[-1][0].at // step_s:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _merged(rows: Sequence[Any]) -> JobSample:
    """One sample for several: progress, GPUs and batch of the newest, the largest memory, averages of the rest."""
    newest = rows[-1]
    busy = _mean(row.busy for row in rows)
    alone = len(rows) == 1
    return JobSample(
        time_s=rows[0].at,
        span_s=newest.step_s if alone else newest.at + newest.step_s - rows[0].at,
        gpus=newest.gpus,
        progress=newest.progress,
        goodput=_mean(row.goodput for row in rows),
        expected=_mean(row.expected for row in rows),
        batch=newest.batch,
        utilisation=None if busy is None else busy / 1000,
        memory_mb=max((row.memory_mb for row in rows if row.memory_mb is not None), default=None),
    )


def _row(job: str, at: int, step_s: int, sample: JobSample) -> dict[str, Any]:
    busy = None if sample.utilisation is None else round(1000 * sample.utilisation)
    own = sample.model_dump(exclude={"time_s", "span_s", "utilisation"})
    return own | {"job": job, "at": at, "step_s": step_s, "busy": busy}


def _hourly_sample(job: str, at: int, rows: Sequence[Any]) -> dict[str, Any]:
    return _row(job, at, HOUR_S, _merged(rows))


def _point(name: str, rows: Sequence[Any]) -> Point:
    values = [row.value for row in rows]
    total = sum(values)
    value = total if name in SUMS else max(values) if name in LARGEST else total / len(values)
    return rows[0].at, value


def _hourly_point(name: str, at: int, rows: Sequence[Any]) -> dict[str, Any]:
    return {"name": name, "at": at, "step_s": HOUR_S, "value": _point(name, rows)[1]}


_KINDS: dict[str, tuple[sa.Table, Any, Callable[..., dict[str, Any]]]] = {
    "job": (t.samples, t.samples.c.job, _hourly_sample),
    "name": (t.series, t.series.c.name, _hourly_point),
}
