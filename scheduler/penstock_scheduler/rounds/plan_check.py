"""Compares the GPUs that the plan gives to each job with those that the cluster shows as held by it.

They differ for a while whenever a job starts, stops or moves. A difference that stays means that the plan is about something
else than the cluster: jobs that are not there keep GPUs from jobs that are, or Slurm does not do what it is told.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.model import ClusterState, Job, JobId, Phase
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.units import duration

log = logging.getLogger(__name__)

DIFFERS = "the plan and the cluster differ"
"""How the warning of a difference begins."""
PATIENCE_S = 60.0
"""How long they may differ, and for a job that starts, stops or moves, beyond the time that its moves usually take."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A job for which the plan and the cluster differ. `late_s`: when that is too long, s since 1970."""

    planned: int
    held: int
    since_s: float
    late_s: float


class PlanCheck:
    """Belongs to the round loop's thread; `warning` may be called from any thread."""

    def __init__(self) -> None:
        self._found: dict[JobId, Difference] = {}
        self._seen_s = 0.0

    def take(self, record: RoundRecord | None, state: ClusterState, now_s: float) -> None:
        """Compare the newest round's plan with an observation."""
        found = {} if record is None else _differences(record, state, self._found, now_s)
        for job, each in found.items():
            before = self._found.get(job)
            if now_s > each.late_s and (before is None or self._seen_s <= before.late_s):
                facts = {"job": job, "planned": each.planned, "held": each.held}
                log.warning("plan and cluster differ", extra=facts | {"for_s": round(now_s - each.since_s)})
        self._found, self._seen_s = found, now_s

    def warning(self, now_s: float) -> str:
        """Which GPUs are given out and not held, or held and not given out, for too long; empty: none. It names no jobs."""
        late = [each for each in self._found.values() if now_s > each.late_s]
        if not late:
            return ""
        jobs = "1 job" if len(late) == 1 else f"{len(late)} jobs"
        since_s = min(each.since_s for each in late)
        return (
            f"{DIFFERS} for {duration(now_s - since_s)}: the plan gives {sum(each.planned for each in late)} GPUs to {jobs}, for "
            f"which the cluster shows {sum(each.held for each in late)} as held. Running jobs continue; see the daemon's log "
            "('plan and cluster differ') and what Slurm says of these jobs"
        )


def _differences(
    record: RoundRecord, state: ClusterState, before: dict[JobId, Difference], now_s: float
) -> dict[JobId, Difference]:
    plan, found = record.plan, {}
    elsewhere = plan.sharing().keys() | plan.bursts.keys() | plan.recalls.keys()
    leaving = {node for job in state.jobs if _leaves(job, record) for node in _nodes(job)}
    for job in state.jobs:
        given = plan.assignments.get(job.id)
        held = 0 if job.allocation is None or job.phase is Phase.QUEUED else job.allocation.gpus
        if (
            (0 if given is None else given.placement.gpus) == held
            or job.id in elsewhere
            or is_another(job, record.snapshot.time_s)
            or (given is None and not _leaves(job, record))  # it came after the round, or waits as the plan says
            or job.leaving
        ):
            continue
        waits = job.phase in (Phase.QUEUED, Phase.STARTING)
        if waits and given is not None and leaving.intersection(given.placement.nodes):
            continue  # another job has to leave first
        moves = waits or _leaves(job, record)
        facts = record.snapshot.facts.get(job.id)
        usual_s = max((*job.pauses_s, 0.0 if facts is None else facts.restart_cost_s)) if moves else 0.0
        since_s = before[job.id].since_s if job.id in before else now_s
        planned = 0 if given is None else given.placement.gpus
        found[job.id] = Difference(planned, held, since_s, since_s + usual_s + PATIENCE_S)
    return found


def _leaves(job: Job, record: RoundRecord) -> bool:
    """Whether a run is on its way off its GPUs."""
    return job.phase is Phase.STOPPING or job.leaving or (job.phase is Phase.RUNNING and job.id in record.plan.stops)


def _nodes(job: Job) -> tuple[str, ...]:
    return () if job.allocation is None else job.allocation.nodes
