"""Learns where each job writes its output when it starts, because Slurm forgets a job some minutes after its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice

from penstock_scheduler.api.messages import JobView, OutputFiles
from penstock_scheduler.api.ports import Submitter
from penstock_scheduler.people.errors import ClusterAway

log = logging.getLogger(__name__)

AT_ONCE = 50
"""Most jobs that are asked for in one tick. Each costs one call of scontrol, about 5 ms."""


class Outputs:
    """Asks for the output files of each run once. If the cluster does not answer, it asks again in the next tick."""

    def __init__(self, submitter: Submitter | None) -> None:
        self._submitter = submitter
        self._known: dict[str, tuple[int, OutputFiles | None]] = {}
        """Live job -> its restarts when it was asked for, because a file's name may contain the node, and the answer."""
        self._due: dict[str, None] = {}
        """Jobs that are still to be asked for, in this order."""

    def added_to(self, views: Sequence[JobView], live: Mapping[str, JobView]) -> list[JobView]:
        """The views, with the output files of jobs that have started since.

        Args:
            views: those that are new, or may have changed.
            live: the newest view of each live job. Some are added to the views: their turn to be asked for came only now.
        """
        found = {view.id: view for view in views}
        self._due |= {view.id: None for view in views if self._unknown(view)}
        for job in [*islice(self._due, AT_ONCE)]:
            view = found.get(job) or live.get(job)
            if view is None or not self._unknown(view):
                del self._due[job]
            elif not self._ask(view):
                break
            else:
                del self._due[job]
                found.setdefault(job, view)
        return [self._with_output(view) for view in found.values()]

    def _with_output(self, view: JobView) -> JobView:
        _, output = self._known.get(view.id, (0, None))
        if output is None or output == view.output:
            return view
        return view.model_copy(update={"output": output, "version": view.version + 1})

    def forget(self, job: str) -> None:
        """Drop what is known of a job that has ended."""
        self._known.pop(job, None)
        self._due.pop(job, None)

    def _ask(self, view: JobView) -> bool:
        """Ask for the output files of a job. Returns whether the cluster has answered."""
        if self._submitter is None:
            return True
        try:
            self._known[view.id] = view.restarts, self._submitter.output(view.id, view.user)
        except ClusterAway as error:
            log.info("output files not known yet", extra={"job": view.id, "text": str(error)})
            return False
        return True

    def _unknown(self, view: JobView) -> bool:
        if view.state == "ended":
            return view.output is None and view.id not in self._known  # it may have run between two ticks
        known = self._known.get(view.id)
        return view.state in ("running", "stopping") and (known is None or known[0] != view.restarts)
