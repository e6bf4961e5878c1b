"""Why a job can never start, as a reason that its user can act on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock_scheduler.model import Configuration, Job, JobSpec, Node, NodeChoice, Reason, ReasonCode
from penstock_scheduler.people.units import shortened
from penstock_scheduler.rounds.policies import common


def never_fits(job: Job, nodes: Sequence[Node], options: Iterable[Configuration] | None = None) -> Reason:
    """Why the job can never start. `options`: the configurations of the site; None: those for a job of its size."""
    spec, here = job.spec, "here"
    if job.nodes is not None:
        allowed_by = shortened(str(job.nodes))
        here = f"among those that {allowed_by} allows"
        choice = job.nodes.without_request or NodeChoice()
        every, named = nodes, [node for node in nodes if choice.admits(node)]
        nodes, options = [node for node in named if job.nodes.admits(node)], None
        if not nodes and any(replace(job.nodes, kept=frozenset()).admits(node) for node in every):
            text = "waits until jobs that Penstock does not manage, and that came before it, have started"
            return Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))
        if named and not nodes:
            return _lacks_amounts(job, job.nodes, named)
        if not nodes:
            text = f"no managed node is allowed by {allowed_by}: submit it with other nodes or features"
            return Reason(ReasonCode.NEVER_FITS, text, common.smallest_need(job))
    if options is None:
        options = common.configurations(nodes, {spec.max_gpus})
    shapes = [option for option in options if spec.allows_type(option.gpu_type)]
    text = (
        _lacks_type(spec, sorted({node.gpu_type for node in nodes}), here)
        or _lacks_count(spec, shapes, here)
        or _lacks_nodes(spec, shapes, here)
        or "its model gives no progress on any configuration: check its goodput_table"
    )
    return Reason(ReasonCode.NEVER_FITS, text, common.smallest_need(job))


def _lacks_type(spec: JobSpec, types: Sequence[str], here: str) -> str:
    """Why none of these GPU types is for the job, or an empty text. `here` names the nodes that it may use."""
    if not types or any(map(spec.allows_type, types)):
        return ""
    wanted = f"has {', '.join(spec.gpu_types)}" if spec.gpu_types else "is of another type than those excluded"
    return f"no node {here} {wanted}; the types are {', '.join(types)}: change gpu_types or excluded_gpu_types"


def _lacks_count(spec: JobSpec, shapes: Sequence[Configuration], here: str) -> str:
    """Why the job can have none of the counts of GPUs of these configurations, or an empty text."""
    sizes = sorted({shape.gpus for shape in shapes})
    if not sizes:
        return f"no node {here} with GPUs of its types takes new jobs now: all are down, silent or drained"
    if not any(spec.min_gpus <= size <= spec.max_gpus for size in sizes):
        few_to_many = f"{spec.min_gpus}" + (f" to {spec.max_gpus}" if spec.max_gpus != spec.min_gpus else "")
        counts = ", ".join(map(str, sizes))
        return f"needs {few_to_many} GPUs, but jobs can have {counts} {here}: change min_gpus or max_gpus"
    if any(spec.allows(shape.gpu_type, shape.gpus) for shape in shapes):
        return ""
    of = f"gpus_per_task={spec.gpus_per_task}" if spec.gpus_per_task > 1 else f"scale_unit={spec.scale_unit}"
    return f"no count that jobs can have {here} is a multiple of {of}: change it or max_gpus"


def _lacks_nodes(spec: JobSpec, shapes: Sequence[Configuration], here: str) -> str:
    """Why no configuration has the GPUs on as many nodes as the job may have, or an empty text."""
    if any(spec.allows(shape.gpu_type, shape.gpus, shape.nodes) for shape in shapes):
        return ""
    on = "" if spec.max_nodes is None else f" on at most {spec.max_nodes} node{'s' if spec.max_nodes != 1 else ''}"
    each = f" with a multiple of {spec.gpus_per_task} on each node" if spec.gpus_per_task > 1 else ""
    return f"no nodes {here} have its GPUs{on}{each}: lower min_gpus, or allow more nodes"


def _lacks_amounts(job: Job, choice: NodeChoice, nodes: Sequence[Node]) -> Reason:
    """Why no node has the CPUs and memory that a job needs beside its GPUs."""
    request = choice.request
    assert request is not None, "all its nodes are named"
    needs = f"needs {request} on each node" + ("" if choice.gpus == 1 else f" with {choice.gpus} GPUs")

    if any(request.fits(min(choice.gpus, node.gpus), node, node.cpus, node.memory_mb) for node in nodes):
        text = f"{needs}, and jobs that Penstock does not manage leave less on every node: ask for less to start sooner"
        return Reason(ReasonCode.WAITING_CAPACITY, text, common.smallest_need(job))
    most_mb = max(node.memory_mb for node in nodes)
    most = f"{max(node.cpus for node in nodes)} CPUs" + (f" and {most_mb} MB" if most_mb else "")
    text = f"{needs}, but no node that it may use has more than {most} for jobs: ask for less"
    return Reason(ReasonCode.NEVER_FITS, text, common.smallest_need(job))
