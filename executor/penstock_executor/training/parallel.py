"""How a model trains on several processes."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock_executor.training.averaging import Averager
from penstock_executor.training.processes import Group


def parallel(
    model: torch.nn.Module, group: Group, device: torch.device, *, sharded: bool
) -> tuple[torch.nn.Module, Averager | None]:
    """The model as it trains on several processes, and what averages its gradients if that is not the model itself.

    Args:
        model: of this process.
        group: all processes of the run.
        device: of this process.
        sharded: whether `fully_shard` has sharded the model.
    """
    if group.gpus_per_replica > 1:
        assert group.same_place is not None
        assert group.replica_group is not None
        return model, Averager(model, group.same_place, group.replica_group)
    if group.world > 1 and not sharded:
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True), None
    return model, None


def set_synchronising(model: torch.nn.Module, *, last: bool) -> None:
    """Say whether the coming backward pass is the last of a step, which synchronises: before the forward pass."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
