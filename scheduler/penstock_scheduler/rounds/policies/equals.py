"""Equal jobs keep their places: no job is stopped only to give an equal one its GPUs.

Two jobs are *equal* if they have the same owner and rights, the same job spec, about the same speed on the GPUs that the plan
gives them, and about the same work left. A policy ranks even such jobs, by their age or by a small part of their work, and may
give each the GPUs of the other. That costs two restarts and gains nothing.

The GPUs of a plan are therefore given to equal jobs in the way that stops fewest. Both steps only exchange what two jobs get, so
that they change the use of no node, limit or budget:

1. `unswapped`: configurations, before a policy looks for nodes.
2. `settled`: nodes, in the finished plan of any policy. Two jobs that get one configuration and may use the same nodes need not
   be equal for that.

A job that waits is equal to no running job, because the policy chooses which of them runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from penstock_scheduler.model import (
    Assignment,
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
)
from penstock_scheduler.rounds.policies import common

SAME_SPEED = 0.05
"""Two jobs are as fast as each other if their goodputs differ by less than this part; as `stops.LEAST_GAIN`."""

SAME_WORK = 0.1
"""Two jobs have as much left if that differs by less than this part. It changes a job's weight in `sia` by a twentieth."""

NEW_GPU_S = 1800.0
"""Of jobs whose work is unknown, GPU-seconds that count in addition to those that they have had; as `NEW_S` of `sia`."""


def unswapped(
    snapshot: Snapshot,
    chosen: Mapping[JobId, Configuration],
    moves: Sequence[Job],
    rate: Callable[[JobId, Configuration], float] | None = None,
) -> dict[JobId, Configuration]:
    """The same configurations for the same jobs, so given to equal running jobs that most of these keep what they have.

    `moves` are the running jobs that `chosen` gives other configurations than they have, or none. `rate` is the goodput of a
    job on a configuration, if that is known already.
    """
    left = {held for job in moves if (held := job.running_as) is not None}
    if not any(chosen.get(job.id) in left for job in moves):
        return dict(chosen)
    result, equals = dict(chosen), _Equals(snapshot, rate)
    gets: dict[tuple[object, ...], list[Job]] = {}
    for job in moves:
        if (option := chosen.get(job.id)) is not None:
            gets.setdefault((option, equals.step(job), *equals.rights(job)), []).append(job)
    for job in moves:
        held, instead = job.running_as, result.get(job.id)
        assert held is not None, "it runs"
        if instead == held:
            continue  # it has exchanged already
        step, rights = equals.step(job), equals.rights(job)
        near = (gets.get((held, step + by, *rights), ()) for by in (0, -1, 1))
        for other in itertools.chain.from_iterable(near):
            if result.get(other.id) != held or not equals.may_exchange(job, other, held, instead):
                continue
            result[job.id] = held
            if instead is None:
                del result[other.id]
            else:
                result[other.id] = instead
                if instead != other.running_as:
                    gets.setdefault((instead, equals.step(other), *rights), []).append(other)
            break
    return result


def settled(snapshot: Snapshot, plan: Plan, stops: Sequence[Job]) -> Plan:
    """The plan, so given to equal jobs that most running jobs keep their GPUs. `stops`: the running jobs that it stops."""
    if not stops:
        return plan
    exchange = _Exchange(snapshot, plan)
    moves = [job for job in stops if exchange.may(job)]
    again = bool(moves)
    while again:
        again = False
        for job in moves:
            again |= exchange.kept(job)
    return exchange.plan()


