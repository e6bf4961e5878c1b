"""Jobs and their submissions, and what is known of their speed: models and profiles."""

from __future__ import annotations

import json
from collections.abc import Sequence

import sqlalchemy as sa
from pydantic import TypeAdapter

from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import read
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.messages import JobView, OwnerView
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import newest_change
from penstock_scheduler.store.leadership.site_clock import site_time_s
from penstock_scheduler.store.ledger import LedgerStore

MOST_PROFILES = 4 * 1024 * 1024
"""Characters of one user's stored profiles together. One has a few thousand, and a round reads those of its jobs."""

_ESTIMATOR: TypeAdapter[AnyEstimator] = TypeAdapter(AnyEstimator)


class JobStore(LedgerStore):
    """The store's jobs, submissions, models and profiles. A job that has ended is charged to the ledger."""

    def save_jobs(self, views: Sequence[JobView], charges: Sequence[LedgerLine] = ()) -> int:
        """Save the present state of these jobs, and charge what is not charged yet: all or nothing.

        Returns:
            The number of the first job's change. The others' follow: changes of all jobs are numbered in their order.
        """
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
        columns = ("user_name", "name", "state", "key", "end_s", "view", "changed")
        upsert = self._upsert(t.jobs, ["job"], columns)
        with self.write() as db:
            first = newest_change(db, t.jobs) + 1
            if rows:
                db.execute(upsert, [row | {"changed": first + at} for at, row in enumerate(rows)])
            self._insert_charges(db, charges)
        return first

    def set_aside(self, job: str, former: JobView, charges: Sequence[LedgerLine] = ()) -> int:
        """Keep a job whose id another job has now, and all of its history, under the id of `former`: all or nothing.

        Args:
            job: the id that it had.
            former: the job as it ended.
            charges: its charges that are not in the ledger yet.

        Returns:
            The number of the job's change.
        """
        row = {
            "job": former.id,
            "state": former.state,
            "end_s": former.end_s,
            "view": former.model_dump_json(),
        }
        end_s = former.end_s or site_time_s()
        with self.write() as db:
            number = newest_change(db, t.jobs) + 1
            db.execute(t.jobs.update().where(t.jobs.c.job == job).values(row | {"changed": number}))
            db.execute(t.figures.delete().where(t.figures.c.job == job))
            for table in (t.allocations, t.waits):
                open_ = sa.and_(table.c.job == job, table.c.to_s.is_(None))
                db.execute(table.update().where(open_).values(to_s=end_s))
            for table in (t.allocations, t.waits, t.samples, t.models, t.ledger, t.outcomes, t.reports):
                db.execute(table.update().where(table.c.job == job).values(job=former.id))
            for column, key in ((t.outcomes.c.line, "job"), (t.reports.c.report, "job_id")):
                # Quotes inside JSON strings are escaped, so this text is never a part of one.
                texts = [f'"{key}":{json.dumps(name)}' for name in (job, former.id)]
                renamed = sa.func.replace(column, *texts)
                db.execute(column.table.update().where(column.table.c.job == former.id).values({column.name: renamed}))
            if former.key is not None:
                mine = sa.and_(t.submissions.c.user_name == former.user, t.submissions.c.key == former.key)
                db.execute(t.submissions.update().where(mine, t.submissions.c.job == job).values(job=former.id))
                self._set_owner_aside(db, job, former)
            self._insert_charges(db, [line.model_copy(update={"job": former.id}) for line in charges])
        return number

    def _set_owner_aside(self, db: sa.Connection, job: str, former: JobView) -> None:
        """Let an owner whose newest job was set aside keep it."""
        c = t.owners.c
        for name, text in db.execute(sa.select(c.name, c.view).where(c.user_name == former.user)).all():
            owner = read(OwnerView, text)
            if owner.job == job and owner.key == former.key:
                view = owner.model_copy(update={"job": former.id}).model_dump_json(exclude_none=True)
                where = sa.and_(c.user_name == former.user, c.name == name)
                db.execute(t.owners.update().where(where).values(view=view, job=former.id))

    def newest_job_change(self) -> int:
        """The number of the newest change of any job; 0: there was none."""
        with self.read() as db:
            return newest_change(db, t.jobs)

    def count_jobs_changed(self, after: int, user: str | None = None) -> int:
        """How many jobs have changed after this number."""
        c = t.jobs.c
        chosen = sa.select(sa.func.count()).where(c.changed > after)
        if user is not None:
            chosen = chosen.where(c.user_name == user)
        with self.read() as db:
            return int(db.scalar(chosen) or 0)

    def jobs_with_changes(
        self, states: Sequence[str], user: str | None, after: int | None, limit: int
    ) -> list[tuple[int, int, JobView]]:
        """(number, number of its newest change, job), oldest first; with `after`, only numbers above it."""
        c = t.jobs.c
        chosen = sa.select(c.number, c.changed, c.view).where(c.state.in_(states)).order_by(c.number).limit(limit)
        if user is not None:
            chosen = chosen.where(c.user_name == user)
        if after is not None:
            chosen = chosen.where(c.number > after)
        with self.read() as db:
            return [(row.number, row.changed, read(JobView, row.view)) for row in db.execute(chosen)]

    def jobs_changed(self, after: int, user: str | None = None, limit: int = 1000) -> list[tuple[int, JobView]]:
        """(number of its newest change, job) of jobs that have changed after this number, in the order of these changes."""
        c = t.jobs.c
        chosen = sa.select(c.changed, c.view).where(c.changed > after).order_by(c.changed).limit(limit)
        if user is not None:
            chosen = chosen.where(c.user_name == user)
        with self.read() as db:
            return [(number, read(JobView, view)) for number, view in db.execute(chosen)]

    def job(self, job: str) -> JobView | None:
        """A job; None: it is not in the store."""
        with self.read() as db:
            row = db.scalar(sa.select(t.jobs.c.view).where(t.jobs.c.job == job))
        return None if row is None else read(JobView, row)

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
        """(number, job), newest first; with `after`, only numbers below it."""
        c = t.jobs.c
        chosen = sa.select(c.number, c.view).order_by(c.number.desc()).limit(limit)
        for column, wanted in ((c.user_name, user), (c.name, name), (c.key, key)):
            if wanted is not None:
                chosen = chosen.where(column == wanted)
        if states:
            chosen = chosen.where(c.state.in_(states))
        if after is not None:
            chosen = chosen.where(c.number < after)
        with self.read() as db:
            return [(number, read(JobView, view)) for number, view in db.execute(chosen)]

    def ended_with_model(self, limit: int) -> list[JobView]:
        """Ended jobs of which a model was saved, newest first."""
        c = t.jobs.c
        chosen = sa.select(c.view).where(c.state == "ended", c.job.in_(sa.select(t.models.c.job)))
        with self.read() as db:
            return [read(JobView, view) for view in db.scalars(chosen.order_by(c.number.desc()).limit(limit))]

    def ended_unknown(self, since_s: float, limit: int) -> list[JobView]:
        """Jobs that ended since then in a way that is not known, newest first."""
        c = t.jobs.c
        chosen = sa.select(c.view).where(c.state == "ended", c.end_s >= since_s, c.view.contains('"ended":"UNKNOWN"'))
        chosen = chosen.where(~c.job.contains("@"))  # the accounts know only the job that has its id now
        with self.read() as db:
            rows = db.execute(chosen.order_by(c.number.desc()).limit(limit))
            views = [read(JobView, view) for (view,) in rows]
        return [view for view in views if view.ended == "UNKNOWN"]  # a user's text may hold these words

    def begin_submission(self, user: str, key: str, digest: str) -> tuple[str, str | None]:
        """Note that a job with this key is about to be submitted. Returns (digest, job) of the first such note."""
        row = {"user_name": user, "key": key, "digest": digest, "created_s": site_time_s(), "job": None}
        c = t.submissions.c
        with self.write() as db:
            db.execute(self._insert(t.submissions).on_conflict_do_nothing(), row)
            found = db.execute(sa.select(c.digest, c.job).where(c.user_name == user, c.key == key)).one()
        return found.digest, found.job

    def end_submission(self, user: str, key: str, job: str | None) -> None:
        """Note which job the submission became; None: none, and the key is free again."""
        mine = sa.and_(t.submissions.c.user_name == user, t.submissions.c.key == key)
        with self.write() as db:
            if job is None:
                db.execute(t.submissions.delete().where(mine, t.submissions.c.job.is_(None)))
            else:
                db.execute(t.submissions.update().where(mine).values(job=job))

    def submission(self, user: str, key: str) -> str | None:
        """The job that a submission became; None: none, or its outcome is not known yet."""
        c = t.submissions.c
        with self.read() as db:
            return db.scalar(sa.select(c.job).where(c.user_name == user, c.key == key))

    def owner(self, user: str, name: str) -> OwnerView | None:
        """A user's owner of this name, with its newest job; None: it has submitted none."""
        c = t.owners.c
        with self.read() as db:
            view = db.scalar(sa.select(c.view).where(c.user_name == user, c.name == name))
        return None if view is None else read(OwnerView, view)

    def owner_of(self, job: str) -> tuple[str, str] | None:
        """(user, name) of the owner whose newest job this is; None: there is none."""
        c = t.owners.c
        with self.read() as db:
            row = db.execute(sa.select(c.user_name, c.name).where(c.job == job)).first()
        return None if row is None else (row.user_name, row.name)

    def leased_owners(self) -> list[tuple[str, OwnerView]]:
        """(user, owner) of the owners with a lease whose newest job has not ended."""
        c = t.owners.c
        alive = sa.select(t.jobs.c.job).where(t.jobs.c.state != "ended")
        with self.read() as db:
            rows = db.execute(sa.select(c.user_name, c.view).where(c.job.in_(alive))).all()
        found = [(row.user_name, read(OwnerView, row.view)) for row in rows]
        return [(user, owner) for user, owner in found if owner.lease_s is not None]

    def save_owner(self, user: str, owner: OwnerView) -> None:
        """Note an owner's newest job."""
        row = {
            "user_name": user,
            "name": owner.name,
            "view": owner.model_dump_json(exclude_none=True),
            "job": owner.job,
            "noted_s": site_time_s(),
        }
        with self.write() as db:
            db.execute(self._upsert(t.owners, ["user_name", "name"], ("view", "job", "noted_s")), row)

    def add_model(self, job: str, time_s: float, estimator: AnyEstimator) -> None:
        """Append to the history of a job's model."""
        row = {"job": job, "time_s": time_s, "estimator": _ESTIMATOR.dump_json(estimator).decode()}
        with self.write() as db:
            db.execute(t.models.insert(), row)

    def model(self, job: str) -> AnyEstimator | None:
        """The newest model of a job."""
        chosen = sa.select(t.models.c.estimator).where(t.models.c.job == job).order_by(t.models.c.id.desc()).limit(1)
        with self.read() as db:
            row = db.scalar(chosen)
        return None if row is None else _ESTIMATOR.validate_json(row, extra="ignore")

    def save_profile(self, user: str, profile: Profile) -> bool:
        """Save a profile of a user's job. It replaces an older one of the same name and GPU type.

        Returns:
            Whether it is saved. It is not if the user's profiles would be longer than `MOST_PROFILES`.
        """
        row = {
            "user_name": user,
            "job_name": profile.job,
            "gpu_type": profile.gpu_type,
            "profile": profile.model_dump_json(exclude_none=True),
        }
        upsert = self._upsert(t.profiles, ["user_name", "job_name", "gpu_type"], ["profile"])
        c = t.profiles.c
        same = sa.and_(c.job_name == profile.job, c.gpu_type == profile.gpu_type)
        others = sa.select(sa.func.sum(sa.func.length(c.profile))).where(c.user_name == user, sa.not_(same))
        with self.write() as db:
            if int(db.scalar(others) or 0) + len(row["profile"]) > MOST_PROFILES:
                return False
            db.execute(upsert, row)
        return True

    def profiled(self) -> frozenset[tuple[str, str]]:
        """(user, job's name) of all profiles."""
        with self.read() as db:
            rows = db.execute(sa.select(t.profiles.c.user_name, t.profiles.c.job_name).distinct())
            return frozenset((row.user_name, row.job_name) for row in rows)

    def profiles(self, user: str, job_name: str | None = None) -> list[Profile]:
        """A user's profiles, of one job's name or all."""
        chosen = sa.select(t.profiles.c.profile).where(t.profiles.c.user_name == user)
        if job_name is not None:
            chosen = chosen.where(t.profiles.c.job_name == job_name)
        with self.read() as db:
            return [read(Profile, row) for row in db.scalars(chosen.order_by(t.profiles.c.gpu_type))]
