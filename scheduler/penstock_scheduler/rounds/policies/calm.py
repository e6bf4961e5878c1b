"""The budget of moves: in any hour, exchanges of GPUs between running jobs cost at most a share of the running GPU-time.

An *exchange* is a set of running jobs that a plan moves for each other's sake, with a job among them that gives GPUs to another
running job. It costs each of them a restart, counted with the job's own measured cost, and gains little where jobs are much
alike or starts take long. Exchanges beyond the budget are not made: those that gain most for their cost go first, and the policy
decides again while all other running jobs stay.

These moves are neither counted nor held back:

- A job moves to GPUs that are idle, and no running job gives up any for it. The GPUs would be idle otherwise.
- A job makes room for a job that starts: fairness, and turns, go before calm. So does everything that follows from it.
- Drains, reservations, limits, recalls, changed job specs, searches, measuring, and jobs that share GPUs.

An exchange that costs more than an hour's budget is made if no earlier one counts any more. It then counts until the budget has
paid for it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from penstock_scheduler.model import Job, JobId, Plan, Snapshot, StopCode
from penstock_scheduler.model.snapshot import MoveCost
from penstock_scheduler.rounds.policies.stops import stopped

HELD_BACK = (
    "it would exchange GPUs with other running jobs, which costs more than [safety] move_share allows in an hour"
)

STAYS = "the moves of this hour have used up their budget, and this job was not to be moved"


def held_back(snapshot: Snapshot, plan: Plan, stops: Sequence[Job]) -> dict[JobId, str]:
    """The running jobs that must stay -> why: the plan's exchanges cost more than the budget, or no job is moved for a gain now.

    Args:
        snapshot: the round's.
        plan: the plan, with the reasons of its stops.
        stops: the running jobs that it stops.
    """
    if snapshot.no_gain:
        running = {job.id for job in snapshot.jobs if job.running_on is not None}
        found = [jobs for jobs in _together(plan, stops) if _for_a_gain(plan, jobs, running)]
        return _all_but(snapshot, stops, {job.id for jobs in found for job in jobs}, snapshot.no_gain, snapshot.no_gain)
    budget = snapshot.moves
    if budget is None or not (found := exchanges(snapshot, plan, stops)):
        return {}
    gpus = running_gpus(snapshot)
    left, none_counts = budget.left(snapshot.time_s, gpus), not budget.counting(snapshot.time_s, gpus)
    if sum(_cost(snapshot, jobs) for jobs in found) <= left:
        return {}
    order = sorted(found, key=lambda jobs: (-_gained(plan, jobs) / _cost(snapshot, jobs), jobs[0].id))
    made: list[Job] = []
    for jobs in order:
        cost = _cost(snapshot, jobs)
        if cost <= left or (none_counts and not made and budget.share > 0):
            made += jobs
            left -= cost
    back = {job.id for jobs in found for job in jobs} - {job.id for job in made}
    return _all_but(snapshot, stops, back, HELD_BACK, STAYS)


def _all_but(snapshot: Snapshot, stops: Sequence[Job], back: Set[JobId], why: str, others: str) -> dict[JobId, str]:
    """All running jobs but those that are stopped for another reason -> why they stay, if some of them are held back."""
    free = {job.id for job in stops} - back
    return {
        job.id: why if job.id in back else others
        for job in snapshot.jobs
        if back and job.running_on is not None and job.movable and job.id not in free
    }


def charged(snapshot: Snapshot, plan: Plan) -> tuple[MoveCost, ...]:
    """The costs that count after this round."""
    if snapshot.moves is None:
        return ()
    before = snapshot.moves.counting(snapshot.time_s, running_gpus(snapshot))
    now = sum(_cost(snapshot, jobs) for jobs in exchanges(snapshot, plan, stopped(snapshot, plan)))
    return (*before, MoveCost(snapshot.time_s, now)) if now else before


def running_gpus(snapshot: Snapshot) -> int:
    """GPUs on which jobs run."""
    return sum(held.gpus for job in snapshot.jobs if (held := job.running_on) is not None)


def exchanges(snapshot: Snapshot, plan: Plan, stops: Sequence[Job]) -> list[list[Job]]:
    """The plan's exchanges: the jobs of each."""
    if all(stop.code is not StopCode.PREEMPTED for stop in plan.stops.values()):
        return []
    running = {job.id for job in snapshot.jobs if job.running_on is not None}
    return [
        jobs
        for jobs in _together(plan, stops)
        if _for_a_gain(plan, jobs, running) and any(plan.stops[job.id].code is StopCode.PREEMPTED for job in jobs)
    ]


def _together(plan: Plan, stops: Sequence[Job]) -> list[list[Job]]:
    """The jobs that the plan stops, together with those for which they make room."""
    root = {job.id: job.id for job in stops}

    def first(job: JobId) -> JobId:
        while root[job] != job:
            root[job] = root[root[job]]
            job = root[job]
        return job

    for job in stops:
        stop = plan.stops.get(job.id)
        if stop is not None and stop.makes_room_for in root:
            root[first(job.id)] = first(stop.makes_room_for)
    together: dict[JobId, list[Job]] = {}
    for job in stops:
        together.setdefault(first(job.id), []).append(job)
    return [*together.values()]


def _for_a_gain(plan: Plan, jobs: Sequence[Job], running: Set[JobId]) -> bool:
    """Whether all of these jobs are stopped for their own gain or for that of a running job."""
    reasons = [plan.stops.get(job.id) for job in jobs]
    return all(
        stop is not None
        and (stop.code is StopCode.GAIN or (stop.code is StopCode.PREEMPTED and stop.makes_room_for in running))
        for stop in reasons
    )


def _cost(snapshot: Snapshot, jobs: Sequence[Job]) -> float:
    return sum(
        held.gpus * snapshot.facts[job.id].restart_cost_s for job in jobs if (held := job.running_on) is not None
    )


def _gained(plan: Plan, jobs: Sequence[Job]) -> float:
    """GPUs' worth of speed that these jobs gain together, each relative to its speed now."""
    gained = 0.0
    for job in jobs:
        held, before, given = job.running_on, plan.stops[job.id].goodput_before, plan.assignments.get(job.id)
        if held is not None and before:
            gained += held.gpus * ((given.goodput if given is not None else 0.0) / before - 1)
    return gained
