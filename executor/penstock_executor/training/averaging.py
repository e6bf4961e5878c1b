"""Averages gradients over the replicas of a split model, as DDP does for whole models.

Other code, such as a pipeline's schedule, runs the backward pass; averaging begins when it is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

CHUNK_BYTES = 25 * 2**20
"""Size of the gradients that are added up at once. DDP's buckets have the same size."""


class Averager:
    """Averages over the processes that hold the same part of each replica, and makes their parameters equal at the
    start.

    Args:
        module: this process's part of the model.
        group: the processes that hold the same part, by replica.
        replica_group: the processes of this replica.
    """

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup, replica_group: dist.ProcessGroup) -> None:
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._group, self._replica_group = group, replica_group
        first = dist.get_global_rank(group, 0)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=first, group=group)

    def average(self, weight: float) -> None:
        """Make each gradient the mean over the replicas, with this replica's gradient times `weight`.

        A parameter that this step did not use gets a gradient of 0, so that all processes add up the same parameters.
        """
        replicas = self._group.size()
        for chunk in _chunks(self._parameters):
            gradients = []
            for parameter in chunk:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
            if replicas == 1 and weight == 1:
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(weight / replicas)
            dist.all_reduce(flat, group=self._group)
            means = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(
                gradients, [mean.view_as(gradient) for mean, gradient in zip(means, gradients, strict=True)]
            )

    def clip(self, max_norm: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, by the norm of the gradients of all parts together."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
        sqr = norms.double().square().sum()
        dist.all_reduce(sqr, group=self._replica_group)
        torch._foreach_mul_(gradients, (max_norm / (sqr.sqrt() + 1e-6)).clamp(max=1.0).to(norms.dtype))


def _chunks(parameters: Iterable[torch.nn.Parameter]) -> Iterator[Sequence[torch.nn.Parameter]]:
    """The parameters in order, in chunks of one dtype and at most `CHUNK_BYTES`, or of one parameter."""
    chunk: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        more = parameter.numel() * parameter.element_size()
        if chunk and (size + more > CHUNK_BYTES or parameter.dtype != chunk[0].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += more
    if chunk:
        yield chunk
