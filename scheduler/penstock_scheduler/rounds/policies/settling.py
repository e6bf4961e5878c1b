"""From chosen configurations to nodes, for policies that choose by numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock_scheduler.model import Configuration, Job, JobId, Placement, Snapshot
from penstock_scheduler.rounds.free_gpus import FreeGpus
from penstock_scheduler.rounds.placement import place
from penstock_scheduler.rounds.policies.equals import unswapped


def settle(
    snapshot: Snapshot,
    pins: Mapping[JobId, Placement],
    chosen: Mapping[JobId, Configuration],
    instead: Iterable[tuple[JobId, Configuration]],
) -> dict[JobId, Placement]:
    """Nodes for configurations that a policy has chosen by numbers of GPUs alone.

    Args:
        snapshot: the round's.
        pins: placements of the jobs that must stay.
        chosen: job -> configuration. Jobs are served in this order; a job that a limit refuses gets no nodes.
        instead: further configurations. A job without nodes gets the first one of its own for which GPUs are free.

    Returns:
        Placements of jobs that are not pinned.
    """
    chosen = unswapped(snapshot, chosen, _moves(snapshot, pins, chosen))
    jobs = {job.id: job for job in snapshot.jobs}
    free = FreeGpus.of(snapshot)
    for job_id, pin in pins.items():
        free.take(jobs[job_id], pin)
    allowance = free.allowance.copy()
    wanted = {}
    for job_id, option in chosen.items():
        if allowance.refuses(jobs[job_id], option.gpus, option.gpu_type) is None:
            allowance.take(jobs[job_id], option.gpus, option.gpu_type)
            wanted[job_id] = option
    running = {job.id: where for job in snapshot.jobs if (where := job.running_on)}
    placements = place(
        snapshot.nodes,
        wanted,
        {job_id: jobs[job_id].partitions for job_id in wanted},
        {job_id: running[job_id] for job_id in wanted if job_id in running},
        pins,
        reservations={job.id: job.reservation for job in snapshot.jobs if job.reservation},
        choices={job.id: job.nodes for job in snapshot.jobs if job.nodes is not None},
        requests={job.id: job.request for job in snapshot.jobs if job.request is not None},
    ).placements
    for job_id, placement in placements.items():
        free.take(jobs[job_id], placement)
    for job_id, option in instead:
        if job_id not in placements and (found := free.find(jobs[job_id], (option,))) is not None:
            placements[job_id] = found
            free.take(jobs[job_id], found)
    return placements


def _moves(snapshot: Snapshot, pins: Mapping[JobId, Placement], chosen: Mapping[JobId, Configuration]) -> list[Job]:
    """The running jobs that get another configuration, or none."""
    return [job for job in snapshot.jobs if job.running_as not in (None, chosen.get(job.id)) and job.id not in pins]
