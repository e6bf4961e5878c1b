"""The cloud's own threads, so that neither the round loop nor one run ever waits for another's call to a cloud.

One lock guards all that the loop and the threads share. A thread holds it while it works, except during each call to the
cloud: `Yielding` releases it then. So the loop waits for memory and the store at most, however long a call takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.people.errors import NotLeading
from penstock_scheduler.store.leadership.lease import ALONE

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Most orders and ends of runs that are under way at once: 200 orders of 4 s take 25 s."""


class Rate:
    """A token bucket for each kind of call, as EC2 has them in each account and region.

    Args:
        size: calls that may be made at once. That and `per_s` are what AWS documents for calls that change something.
        per_s: calls a second beyond them.
    """

    def __init__(self, size: float = 50.0, per_s: float = 5.0) -> None:
        self._size, self._per_s = size, per_s
        self._left: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def wait_s(self, call: str, now_s: float) -> float:
        """Take a token. Returns how long to wait for it, s."""
        with self._lock:
            left, since_s = self._left.get(call, (self._size, now_s))
            left = min(left + (now_s - since_s) * self._per_s, self._size) - 1
            self._left[call] = left, now_s
        return max(-left / self._per_s, 0.0)


class Yielding:
    """A client of the cloud. The lock is released during each of its calls. Whoever calls holds the lock.

    `leadership` is asked before each call that may change something, and such a call waits for its turn by `rate`.
    """

    def __init__(
        self, client: Any, lock: threading.Lock, leadership: Leadership = ALONE, rate: Rate | None = None
    ) -> None:
        self._client, self._lock, self._leadership, self._rate = client, lock, leadership, rate

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        if not callable(real):
            return real

        def call(*args: Any, **named: Any) -> Any:
            self._lock.release()
            try:
                if self._rate is not None and _changes(name):
                    time.sleep(self._rate.wait_s(name, time.monotonic()))
                with self._leadership.write("cloud", name) if _changes(name) else nullcontext():
                    return real(*args, **named)
            finally:
                self._lock.acquire()

        return call


def _changes(call: str) -> bool:
    """Whether a call to a cloud may change something. A call of an unknown kind may."""
    return not call.startswith(("describe", "get", "list", "head", "can_"))


class Worker:
    """Does a piece of work in a thread, again and again.

    Args:
        work: one piece. It is called with the lock held.
        lock: the lock.
    """

    def __init__(self, work: Callable[[], None], lock: threading.Lock) -> None:
        self._work, self._lock = work, lock
        self._wanted = threading.Event()
        self.trouble = ""
        """Why the newest piece failed; empty: it did not."""
        threading.Thread(target=self._run, name="cloud", daemon=True).start()

    def wake(self) -> None:
        """Let one more piece be done soon. Returns at once."""
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            with self._lock:
                self.trouble = _tried(self._work)


class Crew:
    """Threads that do pieces of work side by side.

    Python lets those of `concurrent.futures` do all that is queued before a process ends. A daemon that is told to stop must
    not place further orders, so these end with the process.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._due: dict[str, Callable[[], None]] = {}
        self._threads = 0
        self.trouble = ""
        """Why the newest piece failed; empty: it did not."""

    def do(self, name: str, work: Callable[[], None]) -> None:
        """Let a piece be done soon, with the lock held; not if one of that name waits for its turn. Returns at once.

        Whoever calls holds the lock.
        """
        if name in self._due:
            return
        self._due[name] = work
        if self._threads < AT_ONCE:
            self._threads += 1
            threading.Thread(target=self._run, name="cloud", daemon=True).start()

    def _run(self) -> None:
        with self._lock:
            try:
                while self._due:
                    self.trouble = _tried(self._due.pop(next(iter(self._due))))
            finally:
                self._threads -= 1


def _tried(work: Callable[[], None]) -> str:
    """Do a piece of work. Returns why it failed; empty: it did not."""
    try:
        work()
    except NotLeading as error:
        log.warning("the cloud is left alone", extra={"text": str(error)})
        return str(error)
    except Exception as error:
        log.exception("the cloud's thread failed; please report this as a bug")
        return f"the cloud's thread failed: {error}; it tries again in the next tick"
    return ""
