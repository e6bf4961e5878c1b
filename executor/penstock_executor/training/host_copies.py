"""Copies of tensors in the host's memory, made quickly.

A copy from a GPU straight into new memory of the host runs at 1.4 GB/s on the host of an H100, because the operating
system makes each page of 4 KiB ready while the GPU waits. Pinning as much memory takes nearly as long, and pinned memory
is never given back. So tensors go through two small pinned buffers by turns: the GPU fills one while the processor
empties the other into memory with pages of 2 MiB, where the system has them (docs/measurements/executor.md).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

BUFFER_BYTES = 32 * 2**20
ARENA_BYTES = 256 * 2**20
"""Memory is taken from the system in pieces of this size, or of a tensor's if that is larger."""

ALIGNED = 64
"""A tensor begins at a multiple of so many bytes."""


class HostCopies:
    """Copies tensors of GPUs to the host's memory. The copies are whole after `finish`; the tensors may change then."""

    def __init__(self) -> None:
        self._arena: mmap.mmap | None = None
        self._arena_used = 0
        self._filling, self._full = _Buffer(), _Buffer()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, of the same type and shape, without gradients."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel()
        return self.copy_from_gpu(tensor) if plain and tensor.device.type == "cuda" else tensor.cpu()

    def copy_from_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `copy`, of a plain tensor that is not empty."""
        source = tensor.contiguous().view(-1).view(torch.uint8)
        whole = self._allocate(source.numel())
        for part, target in zip(source.split(BUFFER_BYTES), whole.split(BUFFER_BYTES), strict=True):
            if not self._filling.has_room(part):
                self._turn()
            self._filling.take(part, target)
        return whole.view(tensor.dtype).view(tensor.shape)

    def finish(self) -> None:
        """Wait until all copies are whole."""
        self._turn()
        self._turn()

    def _turn(self) -> None:
        """Empty the buffer that the GPU has filled, and let it fill that one next."""
        self._filling.filled()
        self._filling, self._full = self._full, self._filling
        self._filling.empty()

    def _allocate(self, size: int) -> torch.Tensor:
        """Memory for `size` bytes."""
        if self._arena is None or self._arena_used + size > len(self._arena):
            self._arena, self._arena_used = mmap.mmap(-1, max(size, ARENA_BYTES)), 0
            with contextlib.suppress(OSError, AttributeError):  # a kernel without them
                self._arena.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._arena, dtype=torch.uint8, count=size, offset=self._arena_used)
        self._arena_used += -(-size // ALIGNED) * ALIGNED
        return memory


class _Buffer:
    """A buffer that the GPU writes and the processor reads, pinned where there is a GPU."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parts of this buffer, and where they go."""
        self._filled: Any = None

    def has_room(self, part: torch.Tensor) -> bool:
        return bool(self._used + part.numel() <= BUFFER_BYTES)

    def take(self, part: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy a part of a tensor, on its way to `target`."""
        if self._memory is None:
            self._memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        mine = self._memory[self._used : self._used + part.numel()]
        mine.copy_(part, non_blocking=True)
        self._used += part.numel()
        self._parts.append((mine, target))

    def filled(self) -> None:
        """Nothing more is taken before the next `empty`."""
        if self._parts and torch.cuda.is_available():
            self._filled = torch.cuda.Event(blocking=True)
            self._filled.record()

    def empty(self) -> None:
        """Wait until the GPU has filled it, and put each part where it goes."""
        if self._filled is not None:
            self._filled.synchronize()
        for mine, target in self._parts:
            target.copy_(mine)
        self._used, self._parts, self._filled = 0, [], None


class OnItsWay:
    """A small tensor on its way to the host. Reading it one step later does not wait for the GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = tensor
        self._arrived: Any = None
        if tensor.is_cuda:
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> torch.Tensor:
        """The tensor, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here
