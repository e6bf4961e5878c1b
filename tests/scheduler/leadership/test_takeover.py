"""Terms in a real PostgreSQL: one leads, the others stand by."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import sqlalchemy as sa

from penstock_scheduler.daemon.candidate import Candidate, StandingBy
from penstock_scheduler.people.errors import NotLeading, StoreError
from penstock_scheduler.store import schema
from penstock_scheduler.store.leadership.lease import Alone, boot_s
from penstock_scheduler.store.sql import open_store
from tests.forking import FORKING

LEASE_S = 4.0


def standing_by(url: str, name: str) -> StandingBy:
    return StandingBy(url, Candidate(name, f"unix:/{name}", LEASE_S))


def leads(url: str, name: str):
    lease = standing_by(url, name).wait(lambda: False)
    assert lease is not None
    return lease


def test_the_first_leads_at_once_and_the_second_after_a_handover(database):
    first = leads(database, "a")
    assert first.number == 1
    store = open_store(database, writer=True, leadership=first)
    store.set_control("greeting", "hello")
    found = []
    second = standing_by(database, "b")
    waits = threading.Thread(target=lambda: found.append(second.wait(lambda: False)))
    waits.start()
    time.sleep(1.5 * LEASE_S)
    assert not found, "a living leader keeps the lead, however long others wait"
    table = second.table
    assert (table.leader().term.holder, [each.name for each in table.standbys()]) == ("a", ["b"])
    handed_s = boot_s()
    first.close()
    waits.join(120)
    assert boot_s() - handed_s < LEASE_S
    assert found[0].number == 2
    assert (table.leader().term.holder, table.standbys()) == ("b", [])
    with pytest.raises(NotLeading, match="it hands over"):
        store.set_control("greeting", "late")
    assert store.control("greeting") == "hello"
    found[0].close()


def test_a_slow_host_creates_the_schema(database, monkeypatch):
    """Half the lease passes within its transaction, after which the server would end another one."""
    upgrade = schema.upgrade

    def slowly(engine):
        with engine.begin() as db:
            db.execute(sa.text("SELECT 1"))
            time.sleep(0.75 * LEASE_S)
            db.execute(sa.text("SELECT 1"))
        upgrade(engine)

    monkeypatch.setattr(schema, "upgrade", slowly)
    leads(database, "a").close()


def test_a_successor_that_was_named_comes_before_the_others(database):
    first, found = leads(database, "a"), {}
    threads = [
        threading.Thread(target=lambda name=name: found.setdefault(name, standing_by(database, name).wait(stop)))
        for name in ("b", "c", "d")
    ]
    over = threading.Event()

    def stop() -> bool:
        return over.is_set()

    for each in threads:
        each.start()
    time.sleep(1)
    first.close("c")
    deadline_s = boot_s() + 10
    while "c" not in found and boot_s() < deadline_s:
        time.sleep(0.05)
    over.set()
    for each in threads:
        each.join()
    assert found["c"].number == 2
    assert found["b"] is None
    assert found["d"] is None
    found["c"].close()


def _hold(url: str, started, pipelined: bool) -> None:
    lease = leads(url, "a")
    store = open_store(url, writer=True, leadership=lease)
    with store.write() as db, contextlib.ExitStack() as stack:
        if pipelined:  # as in executemany, of which psycopg sends the end after the last row
            stack.enter_context(db.connection.driver_connection.pipeline())
        store_control(db, "open transaction")
        started.set()
        time.sleep(3600)


def store_control(db, text: str) -> None:
    db.execute(sa.text("INSERT INTO controls (name, value) VALUES ('x', :text)"), {"text": f'"{text}"'})


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_takeover_does_not_wait_for_the_open_transaction_of_a_dead_or_frozen_leader(database, fault, pipelined):
    started = FORKING.Event()
    process = FORKING.Process(target=_hold, args=(database, started, pipelined))
    process.start()
    try:
        assert started.wait(60)
        begun_s = boot_s()
        os.kill(process.pid, getattr(signal, fault))
        second = leads(database, "b")
        took_s = boot_s() - begun_s
        assert second.number == 2
        assert took_s < LEASE_S + 60
        store = open_store(database, writer=True, leadership=second)
        assert store.control("x") is None, "what was not committed is not there"
        store.set_control("x", "mine")
        second.close()
    finally:
        process.kill()
        process.join()


def test_no_two_of_many_lead_at_once(database):
    """Five stand by, and each that leads hands over: the numbers have no gap, and each is given once."""
    numbers, lock = [], threading.Lock()

    def take_part(name: str) -> None:
        for _ in range(4):
            lease = leads(database, name)
            with lock:
                numbers.append(lease.number)
            lease.close()

    threads = [threading.Thread(target=take_part, args=(f"p{number}",)) for number in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert sorted(numbers) == list(range(1, 21))
    assert numbers == sorted(numbers)


def test_commands_that_need_the_database_alone_are_refused_while_a_penstockd_may_lead(database):
    lease = leads(database, "a")
    with pytest.raises(StoreError, match="in use by another penstockd"):
        open_store(database, writer=True)
    lease.close()


def test_a_penstockd_does_not_lead_beside_one_that_knows_no_leader(database):
    """As after an upgrade: the former version holds the server's lock alone."""
    old = open_store(database, writer=True)
    with pytest.raises(StoreError, match="in use by an older penstockd"):
        standing_by(database, "new")
    old.close()
    leads(database, "new").close()


def test_a_file_has_one_penstockd_and_its_terms_are_counted_too(tmp_path):
    for number in (1, 2):
        store = open_store(tmp_path, writer=True)
        assert isinstance(store.leadership, Alone)
        assert store.leadership.number == number
        with pytest.raises(StoreError, match="in use by another penstockd"):
            open_store(tmp_path, writer=True)
        store.close()


def test_a_schema_may_take_longer_to_create_than_the_server_lets_a_leader_be_idle(database, monkeypatch):
    """On a slow host, too, the first penstockd on an empty database leads."""
    upgrade = schema.upgrade

    def slow(engine):
        upgrade(engine)
        time.sleep(0.75 * LEASE_S)

    monkeypatch.setattr(schema, "upgrade", slow)
    leads(database, "a").close()