class _Exchange:
    """Exchanges what jobs get in a plan."""

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        self._snapshot, self._plan = snapshot, plan
        self._assignments, self._waiting = dict(plan.assignments), dict(plan.waiting)
        groups = snapshot.sharing.groups if snapshot.sharing is not None else ()
        self._shares = {job for group in (*groups, *plan.shared) for job in group.jobs}
        self._away = {run.job for run in snapshot.cloud.runs} if snapshot.cloud is not None else set()
        self._jobs: dict[JobId, Job] = {}
        self._gets: dict[tuple[Share, ...], list[JobId]] = {}
        """GPUs that the plan gives -> the jobs that get so many on these nodes, and have others or none."""
        self._equals = _Equals(snapshot)
        self._done = False

    def may(self, job: Job) -> bool:
        """Whether the job may exchange what it gets. Jobs on their way, in the cloud or on shared GPUs may not."""
        return job.phase in (Phase.RUNNING, Phase.QUEUED) and job.id not in self._shares and job.id not in self._away

    def _find(self) -> None:
        """Look up who gets what, once a job has been found that may want to know."""
        for job in self._snapshot.jobs:
            given = self._assignments.get(job.id)
            if given is None or given.placement is job.allocation or not self.may(job):
                continue
            if job.running_on is None or not given.placement.suits(job.running_on):
                self._jobs[job.id] = job
                self._gets.setdefault(_gpus(given.placement), []).append(job.id)
        common.look_up(self._snapshot, ((job, self._assignments[job].configuration) for job in self._jobs))

    def kept(self, job: Job) -> bool:
        """Let a running job keep its GPUs if the job that gets them can have what this one gets."""
        held, given = job.running_on, self._assignments.get(job.id)
        assert held is not None, "it runs"
        if not self._done:
            self._done = True
            self._find()
        if given is not None and given.placement.suits(held):
            return False
        for other_id in self._gets.get(_gpus(held), ()):
            other = self._jobs[other_id]
            theirs = self._assignments[other_id]
            if theirs.placement.suits(held) and self._exchangeable(job, other, held, given):
                self._exchange(job, other, given)
                return True
        return False

    def _exchange(self, job: Job, other: Job, given: Assignment | None) -> None:
        """The job keeps its GPUs, and the other one, which would have got them, gets what the job would have got."""
        held, theirs = job.running_on, self._assignments[other.id]
        assert held is not None, "it runs"
        self._gets[_gpus(held)].remove(other.id)
        self._assignments[job.id] = self._assigned(job, held, other)
        if given is None:
            del self._assignments[other.id]
            self._waiting[other.id] = self._waiting.pop(job.id)
            return
        self._gets[_gpus(given.placement)].remove(job.id)
        stays = other.running_on is not None and given.placement.suits(other.running_on)
        if not stays:
            self._gets[_gpus(given.placement)].append(other.id)
        if not stays and given.configuration == theirs.configuration:
            self._assignments[other.id] = dataclasses.replace(theirs, placement=given.placement)
        else:
            self._assignments[other.id] = self._assigned(other, given.placement, job)

    def _exchangeable(self, job: Job, other: Job, held: Placement, given: Assignment | None) -> bool:
        codes = {each.reason.code for each in (given, self._assignments[other.id]) if each is not None}
        if not codes <= {ReasonCode.CHOSEN, ReasonCode.KEPT}:
            return False
        if given is not None and given.configuration == held.configuration and _as_placed(job, other):
            own_amounts = any(share.cpus or share.memory_mb for share in given.placement.shares)
            if not own_amounts:
                return True
        instead = None if given is None else given.configuration
        return other.running_on is not None and self._equals.may_exchange(job, other, held.configuration, instead)

    def _assigned(self, job: Job, placement: Placement, other: Job) -> Assignment:
        if job.running_on is not None and placement.suits(job.running_on):
            text = f"keeps {placement.configuration}: it would only change places with job {other.id}"
            return common.assign(job, job.running_on, Reason(ReasonCode.KEPT, text), self._snapshot)
        reason = common.given(job, placement, f"because job {other.id} keeps its GPUs")
        return common.assign(job, placement, reason, self._snapshot)

    def plan(self) -> Plan:
        """The plan after all exchanges."""
        if self._assignments == self._plan.assignments:
            return self._plan
        ids = [job.id for job in self._snapshot.jobs]
        return dataclasses.replace(
            self._plan,
            assignments={job: self._assignments[job] for job in ids if job in self._assignments},
            waiting={job: self._waiting[job] for job in ids if job in self._waiting},
        )


