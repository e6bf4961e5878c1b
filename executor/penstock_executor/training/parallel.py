"""How a model trains on several processes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock_executor.training.averaging import Averager
from penstock_executor.training.processes import Group

CHOSEN = {"module", "device_ids", "output_device", "process_group", "device_mesh"}
"""Arguments of DistributedDataParallel that scripts cannot set."""


def parallel(
    model: torch.nn.Module, group: Group, device: torch.device, *, sharded: bool, options: Mapping[str, Any]
) -> tuple[torch.nn.Module, Averager | None]:
    """The model as it trains on several processes, and what averages its gradients if that is not the model itself.

    Args:
        model: of this process.
        group: all processes of the run.
        device: of this process.
        sharded: whether `fully_shard` has sharded the model.
        options: of `DistributedDataParallel`, for a model that it wraps. A single process checks only their names.

    Raises:
        ValueError: `DistributedDataParallel` has no such option, Penstock chooses it, or it will not wrap the model.
    """
    _check(options, sharded=sharded or group.gpus_per_replica > 1)
    if group.gpus_per_replica > 1:
        assert group.same_place is not None
        assert group.replica_group is not None
        return model, Averager(model, group.same_place, group.replica_group)
    if group.world > 1 and not sharded:
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **{"gradient_as_bucket_view": True, **options}), None
    return model, None


def _check(options: Mapping[str, Any], *, sharded: bool) -> None:
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - CHOSEN - {"self"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"ddp={{{unknown[0]!r}: ...}}: a script can set only {', '.join(sorted(known))}")
    if options and sharded:
        raise ValueError("ddp is for models that DistributedDataParallel wraps; this one is divided over processes")


def set_synchronising(model: torch.nn.Module, *, last: bool) -> None:
    """Say whether the coming backward pass is the last of a step, which synchronises: before the forward pass."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
