"""Gandiva's introspective packing: try two jobs on one GPU, keep it if that beats taking turns, and undo it if not.

After OSDI '18, sections 3.3 and 4.2. A job first runs alone for a window, which tells its speed and utilisation. While
jobs outnumber GPUs, the pairs that promise most are packed. After each window in which a pack ran, the throughputs of
its two jobs, each relative to alone, are added up: above 1 the pack beats time slicing and stays; otherwise it is
undone. A pack that was good is watched on, since jobs change.

The paper knows of a pair only what utilisation says, lowest first. Here what was measured counts first (`Colocation`,
by kind of job), so that a pair that was undone once is not tried again with every new job of its kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.colocation import Colocation
from penstock_scheduler.model import JobId, JobUse, Limit, Pack, Placement, SharingState

MEMORY_MARGIN = 0.1
"""Part of what was seen of a job's memory that it must be able to have beyond that beside others: its peak may be still
to come. Chosen, not measured; the agents bear with a twentieth above a limit."""


class PackingSettings(BaseModel):
    """When jobs are packed and when not."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    least_total: float = Field(
        default=1.0, ge=1, description="Packs whose relative throughputs add up to no more than this are undone."
    )
    interval_s: float = Field(
        default=120.0, ge=0, description="Least time between a job's last move and its next packing, seconds."
    )


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job that may be packed: it has run alone for a window."""

    job: JobId
    kind: str
    """Jobs of one kind run alike; see `Colocation`."""
    gpus: int = 1
    memory_mb: int = 0
    """Most memory that it has used on each GPU; 0: not known."""
    priority: int = 0
    moved_s: float = float("-inf")
    """When it was last packed, unpacked or moved, s."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a window showed of a pack: each job's throughput over its throughput alone, 0 if the two did not fit."""

    pack: tuple[Tenant, Tenant]
    shares: tuple[float, float]

    @property
    def total(self) -> float:
        """Above 1 it beats taking turns. 0: one of them did not run, so the other is in its way or it in the
        other's."""
        return sum(self.shares) if min(self.shares) > 0 else 0.0


def learn(known: Colocation, gpu_type: str, seen: Collection[Measured]) -> None:
    """Add what a window showed to what is known of pairs."""
    for measured in seen:
        (one, other), shares = measured.pack, measured.shares
        known.observe(gpu_type, one.kind, other.kind, shares[0])
        known.observe(gpu_type, other.kind, one.kind, shares[1])


def undo(seen: Collection[Measured], spare_gpus: int, settings: PackingSettings) -> tuple[Measured, ...]:
    """The packs to undo after a window: those that do not pay, then the worst of the others while GPUs are idle.

    Args:
        seen: the packs that ran in the window.
        spare_gpus: GPUs that nobody wants; a job that leaves its pack takes one.
        settings: see there.
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

    Only jobs of one size and one priority: of a pair with different ones the more important would be slowed for the
    other. A pair that was never measured is tried when none promises more, even if utilisation promises nothing: the
    window decides, and costs little. One of which not even utilisation is known is not, nor one of which memory is not
    known on GPUs of which it is.

    Args:
        tenants: jobs that have a place to themselves, or turns there.
        excess_gpus: GPUs by which what jobs want exceeds what there is; a pack of n-GPU jobs takes n off it.
        known: shares of pairs, and utilisations.
        gpu_type: of all the tenants.
        memory_mb: of one GPU; 0: not known.
        now_s: the time.
        settings: see there.

    Returns:
        Pairs, each tenant at most once, those with the most expected throughput first.
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
    """What jobs that run at the same time on the same GPUs may use of the memory of each: together no more than there
    is.

    Each gets what was seen of it, `MEMORY_MARGIN`, and an equal part of the rest. Limits that still do stay as they
    are, for others begin a new slice.

    Args:
        seen_mb: most that each job has used on a GPU, MB; 0: not known.
        memory_mb: of one GPU; 0: not known.
        now: the limits that the jobs have, in the same order; empty: none.

    Returns:
        The limits, in the order of the jobs; empty: nobody knows what the GPU has; None: the jobs do not fit, or of one
        it is not known.
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
    """What jobs that are packed may use of their GPUs' memory, by what the nodes have seen of them; see
    `memory_limits`."""

    def __init__(self, state: SharingState) -> None:
        self._state = state
        self._now = {pack.jobs: pack.limits for group in state.groups for pack in group.packs}

    def limits(self, jobs: tuple[JobId, ...], gpu_type: str) -> tuple[Limit, ...] | None:
        """The limits of the jobs of a pack on GPUs of a type; None: they are not to be one."""
        if len(jobs) < 2:
            return ()
        seen_mb = [self._state.use(job).memory_mb for job in jobs]
        return memory_limits(seen_mb, self._state.gpu_memory_mb.get(gpu_type, 0), self._now.get(jobs, ()))


def most_used_mb(pack: Pack, uses: Mapping[JobId, JobUse], placements: Mapping[JobId, Placement]) -> int:
    """Memory that the jobs of a pack use together on the GPU where that is most, MB.

    Each is laid on those GPUs of the pack that the fewest others use, as the agents do. A job counts with its limit, or
    with what it has been seen to use.
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
    """Utilisation of both together; of pairs that promise the same, the emptier goes first."""
    return sum(known.utilisation(gpu_type, tenant.kind) or 0.0 for tenant in pair)
