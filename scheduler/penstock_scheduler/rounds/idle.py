"""Since when GPUs are idle, by observations of the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from penstock_scheduler.model import Job, Node, SharedGpus


def idle_since(
    before: Mapping[str, tuple[float, ...]],
    nodes: Iterable[Node],
    jobs: Iterable[Job],
    groups: Iterable[SharedGpus],
    now_s: float,
) -> dict[str, tuple[float, ...]]:
    """Since when each GPU that is allocated to no job is observed idle, on nodes with a job that grows into idle GPUs.

    It is not known which of a node's idle GPUs a job takes; the one that came free last is assumed. So if n GPUs are idle
    since a time t, at least n GPUs were idle at every moment since t.

    Args:
        before: the result for the previous observation.
        nodes: all nodes.
        jobs: all jobs; those in flight with their targets.
        groups: GPUs that jobs share.
        now_s: the time, s since 1970.

    Returns:
        Node -> one time for each idle GPU, s since 1970, the earliest first.
    """
    jobs, groups = tuple(jobs), tuple(groups)
    watched = {
        node for job in jobs if job.spec.grow_shrink and job.allocation is not None for node in job.allocation.nodes
    }
    if not watched:
        return {}
    held: Counter[str] = Counter()
    for group in groups:
        held[group.node] += group.gpus
    sharers = {job for group in groups for job in group.jobs}
    for job in jobs:
        if job.id in sharers:
            continue
        its: Counter[str] = Counter()
        for where in (job.allocation, job.target):
            its |= Counter({share.node: share.gpus for share in where.shares} if where is not None else {})
        held += its
    found = {}
    for node in nodes:
        if node.name in watched:
            free = max(node.gpus_for_us - held[node.name], 0)
            known = before.get(node.name, ())[:free]
            found[node.name] = (*known, *[now_s] * (free - len(known)))
    return found
