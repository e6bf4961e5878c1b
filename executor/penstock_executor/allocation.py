"""What Slurm allocated to the job: which GPUs of which type on which nodes.

A job's environment variables contain neither the GPU type nor the GPUs of other nodes, so each run asks Slurm once.
"""

from __future__ import annotations

import logging
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass

from penstock_executor.environment import Environment, Ranks, expand_hostlist
from penstock_executor.node_channel import devices_of_job
from penstock_profiles.wire import ControlMessage, control_file, read

log = logging.getLogger(__name__)

TRIES = 3
"""The most attempts to ask Slurm. While the controller does not answer, each takes scontrol 9 s (Slurm 22.05)."""

TIMEOUT_S = 30.0


class UnknownAllocation(RuntimeError):
    """Neither Slurm nor the caller says which GPUs the job has."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs of one job, all of one type."""

    gpu_type: str
    gpu_ids: dict[str, tuple[int, ...]]
    """Node name -> indices of the GPUs there; empty for a job without GPUs."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.gpu_ids)

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes together."""
        return sum(len(ids) for ids in self.gpu_ids.values())


def find_allocation(environment: Environment, gpu_type: str | None = None, retry_s: float = 1.0) -> Allocation:
    """The job's GPUs, from Slurm. If Slurm does not say: from the environment, as if all nodes were like this one, and of the
    type that penstockd has sent the job to.

    Args:
        environment: of the job.
        gpu_type: the GPU type if Slurm does not report one.
        retry_s: seconds between two attempts.

    Raises:
        UnknownAllocation: the GPU type is unknown.
    """
    found = _from_slurm(environment, retry_s)
    if found is not None and (found.gpu_type or (gpu_type is None and not found.gpus)):
        return found
    gpu_type = gpu_type or _told_type(environment)
    if gpu_type is None:
        raise UnknownAllocation("the GPU type is unknown: Slurm does not report one; set it with --gpu-type")
    if found is not None:
        return Allocation(gpu_type, found.gpu_ids)
    here = environment.gpu_ids or tuple(range(environment.gpus_on_node))
    return Allocation(gpu_type, dict.fromkeys(environment.nodes or (environment.node or "localhost",), here))


def _from_slurm(environment: Environment, retry_s: float) -> Allocation | None:
    """The job's GPUs as Slurm tells them, without the nodes that the job has left; None: Slurm cannot be asked."""
    if environment.job_id is None or environment.measuring is not None or not shutil.which("scontrol"):
        return None
    found = _ask_slurm(environment.job_id, retry_s)
    if found is None:
        return None
    if environment.left_nodes:
        kept = {node: ids for node, ids in found.gpu_ids.items() if node not in environment.left_nodes}
        found = Allocation(found.gpu_type, kept)
    # Slurm 22.05 shows an empty GRES for a job that was requeued from a node that died, although it has GPUs. A job
    # that shares GPUs has them from the node's agent, not from Slurm.
    ids = environment.gpu_ids or devices_of_job(environment)
    if not found.gpus and ids and environment.node:
        return Allocation(_type_of_node(environment.node), dict.fromkeys(found.gpu_ids, ids))
    return found


def parse_job(text: str, job_id: str) -> Allocation | None:
    """The allocation in the output of `scontrol -o -d show job`; None if it contains none.

    The type is empty if Slurm's GRES has no type, or the job has no GPUs. Of a heterogeneous job, only the component
    `job_id` counts.
    """
    gpu_types, gpu_ids = set(), {}
    for line in text.splitlines():
        if not re.search(rf"(?<!\S)JobId={re.escape(job_id)}(?!\S)", line):
            continue
        for nodes, gres in re.findall(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", line):
            ids: list[int] = []
            for gpu_type, indices in re.findall(r"(?:^|,)gpu(?::([^:(),]+))?:\d+\(IDX:([\d,-]+)\)", gres):
                gpu_types.add(gpu_type)
                ids += map(int, expand_hostlist(f"[{indices}]"))
            gpu_ids.update(dict.fromkeys(expand_hostlist(nodes), tuple(ids)))
    return Allocation("/".join(sorted(gpu_types)), gpu_ids) if gpu_ids else None


def _ask_slurm(job_id: str, retry_s: float) -> Allocation | None:
    command = ["scontrol", "-o", "-d", "show", "job", job_id]
    for attempt in range(TRIES):
        if attempt:
            time.sleep(retry_s)
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
            return parse_job(answer, job_id)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            text = (getattr(error, "stderr", None) or str(error)).strip()
            log.warning(
                "job=%s attempt=%d/%d cannot ask Slurm for the allocation: %s", job_id, attempt + 1, TRIES, text
            )
    return None


def _type_of_node(node: str) -> str:
    """The GPU type in a node's GRES; empty if Slurm does not report one."""
    try:
        command = ["scontrol", "-o", "show", "node", node]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("node=%s cannot ask Slurm for its GPU type: %s", node, error)
        return ""
    gres = re.search(r" Gres=(?:\S*,)?gpu:([^:,(\s]+):\d", answer)
    return gres[1] if gres else ""


def _told_type(environment: Environment) -> str | None:
    """The GPU type that penstockd has sent the job to. Slurm's controller may be away, or may have forgotten the job's start."""
    for name in filter(None, (environment.array_element, environment.job_id)):
        try:
            told = environment.spool and read(ControlMessage, control_file(environment.spool, name).read_bytes())
        except (OSError, ValueError):
            continue
        if told and environment.job_id in (told.slurm_job, told.job_id):
            return told.gpu_type
    return None


def address_of_first(ranks: Ranks) -> str:
    """The address of rank 0, from DNS or Slurm. The name of a Slurm node may differ from its host name.

    Raises:
        RuntimeError: neither knows it.
    """
    if ranks.nodes == 1 or ranks.first_node is None:
        return "127.0.0.1"
    try:
        return socket.gethostbyname(ranks.first_node)
    except OSError:
        pass
    if shutil.which("scontrol"):
        command = ["scontrol", "-o", "show", "node", ranks.first_node]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
        if found := re.search(r" NodeAddr=(\S+)", answer):
            return found[1]
    raise RuntimeError(f"neither DNS nor Slurm knows the address of {ranks.first_node}; set MASTER_ADDR")
