"""What one user can write into the audit log, which is kept for five years: 130 lines a second by storing a profile again."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_scheduler.store import admin
from penstock_scheduler.store.sql import open_store


def test_one_user_cannot_fill_the_store_with_audit_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "OF_A_USER", 20)
    monkeypatch.setattr(admin, "LOOK_EVERY", 10)
    store = open_store(tmp_path, writer=True)
    for number in range(5):
        store.note("ada", "user", "POST /v1/jobs", f"jobs/{number}", allowed=True)
        store.note("root", "admin", "PUT /v1/policy", "policy", allowed=True)
    store.note("eve", "user", "POST /v1/jobs", "jobs/3", allowed=False)
    for number in range(200):
        store.note("eve", "user", "PUT /v1/profiles", f"profiles/{number}", allowed=True)
    store.note("eve", "admin", "PUT /v1/policy", "policy", allowed=True)
    kept = [(line.user, line.role, line.allowed) for line in store.audit(limit=1000)]
    assert kept.count(("ada", "user", True)) == 5
    assert kept.count(("root", "admin", True)) == 5
    assert kept.count(("eve", "admin", True)) == kept.count(("eve", "user", False)) == 1
    assert 20 <= kept.count(("eve", "user", True)) <= 30
    assert store.audit(user="eve", action="PUT /v1/profiles")[0].target == "profiles/199"
    store.close()
