"""How often the ranges of this site hold, and how wide they must be so that 80 % of them do.

Ranges are noted as they were drawn. Once it is known what happened to a job, it is also known how much wider its range would have
had to be. The next ranges are as wide as 80 % of the newest that are known would have had to be (conformal prediction with a
window, because sites change). A job that has not started, or ended, although the middle of its range is over, counts as if this
happened now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from penstock_scheduler.model import Job, JobId
from penstock_scheduler.simulator.estimates.estimating import CHANCE, SOON_S, JobRanges, Range, Widths
from penstock_scheduler.simulator.estimates.past import Past

NEWEST = 200
"""Ranges that count; see docs/measurements/estimates.md."""

AT_ONCE = 20
"""Most starts, and most ends, that are noted of one round, so that one long queue does not fill the window."""

KEPT_S = 4 * 86_400.0
"""How long a range is kept: longer than the futures are."""

BEFORE = 20
"""While little is known, it is as if this many ranges had been known, 80 % of which would have held with `FIRST`."""

FIRST = 1.5
LEAST, MOST = 0.5, 4.0
"""Widths are between these."""

LEAST_SCALE = 0.02
"""Least distance of an end of a range from its middle, on a logarithmic scale, that a width is relative to."""


class Noted(BaseModel):
    """A range as it was drawn, in s from `at_s` on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: float
    job: str
    low_s: float
    middle_s: float | None
    """None: after the end of the futures."""
    high_s: float | None

    def needed(self, after_s: float) -> float:
        """The width with which the range would just have held what happened `after_s` after it was drawn."""
        if self.middle_s is None:
            return 1.0 if after_s >= self.low_s else self.low_s / max(after_s, 1.0)
        off = math.log((after_s + SOON_S) / (self.middle_s + SOON_S))
        edge_s = self.high_s if off > 0 else self.low_s
        if edge_s is None:
            return 0.0
        scale = abs(math.log((edge_s + SOON_S) / (self.middle_s + SOON_S)))
        return abs(off) / max(scale, LEAST_SCALE)


class Notes(BaseModel):
    """What is kept over a restart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: list[Noted] = []
    end: list[Noted] = []


class Held:
    """The ranges of a site that were noted."""

    def __init__(self, notes: Notes | None = None) -> None:
        self.notes = notes or Notes()

    def widths(self, past: Past) -> Widths:
        """How wide the ranges of a round must be. `past`: as of the round."""
        return Widths(_width(self.notes.start, past, "start"), _width(self.notes.end, past, "end"))

    def note(
        self, jobs: Iterable[Job], found: Mapping[JobId, JobRanges], at_s: float, draw: np.random.Generator
    ) -> None:
        """Note the ranges of a round, as they were drawn."""
        starts, ends = list[Noted](), list[Noted]()
        for job in jobs:
            each = found[job.id]
            if each.start is not None and job.restarts == 0:
                starts.append(_noted(job.id, each.start, at_s))
            if each.end is not None:
                ends.append(_noted(job.id, each.end, at_s))

        def some(noted: list[Noted]) -> list[Noted]:
            chosen = draw.permutation(len(noted))[:AT_ONCE]
            return [noted[at] for at in sorted(chosen)]

        def kept(before: list[Noted]) -> list[Noted]:
            return [each for each in before if at_s - KEPT_S < each.at_s < at_s]

        self.notes = Notes(start=[*kept(self.notes.start), *some(starts)], end=[*kept(self.notes.end), *some(ends)])


def _noted(job: JobId, drawn: Range, at_s: float) -> Noted:
    def finite(value_s: float) -> float | None:
        return value_s if math.isfinite(value_s) else None

    return Noted(at_s=at_s, job=job, low_s=drawn.low_s, middle_s=finite(drawn.middle_s), high_s=finite(drawn.high_s))


def _width(noted: list[Noted], past: Past, what: Literal["start", "end"]) -> float:
    needed = [FIRST / CHANCE * (each + 0.5) / BEFORE for each in range(BEFORE)]
    for each in reversed(noted):
        if len(needed) == BEFORE + NEWEST:
            break
        if (job := past.job(each.job)) is None:
            continue
        happened_s = job.start_s if what == "start" else job.end_s
        if happened_s is not None:
            if happened_s >= each.at_s:  # else it had started before, or a clock was set back
                needed.append(each.needed(happened_s - each.at_s))
        elif each.middle_s is not None and (age_s := past.now_s - each.at_s) > each.middle_s:
            needed.append(each.needed(age_s))
    needed.sort()
    return min(max(needed[math.ceil(CHANCE * len(needed)) - 1], LEAST), MOST)
