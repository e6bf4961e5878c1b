"""Writes in penstockd's log: only where an admin asks for them."""

from __future__ import annotations

import logging

import pytest

from penstock_scheduler.people.logs import configure_logging
from penstock_scheduler.store.leadership.lease import Alone


@pytest.fixture(autouse=True)
def restore_logging():
    root, ours = logging.getLogger(), logging.getLogger("penstock_scheduler.store.leadership")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.parametrize("to", ["store", "slurm", "spool", "cloud"])
@pytest.mark.parametrize("writes", [False, True])
def test_writes_are_logged_where_an_admin_asks_for_it_only(capsys, to, writes):
    configure_logging("logfmt", writes=writes)
    with Alone(7).write(to, "update 12"):
        pass
    shown = capsys.readouterr().err
    assert ("event=write" in shown and "fencing=7" in shown) == writes, shown
    assert writes or not shown
