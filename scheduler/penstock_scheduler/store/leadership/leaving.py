"""How a leader that should end, or hand over, gives the lead up without waiting for a long observation or decision."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock_scheduler.safety.health import LoopHealth, StepName

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
