"""The site's profiles of what CPU and memory are worth, as they are now: read from its folder, corrected by what jobs report.

A job that Penstock restarts for another share of CPU and memory shows what that one is worth beside the one before: the
GPUs, the batch and the program are the same. The ratio of the two speeds, applied to what the profile says of the share before,
is the speed on the new one (`Sensitivity.corrected`). Corrected profiles are kept in a folder of the daemon's own, so that a
measured file stays as the site wrote it; of two files of a model the newer counts, so that measuring again ends what was
learned.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from penstock_profiles.profiles import ProfileError
from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile, SensitivityStore
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import Job, JobId, JobSpec, Phase, Share

log = logging.getLogger(__name__)

FEWEST, KEPT = 3, 20
"""Reports on each of two shares before they are compared; newest that are kept of each."""

OFF = 0.05
"""A profile that is right within this share is left as it is: steps of one run differ by as much."""

LEARNED = "sensitivities"
"""Folder of corrected profiles, in the daemon's state folder."""

_Run = tuple[str, int, int, int]
"""What must be alike for speeds to be compared: GPU type, GPUs, and both parts of the batch size."""

_Amount = tuple[int, int]
"""CPUs and MB on the job's node."""


def profile_name(spec: JobSpec) -> str:
    """The name of the profile that a job goes by; empty: none."""
    return spec.sensitivity or spec.model_family or ""


class Sensitivities(Mapping[str, SensitivityProfile]):
    """Name -> profile. Looking up may happen in any thread; `refresh` and `learn` are for one.

    Args:
        site: the folder of the site's profiles; None: there are none.
        learned: the folder of corrected ones, which is made when the first is written; None: nothing is kept.

    Raises:
        ConfigError: a file that cannot be read, with its name and what is wrong with it.
    """

    def __init__(self, site: Path | None = None, learned: Path | None = None) -> None:
        self._site = SensitivityStore(site) if site is not None else None
        self._learned = SensitivityStore(learned) if learned is not None else None
        self._files: dict[Path, int] = {}
        self._profiles: dict[str, SensitivityProfile] = {}
        self._speeds: dict[JobId, dict[_Run, dict[_Amount, deque[float]]]] = {}
        if self._site is not None:
            self._files = self._site.files()
            try:
                self._profiles = self._read(self._site)
            except ProfileError as error:
                raise ConfigError(f"[daemon] sensitivities: {error}") from None

    def __getitem__(self, name: str) -> SensitivityProfile:
        return self._profiles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._profiles)

    def __len__(self) -> int:
        return len(self._profiles)

    def refresh(self) -> None:
        """Read the site's folder again if a file is new, gone or changed. If one cannot be read, all stay as they were."""
        if self._site is None or (files := self._site.files()) == self._files:
            return
        self._files = files
        try:
            self._profiles = self._read(self._site)
        except ProfileError as error:
            log.warning("sensitivity profiles stay as they were", extra={"text": str(error)})
            return
        log.info("sensitivity profiles read", extra={"profiles": ",".join(sorted(self._profiles))})

    def _read(self, site: SensitivityStore) -> dict[str, SensitivityProfile]:
        measured = site.dated()
        learned = self._learned.dated() if self._learned is not None else {}
        return {
            name: max(dated, learned.get(name, dated), key=lambda each: each[0])[1] for name, dated in measured.items()
        }

    def learn(self, jobs: Sequence[Job], reports: Mapping[JobId, Sequence[Report]]) -> None:
        """Take in what jobs reported, and correct the profiles of those that have run with several shares.

        Only reports of the present run count, by their times and that of the run's start: an earlier one had another share.
        """
        for gone in self._speeds.keys() - {job.id for job in jobs}:
            del self._speeds[gone]
        for job in jobs:
            share = _given(job)
            profile = self._profiles.get(profile_name(job.spec))
            table = profile.at(share.gpus) if profile is not None and share is not None else None
            if profile is None or share is None or table is None:
                continue
            amount = share.cpus, share.memory_mb or int(table.memory_mb_M[-1] * table.gpus)
            seen, fresh = self._speeds.setdefault(job.id, {}), set()
            for body in _of_this_run(job, reports.get(job.id, ())):
                run = body.gpu_type, body.gpus, body.atomic_batch, body.accumulation_steps
                seen.setdefault(run, {}).setdefault(amount, deque(maxlen=KEPT)).append(body.samples_per_s)
                fresh.add(run)
            better = next((found for run in sorted(fresh) if (found := corrected(table, amount, seen[run]))), None)
            if better is not None:
                self._keep(profile.with_table(better), job, amount)

    def _keep(self, profile: SensitivityProfile, job: Job, amount: _Amount) -> None:
        self._profiles = self._profiles | {profile.model: profile}
        log.info(
            "sensitivity profile corrected",
            extra={"profile": profile.model, "job": job.id, "cpus": amount[0], "memory_mb": amount[1]},
        )
        if self._learned is not None:
            try:
                self._learned.save(profile)
            except ProfileError as error:
                log.warning("corrected sensitivity profile is not kept", extra={"text": str(error)})


def corrected(table: Sensitivity, amount: _Amount, speeds: Mapping[_Amount, Sequence[float]]) -> Sensitivity | None:
    """The table with what a job's speeds (samples/s, by CPUs and MB) say of one share, beside the one it reported on most.

    None if there is nothing to compare with yet, or the table is right within `OFF`. That other share keeps its speed.
    """
    others = {other: seen for other, seen in speeds.items() if other != amount and len(seen) >= FEWEST}
    if len(speeds.get(amount, ())) < FEWEST or not others:
        return None
    before = max(others, key=lambda other: (len(others[other]), other))
    base, now = table.speed(*before), table.speed(*amount)
    if base <= 0:
        return None
    speed = base * median(speeds[amount]) / median(others[before])
    # More is at least as fast, so what disturbed a run does not raise or lower what it is compared with.
    if amount[0] >= before[0] and amount[1] >= before[1]:
        speed = max(speed, base)
    elif amount[0] <= before[0] and amount[1] <= before[1]:
        speed = min(speed, base)
    if speed <= 0 or abs(speed - now) <= OFF * now:
        return None
    return table.corrected(*amount, speed)


def _given(job: Job) -> Share | None:
    """What a job runs with on its only node, if Penstock gave it."""
    runs = job.phase is Phase.RUNNING and job.allocation is not None and len(job.allocation.shares) == 1
    share = job.allocation.shares[0] if runs and job.allocation is not None else None
    return share if share is not None and share.cpus else None


def _of_this_run(job: Job, reports: Sequence[Report]) -> Iterator[Observation]:
    """What was measured on what the job holds, not on what it held before."""
    for report in reports:
        body, held = report.body, job.allocation
        if isinstance(body, Observation) and held is not None and job.started_s is not None:
            there = (body.gpu_type, body.nodes, body.gpus) == (held.gpu_type, len(held.shares), held.gpus)
            if there and report.time_s >= job.started_s:
                yield body
