"""Turns: no user keeps the jobs of other users below their minimum for long. `make_policy` wraps policies in `WithTurns`.

A queued job is *due* when it has been without GPUs for `TURN_S`. All GPUs that it may use, by its partitions, reservation, node
choice and GPU types, are its pool. The *equal share* of the pool is its GPUs divided by the users who hold some of them or wait
for some. What a user *holds* is counted in the pool, jobs that the policy does not see included.

1. **A due job goes first** if its user holds nothing, or with its minimum no more than the equal share. It gets its minimum of
   the free GPUs before the policy decides about all other jobs. Jobs within the share go first, then users who hold least.
   Among users who hold the same, the order rotates every `TURN_S`, so that nobody can be the first for ever.
2. **It takes GPUs from running jobs** if too few are free: of users who keep at least as many as its user then has, in the pool
   and in all. Only jobs that may be stopped, the smallest that is enough first, and then the last started. The policy decides
   whether such a job shrinks, moves or waits.
3. **GPUs are kept free for it** if it needs several at once and jobs that may not be stopped are in the way. That needs a place
   where those jobs belong to users who hold more and have run for less than `TURN_S`, so that GPUs stay idle no longer than that.
   For one user, no more GPUs than the equal share are kept free.
4. **A running job is not stopped for a user who holds more.** If the plan leaves a running job with nothing, and another user
   has at least as many GPUs as the job's user would have with it, the job keeps what it has, and the policy decides again.
   That ends where a due job that no turn could serve is to have these GPUs, and its user holds nothing, or holds less and the job
   is no smaller. Both must have run and waited for `TURN_S`, and for `LARGE_TURN_S` if the due job needs more than the equal
   share. Else one small job on each node would keep a job of a whole node waiting for ever, and a job of all GPUs everybody.
5. **Jobs of one user do not stop each other while a due job waits.** A running job also keeps what it has if jobs of its user
   would start on its nodes, and another user's due job within the share waits for GPUs there. It ends some time. Jobs that
   stop each other in every round (`gavel`) would never end, nor leave a GPU free.

Nothing of this depends on weights, models or priorities. It has no effect where all jobs are of one user. Jobs that share GPUs
with others are left to the policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from penstock_scheduler.free_gpus import FreeGpus
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
from penstock_scheduler.policies import common
from penstock_scheduler.policies.pools import Pool, asks, fewest, place_of, pool_key, shrinks
from penstock_scheduler.policies.staying import without
from penstock_scheduler.policies.stops import BY_REASON, stopped
from penstock_scheduler.policies.wrapper import Wrapper
from penstock_scheduler.units import duration

TURN_S = 600.0
"""How long a job is without GPUs before it goes first, seconds: twenty restarts of 30 s, so that turns cost little."""

LARGE_TURN_S = 3600.0
"""The same for a job that needs more than the equal share, where the policy is to stop others for it: as `aging_s` of `sia`."""


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
        self._pins = common.pinned(snapshot)
        self._grouped = {job for group in (snapshot.sharing.groups if snapshot.sharing else ()) for job in group.jobs}
        self._holding = [
            (job, where, 1) for job in (*snapshot.jobs, *snapshot.unseen) if (where := place_of(job)) is not None
        ]
        """Jobs and the GPUs that they hold, and with -1 the GPUs that they leave for a turn."""
        self._pools: dict[tuple[object, ...], Pool] = {}
        self._book = FreeGpus.of(snapshot)
        """GPUs that no job holds, and that are not given yet."""
        self._running: list[tuple[Job, Placement]] = []
        """Running jobs that may make room: the smallest first, of equal ones the last started."""
        for job, where in self._pins.items():
            self._book.take(self._jobs[job], where)
        for each in snapshot.jobs:
            if each.id not in self._pins and (held := each.running_on) is not None and self._book.may_stay(held):
                self._book.take(each, held)
                if each.id not in self._grouped:
                    self._running.append((each, held))
        self._running.sort(key=lambda run: (run[1].gpus, -(run[0].started_s or 0.0), run[0].id))
        self._left: set[JobId] = set()
        """Those of them that have made room."""
        self.given: dict[JobId, Placement] = {}
        """What the due jobs get."""
        self.kept: dict[JobId, Placement] = {}
        """Running jobs that the policy would stop for users who hold more."""
        self._aside: list[Placement] = []
        """GPUs that are kept free."""
        self._short: list[tuple[Job, Pool]] = []
        """Due jobs within their shares for which too few GPUs were found."""
        self._waited_s: dict[JobId, float] = {}
        """Due job -> how long it has been without GPUs."""
        self._has = Counter[str]()
        """User -> GPUs anywhere, before any turn."""
        for each, where, _ in self._holding:
            self._has[each.user] += where.gpus
        self._everywhere = self._has.copy()
        """User -> GPUs anywhere, with the turns that were given."""
        self._room: dict[JobId, dict[str, int]] = {}
        """Due job -> users who make room for it -> what they hold."""

    def give(self) -> None:
        """Give the due jobs their minimum, as far as rules 1 to 3 allow."""
        away = {run.job for run in self._snapshot.cloud.runs} if self._snapshot.cloud is not None else ()
        alike: dict[tuple[object, ...], list[tuple[float, Job]]] = {}
        for job in self._snapshot.jobs:
            waited_s = self._snapshot.time_s - max(job.submit_s, job.stopped_s or 0.0, job.requeued_s or 0.0)
            here = job.id not in away and job.spec.burst is not Burst.ONLY
            if job.phase is Phase.QUEUED and here and waited_s >= TURN_S:
                alike.setdefault((job.user, *pool_key(job), *asks(job)), []).append((waited_s, job))
                self._waited_s[job.id] = waited_s
        queues = [sorted(jobs, key=lambda each: (each[0], each[1].id)) for jobs in alike.values()]
        while queues:
            first = min(queues, key=lambda queue: self._rank(*queue[-1]))
            if not self._serve(first.pop()[1]) or not first:
                queues.remove(first)

    def _rank(self, waited_s: float, job: Job) -> tuple[bool, int, int, float, JobId]:
        pool = self._pool(job)
        has = pool.held[job.user]
        turn = (pool.users.index(job.user) - int(self._snapshot.time_s // TURN_S)) % len(pool.users)
        return has + job.spec.min_gpus > pool.share, has, turn, -waited_s, job.id

    def _pool(self, job: Job) -> Pool:
        key = pool_key(job)
        if key not in self._pools:
            self._pools[key] = Pool(self._snapshot, job, self._holding)
        return self._pools[key]

    def _count(self, job: Job, where: Placement, sign: int) -> None:
        self._holding.append((job, where, sign))
        self._everywhere[job.user] += sign * where.gpus
        for pool in self._pools.values():
            pool.held[job.user] += sign * pool.on(where)

    def _serve(self, job: Job) -> bool:
        """Give a due job its minimum; False: it gets nothing, and neither would other jobs of its user like it."""
        pool = self._pool(job)
        has = pool.held[job.user]
        if len(pool.users) < 2 or (has and has + job.spec.min_gpus > pool.share):
            return False
        options = fewest(self._snapshot, job)
        if not options or (has and has + options[0].gpus > pool.share):
            return False
        where = self._again(job, options, pool) or self._book.find(job, options)
        if where is None and (where := self._made_room(job, options, pool)) is None:
            self._keep_free(job, options, pool)
            return False
        self._book.take(job, where)
        self._count(job, where, 1)
        self.given[job.id] = where
        return True

    def _again(self, job: Job, options: Sequence[Configuration], pool: Pool) -> Placement | None:
        """What the last round gave the job, if it is free: the jobs there are on their way out already."""
        target = job.target
        if target is None or target.configuration not in options or pool.on(target) < target.gpus:
            return None
        fits = self._book.has(target) and self._book.allowance.refuses(job, target.gpus, target.gpu_type) is None
        return target if fits else None

    def _made_room(self, job: Job, options: Sequence[Configuration], pool: Pool) -> Placement | None:
        """GPUs of running jobs of users who keep at least as many as the job's user then has; None: there are too few."""
        gpus = options[0].gpus
        each = min(option.gpus // option.nodes for option in options)

        def able() -> Iterator[tuple[Job, Placement, int]]:
            for other, held in self._running:
                left = self._more(other.user, job.user, pool) - gpus
                if left > 0 and other.user != job.user and other.id not in self._left and (there := pool.on(held)):
                    loses = gpus if shrinks(other, held, gpus) else there
                    if loses <= left:
                        yield other, held, loses

        for run in able():
            enough = any(share.gpus + self._book.on(share.node) >= each for share in run[1].shares)
            if enough and (found := self._if_they_leave(job, options, pool, [run])) is not None:
                return found
        runs, on = list(able()), Counter[str]()
        for _, held, _ in runs:
            on.update({share.node: share.gpus for share in held.shares})
        runs.sort(key=lambda run: (-on[run[1].nodes[0]], run[1].nodes))  # the smallest stay first on each node
        return self._if_they_leave(job, options, pool, runs)

    def _more(self, user: str, than: str, pool: Pool) -> int:
        """How many GPUs more a user holds, in the pool and anywhere. With the pool alone, users of different pools could each see
        the other as holding more, and stop each other for ever."""
        return min(held[user] - held[than] for held in (pool.held, self._everywhere))

    def _if_they_leave(
        self, job: Job, options: Sequence[Configuration], pool: Pool, able: Iterable[tuple[Job, Placement, int]]
    ) -> Placement | None:
        """GPUs for a job where the first of these running jobs leave theirs, and these jobs as making room."""
        gpus, trial, lost = options[0].gpus, self._book.copy(), Counter[str]()
        leaving, found = [], None
        for other, held, loses in able:
            if loses <= self._more(other.user, job.user, pool) - lost[other.user] - gpus:
                lost[other.user] += loses
                trial.give_back(other, held)
                leaving.append((other, held))
                if (found := trial.find(job, options)) is not None:
                    break
        if found is None:
            return None
        trial.take_nodes(found)
        for other, held in reversed(leaving):
            if trial.may_stay(held):  # on nodes that the job does not need
                trial.take(other, held)
                continue
            self._room.setdefault(job.id, {}).setdefault(other.user, pool.held[other.user])
            self._left.add(other.id)
            self._count(other, held, -1)
            if shrinks(other, held, gpus):
                shares = (dataclasses.replace(each, gpus=min(each.gpus, trial.on(each.node))) for each in held.shares)
                rest = dataclasses.replace(held, shares=tuple(each for each in shares if each.gpus))
                trial.take(other, rest)
                self._count(other, rest, 1)
        trial.add_to(trial.free_N, found, 1)
        self._book = trial
        return found

    def _keep_free(self, job: Job, options: Sequence[Configuration], pool: Pool) -> None:
        """Keep GPUs free for a job that needs several at once; see rule 3."""
        option = options[0]
        if pool.held[job.user] + option.gpus > pool.share or self._book.allowance.refuses(
            job, option.gpus, option.gpu_type
        ):
            return
        self._short.append((job, pool))
        soon = Counter[str]()
        for other, where, sign in self._holding:
            if pool.held[other.user] > pool.held[job.user] and sign > 0 and self._ran_s(other, where) < TURN_S:
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
                names = [name for _, name in sorted(nodes)[: option.nodes]]
                shares = tuple(Share(name, min(each, self._book.on(name))) for name in names)
                self._aside.append(Placement(option.gpu_type, job.partitions[0], shares))
                self._book.take_nodes(self._aside[-1])
                self._count(job, Placement(option.gpu_type, "", tuple(Share(name, each) for name in names)), 1)
                return

    @property
    def aside(self) -> Counter[str]:
        """Node -> GPUs that are kept free."""
        return sum((Counter({each.node: each.gpus for each in where.shares}) for where in self._aside), Counter[str]())

    def _ran_s(self, job: Job, where: Placement) -> float:
        if job.started_s is not None:
            return self._snapshot.time_s - job.started_s
        return common.ran_s(self._snapshot, job, where.gpus)

    def spared(self, plan: Plan) -> dict[JobId, Placement]:
        """The running jobs that this plan leaves with nothing, and that keep what they have by rule 4."""
        lost = [
            (job, held)
            for job, reason in ((self._jobs[job], reason) for job, reason in plan.waiting.items())
            if (held := job.running_on) is not None
            and reason.code not in BY_REASON
            and job.id not in self._grouped
            and common.allowed(job, held.configuration)
        ]
        if not lost:
            return {}
        book, jobs = FreeGpus.of(self._snapshot), self._jobs
        for each, where in (self._pins | self.given | self.kept).items():
            book.take(jobs[each], where)
        for where in self._aside:
            book.take_nodes(where)
        planned = [(jobs[each], assignment.placement, 1) for each, assignment in plan.assignments.items()]
        due = [
            (job, set(where.nodes))
            for job, where, _ in planned
            if job.id in self._waited_s and job.id not in self.given
        ]
        planned += [(job, place, 1) for job in self._snapshot.unseen if (place := place_of(job)) is not None]
        starts = {
            (jobs[each].user, name)
            for each, assignment in plan.assignments.items()
            if jobs[each].phase is Phase.QUEUED
            for name in assignment.placement.nodes
        }
        short = [(due.user, pool.nodes) for due, pool in self._short if due.id in plan.waiting]
        pools: dict[tuple[object, ...], Pool] = {}
        kept: dict[JobId, Placement] = {}

        def keep(job: Job, held: Placement, more: int) -> None:
            if any(self._yields(job, held, each) for each, nodes in due if not nodes.isdisjoint(held.nodes)):
                return
            if (key := pool_key(job)) not in pools:
                pools[key] = Pool(self._snapshot, job, planned)
            most = max((gpus for user, gpus in pools[key].held.items() if user != job.user), default=0)
            open_to = pools[key].on(held) == held.gpus and all(
                pools[key].nodes[name].leave is None for name in held.nodes
            )
            own = [name for name in held.nodes if (job.user, name) in starts]
            for_own = any(user != job.user and any(name in nodes for name in own) for user, nodes in short)
            fits = open_to and book.has(held) and not book.allowance.refuses(job, held.gpus, held.gpu_type)
            if fits and (for_own or most >= pools[key].held[job.user] + more):
                kept[job.id] = held
                book.take(job, held)
                if more:
                    planned.append((job, held, 1))
                    for pool in pools.values():
                        pool.held[job.user] += pool.on(held)

        for job, held in sorted(lost, key=lambda each: (each[0].submit_s, each[0].id)):
            keep(job, held, held.gpus)
        if kept and self.kept:  # the policy stops others instead: keep all at once
            for job, held in self._running:
                if job.id not in kept and job.id not in self.kept and common.allowed(job, held.configuration):
                    keep(job, held, 0 if job.id in plan.assignments else held.gpus)
        return kept

    def _yields(self, job: Job, held: Placement, due: Job) -> bool:
        """Whether a running job is not kept by rule 4 where the policy gives its GPUs to this due job."""
        has, others = self._has[job.user], self._has[due.user]
        fewer = not others or (others < has and due.spec.min_gpus >= held.gpus)
        least_s = TURN_S if due.spec.min_gpus <= self._pool(due).share else LARGE_TURN_S
        return due.user != job.user and fewer and min(self._ran_s(job, held), self._waited_s[due.id]) >= least_s

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
                        f"user {job.user} holds {users[job.user]} GPUs"
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
