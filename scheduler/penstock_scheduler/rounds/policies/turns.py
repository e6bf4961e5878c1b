"""Turns: no user keeps the jobs of other users below their minimum for long. `make_policy` wraps policies in `WithTurns`.

A queued job is *due* when it has been without GPUs for `TURN_S`. All GPUs that it may use, by its partitions, reservation, node
choice and GPU types, are its pool. The *equal share* of the pool is its GPUs divided by the users who hold some of them or wait
for some. What a user *holds* is counted in the pool, jobs that the policy does not see included.

1. **A due job goes first** if its user holds nothing, or with its minimum no more than the equal share. It gets its minimum of
   the free GPUs before the policy decides about all other jobs. Jobs within the share go first, then users who hold least, then
   the job that has waited longest.
2. **It takes GPUs from running jobs** if too few are free: of users who, counted everywhere, keep at least as many as its user
   then has. Only jobs that may be stopped, the smallest that is enough first, and then the last started. The policy decides
   whether such a job shrinks, moves or waits. After `LARGE_TURN_S`, a job whose user holds nothing, with its minimum within the
   share, takes them of any user who holds more than the share, of jobs that have run for `TURN_S`. Else a job of all GPUs would
   keep everybody waiting for ever.
3. **GPUs are kept free for it** if it needs several at once and jobs that may not be stopped are in the way. That needs a place
   where those jobs belong to users who hold more and have run for less than `TURN_S`, so that GPUs stay idle no longer than that.
   For one user, no more GPUs than the equal share are kept free.
4. **A running job is not stopped for a user who holds more.** If the plan leaves a running job with nothing, and another user
   has at least as many GPUs as the job's user would have with it, the job keeps what it has, and the policy decides again.
   That ends where the policy gives these GPUs to a due job that no turn could serve, and whose user holds nothing. Both must have
   run and waited for `TURN_S`, and for `LARGE_TURN_S` if the due job needs more than the equal share. Else one small job on each
   node would keep a job of a whole node waiting for ever.

Nothing of this depends on weights, models or priorities. It has no effect where all jobs are of one user. Jobs that share GPUs
with others are left to the policy.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from penstock_scheduler.model import (
    Burst,
    Configuration,
    Job,
    JobId,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Share,
    Snapshot,
    Stop,
    StopCode,
)
from penstock_scheduler.model.job import in_order
from penstock_scheduler.people.units import duration
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.pools import Pool, Pools, asks, fewest, look_up_fewest, place_of, shrinks
from penstock_scheduler.rounds.policies.staying import without
from penstock_scheduler.rounds.policies.stops import BY_REASON, stopped
from penstock_scheduler.rounds.policies.wrapper import Wrapper

TURN_S = 600.0
"""How long a job is without GPUs before it goes first, seconds: twenty restarts of 30 s, so that turns cost little."""

LARGE_TURN_S = 3600.0
"""The same before a job stops others without regard to what their users keep; as `aging_s` of `sia`."""


class WithTurns(Wrapper):
    """Applies the rules of this module. `policy` decides about the jobs that are not given or kept here."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The policy's plan beside the jobs whose turn it is."""
        if len({job.user for job in (*snapshot.jobs, *snapshot.unseen)}) < 2:
            return self._policy.decide(snapshot)
        turns = _Turns(snapshot)
        turns.give()
        while True:
            plan = self._decide(snapshot, turns)
            kept = turns.spared(plan)
            if not kept:
                return dataclasses.replace(plan, stops=turns.stops(plan) | plan.stops)
            turns.kept |= kept

    def _decide(self, snapshot: Snapshot, turns: _Turns) -> Plan:
        fixed = turns.given | turns.kept
        if not fixed and not turns.aside:
            return self._policy.decide(snapshot)
        plan = self._policy.decide(without(snapshot, {}, fixed, (), turns.aside))
        jobs = {job.id: job for job in snapshot.jobs}
        common.look_up(snapshot, ((job, where.configuration) for job, where in fixed.items()))
        together = plan.assignments | {
            job: common.assign(jobs[job], where, turns.reason(job, where), snapshot) for job, where in fixed.items()
        }
        return dataclasses.replace(
            plan, assignments={job.id: together[job.id] for job in snapshot.jobs if job.id in together}
        )


