"""How a job's speed depends on the CPUs and the memory that come with its GPUs, after Synergy (Mohan et al., OSDI '22).

This is optimistic profiling, section 3.1. The job is measured with all memory on a few numbers of CPUs (`find_knee`).
Its speed with less memory follows from the size of its data set, the part of it that a MinIO cache holds, and the
bandwidth of the storage (`with_less_memory`). Reports of running jobs correct the table (`Sensitivity.corrected`).

A MinIO cache (Mohan et al., VLDB '21) holds a fixed part of the data set. Every epoch hits it equally often, so less
memory costs the same share of speed in every epoch, where a page cache would thrash.

Axes: C numbers of CPUs for each GPU, M amounts of memory for each GPU, both ascending.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from penstock_profiles.files import save_whole
from penstock_profiles.profiles import ProfileError

SATURATED = 0.02
"""A speed within this share of the best counts as the best: repeated measurements of one point differ by this much."""

SAME = 0.10
"""Speeds that differ by less than this share are equal for the search, as in the authors' profiler."""

MOST_RUNS = 8
"""The most runs of a search for the knee."""

NEWS = 0.5
"""Weight of a new observation, against the table's value for the same share."""


class Option(NamedTuple):
    """An amount of CPUs and memory that is worth requesting, in total for a job on one node."""

    cpus: int
    memory_mb: int
    speed: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The speed of a job on one number of GPUs, by its CPUs and memory.

    Attributes:
        gpus: the number of GPUs, >= 1.
        cpus_C: CPUs for each GPU, > 0.
        memory_mb_M: memory for each GPU, MB, > 0.
        speed_CM: speed, >= 0, in any unit. 0: the amounts are not available, or the job does not run with them.

    Raises:
        ProfileError: a shape or a value is impossible.
    """

    gpus: int
    cpus_C: tuple[float, ...]
    memory_mb_M: tuple[float, ...]
    speed_CM: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("cpus_C", self.cpus_C), ("memory_mb_M", self.memory_mb_M)):
            if not axis or axis[0] <= 0 or any(b <= a for a, b in itertools.pairwise(axis)):
                raise ProfileError(f"{name}={axis}: give amounts above 0 in ascending order, each once")
        if len(self.speed_CM) != len(self.cpus_C) or any(len(row) != len(self.memory_mb_M) for row in self.speed_CM):
            raise ProfileError(
                f"speed_CM must have {len(self.cpus_C)} rows, one for each number of CPUs, of {len(self.memory_mb_M)}"
                " speeds each"
            )
        if self.gpus < 1 or not all(math.isfinite(speed) and speed >= 0 for row in self.speed_CM for speed in row):
            raise ProfileError(f"gpus={self.gpus} must be at least 1, and every speed a number of at least 0")
        if not any(speed > 0 for row in self.speed_CM for speed in row):
            raise ProfileError("speed_CM is 0 everywhere: a job that never runs has no profile; measure it again")

    def speed(self, cpus: float, memory_mb: float) -> float:
        """Speed with these CPUs and MB in total: that of the largest measured amounts within them, 0 if there are none.

        So it is a lower bound for amounts that were not measured.
        """
        row = bisect.bisect_right(self.cpus_C, cpus / self.gpus + 1e-9) - 1
        column = bisect.bisect_right(self.memory_mb_M, memory_mb / self.gpus + 1e-9) - 1
        if row < 0 or column < 0:
            return 0.0
        # A speed of 0 marks amounts that no server has: the speed with smaller amounts applies.
        return max(max(line[: column + 1]) for line in self.speed_CM[: row + 1])

    def options(self) -> tuple[Option, ...]:
        """The amounts for which no smaller amounts are as fast, by ascending CPUs, then memory."""
        return _options(self)

    def demand(self, cpus: float = math.inf, memory_mb: float = math.inf) -> Option | None:
        """The fewest CPUs, and with these the least memory, with which the job is as fast as possible within these
        bounds.

        None if no amounts within them were measured.
        """
        within = [option for option in self.options() if option.cpus <= cpus and option.memory_mb <= memory_mb]
        if not within:
            return None
        enough = max(option.speed for option in within) * (1 - SATURATED)
        return next(option for option in within if option.speed >= enough)

    def corrected(self, cpus: float, memory_mb: float, speed: float) -> Sensitivity:
        """The table with a reported speed, in its unit, for these CPUs and MB in total.

        The point is added, or averaged with the present value (`NEWS`). More CPUs or memory then count as at least as
        fast, and less as at most as fast.

        Raises:
            ProfileError: a number is not above 0.
        """
        if not all(math.isfinite(value) and value > 0 for value in (cpus, memory_mb, speed)):
            raise ProfileError(f"cpus={cpus} memory_mb={memory_mb} speed={speed}: report numbers above 0")
        c, m = cpus / self.gpus, memory_mb / self.gpus
        known = c in self.cpus_C and m in self.memory_mb_M
        cpus_C = tuple(sorted({*self.cpus_C, c}))
        memory_mb_M = tuple(sorted({*self.memory_mb_M, m}))
        row, column = cpus_C.index(c), memory_mb_M.index(m)
        before = self.speed(cpus, memory_mb)
        news = NEWS * speed + (1 - NEWS) * before if known and before > 0 else speed
        table = [[self.speed(each_c * self.gpus, each_m * self.gpus) for each_m in memory_mb_M] for each_c in cpus_C]
        for i, line in enumerate(table):
            for j, old in enumerate(line):
                if i >= row and j >= column:
                    line[j] = max(old, news)
                elif i <= row and j <= column:
                    line[j] = min(old, news)
        table[row][column] = news
        return dataclasses.replace(
            self, cpus_C=cpus_C, memory_mb_M=memory_mb_M, speed_CM=tuple(tuple(line) for line in table)
        )


@lru_cache(maxsize=4096)
def _options(table: Sensitivity) -> tuple[Option, ...]:
    every = sorted(
        Option(math.ceil(cpus * table.gpus - 1e-9), math.ceil(memory * table.gpus - 1e-9), speed)
        for cpus, line in zip(table.cpus_C, table.speed_CM, strict=True)
        for memory, speed in zip(table.memory_mb_M, line, strict=True)
        if speed > 0
    )
    best: list[Option] = []
    for option in every:
        if all(option.speed > other.speed for other in best if other.memory_mb <= option.memory_mb):
            best.append(option)
    return tuple(best)


@dataclass(frozen=True, slots=True)
class SensitivityProfile:
    """The tables of a model, one for each number of GPUs on which it was measured."""

    model: str
    tables: tuple[Sensitivity, ...]
    """By ascending number of GPUs, each number once."""

    def __post_init__(self) -> None:
        counts = [table.gpus for table in self.tables]
        if not counts or counts != sorted(set(counts)):
            raise ProfileError(f"the profile of {self.model!r} has tables for {counts} GPUs; give each once, ascending")

    def at(self, gpus: int) -> Sensitivity | None:
        """The table for this number of GPUs; None if it was not measured: speeds do not simply scale with GPUs."""
        return next((table for table in self.tables if table.gpus == gpus), None)

    def with_table(self, table: Sensitivity) -> SensitivityProfile:
        """The profile with this table added, in place of one for the same number of GPUs."""
        others = [other for other in self.tables if other.gpus != table.gpus]
        return dataclasses.replace(self, tables=tuple(sorted((*others, table), key=lambda each: each.gpus)))


def find_knee(
    measure: Callable[[int], float], most: int, *, same: float = SAME, runs: int = MOST_RUNS
) -> dict[int, float]:
    """Measure a job's speed on a few numbers of CPUs, among them the knee: the smallest number with which it is fast.

    The number is halved, beginning with `most`, while the speed stays the same. Then the interval between the last
    number that is fast and the first that is not is halved until they are neighbours. Runs that are left measure the
    smallest numbers and the middle of the slope. For 24 CPUs, this takes at most 8 runs. The authors' profiler removes
    one CPU at a time once halving has cost speed, which takes up to 13 runs.

    Args:
        measure: returns the speed with a number of CPUs, > 0, such as in samples/s. It may be noisy within `same`.
        most: largest number of CPUs, >= 1.
        same: share of the speed with `most` CPUs that counts as no loss.
        runs: the most measurements.

    Returns:
        Number of CPUs -> speed, for each that was measured.
    """
    if most < 1 or runs < 2:
        raise ProfileError(f"most={most} runs={runs}: a search needs at least 1 CPU and 2 runs")
    speeds = {most: measure(most)}
    enough = speeds[most] * (1 - same)

    def fast(cpus: int) -> bool:
        if cpus not in speeds:
            speeds[cpus] = measure(cpus)
        return speeds[cpus] >= enough

    knee, slow = most, 0
    while knee > 1 and len(speeds) < runs and slow == 0:
        if fast(knee // 2):
            knee //= 2
        else:
            slow = knee // 2
    while slow > 0 and knee - slow > 1 and len(speeds) < runs:
        middle = (slow + knee) // 2
        if fast(middle):
            knee = middle
        else:
            slow = middle
    for cpus in (1, knee // 2):
        if cpus >= 1 and cpus not in speeds and len(speeds) < runs:
            speeds[cpus] = measure(cpus)
    return dict(sorted(speeds.items()))


def knee(speeds: Mapping[int, float], same: float = SAME) -> int:
    """The smallest number of CPUs that is as fast as the largest, within `same`."""
    enough = speeds[max(speeds)] * (1 - same)
    return min(cpus for cpus, speed in speeds.items() if speed >= enough)


def with_less_memory(
    gpus: int,
    samples_per_s: Mapping[int, float],
    memory_mb: Sequence[float],
    *,
    dataset_mb: float,
    dataset_samples: float,
    storage_mb_s: float,
    process_mb: float = 0.0,
    cache_mb_s: float = math.inf,
) -> Sensitivity:
    """The whole table, from measurements with all memory and the model of a MinIO cache.

    An epoch takes as long as computing, which was measured, or fetching, whichever is longer (Synergy, section 3.1):
    cache / cache_mb_s + (dataset - cache) / storage_mb_s, with cache = memory - process_mb, at most the data set.

    Args:
        gpus: GPUs of the job.
        samples_per_s: CPUs in total -> measured speed with the data set in memory.
        memory_mb: amounts of memory in total, MB, ascending.
        dataset_mb: size of the data set, MB, >= 0.
        dataset_samples: number of samples in it, > 0.
        storage_mb_s: the job's bandwidth from the storage, MB/s, > 0.
        process_mb: memory that the job needs besides its cache, MB. With less, it does not run.
        cache_mb_s: bandwidth from the cache, MB/s.
    """
    if min(dataset_samples, storage_mb_s, cache_mb_s) <= 0 or min(dataset_mb, process_mb) < 0:
        raise ProfileError(
            f"dataset_mb={dataset_mb} dataset_samples={dataset_samples} storage_mb_s={storage_mb_s}: only the size may"
            " be 0"
        )

    def speed(compute: float, memory: float) -> float:
        if memory < process_mb:
            return 0.0
        cached = min(dataset_mb, memory - process_mb)
        fetch_s = cached / cache_mb_s + (dataset_mb - cached) / storage_mb_s
        return min(compute, dataset_samples / fetch_s) if fetch_s > 0 else compute

    numbers = sorted(samples_per_s)
    return Sensitivity(
        gpus,
        tuple(cpus / gpus for cpus in numbers),
        tuple(memory / gpus for memory in memory_mb),
        tuple(tuple(speed(samples_per_s[cpus], memory) for memory in memory_mb) for cpus in numbers),
    )


class SensitivityStore:
    """Profiles by model family, one JSON file each in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, SensitivityProfile]:
        """All profiles by model. A folder that does not exist has none.

        Raises:
            ProfileError: a file cannot be read; the message has its name and the cause.
        """
        return {name: profile for name, (_, profile) in self.dated().items()}

    def dated(self) -> dict[str, tuple[int, SensitivityProfile]]:
        """As `load`, with the time of each file's last change, ns since 1970."""
        read = [(written_ns, read_profile(path)) for path, written_ns in self.files().items()]
        return {profile.model: (written_ns, profile) for written_ns, profile in read}

    def files(self) -> dict[Path, int]:
        """The files by name, with the time of each file's last change, ns since 1970."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found[path] = path.stat().st_mtime_ns
        return found

    def check(self, model: str) -> None:
        """Raises ProfileError if the model cannot name a file."""
        if not model or not all(letter.isalnum() or letter in "_+.-" for letter in model):
            raise ProfileError(f"model {model!r} cannot name a file; use letters, digits, '_', '+', '.' and '-'")

    def save(self, profile: SensitivityProfile) -> Path:
        """Save a profile, in place of an older one. Raises ProfileError if it cannot be written."""
        self.check(profile.model)
        path = self._folder / f"{profile.model}.json"
        try:
            save_whole(path, json.dumps({"version": 1, **dataclasses.asdict(profile)}, indent=1) + "\n")
        except OSError as error:
            raise ProfileError(
                f"{path} cannot be written: {error.strerror}; choose a folder that you may write"
            ) from None
        return path


def read_profile(path: Path) -> SensitivityProfile:
    """The profile in a file. Raises ProfileError, which names the file and the cause."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProfileError(f"{path} is not JSON: {error}; measure the job again") from None
    try:
        if document["version"] != 1:
            raise ProfileError(f"version {document['version']} is not known here; update Penstock")
        return SensitivityProfile(document["model"], tuple(_table(table) for table in document["tables"]))
    except (KeyError, TypeError, ValueError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else error
        raise ProfileError(f"{path}: {what}") from None


def _table(fields: Mapping[str, Any]) -> Sensitivity:
    def numbers(values: Iterable[Any]) -> tuple[float, ...]:
        return tuple(float(value) for value in values)

    return Sensitivity(
        int(fields["gpus"]),
        numbers(fields["cpus_C"]),
        numbers(fields["memory_mb_M"]),
        tuple(numbers(line) for line in fields["speed_CM"]),
    )
