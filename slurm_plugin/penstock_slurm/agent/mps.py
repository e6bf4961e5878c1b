"""NVIDIA's Multi-Process Service (MPS), where the site runs it: kernels of its clients run on a GPU at the same time.

A process asks the control daemon once, when it begins to use CUDA, and belongs to its server until it ends. Who becomes a client
here follows from what NVIDIA's manual says of clients (https://docs.nvidia.com/deploy/mps):

- A control daemon has one server, for one user; another user's clients wait in `cuInit` until the last of its clients has ended.
  With `-multiuser-server` it serves all, without isolation between them. So the clients on a node are of one user here.
- After a fatal fault on a GPU nobody new is served there before all clients on it have ended. A frozen client does not end, and
  what it may hold while it stands still the manual does not say. So nobody who takes turns becomes a client, and no client is
  suspended.
- A client's limit of memory (`CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`) is for its whole life. A pack's limits change, and a guaranteed
  job has none. So it is not set; limits are carried out as without MPS.
- Devices are counted as the daemon sees them, and jobs are bound by Slurm's indexes. So it is to be started without
  `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

from pathlib import Path

from penstock_profiles.files import open_regular

DEFAULT = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's
"""Where a CUDA process looks that is told nothing: a control daemon there has those as clients, too, that will be frozen."""

LONGEST = 190
"""Of the folder's name: with the node's in it it fits into the plugin's PENSTOCK_FOLDER_SIZE."""


def trouble(folder: Path) -> str:
    """Why no control daemon answers in this folder, in words; "": one does. Nobody is asked: its files are looked at."""
    control, pid_file = folder / "control", folder / "nvidia-cuda-mps-control.pid"
    try:
        control.stat()
    except OSError as error:
        return f"{control}: {error.strerror}"
    try:
        with open_regular(pid_file) as file:
            pid = int(file.read(32))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"{pid_file}: {error}"
    return "" if Path(f"/proc/{pid}").exists() else f"process {pid}, which {pid_file} names, has ended"
