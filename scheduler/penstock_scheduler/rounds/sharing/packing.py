"""Gandiva's introspective packing: try two jobs on one GPU, and keep the pack if it beats time slicing.

After OSDI '18, sections 3.3 and 4.2:

1. A job first runs alone for a window. This shows its speed and its utilisation.
2. While jobs need more GPUs than there are, the pairs with the largest expected gain are packed.
3. After each window of a pack, the throughputs of its two jobs, each relative to alone, are added up. Above 1 the pack
   beats time slicing and stays; otherwise it is undone. A pack that stays is measured further, because jobs change.

The paper knows of a pair only its utilisation, lowest first. Here measurements go first (`Colocation`, by kind of job),
so that a pair that was undone once is not tried again with every new job of its kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock_profiles.colocation import Colocation
from penstock_scheduler.model import JobId, JobUse, Limit, Pack, Placement, SharingState

MEMORY_MARGIN = 0.1
"""A co-located job must be able to use this part more memory than it was seen to use, because its peak may be yet to
come. This value is chosen, not measured. The agents tolerate a twentieth above a limit."""


@dataclass(frozen=True)
class PackingSettings:
    """When jobs are packed."""

    least_total: float = 1.0
    """A pack is undone if its jobs' relative throughputs add up to no more than this: with time slices they add up to 1."""
    interval_s: float = 120.0
    """Shortest time between a job's last move and its next packing, s: two slices, in which its speed alone is measured."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job that may be packed, because it has run alone for a window."""

    job: JobId
    kind: str
    """Jobs of one kind behave alike; see `Colocation`."""
    gpus: int = 1
    memory_mb: int = 0
    """Most memory that it has used on each GPU, MB; 0: unknown."""
    priority: int = 0
    moved_s: float = float("-inf")
    """When it last moved, entered or left a pack, s."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Throughput of each job of a pack in a window, relative to its throughput alone; 0: the two did not fit."""

    pack: tuple[Tenant, Tenant]
    shares: tuple[float, float]

    @property
    def total(self) -> float:
        """Sum of the shares. Above 1 the pack beats time slicing. 0: one of the jobs could not run beside the other."""
        return sum(self.shares) if min(self.shares) > 0 else 0.0


def learn(known: Colocation, gpu_type: str, seen: Collection[Measured]) -> None:
    """Add the measurements of a window to what is known of pairs."""
    for measured in seen:
        (one, other), shares = measured.pack, measured.shares
        known.observe(gpu_type, one.kind, other.kind, shares[0])
        known.observe(gpu_type, other.kind, one.kind, shares[1])


def undo(seen: Collection[Measured], spare_gpus: int, settings: PackingSettings) -> tuple[Measured, ...]:
    """The packs to undo after a window: those that do not pay, then the worst ones while GPUs are idle.

    Args:
        seen: the packs that ran in the window.
        spare_gpus: number of GPUs that no job needs. The job that leaves a pack takes its GPUs from these.
        settings: the settings.
    """
    by_total = sorted(seen, key=lambda measured: measured.total)
    gone = [measured for measured in by_total if measured.total <= settings.least_total]
    for measured in by_total[len(gone) :]:
        wanted = measured.pack[0].gpus
        if wanted <= spare_gpus:
            spare_gpus -= wanted
            gone.append(measured)
    return tuple(gone)


def choose(
    tenants: Sequence[Tenant],
    excess_gpus: int,
    known: Colocation,
    gpu_type: str,
    memory_mb: int,
    now_s: float,
    settings: PackingSettings,
) -> tuple[tuple[Tenant, Tenant], ...]:
    """The pairs to pack now.

    Only jobs of equal size and priority are packed, because in other pairs the more important job would be slowed for
    the other. A pair that was never measured is tried if no pair promises more, even if its utilisation promises
    nothing: the window decides, and costs little. A pair is not tried if its utilisation is unknown, or if its memory
    is unknown although that of the GPUs is known.

    Args:
        tenants: jobs that have GPUs to themselves or in time slices.
        excess_gpus: number of GPUs by which the jobs' need exceeds the GPUs. A pack of n-GPU jobs reduces it by n.
        known: shares of pairs, and utilisations.
        gpu_type: GPU type of all tenants.
        memory_mb: memory of one GPU, MB; 0: unknown.
        now_s: the time.
        settings: the settings.

    Returns:
        Pairs, with each tenant at most once, the highest expected throughput first.
    """
    ready = [tenant for tenant in tenants if now_s - tenant.moved_s >= settings.interval_s]
    options = [
        (-total, _used(known, gpu_type, pair), index, pair)
        for index, pair in enumerate(itertools.combinations(ready, 2))
        if _alike(*pair)
        and memory_limits([tenant.memory_mb for tenant in pair], memory_mb) is not None
        and (total := known.total(gpu_type, pair[0].kind, pair[1].kind)) is not None
        and (total > settings.least_total or not known.measured(gpu_type, pair[0].kind, pair[1].kind))
    ]
    chosen: list[tuple[Tenant, Tenant]] = []
    taken: set[JobId] = set()
    for *_, pair in sorted(options, key=lambda option: option[:3]):
        if pair[0].gpus <= excess_gpus and taken.isdisjoint({pair[0].job, pair[1].job}):
            chosen.append(pair)
            taken |= {pair[0].job, pair[1].job}
            excess_gpus -= pair[0].gpus
    return tuple(chosen)


