"""The policy `gandiva`: one round, step by step, and its plan. The package's documentation explains the algorithm."""

from __future__ import annotations

from dataclasses import replace

from penstock_scheduler.model import Assignment, Job, JobId, Pack, Phase, Plan, Reason, ReasonCode, SharedGpus, Snapshot
from penstock_scheduler.rounds.policies import common
from penstock_scheduler.rounds.policies.gandiva.landing import land
from penstock_scheduler.rounds.policies.gandiva.moves import grow, migrate, pack_jobs, shrink, undo_packs
from penstock_scheduler.rounds.policies.gandiva.state import RoundState, SharedNode
from penstock_scheduler.rounds.policies.gandiva.trials import GandivaSettings


def plan_of(state: RoundState) -> Plan:
    """What the round has decided, in the order of the snapshot's jobs."""
    assignments: dict[JobId, Assignment] = {}
    shared_gpus: list[SharedGpus] = []
    for job_id, where in state.fixed.items():
        job = state.jobs[job_id]
        if job.phase is Phase.QUEUED:
            reason = common.given(job, where, "which no other job uses")
            assignments[job_id] = common.assign(job, where, reason, state.snapshot)
        else:
            assignments[job_id] = common.pinned_assignment(job, where, state.snapshot)
    slice_s = state.settings.slice_s
    for shared in state.nodes.values():
        if shared.sliced:
            packs = state.trials.ranked(shared.packs, state.jobs)
            shared_gpus.append(SharedGpus(shared.node.name, shared.gpus, packs, slice_s))
        for pack in shared.packs:
            if not shared.sliced and len(pack.jobs) > 1:
                shared_gpus.append(SharedGpus(shared.node.name, pack.gpus, (pack,), slice_s))
            for job_id in pack.jobs:
                assignments[job_id] = _assignment(state, state.jobs[job_id], shared, pack)
    order = [job.id for job in state.snapshot.jobs]
    return Plan(
        state.snapshot.round,
        {job_id: assignments[job_id] for job_id in order if job_id in assignments},
        {job_id: state.waiting[job_id] for job_id in order if job_id in state.waiting},
        shared=tuple(shared_gpus),
        stops=state.stops,
    )


def _assignment(state: RoundState, job: Job, shared: SharedNode, pack: Pack) -> Assignment:
    """What a job of a pack gets, with the goodput that co-located jobs and time slices leave it."""
    where = common.on_one_node(job, shared.node, state.gpus[job.id])
    part = min(shared.gpus / shared.wanted, 1.0) if shared.sliced else 1.0
    others = [other for other in pack.jobs if other != job.id]
    texts = [f"on GPUs that job {' and job '.join(others)} trains on at the same time"] if others else []
    if shared.sliced:
        slices = f"in time slices with {len(shared.packs) - 1} others"
        trial = job.spec.trial_group is not None
        texts.append(f"{slices}, the better trials of a search first" if trial else f"{part:.0%} of the time, {slices}")
    if job.id in state.notes:
        texts.append(state.notes[job.id])
    reason = common.given(job, where, ", ".join(texts) or "which no other job uses")
    if others or shared.sliced:
        reason = replace(reason, code=ReasonCode.SHARES)
    if common.in_flight(job):
        reason = Reason(ReasonCode.IN_FLIGHT, f"on its way to {where.configuration}")
    goodput = common.rate(state.snapshot.facts[job.id].model, where.configuration) * part
    for other in others:
        assert state.sharing is not None, "packs are of a cluster with agents"
        kinds = [state.sharing.use(each).kind for each in (job.id, other)]
        goodput *= state.known.share(where.gpu_type, *kinds) or 0.5
    return common.assign(job, where, reason, state.snapshot, goodput)


class Gandiva:
    """Time slices, packing and migration, by what is measured while jobs run.

    From one round to the next it keeps only the jobs' requests.
    """

    name = "gandiva"
    shares = True

    def __init__(self, settings: GandivaSettings) -> None:
        self._settings = settings
        self._requests = common.Requests()

    def decide(self, snapshot: Snapshot) -> Plan:
        """One round."""
        state = RoundState(self._settings, snapshot, self._requests.of(snapshot))
        introspective = self._settings.mode == "introspective" and snapshot.sharing is not None
        if introspective:
            undo_packs(state)
        for shared in state.nodes.values():
            shrink(state, shared, 0)
        land(state, introspective=introspective)
        if introspective:
            migrate(state)
            pack_jobs(state)
        grow(state)
        return plan_of(state)
