"""Fetches what the screens show from penstockd."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.estimate_messages import estimate_lines
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.cli.ask import asks_for
from penstock_scheduler.cli.terminal.picture import Picture, Watcher
from penstock_scheduler.cli.terminal.screens import JobDetail
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.people.units import clock, duration

if TYPE_CHECKING:
    from penstock_scheduler.api.client import Client

OUTPUT_BYTES = 4096
"""Bytes of a job's output that its screen shows."""
EVENTS = 10


class Daemon:
    """What the screens ask of penstockd. It satisfies `app.Source`."""

    def __init__(self, penstock: Client) -> None:
        self._penstock = penstock
        self._watcher = Watcher(penstock)

    def look(self) -> Picture:
        """The cluster as it is now."""
        return self._watcher.look()

    def order(self, kind: str, job: str) -> JobView:
        """Cancel, hold or release a job."""
        orders = {"cancel": self._penstock.cancel, "hold": self._penstock.hold, "release": self._penstock.release}
        return orders[kind](job)

    def detail(self, job: str) -> JobDetail:
        """A job, why it has what it has, what Penstock did with it, and the end of its output."""
        found = self._penstock.explain(job)
        history = self._penstock.history(job)
        bodies = [Report.model_validate(each, extra="ignore").body for each in history.observations]
        events = []
        for each in history.outcomes[-EVENTS:]:
            where = f"{each.allocation.gpus} {each.allocation.gpu_type}" if each.allocation else ""
            at = clock(each.time_s)
            events.append("  ".join(filter(None, (at, each.action, where, each.progress, each.stop, each.text))))
        return JobDetail(
            found.job,
            _fields(found.job),
            tuple(found.lines),
            tuple(events),
            tuple(body.samples_per_s for body in bodies if isinstance(body, Observation)),
            self._output(job),
        )

    def _output(self, job: str) -> str:
        try:
            part = self._penstock.log(job, -OUTPUT_BYTES)
        except PenstockError as error:
            return str(error)
        return part.text or part.note


def _state(view: JobView) -> str:
    """The state of a job in words."""
    if view.state == "ended":
        return f"ended {view.ended}".rstrip()
    return f"{view.suspended.state}: {view.suspended.text}" if view.suspended else view.state


def _fields(view: JobView) -> dict[str, str]:
    where = view.allocation
    done = ""
    if view.progress is not None:
        done = f"{view.progress:.4g} samples" + (f", {view.progress / view.total:.0%}" if view.total else "")
    return {
        "job": f"{view.id} {view.name}".rstrip(),
        "user": view.user + (f", account {view.account}" if view.account else ""),
        "state": _state(view),
        "asks for": asks_for(view.spec),
        "GPUs": f"{where.gpus} {where.gpu_type} on {', '.join(where.nodes)}" if where else "-",
        "waited": duration(view.start_s - view.submit_s) if view.start_s is not None else "",
        "progress": done,
        "expected": " ".join(estimate_lines(view.estimate, view.state, time.time()))
        if view.estimate is not None and view.state != "ended"
        else "",
        "restarts": str(view.restarts),
        "last stop": view.stopped,
        "GPU-hours": ", ".join(f"{amount / 3600:.2f} {name}" for name, amount in sorted(view.gpu_seconds.items())),
        "note": view.note,
    }
