"""Joining the job's processes into one group, on CPUs (gloo) or GPUs (NCCL)."""

from __future__ import annotations

import datetime
import logging
import re
import shutil
import socket
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from penstock_executor.environment import EnvironmentDisagrees, Ranks

log = logging.getLogger(__name__)

TIMEOUT = datetime.timedelta(minutes=10)
"""For the others to start, and for each collective: a lost process must not hold the GPUs for long."""


def join(ranks: Ranks) -> torch.device:
    """Join the group of all processes, if there are others, and choose this process's device.

    Raises:
        EnvironmentDisagrees: more processes on this node than GPUs that they see.
        RuntimeError: rank 0 cannot be reached; the message says where it was looked for.
    """
    device = _device(ranks)
    if ranks.world > 1 and not dist.is_initialized():
        address = ranks.master or _address(ranks)
        where = f"tcp://{'[' + address + ']' if ':' in address else address}:{ranks.port}"
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend, init_method=where, rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"rank {ranks.rank} of {ranks.world} cannot meet the others at {where}: {error}; is the address right, the"
                " port free and open between nodes? MASTER_ADDR and MASTER_PORT go before what Slurm says"
            ) from error
    return device


class Group:
    """What all processes agree on, over a group of its own (gloo), so that it never waits behind gradients.

    Args:
        ranks: this process's place among all.
        gpus_per_replica: P; processes 0 … P - 1 hold one replica of the model, each a part of it, the next P the next replica.

    Raises:
        EnvironmentDisagrees: the processes are not whole replicas.
    """

    def __init__(self, ranks: Ranks, gpus_per_replica: int = 1) -> None:
        self.rank, self.world, self.gpus_per_replica = ranks.rank, ranks.world, gpus_per_replica
        self.replicas, left = divmod(ranks.world, gpus_per_replica)
        if left or not self.replicas:
            raise EnvironmentDisagrees(
                f"{ranks.world} processes are no multiple of gpus_per_replica={gpus_per_replica}; start one process for each"
                f" GPU, and submit with --scale-unit={gpus_per_replica}"
            )
        self.replica, self.place = divmod(ranks.rank, gpus_per_replica)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if ranks.world > 1 else None
        self.replica_group: dist.ProcessGroup | None = None
        """The processes of this replica; None if it has only one."""
        self.same_place: dist.ProcessGroup | None = None
        """The processes with the same part of other replicas, and this one; None unless a replica has several processes."""
        if gpus_per_replica > 1:
            ranks_RP = [[r * gpus_per_replica + p for p in range(gpus_per_replica)] for r in range(self.replicas)]
            self.replica_group = _mine(ranks_RP)
            self.same_place = _mine([list(column) for column in zip(*ranks_RP, strict=True)])

    def add_up(self, vector: torch.Tensor) -> Any:
        """Begin to add up `vector` (CPU, float64) over all processes, in place; a handle with `wait()`."""
        return dist.all_reduce(vector, group=self._group, async_op=True) if self._group is not None else None

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, in all processes."""
        if self._group is None:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]

    def gather(self, value: Any) -> list[Any]:
        """Each rank's `value`, in all processes."""
        values = [value] * self.world
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def another(self, processes: int | None = None) -> dist.ProcessGroup | None:
        """A further group of the first `processes` (None: all), for a thread of its own; None if this process is alone."""
        ranks = None if processes is None else list(range(processes))
        return dist.new_group(ranks, backend="gloo", timeout=TIMEOUT) if self.world > 1 else None

    def barrier(self) -> None:
        """Wait for all."""
        self.gather(None)


def _mine(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all these groups, as all processes must; the one that this process is in."""
    mine, _ = dist.new_subgroups_by_enumeration(groups, timeout=TIMEOUT)
    assert mine is not None
    return mine


def _device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # One visible GPU for each of several processes is Slurm's --gpus-per-task.
    if visible > 1 and ranks.local_world > visible:
        raise EnvironmentDisagrees(
            f"{ranks.local_world} processes on this node see {visible} GPUs; start one for each:"
            " srun --ntasks-per-node=$SLURM_GPUS_ON_NODE"
        )
    if ranks.local_world < visible:
        log.warning("%d processes on this node use %d of %d GPUs", ranks.local_world, ranks.local_world, visible)
    device = torch.device("cuda", ranks.local_rank % visible)
    torch.cuda.set_device(device)
    return device


def _address(ranks: Ranks) -> str:
    """Where rank 0 listens, by Slurm. A node's name need not be a host's."""
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
