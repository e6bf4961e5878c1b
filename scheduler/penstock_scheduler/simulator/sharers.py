"""What the jobs of a workload are like beside others on a GPU: what a simulation in which they share needs to be told.

A job's *kind* is what a table of pairs knows it by: the workload's column `kind`, else the first of its family, model,
`USER/NAME` and name that the table has; also as Gavel writes it, `('ResNet-18 (batch size 16)', 1)` for the kind and its GPUs.
A job of no kind of the table is like no other: beside it counts what each uses of the GPU alone. Where nobody knows that either,
it is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock_profiles.colocation import Colocation
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.model import JobId
from penstock_scheduler.simulator.agents import AgentSettings, Kind, SimulatedAgents
from penstock_scheduler.simulator.disturbances import draw
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob

OF_GPUS = re.compile(r"^\(.*, (\d+)\)$")
"""A kind of Gavel's table."""

MIB_OF_GB = 1e9 / 2**20


def gpus_of(kind: str) -> int | None:
    """GPUs that jobs of a kind of Gavel's table run on; None: its name does not say."""
    found = OF_GPUS.match(kind)
    return int(found[1]) if found is not None else None


@dataclass(frozen=True, slots=True)
class Sharers:
    """The truth about jobs that share.

    Args:
        pairs: shares of pairs, by the cluster's names of GPU types.
        kinds: of all jobs.
        unknown: jobs whose kind is not in the table.
        assumed: jobs of which nobody knows what they use of a GPU alone.
        settings: what sharing costs.
        gpu_memory_mb: memory of one GPU by type, where it is known.
    """

    pairs: Colocation
    kinds: Mapping[JobId, Kind]
    unknown: int
    assumed: tuple[JobId, ...]
    settings: AgentSettings
    gpu_memory_mb: Mapping[str, int]

    def agents(self) -> SimulatedAgents:
        """New ones, for one simulation."""
        return SimulatedAgents(self.kinds, self.pairs, self.settings, self.gpu_memory_mb)


def sharers(
    workload: Workload,
    gpu_types: Sequence[str],
    pairs: Colocation,
    settings: AgentSettings,
    *,
    drawn: bool = False,
    assumed: float = 1.0,
    gpu_memory_mb: Mapping[str, int] | None = None,
) -> Sharers:
    """The truth about the jobs of a workload.

    Args:
        workload: the jobs.
        gpu_types: of the cluster.
        pairs: shares of pairs; a pair without is one of which only the utilisation of each counts.
        settings: what sharing costs; its seed is that of the kinds, too.
        drawn: a job of no kind of the table gets one that runs on as many GPUs, at random.
        assumed: part of a GPU that a job uses alone of which nobody knows it, in [0, 1].
        gpu_memory_mb: memory of one GPU by type, as the site knows it; of other types the catalogue's counts.
    """
    known = dict.fromkeys(kind for gpu_type in gpu_types for kind in pairs.kinds(gpu_type))
    by_gpus: dict[int | None, list[str]] = {}
    for kind in known:
        by_gpus.setdefault(gpus_of(kind), []).append(kind)
    kinds, unknown, guessed = {}, 0, []
    for job in workload.jobs:
        name = next((name for name in names_of(job) if name in known), None)
        unknown += name is None
        if name is None and drawn and known:
            fitting = by_gpus[_size(job.gpus, by_gpus)]
            name = fitting[draw(settings.seed, "kind", job.id).integers(len(fitting))]
        used = job.gpu_utilisation if job.gpu_utilisation is not None else utilisation(pairs, gpu_types, name)
        guessed += [job.id] if used is None else []
        kinds[job.id] = Kind(name or next(names_of(job)), assumed if used is None else used, int(job.gpu_mem_mb or 0))
    gpus = load_gpus()
    known_types = {name: gpus.canonical(name) for name in gpu_types}
    memory_mb = {name: int(gpus[of].memory_gb * MIB_OF_GB) for name, of in known_types.items() if of in gpus}
    return Sharers(pairs, kinds, unknown, tuple(guessed), settings, memory_mb | dict(gpu_memory_mb or {}))


def utilisation(pairs: Colocation, gpu_types: Sequence[str], kind: str | None) -> float | None:
    """Part of a GPU that a kind uses alone, mean over the types on which something tells; None: nothing does."""
    if kind is None:
        return None
    told = []
    for gpu_type in gpu_types:
        used = pairs.utilisation(gpu_type, kind)
        used = pairs.utilisation_by_itself(gpu_type, kind) if used is None else used
        told += [used] if used is not None else []
    return sum(told) / len(told) if told else None


def names_of(job: WorkloadJob) -> Iterator[str]:
    """What a table may know the job by, the surest first."""
    own = f"{job.user}/{job.name}" if job.name else ""  # as `pairs.kind_of` has it
    for name in (job.kind, job.spec.model_family, job.model, own, job.name, job.id):
        if name:
            yield name
            yield f"('{name}', {job.gpus})"


def _size(gpus: int, known: Mapping[int | None, object]) -> int | None:
    """The size of kinds that is nearest to a job's GPUs from below; where there is none, the smallest."""
    sizes = sorted(size for size in known if size is not None)
    if not sizes:
        return None
    return max((size for size in sizes if size <= gpus), default=sizes[0])
