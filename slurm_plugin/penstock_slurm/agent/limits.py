"""Limits that hold whatever a job does. They are in its environment before it uses CUDA, and stay until it ends.

| the job | GPU memory | compute |
| --- | --- | --- |
| a client of NVIDIA's MPS | `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` | `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` |
| another job, with `limiter` | HAMi-core: `CUDA_DEVICE_MEMORY_LIMIT` | the agent's duty cycles |
| another job, without it | the agent cancels what takes more | the agent's duty cycles |

- Only a job that begins in a pack has such limits. A job that begins alone must be able to use the whole GPU.
- The memory limit is that of the plan when the job begins. A later plan may lower it, but cannot raise it.
- The percentage is for an opportunistic job beside a guaranteed one. MPS takes it when a client begins; its control
  daemon changes it for later clients only. So it is a bound, and the share within it is kept as without MPS.
- HAMi-core (https://github.com/Project-HAMi/HAMi-core, Apache 2.0) limits compute, too (`CUDA_DEVICE_SM_LIMIT`). That is
  not used: its users report that it does not hold (issues 37, 76, 104 and 274), and duty cycles by GPU time do.
- The job's own environment can undo all of these. MPS serves one user at a time, so such a user harms only the user's
  own jobs. Beside another user's job, the agent sees and ends what takes too much memory, as without a limiter.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from penstock_profiles.files import open_regular

LONGEST = 190
"""Longest path of the limiter, so that the variables fit into the plugin's PENSTOCK_LIMITS_SIZE."""

MARK = b"CUDA_DEVICE_MEMORY_LIMIT"
"""HAMi-core's library has this text, because it reads the variable."""


def by_mps(memory_mb: int, percentage: int, gpus: int) -> dict[str, str]:
    """The variables of a client of MPS.

    Args:
        memory_mb: most memory on each of its GPUs, MB; 0: no limit.
        percentage: most of a GPU's multiprocessors, percent.
        gpus: number of GPUs. The manual does not say whether a GPU has the job's number in the memory limit or the
            node's. So each GPU up to the job's last one has the limit.
    """
    found = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)} if percentage < 100 else {}
    if memory_mb:
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{index}={memory_mb}M" for index in range(gpus))
    return found


def by_limiter(limiter: str, memory_mb: int, cache: Path) -> dict[str, str]:
    """The variables of a job that preloads HAMi-core.

    Args:
        limiter: HAMi-core's library.
        memory_mb: most memory on each of its GPUs, MB; 0: no limit, and the library is not preloaded.
        cache: a file in which the job's processes count. With the default, all jobs of the node would count together.
    """
    if not memory_mb:
        return {}
    limit = f"{memory_mb}m"
    return {
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(cache),
        "CUDA_DEVICE_MEMORY_LIMIT": limit,
        "LD_PRELOAD": limiter,
    }


def trouble(limiter: str) -> str:
    """Why jobs cannot preload this library, as a sentence; "": they can."""
    path = Path(os.path.realpath(limiter))
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            if about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"others than root can change {path}"
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content[:4] != b"\x7fELF" or content.find(MARK) < 0:
                    return f"{path} is not HAMi-core's libvgpu.so"
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        return f"{path}: {getattr(error, 'strerror', None) or error}"
    return ""
