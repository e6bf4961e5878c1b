"""Estimates of when jobs start and end, for clients, and how to say them. Times are in seconds since 1970."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from penstock_scheduler.people.units import duration

OLD_S = 600.0
"""From this age on, the words say how old an estimate is."""


class TimeRange(BaseModel):
    """A range of times that contains what happens with the estimate's probability."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    from_s: float
    to_s: float | None
    """None: it may be later than estimates look ahead, which is three days."""


class JobEstimate(BaseModel):
    """When a job is expected to start and to end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    at_s: float
    """When the round was decided from which this was estimated."""
    probability: float = 0.8
    """With which each of the two ranges contains what happens."""
    start: TimeRange | None = None
    """Of a job that holds no GPUs; None: it holds some, or its start is not known."""
    end: TimeRange | None = None
    """None: not known."""
    unknown: str = ""
    """Why the end, or the start of a job that waits, is not known, as a sentence without a capital; empty: it is."""


class NewJobs(BaseModel):
    """When jobs that are submitted now are expected to start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpus: int
    """Of jobs that need so many GPUs, of any type."""
    at_s: float
    """When the round was decided from which this was estimated."""
    probability: float = 0.8
    start: TimeRange
    """If the job was submitted at `at_s`."""


class Estimates(BaseModel):
    """The estimates of all jobs of a round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    round: int
    at_s: float
    """When the round was decided."""
    seconds: float
    """Processor time that it took."""
    jobs: dict[str, JobEstimate]
    new: list[NewJobs] = []
    """In ascending order of `gpus`."""

    def of(self, job: str, submit_s: float, *, waits: bool) -> JobEstimate | None:
        """The estimate of a job; None: the round did not have it. `waits`: whether the job holds no GPUs now."""
        found = self.jobs.get(job)
        if found is None or submit_s > self.at_s:
            return None
        if waits and found.start is None and found.end is not None:
            return JobEstimate(at_s=found.at_s, unknown="it held GPUs when this was last estimated")
        return found


def in_words(found: TimeRange, probability: float, now_s: float) -> str:
    """When something happens: "in 10 to 40 minutes (80 %)"."""
    low_s, chance = max(found.from_s - now_s, 0.0), f"({probability:.0%})".replace("%", " %")
    if found.to_s is None:
        return f"in {_one(low_s, up=False)} or later {chance}" if low_s >= 60 else f"now or later {chance}"
    high_s = max(found.to_s - now_s, 0.0)
    low, high = _rounded(low_s, up=False), _rounded(high_s, up=True)
    if low <= 0:
        return f"within {_amount(high)} {chance}"
    if _unit(low) == _unit(high):
        return f"in {_number(low, _unit(high)[1])} to {_amount(high)} {chance}"
    return f"in {_amount(low)} to {_amount(high)} {chance}"


def estimate_lines(found: JobEstimate | None, state: str, now_s: float) -> list[str]:
    """Sentences about a job's start and end.

    Args:
        found: None: there is no estimate.
        state: of the job, as in `JobView`.
    """
    if found is None:
        return ["Its start and end have not been estimated yet."]
    waits, lines = state == "queued", []
    age_s = now_s - found.at_s
    old = f", as of {duration(age_s)} ago" if age_s > OLD_S else ""
    if waits and found.start is not None:
        lines.append(f"It is expected to start {in_words(found.start, found.probability, now_s)}{old}.")
    if found.end is not None:
        lines.append(f"It is expected to end {in_words(found.end, found.probability, now_s)}{old}.")
    if found.unknown:
        what = "start and end are" if waits and found.start is None else "end is"
        lines.append(f"Its {what} not known: {found.unknown}.")
    return lines


def new_jobs_line(found: NewJobs) -> str:
    """A sentence about jobs that are submitted now."""
    when = in_words(found.start, found.probability, found.at_s)
    return f"A job of {found.gpus} GPU{'s' if found.gpus > 1 else ''} that is submitted now is expected to start {when}"


def start_cell(found: JobEstimate | None, now_s: float) -> str:
    """The start in a table: "10 to 40 minutes"; empty: not known."""
    return "" if found is None or found.start is None else _cell(found.start, found.probability, now_s)


def end_cell(found: JobEstimate | None, now_s: float) -> str:
    """The end in a table; empty: not known."""
    return "" if found is None or found.end is None else _cell(found.end, found.probability, now_s)


def _cell(found: TimeRange, probability: float, now_s: float) -> str:
    return in_words(found, probability, now_s).partition(" (")[0].removeprefix("in ")


_STEPS = ((600, 60), (3600, 300), (3 * 3600, 900), (36 * 3600, 3600), (math.inf, 6 * 3600))
"""Up to how many seconds a duration is rounded to how many."""


def _rounded(seconds: float, *, up: bool) -> int:
    step = next(step for most, step in _STEPS if seconds <= most)
    return int((math.ceil if up else math.floor)(seconds / step)) * step or (step if up else 0)


def _unit(seconds: int) -> tuple[str, int]:
    if seconds <= 90 * 60:
        return "minute", 60
    return ("hour", 3600) if seconds <= 36 * 3600 else ("day", 86_400)


def _number(seconds: int, unit_s: int) -> str:
    return f"{seconds / unit_s:.3g}"


def _amount(seconds: int) -> str:
    name, unit_s = _unit(seconds)
    number = _number(seconds, unit_s)
    return f"{number} {name}{'' if number == '1' else 's'}"


def _one(seconds: float, *, up: bool) -> str:
    return _amount(_rounded(seconds, up=up))
