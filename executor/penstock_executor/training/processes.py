"""Joins the job's processes into one group, on CPUs (gloo) or GPUs (NCCL)."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock_executor.allocation import address_of_first
from penstock_executor.environment import EnvironmentDisagrees, Ranks
from penstock_executor.training.siblings import Siblings

log = logging.getLogger(__name__)

TIMEOUT = datetime.timedelta(minutes=10)
"""For other processes to start, and for each collective: if a process is lost, the GPUs must not idle for long."""


def join(ranks: Ranks) -> torch.device:
    """Join the group of all processes, or make one for a single process, and choose this process's device.

    Raises:
        EnvironmentDisagrees: there are more processes on this node than GPUs that they see, or the script has started
            processes by itself and the environment does not say their ranks.
        RuntimeError: rank 0 cannot be reached; the message has its address.
    """
    _check_started(ranks)
    device = _device(ranks)
    if dist.is_initialized():
        return device
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if ranks.world == 1:
        # Scripts call barriers and reductions whatever their number of processes.
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            log.warning("torch.distributed is not initialised, which a script may need: %s", error)
    else:
        address = ranks.master or address_of_first(ranks)
        where = f"tcp://{'[' + address + ']' if ':' in address else address}:{ranks.port}"
        try:
            dist.init_process_group(
                backend, init_method=where, rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"rank {ranks.rank} of {ranks.world} cannot reach rank 0 at {where}: {error}; check that the address"
                " is right and the port free and open between nodes. MASTER_ADDR and MASTER_PORT have priority over"
                " Slurm's variables"
            ) from error
    return device


def _check_started(ranks: Ranks) -> None:
    """Raises EnvironmentDisagrees if the script has started its processes by itself, and the environment is silent."""
    found = None
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (ranks.rank, ranks.world):
        found = f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()}"
    process: Any = multiprocessing.current_process()
    if getattr(getattr(process, "_target", None), "__module__", "") == "torch.multiprocessing.spawn":
        number = process._identity[-1]
        if found is None and ranks.world == 1 and number > 1:
            found = f"torch.multiprocessing.spawn has started at least {number} processes"
    if found is not None:
        raise EnvironmentDisagrees(
            f"{found}, but the environment says rank {ranks.rank} of {ranks.world}; start the script once for each GPU, with"
            " srun, torchrun or python -m penstock_executor.launch, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,"
            " MASTER_ADDR and MASTER_PORT in each process before px.start"
        )


def leave() -> None:
    """Leave the group of all processes, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Group:
    """All processes of the run. They exchange values over a gloo group of their own, so that none waits behind
    gradients.

    Args:
        ranks: this process's ranks.
        gpus_per_replica: P; processes 0 … P - 1 hold one replica of the model, each a part of it, the next P the next
            one.

    Raises:
        EnvironmentDisagrees: the number of processes is not a multiple of P.
    """

    def __init__(self, ranks: Ranks, gpus_per_replica: int = 1) -> None:
        self.rank, self.world, self.gpus_per_replica = ranks.rank, ranks.world, gpus_per_replica
        self.replicas, left = divmod(ranks.world, gpus_per_replica)
        if left or not self.replicas:
            raise EnvironmentDisagrees(
                f"{ranks.world} processes are not a multiple of gpus_per_replica={gpus_per_replica}; start one process"
                f" per GPU, and submit with --scale-unit={gpus_per_replica}"
            )
        self.replica, self.place = divmod(ranks.rank, gpus_per_replica)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if ranks.world > 1 else None
        self.siblings = Siblings(ranks.rank, self.gather)
        self.replica_group: dist.ProcessGroup | None = None
        """The processes of this replica; None if it has only one."""
        self.same_place: dist.ProcessGroup | None = None
        """The processes that hold the same part of each replica; None unless a replica has several processes."""
        if gpus_per_replica > 1:
            ranks_RP = [[r * gpus_per_replica + p for p in range(gpus_per_replica)] for r in range(self.replicas)]
            self.replica_group = _mine(ranks_RP)
            self.same_place = _mine([list(column) for column in zip(*ranks_RP, strict=True)])

    def add_up(self, vector: torch.Tensor) -> Any:
        """Begin to add up `vector` (CPU, float64) over all processes, in place. Returns a handle with `wait()`, or
        None."""
        return dist.all_reduce(vector, group=self._group, async_op=True) if self._group is not None else None

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, on all processes."""
        if self._group is None:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]

    def tree_from_first(self, value: Any, device: torch.device) -> Any:
        """Rank 0's `value`, on all processes, with its tensors sent one by one: no process holds a second copy.

        Args:
            value: dictionaries, lists and tuples of tensors on the CPU and of plain values. Only rank 0's counts.
            device: where the other processes put tensors of more than one element.
        """
        if self._group is None:
            return value
        tensors: list[torch.Tensor] = []
        tree = self.from_first(_without_tensors(value, tensors) if self.rank == 0 else None)
        return self._with_tensors(tree, iter(tensors), device)

    def _with_tensors(self, value: Any, tensors: Iterator[torch.Tensor], device: torch.device) -> Any:
        if isinstance(value, _Tensor):
            tensor = next(tensors) if self.rank == 0 else torch.empty(value.shape, dtype=value.dtype)
            if tensor.numel():
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=self._group)
            return tensor.to(device) if self.rank != 0 and tensor.numel() > 1 else tensor
        if isinstance(value, dict):
            return {key: self._with_tensors(each, tensors, device) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._with_tensors(each, tensors, device) for each in value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Each rank's `value`, on all processes."""
        values = [value] * self.world
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def another(self, processes: int | None = None) -> dist.ProcessGroup | None:
        """A further group of the first `processes` (None: all), for use in another thread; None if there is one
        process."""
        ranks = None if processes is None else list(range(processes))
        return dist.new_group(ranks, backend="gloo", timeout=TIMEOUT) if self.world > 1 else None

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.gather(None)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands for a tensor in what rank 0 sends."""

    shape: torch.Size
    dtype: torch.dtype


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a `_Tensor` in place of each tensor, and these appended to `tensors` in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.contiguous())
        return _Tensor(value.shape, value.dtype)
    if isinstance(value, dict):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each, tensors) for each in value)
    return value


def _mine(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all these groups, as every process must, and return the one that this process is in."""
    mine, _ = dist.new_subgroups_by_enumeration(groups, timeout=TIMEOUT)
    assert mine is not None
    return mine


def _device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # With Slurm's --gpus-per-task, each of several processes sees only one GPU.
    if visible > 1 and ranks.local_world > visible:
        raise EnvironmentDisagrees(
            f"{ranks.local_world} processes on this node see {visible} GPUs; start one process per GPU:"
            " srun --ntasks-per-node=$SLURM_GPUS_ON_NODE"
        )
    if ranks.local_world < visible:
        log.warning("%d processes on this node use %d of %d GPUs", ranks.local_world, ranks.local_world, visible)
    device = torch.device("cuda", ranks.local_rank % visible)
    torch.cuda.set_device(device)
    return device
