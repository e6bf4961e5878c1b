"""Why a job can never start, as a reason that its user can act on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock_scheduler.model import Configuration, Job, Node, NodeChoice, Reason, ReasonCode
from penstock_scheduler.people.units import shortened
from penstock_scheduler.rounds.policies import common


def never_fits(job: Job, nodes: Sequence[Node], options: Iterable[Configuration] | None = None) -> Reason:
    """Why the job can never start. `options`: the configurations of the site; None: those for a job of its size."""
    spec = job.spec
    here = "here"
    if job.nodes is not None:
        allowed_by = shortened(str(job.nodes))
        here = f"among those that {allowed_by} allows"
        choice = job.nodes.without_request or NodeChoice()
        named = [node for node in nodes if choice.admits(node)]
        nodes, options = [node for node in named if job.nodes.admits(node)], None
        if named and not nodes:
            return _lacks_amounts(job, job.nodes, named)
        if not nodes:
            text = f"no managed node is allowed by {allowed_by}: submit it with other nodes or features"
            return Reason(ReasonCode.NEVER_FITS, text, common.smallest_need(job))
    if options is None:
        options = common.configurations(nodes, {spec.max_gpus})
    types = sorted({node.gpu_type for node in nodes})
    needs = common.smallest_need(job)
    if types and not any(map(spec.allows_type, types)):
        wanted = f"has {', '.join(spec.gpu_types)}" if spec.gpu_types else "is of another type than those excluded"
        text = f"no node {here} {wanted}; the types are {', '.join(types)}: change gpu_types or excluded_gpu_types"
        return Reason(ReasonCode.NEVER_FITS, text, needs)
    shapes = [option for option in options if spec.allows_type(option.gpu_type)]
    sizes = sorted({option.gpus for option in shapes})
    if not sizes:
        text = f"no node {here} with GPUs of its types takes new jobs now: all are down, silent or drained"
        return Reason(ReasonCode.NEVER_FITS, text, needs)
    if not any(spec.min_gpus <= size <= spec.max_gpus for size in sizes):
        few_to_many = f"{spec.min_gpus}" + (f" to {spec.max_gpus}" if spec.max_gpus != spec.min_gpus else "")
        text = (
            f"needs {few_to_many} GPUs, but jobs can have "
            f"{', '.join(map(str, sizes))} {here}: change min_gpus or max_gpus"
        )
        return Reason(ReasonCode.NEVER_FITS, text, needs)
    if not any(spec.allows(option.gpu_type, option.gpus) for option in shapes):
        name, unit = (
            ("gpus_per_task", spec.gpus_per_task) if spec.gpus_per_task > 1 else ("scale_unit", spec.scale_unit)
        )
        text = f"no count that jobs can have {here} is a multiple of {name}={unit}: change it or max_gpus"
        return Reason(ReasonCode.NEVER_FITS, text, needs)
    if not any(spec.allows(option.gpu_type, option.gpus, option.nodes) for option in shapes):
        on = (
            f"on at most {spec.max_nodes} node{'s' if spec.max_nodes != 1 else ''} "
            if spec.max_nodes is not None
            else ""
        )
        each = f"with a multiple of {spec.gpus_per_task} on each node " if spec.gpus_per_task > 1 else ""
        text = f"no nodes {here} have its GPUs {on}{each}: lower min_gpus, or allow more nodes"
        return Reason(ReasonCode.NEVER_FITS, text.replace(" :", ":"), needs)
    return Reason(
        ReasonCode.NEVER_FITS, "its model gives no progress on any configuration: check its goodput_table", needs
    )


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
