"""The daemon's health for clients: `penstock doctor`, /v1/ready, the metrics and the notices."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock_scheduler import __version__
from penstock_scheduler.api.health_messages import (
    STANDBY,
    DiskHealth,
    FilesHealth,
    Health,
    LeaderHealth,
    StandbyHealth,
    StepHealth,
)
from penstock_scheduler.api.ports import Leadership
from penstock_scheduler.daemon.service import views
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.safety import open_files
from penstock_scheduler.safety.health import (
    Findings,
    HealthSettings,
    LoopHealth,
    disk_problem,
    disk_warning,
    problems,
    step_problem,
    warnings,
)
from penstock_scheduler.store.disks import DiskCheck
from penstock_scheduler.store.leadership.lease import ALONE, Lease
from penstock_scheduler.store.leadership.terms import Leader, Standby


class LoopStatus(Protocol):
    """The state of the round loop."""

    health: LoopHealth

    @property
    def at_rest(self) -> bool:
        """Whether no round is decided on purpose."""
        ...

    @property
    def incomplete(self) -> str:
        """Parts that the newest observation of the cluster lacks; empty if it is complete."""
        ...

    @property
    def cloud_protected(self) -> str:
        """Why the cloud launches nothing until an admin says so; empty: it may."""
        ...

    @property
    def cloud_troubles(self) -> tuple[str, ...]:
        """What an admin must put right in the cloud, with the remedy."""
        ...


@dataclass
class Vitals:
    """Where the daemon's health can be read. Methods may be called from any thread, and none waits for a disk or the cluster."""

    settings: HealthSettings
    round_s: float
    loop: LoopStatus
    disks: Sequence[DiskCheck]
    board: Board
    leadership: Leadership = ALONE

    def start(self) -> None:
        """Begin to check the disks."""
        for disk in self.disks:
            disk.start(lambda: self.settings.check_s)

    def stop(self) -> None:
        """End the checks of the disks."""
        for disk in self.disks:
            disk.stop()

    def disk_states(self, now_s: float) -> list[tuple[str, str, str]]:
        """For each disk: whose it is, why nothing can be written, and that it will be full soon; empty: neither."""
        records = [disk.record for disk in self.disks]
        return [
            (each.what, disk_problem(each, now_s, self.settings), disk_warning(each, self.settings)) for each in records
        ]

    def leader(self) -> LeaderHealth:
        """Which of several penstockd leads, and which stand by."""
        record = self.board.record
        return leading(self.leadership, record.snapshot.round if record else None)

    def health(self, now_s: float) -> Health:
        """Whether the daemon can do its work, and what is known about that."""
        board, settings = self.board, self.settings
        disks = [disk.record for disk in self.disks]
        files = open_files.count("penstockd")
        report_s, reporting = board.newest_report
        found = Findings(
            now_s=now_s,
            started_s=self.loop.health.started_s,
            steps=self.loop.health.steps(),
            disks=disks,
            paused=self.loop.at_rest,
            round_s=self.round_s,
            report_s=report_s,
            reporting=reporting,
            incomplete=self.loop.incomplete,
            cloud_protected=self.loop.cloud_protected,
            cloud_troubles=self.loop.cloud_troubles,
            differs=board.plan_check.warning(now_s),
            none_starts=board.start_check.warning(now_s),
            unheard=board.unheard(self.settings.reports_s, now_s),
            unspooled=board.unspooled(),
            doubted=0 if board.record is None else sum(bool(f.doubts) for f in board.record.snapshot.facts.values()),
        )
        wrong = problems(found, settings)
        leader = self.leader()
        if self.leadership.lost:
            wrong = [f"it leads no longer: {self.leadership.lost}", *wrong]
        return Health(
            status="not-ready" if wrong else "ok",
            version=__version__,
            round=board.record.snapshot.round if board.record else None,
            observed_age_s=_age(board.observed_s, now_s),
            report_age_s=_age(report_s, now_s),
            problems=wrong,
            warnings=[
                *warnings(found, settings),
                *views.warnings(board),
                *leader_warnings(leader),
                *filter(None, [files.warning]),
            ],
            leader=leader,
            files=FilesHealth(open=files.open, limit=files.limit, warning=files.warning),
            steps=[
                StepHealth(
                    step=step.name.value,
                    round=step.round,
                    age_s=_age(step.done_s, now_s),
                    since_s=_age(step.began_s, now_s),
                    failing=step.failed,
                    problem=step_problem(step, found, settings),
                    error=step.error,
                    error_age_s=_age(step.error_s, now_s),
                )
                for step in found.steps
            ],
            disks=[
                DiskHealth(
                    what=disk.what,
                    where=disk.where,
                    writable=None if disk.checked_s is None else not disk.error,
                    checked_age_s=_age(disk.checked_s, now_s),
                    since_s=_age(disk.began_s, now_s),
                    error=disk.last_error,
                    error_age_s=_age(disk.error_s, now_s),
                    free_bytes=disk.free_bytes,
                    used_bytes=disk.used_bytes,
                    days_left=disk.days_left,
                    problem=disk_problem(disk, now_s, settings),
                    warning=disk_warning(disk, settings),
                )
                for disk in disks
            ],
            counters=dict(board.counters),
        )


def _age(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else max(now_s - then_s, 0.0)


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


def leader_warnings(found: LeaderHealth) -> list[str]:
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