class _Turns:
    """The turns of one round."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._grouped = {job for group in (snapshot.sharing.groups if snapshot.sharing else ()) for job in group.jobs}
        self._waited_s = _due(snapshot)
        """Due job -> how long it has been without GPUs."""
        self._places = [(job, where) for job in (*snapshot.jobs, *snapshot.unseen) if (where := place_of(job))]
        """Jobs and the GPUs that they hold."""
        self._has = Counter[str]()
        """User -> GPUs anywhere, before any turn."""
        for job, where in self._places:
            self._has[job.user] += where.gpus
        self._pool: dict[JobId, Pool] = {}
        """Due job -> its pool."""
        self.given: dict[JobId, Placement] = {}
        """What the due jobs get."""
        self.kept: dict[JobId, Placement] = {}
        """Running jobs that the policy would stop for users who hold more."""
        self.aside = Counter[str]()
        """Node -> GPUs that are kept free."""
        self._room: dict[JobId, set[str]] = {}
        """Due job -> users who make room for it."""

    # Rules 1 to 3, before the policy decides.

    def give(self) -> None:
        """Give the due jobs their minimum, as far as rules 1 to 3 allow."""
        if not self._waited_s:
            return
        pins = common.pinned(self._snapshot)
        self._book, self._running = FreeGpus.of(self._snapshot), list[tuple[Job, Placement]]()
        self._everywhere = self._has.copy()
        for job_id, where in pins.items():
            self._book.take(self._jobs[job_id], where)
        for job in self._snapshot.jobs:
            if job.id not in pins and (held := job.running_on) is not None and self._book.may_stay(held):
                self._book.take(job, held)
                if job.id not in self._grouped:
                    self._running.append((job, held))
        self._running.sort(key=lambda run: (run[1].gpus, -(run[0].started_s or 0.0), run[0].id))
        self._pools = Pools(self._snapshot, self._places)
        self._pool = {job_id: self._pools.of(self._jobs[job_id]) for job_id in self._waited_s}
        look_up_fewest(self._snapshot, [(self._jobs[job_id], pool) for job_id, pool in self._pool.items()])
        alike: dict[tuple[object, ...], list[JobId]] = {}
        for job_id in self._waited_s:
            job = self._jobs[job_id]
            alike.setdefault((job.user, *self._pools.words(job), *asks(job)), []).append(job_id)
        queues = list(alike.values())
        for queue in queues:  # of jobs that are alike the one that has waited longest is the last in the list
            queue.sort(key=lambda job_id: (-self._waited_s[job_id], *in_order(job_id)), reverse=True)
        heap = [(self._rank(queue[-1]), n) for n, queue in enumerate(queues)]
        heapq.heapify(heap)
        while heap:
            before, n = heap[0]
            if (rank := self._rank(queues[n][-1])) != before:
                heapq.heapreplace(heap, (rank, n))  # its user has more by now
            elif self._serve(self._jobs[queues[n].pop()]) and queues[n]:
                heapq.heapreplace(heap, (self._rank(queues[n][-1]), n))
            else:
                heapq.heappop(heap)

    def _rank(self, job_id: JobId) -> tuple[bool, int, float, str, int, JobId]:
        job = self._jobs[job_id]
        pool = self._pool[job_id]
        has = pool.held[job.user]
        return has + job.spec.min_gpus > pool.share, has, -self._waited_s[job_id], *in_order(job_id)

    def _count(self, job: Job, where: Placement, sign: int) -> None:
        self._everywhere[job.user] += sign * where.gpus
        self._pools.count(job.user, where, sign)

    def _serve(self, job: Job) -> bool:
        """Give a due job its minimum; False: it gets nothing, and neither would other jobs of its user like it."""
        pool = self._pool[job.id]
        has = pool.held[job.user]
        if len(pool.users) < 2 or (has and has + job.spec.min_gpus > pool.share):
            return False
        if not (options := list(fewest(self._snapshot, job, pool))) or (has and has + options[0].gpus > pool.share):
            return False
        # What the last round gave the job comes first: the jobs there are on their way out already.
        where = self._book.find(job, options, job.target) or self._made_room(job, options, pool)
        if where is None:
            self._keep_free(job, options, pool)
            return False
        self._book.take(job, where)
        self._count(job, where, 1)
        self.given[job.id] = where
        return True

    def _made_room(self, job: Job, options: Sequence[Configuration], pool: Pool) -> Placement | None:
        """GPUs of running jobs by rule 2; None: there are too few."""
        gpus, now = options[0].gpus, self._everywhere
        rich = {user: more for user in pool.users if (more := now[user] - now[job.user] - gpus) > 0}
        found = self._taken(job, options, pool, rich, 0.0)
        if found is None and gpus <= pool.share and not now[job.user] and self._waited_s[job.id] >= LARGE_TURN_S:
            rich = {user: pool.gpus for user, has in pool.held.items() if has > pool.share}
            found = self._taken(job, options, pool, rich, TURN_S)
        return found

    def _taken(
        self, job: Job, options: Sequence[Configuration], pool: Pool, rich: Mapping[str, int], least_s: float
    ) -> Placement | None:
        """GPUs of one running job, or of as many as it takes.

        Args:
            job: the due job.
            options: what it may get.
            pool: its pool.
            rich: how many GPUs users may lose.
            least_s: how long a job must have run, seconds.
        """
        gpus, each = options[0].gpus, min(option.gpus // option.nodes for option in options)
        able, on = [], Counter[str]()
        for other, held in self._running if rich else ():
            if other.user in rich and (there := pool.on(held)) and self._ran_s(other, held) >= least_s:
                loses = gpus if shrinks(other, held, gpus) else there
                if loses <= rich[other.user]:
                    able.append((other, held, loses))
                    on.update({share.node: share.gpus for share in held.shares})
        alone = [[run] for run in able if any(x.gpus + self._book.on(x.node) >= each for x in run[1].shares)]
        able.sort(key=lambda run: (-on[run[1].nodes[0]], run[1].nodes))  # the smallest stay first on each node
        for runs in (*alone, able):
            trial, lost, leaving = self._book.copy(), Counter[str](), []
            for other, held, loses in runs:
                if loses <= rich[other.user] - lost[other.user]:
                    lost[other.user] += loses
                    trial.give_back(other, held)
                    leaving.append((other, held))
                    if (found := trial.find(job, options)) is not None:
                        self._leave(job, found, trial, leaving)
                        return found
        return None

    def _leave(self, job: Job, found: Placement, book: FreeGpus, leaving: list[tuple[Job, Placement]]) -> None:
        """Count that running jobs make room for a due job; those on nodes that it does not need stay."""
        book.take_nodes(found, job.request)
        for other, held in reversed(leaving):
            if book.may_stay(held, other.request):
                book.take(other, held)
                continue
            self._room.setdefault(job.id, set()).add(other.user)
            self._running.remove((other, held))
            self._count(other, held, -1)
            if shrinks(other, held, found.gpus):
                shares = (dataclasses.replace(each, gpus=min(each.gpus, book.on(each.node))) for each in held.shares)
                rest = dataclasses.replace(held, shares=tuple(each for each in shares if each.gpus))
                book.take(other, rest)
                self._count(other, rest, 1)
        book.leave_nodes(found, job.request)
        self._book = book

    def _keep_free(self, job: Job, options: Sequence[Configuration], pool: Pool) -> None:
        """Keep GPUs free for a job that needs several at once; see rule 3."""
        gpus, gpu_type = options[0].gpus, options[0].gpu_type
        if pool.held[job.user] + gpus > pool.share or self._book.allowance.refuses(job, gpus, gpu_type):
            return
        soon = Counter[str]()
        for other, where in self._places:
            if pool.held[other.user] > pool.held[job.user] and self._ran_s(other, where) < TURN_S:
                soon.update({share.node: share.gpus for share in where.shares})
        for option in options:
            each = option.gpus // option.nodes
            nodes = [
                (each - self._book.on(name), name)
                for name, node in pool.nodes.items()
                if node.gpu_type == option.gpu_type and (node.gpus == each or option.nodes == 1)
                if node.may_start and each <= self._book.on(name) + soon[name]
            ]
            if len(nodes) >= option.nodes:
                for _, name in sorted(nodes)[: option.nodes]:
                    free = Placement(option.gpu_type, "", (Share(name, min(each, self._book.on(name))),))
                    self._book.take_nodes(free)
                    self.aside[name] += free.gpus
                    self._count(job, Placement(option.gpu_type, "", (Share(name, each),)), 1)
                return

    def _ran_s(self, job: Job, where: Placement) -> float:
        if job.started_s is not None:
            return self._snapshot.time_s - job.started_s
        return common.ran_s(self._snapshot, job, where.gpus)

    # Rule 4, after it.

    def spared(self, plan: Plan) -> dict[JobId, Placement]:
        """The running jobs that this plan leaves with nothing, and that keep what they have by rule 4."""
        lost = {job for job in plan.waiting if self._loses(job, plan)}
        if not lost:
            return {}
        book = self._left()
        planned = [(self._jobs[job_id], assignment.placement) for job_id, assignment in plan.assignments.items()]
        due = [each for each in planned if self._is_due(each[0].id)]
        planned += [(job, place) for job in self._snapshot.unseen if (place := place_of(job))]
        pools = Pools(self._snapshot, planned)
        kept: dict[JobId, Placement] = {}
        for job in self._candidates(plan, lost):
            held = job.running_on
            if held is None or not book.may_have(job, held) or any(self._yields(job, held, *each) for each in due):
                continue
            pool = pools.of(job)
            has = pool.held[job.user] + (held.gpus if job.id in lost else 0)
            if self._most_of_others(job, pool) >= has and not any(pool.nodes[name].leave for name in held.nodes):
                kept[job.id] = held
                book.take(job, held)
                if job.id in lost:
                    pools.count(job.user, held, 1)
        return {} if lost.isdisjoint(kept) else kept

    def _left(self) -> FreeGpus:
        """The GPUs that this round has neither given to jobs nor kept free."""
        book = FreeGpus.of(self._snapshot)
        for job_id, where in (common.pinned(self._snapshot) | self.given | self.kept).items():
            book.take(self._jobs[job_id], where)
        for name, gpus in self.aside.items():
            book.take_nodes(Placement("", "", (Share(name, gpus),)))
        return book

    def _candidates(self, plan: Plan, lost: Set[JobId]) -> list[Job]:
        """The jobs that may be kept, in order: those that lose their GPUs, and all others as well once some were kept.

        The policy may stop other jobs instead of those that were kept.
        """
        more = (
            {job for job in plan.assignments if self._may_keep(job)} - self.kept.keys() if self.kept else set[JobId]()
        )
        return sorted((self._jobs[job_id] for job_id in lost | more), key=lambda each: each.in_order)

    def _is_due(self, job: JobId) -> bool:
        """Whether a job is due and has its GPUs, if any, from the policy."""
        return job in self._waited_s and job not in self.given

    def _loses(self, job: JobId, plan: Plan) -> bool:
        """Whether a job that this plan leaves with nothing may keep what it has."""
        return plan.waiting[job].code not in BY_REASON and self._may_keep(job)

    @staticmethod
    def _most_of_others(job: Job, pool: Pool) -> int:
        """The most GPUs that another user holds in the pool."""
        return max((gpus for user, gpus in pool.held.items() if user != job.user), default=0)

    def _may_keep(self, job_id: JobId) -> bool:
        job = self._jobs[job_id]
        return (held := job.running_as) is not None and job_id not in self._grouped and common.allowed(job, held)

    def _yields(self, job: Job, held: Placement, due: Job, where: Placement) -> bool:
        """Whether a running job is not kept by rule 4 where the policy gives its GPUs to this due job."""
        if self._has[due.user] or set(where.nodes).isdisjoint(held.nodes):
            return False
        least_s = TURN_S if due.spec.min_gpus <= self._pool[due.id].share else LARGE_TURN_S
        return min(self._ran_s(job, held), self._waited_s[due.id]) >= least_s

    def stops(self, plan: Plan) -> dict[JobId, Stop]:
        """Why the jobs that make room are stopped. Which jobs of a user make room on a node is the policy's choice."""
        found = {}
        for job in stopped(self._snapshot, plan) if self._room else ():
            held, given = job.running_on, plan.assignments.get(job.id)
            if held is None or (given is not None and given.placement.gpus > held.gpus):
                continue
            for due, users in self._room.items():
                if job.user in users and not set(held.nodes).isdisjoint(self.given[due].nodes):
                    text = (
                        f"makes room for job {due}, which has been without GPUs for {duration(self._waited_s[due])} while "
                        f"user {job.user} holds {self._has[job.user]} GPUs"
                    )
                    before = common.rate(self._snapshot.facts[job.id].model, held.configuration)
                    after = given.goodput if given is not None else 0.0
                    found[job.id] = Stop(StopCode.PREEMPTED, text, before if math.isfinite(before) else 0.0, after, due)
                    break
        return found

    def reason(self, job: JobId, where: Placement) -> Reason:
        """Why a job has what this round gives it or lets it keep."""
        if job in self.kept:
            return Reason(ReasonCode.KEPT, f"keeps {where.configuration}: other users hold more")
        waited = duration(self._waited_s[job])
        return Reason(ReasonCode.CHOSEN, f"starts on {where.configuration}: it has been without GPUs for {waited}")


def _due(snapshot: Snapshot) -> dict[JobId, float]:
    away = {run.job for run in snapshot.cloud.runs} if snapshot.cloud is not None else ()
    waited = {
        job.id: snapshot.time_s - max(job.submit_s, job.stopped_s or 0.0, job.requeued_s or 0.0)
        for job in snapshot.jobs
        if job.phase is Phase.QUEUED and job.id not in away and job.spec.burst is not Burst.ONLY
    }
    return {job: waited_s for job, waited_s in waited.items() if waited_s >= TURN_S}
