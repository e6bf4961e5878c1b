"""The cloud's own thread, so that the round loop never waits for a cloud.

One lock guards all that the loop and the thread share. The thread holds it while it works, except during each call to the
cloud: `Yielding` releases it then. So the loop waits for memory and the store at most, however long a call takes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.people.errors import NotLeading
from penstock_scheduler.store.leadership.lease import ALONE

log = logging.getLogger(__name__)


class Yielding:
    """A client of the cloud. The lock is released during each of its calls. Whoever calls holds the lock.

    `leadership` is asked before each call that may change something.
    """

    def __init__(self, client: Any, lock: threading.Lock, leadership: Leadership = ALONE) -> None:
        self._client, self._lock, self._leadership = client, lock, leadership

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        if not callable(real):
            return real

        def call(*args: Any, **named: Any) -> Any:
            self._lock.release()
            try:
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
                try:
                    self._work()
                    self.trouble = ""
                except NotLeading as error:
                    self.trouble = str(error)
                    log.warning("the cloud is left alone", extra={"text": str(error)})
                except Exception as error:
                    self.trouble = f"the cloud's thread failed: {error}; it tries again in the next tick"
                    log.exception("the cloud's thread failed; please report this as a bug")
