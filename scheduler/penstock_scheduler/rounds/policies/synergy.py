"""Synergy: CPU and memory by sensitivity, for GPUs that another policy has allocated.

After *Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters* (Mohan et al., OSDI '22). Nearly every cluster allocates
CPUs and memory in proportion to GPUs. Language models then leave most of their CPUs idle, while image models have too few. There
are three *stages*. Each can follow any policy, as in `[policy] stages = ["synergy-tune"]`:

- `proportional`: each job gets the *proportional share*, its GPUs' part of its node.
- `synergy-tune`:

  1. Each job asks for its *demand*: the least CPU and memory with which it reaches its full speed.
  2. The jobs are placed in the order of what they ask for (GPUs, then CPUs, then memory), the largest first. Each job goes to
     the node on which it fits with the least to spare.
  3. A job whose demand fits nowhere asks for the proportional share instead.
  4. If that does not fit either, some jobs hold more than the proportional share. On a node with enough free GPUs, the jobs
     with the most CPUs per GPU return to the proportional share, until the new job fits.

  So each job that gets GPUs is at least as fast as with the proportional share.
- `synergy-opt`: for the jobs of each node, an integer program finds the shares with the largest sum of speeds. The paper
  compares with an optimum that pools all nodes of a class; that one is `penstock_scheduler.rounds.solver.shares`.

A job on several nodes has these nodes to itself and gets all of their CPUs and memory. A job without a profile for its number
of GPUs gets the proportional share.

Slurm cannot change the share of a running job. So a job that stays on its GPUs keeps its share, with two exceptions: another
job needs the share, or spare CPUs make the job so much faster that a restart pays (Sia's restart factor). A job that may not be
restarted gets no more than the proportional share, so that no job ever waits for what it holds. Jobs that start or move may get
other nodes of the same kind than the policy chose, because the policy does not know where CPUs are free.

Beyond the paper, CPUs that are left on a node go to jobs there that did not get their demand. The preset
`synergy-tune:paper` leaves these CPUs idle. The preset `synergy-tune:reference` does what the authors did in their published
runs: it takes the first node that fits instead of the tightest one, and serves the jobs in the order of the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from penstock_scheduler.model import (
    Assignment,
    Job,
    JobId,
    Phase,
    Placement,
    Plan,
    ReasonCode,
    Share,
    Snapshot,
    Stop,
    StopCode,
)
from penstock_scheduler.people.units import times
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.stops import least_gain
from penstock_scheduler.rounds.policies.tuning import (
    Amount,
    Claim,
    Grant,
    NodeCapacity,
    TuneSettings,
    best_on,
    relative_speed,
    tune,
)
from penstock_scheduler.rounds.solver import python_mip


class NoSettings(BaseModel):
    """Sections `[policy.proportional]` and `[policy.synergy-opt]` of the settings file: these stages have no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


OPT_SECONDS = 10.0
"""Time for all programs of a round of `synergy-opt`. Nodes that are left then get synergy-tune's shares."""


class Proportional:
    """The stage `proportional`: the baseline, and what most sites have."""

    name = "proportional"
    allocates = True

    def __init__(self, settings: NoSettings) -> None:
        pass

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """Give every job its GPUs' part of its nodes."""
        assignments = {}
        rooms = {node.name: NodeCapacity.of(node) for node in snapshot.nodes}
        for job in snapshot.jobs:
            if (assignment := plan.assignments.get(job.id)) is not None:
                held = _share_held(job, assignment.placement)
                shares = held.shares if held is not None else _parts(assignment.placement, rooms)
                assignments[job.id] = _with_shares(assignment, shares)
        return dataclasses.replace(plan, assignments=assignments)


class SynergyTune:
    """The stage `synergy-tune`; see the module."""

    name = "synergy-tune"
    allocates = True

    def __init__(self, settings: TuneSettings) -> None:
        self._settings = settings

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """Give every job CPUs and memory. Jobs that start may get other nodes of the same kind."""
        stage = _Stage(snapshot, plan, self._settings)
        return stage.plan() if stage.grants is None else stage.plan(stage.grants)


