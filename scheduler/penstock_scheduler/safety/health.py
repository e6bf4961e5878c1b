"""Whether the daemon can do its work: what each step of the round loop did last, what the disks have left, and what is wrong.

`LoopHealth` notes the loop's steps, also one that hangs. `problems` and `warnings` judge what was noted; they are pure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from penstock_scheduler.model.job import in_order
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import data_size, duration

MIB = 1024.0 * 1024.0
FULL_BYTES = 1024 * 1024
"""A disk with less free space counts as full: the record of a round of a large cluster takes as much."""


MOST_NAMED = 5
"""Jobs that a warning names."""
SILENT = "no report of a job has come"
"""How the warning of silent jobs begins."""
UNHEARD = "runs that report nothing, although their scripts should"
"""How the warning of such runs begins."""
UNSPOOLED = "running jobs that cannot report"
"""How the warning of jobs begins that job_submit.lua has sent to another spool, or to none."""
INCOMPLETE = "the view of the cluster is incomplete"
"""How the warning of an incomplete observation begins."""
PROTECTED = "the cloud is in protected mode, so no job may leave"
"""How the warning of protected mode begins."""
CLAIMED = "jobs that said more of their speed or their end than they have shown"
"""How the warning of claims that do not hold begins."""
RESUME = "when the cause is gone, run `penstock cloud resume`"
"""How protected mode ends."""


class HealthSettings(BaseModel):
    """Section `[health]` of the settings file: what `penstock doctor`, /v1/ready, metrics and notices call wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    disk_free_mb: NonNegativeFloat = Field(
        default=2048.0, description="Warn if the disk of the store or of the spool has less free space."
    )

    late_s: ClassVar[float] = 15.0
    """The daemon is not ready if the cluster has not been observed, or the plan has not been applied, for this long, s: as
    long as one command of Slurm's may take."""

    late_rounds: ClassVar[float] = 5.0
    """The daemon is not ready if no round was decided for this many times [daemon] round_s, unless it is paused. Slower
    rounds are late, not stuck."""

    disk_days: ClassVar[float] = 7.0
    """Warn if the disk of the store or of the spool would be full in less time at its present growth, days: a week leaves
    time to act after a holiday."""

    reports_s: ClassVar[float] = 1800.0
    """Warn if jobs that have reported still run and no report of any job has come for this long, s. A single job may be
    silent while it evaluates or compiles, not all of them for half an hour."""

    check_s: ClassVar[float] = 10.0
    """Time between two checks of the disks, s: shorter than `late_s`, so a disk that hangs is seen in time."""

    def round_late_s(self, round_s: float) -> float:
        """How long no round may be decided, seconds."""
        return max(self.late_rounds * round_s, self.late_s)


