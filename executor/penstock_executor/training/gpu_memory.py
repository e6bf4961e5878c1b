"""A limit of memory on this process's GPU, and how much is held there."""

from __future__ import annotations

import torch

MIB = 2**20


def limit_memory(device: torch.device, limit_mb: int) -> None:
    """Let torch hold at most so many MB from now on; 0: all there is. Cached memory is given back first.

    What is in use stays, though it be more than the limit: then the next allocation that needs new memory raises torch's
    OutOfMemoryError. The driver's context is not counted.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(limit_mb * MIB / total, 1.0) if limit_mb else 1.0, device)


def held_mb(device: torch.device) -> float:
    """Memory that torch holds on the GPU, in use or cached, MB."""
    return float(torch.cuda.memory_reserved(device)) / MIB