class SynergyOpt:
    """The stage `synergy-opt`: the best shares on each node for the jobs that TUNE would put there."""

    name = "synergy-opt"
    allocates = True

    def __init__(self, settings: NoSettings) -> None:
        """Raises ConfigError if python-mip is not installed."""
        python_mip.library()

    def refine(self, snapshot: Snapshot, plan: Plan) -> Plan:
        """TUNE's plan, with better shares on each node for which there is time."""
        stage = _Stage(snapshot, plan, TuneSettings())
        if stage.grants is None:
            return stage.plan()
        left_s, grants = OPT_SECONDS, dict(stage.grants)
        by_node: dict[int, list[Claim]] = {}
        for claim in stage.claims:
            by_node.setdefault(grants[claim.job].node, []).append(claim)
        for node, claims in by_node.items():
            if left_s > 0 and not all(grants[claim.job].by_demand for claim in claims):
                left_s -= best_on(stage.rooms[node], claims, grants, left_s)
        return stage.plan(grants)


class _Stage:
    """A plan that gets CPUs and memory. `grants` is None if the plan's GPUs do not fit the nodes, a defect of the policy."""

    def __init__(self, snapshot: Snapshot, plan: Plan, settings: TuneSettings) -> None:
        self._snapshot = snapshot
        self._plan = plan
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._index = {node.name: index for index, node in enumerate(snapshot.nodes)}
        self._shares: dict[JobId, tuple[Share, ...]] = {}
        self._unknown: set[JobId] = set()
        self._starting: dict[str, list[JobId]] = {}
        """Node -> the jobs on several nodes that start there."""
        self.rooms = [NodeCapacity.of(node) for node in snapshot.nodes]
        by_name = {room.name: room for room in self.rooms}
        single: list[tuple[Job, Placement]] = []
        for job in snapshot.jobs:
            assignment = plan.assignments.get(job.id)
            if assignment is None:
                continue
            where, held = assignment.placement, _share_held(job, assignment.placement)
            if len(where.shares) == 1 and where.shares[0].node in self._index:
                single.append((job, where))
                continue
            self._shares[job.id] = held.shares if held is not None else _parts(where, by_name)
            for share in self._shares[job.id]:
                self._leave(share)
                if held is None:
                    self._starting.setdefault(share.node, []).append(job.id)
        self._doors: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.claims = [self._claim(job, where) for job, where in single]
        self.grants = tune(self.claims, self.rooms, settings)
        if self.grants is None:
            self.claims = [self._claim(job, where, as_planned=True) for job, where in single]
            self.grants = tune(self.claims, self.rooms, settings)

    def _leave(self, share: Share) -> None:
        """Take the share that a job on several nodes has of one node out of what is free."""
        if (index := self._index.get(share.node)) is not None:
            room = self.rooms[index]
            self.rooms[index] = dataclasses.replace(
                room,
                gpus=room.gpus - share.gpus,
                cpus=max(room.cpus - share.cpus, 0),
                memory_mb=max(room.memory_mb - share.memory_mb, 0),
            )

    def _claim(self, job: Job, where: Placement, *, as_planned: bool = False) -> Claim:
        """What a job on one node is to get. `as_planned`: on the policy's node alone."""
        share = where.shares[0]
        node, held = self._index[share.node], _share_held(job, where)
        profile = self._snapshot.facts[job.id].sensitivity
        table = profile.at(share.gpus) if profile is not None else None
        has: Amount | None = None
        if held is not None:
            has = Amount(held.shares[0].cpus, held.shares[0].memory_mb)
            if not has.cpus:  # it runs with the unknown amount that its user asked for: assume the proportional share
                self._unknown.add(job.id)
                has = self.rooms[node].proportional(share.gpus)
        if has is not None or as_planned or job.phase in (Phase.STARTING, Phase.STOPPING):
            nodes: tuple[int, ...] = (node,)
        else:
            nodes = self._like(where, job)
        may_exceed = job.movable and job.id not in self._unknown
        return Claim(job.id, share.gpus, table, nodes, has, may_exceed, self._least_gain(job, has))

    def _like(self, where: Placement, job: Job) -> tuple[int, ...]:
        """Nodes of the same kind, on which the job could run as well."""
        door = (where.gpu_type, where.partition, job.reservation, job.nodes)
        if door not in self._doors:
            self._doors[door] = tuple(
                index
                for index, node in enumerate(self._snapshot.nodes)
                if (node.gpu_type, node.reservation) == (where.gpu_type, job.reservation)
                and where.partition in node.partitions
                and (job.nodes is None or job.nodes.admits(node))
            )
        return self._doors[door]

    def _least_gain(self, job: Job, has: Amount | None) -> float:
        """One over Sia's restart factor, (T - N S) / (T + S), but not less than `stops.least_gain`."""
        if has is None:
            return 1.0
        held = job.allocation
        ran_s = common.ran_s(self._snapshot, job, held.gpus if held is not None else 1)
        cost_s = self._snapshot.facts[job.id].restart_cost_s
        worth_s = ran_s - job.restarts * cost_s
        if worth_s <= 0 or job.phase is not Phase.RUNNING:
            return float("inf")
        return max((ran_s + cost_s) / worth_s, least_gain(cost_s))

    def plan(self, grants: Mapping[JobId, Grant] | None = None) -> Plan:
        """The plan with CPUs and memory."""
        assignments = dict(self._plan.assignments)
        for job_id, shares in self._shares.items():
            assignments[job_id] = _with_shares(assignments[job_id], shares)
        claims: Iterable[Claim] = self.claims if grants is not None else ()
        stops = dict(self._plan.stops)
        gains = {name: list(jobs) for name, jobs in self._starting.items()}
        """Node -> the jobs that start there, or get more of it."""
        for claim in claims:
            assert grants is not None
            if claim.held is None or not grants[claim.job].amount.within(claim.held):
                gains.setdefault(self.rooms[grants[claim.job].node].name, []).append(claim.job)
        for claim in claims:
            assert grants is not None
            before, grant = assignments[claim.job], grants[claim.job]
            if claim.job in self._unknown:
                continue
            room = self.rooms[grant.node]
            share = Share(room.name, claim.gpus, grant.amount.cpus, grant.amount.memory_mb)
            after = _with_shares(before, (share,))
            if claim.table is not None:
                speed = relative_speed(claim.table, claim.gpus, room, grant.amount)
                note = f"{grant.amount}, {speed:.2f} times as fast as with its GPUs' part of the node"
            else:
                note = f"{grant.amount}, its GPUs' part of the node: no profile says what it needs"
            code = before.reason.code
            if claim.held is not None and claim.held != grant.amount:
                note = f"restarts for another share: {note}"
                code = ReasonCode.CHOSEN
                stops[claim.job] = _stop(claim, room, claim.held, grant.amount, gains.get(room.name, ()))
            reason = dataclasses.replace(before.reason, code=code, text=f"{before.reason.text}; {note}")
            assignments[claim.job] = dataclasses.replace(after, reason=reason)
        return dataclasses.replace(self._plan, assignments=assignments, stops=stops)


