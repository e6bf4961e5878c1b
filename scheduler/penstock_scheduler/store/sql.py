"""The store in a database: SQLite in the daemon's state_dir, or a server such as PostgreSQL.

One process writes, and holds a lock for that: a file beside SQLite's, or an advisory lock of the server. What a method has
written is on disk when it returns; when it raises StoreError, nothing of it is there, and it can be called again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from pydantic import BaseModel, TypeAdapter
from sqlalchemy import Connection, Engine
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import Report
from penstock_scheduler.errors import StoreError
from penstock_scheduler.messages import (
    AuditLine,
    JobView,
    LedgerLine,
    RoundSummary,
    TokenView,
)
from penstock_scheduler.model import Action, CloudAction, Outcome, Progress
from penstock_scheduler.records import RoundRecord, UnreadableRound, dump_round, load_round
from penstock_scheduler.store import schema
from penstock_scheduler.store import tables as t

log = logging.getLogger(__name__)

DAY_S = 86_400.0

LOCK_NUMBER = 7_361_672_001
"""Of the server's advisory lock: any number, as long as all versions have the same."""

LOCK_WAIT_S = 3
"""A server may notice late that who had the lock has gone."""

LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's SQLSTATE of a lock that was not to be had in that time."""

CHUNK = 1000
"""Rows that are read at a time."""


class OutcomeLine(BaseModel):
    """What became of an action, and when."""

    time_s: float
    action: Action | CloudAction
    progress: Progress
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CloudRunRow:
    """A run of a job in the cloud, as the store keeps it: a row of `instances`, whatever number of instances it has."""

    run: str
    """Job and attempt, such as `4711.2`."""
    job: str
    state: str
    launched_s: float
    """When it was ordered."""
    ended_s: float | None
    """None: it is not over."""
    record: str
    """What the cloud's package keeps of it, JSON."""


_ESTIMATOR: TypeAdapter[AnyEstimator] = TypeAdapter(AnyEstimator)


def summarise(record: RoundRecord) -> RoundSummary:
    """A round in numbers."""
    plan = record.plan
    return RoundSummary(
        round=record.snapshot.round,
        time_s=record.snapshot.time_s,
        policy=record.policy,
        jobs=len(record.snapshot.jobs),
        placed=len(plan.assignments),
        waiting=len(plan.waiting),
        seconds=record.seconds,
        gap=plan.solve.gap if plan.solve else None,
        prices=plan.prices,
    )


