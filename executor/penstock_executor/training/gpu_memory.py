"""Limits the memory that this process takes on its GPU, and reports how much it holds."""

from __future__ import annotations

import torch

MIB = 2**20


def limit_memory(device: torch.device, limit_mb: int) -> None:
    """Let PyTorch hold at most `limit_mb` MiB from now on; 0: no limit. Cached memory is released first.

    Memory in use stays, even above the limit. Then the next allocation that needs new memory raises PyTorch's
    OutOfMemoryError. The driver's context does not count.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(limit_mb * MIB / total, 1.0) if limit_mb else 1.0, device)


def held_mb(device: torch.device) -> float:
    """Memory that PyTorch holds on the GPU, in use or cached, in MiB."""
    return float(torch.cuda.memory_reserved(device)) / MIB