def _gpus(placement: Placement) -> tuple[Share, ...]:
    """The nodes and GPUs alone."""
    if all(not share.cpus and not share.memory_mb for share in placement.shares):
        return placement.shares
    return tuple(Share(share.node, share.gpus) for share in placement.shares)


def _as_placed(one: Job, other: Job) -> bool:
    """Whether the same nodes suit both jobs, whoever they belong to."""
    return (one.partitions, one.reservation, one.nodes, one.request, one.spec.grow_shrink) == (
        other.partitions,
        other.reservation,
        other.nodes,
        other.request,
        other.spec.grow_shrink,
    )


class _Equals:
    """Compares the running jobs of a snapshot, and remembers what it has found out about each of them."""

    def __init__(self, snapshot: Snapshot, rate: Callable[[JobId, Configuration], float] | None = None) -> None:
        self._facts = snapshot.facts
        self._rate = rate or self._by_model
        self._rights: dict[JobId, tuple[object, ...]] = {}
        self._work: dict[JobId, tuple[str, float]] = {}

    def rights(self, job: Job) -> tuple[object, ...]:
        """The owner of a job, where it may run, and the most telling parts of what it asks for."""
        if job.id not in self._rights:
            spec = job.spec
            self._rights[job.id] = (
                *(job.user, job.account, job.qos, job.weight, job.partitions, job.reservation, job.nodes, job.request),
                *(spec.min_gpus, spec.max_gpus, spec.model_family),
            )
        return self._rights[job.id]

    def step(self, job: Job) -> int:
        """The job's place on a scale of the work that jobs have left. Equal jobs are one step apart at most."""
        return math.floor(math.log(max(self._left(job.id)[1], 1e-9)) / -math.log(1 - SAME_WORK))

    def may_exchange(self, job: Job, other: Job, held: Configuration, instead: Configuration | None) -> bool:
        """Whether `job` may keep `held`, which a plan gives to `other`, if `other` gets `instead`, which it gives to `job`.

        Both run. `instead` is None if the plan gives `job` nothing.
        """
        return (
            job.movable
            and other.movable
            and self._same_work(job.id, other.id)
            and self.rights(job) == self.rights(other)
            and (job.spec is other.spec or job.spec == other.spec)
            and self._may_grow(job.id, other.id, held, instead)
            and self._same_speed(job.id, other.id, held, instead)
        )

    def _may_grow(self, job: JobId, other: JobId, held: Configuration, instead: Configuration | None) -> bool:
        """Whether the bound on the growth of jobs whose scaling is unknown lets the other job have this, too."""
        same = self._facts[job].largest_run_gpus == self._facts[other].largest_run_gpus
        return same or instead is None or instead.gpus <= held.gpus

    def _same_work(self, job: JobId, other: JobId) -> bool:
        (kind, mine), (other_kind, theirs) = self._left(job), self._left(other)
        return kind == other_kind and _about(mine, theirs, SAME_WORK)

    def _left(self, job: JobId) -> tuple[str, float]:
        """What a job has left, and how that is known; see `sia.costs`."""
        if job not in self._work:
            facts = self._facts[job]
            if facts.remaining_work is not None:
                found = ("reported", facts.remaining_work)
            elif facts.likely_work:
                found = ("likely", sorted(facts.likely_work)[len(facts.likely_work) // 2])
            else:
                found = ("age", NEW_GPU_S + sum(facts.attained_gpu_s.values()))
            self._work[job] = found
        return self._work[job]

    def _same_speed(self, job: JobId, other: JobId, held: Configuration, instead: Configuration | None) -> bool:
        if self._facts[job].model is self._facts[other].model:
            return True
        options = (held,) if instead is None else (held, instead)
        return all(_about(self._rate(job, each), self._rate(other, each), SAME_SPEED) for each in options)

    def _by_model(self, job: JobId, option: Configuration) -> float:
        return common.rate(self._facts[job].model, option)


def _about(one: float, other: float, part: float) -> bool:
    """Whether two numbers >= 0 differ by less than a part of the larger one."""
    return abs(one - other) <= part * max(one, other)
