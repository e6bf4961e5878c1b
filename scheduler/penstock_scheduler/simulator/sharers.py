"""The truth about co-located jobs of a workload, for simulations in which jobs share GPUs.

A table of pairs knows a job by its *kind*. That is the workload's column `kind`, or else the first of its family,
model, `USER/NAME` and name that the table has, also in Gavel's notation `('ResNet-18 (batch size 16)', 1)` for the kind
and its number of GPUs. A job of a kind that is not in the table is a kind of its own: beside it, only each job's
utilisation counts. If that is unknown, it is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock_profiles.colocation import Colocation
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.model import JobId
from penstock_scheduler.simulator.agents import AgentSettings, SharingKind, SimulatedAgents
from penstock_scheduler.simulator.disturbances import draw
from penstock_scheduler.simulator.workloads import Workload, WorkloadJob

OF_GPUS = re.compile(r"^\(.*, (\d+)\)$")
"""A kind of Gavel's table."""

MIB_OF_GB = 1e9 / 2**20


def gpus_of(kind: str) -> int | None:
    """Number of GPUs of a kind of Gavel's table; None: its name does not say."""
    found = OF_GPUS.match(kind)
    return int(found[1]) if found is not None else None


@dataclass(frozen=True, slots=True)
class Sharers:
    """The truth about co-located jobs.

    Args:
        pairs: shares of pairs, by the cluster's names of GPU types.
        kinds: kinds of all jobs.
        unknown: number of jobs of kinds that are not in the table.
        assumed: jobs for which the utilisation of a job that runs alone is assumed.
        settings: costs of sharing.
        gpu_memory_mb: memory of one GPU by GPU type, MB, as far as it is known.
    """

    pairs: Colocation
    kinds: Mapping[JobId, SharingKind]
    unknown: int
    assumed: tuple[JobId, ...]
    settings: AgentSettings
    gpu_memory_mb: Mapping[str, int]

    def agents(self) -> SimulatedAgents:
        """New agents for one simulation."""
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
        gpu_types: GPU types of the cluster.
        pairs: shares of pairs. For other pairs, only the utilisation of each job counts.
        settings: costs of sharing. Their seed also draws the kinds.
        drawn: whether a job of a kind that is not in the table gets a random kind with as many GPUs.
        assumed: utilisation of a job that runs alone, in [0, 1], for jobs of unknown utilisation.
        gpu_memory_mb: memory of one GPU by GPU type, MB, as the site knows it. For other types the catalogue's counts.
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
        kinds[job.id] = SharingKind(
            name or next(names_of(job)), assumed if used is None else used, int(job.gpu_mem_mb or 0)
        )
    gpus = load_gpus()
    known_types = {name: gpus.canonical(name) for name in gpu_types}
    memory_mb = {name: int(gpus[of].memory_gb * MIB_OF_GB) for name, of in known_types.items() if of in gpus}
    return Sharers(pairs, kinds, unknown, tuple(guessed), settings, memory_mb | dict(gpu_memory_mb or {}))


def utilisation(pairs: Colocation, gpu_types: Sequence[str], kind: str | None) -> float | None:
    """Utilisation of a kind alone, in [0, 1]: the mean over the GPU types on which it is known; None: it is unknown."""
    if kind is None:
        return None
    told = []
    for gpu_type in gpu_types:
        used = pairs.utilisation(gpu_type, kind)
        used = pairs.utilisation_by_itself(gpu_type, kind) if used is None else used
        told += [used] if used is not None else []
    return sum(told) / len(told) if told else None


def names_of(job: WorkloadJob) -> Iterator[str]:
    """Names by which a table may know the job, the surest first."""
    own = f"{job.user}/{job.name}" if job.name else ""  # as `pairs.kind_of` has it
    for name in (job.kind, job.spec.model_family, job.model, own, job.name, job.id):
        if name:
            yield name
            yield f"('{name}', {job.gpus})"


def _size(gpus: int, known: Mapping[int | None, object]) -> int | None:
    """The largest number of GPUs of a kind that is no more than the job's; without one, the smallest."""
    sizes = sorted(size for size in known if size is not None)
    if not sizes:
        return None
    return max((size for size in sizes if size <= gpus), default=sizes[0])
