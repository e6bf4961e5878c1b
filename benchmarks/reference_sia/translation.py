"""Between the authors' records and ours: models, allocations and jobs. No module of theirs is needed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock_profiles.throughput import FloatArray
from penstock_scheduler.model import Job, Node, Phase, Placement, Share
from penstock_scheduler.simulator.jobs import SimulatedJob
from penstock_scheduler.simulator.model_truth import Shape, StepTimes

Allocation = tuple[str | None, Sequence[int]]
"""Theirs: the GPU type ("cluster"), and the number of the node of each GPU, equal numbers beside each other."""


class Nodes:
    """Which of our nodes is which of theirs: they number the nodes of each type from 0.

    Args:
        nodes: ours.
        types: their name of a GPU type -> ours.
    """

    def __init__(self, nodes: Sequence[Node], types: Mapping[str, str]) -> None:
        self._type = dict(types)
        self._theirs = {ours: theirs for theirs, ours in types.items()}
        self._names = {
            gpu_type: [node.name for node in nodes if node.gpu_type == gpu_type] for gpu_type in types.values()
        }

    def placement(self, allocation: Allocation | None) -> Placement | None:
        """Our form of an allocation; None: no GPUs."""
        cluster, numbers = allocation or (None, ())
        if cluster is None or not numbers:
            return None
        gpu_type = self._type[cluster]
        names = self._names[gpu_type]
        shares = [Share(names[number], list(numbers).count(number)) for number in sorted(set(numbers))]
        return Placement(gpu_type, "all", tuple(shares))

    def allocation(self, placement: Placement) -> Allocation:
        """Their form of a placement."""
        names = self._names[placement.gpu_type]
        numbers = [names.index(share.node) for share in placement.shares for _ in range(share.gpus)]
        return self._theirs[placement.gpu_type], numbers


def job_view(job: SimulatedJob, held: Placement | None, *, restarting: bool) -> Job:
    """What a round sees of a job."""
    phase = Phase.QUEUED if held is None else Phase.STARTING if restarting else Phase.RUNNING
    return Job(
        id=job.id,
        name=job.name,
        user=job.user,
        spec=job.spec,
        partitions=("all",),
        phase=phase,
        submit_s=job.submit_s,
        restarts=job.restarts,
        allocation=held,
        target=held if phase is Phase.STARTING else None,
    )


class TheirModel:
    """The truth about a model (`ModelTruth`), from their applications.

    Their simulator divides the rate of a job by a constant of its model, to be as slow as a real cluster. Here its steps take
    that much longer, which is what a job would measure.

    Args:
        applications: our GPU type -> their `Application`.
        slowdown: that constant.
        restart_cost_s: what their policy takes a restart to cost, s.
    """

    def __init__(self, applications: Mapping[str, Any], slowdown: float, restart_cost_s: float) -> None:
        self._applications, self.slowdown = applications, slowdown
        any_type = next(iter(applications.values()))
        self.initial_batch, self.max_batch = int(any_type.init_batch_size), int(any_type.max_batch_size)
        self.restart_s, self.restart_cost_s = float(any_type.rescale_time), restart_cost_s
        self._epochs = any_type.max_epochs
        self._limits: dict[tuple[str, Shape], int] = {}
        self._noise: dict[int, tuple[FloatArray, FloatArray]] = {}
        ends = [float(any_type.get_progress(epoch)) * self.initial_batch for epoch in range(1, self._epochs + 1)]
        self.epoch_ends, self.training = tuple(ends[:-1]), ends[-1]

    def runs_on(self, gpu_type: str) -> bool:
        """See `ModelTruth`."""
        return gpu_type in self._applications

    def min_atomic_batch(self, gpu_type: str) -> int:
        """Samples per GPU below which they have no measurement."""
        return int(self._applications[gpu_type].min_local_bsz)

    def max_atomic_batch(self, gpu_type: str, shape: Shape) -> int:
        """See `ModelTruth`."""
        if not self.runs_on(gpu_type):
            return 0
        if (gpu_type, shape) not in self._limits:
            application = self._applications[gpu_type]
            as_many = application.placements[application.placements.num_replicas == sum(shape)].local_bsz.max()
            limits = (application.max_local_bsz, application.get_max_local_bsz(shape), as_many)
            self._limits[gpu_type, shape] = int(min(limit for limit in limits if not math.isnan(limit)))
        return self._limits[gpu_type, shape]

    def step(self, gpu_type: str, shape: Shape, atomic_batch: int) -> StepTimes | None:
        """See `ModelTruth`."""
        if not self.runs_on(gpu_type):
            return None
        try:
            step_s, sync_s = self._applications[gpu_type].get_throughput(shape, atomic_batch)
        except AssertionError:  # outside of what they measured
            return None
        return None if step_s < 0 else StepTimes(float(step_s) * self.slowdown, float(sync_s) * self.slowdown)

    def noise(self, batch: int) -> tuple[FloatArray, FloatArray]:
        """See `ModelTruth`."""
        inside = min(max(batch, self.initial_batch), self.max_batch)
        if inside not in self._noise:
            application = next(iter(self._applications.values()))
            found = np.array([application.get_grad_stats(inside, epoch) for epoch in range(self._epochs)], dtype=float)
            self._noise[inside] = found[:, 0], found[:, 1]
        return self._noise[inside]

    def progress_of(self, epochs: float) -> float | None:
        """See `ModelTruth`."""
        return float(np.interp(epochs, range(self._epochs + 1), [0.0, *self.epoch_ends, self.training]))