class StepName(StrEnum):
    """The steps of a tick, in order."""

    OBSERVE = "observe"
    """Read the cluster."""
    TELL = "tell"
    """Tell the API, the samples and the notices of the observation."""
    REPORTS = "reports"
    """Store what jobs reported."""
    DECIDE = "decide"
    """Decide a round and save it. Not every tick does."""
    APPLY = "apply"
    """Take each unfinished action of the plan one step further."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step of the round loop did last. Times are in seconds since 1970."""

    name: StepName
    began_s: float | None = None
    """Since when the step has been going on; None: it is not."""
    done_s: float | None = None
    """When it last succeeded."""
    round: int | None = None
    """The round that it then decided or applied."""
    error: str = ""
    """Why it last failed; empty: it has not since the daemon started."""
    error_s: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the newest attempt that ended failed."""
        return self.error_s is not None and (self.done_s is None or self.error_s > self.done_s)

    def late(self, since_s: float, now_s: float, patience_s: float) -> bool:
        """Whether the step hangs or fails, and last succeeded, or could first have, longer ago than `patience_s`.

        Args:
            since_s: when the daemon started.
            now_s: now.
            patience_s: how long it may take.
        """
        if self.began_s is not None and now_s - self.began_s > patience_s:
            return True
        return self.failed and now_s - (since_s if self.done_s is None else self.done_s) > patience_s


class LoopHealth:
    """What each step of the loop did last. The loop's thread writes it, others read it."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.started_s = now_s()
        self._lock = threading.Lock()
        self._records = {name: StepRecord(name) for name in StepName}

    @contextmanager
    def step(self, name: StepName, round_: int | None = None) -> Iterator[None]:
        """Note that a step begins, and how it ends.

        Args:
            name: the step.
            round_: the round that it decides or applies.
        """
        last = self._records[name]
        self._note(StepRecord(name, self._now_s(), last.done_s, last.round, last.error, last.error_s))
        try:
            yield
        except BaseException as error:
            text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}; see the daemon's log"
            self._note(StepRecord(name, None, last.done_s, last.round, text, self._now_s()))
            raise
        self._note(StepRecord(name, None, self._now_s(), round_, last.error, last.error_s))

    def steps(self) -> tuple[StepRecord, ...]:
        """The records, in the order of a tick."""
        with self._lock:
            return tuple(self._records.values())

    @property
    def under_way(self) -> StepName | None:
        """The step that is going on; None: none is."""
        return next((step.name for step in self.steps() if step.began_s is not None), None)

    def _note(self, record: StepRecord) -> None:
        with self._lock:
            self._records[record.name] = record


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """What is known of the place of the store or the spool. Times are in seconds since 1970."""

    what: str
    """Whose place it is: "store" or "spool"."""
    where: str
    """A path, or a database's URL without password."""
    began_s: float | None = None
    """Since when the present check has been going on; None: none is."""
    checked_s: float | None = None
    """When the newest check ended."""
    error: str = ""
    """Why nothing could be written at the newest check; empty: it could."""
    error_s: float | None = None
    """When a check last failed, also if a later one succeeded."""
    last_error: str = ""
    free_bytes: int | None = None
    """Free space of its file system; None: not known, as on a database server."""
    used_bytes: int | None = None
    """What the store itself takes; None: not known."""
    foreign: str = ""
    """What is there and does not belong there, with the remedy; empty: nothing."""
    days_left: float | None = None
    """Days until the file system is full at its present growth; None: it does not grow, or has not been seen for long."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known of the daemon's health at one time."""

    now_s: float
    started_s: float
    steps: Sequence[StepRecord]
    disks: Sequence[DiskRecord]
    paused: bool
    round_s: float
    report_s: float | None
    """When the newest report came; None: none has since the daemon started."""
    reporting: int
    """Running jobs that have reported since the daemon started."""
    incomplete: str = ""
    """What the newest observation of the cluster lacks; empty: nothing."""
    cloud_protected: str = ""
    """Why the cloud launches nothing until an admin says so; empty: it may."""
    cloud_troubles: tuple[str, ...] = ()
    """What an admin must put right in the cloud, with the remedy."""
    differs: str = ""
    """How the plan and the cluster have differed for too long; empty: they do not."""
    none_starts: str = ""
    """That Slurm has started no job for several rounds, although GPUs are free. Empty if it has."""
    unheard: Sequence[str] = ()
    """Jobs with such a run, which has gone on for longer than `HealthSettings.reports_s`; see `UNHEARD`."""
    unspooled: Sequence[str] = ()
    """Running jobs that have not reported and were not told to report to the daemon's spool."""
    doubted: int = 0
    """Jobs of which a claim does not hold (`JobFacts.doubts`)."""


def problems(found: Findings, settings: HealthSettings) -> list[str]:
    """Why the daemon cannot do its work, as sentences with the remedy; empty: it can."""
    steps = [text for step in found.steps if (text := step_problem(step, found, settings))]
    steps = steps or _stands_still(found, settings)
    return steps + [text for disk in found.disks if (text := disk_problem(disk, found.now_s, settings))]


def step_problem(step: StepRecord, found: Findings, settings: HealthSettings) -> str:
    """Why a step of the round loop hangs or fails; empty: it does neither, or not for long."""
    decides = step.name is StepName.DECIDE
    if (decides and found.paused) or not step.late(
        found.started_s, found.now_s, settings.round_late_s(found.round_s) if decides else settings.late_s
    ):
        return ""
    what, means = _FAILS[step.name]
    since_s = found.started_s if step.done_s is None else step.done_s
    why = f": {step.error}" if step.failed else ""
    return f"{what.format(duration(found.now_s - since_s))}{why}. {means}"


def _stands_still(found: Findings, settings: HealthSettings) -> list[str]:
    """What does not happen although no step fails or hangs."""
    steps = {step.name: step for step in found.steps}
    if steps[StepName.OBSERVE].done_s is None:
        return ["the cluster has not been observed yet; see the daemon's log if this stays so"]
    if any(step.began_s is not None for step in found.steps):
        return []
    idle_s = found.now_s - max(max(step.done_s or 0.0, step.error_s or 0.0) for step in found.steps)
    if idle_s > settings.late_s:
        return [f"the round loop has done nothing for {duration(idle_s)}; see the daemon's log"]
    decided_s = steps[StepName.DECIDE].done_s
    age_s = found.now_s - (found.started_s if decided_s is None else decided_s)
    if not found.paused and age_s > settings.round_late_s(found.round_s):
        return [f"no round was decided for {duration(age_s)}, although none failed; see the daemon's log"]
    return []


