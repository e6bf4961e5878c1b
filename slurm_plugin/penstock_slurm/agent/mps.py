"""NVIDIA's Multi-Process Service (MPS), if the site runs it: kernels of its clients run on a GPU at the same time.

A process asks the control daemon once, when it begins to use CUDA, and stays a client of its server until it ends.
NVIDIA's manual (https://docs.nvidia.com/deploy/mps) says of clients:

- A control daemon has one server, for one user. Clients of another user wait in `cuInit` until the last of its clients
  has ended. With `-multiuser-server` it serves all users, without isolation between them. So all clients on a node
  belong to one user here.
- After a fatal fault on a GPU, no new client is served there until all clients on it have ended. A frozen client does
  not end, and the manual does not say what it may hold. So a time-sliced job never becomes a client, and a client is
  never suspended.
- A client's limits hold for its whole life: see `penstock_slurm.agent.limits`.
- Devices are counted as the control daemon sees them, and jobs are bound by Slurm's indexes. So the control daemon must
  be started without `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

from pathlib import Path

from penstock_profiles.files import open_regular

DEFAULT = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's
"""Default folder of CUDA processes. A control daemon there would also serve processes that will be frozen."""

PROGRAM = "nvidia-cuda-mps"
"""How the names of its daemons begin, by which the kernel knows them."""

LONGEST = 190
"""Longest name of the folder, so that with the node's name it fits into the plugin's PENSTOCK_FOLDER_SIZE."""


def trouble(folder: Path) -> str:
    """Why no control daemon answers in this folder, as a sentence; "": one does. Only its files are checked."""
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
