"""How a penstockd becomes the leader: it stands by until the present term is over, and then takes the next one."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from penstock_scheduler import __version__
from penstock_scheduler.daemon.service.settings import ApiSettings
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.rounds.settings import DaemonSettings
from penstock_scheduler.store import schema
from penstock_scheduler.store.leadership.leader_table import LeaderTable
from penstock_scheduler.store.leadership.lease import Lease, boot_s
from penstock_scheduler.store.leadership.terms import Leader, Sighting, Standby
from penstock_scheduler.store.opening import candidate_engine
from penstock_scheduler.store.sql import SqlStore, open_store

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Time between two looks at the present term."""

LOAD_S = 2.0
"""Time between two looks at the newest plan, and two signs of life."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A penstockd as others see it."""

    name: str
    address: str
    """URL of its API for programs on other hosts; empty: it has none."""
    lease_s: float


def candidate(daemon: DaemonSettings, api: ApiSettings) -> Candidate:
    """This penstockd, as its settings say."""
    address = "" if not api.enabled else f"unix:{api.socket}"
    if api.enabled and api.listen:
        host, _, port = api.listen.rpartition(":")
        host = socket.getfqdn() if host in ("", "0.0.0.0", "[::]") else host  # noqa: S104
        address = f"http{'s' if api.tls_certificate else ''}://{host}:{port}"
    return Candidate(daemon.name or socket.gethostname(), address, daemon.lease_s)


class StandingBy:
    """A penstockd that may lead, on a database server. It creates the store if there is none.

    Raises:
        StoreError: the server does not answer.
        ConfigError: the URL is wrong.
    """

    def __init__(self, where: str, candidate: Candidate) -> None:
        self._where, self._candidate = where, candidate
        engine, name = candidate_engine(where, candidate.lease_s / 2)
        self.table = LeaderTable(engine, name)
        self._store: SqlStore | None = None
        self.round: int | None = None
        """The newest round that it has read, with its plan."""
        self.newest_round: int | None = None
        """The newest round in the store."""
        self.leader: Leader | None = None
        """Who leads, as of the newest look; None: not known."""
        self.standbys: tuple[Standby, ...] = ()
        """All that stand by, as of the newest look."""
        self.trouble = ""
        """Why the database did not answer at the newest look; empty: it did."""
        _create(engine, name, where)

    @property
    def lease_s(self) -> float:
        """How long a confirmation holds."""
        return self._candidate.lease_s

    def wait(self, stop: Callable[[], bool], on_look: Callable[[], None] = lambda: None) -> Lease | None:
        """Stand by until this penstockd leads. None: `stop()` came before.

        `on_look` is called after each look at the present term.
        """
        me = self._candidate
        sighting, loaded_s, told = Sighting(me.name, me.lease_s), -LOAD_S, -1
        while not stop():
            try:
                term = self.table.term()
                now_s = boot_s()  # after the reading, so that it is later than the confirmation that was read
                sighting.saw(term, now_s)
                if term.number != told and not sighting.over(now_s):
                    log.info("standing by", extra={"leader": term.holder, "fencing": term.number})
                    told = term.number
                if sighting.over(now_s):
                    asked_s = boot_s()
                    number = self.table.take(term, me.name, __version__, me.address, me.lease_s / 2)
                    if number is not None:
                        log.info("leads", extra={"fencing": number, "before": term.holder, "released": term.released})
                        lease = Lease(self.table, me.name, number, asked_s, me.lease_s)
                        lease.start()
                        self._close_store()
                        return lease
                if now_s - loaded_s >= LOAD_S:
                    loaded_s = now_s
                    self._load()
                    self.table.stand_by(me.name, __version__, self.round)
                    self.leader, self.standbys = self.table.leader(), tuple(self.table.standbys())
                self.trouble = ""
            except StoreError as error:
                sighting.lost_sight()
                if not self.trouble:
                    log.warning("the database does not answer", extra={"text": str(error)})
                self.trouble = str(error)
            on_look()
            if not stop():
                time.sleep(POLL_S)
        self._leave()
        return None

    def _load(self) -> None:
        """Read the newest plan, so that a takeover finds it in the caches of the database and of this process."""
        if self._store is None:
            self._store = open_store(self._where)
        newest = self._store.summaries(None, 1)
        self.newest_round = newest[0].round if newest else None
        if newest and newest[0].round != self.round and (record := self._store.last_round()) is not None:
            self.round = record.snapshot.round

    def _leave(self) -> None:
        try:
            self.table.leave(self._candidate.name)
        except StoreError as error:
            log.info("not signed off", extra={"text": str(error)})
        self._close_store()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def _create(engine: sa.Engine, name: str, where: str) -> None:
    """Create the schema if there is none, one process at a time."""
    try:
        with engine.connect() as db, db.begin():
            # This connection is idle while another one creates the schema, and other penstockd wait for it meanwhile.
            db.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            db.execute(sa.text("SET LOCAL statement_timeout = 0"))
            db.execute(sa.select(sa.func.pg_advisory_xact_lock(schema.CREATE_NUMBER)))
            if schema.revision(db) is None:
                patient = schema.server_engine(where)  # without the limit on the pauses of a transaction
                schema.upgrade(patient)
                patient.dispose()
    except sa.exc.SQLAlchemyError as error:
        raise StoreError(f"{name}: {str(error).splitlines()[0]}; check that the server is up") from error
    with engine.connect() as db:
        schema.expect_usable(db, name)
