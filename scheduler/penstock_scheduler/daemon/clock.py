"""The daemon's clock."""

from __future__ import annotations

import threading

from penstock_scheduler.store.leadership.site_clock import site_time_s


class WallClock:
    """The site's time; `wake` ends a sleep early."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def now_s(self) -> float:
        """Seconds since 1970."""
        return site_time_s()

    def sleep(self, seconds: float) -> None:
        """Wait, until woken at the latest."""
        self._woken.wait(seconds)

    def wake(self) -> None:
        """End this sleep and all later ones at once, because the process is about to stop."""
        self._woken.set()
