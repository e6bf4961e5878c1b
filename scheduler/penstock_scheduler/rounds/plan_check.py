"""Compares the GPUs that the plan gives to each job with those that the cluster shows as held by it.

They differ for a while whenever a job starts, stops or moves. A difference that stays means that the plan is about something
else than the cluster: jobs that are not there keep GPUs from jobs that are, or Slurm does not do what it is told. A job that
Slurm does not start is given up and sent again, so no single difference stays: `StartCheck` counts the rounds in which no job
at all has started.
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
NONE_STARTS = "no job starts"
"""How the warning of rounds in which no job has started begins."""
ROUNDS = 3
"""Rounds in which no job may start although GPUs are free and jobs are placed on them."""
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
        planned = 0 if given is None else given.placement.gpus
        held = 0 if job.allocation is None or job.phase is Phase.QUEUED else job.allocation.gpus
        if (
            planned == held
            or job.id in elsewhere
            or is_another(job, record.snapshot.time_s)
            or (given is None and not _leaves(job, record))  # it came after the round, or waits as the plan says
            or job.leaving
        ):
            continue
        waits = job.phase in (Phase.QUEUED, Phase.STARTING)
        if waits and given is not None and leaving.intersection(given.placement.nodes):
            continue  # another job has to leave first
        usual_s = _move_s(job, record) if waits or _leaves(job, record) else 0.0
        since_s = before[job.id].since_s if job.id in before else now_s
        found[job.id] = Difference(planned, held, since_s, since_s + usual_s + PATIENCE_S)
    return found


def _move_s(job: Job, record: RoundRecord) -> float:
    """How long a move of the job takes at most, as far as is known."""
    facts = record.snapshot.facts.get(job.id)
    return max((*job.pauses_s, 0.0 if facts is None else facts.restart_cost_s))


def _leaves(job: Job, record: RoundRecord) -> bool:
    """Whether a run is on its way off its GPUs."""
    return job.phase is Phase.STOPPING or job.leaving or (job.phase is Phase.RUNNING and job.id in record.plan.stops)


def _nodes(job: Job) -> tuple[str, ...]:
    return () if job.allocation is None else job.allocation.nodes


class StartCheck:
    """Whether jobs start at all. It belongs to the round loop's thread; `warning` may be called from any thread."""

    def __init__(self) -> None:
        self._rounds: set[int] = set()
        """Rounds since the last start that placed jobs on free GPUs, in vain so far."""
        self._placed: set[JobId] = set()
        """The jobs that they placed and that still wait."""
        self._since_s = 0.0
        self._ran: set[JobId] | None = None
        """Jobs that ran in the last observation."""

    def take(self, record: RoundRecord | None, state: ClusterState, now_s: float) -> None:
        """Take in an observation and the newest round."""
        ran = {job.id for job in state.jobs if job.phase is Phase.RUNNING or job.phase is Phase.STOPPING}
        started = self._ran is not None and not ran <= self._ran
        self._ran = ran
        if self._placed:
            there = {job.id for job in state.jobs} | {each.job.id for each in state.waiting if each.code != "held"}
            self._placed &= there
        placed = set() if record is None else _placed_on_free_gpus(record, state)
        if started or not self._placed | placed:
            self._rounds, self._placed = set(), set()
        if record is None or started or not placed:
            return
        if not self._rounds:
            self._since_s = now_s
        self._rounds, self._placed = self._rounds | {record.snapshot.round}, self._placed | placed

    def warning(self, now_s: float) -> str:
        """That no job has started for too long, although GPUs are free and jobs are placed on them. It names no jobs.

        It is empty if jobs start, or if none could.
        """
        rounds, jobs = len(self._rounds) - 1, len(self._placed)  # the newest round goes on
        if rounds < ROUNDS or now_s - self._since_s <= PATIENCE_S:
            return ""
        placed = "1 job was" if jobs == 1 else f"{jobs} jobs were"
        return (
            f"{NONE_STARTS}: in {rounds} rounds and {duration(now_s - self._since_s)}, {placed} sent to free GPUs and Slurm has "
            "started none. Running jobs continue; see what Slurm says of these jobs (`penstock history JOB`, `scontrol show job`)"
        )


def _placed_on_free_gpus(record: RoundRecord, state: ClusterState) -> set[JobId]:
    """The jobs that wait to start on GPUs which the cluster shows as free, on nodes that need not boot."""
    plan = record.plan
    elsewhere = plan.sharing().keys() | plan.bursts.keys() | plan.recalls.keys()
    placed = {
        job.id: plan.assignments[job.id].placement
        for job in state.jobs
        if job.id in plan.assignments and (job.phase is Phase.QUEUED or job.phase is Phase.STARTING)
        if job.id not in elsewhere and not is_another(job, record.snapshot.time_s)
    }
    if not placed:
        return set()
    free = {node.name: node.gpus_for_us for node in state.nodes if not node.boot_s}
    for job in state.jobs:
        if job.allocation is not None and (job.phase is Phase.RUNNING or job.phase is Phase.STOPPING):
            for share in job.allocation.shares:
                free[share.node] = free.get(share.node, 0) - share.gpus
    return {
        job
        for job, placement in placed.items()
        if all(share.gpus <= free.get(share.node, 0) for share in placement.shares)
    }
