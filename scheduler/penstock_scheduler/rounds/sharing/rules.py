"""Rules for every plan with co-located jobs. The loop acts on no plan that breaks one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from penstock_scheduler.model import Job, JobId, Pack, Placement, Plan, SharedGpus, Snapshot
from penstock_scheduler.rounds.sharing.packing import most_used_mb


def broken(snapshot: Snapshot, plan: Plan) -> tuple[str, ...]:
    """The rules that a plan breaks, each as a sentence; empty: none.

    1. On a cluster without agents, no jobs share GPUs.
    2. A co-located job is in exactly one pack. It has an assignment on the pack's node alone, and uses no more GPUs
       than the pack has.
    3. No more GPUs of a node are allocated than Penstock may use. Shared GPUs count once.
    4. The jobs of a pack fit into a GPU's memory, as far as that is known. Each job has a limit, which is no lower than
       what it has used. A guaranteed job has no limit and counts with what it has used; the other jobs have what it
       leaves. A pack on a node where nothing new may start is as it is.
    5. A job that may not be stopped is neither time-sliced nor placed beside a guaranteed job.
    6. The guaranteed job of a pack is one of its jobs.
    """
    if not plan.shared:
        return ()
    state = snapshot.sharing
    if state is None:
        return ("jobs share GPUs, but no agent runs",)
    jobs = {job.id: job for job in snapshot.jobs}
    found = list(_of_jobs(plan))
    placements = {job_id: assignment.placement for job_id, assignment in plan.assignments.items()}
    silent = {node.name for node in snapshot.nodes if not node.may_start}
    for group in plan.shared:
        found += _of_group(group, jobs, placements)
        for pack in group.packs:
            gpu_type = next((placements[job].gpu_type for job in pack.jobs if job in placements), "")
            if group.node in silent:
                continue
            found += _of_memory(snapshot, pack, placements, state.gpu_memory_mb.get(gpu_type, 0))
    ours = {node.name: node.gpus - node.gpus_others for node in snapshot.nodes}
    for name, gpus in plan.gpus_held().items():
        if name in ours and gpus > ours[name]:
            found.append(f"{gpus} GPUs are allocated on {name}, but Penstock may use only {ours[name]} there")
    return tuple(found)


def _of_jobs(plan: Plan) -> Iterator[str]:
    for job_id, count in Counter(job for group in plan.shared for job in group.jobs).items():
        if count > 1:
            yield f"job {job_id} is in {count} packs"
        if job_id not in plan.assignments:
            yield f"job {job_id} shares GPUs and has no assignment"


def _of_group(group: SharedGpus, jobs: Mapping[JobId, Job], placements: Mapping[JobId, Placement]) -> list[str]:
    found = []
    for pack in group.packs:
        if pack.gpus > group.gpus:
            found.append(f"a pack of {pack.gpus} GPUs never runs on {group.gpus} GPUs of {group.node}")
        if pack.guaranteed is not None and pack.guaranteed not in pack.jobs:
            found.append(f"job {pack.guaranteed} is the guaranteed job of a pack that it is not in")
        for job_id in pack.jobs:
            where = placements.get(job_id)
            if where is not None and (where.nodes != (group.node,) or where.gpus > pack.gpus):
                found.append(f"job {job_id} shares {pack.gpus} GPUs of {group.node}, but is assigned {where}")
            job = jobs.get(job_id)
            suspended = group.time_sliced or (pack.guaranteed not in (None, job_id))
            if job is not None and suspended and not job.movable:
                found.append(f"job {job_id} may not be stopped, but would be suspended on {group.node}")
    return found


def _of_memory(snapshot: Snapshot, pack: Pack, placements: Mapping[JobId, Placement], memory_mb: int) -> list[str]:
    if not memory_mb or len(pack.jobs) < 2:
        return []
    assert snapshot.sharing is not None, "the plan has shared GPUs"
    found = []
    for job in pack.jobs if pack.guaranteed is None else ():
        limit_mb, seen_mb = pack.limit(job).memory_mb, snapshot.sharing.use(job).memory_mb
        if limit_mb < max(seen_mb, 1):
            limit = f"has a memory limit of {limit_mb} MB" if limit_mb else "has no memory limit"
            found.append(f"job {job} {limit} in its pack and has used {seen_mb or 'an unknown number of'} MB")
    used = most_used_mb(pack, snapshot.sharing.uses, placements)
    if used > memory_mb:
        found.append(f"jobs {', '.join(pack.jobs)} use {used} MB together on a GPU of {memory_mb} MB")
    return found
