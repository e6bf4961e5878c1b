"""What jobs cost: the ledger, and the runs in the cloud that are charged to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from penstock_scheduler.api.ledger_messages import LedgerLine, UsageBy
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.cloud_runs import CloudRunRow
from penstock_scheduler.store.database import Database, named


@dataclasses.dataclass(frozen=True, slots=True)
class UsedRow:
    """A sum over entries of the ledger."""

    kind: str
    """`gpu-seconds`, `cloud-gpu-seconds` or `usd`."""
    name: str
    gpu_type: str
    """Empty: a charge of the cloud for a run that held no GPUs."""
    jobs: int
    amount: float


class LedgerStore(Database):
    """The store's ledger and runs in the cloud."""

    def charge(self, lines: Sequence[LedgerLine]) -> None:
        """Append to the ledger. A line whose key is there already changes nothing; the ids of the lines are ignored."""
        with self.write() as db:
            self._insert_charges(db, lines)

    def ledger(
        self, *, user: str | None = None, job: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[LedgerLine]:
        """The ledger, newest first."""
        chosen = sa.select(t.ledger).order_by(t.ledger.c.id.desc()).limit(limit)
        if user is not None:
            chosen = chosen.where(t.ledger.c.user_name == user)
        if job is not None:
            chosen = chosen.where(t.ledger.c.job == job)
        if before is not None:
            chosen = chosen.where(t.ledger.c.id < before)
        with self.read() as db:
            return [LedgerLine.model_validate(named(row)) for row in db.execute(chosen)]

    def used(self, by: UsageBy, from_s: float, to_s: float, user: str | None = None) -> list[UsedRow]:
        """What jobs that have ended used in `from_s <= time < to_s`, added up.

        A charge for GPU-seconds is split by the job's allocation spans. Without spans, and in the cloud, it counts at its time.
        Partitions and spans are known while a job's history is kept.

        Args:
            user: the user whose jobs count; None: all users.
        """
        c, gpus = t.ledger.c, t.ledger.alias()
        gpu_type = sa.case((c.kind == "usd", sa.func.coalesce(gpus.c.text, "")), else_=c.text)
        name = {"user": c.user_name, "account": c.account, "gpu-type": gpu_type, "partition": self._partition()}[by]
        of_one_run = gpus.c.key == sa.func.replace(c.key, ":usd", ":cloud-gpu-seconds")
        held = _held(from_s, to_s).subquery()
        here = sa.and_(c.kind == "gpu-seconds", held.c.job == c.job, held.c.gpu_type == c.text, held.c.whole > 0)
        inside = sa.and_(c.time_s >= from_s, c.time_s < to_s)
        share = sa.case((held.c.whole > 0, held.c.inside / held.c.whole), (inside, 1.0), else_=0.0)
        chosen = (
            sa.select(c.kind, name, gpu_type, sa.func.count(c.job.distinct()), sa.func.sum(c.amount * share))
            .select_from(
                t.ledger.outerjoin(gpus, sa.and_(c.kind == "usd", of_one_run)).outerjoin(held, here),
            )
            .where(c.kind != "committed", c.time_s >= from_s, share > 0)
            .group_by(c.kind, name, gpu_type)
        )
        if by == "partition":
            chosen = chosen.outerjoin_from(t.ledger, t.jobs, t.jobs.c.job == c.job)
        if user is not None:
            chosen = chosen.where(c.user_name == user)
        with self.read() as db:
            return [UsedRow(*row) for row in db.execute(chosen)]

    def _partition(self) -> sa.ColumnElement[str]:
        """The partition of a job's view; empty: not known."""
        view = t.jobs.c.view
        postgres = self.engine.dialect.name == "postgresql"
        document = sa.cast(view, sa.JSON) if postgres else sa.type_coerce(view, sa.JSON)
        return sa.func.coalesce(document["partition"].as_string(), "")

    def ledger_totals(self, kind: str, *, since_s: float = 0.0) -> dict[str, float]:
        """Account -> sum of its entries of a kind since a time, s since 1970."""
        c = t.ledger.c
        chosen = (
            sa.select(c.account, sa.func.sum(c.amount)).where(c.kind == kind, c.time_s >= since_s).group_by(c.account)
        )
        with self.read() as db:
            return {account: float(amount) for account, amount in db.execute(chosen)}

    def committed_usd(self) -> dict[str, float]:
        """Account -> dollars committed to runs in the cloud that go on, and are not paid for yet."""
        sums: dict[str, float] = {}
        for account, usd, _ in self.open_commitments():
            sums[account] = sums.get(account, 0.0) + usd
        return sums

    def open_commitments(self) -> list[tuple[str, float, str]]:
        """(account, committed dollars, record) of each run in the cloud that goes on, and is not paid for yet."""
        ledger, runs = t.ledger.c, t.instances.c
        chosen = (
            sa.select(ledger.account, ledger.amount, runs.record)
            .join(t.instances, ledger.key == sa.literal("cloud:") + runs.instance + ":committed")
            .where(ledger.kind == "committed", runs.ended_s.is_(None))
        )
        with self.read() as db:
            return [(account, float(amount), record) for account, amount, record in db.execute(chosen)]

    def cloud_ledger(self) -> list[LedgerLine]:
        """Ledger lines of what runs in the cloud may cost and have cost, oldest first."""
        chosen = sa.select(t.ledger).where(t.ledger.c.kind.in_(("committed", "usd"))).order_by(t.ledger.c.id)
        with self.read() as db:
            return [LedgerLine.model_validate(named(row)) for row in db.execute(chosen)]

    def save_cloud_run(self, row: CloudRunRow, lines: Sequence[LedgerLine] = ()) -> None:
        """Save a run in the cloud and what it costs, both or neither. It replaces the run's older record."""
        values = dataclasses.asdict(row)
        values["instance"] = values.pop("run")
        upsert = self._upsert(t.instances, ["instance"], ("state", "launched_s", "ended_s", "record"))
        with self.write() as db:
            db.execute(upsert, values)
            self._insert_charges(db, lines)

    def cloud_runs(self, *, job: str | None = None) -> list[CloudRunRow]:
        """Runs in the cloud that go on, or all runs of one job; oldest first."""
        c = t.instances.c
        which = c.ended_s.is_(None) if job is None else c.job == job
        chosen = sa.select(c.instance, c.job, c.state, c.launched_s, c.ended_s, c.record).where(which)
        with self.read() as db:
            return [CloudRunRow(*row) for row in db.execute(chosen.order_by(c.launched_s, c.instance))]

    def _insert_charges(self, db: Connection, lines: Sequence[LedgerLine]) -> None:
        rows = [line.model_dump(exclude={"id", "user"}) | {"user_name": line.user} for line in lines]
        if rows:
            db.execute(self._insert(t.ledger).on_conflict_do_nothing(), rows)


def _held(from_s: float, to_s: float) -> Any:
    """Job, GPU type -> GPU-seconds by its spans at the site: between these times (`inside`), and all (`whole`).

    Only of jobs that were charged after `from_s`.
    """
    c = t.allocations.c
    end_s = sa.func.coalesce(c.to_s, c.from_s)
    begins_s = sa.case((c.from_s > from_s, c.from_s), else_=from_s)
    ends_s = sa.case((end_s < to_s, end_s), else_=to_s)
    inside_s = sa.case((ends_s > begins_s, ends_s - begins_s), else_=0.0)
    charged = sa.select(t.ledger.c.job).where(t.ledger.c.kind == "gpu-seconds", t.ledger.c.time_s >= from_s)
    return (
        sa.select(
            c.job,
            c.gpu_type,
            sa.func.sum(inside_s * c.gpus).label("inside"),
            sa.func.sum((end_s - c.from_s) * c.gpus).label("whole"),
        )
        .where(c.place == "site", c.job.in_(charged))
        .group_by(c.job, c.gpu_type)
    )
