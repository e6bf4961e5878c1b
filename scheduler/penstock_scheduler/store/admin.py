"""What admins and clients did: the audit log, API tokens, and settings that admins changed while the daemon ran."""

from __future__ import annotations

import json
import time
from typing import Any

import sqlalchemy as sa

from penstock_scheduler.messages import AuditLine, TokenView
from penstock_scheduler.store import tables as t
from penstock_scheduler.store.database import Database, named


class AdminStore(Database):
    """The store's audit log, tokens and controls."""

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
        with self.write() as db:
            db.execute(t.audit.insert(), row)

    def audit(self, *, before: int | None = None, limit: int = 100) -> list[AuditLine]:
        """The audit log, newest first."""
        chosen = sa.select(t.audit).order_by(t.audit.c.id.desc()).limit(limit)
        if before is not None:
            chosen = chosen.where(t.audit.c.id < before)
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
