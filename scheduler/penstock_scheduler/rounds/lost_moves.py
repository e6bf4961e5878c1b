"""Jobs that were to go on elsewhere and hold no GPUs: as long as there are some, no running job is moved for a gain.

A plan says where each job that it moves goes on. If others take those GPUs meanwhile, or the cluster does not start the job,
the next plan would only move more jobs into the same trouble. So a job that holds nothing for `LOST_S` after its move is *lost*,
until

- it holds GPUs again, has ended, is held, or waits for something else, or
- `MOST_S` are over. Then it waits like others, and nothing is doubted any more because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from penstock_scheduler.model import ClusterState, JobId, Phase, Plan, Snapshot

log = logging.getLogger(__name__)

LOST_S = 60.0
"""How long a job may hold nothing between two runs, s. That takes seconds; on a busy cluster, half a minute."""

MOST_S = 600.0
"""How long a job counts as lost at most, s. By then Slurm and Penstock have tried several times to start it."""


class LostMoves:
    """Watches the jobs that plans have moved.

    Args:
        moved: those of an earlier process.
    """

    def __init__(self, moved: Iterable[JobId] = ()) -> None:
        self._without_s: dict[JobId, float | None] = dict.fromkeys(moved)
        """Job -> since when it holds nothing, s since 1970, or None if it holds GPUs or has not been seen."""
        self._lost: frozenset[JobId] = frozenset()

    def accepted(self, snapshot: Snapshot, plan: Plan) -> None:
        """Watch the jobs that this plan moves. Of jobs that run and that it does not move, all is well."""
        running = {job.id for job in snapshot.jobs if job.running_on is not None}
        left = {job: since_s for job, since_s in self._without_s.items() if job not in running}
        self._without_s = left | {job: None for job in plan.stops if job in plan.assignments and job in running}

    def saw(self, state: ClusterState, now_s: float) -> None:
        """Take in an observation."""
        if not self._without_s:
            return
        jobs = {job.id: job for job in state.jobs if job.id in self._without_s}
        boots = {node.name for node in state.nodes if node.boot_s > 0}
        found: dict[JobId, float | None] = {}
        for job_id, since_s in self._without_s.items():
            if (job := jobs.get(job_id)) is None:
                continue
            if job.phase in (Phase.RUNNING, Phase.STOPPING) or (
                job.allocation is not None and not boots.isdisjoint(job.allocation.nodes)
            ):
                found[job_id] = None
            elif since_s is None or now_s - since_s < LOST_S + MOST_S:
                found[job_id] = now_s if since_s is None else since_s
        self._without_s = found
        lost = frozenset(job for job, since_s in found.items() if since_s is not None and now_s - since_s >= LOST_S)
        if lost - self._lost:
            log.warning(
                "jobs were moved and hold no GPUs", extra={"jobs": ",".join(sorted(lost)), "text": text(len(lost))}
            )
        elif self._lost and not lost:
            log.info("jobs may be moved again", extra={"jobs": ",".join(sorted(self._lost))})
        self._lost = lost

    @property
    def text(self) -> str:
        """Why no running job is moved for a gain now, as a sentence, or an empty text. It names no jobs."""
        return text(len(self._lost)) if self._lost else ""

    @property
    def watched(self) -> tuple[JobId, ...]:
        """The jobs that were moved and may not run yet, for the next process."""
        return tuple(sorted(self._without_s))


def text(lost: int) -> str:
    """See `LostMoves.text`."""
    jobs = "1 job that was moved holds" if lost == 1 else f"{lost} jobs that were moved hold"
    return f"{jobs} no GPUs, and no other job is moved for a gain until that is over (10 minutes at most)"
