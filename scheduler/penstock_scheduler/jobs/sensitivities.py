"""The site's sensitivity profiles: how the speed of jobs depends on CPU and memory. Reports of jobs correct them.

When Penstock restarts a job with another share of CPU and memory, GPUs, batch size and program stay the same. The ratio of the
two measured speeds, times the profile's speed for the old share, is the speed for the new share (`Sensitivity.corrected`).
Corrected profiles go to a folder of the daemon's own, so the site's files stay as they are. Of two files for one model the newer
one counts, so a new measurement replaces what was learned.
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
from penstock_scheduler.model import Job, JobId, JobSpec, Phase, Share
from penstock_scheduler.people.errors import ConfigError

log = logging.getLogger(__name__)

FEWEST, KEPT = 3, 20
"""Reports needed on each of two shares before they are compared; reports that are kept of each."""

OFF = 0.05
"""Relative error below which a profile is not corrected: the steps of one run differ by as much."""

LEARNED = "sensitivities"
"""Folder of corrected profiles, in the daemon's state folder."""

_Run = tuple[str, int, int, int]
"""What must be equal to compare speeds: GPU type, GPUs, and both parts of the batch size."""

_Amount = tuple[int, int]
"""CPUs and MB on the job's node."""


def profile_name(spec: JobSpec) -> str:
    """The name of the profile for a job; empty: none."""
    return spec.sensitivity or spec.model_family or ""


class Sensitivities(Mapping[str, SensitivityProfile]):
    """Name -> profile. Any thread may look up a profile; only one thread may call `refresh` and `learn`.

    Args:
        site: the folder of the site's profiles; None: there are none.
        learned: the folder of corrected profiles, created with the first one; None: they are not saved.

    Raises:
        ConfigError: a file cannot be read. The message names the file and the error.
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
        """Read the site's folder again if a file is new, gone or changed. If a file cannot be read, all profiles stay."""
        if self._site is None or (files := self._site.files()) == self._files:
            return
        self._files = files
        try:
            self._profiles = self._read(self._site)
        except ProfileError as error:
            log.warning("sensitivity profiles not read, the old ones stay", extra={"text": str(error)})
            return
        log.info("sensitivity profiles read", extra={"profiles": ",".join(sorted(self._profiles))})

    def _read(self, site: SensitivityStore) -> dict[str, SensitivityProfile]:
        measured = site.dated()
        learned = self._learned.dated() if self._learned is not None else {}
        return {
            name: max(dated, learned.get(name, dated), key=lambda each: each[0])[1] for name, dated in measured.items()
        }

    def learn(self, jobs: Sequence[Job], reports: Mapping[JobId, Sequence[Report]]) -> None:
        """Correct the profiles of jobs that have run with several shares, by what they reported.

        Only reports since the start of the present run count, because an earlier run had another share.
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
                log.warning("corrected sensitivity profile not saved", extra={"text": str(error)})


def corrected(table: Sensitivity, amount: _Amount, speeds: Mapping[_Amount, Sequence[float]]) -> Sensitivity | None:
    """The table, corrected for one share by comparison with the share that the job reported on most.

    Args:
        table: the profile's table.
        amount: the share to correct, CPUs and MB.
        speeds: share -> measured speeds, samples/s.

    Returns:
        None if there is nothing to compare with yet, or the table is right within `OFF`. The other share keeps its speed.
    """
    others = {other: seen for other, seen in speeds.items() if other != amount and len(seen) >= FEWEST}
    if len(speeds.get(amount, ())) < FEWEST or not others:
        return None
    before = max(others, key=lambda other: (len(others[other]), other))
    base, now = table.speed(*before), table.speed(*amount)
    if base <= 0:
        return None
    speed = base * median(speeds[amount]) / median(others[before])
    # More CPU and memory is at least as fast; anything else is a disturbance of the measurement.
    if amount[0] >= before[0] and amount[1] >= before[1]:
        speed = max(speed, base)
    elif amount[0] <= before[0] and amount[1] <= before[1]:
        speed = min(speed, base)
    if speed <= 0 or abs(speed - now) <= OFF * now:
        return None
    return table.corrected(*amount, speed)


def _given(job: Job) -> Share | None:
    """The share of a job that runs on one node, if Penstock chose its CPUs and memory."""
    runs = job.phase is Phase.RUNNING and job.allocation is not None and len(job.allocation.shares) == 1
    share = job.allocation.shares[0] if runs and job.allocation is not None else None
    return share if share is not None and share.cpus else None


def _of_this_run(job: Job, reports: Sequence[Report]) -> Iterator[Observation]:
    """Measurements on the GPUs that the job holds now."""
    for report in reports:
        body, held = report.body, job.allocation
        if isinstance(body, Observation) and held is not None and job.started_s is not None:
            there = (body.gpu_type, body.nodes, body.gpus) == (held.gpu_type, len(held.shares), held.gpus)
            if there and report.time_s >= job.started_s:
                yield body
