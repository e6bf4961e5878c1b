"""What every plan that lets jobs share GPUs must keep to, whoever made it. The loop acts on no plan that breaks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock_scheduler.model import Job, JobId, Pack, Placement, Plan, SharedGpus, Snapshot
from penstock_scheduler.policies.common import movable
from penstock_scheduler.sharing.packing import most_used_mb


def broken(snapshot: Snapshot, plan: Plan) -> tuple[str, ...]:
    """The rules that a plan breaks, in words; empty: none.

    1. Nobody shares on a cluster without agents.
    2. A job is in one pack, has an assignment on that node alone, and uses no more GPUs than the pack has.
    3. A node gives out no more GPUs than it has for us; those that are shared count once.
    4. What the jobs of a pack may use of a GPU's memory fits into it, as far as it is known. Each has a limit, no lower
       than what it has used; beside a guaranteed job, which has none and counts with what it has used, the others have
       what is left.
    5. Who may not be moved neither takes turns nor is a guest of others.
    6. A pack makes a promise to one of its own jobs only.
    """
    if not plan.shared:
        return ()
    state = snapshot.sharing
    if state is None:
        return ("jobs are to share GPUs, but no agent is there to let them",)
    jobs = {job.id: job for job in snapshot.jobs}
    found = []
    for job_id, count in Counter(job for group in plan.shared for job in group.jobs).items():
        if count > 1:
            found.append(f"job {job_id} is in {count} packs")
        if job_id not in plan.assignments:
            found.append(f"job {job_id} shares GPUs and has no assignment")
    placements = {job_id: assignment.placement for job_id, assignment in plan.assignments.items()}
    for group in plan.shared:
        found += _of_group(group, jobs, placements)
        for pack in group.packs:
            gpu_type = next((placements[job].gpu_type for job in pack.jobs if job in placements), "")
            found += _of_memory(snapshot, pack, placements, state.gpu_memory_mb.get(gpu_type, 0))
    room = {node.name: node.gpus - node.gpus_others for node in snapshot.nodes}
    for name, gpus in plan.gpus_held().items():
        if gpus > room.get(name, 0):
            found.append(f"{gpus} GPUs are allocated on {name}, which has {room.get(name, 0)}")
    return tuple(found)


def _of_group(group: SharedGpus, jobs: Mapping[JobId, Job], placements: Mapping[JobId, Placement]) -> list[str]:
    found = []
    for pack in group.packs:
        if pack.gpus > group.gpus:
            found.append(f"a pack of {pack.gpus} GPUs on {group.gpus} of {group.node} never has its turn")
        if pack.guaranteed is not None and pack.guaranteed not in pack.jobs:
            found.append(f"job {pack.guaranteed} has the promise of a pack that it is not in")
        for job_id in pack.jobs:
            where = placements.get(job_id)
            if where is not None and (where.nodes != (group.node,) or where.gpus > pack.gpus):
                found.append(f"job {job_id} shares {pack.gpus} GPUs of {group.node}, but is assigned {where}")
            job = jobs.get(job_id)
            suspended = group.time_sliced or (pack.guaranteed not in (None, job_id))
            if job is not None and suspended and not movable(job):
                found.append(f"job {job_id} may not be stopped, but would take turns on {group.node}")
    return found


def _of_memory(snapshot: Snapshot, pack: Pack, placements: Mapping[JobId, Placement], memory_mb: int) -> list[str]:
    if not memory_mb or len(pack.jobs) < 2:
        return []
    assert snapshot.sharing is not None, "asked about sharing"
    found = []
    for job in pack.jobs if pack.guaranteed is None else ():
        limit_mb, seen_mb = pack.limit(job).memory_mb, snapshot.sharing.use(job).memory_mb
        if limit_mb < max(seen_mb, 1):
            limit = f"may have {limit_mb} MB" if limit_mb else "has no limit of memory"
            found.append(f"job {job} {limit} beside others and has used {seen_mb or 'nobody knows how many'} MB")
    used = most_used_mb(pack, snapshot.sharing.uses, placements)
    if used > memory_mb:
        found.append(f"jobs {', '.join(pack.jobs)} use {used} MB together of a GPU that has {memory_mb}")
    return found
