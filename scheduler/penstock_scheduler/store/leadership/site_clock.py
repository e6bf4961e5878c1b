"""The time at the site, for everything that is stored or compared with stored times.

Where several penstockd share a database, it is the database's time: their hosts' clocks may differ, and what one of them has
stored must not lie in the future of the next one (docs/decisions/0045-one-clock.md). Everywhere else it is this machine's.

The core reads no clock: its times come from the snapshot, which has them from here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock_scheduler.store.leadership.lease import boot_s

log = logging.getLogger(__name__)

APART_S = 0.5
"""By how much the clocks may differ, besides the time that a question takes, before this one is set: a quartz drifts by this in
hours."""

TOLD_S = 5.0
"""From which difference on the log tells that this machine's clock is wrong, or that the database's has been set."""


class SiteClock:
    """See the module. Between two answers of the database, it counts by `boot_s`, so that setting this machine's clock has no
    effect."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None
        """The site's time less `boot_s`, once the database has told it."""

    def now_s(self) -> float:
        """Seconds since 1970."""
        ahead_s = self._ahead_s
        return time.time() if ahead_s is None else boot_s() + ahead_s

    def host_ahead_s(self) -> float:
        """By how much this machine's clock is ahead, for programs that ask it."""
        return 0.0 if self._ahead_s is None else time.time() - self.now_s()

    def ask(self, time_s: Callable[[], float]) -> None:
        """Ask the database for its time. Raises StoreError."""
        asked_s = boot_s()
        told_s = time_s()
        self.heard(told_s, asked_s, boot_s())

    def heard(self, told_s: float, asked_s: float, answered_s: float) -> None:
        """Take in that the database's clock said `told_s` at a time between these two, which are by `boot_s`."""
        ahead_s, doubt_s = told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2
        off_s = self.now_s() - boot_s() - ahead_s
        if self._ahead_s is not None and abs(off_s) <= APART_S + doubt_s:
            return
        if abs(off_s) > TOLD_S + doubt_s:
            what = "this machine's clock" if self._ahead_s is None else "the time until now"
            log.warning(
                "time taken from the database", extra={"text": f"{what} was {off_s:+.0f} s off; set clocks by NTP"}
            )
        self._ahead_s = ahead_s


SITE_CLOCK = SiteClock()
"""That of this process."""


def site_time_s() -> float:
    """The time of this process's site, s since 1970."""
    return SITE_CLOCK.now_s()
