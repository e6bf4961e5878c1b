"""Suspend and resume in place: a job's state waits in the host's memory while others have its GPUs.

SIGTSTP asks for it (Slurm's `scontrol suspend` sends it, and on 22.05 freezes the job 2.0 s later whatever happens), SIGCONT ends
it. On CPUs there is nothing to move: the job only stands still. The part for GPUs was written without one and has not run yet.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

POLL_S = 0.05

GRACE_S = 2.5
"""A process that was not signalled itself waits so long for that, since another of the job was: Slurm freezes 2.0 s later."""

PATIENCE_S = 60.0
"""How long a job that moved out on request waits to be frozen, before it takes it that the daemon has gone."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one process moved out."""

    size: int
    """In bytes."""
    left: int
    """Bytes that torch still holds on the GPU."""
    seconds: float


class Suspension:
    """Whether this process is to stand still. Made in the main thread.

    Args:
        host_cap_bytes: most of the host's memory that a process's state may take; larger states stay on the GPU. None: no limit.
    """

    def __init__(self, host_cap_bytes: int | None = None) -> None:
        self.asked = False
        """By a signal."""
        self._continued = False
        """SIGCONT came, since SIGTSTP or since the last time that this process stood still."""
        self._moved: list[tuple[torch.Tensor, torch.device]] = []
        self._cap = host_cap_bytes
        signal.signal(signal.SIGTSTP, self._on_stop)
        signal.signal(signal.SIGCONT, self._on_continue)

    def move_out(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Moved:
        """Move the state to the host's memory. At the end of a step."""
        began_s = time.monotonic()
        tensors = {id(tensor): tensor for tensor in _on_gpu(optimizer, parameters)}.values()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._cap is not None and size > self._cap:
            log.warning("bytes=%d suspended on the GPU: more than the %d that the host may take", size, self._cap)
            tensors, size = {}.values(), 0
        self._moved = [(tensor, tensor.device) for tensor in tensors]
        for tensor, _ in self._moved:
            tensor.data = tensor.data.to("cpu").pin_memory()
        left = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved()
        moved = Moved(size, left, time.monotonic() - began_s)
        log.info("suspended moved_bytes=%d left_bytes=%d out_s=%.3f", moved.size, moved.left, moved.seconds)
        return moved

    def wait(self, wanted: Callable[[], bool] | None) -> None:
        """Stand still until SIGCONT.

        Args:
            wanted: where the daemon asked, and not yet a signal: whether it still wants it. None: a signal asked.
        """
        if wanted is not None and not self.asked:
            self._continued = False  # of a time before
        # Time in which it is frozen does not count. Python hears of SIGCONT before SIGTSTP if both came during one call into C:
        # then `asked` is of a time that is over.
        waited_s = 0.0
        while (self.asked and waited_s < PATIENCE_S) or not self._over(wanted, waited_s):
            time.sleep(POLL_S)
            waited_s += POLL_S
        self.asked = self._continued = False

    def move_back(self) -> float:
        """Undo `move_out`; the seconds that it took."""
        began_s = time.monotonic()
        size = sum(tensor.numel() * tensor.element_size() for tensor, _ in self._moved)
        for tensor, device in self._moved:
            tensor.data = tensor.data.to(device)
        self._moved = []
        seconds = time.monotonic() - began_s
        log.info("resumed moved_bytes=%d back_s=%.3f", size, seconds)
        return seconds

    def _over(self, wanted: Callable[[], bool] | None, waited_s: float) -> bool:
        if self._continued:
            return True
        return waited_s > GRACE_S if wanted is None else waited_s > PATIENCE_S or not wanted()

    def _on_stop(self, _number: int, _frame: object) -> None:
        self.asked, self._continued = True, False

    def _on_continue(self, _number: int, _frame: object) -> None:
        self.asked, self._continued = False, True


def _on_gpu(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield from (each for each in (parameter, parameter.grad) if each is not None and each.is_cuda)
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, torch.Tensor) and each.is_cuda)
