"""What a leader asks right before each write: whether it still leads, and for how long.

`Alone` is for a process that nobody can take over from. `Lease` is for a term in a database that others watch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock_scheduler.people.errors import NotLeading, StoreError
from penstock_scheduler.store.leadership.terms import Leader, Standby, ends_s

if TYPE_CHECKING:
    from penstock_scheduler.store.leadership.leader_table import LeaderTable


from penstock_scheduler.safety.health import LoopHealth, StepName

log = logging.getLogger(__name__)

CONFIRMED_S = 0.25
"""A confirmation that is younger is not asked for again. A machine whose own clock stood still, as that of a virtual machine that
was paused may, writes for at most this long before it hears that others lead."""

BEATS = 10
"""Confirmations in the time that one holds."""

MARGIN_S = 1.0
"""Kept back from what is left, for the start and the end of a write."""

DRAIN_S = 10.0
"""How long a handover waits for writes that have begun."""


def boot_s() -> float:
    """Seconds since the machine started, also those in which it slept: CLOCK_MONOTONIC leaves them out on Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _note(to: str, what: str, number: int) -> None:
    log.debug("write", extra={"to": to, "what": what, "fencing": number})


class Alone:
    """The leadership of a process that nobody can take over from: with SQLite, under the lock of the store's file.

    Args:
        number: the fencing number; 0 for programs that are no penstockd, which log no writes.
    """

    fenced = False
    lost = ""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def expect(self, to: str = "") -> float:
        """See `ports.Leadership`."""
        return math.inf

    @contextmanager
    def write(self, to: str, what: str) -> Iterator[float]:
        """See `ports.Leadership`."""
        if self.number:
            _note(to, what, self.number)
        yield math.inf

    def close(self, successor: str = "") -> None:
        """See `Lease.close`."""


ALONE = Alone()
"""For programs that are no penstockd."""


