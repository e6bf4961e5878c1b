"""The site's rules in Slurm: reservations, limits, fair share, topology."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeVar

from penstock_scheduler.api.ports import Clock
from penstock_scheduler.model import GpuLimit
from penstock_slurm.gateway import (
    SlurmError,
    SlurmFeatures,
    SlurmJob,
    SlurmLimit,
    SlurmQos,
    SlurmReader,
    SlurmReservation,
)
from penstock_slurm.settings import SlurmSettings

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RETRY_S = 60.0
"""Pause after a failed reading. If slurmdbd hangs, each reading takes the time limit of a command, and no round runs."""

MOST_WEIGHT = 2.0
"""Weight of a job whose fair-share factor is 1, because its user has used nothing yet. With factor 0 it is 1 / 2."""


@dataclass(frozen=True, slots=True)
class SlurmRules:
    """Rules that change seldom, as last read."""

    features: SlurmFeatures = field(default_factory=SlurmFeatures)
    switches: Mapping[str, str] = field(default_factory=dict)
    """Node -> leaf switch."""
    limits: tuple[SlurmLimit, ...] = ()
    fair_shares: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(account, user) -> factor."""
    qos: Mapping[str, SlurmQos] = field(default_factory=dict)
    """Those that take part in preemption, by their names."""

    def weight(self, job: SlurmJob) -> float:
        """The weight of a job: MOST_WEIGHT ** (2 F - 1) with the fair-share factor F in [0, 1]; 1 without one."""
        factor = self.fair_shares.get((job.account, job.user), 0.5)
        return float(MOST_WEIGHT ** (2 * min(max(factor, 0.0), 1.0) - 1))


class SlurmSite:
    """Reads the rules whenever they are `rules_refresh_s` old, as far as this Slurm has them enabled.

    After a failed reading the old rules stay, and the next reading is after `RETRY_S`: slurmctld goes on without slurmdbd and
    enforces its limits itself.
    """

    def __init__(self, reader: SlurmReader, clock: Clock, settings: SlurmSettings) -> None:
        self._reader = reader
        self._clock = clock
        self._settings = settings
        self._rules = SlurmRules()
        self._due_s = 0.0
        self._failed = False

    def rules(self) -> SlurmRules:
        """The present rules."""
        now_s, period_s = self._clock.now_s(), self._settings.rules_refresh_s
        if now_s >= self._due_s:
            self._failed = False
            self._rules = self._read(self._rules)
            self._due_s = now_s + (min(RETRY_S, period_s) if self._failed else period_s)
        return self._rules

    def _read(self, known: SlurmRules) -> SlurmRules:
        ask, has = self._reader, self._read_or(known.features, self._reader.features)
        weighs = has.fair_share and self._settings.weight == "fair-share"
        by_qos = has.accounting and has.preempts_by == "qos"
        return SlurmRules(
            has,
            self._read_or(known.switches, ask.switches) if has.topology else {},
            self._read_or(known.limits, lambda: ask.limits(has.cluster)) if has.limits else (),
            self._read_or(known.fair_shares, ask.fair_shares) if weighs else {},
            self._read_or(known.qos, lambda: {each.name: each for each in ask.qos()}) if by_qos else {},
        )

    def _read_or(self, known: Answer, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except SlurmError as error:
            log.warning("cannot read the site's rules, the old ones stay", extra={"text": str(error)})
            self._failed = True
            return known


def reserved(reservations: Iterable[SlurmReservation], now_s: float, lead_s: float) -> dict[str, tuple[str, float]]:
    """Node -> the reservation that it is kept for, an active one or else the next one that begins within `lead_s`; and its start.

    A reservation that has not begun gets a name that no job can request, because its own jobs have to wait too. Of several
    active reservations the one that began first counts. A reservation of some cores keeps the whole node, because it does not
    tell which GPUs it needs.
    """
    kept: dict[str, tuple[str, float]] = {}
    for each in sorted(reservations, key=lambda each: (not each.active, each.start_s, each.name)):
        if not each.unknown and (each.active or 0 <= each.start_s - now_s <= lead_s):
            for node in each.nodes:
                kept.setdefault(node, (each.name if each.active else f"{each.name}, soon", each.start_s))
    return kept


class Owner(NamedTuple):
    """The owner of a job, as limits see it."""

    user: str
    account: str
    qos: str

    @property
    def partitions(self) -> tuple[str, ...]:
        """Empty: the limits that are read from Slurm know no partitions."""
        return ()

    @classmethod
    def of(cls, job: SlurmJob) -> Self:
        """The owner of this job."""
        return cls(job.user, job.account, job.qos)


def gpu_limits(
    limits: Sequence[SlurmLimit], managed: Mapping[str, SlurmJob], holding: Iterable[SlurmJob]
) -> tuple[GpuLimit, ...]:
    """The limits that apply to managed jobs, less what other jobs hold that counts against them, at least 0.

    As in Slurm, the limit of a QOS replaces the limits of associations for the jobs of that QOS. What those jobs hold still
    counts against the associations.

    Args:
        limits: of QOS and associations.
        managed: jobs that Penstock manages, by id.
        holding: all jobs that hold GPUs, managed or not.
    """
    if not limits:
        return ()
    spared: dict[str, tuple[str, ...]] = {}
    for limit in limits:
        if limit.qos and not limit.each:
            spared[limit.gpu_type] = (*spared.get(limit.gpu_type, ()), limit.qos)
    owners = dict.fromkeys(Owner.of(job) for job in managed.values())
    applying = (_applying(limit, owner, spared.get(limit.gpu_type, ())) for limit in limits for owner in owners)
    found = [limit for limit in dict.fromkeys(applying) if limit is not None]
    held: dict[tuple[Owner, bool], Counter[str]] = {}
    for job in holding:
        held.setdefault((Owner.of(job), job.id in managed), Counter()).update(job.gpus_counted)
    return tuple(dataclasses.replace(limit, gpus=max(limit.gpus - _others(limit, held), 0)) for limit in found)


def _applying(limit: SlurmLimit, owner: Owner, spared: tuple[str, ...]) -> GpuLimit | None:
    """The limit as it applies to this owner's jobs; None: it does not."""
    if limit.qos:
        user, account = (owner.user if limit.each == "user" else ""), (owner.account if limit.each == "account" else "")
        bears = GpuLimit("qos", limit.qos, limit.gpus, limit.gpu_type, user=user, account=account)
        return bears if limit.qos == owner.qos else None
    if owner.account not in limit.accounts or limit.user not in ("", owner.user) or owner.qos in spared:
        return None
    name, *below = limit.accounts
    return GpuLimit("account", name, limit.gpus, limit.gpu_type, tuple(below), limit.user, spared_qos=spared)


def _others(limit: GpuLimit, held: Mapping[tuple[Owner, bool], Counter[str]]) -> int:
    """GPUs in use that count against the limit, except those of managed jobs that it covers."""
    everyone = dataclasses.replace(limit, spared_qos=())
    return sum(
        gpus[limit.gpu_type]
        for (owner, ours), gpus in held.items()
        if everyone.covers(owner) and not (ours and limit.covers(owner))
    )
