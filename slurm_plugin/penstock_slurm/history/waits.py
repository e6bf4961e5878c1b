"""The causes of waits: the free GPUs, CPUs and memory of each node, at many moments of a history. Pure. Axes: N nodes."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_slurm.history.reading import History, PastRun

MOMENTS = 250
"""Moments of the period that are looked at, equally far apart."""

GPUS = "GPUs"
TOGETHER = "GPUs together"
"""Enough were free, but not enough on each node."""
BESIDE = "CPUs or memory"
"""Of the nodes that had enough free GPUs."""
OTHER = "other causes"
"""It would have fitted: its priority, a limit, a reservation or a node that was down kept it."""
CAUSES = (GPUS, TOGETHER, BESIDE, OTHER)


class Need(NamedTuple):
    """The resources that a job needs to start."""

    partition: str
    gpu_type: str | None
    """The only type that will do."""
    nodes: int
    gpus: int
    """On each node, as the next two."""
    cpus: int
    memory_mb: int


def waited_for(history: History) -> dict[str, float]:
    """Cause -> hours in which jobs waited for it, in the order of CAUSES. Each job is judged alone.

    A job has an equal part of its CPUs and memory on each of its nodes. One that has not started is taken to want as few nodes
    as it asked for.
    """
    nodes, changes = _Nodes(history), []
    for run in (*history.runs, *history.others):
        need = nodes.need(run) if run.gpus else None
        start_s = math.inf if run.start_s is None else run.start_s
        end_s = math.inf if run.end_s is None else max(run.end_s, start_s)
        # Slurm may have started it before the time from which on it waits by its record.
        changes += [(min(run.ready_s, start_s), 0, run, need), (start_s, 1, run, need), (end_s, -1, run, need)]
    changes.sort(key=lambda change: change[0], reverse=True)
    waiting, found = Counter[Need](), dict.fromkeys(CAUSES, 0.0)
    step_s = (history.end_s - history.begin_s) / MOMENTS
    for moment in range(MOMENTS):
        while changes and changes[-1][0] <= history.begin_s + (moment + 0.5) * step_s:
            _, begins, run, need = changes.pop()
            if begins:
                nodes.hold(run, begins)
            if begins >= 0 and need is not None:
                waiting[need] += -1 if begins else 1
        for each, jobs in waiting.items():
            if jobs:
                found[nodes.lacks(each)] += jobs * step_s / 3600
    return found


class _Nodes:
    """The nodes, and what is free on each of them."""

    def __init__(self, history: History) -> None:
        nodes = history.nodes
        self._memory = history.memory
        self._index = {node.name: n for n, node in enumerate(nodes)}
        self._gpus_N = np.array([sum(node.gpus.values()) for node in nodes], dtype=float)
        self._cpus_N = np.array([node.cpus for node in nodes], dtype=float)
        self._memory_N = np.array([node.memory_mb for node in nodes], dtype=float)
        self._most_N = self._gpus_N.copy()
        self._partitions_N = [set(node.partitions) for node in nodes]
        self._types_N = [node.gpus.keys() for node in nodes]
        self._open: dict[tuple[str, str | None], npt.NDArray[np.bool_]] = {}

    def hold(self, run: PastRun, times: int) -> None:
        """Take from the nodes what a run holds, or with -1 give it back."""
        here = [n for name in run.nodes if (n := self._index.get(name)) is not None]
        if here:
            share = times / len(run.nodes)
            self._gpus_N[here] -= share * run.gpus
            self._cpus_N[here] -= share * run.cpus
            self._memory_N[here] -= share * run.memory_mb

    def need(self, run: PastRun) -> Need:
        """The resources that a run needed to start."""
        most = int(self._most_N[self._usable(run.partition, run.asked_type)].max(initial=1))
        nodes = max(run.node_count, math.ceil(run.gpus / most))
        memory_mb = run.memory_mb if self._memory else 0
        each = (math.ceil(amount / nodes) for amount in (run.gpus, run.cpus, memory_mb))
        return Need(run.partition, run.asked_type, nodes, *each)

    def lacks(self, need: Need) -> str:
        """One of CAUSES."""
        here_N = self._usable(need.partition, need.gpu_type)
        free_N = np.maximum(self._gpus_N, 0) * here_N
        if free_N.sum() < need.nodes * need.gpus:
            return GPUS
        enough_N = here_N & (free_N >= need.gpus)
        if enough_N.sum() < need.nodes:
            return TOGETHER
        beside_N = enough_N & (self._cpus_N >= need.cpus) & (self._memory_N >= need.memory_mb)
        return BESIDE if beside_N.sum() < need.nodes else OTHER

    def _usable(self, partition: str, gpu_type: str | None) -> npt.NDArray[np.bool_]:
        """Nodes (N) of a partition that have a type of GPU, as they are now."""
        key = (partition, gpu_type)
        if key not in self._open:
            rows = zip(self._partitions_N, self._types_N, strict=True)
            self._open[key] = np.array([partition in its and (gpu_type or "") in {"", *types} for its, types in rows])
        return self._open[key]