class SqlStore:
    """The store; `open_store` makes it. All methods may be called from any thread, and raise StoreError.

    Args:
        name: what to call it in messages.
        keep_rounds: newest rounds that are kept.
        keep_s: how long after a job's end its history is kept, seconds; audit log and ledger stay for ever.
        lock: what holds the right to write; None: a reader.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        keep_rounds: int,
        keep_s: float,
        lock: TextIO | Connection | None,
    ) -> None:
        self._engine = engine
        self.name = name
        self._keep_rounds = keep_rounds
        self._keep_s = keep_s
        self._lock = lock
        self._writing = threading.Lock()
        self._insert: Callable[[sa.Table], Any] = (
            postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
        )

    def close(self) -> None:
        """Let go of the database and of the right to write."""
        if self._lock is not None:
            self._lock.close()
        self._engine.dispose()

    # --- rounds, outcomes, reports: `ports.Store`

    def last_round(self) -> RoundRecord | None:
        """The newest round that can be read; one that cannot is logged and passed over."""
        for number in reversed(self.round_numbers()):
            try:
                return self.round(number)
            except UnreadableRound as error:
                log.warning("round passed over", extra={"text": str(error)})
        return None

    def round_numbers(self) -> list[int]:
        """Numbers of the rounds that are kept, ascending."""
        with self._read() as db:
            return list(db.scalars(sa.select(t.rounds.c.round).order_by(t.rounds.c.round)))

    def round(self, number: int) -> RoundRecord:
        """One round. Raises StoreError if it is not there, UnreadableRound if it is damaged."""
        return load_round(self.round_json(number), f"round {number} in {self.name}")

    def round_json(self, number: int) -> bytes:
        """One round as JSON. Raises StoreError if it is not there, UnreadableRound if it is damaged."""
        with self._read() as db:
            packed = db.scalar(sa.select(t.rounds.c.record).where(t.rounds.c.round == number))
        if packed is None:
            raise NoSuchRow(f"{self.name} has no round {number}; older rounds are deleted, see [daemon] keep_rounds")
        try:
            return zlib.decompress(packed)
        except zlib.error as error:
            raise UnreadableRound(f"round {number} in {self.name} is damaged: {error}") from None

    def save_round(self, record: RoundRecord) -> None:
        """Keep a round, in place of one of the same number, and drop those that are too old."""
        number = record.snapshot.round
        row = {
            "round": number,
            "time_s": record.snapshot.time_s,
            "policy": record.policy,
            "record": zlib.compress(dump_round(record), 1),
            "summary": summarise(record).model_dump_json(),
        }
        with self._write() as db:
            old = t.rounds.c.round <= number - self._keep_rounds
            db.execute(t.rounds.delete().where(sa.or_(t.rounds.c.round == number, old)))
            db.execute(t.rounds.insert(), row)
            if number % 100 == 0:
                self._drop_old(db, record.snapshot.time_s)

    def add_outcomes(self, time_s: float, outcomes: Sequence[Outcome]) -> None:
        """Append to the history of actions."""
        rows = [
            {
                "time_s": time_s,
                "job": each.action.job,
                "line": OutcomeLine(
                    time_s=time_s, action=each.action, progress=each.progress, text=each.text
                ).model_dump_json(),
            }
            for each in outcomes
        ]
        if rows:
            with self._write() as db:
                db.execute(t.outcomes.insert(), rows)

    def add_reports(self, reports: Sequence[Report]) -> list[bool]:
        """Append to the history of reports. Of each, whether it was new: one that is there already changes nothing."""
        if not reports:
            return []
        now_s = time.time()
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
        with self._write() as db:
            added = {tuple(row) for row in db.execute(once.returning(*columns), rows)}
        news = []
        for row in rows:
            key = row["job"], row["epoch"], row["sequence"]
            news.append(key in added)
            added.discard(key)
        return news

    def outcomes(self, job: str | None = None) -> Iterator[OutcomeLine]:
        """The history of actions, oldest first; of one job or of all."""
        where = sa.true() if job is None else t.outcomes.c.job == job
        for row in self._rows(t.outcomes.c.id, t.outcomes.c.line, where):
            yield OutcomeLine.model_validate_json(row)

    def reports(self, job: str | None = None) -> Iterator[Report]:
        """The history of reports, in the order in which they came; of one job or of all."""
        where = sa.true() if job is None else t.reports.c.job == job
        for row in self._rows(t.reports.c.id, t.reports.c.report, where):
            yield Report.model_validate_json(row)

    def observations(self, job: str, newest: int) -> list[Report]:
        """The newest reports of a job that hold measurements, oldest first."""
        return self.newest_reports(job, ("observation",), newest)

    def newest_reports(self, job: str, kinds: Sequence[str], newest: int | None = None) -> list[Report]:
        """The newest reports of a job of these kinds, oldest first; None: all of them."""
        chosen = (
            sa.select(t.reports.c.report)
            .where(t.reports.c.job == job, t.reports.c.kind.in_(kinds))
            .order_by(t.reports.c.id.desc())
            .limit(newest)
        )
        with self._read() as db:
            return [Report.model_validate_json(row) for row in reversed(list(db.scalars(chosen)))]

    def newest_epoch(self, job: str) -> int | None:
        """The highest epoch that has reported."""
        with self._read() as db:
            found: int | None = db.scalar(sa.select(sa.func.max(t.reports.c.epoch)).where(t.reports.c.job == job))
            return found

    def summaries(self, before: int | None, limit: int) -> list[RoundSummary]:
        """Rounds in numbers, newest first."""
        chosen = sa.select(t.rounds.c.summary).order_by(t.rounds.c.round.desc()).limit(limit)
        if before is not None:
            chosen = chosen.where(t.rounds.c.round < before)
        with self._read() as db:
            return [RoundSummary.model_validate_json(row) for row in db.scalars(chosen)]

    # --- jobs and submissions

    def save_jobs(self, views: Sequence[JobView], charges: Sequence[LedgerLine] = ()) -> None:
        """Keep these jobs as they are now, and charge what is not charged yet, all or nothing."""
        rows = [
            {
                "job": view.id,
                "user_name": view.user,
                "name": view.name,
                "state": view.state,
                "key": view.key,
                "end_s": view.end_s,
                "view": view.model_dump_json(),
            }
            for view in views
        ]
        upsert = self._insert(t.jobs)
        names = ("user_name", "name", "state", "key", "end_s", "view")
        upsert = upsert.on_conflict_do_update(
            index_elements=["job"], set_={name: getattr(upsert.excluded, name) for name in names}
        )
        with self._write() as db:
            if rows:
                db.execute(upsert, rows)
            self._charge(db, charges)

    def job(self, job: str) -> JobView | None:
        """A job; None if there is none such."""
        with self._read() as db:
            row = db.scalar(sa.select(t.jobs.c.view).where(t.jobs.c.job == job))
        return None if row is None else JobView.model_validate_json(row)

    def jobs(
        self,
        *,
        user: str | None = None,
        states: Sequence[str] = (),
        name: str | None = None,
        key: str | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> list[tuple[int, JobView]]:
        """(number, job), newest first, with numbers below `after`."""
        c = t.jobs.c
        chosen = sa.select(c.number, c.view).order_by(c.number.desc()).limit(limit)
        for column, wanted in ((c.user_name, user), (c.name, name), (c.key, key)):
            if wanted is not None:
                chosen = chosen.where(column == wanted)
        if states:
            chosen = chosen.where(c.state.in_(states))
        if after is not None:
            chosen = chosen.where(c.number < after)
        with self._read() as db:
            return [(number, JobView.model_validate_json(view)) for number, view in db.execute(chosen)]

    def begin_submission(self, user: str, key: str, digest: str) -> tuple[str, str | None]:
        """Note that a job of this key is about to be submitted. (digest, job) of what was noted first."""
        row = {"user_name": user, "key": key, "digest": digest, "created_s": time.time(), "job": None}
        c = t.submissions.c
        with self._write() as db:
            db.execute(self._insert(t.submissions).on_conflict_do_nothing(), row)
            found = db.execute(sa.select(c.digest, c.job).where(c.user_name == user, c.key == key)).one()
        return found.digest, found.job

    def end_submission(self, user: str, key: str, job: str | None) -> None:
        """Note which job it became; None: none, so that the key is free again."""
        mine = sa.and_(t.submissions.c.user_name == user, t.submissions.c.key == key)
        with self._write() as db:
            if job is None:
                db.execute(t.submissions.delete().where(mine, t.submissions.c.job.is_(None)))
            else:
                db.execute(t.submissions.update().where(mine).values(job=job))

    def open_submissions(self) -> list[tuple[str, str]]:
        """(user, key) of submissions of which nobody knows yet what became of them."""
        c = t.submissions.c
        with self._read() as db:
            return [tuple(row) for row in db.execute(sa.select(c.user_name, c.key).where(c.job.is_(None)))]

    # --- models and profiles

    def add_model(self, job: str, time_s: float, estimator: AnyEstimator) -> None:
        """Append to the history of a job's model."""
        row = {"job": job, "time_s": time_s, "estimator": _ESTIMATOR.dump_json(estimator).decode()}
        with self._write() as db:
            db.execute(t.models.insert(), row)

    def model(self, job: str) -> AnyEstimator | None:
        """The newest model of a job."""
        chosen = sa.select(t.models.c.estimator).where(t.models.c.job == job).order_by(t.models.c.id.desc()).limit(1)
        with self._read() as db:
            row = db.scalar(chosen)
        return None if row is None else _ESTIMATOR.validate_json(row)

    def save_profile(self, user: str, profile: Profile) -> None:
        """Keep a profile of a user's job, in place of an older one of the same name and GPU type."""
        row = {
            "user_name": user,
            "job_name": profile.job,
            "gpu_type": profile.gpu_type,
            "profile": profile.model_dump_json(exclude_none=True),
        }
        upsert = self._insert(t.profiles)
        upsert = upsert.on_conflict_do_update(
            index_elements=["user_name", "job_name", "gpu_type"], set_={"profile": upsert.excluded.profile}
        )
        with self._write() as db:
            db.execute(upsert, row)

    def profiles(self, user: str, job_name: str | None = None) -> list[Profile]:
        """A user's profiles, of one job's name or all."""
        chosen = sa.select(t.profiles.c.profile).where(t.profiles.c.user_name == user)
        if job_name is not None:
            chosen = chosen.where(t.profiles.c.job_name == job_name)
        with self._read() as db:
            return [Profile.model_validate_json(row) for row in db.scalars(chosen.order_by(t.profiles.c.gpu_type))]

    # --- ledger, audit, tokens, controls

    def charge(self, lines: Sequence[LedgerLine]) -> None:
        """Append to the ledger; a line whose key is there changes nothing. The lines' ids do not count."""
        with self._write() as db:
            self._charge(db, lines)

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
        with self._read() as db:
            return [LedgerLine.model_validate(_named(row)) for row in db.execute(chosen)]

    def ledger_totals(self, kind: str, *, since_s: float = 0.0) -> dict[str, float]:
        """Account -> sum of its entries of a kind since a time, s since 1970."""
        c = t.ledger.c
        chosen = (
            sa.select(c.account, sa.func.sum(c.amount)).where(c.kind == kind, c.time_s >= since_s).group_by(c.account)
        )
        with self._read() as db:
            return {account: float(amount) for account, amount in db.execute(chosen)}

    def committed_usd(self) -> dict[str, float]:
        """Account -> dollars that are committed to runs in the cloud which are not over, and so not paid for yet."""
        ledger, runs = t.ledger.c, t.instances.c
        chosen = (
            sa.select(ledger.account, sa.func.sum(ledger.amount))
            .join(t.instances, ledger.key == sa.literal("cloud:") + runs.instance + ":committed")
            .where(ledger.kind == "committed", runs.ended_s.is_(None))
            .group_by(ledger.account)
        )
        with self._read() as db:
            return {account: float(amount) for account, amount in db.execute(chosen)}

    def cloud_ledger(self) -> list[LedgerLine]:
        """What runs in the cloud may cost and have cost, oldest first."""
        chosen = sa.select(t.ledger).where(t.ledger.c.kind.in_(("committed", "usd"))).order_by(t.ledger.c.id)
        with self._read() as db:
            return [LedgerLine.model_validate(_named(row)) for row in db.execute(chosen)]

    def save_cloud_run(self, row: CloudRunRow, lines: Sequence[LedgerLine] = ()) -> None:
        """Keep a run in the cloud, in place of its older record, and what it costs: both or neither."""
        values = dataclasses.asdict(row)
        values["instance"] = values.pop("run")
        upsert = self._insert(t.instances)
        names = ("state", "launched_s", "ended_s", "record")
        upsert = upsert.on_conflict_do_update(
            index_elements=["instance"], set_={name: getattr(upsert.excluded, name) for name in names}
        )
        with self._write() as db:
            db.execute(upsert, values)
            self._charge(db, lines)

    def cloud_runs(self, *, job: str | None = None) -> list[CloudRunRow]:
        """Runs in the cloud that are not over, oldest first; of a job: all."""
        c = t.instances.c
        which = c.ended_s.is_(None) if job is None else c.job == job
        chosen = sa.select(c.instance, c.job, c.state, c.launched_s, c.ended_s, c.record).where(which)
        with self._read() as db:
            return [CloudRunRow(*row) for row in db.execute(chosen.order_by(c.launched_s, c.instance))]

    def note(self, user: str, role: str, action: str, target: str, *, allowed: bool, text: str = "") -> None:
        """Append to the audit log."""
        row = {
            "time_s": time.time(),
            "user_name": user[:255],
            "role": role,
            "action": action[:255],
            "target": target[:255],
            "allowed": allowed,
            "text": text[:1000],
        }
        with self._write() as db:
            db.execute(t.audit.insert(), row)

    def audit(self, *, before: int | None = None, limit: int = 100) -> list[AuditLine]:
        """The audit log, newest first."""
        chosen = sa.select(t.audit).order_by(t.audit.c.id.desc()).limit(limit)
        if before is not None:
            chosen = chosen.where(t.audit.c.id < before)
        with self._read() as db:
            return [AuditLine.model_validate(_named(row)) for row in db.execute(chosen)]

    def add_token(self, view: TokenView, digest: str) -> None:
        """Keep a token."""
        row = view.model_dump(exclude={"id", "user"}) | {"token": view.id, "user_name": view.user, "digest": digest}
        with self._write() as db:
            db.execute(t.tokens.insert(), row)

    def tokens(self, token: str | None = None) -> list[tuple[TokenView, str]]:
        """(token, digest of its secret), newest first; of one id or all."""
        chosen = sa.select(t.tokens).order_by(t.tokens.c.created_s.desc())
        if token is not None:
            chosen = chosen.where(t.tokens.c.token == token)
        with self._read() as db:
            rows = [_named(row) for row in db.execute(chosen)]
        return [
            (TokenView.model_validate(row | {"id": token}), digest)
            for row in rows
            for token, digest in [(row.pop("token"), row.pop("digest"))]
        ]

    def revoke_token(self, token: str) -> None:
        """Make a token worthless."""
        with self._write() as db:
            db.execute(t.tokens.update().where(t.tokens.c.token == token).values(revoked=True))

    def control(self, name: str) -> Any:
        """What admins have set; None: nothing."""
        with self._read() as db:
            value = db.scalar(sa.select(t.controls.c.value).where(t.controls.c.name == name))
        return None if value is None else json.loads(value)

    def set_control(self, name: str, value: Any) -> None:
        """Keep what an admin sets."""
        upsert = self._insert(t.controls)
        upsert = upsert.on_conflict_do_update(index_elements=["name"], set_={"value": upsert.excluded.value})
        with self._write() as db:
            db.execute(upsert, {"name": name, "value": json.dumps(value)})

    # --- the whole

    def ping(self) -> None:
        """Raises StoreError if the store cannot be read, or takes no write."""
        with self._write() as db:
            db.execute(sa.select(sa.literal(1)))

    def export(self) -> Iterator[dict[str, Any]]:
        """Every row of every table, as JSON objects with the key `table`; secrets' digests are left out."""
        for table in t.metadata.sorted_tables:
            with self._read() as db:
                for row in db.execution_options(yield_per=CHUNK).execute(sa.select(table)):
                    values = dict(row._mapping)
                    values.pop("digest", None)
                    if "record" in values and isinstance(values["record"], bytes):
                        values["record"] = json.loads(zlib.decompress(values["record"]))
                    yield {"table": table.name} | values

    # --- how

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as db:
                yield db
        except SQLAlchemyError as error:
            raise self._away(error) from error

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """One transaction. Writers of this process queue here, rather than at SQLite, which polls."""
        assert self._lock is not None, "a reader does not write"
        try:
            with (
                self._writing,
                self._engine.connect().execution_options(penstock_write=True) as db,
                db.begin(),
            ):
                yield db
        except SQLAlchemyError as error:
            raise self._away(error) from error

    def _away(self, error: SQLAlchemyError) -> StoreError:
        why = str(getattr(error, "orig", None) or error).strip()
        if "full" in why:
            return StoreError(f"{self.name}: {why}; free some space, running jobs are not affected")
        return StoreError(f"{self.name}: {why}; see that the database is there and may be written")

    def _rows(self, id_: Any, column: Any, where: Any) -> Iterator[str]:
        """A column in the order of `id_`, some rows at a time, so that no reader holds up the writer's clean-up."""
        last = -1
        while True:
            chosen = sa.select(id_, column).where(where, id_ > last).order_by(id_).limit(CHUNK)
            with self._read() as db:
                rows = db.execute(chosen).all()
            for _, value in rows:
                yield value
            if len(rows) < CHUNK:
                return
            last = rows[-1][0]

    def _charge(self, db: Connection, lines: Sequence[LedgerLine]) -> None:
        rows = [line.model_dump(exclude={"id", "user"}) | {"user_name": line.user} for line in lines]
        if rows:
            db.execute(self._insert(t.ledger).on_conflict_do_nothing(), rows)

    def _drop_old(self, db: Connection, now_s: float) -> None:
        gone = sa.select(t.jobs.c.job).where(t.jobs.c.end_s < now_s - self._keep_s)
        for table in (t.reports, t.outcomes, t.models):
            db.execute(table.delete().where(table.c.job.in_(gone)))
        db.execute(t.jobs.delete().where(t.jobs.c.end_s < now_s - self._keep_s))