class Lease:
    """The leadership of one term. Once the term is lost, it never comes back.

    Args:
        table: the database.
        name: of this penstockd.
        number: the term's fencing number.
        confirmed_s: when the term was taken, by `boot_s`, before it was asked for.
        lease_s: how long a confirmation holds.
        now_s: the machine's clock.
    """

    fenced = True

    def __init__(
        self,
        table: LeaderTable,
        name: str,
        number: int,
        confirmed_s: float,
        lease_s: float,
        now_s: Callable[[], float] = boot_s,
    ) -> None:
        self.name, self.number = name, number
        self.sight: tuple[Leader | None, tuple[Standby, ...]] = (None, ())
        """What the database said of this term and its standbys at the newest beat, for people."""
        self.lost = ""
        """Why the term is over; empty: as far as this process knows, it is not."""
        self._table, self._lease_s, self._now_s = table, lease_s, now_s
        self._confirmed_s = confirmed_s
        self._confirming = threading.Lock()
        self._writes = threading.Condition()
        self._under_way = 0
        self._closed = threading.Event()
        self._given_up = False
        self._on_beat: Callable[[Callable[[], float]], None] = lambda time_s: None

    def tell_time(self, ask: Callable[[Callable[[], float]], None]) -> None:
        """Let `ask`, such as `SiteClock.ask`, ask for the database's time, now and with each beat. Raises StoreError."""
        ask(self._table.time_s)
        self._on_beat = ask

    def start(self) -> None:
        """Confirm the term again and again, in a thread of its own."""
        threading.Thread(target=self._beat, name="leadership", daemon=True).start()

    @property
    def age_s(self) -> float:
        """Seconds since the newest confirmation."""
        return self._now_s() - self._confirmed_s

    @property
    def lease_s(self) -> float:
        """How long a confirmation holds."""
        return self._lease_s

    def expect(self, to: str = "") -> float:
        """See `ports.Leadership`. At least half of the lease must be left."""
        if self._closed.is_set():
            raise NotLeading(self._text(to, "it hands over, or has lost the lead"))
        if self.age_s > CONFIRMED_S:
            self._confirm(to)
        until_s = ends_s(self._confirmed_s, self._lease_s)
        if until_s - self._now_s() < self._lease_s / 2:
            raise NotLeading(self._text(to, "its lease is about to end"))
        return until_s - MARGIN_S

    @contextmanager
    def write(self, to: str, what: str) -> Iterator[float]:
        """See `ports.Leadership`."""
        with self._writes:
            self._under_way += 1
        try:
            until_s = self.expect(to)
            _note(to, what, self.number)
            yield until_s
        finally:
            with self._writes:
                self._under_way -= 1
                self._writes.notify_all()

    def lose(self, why: str) -> None:
        """Note that the term is over: nothing is written any more."""
        if not self.lost:
            self.lost = why
            log.error("leadership lost", extra={"fencing": self.number, "text": why})
        self._closed.set()

    def close(self, successor: str = "") -> None:
        """Hand over: begin no further write, wait for those under way, and give up the term."""
        self._closed.set()
        with self._writes:
            done = self._writes.wait_for(lambda: self._under_way == 0, DRAIN_S)
        if self.lost or self._given_up:
            return
        if not done:
            log.warning(
                "term not given up", extra={"text": "writes are still under way; a standby waits for the lease"}
            )
            return
        try:
            self._table.release(self.number, successor)
            self._given_up = True
            log.info("term given up", extra={"fencing": self.number, "successor": successor})
        except StoreError as error:
            log.warning("term not given up", extra={"text": f"{error}; a standby waits for the lease"})

    def _confirm(self, to: str = "") -> None:
        with self._confirming:
            if self.age_s <= CONFIRMED_S:
                return
            asked_s = self._now_s()
            try:
                mine = self._table.confirm(self.number)
            except StoreError as error:
                raise NotLeading(self._text(to, f"the database does not confirm that it leads: {error}")) from error
            if not mine:
                self.lose("another penstockd leads")
                raise NotLeading(self._text(to, "another penstockd leads"))
            self._confirmed_s = asked_s

    def _beat(self) -> None:
        while not self._closed.wait(self._lease_s / BEATS):
            try:
                self._confirm()
                self._on_beat(self._table.time_s)
                self.sight = self._table.leader(), tuple(self._table.standbys())
            except StoreError as error:
                log.warning("not confirmed", extra={"fencing": self.number, "text": str(error)})
            except Exception:  # the next beat may succeed; if none does, nothing is written any more
                log.exception("confirmation failed unexpectedly; please report this as a bug")

    def _text(self, to: str, why: str) -> str:
        return f"nothing is written{f' to the {to}' if to and to != 'slurm' else ' to Slurm' if to else ''}: {why}"


HURRY_S = 0.5
"""How long the present tick gets to its end, so that a short one is complete."""
LOOK_S = 0.05
"""Time between two looks afterwards."""
LONG_STEPS = (StepName.OBSERVE, StepName.DECIDE)
"""They may take a minute, and change nothing before they end. What comes of them after that is not written."""


class Leaving:
    """Gives the lead up once.

    Args:
        health: what the loop is doing.
        leave: gives the lead up.
    """

    def __init__(self, health: LoopHealth, leave: Callable[[], None]) -> None:
        self._health, self._leave = health, leave
        self._lock, self._ended = threading.Lock(), threading.Event()

    def start(self, wait: Callable[[], None]) -> None:
        """Leave as soon as nothing is being changed after `wait`, which returns when the leader should leave."""
        threading.Thread(target=self._leave_soon, args=(wait,), name="leaving", daemon=True).start()

    def now(self) -> None:
        """The loop has ended: leave now, or wait until this has been done."""
        self._ended.set()
        with self._lock:
            self._leave()

    def _leave_soon(self, wait: Callable[[], None]) -> None:
        wait()
        pause_s = HURRY_S
        while not self._ended.wait(pause_s):
            if self._health.under_way in LONG_STEPS:
                with self._lock:
                    self._leave()
                return
            pause_s = LOOK_S