def _stop(claim: Claim, room: NodeCapacity, held: Amount, given: Amount, gains: Sequence[JobId]) -> Stop:
    """Why a job restarts on the same GPUs with another share. `gains`: jobs that start on its node, or get more of it."""
    change = f"from {held} to {given} on node {room.name}"
    before, after = (relative_speed(claim.table, claim.gpus, room, amount) for amount in (held, given))
    if after > before * claim.least_gain:
        faster = f"about {times(after / before)} as fast" if before > 0 else "it makes progress with them"
        return Stop(StopCode.GAIN, f"{change}: {faster}")
    if (other := next((job for job in gains if job != claim.job), None)) is not None:
        return Stop(StopCode.PREEMPTED, f"{change}: makes room for job {other}", makes_room_for=other)
    return Stop(StopCode.PREEMPTED, f"{change}: jobs that Penstock does not manage need the rest")


def _share_held(job: Job, where: Placement) -> Placement | None:
    """What the job has, or is about to have, if the plan does not change its GPUs; None: it starts anew."""
    has = job.allocation if job.phase is Phase.RUNNING else job.target
    same = has is not None and [(s.node, s.gpus) for s in has.shares] == [(s.node, s.gpus) for s in where.shares]
    return has if same and job.phase is not Phase.QUEUED else None


def _parts(where: Placement, rooms: Mapping[str, NodeCapacity]) -> tuple[Share, ...]:
    """The proportional share on each node, the same on all: Slurm gives equal tasks of a job equal shares."""
    parts = [rooms[share.node].proportional(share.gpus) for share in where.shares if share.node in rooms]
    if len(parts) < len(where.shares):
        return where.shares
    cpus, memory_mb = min(part.cpus for part in parts), min(part.memory_mb for part in parts)
    return tuple(dataclasses.replace(share, cpus=cpus, memory_mb=memory_mb) for share in where.shares)


def _with_shares(assignment: Assignment, shares: tuple[Share, ...]) -> Assignment:
    return dataclasses.replace(assignment, placement=dataclasses.replace(assignment.placement, shares=shares))
