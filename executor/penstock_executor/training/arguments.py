"""Arguments of `start`, checks of those of `TrainingRun.prepare`, and the values that follow from them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock_executor.training.batches import BatchSize
from penstock_profiles.learning_rate import RULES, Rule


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of `start` that the run needs later."""

    report_every_s: float
    checkpoint_every_s: float
    host_cap_bytes: int | None
    seed: int


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError if `TrainingRun.step` cannot move the parameters by it."""
    if isinstance(optimizer, list | tuple | dict):
        raise ValueError(
            f"{len(optimizer)} optimisers: run.prepare takes one, which may join several (class Both in"
            " tests/executor/train_muon.py); or keep your own loop, with run.loader, run.keep and run.step_done"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times a step, and run.step has it once; keep your own"
            " loop, with run.loader, run.keep and run.step_done"
        )


def check_trained(model: torch.nn.Module, averaged: Collection[torch.nn.Parameter]) -> None:
    """Raises RuntimeError if a parameter is trained whose gradient DDP does not average.

    Args:
        model: that DDP wraps.
        averaged: its parameters that were trained when DDP wrapped it.
    """
    new = [name for name, each in model.named_parameters() if each.requires_grad and each not in averaged]
    if new:
        raise RuntimeError(
            f"{', '.join(new[:3])}{' ...' if new[3:] else ''} was frozen at run.prepare and is trained now, which"
            " DistributedDataParallel does not average over the processes: freeze parameters after run.prepare, and pass it"
            " ddp={'find_unused_parameters': True}"
        )


def learning_rate_rule(name: str | None, optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of that name. None: `square_root` for optimisers of Adam's kind, `adascale` for others.

    Raises:
        ValueError: there is no rule of that name.
    """
    adam = any("betas" in group for group in optimizer.param_groups)
    rule = name or ("square_root" if adam else "adascale")
    if rule not in RULES:
        raise ValueError(f"lr_scaling={rule!r} is not a rule; choose one of: {', '.join(RULES)}")
    return RULES[rule]


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) has sharded the model.

    Raises:
        ValueError: FSDP1 wraps the model, which is not supported.
    """
    if type(model).__name__ == "FullyShardedDataParallel":
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), which is not supported; use fully_shard (FSDP2)"
        )
    return hasattr(model, "set_requires_gradient_sync")


def whole(each: Any, name: str) -> Any:
    """An object of `Run.keep`, without DDP around it. Raises ValueError if it is a sharded model."""
    bare = each.module if isinstance(each, DistributedDataParallel) else each
    if isinstance(bare, torch.nn.Module) and is_sharded(bare):
        raise ValueError(f"{name} is sharded by fully_shard, which run.keep cannot save; pass it to run.prepare")
    return bare


def check_split_model(
    gpus_per_replica: int,
    model: torch.nn.Module,
    *,
    scaler: Any,
    max_atomic_batch: int | None,
    trainable: Sequence[bool] = (True,),
) -> None:
    """Refuse what does not work for a model that is split over several processes.

    Args:
        gpus_per_replica: number of processes that hold one replica of the model.
        model: this process's part of it.
        scaler: as in `TrainingRun.prepare`.
        max_atomic_batch: as in `TrainingRun.prepare`.
        trainable: for each process, whether its part has a parameter to train.

    Raises:
        ValueError: an argument cannot be combined with a split model, or some process has nothing to train.
    """
    where = f"with gpus_per_replica={gpus_per_replica}"
    if hasattr(model, "set_requires_gradient_sync"):
        raise ValueError(f"{where} the model must not be sharded by fully_shard as well; use one of the two")
    if scaler is not None:
        raise ValueError(
            f"scaler {where}: parts of one replica would skip different steps; train in bfloat16, which needs no scaler"
        )
    if max_atomic_batch is not None:
        raise ValueError(f"max_atomic_batch {where}: the pipeline's own micro-batches decide the memory; leave it out")
    if not all(trainable):
        raise ValueError(
            f"{where} the part of process {trainable.index(False)} has no parameter to train; cut the model so that"
            " each part has a parameter whose requires_grad is True"
        )


def split_batch(initial: int, largest: int | None, replicas: int) -> BatchSize:
    """The batch of a model that is split over several processes: each replica takes an equal share in one micro-step.

    The stages of a pipeline exchange tensors of one shape, so all replicas have the same number of samples.

    Args:
        initial: total batch that the script was written for, in samples.
        largest: largest total batch, to which the batch may grow. None: the total batch stays `initial`.
        replicas: number of replicas.

    Raises:
        ValueError: there is no such batch.
    """
    share = initial // replicas if largest is None else min(initial, largest // replicas)
    if largest is None and initial % replicas:
        raise ValueError(
            f"batch_size={initial} is not a multiple of {replicas} replicas, and a pipeline's shapes are the same in"
            " each; use a batch size that any number of replicas up to --max-gpus divides, or set max_batch_size so"
            " that it can grow"
        )
    if share < 1:
        raise ValueError(f"max_batch_size={largest} is less than a sample for each of {replicas} replicas; raise it")
    return BatchSize(share * replicas, share)


def epoch_limits(batch_size: int, largest: int, samples: int | None, *, drop_last: bool) -> tuple[int, int | None]:
    """The largest total batch with which an epoch has a step, and the progress that one epoch is worth, in samples.

    Args:
        batch_size: initial total batch, in samples.
        largest: largest total batch that trains well, in samples.
        samples: size of the data set. None: a stream, whose length is unknown.
        drop_last: whether an epoch leaves out a last step that would be smaller.

    Raises:
        ValueError: with `drop_last`, no epoch would have a step.
    """
    if samples is None or not drop_last:
        return largest, samples
    if batch_size > samples:
        raise ValueError(
            f"batch_size={batch_size} with drop_last: the data set has {samples} samples, so no epoch would have a"
            " step; use a smaller batch_size, or leave out drop_last"
        )
    return min(largest, samples), samples // batch_size * batch_size