def memory_limits(seen_mb: Sequence[int], memory_mb: int, now: Sequence[Limit] = ()) -> tuple[Limit, ...] | None:
    """Memory limits of jobs that run at the same time on the same GPUs: together no more than there is.

    Each job gets what it was seen to use, `MEMORY_MARGIN` on top, and an equal part of the rest. Present limits stay if
    they still fit, because new limits begin a new time slice.

    Args:
        seen_mb: most memory that each job has used on a GPU, MB; 0: unknown.
        memory_mb: memory of one GPU, MB; 0: unknown.
        now: the jobs' present limits, in the same order; empty: none.

    Returns:
        The limits, in the order of the jobs; empty: the GPU's memory is unknown; None: the jobs do not fit, or the need
        of one is unknown.
    """
    if memory_mb == 0:
        return ()
    held = bool(now) and all(limit.memory_mb >= max(mb, 1) for limit, mb in zip(now, seen_mb, strict=True))
    if held and sum(limit.memory_mb for limit in now) <= memory_mb:
        return tuple(now)
    least_mb = [round(mb * (1 + MEMORY_MARGIN)) for mb in seen_mb]
    rest_mb = (memory_mb - sum(least_mb)) // len(least_mb)
    if rest_mb < 0 or 0 in seen_mb:
        return None
    return tuple(Limit(memory_mb=mb + rest_mb) for mb in least_mb)


class Memory:
    """Memory limits of packs, by what the nodes have observed of their jobs; see `memory_limits`."""

    def __init__(self, state: SharingState) -> None:
        self._state = state
        self._now = {pack.jobs: pack.limits for group in state.groups for pack in group.packs}

    def limits(self, jobs: tuple[JobId, ...], gpu_type: str) -> tuple[Limit, ...] | None:
        """Limits of the jobs of a pack on GPUs of a type; None: they must not be packed."""
        if len(jobs) < 2:
            return ()
        seen_mb = [self._state.use(job).memory_mb for job in jobs]
        return memory_limits(seen_mb, self._state.gpu_memory_mb.get(gpu_type, 0), self._now.get(jobs, ()))


def most_used_mb(pack: Pack, uses: Mapping[JobId, JobUse], placements: Mapping[JobId, Placement]) -> int:
    """Memory that the jobs of a pack use together on their fullest GPU, MB.

    Each job is placed on the GPUs of the pack that the fewest other jobs use, as the agents do. It counts with its
    limit or, without one, with what it was seen to use.
    """
    on_gpu = [(0, index, 0) for index in range(pack.gpus)]
    """(jobs, GPU, MB), the emptiest first."""
    for job in pack.jobs:
        mine = pack.limit(job).memory_mb or (uses[job].memory_mb if job in uses else 0)
        gpus = min(placements[job].gpus, pack.gpus) if job in placements else pack.gpus
        on_gpu = sorted([(n + (i < gpus), g, mb + mine * (i < gpus)) for i, (n, g, mb) in enumerate(on_gpu)])
    return max((mb for *_, mb in on_gpu), default=0)


def _alike(one: Tenant, other: Tenant) -> bool:
    return (one.gpus, one.priority) == (other.gpus, other.priority)


def _used(known: Colocation, gpu_type: str, pair: tuple[Tenant, Tenant]) -> float:
    """Utilisation of both together. Among pairs that promise the same, the lower one goes first."""
    return sum(known.utilisation(gpu_type, tenant.kind) or 0.0 for tenant in pair)
