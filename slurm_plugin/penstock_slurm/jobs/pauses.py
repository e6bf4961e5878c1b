"""The pauses of moves, in a job's control message: from the decision until the next run reports that it has begun."""

from __future__ import annotations

from penstock_profiles.wire import ControlMessage, Report, Started
from penstock_scheduler.jobs.models import MOST_COST_S

PAUSES = 8
"""Newest pauses of a job that are kept."""


def measured(control: ControlMessage, report: Report, now_s: float) -> ControlMessage | None:
    """The control message with the pause that this report, read at `now_s`, ends; None: it ends none.

    The clocks of nodes and daemon mostly agree, because munge refuses large differences. A pause that seems to end before it
    began was not measured: one of them was set, or another penstockd leads. A job reports its beginning when it likes, so a pause
    counts as `MOST_COST_S` at most.
    """
    if not isinstance(report.body, Started) or control.moved_s is None:
        return None
    if report.epoch < control.epoch or control.request is not None:
        return None
    pause_s = min(report.time_s - control.moved_s, now_s - control.moved_s, MOST_COST_S)  # a report may claim any time
    pauses_s = control.pauses_s if pause_s < 0 else (*control.pauses_s, pause_s)[-PAUSES:]
    return control.model_copy(update={"moved_s": None, "pauses_s": pauses_s})
