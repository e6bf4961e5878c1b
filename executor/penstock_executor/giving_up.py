"""How a run gives up nodes in place: its processes tell their launcher which nodes stay, and end.

The launcher of a node that stays forks the processes of the next run. That of another node ends. See `launch.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence

from penstock_executor.environment import LEFT_NODES_VARIABLE, expand_hostlist

_launcher: int | None = None
"""In a process of a launcher that gives up nodes: the file through which it tells the launcher. It is lost by `exec`."""


def to_launcher(file: int) -> None:
    """In a new process: this file, which the launcher has opened, is the way to it."""
    global _launcher
    _launcher = file


def can_give_up() -> bool:
    """Whether this process has a launcher that gives up nodes."""
    return _launcher is not None


def tell(kept: Sequence[str]) -> None:
    """Tell the launcher which nodes stay. One process of each node calls it, and then ends with `status.BEGIN_ANEW`."""
    assert _launcher is not None
    os.write(_launcher, json.dumps(kept).encode())


def told(file: int) -> list[str]:
    """In the launcher: the nodes that stay; []: no process has told it."""
    return [str(node) for node in json.loads(os.pread(file, os.fstat(file).st_size, 0) or b"[]")]


def variables(environ: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """Slurm's variables in the launcher of a node that stays, as if the job had only the nodes `kept`."""
    before = expand_hostlist(environ["SLURM_STEP_NODELIST"])
    nodes = [node for node in before if node in kept]
    left = [*environ.get(LEFT_NODES_VARIABLE, "").split(","), *(node for node in before if node not in kept)]
    lists = dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(nodes))
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return {
        **lists,
        **dict.fromkeys(counts, str(len(nodes))),
        "SLURM_NODEID": str(nodes.index(environ["SLURMD_NODENAME"])),
        LEFT_NODES_VARIABLE: ",".join(filter(None, left)),
    }
