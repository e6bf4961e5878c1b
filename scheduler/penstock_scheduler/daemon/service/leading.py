"""Who leads, for people: `GET /v1/ready`, `penstock leader`, `penstock doctor` and the metrics."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from penstock_scheduler import __version__
from penstock_scheduler.api.health_messages import STANDBY, LeaderHealth, StandbyHealth
from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.store.leadership.lease import Lease
from penstock_scheduler.store.leadership.terms import Leader, Standby

LATE_S = 10.0
"""A standby that has not been heard of for this long is away."""


def leading(leadership: Leadership, round_: int | None) -> LeaderHealth:
    """What the leader says of itself and of its standbys. It asks nobody.

    `round_` is the newest round.
    """
    if not isinstance(leadership, Lease):
        name = socket.gethostname()
        return LeaderHealth(here=True, name=name, number=leadership.number, version=__version__, alone=True)
    leader, standbys = leadership.sight
    return LeaderHealth(
        here=not leadership.lost,
        name=leadership.name,
        number=leadership.number,
        version=__version__,
        address=leader.address if leader is not None else "",
        since_age_s=leader.since_age_s if leader is not None else None,
        lease_age_s=max(leadership.age_s, 0.0),
        lease_s=leadership.lease_s,
        standbys=_standbys(standbys, round_),
    )


def standing_by(leader: Leader | None, standbys: Sequence[Standby], round_: int | None, lease_s: float) -> LeaderHealth:
    """What a standby says of the leader."""
    if leader is None:
        return LeaderHealth(here=False, name="", number=0, version="", lease_s=lease_s)
    return LeaderHealth(
        here=False,
        name="" if leader.term.released else leader.term.holder,
        number=leader.term.number,
        version=leader.version,
        address=leader.address,
        since_age_s=leader.since_age_s,
        lease_age_s=leader.beat_age_s,
        lease_s=lease_s,
        standbys=_standbys(standbys, round_),
    )


def warnings(found: LeaderHealth) -> list[str]:
    """What an admin should look at."""
    return [
        f"{STANDBY}{each.name} has not been heard of for {each.seen_age_s:.0f} s; look whether its penstockd runs"
        for each in found.standbys
        if each.seen_age_s > LATE_S
    ]


def _standbys(standbys: Sequence[Standby], round_: int | None) -> list[StandbyHealth]:
    return [
        StandbyHealth(
            name=each.name,
            version=each.version,
            seen_age_s=each.seen_age_s,
            since_age_s=each.since_age_s,
            lag=None if round_ is None or each.round is None else max(round_ - each.round, 0),
        )
        for each in standbys
    ]
