"""When a leader's term is over, and how long a leader may still write. Pure: all times come from the caller's own clock.

No two machines compare their clocks. The leader counts from before it sent the confirmation that succeeded. A standby counts from
when it first read that confirmation, which is later. So a standby never takes over before the leader's own count has ended, and
a clock that is set to another time changes nothing. `Leader` and `Standby` are for people.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DRIFT = 0.01
"""By how much two clocks may differ in speed. Real ones differ by less than a thousandth."""


@dataclass(frozen=True, slots=True)
class Term:
    """One penstockd's time as the leader, as the database has it."""

    number: int
    """The fencing number: it grows with each term, and never returns."""
    beat: int
    """Grows with each confirmation."""
    holder: str
    """The name of the penstockd that leads."""
    released: bool = False
    """Whether the holder has given the term up and writes nothing any more."""
    successor: str = ""
    """Who should lead next, if the holder has said so; empty: anybody."""


def ends_s(confirmed_s: float, lease_s: float) -> float:
    """Until when a leader may write, by its own clock.

    Args:
        confirmed_s: when the leader sent the newest confirmation that succeeded.
        lease_s: how long a confirmation holds.
    """
    return confirmed_s + lease_s * (1 - DRIFT)


class Sighting:
    """What a standby has seen of the present term, and since when.

    Args:
        name: the standby's name.
        lease_s: how long a confirmation holds.
    """

    def __init__(self, name: str, lease_s: float) -> None:
        self._name, self._patience_s = name, lease_s * (1 + DRIFT)
        self._term: Term | None = None
        self._since_s = -math.inf

    def saw(self, term: Term, now_s: float) -> None:
        """Take in what the database has, read after `now_s`."""
        if term != self._term:
            self._term, self._since_s = term, now_s

    def lost_sight(self) -> None:
        """The database did not answer. The leader could not confirm either, and gets the time to do so."""
        self._term = None

    def over(self, now_s: float) -> bool:
        """Whether this standby may take over: the term was released, or its holder has not confirmed it for long."""
        if self._term is None:
            return False
        if self._term.released and self._term.successor in ("", self._name):
            return True
        return now_s - self._since_s >= self._patience_s


@dataclass(frozen=True, slots=True)
class Standby:
    """A penstockd that stands by, as the database has it."""

    name: str
    version: str
    seen_age_s: float
    """Seconds since it was last heard of."""
    since_age_s: float
    """Seconds since it began to stand by."""
    round: int | None
    """The round that it has loaded; None: none yet."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The present term, for people. Ages are by the database's clock."""

    term: Term
    version: str
    address: str
    """URL of its API, for programs on other hosts; empty: it has none."""
    since_age_s: float
    beat_age_s: float
