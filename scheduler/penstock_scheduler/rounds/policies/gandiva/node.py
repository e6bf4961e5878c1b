"""A node as Gandiva sees it, and the jobs that use it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_profiles.colocation import Colocation, Pair
from penstock_scheduler.model import Job, Node, Pack, SharedGpus, SharingState
from penstock_scheduler.rounds.sharing.packing import Tenant


@dataclass(slots=True)
class SharedNode:
    """A node and the packs that use its GPUs."""

    node: Node
    gpus: int
    """GPUs for movable jobs. The GPUs of jobs that must stay do not count."""
    packs: list[Pack] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """GPUs that the packs want together."""
        return sum(pack.gpus for pack in self.packs)

    @property
    def free(self) -> int:
        """GPUs that no pack wants."""
        return max(self.gpus - self.wanted, 0)

    @property
    def sliced(self) -> bool:
        """Whether the packs want more GPUs than there are, so that they get time slices."""
        return self.wanted > self.gpus

    @property
    def height(self) -> float:
        """Number of GPUs that the packs want, divided by the number of GPUs."""
        return self.wanted / self.gpus if self.gpus > 0 else math.inf

    def view(self) -> SharedGpus:
        """The node as `sharing.gandiva` sees it."""
        return SharedGpus(self.node.name, self.gpus, tuple(self.packs))


def colocation(state: SharingState, gpu_types: Iterable[str]) -> Colocation:
    """What the snapshot knows about pairs of jobs, with utilisations for pairs that have not been measured."""
    pairs = {(pair.gpu_type, pair.mine, pair.theirs): Pair(share=pair.share) for pair in state.pairs}
    used = {use.kind: use.utilisation for use in state.uses.values() if use.utilisation is not None}
    return Colocation(pairs, {(gpu_type, kind): share for gpu_type in gpu_types for kind, share in used.items()})


def search_of(job: Job) -> tuple[str, str] | None:
    """The search that a trial belongs to: its user, and the name that the user gave the search."""
    return None if job.spec.trial_group is None else (job.user, job.spec.trial_group)


def tenant(job: Job, gpus: int, state: SharingState) -> Tenant:
    """A job as `sharing.packing` sees it."""
    use = state.use(job.id)
    moved_s = -math.inf if use.moved_s is None else use.moved_s
    return Tenant(job.id, use.kind, gpus, use.memory_mb, job.sharing_priority, moved_s)
