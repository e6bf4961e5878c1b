"""The audit log, API tokens, browser sessions, and the settings that admins changed while the daemon ran."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from penstock_scheduler.api.access_messages import AuditLine, SessionRow, TokenView
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database, named
from penstock_scheduler.store.leadership.site_clock import site_time_s

OF_A_USER = 100_000
"""Newest lines about what one user did that the audit log keeps: about 100 MB of the longest ones."""
LOOK_EVERY = 1000
"""Lines between two looks at the user of the newest one. Whoever writes most of the lines is looked at most often."""


class AdminStore(Database):
    """The store's audit log, tokens, browser sessions and controls."""

    def note(
        self,
        user: str,
        role: str,
        action: str,
        target: str,
        *,
        allowed: bool,
        text: str = "",
        address: str = "",
        token: str = "",
    ) -> None:
        """Append to the audit log. A user who is no operator pushes out nothing but the oldest of what the same user did."""
        row = {
            "time_s": site_time_s(),
            "user_name": user[:255],
            "role": role,
            "action": action[:255],
            "target": target[:255],
            "allowed": allowed,
            "text": text[:1000],
            "address": address[:255],
            "token": token[:255],
        }
        with self.write() as db:
            c = t.audit.c
            number: int = db.execute(t.audit.insert().values(row).returning(c.id)).scalar_one()
            if number % LOOK_EVERY == 0 and allowed and role == "user":
                theirs = sa.and_(c.user_name == row["user_name"], c.role == role, c.allowed)
                newest = sa.select(c.id).where(theirs).order_by(c.id.desc())
                if (oldest := db.scalar(newest.offset(OF_A_USER - 1).limit(1))) is not None:
                    db.execute(t.audit.delete().where(theirs, c.id < oldest))

    def audit(
        self,
        *,
        before: int | None = None,
        limit: int = 100,
        from_s: float | None = None,
        to_s: float | None = None,
        user: str | None = None,
        action: str | None = None,
        job: str | None = None,
        refused: bool = False,
    ) -> list[AuditLine]:
        """The audit log, newest first.

        Args:
            before: only lines with smaller ids.
            limit: most lines.
            from_s: the first time that counts, s since 1970.
            to_s: the first time that does not count any more.
            user: only what this user did.
            action: only actions that contain this text, in upper or lower case.
            job: only what was done with this job.
            refused: only what was refused.
        """
        c = t.audit.c
        chosen = sa.select(t.audit).order_by(c.id.desc()).limit(limit)
        if before is not None:
            chosen = chosen.where(c.id < before)
        if from_s is not None:
            chosen = chosen.where(c.time_s >= from_s)
        if to_s is not None:
            chosen = chosen.where(c.time_s < to_s)
        if user is not None:
            chosen = chosen.where(c.user_name == user)
        if action is not None:
            chosen = chosen.where(c.action.icontains(action, autoescape=True))
        if job is not None:
            of_job = f"jobs/{job}"
            chosen = chosen.where(sa.or_(c.target == of_job, c.target.startswith(f"{of_job}/", autoescape=True)))
        if refused:
            chosen = chosen.where(c.allowed.is_(False))
        with self.read() as db:
            return [AuditLine.model_validate(named(row)) for row in db.execute(chosen)]

    def add_token(self, view: TokenView, digest: str) -> None:
        """Save a token."""
        row = view.model_dump(exclude={"id", "user"}) | {"token": view.id, "user_name": view.user, "digest": digest}
        with self.write() as db:
            db.execute(t.tokens.insert(), row)

    def tokens(self, token: str | None = None) -> list[tuple[TokenView, str]]:
        """(token, digest of its secret), newest first; of one id or all."""
        chosen = sa.select(t.tokens).order_by(t.tokens.c.created_s.desc())
        if token is not None:
            chosen = chosen.where(t.tokens.c.token == token)
        with self.read() as db:
            rows = [named(row) for row in db.execute(chosen)]
        return [
            (TokenView.model_validate(row | {"id": token}), digest)
            for row in rows
            for token, digest in [(row.pop("token"), row.pop("digest"))]
        ]

    def revoke_token(self, token: str) -> None:
        """Revoke a token."""
        with self.write() as db:
            db.execute(t.tokens.update().where(t.tokens.c.token == token).values(revoked=True))

    def add_session(self, row: SessionRow, digest: str, *, now_s: float, most: int) -> None:
        """Save a browser session; drop those that have expired, and the oldest of the user beyond `most`."""
        c = t.sessions.c
        values = row.model_dump(exclude={"id", "user"}) | {"session": row.id, "user_name": row.user, "digest": digest}
        newest = sa.select(c.session).where(c.user_name == row.user).order_by(c.created_s.desc(), c.session)
        with self.write() as db:
            db.execute(t.sessions.delete().where(c.expires_s <= now_s))
            db.execute(t.sessions.insert(), values)
            kept = db.scalars(newest.limit(most)).all()
            db.execute(t.sessions.delete().where(c.user_name == row.user, c.session.not_in(kept)))

    def sessions(self) -> list[tuple[SessionRow, str]]:
        """(browser session, digest of its secret) of all."""
        with self.read() as db:
            rows = [named(row) for row in db.execute(sa.select(t.sessions))]
        return [
            (SessionRow.model_validate(row | {"id": name}), digest)
            for row in rows
            for name, digest in [(row.pop("session"), row.pop("digest"))]
        ]

    def end_session(self, session: str) -> None:
        """Delete a browser session."""
        with self.write() as db:
            db.execute(t.sessions.delete().where(t.sessions.c.session == session))

    def control(self, name: str) -> Any:
        """What admins have set under this name; None: nothing."""
        with self.read() as db:
            value = db.scalar(sa.select(t.controls.c.value).where(t.controls.c.name == name))
        return None if value is None else json.loads(value)

    def set_control(self, name: str, value: Any) -> None:
        """Save what an admin sets."""
        upsert = self._upsert(t.controls, ["name"], ["value"])
        with self.write() as db:
            db.execute(upsert, {"name": name, "value": json.dumps(value)})