_FAILS = {
    StepName.OBSERVE: ("the cluster has not answered for {}", "Running jobs continue; check it (Slurm: scontrol ping)"),
    StepName.TELL: (
        "a part of penstockd could not be told of an observation for {}",
        "Rounds go on, and what the API shows may be old; see the daemon's log, and please report this as a bug",
    ),
    StepName.REPORTS: ("no report of a job could be stored for {}", "Reports are kept until the store is back"),
    StepName.DECIDE: ("no round could be decided for {}", "Running jobs continue"),
    StepName.APPLY: ("the plan could not be applied for {}", "Running jobs continue"),
}
"""Step -> what is wrong, and what it means."""


def disk_problem(disk: DiskRecord, now_s: float, settings: HealthSettings) -> str:
    """Why nothing can be written to a disk; empty: something can."""
    if disk.began_s is not None and now_s - disk.began_s > settings.late_s:
        return f"the {disk.what} ({disk.where}) has not answered a write for {duration(now_s - disk.began_s)}"
    if disk.error:
        return f"the {disk.what} cannot be written: {disk.error}"
    if disk.free_bytes is not None and disk.free_bytes < FULL_BYTES:
        return f"the disk of the {disk.what} ({disk.where}) is full; free some space, running jobs are not affected"
    return ""


def disk_warning(disk: DiskRecord, settings: HealthSettings) -> str:
    """That a disk will be full soon, or has what does not belong there; empty: neither."""
    return "; ".join(text for text in (_full_soon(disk, settings), disk.foreign) if text)


def _full_soon(disk: DiskRecord, settings: HealthSettings) -> str:
    if disk.free_bytes is None:
        return ""
    soon = disk.days_left is not None and disk.days_left < settings.disk_days
    if not soon and disk.free_bytes >= settings.disk_free_mb * MIB:
        return ""
    left = "" if disk.days_left is None else f", full in about {duration(disk.days_left * 86400)} at its present growth"
    return (
        f"the {disk.what} ({disk.where}) has {data_size(disk.free_bytes)} free{left}; free some space before penstockd can "
        "store nothing"
    )


def reports_warning(found: Findings, settings: HealthSettings) -> str:
    """That no job reports any more; empty: jobs do, or none has."""
    if found.report_s is None or not found.reporting or found.now_s - found.report_s <= settings.reports_s:
        return ""
    return (
        f"{SILENT} for {duration(found.now_s - found.report_s)}, although {found.reporting} running jobs "
        "have reported before; check the spool on their nodes"
    )


def _named(jobs: Sequence[str]) -> str:
    return ", ".join(sorted(jobs, key=in_order)[:MOST_NAMED]) + (" and others" if len(jobs) > MOST_NAMED else "")


def warnings(found: Findings, settings: HealthSettings) -> list[str]:
    """What will become a problem, as sentences with the remedy."""
    told = [disk_warning(disk, settings) for disk in found.disks if not disk_problem(disk, found.now_s, settings)]
    told.append(reports_warning(found, settings))
    if found.unspooled:
        told.append(
            f"{UNSPOOLED}: {_named(found.unspooled)}; their PENSTOCK_SPOOL is not this penstockd's spool, because "
            "penstock_site.lua lacks it or names another one: run `penstock slurm sync`, and submit the jobs again"
        )
    if found.unheard:
        told.append(
            f"{UNHEARD}: of {_named(found.unheard)}, for {duration(settings.reports_s)} or longer; look at the job's output, and "
            "whether its node has the spool (penstock slurm check --submit)"
        )
    told += [found.differs, found.none_starts]
    told.append(f"{INCOMPLETE}: {found.incomplete}" if found.incomplete else "")
    told.append(f"{PROTECTED}: {found.cloud_protected}; {RESUME}" if found.cloud_protected else "")
    if found.doubted:
        told.append(
            f"{CLAIMED}: {found.doubted}; they gain nothing by it. The daemon's log names each one ('a claim does not hold'), "
            "and `penstock explain JOB` says what is wrong"
        )
    return [text for text in (*told, *found.cloud_troubles) if text]
