"""What the database tells people of the leader and its standbys."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_scheduler.store.leadership.terms import Term


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
