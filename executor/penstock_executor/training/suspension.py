"""Suspend and resume in place: a job's state waits in the host's memory while others have its GPUs.

SIGTSTP asks for it (Slurm's `scontrol suspend` sends it, and on 22.05 freezes the job 2.0 s later whatever happens), SIGCONT ends
it. On CPUs there is nothing to move: the job only stands still. The part for GPUs was written without one and has not run yet.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Iterator

import torch

log = logging.getLogger(__name__)

POLL_S = 0.05


class Suspension:
    """Whether this process is to stand still. Made in the main thread.

    Args:
        host_cap_bytes: most of the host's memory that a process's state may take; larger states stay on the GPU. None: no limit.
    """

    def __init__(self, host_cap_bytes: int | None = None) -> None:
        self.asked = False
        self._cap = host_cap_bytes
        signal.signal(signal.SIGTSTP, self._on_stop)
        signal.signal(signal.SIGCONT, self._on_continue)

    def stand_still(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Move the state out, wait for SIGCONT, move it back. At the end of a step."""
        began_s = time.monotonic()
        tensors = {id(tensor): tensor for tensor in _on_gpu(optimizer, parameters)}.values()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._cap is not None and size > self._cap:
            log.warning("bytes=%d suspended on the GPU: more than the %d that the host may take", size, self._cap)
            tensors, size = {}.values(), 0
        devices = [tensor.device for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to("cpu").pin_memory()
        left = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved()
        log.info("suspended moved_bytes=%d left_bytes=%d out_s=%.3f", size, left, time.monotonic() - began_s)
        while self.asked:
            time.sleep(POLL_S)
        began_s = time.monotonic()
        for tensor, device in zip(tensors, devices, strict=True):
            tensor.data = tensor.data.to(device)
        log.info("resumed moved_bytes=%d back_s=%.3f", size, time.monotonic() - began_s)

    def _on_stop(self, _number: int, _frame: object) -> None:
        self.asked = True

    def _on_continue(self, _number: int, _frame: object) -> None:
        self.asked = False


def _on_gpu(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield from (each for each in (parameter, parameter.grad) if each is not None and each.is_cuda)
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, torch.Tensor) and each.is_cuda)
