"""The fields of one record in an answer of Slurm, and what of them cannot be read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from penstock_slurm.gateway.base import Unknown

Value = TypeVar("Value")

ARGUMENT = re.compile(r"[A-Za-z0-9_.,:=/+@-]+")
"""An argument that scontrol's prompt takes as it is."""

NOTHING = frozenset({"", "(null)", "N/A", "NONE", "None", "Unknown", "n/a"})
"""How Slurm's commands write that there is no value."""

NO_LIMIT = frozenset({"UNLIMITED", "NOT_SET", "INVALID", "Partition_Limit"}) | NOTHING
"""How Slurm's commands write a duration that they do not have."""


class Fields:
    """One record: the text of each field by its name in Slurm.

    A value that cannot be read is noted in `unknown`, and the caller's stand-in takes its place, so that one such value
    neither stops the reading of other records nor passes for something else.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        self.unknown: list[Unknown] = []

    def read(self, name: str, convert: Callable[[str], Value], otherwise: Value) -> Value:
        """The field as `convert` reads it. If that raises ValueError or KeyError, or there is no such field: `otherwise`."""
        try:
            return convert(self.values[name])
        except (ValueError, KeyError):
            if all(each.field != name for each in self.unknown):
                self.unknown.append(Unknown(name, self.values.get(name)))
            return otherwise

    def number(self, name: str) -> int:
        """A whole number; 0 if it cannot be read."""
        return self.read(name, int, 0)

    def word(self, name: str, known: Collection[str]) -> str:
        """The field as it is. Noted as unknown if it is none of the `known` words; "" if it is missing."""
        found = self.values.get(name)
        if found not in known and all(each.field != name for each in self.unknown):
            self.unknown.append(Unknown(name, found))
        return found or ""

    def text(self, name: str) -> str:
        """The field as it is, which can be any text; "" for Slurm's `(null)`."""
        return self.read(name, text, "")


def text(field: str) -> str:
    """A field that can hold any text; "" for Slurm's `(null)`."""
    return "" if field == "(null)" else field


def number_or_none(field: str) -> int | None:
    """A whole number; None where Slurm has none. Raises ValueError."""
    return None if field in NOTHING else int(field)


def limit_or_none(field: str) -> int | None:
    """A whole number; None where Slurm has no limit. Raises ValueError."""
    return None if field in NO_LIMIT else int(field)


def number_or_one(field: str) -> int:
    """A whole number; 1 where Slurm has none. Raises ValueError."""
    return 1 if field in NOTHING else int(field)


SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([KMGTP]?)")


def megabytes(field: str) -> int:
    """MB as Slurm counts them of `2500M`, `3G` or `1.50T`, rounded up; 0 where Slurm has none. Raises ValueError."""
    if field in NOTHING:
        return 0
    match = SIZE.fullmatch(field)
    if match is None:
        raise ValueError(f"{field!r} is no amount of memory")
    return math.ceil(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1))


def time_s(field: str) -> float | None:
    """Seconds since the epoch, as Slurm prints times with SLURM_TIME_FORMAT=%s; None where it has none. Raises ValueError."""
    return None if field in NOTHING else float(field)


DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")

YEAR_S = 365 * 86_400.0
"""The limit that Slurm's backfill scheduler writes into a job without a time limit when it starts the job."""


def time_limit_s(field: str) -> float | None:
    """A job's time limit, seconds; None for no limit, the partition's, or `YEAR_S`. Raises ValueError."""
    limit_s = duration_s(field)
    return None if limit_s == YEAR_S else limit_s


def duration_s(field: str) -> float | None:
    """Seconds of `1-02:03:04`, `02:03:04` or `5:00` (minutes and seconds); None for no limit or none that is set.

    Raises:
        ValueError: other text.
    """
    match = DURATION.fullmatch(field)
    if match is None:
        if field in NO_LIMIT:
            return None
        raise ValueError(f"{field!r} is no duration")
    days, hours, minutes, seconds = match.groups()
    return float(((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes)) * 60 + int(seconds))


def flag(field: str) -> bool:
    """True for `1`, False for `0`. Raises KeyError."""
    return {"1": True, "0": False}[field]
