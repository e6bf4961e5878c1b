"""How a run of an elastic training job begins: the processes join, claim an epoch and learn their allocation."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path

import torch

from penstock_executor.allocation import Allocation, UnknownAllocation, find_allocation
from penstock_executor.checkpoint import Checkpoints
from penstock_executor.client import connect
from penstock_executor.environment import Environment, Ranks, read_environment, read_ranks
from penstock_executor.node_channel import Channel, open_channel
from penstock_executor.training import owner
from penstock_executor.training.arguments import Settings
from penstock_executor.training.gpu_memory import held_mb, limit_memory
from penstock_executor.training.messages import show_messages
from penstock_executor.training.processes import Group, join
from penstock_executor.training.reporter import Reporter
from penstock_executor.training.run import TrainingRun
from penstock_profiles.wire import CPU

log = logging.getLogger(__name__)

RUN = TrainingRun
"""The class of a run. `penstock_executor.try_run` puts one in its place that records and disturbs its steps."""

MOST_PAUSE_S = 30.0
"""Longest pause under a duty cycle between two steps of several processes: only in a step do they exchange requests."""


def start(
    checkpoints: str | Path | None = None,
    *,
    continue_from: str | Path | None = None,
    gpu_type: str | None = None,
    gpus_per_replica: int = 1,
    report_every_s: float = 30.0,
    checkpoint_every_s: float = 600.0,
    keep: int = 2,
    host_cap_bytes: int | None = None,
    seed: int = 0,
) -> TrainingRun:
    """Begin a run: find this process's rank, join the other processes, and find the checkpoints.

    Args:
        checkpoints: folder on a file system that all nodes share. None: in a Slurm job, `checkpoints/JOB_ID` in the
            working directory; elsewhere nothing is saved, and each run begins from scratch.
        continue_from: the id of an ended job whose training this one continues, or the folder of its checkpoints. This
            job's folder becomes a link to that one. The default is the variable PENSTOCK_CONTINUE, in a job that names no
            folder.
        gpu_type: the GPU type if Slurm does not report one.
        gpus_per_replica: P, number of processes that hold the model together, each a part of it on a GPU of its own:
            the stages of a pipeline. Processes 0 … P - 1 are the first replica, the next P the second. Submit the job
            with `--scale-unit=P`.
        report_every_s: seconds between two reports to the daemon. The first few reports follow each other faster.
        checkpoint_every_s: seconds between two checkpoints, besides those at the end of each epoch and on request.
        keep: number of checkpoints to keep.
        host_cap_bytes: the most host memory that the state of one suspended process may take; None: no limit.
        seed: for the order of samples. PyTorch's own generators are the script's to seed.

    Raises:
        EnvironmentDisagrees: the variables of Slurm or torchrun contradict each other, or `gpus_per_replica`.
        OSError: the folder cannot be made.
        RuntimeError: the folder is that of another job that has not ended, or that job has left no checkpoint.
    """
    if gpus_per_replica < 1:
        raise ValueError(f"gpus_per_replica={gpus_per_replica}: a replica of the model takes at least 1 GPU")
    environment, ranks = read_environment(), read_ranks()
    show_messages(ranks.rank)
    device = join(ranks)
    group = Group(ranks, gpus_per_replica)
    folder, source = _folders(checkpoints, continue_from, environment)
    refused = owner.link(folder, source) if folder is not None and source is not None and ranks.rank == 0 else None
    if folder is not None and refused is None and ranks.rank == 0:
        refused = owner.claim(folder, environment)
    if refused := group.from_first(refused):
        raise RuntimeError(refused)
    client = connect(folder, environment) if ranks.rank == 0 else None
    epoch = group.from_first(client.epoch if client else None)
    saved = Checkpoints(folder, epoch, keep) if folder is not None else None
    run = RUN(
        group,
        device,
        saved,
        Settings(environment.report_every_s(report_every_s), checkpoint_every_s, host_cap_bytes, seed),
        group.from_first(_allocation(environment, gpu_type, device, ranks) if client else None),
        epoch,
        _channel(environment, device, ranks),
    )
    if client is not None:
        run.reporter = Reporter(client, run.learn, suspends=True)
    return run


def _folders(
    checkpoints: str | Path | None, continue_from: str | Path | None, environment: Environment
) -> tuple[Path | None, Path | None]:
    """The folder for checkpoints, and that of the job which this one continues. Raises ValueError."""
    before = environment.continues if continue_from is None else continue_from
    if environment.measuring is not None:
        return environment.measuring, None
    if checkpoints is None and environment.job_id is not None:
        checkpoints = Path("checkpoints") / environment.job_id
    elif before is not None and (checkpoints is None or continue_from is None):
        raise ValueError(
            f"cannot continue from {str(before)!r}: px.start({str(checkpoints or '')!r}) has a folder of its own for"
            " checkpoints; pass continue_from=... to it, too, or leave the folder out in a Slurm job"
        )
    folder = Path(checkpoints) if checkpoints is not None else None
    if folder is None or before is None:
        return folder, None
    return folder, Path(before) if "/" in str(before) else folder.parent / before


def _channel(environment: Environment, device: torch.device, ranks: Ranks) -> Channel | None:
    most_pause_s = MOST_PAUSE_S if ranks.world > 1 else math.inf
    if device.type != "cuda":
        return open_channel(environment, ranks.local_rank, most_pause_s=most_pause_s)
    return open_channel(
        environment,
        ranks.local_rank,
        anywhere=False,
        limit_memory=partial(limit_memory, device),
        memory_mb=partial(held_mb, device),
        finish=partial(torch.cuda.synchronize, device),
        most_pause_s=most_pause_s,
    )


def _allocation(environment: Environment, gpu_type: str | None, device: torch.device, ranks: Ranks) -> Allocation:
    if gpu_type is None and environment.job_id is None and device.type == "cuda":
        gpu_type = torch.cuda.get_device_name(device)
    try:
        found = find_allocation(environment, gpu_type)
    except UnknownAllocation:
        found = Allocation(CPU, {})
    if found.gpus and found.gpus != ranks.world:
        log.warning("%d processes train on %d GPUs of the job; start one process for each", ranks.world, found.gpus)
    return found if found.gpu_ids else Allocation(found.gpu_type or CPU, {environment.node or "localhost": ()})
