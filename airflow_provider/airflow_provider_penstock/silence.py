"""The lines in the log of a waiting task while Penstock does not answer."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

TELL_AFTER_S = 10.0
"""A shorter silence, such as that of a restart, is not worth a line."""
REPEAT_S = 600.0
"""Time between two lines about one silence."""


class Silence:
    """Tells one log since when Penstock does not answer: once, then every ten minutes, and when it answers again."""

    def __init__(self, log: Any, meanwhile: str) -> None:
        """`meanwhile` says who waits, such as "the task keeps waiting for job 7"."""
        self._log, self._meanwhile = log, meanwhile
        self._since_s: float | None = None
        self._told_s: float | None = None

    def goes_on(self, error: Exception) -> None:
        """A request was not answered."""
        now_s = time.time()
        if self._since_s is None:
            self._since_s = now_s
        due_s = self._since_s + TELL_AFTER_S if self._told_s is None else self._told_s + REPEAT_S
        if now_s >= due_s:
            self._told_s = now_s
            self._log.warning("%s; %s", self.sentence(error), self._meanwhile)

    def ends(self) -> None:
        """A request was answered."""
        if self._told_s is not None and self._since_s is not None:
            self._log.info("Penstock answers again, after %.0f s", time.time() - self._since_s)
        self._since_s = self._told_s = None

    def sentence(self, error: Exception) -> str:
        """The state in words."""
        since = datetime.fromtimestamp(time.time() if self._since_s is None else self._since_s, UTC)
        cause = str(error) or type(error).__name__  # a time-out in the triggerer has no text
        return f"Penstock does not answer since {since:%Y-%m-%d %H:%M:%S} UTC ({cause})"