class NoSuchRow(StoreError):
    """What was asked for is not in the store."""


def _named(row: Any) -> dict[str, Any]:
    """A row with our names."""
    values = dict(row._mapping)
    values["user"] = values.pop("user_name")
    return values


def open_store(
    where: str | Path, *, writer: bool = False, keep_rounds: int = 50_000, keep_days: float = 365.0
) -> SqlStore:
    """The store in a folder (the daemon's state_dir) or at a database's URL.

    Args:
        writer: whether this process writes: only one may. An empty store is made then.
        keep_rounds: newest rounds that are kept.
        keep_days: days that a job's history is kept after its end.

    Raises:
        StoreError: it is not there, is in use by another writer, or is of another schema.
        ConfigError: the URL is none.
    """
    engine, name, lock = open_engine(where, lock=writer)
    store = SqlStore(engine, name, keep_rounds=keep_rounds, keep_s=keep_days * DAY_S, lock=lock)
    try:
        with store._read() as db:
            found = schema.revision(db)
        if found is None and writer:
            schema.upgrade(engine)
        with store._read() as db:
            schema.expect_newest(db, name)
    except StoreError:
        store.close()
        raise
    return store


def open_engine(where: str | Path, *, lock: bool) -> tuple[Engine, str, TextIO | Connection | None]:
    """(engine, name for messages, the right to write or None). Raises as `open_store`."""
    if "://" in str(where):
        engine = schema.server_engine(str(where))
        name = engine.url.render_as_string(hide_password=True)
        return engine, name, _lock_server(engine, name) if lock else None
    folder = Path(where)
    path = folder / schema.FILE
    if not lock:
        if not path.is_file():
            raise StoreError(f"{folder} holds no store; give the daemon's state_dir")
        return schema.sqlite_engine(path, write=False), str(path), None
    held = _lock_folder(folder)
    engine = schema.sqlite_engine(path, write=True)
    return engine, str(path), held


def _lock_folder(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / "lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Reports and the audit log are not for everybody's eyes: users ask the API.
        os.close(os.open(folder / schema.FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except BlockingIOError:
        raise StoreError(
            f"{folder} is in use by another penstockd; stop it, or give this one its own state_dir"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{folder}: {error.strerror}; set [daemon] state_dir to a folder that penstockd may write"
        ) from None
    return held


def _lock_server(engine: Engine, name: str) -> Connection:
    try:
        held = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        held.execute(sa.text(f"SET lock_timeout = '{LOCK_WAIT_S}s'"))
        held.execute(sa.select(sa.func.pg_advisory_lock(LOCK_NUMBER)))
    except SQLAlchemyError as error:
        if isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) == LOCK_NOT_AVAILABLE:
            held.close()
            raise StoreError(
                f"{name} is in use by another penstockd; stop it, or give this one its own database"
            ) from None
        raise StoreError(f"{name}: {str(error).splitlines()[0]}; see that the server is up") from None
    return held
