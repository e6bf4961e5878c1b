"""Synergy: CPU and memory by sensitivity, for GPUs that another policy has given out.

After *Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters* (Mohan et al., OSDI '22). Nearly every cluster gives CPU and
memory in proportion to GPUs. Language models leave most of theirs idle, image models starve. Three *stages*, each behind
any policy, as in `sia+synergy-tune`:

- `proportional`: each job gets its GPUs' part of its node.
- `synergy-tune`: each job asks for its *demand*, the least with which it is as fast as it gets. Those who ask for most are placed
  first (GPUs, then CPUs, then memory), each on the node where it fits with the least to spare. One that fits nowhere falls back to
  the proportional share. If that does not fit either, then somebody on a node with enough free GPUs holds more than
  the proportional share: those that hold most CPUs for each GPU are put back to it, until there is room. So whoever gets
  GPUs gets at least the speed of the proportional share.
- `synergy-opt`: for the jobs of each node, the shares that add up to the most speed, by an integer program; the yardstick of
  the paper, which pools the nodes of a class, is `penstock_scheduler.solver.shares`.

A job on several nodes has these nodes whole, so there is nothing to tune: it gets all that is there. So does, in proportion, a job
without a profile for its number of GPUs.

What Slurm cannot do shapes the rest: the share of a running job cannot change, so one that stays on its GPUs keeps its share
unless somebody else has to have it, which costs it a restart. A job that may not be restarted gets no more than the
proportional share, so that nobody ever waits for what it holds. Jobs that start, or move anyway, may be put on other nodes of the
same kind than the policy chose (`placement`): GPUs alone do not tell where the CPUs are.

Departures from the authors' code are settings, all of which the preset `synergy-tune:reference` sets: it takes the first node in the
list that fits rather than the tightest, and jobs in the order of the policy. In its simulator a job runs with the whole
speed-up of its demand or with none; here the table tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from penstock_profiles.sensitivity import Sensitivity
from penstock_scheduler.model import Assignment, Job, JobId, Node, Phase, Placement, Plan, Reason, Share, Snapshot
from penstock_scheduler.policies import common
from penstock_scheduler.solver.shares import Choice, choose_shares


class ProportionalSettings(BaseModel):
    """Section `[policy.proportional]` of the settings file: there is nothing to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TuneSettings(BaseModel):
    """Section `[policy.synergy-tune]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    placement: Literal["best-fit", "first-fit", "given"] = Field(
        default="best-fit",
        description="Where jobs that start go: the tightest node that fits, the first, or where the policy put them.",
    )
    order: Literal["demand", "plan"] = Field(
        default="demand", description="Who is placed first: the most demanding, or as the policy lists them."
    )


class OptSettings(BaseModel):
    """Section `[policy.synergy-opt]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_seconds: PositiveFloat = Field(
        default=10.0, description="For all programs of a round; where it is met, synergy-tune's answer stands."
    )


REFERENCE: dict[str, Any] = {"placement": "first-fit", "order": "plan"}
"""The authors' published runs."""


@dataclass(frozen=True, slots=True)
class Amount:
    """CPUs and MB on one node."""

    cpus: int
    memory_mb: int

    def within(self, other: Amount) -> bool:
        """Whether `other` has as much of both."""
        return self.cpus <= other.cpus and self.memory_mb <= other.memory_mb


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has for us."""

    name: str
    gpus: int
    cpus: int
    memory_mb: int
    cpus_per_gpu: float
    memory_mb_per_gpu: float

    @classmethod
    def of(cls, node: Node) -> Room:
        """The node's. Others may hold more than their part, so a GPU's part is the smaller of the node's and of what is left."""
        gpus = node.gpus_for_us

        def part(whole: int, left: int) -> float:
            return min(whole / node.gpus, left / gpus) if gpus else 0.0

        cpus, memory = node.cpus_for_us, node.memory_mb_for_us
        return cls(node.name, gpus, cpus, memory, part(node.cpus, cpus), part(node.memory_mb, memory))

    def proportional(self, gpus: int) -> Amount:
        """The part of so many GPUs, rounded down, so that there is enough for all."""
        return Amount(int(self.cpus_per_gpu * gpus + 1e-9), int(self.memory_mb_per_gpu * gpus + 1e-9))

    @property
    def kind(self) -> tuple[int, int, float, float]:
        """Rooms of one kind have the same demands and parts."""
        return self.cpus, self.memory_mb, self.cpus_per_gpu, self.memory_mb_per_gpu


@dataclass(frozen=True, slots=True)
class Claim:
    """A job on one node, to be given CPU and memory."""

    job: JobId
    gpus: int
    table: Sensitivity | None
    nodes: tuple[int, ...]
    """Rooms where it may go, by index."""
    held: Amount | None = None
    """What it runs with on its only node, and keeps if it can."""
    may_exceed: bool = True
    """Whether it may be given more than the proportional share: only who can be restarted can give it back."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim gets."""

    node: int
    amount: Amount
    by_demand: bool
    """Whether it has its demand, not the proportional share."""


def ask(claim: Claim, room: Room) -> Amount:
    """What a job asks for on a node: its demand, or the proportional share if nobody knows that, or it may not have more."""
    part = room.proportional(claim.gpus)
    if claim.table is None:
        return part
    least = claim.table.speed(part.cpus, part.memory_mb)
    # Memory of 0 means that the cluster does not give it out.
    demand = claim.table.demand(
        room.cpus if claim.may_exceed else part.cpus,
        (room.memory_mb if claim.may_exceed else part.memory_mb) if room.memory_mb else float("inf"),
    )
    if demand is None or (room.memory_mb and demand.speed < least):
        return part
    return Amount(demand.cpus, demand.memory_mb if room.memory_mb else 0)


def tune(claims: Sequence[Claim], rooms: Sequence[Room], settings: TuneSettings) -> dict[JobId, Grant] | None:
    """TUNE: a node, CPUs and memory for each claim; see the module. None if GPUs alone do not fit this way.

    Whoever gets a node gets at least the proportional speed there, as long as those who hold more than the proportional share
    may be put back to it.
    """
    return _Tuning(rooms, settings).run(claims)


class _Tuning:
    """One run of TUNE. Axes: N rooms."""

    def __init__(self, rooms: Sequence[Room], settings: TuneSettings) -> None:
        self._rooms = rooms
        self._settings = settings
        self._free_gpus_N = np.array([room.gpus for room in rooms], dtype=np.int64)
        self._free_cpus_N = np.array([room.cpus for room in rooms], dtype=np.int64)
        self._free_memory_N = np.array([room.memory_mb for room in rooms], dtype=np.int64)
        self._cpus_weight = 1 / max(int(self._free_cpus_N.max(initial=1)), 1)
        self._memory_weight = 1 / max(int(self._free_memory_N.max(initial=1)), 1)
        self._gpus_weight = 1 / max(int(self._free_gpus_N.max(initial=1)), 1)
        self._spare_N = self._spare()
        self._on: dict[int, list[Claim]] = {}
        self._grants: dict[JobId, Grant] = {}
        self._asks: dict[object, Amount] = {}
        self._doors: dict[tuple[int, ...], list[tuple[int, NDArray[np.int64]]]] = {}
        self._kinds: dict[tuple[int, int, float, float], list[int]] = {}
        for index, room in enumerate(rooms):
            self._kinds.setdefault(room.kind, []).append(index)

    def _spare(self) -> NDArray[np.float64]:
        spare: NDArray[np.float64] = (
            self._free_gpus_N * self._gpus_weight
            + self._free_cpus_N * self._cpus_weight
            + self._free_memory_N * self._memory_weight
        )
        return spare

    def run(self, claims: Sequence[Claim]) -> dict[JobId, Grant] | None:
        for claim in claims:
            if claim.held is not None:
                self._take(claim, Grant(claim.nodes[0], claim.held, True))
        waiting = [claim for claim in claims if claim.held is None]
        if self._settings.order == "demand":
            waiting.sort(key=self._size)
        for claim in waiting:
            if not (self._fit(claim, by_demand=True) or self._fit(claim, by_demand=False) or self._take_back(claim)):
                return None
        # Who keeps a share that is not there any more, as when others have taken CPUs, gives it up.
        for node in np.flatnonzero((self._free_cpus_N < 0) | (self._free_memory_N < 0)).tolist():
            self._make_room(node, Amount(0, 0))
        return self._grants

    def _size(self, claim: Claim) -> tuple[int, int, int]:
        wants = self._ask(claim, claim.nodes[0])
        return -claim.gpus, -wants.cpus, -wants.memory_mb

    def _ask(self, claim: Claim, node: int) -> Amount:
        room = self._rooms[node]
        key = (claim.gpus, id(claim.table), claim.may_exceed, room.kind)
        if key not in self._asks:
            self._asks[key] = ask(claim, room)
        return self._asks[key]

    def _candidates(self, claim: Claim) -> list[tuple[int, NDArray[np.int64]]]:
        """Nodes of the claim by kind, as one of the kind and all of them."""
        if claim.nodes not in self._doors:
            by_kind: dict[object, list[int]] = {}
            for node in claim.nodes:
                by_kind.setdefault(self._rooms[node].kind, []).append(node)
            self._doors[claim.nodes] = [(nodes[0], np.array(nodes)) for nodes in by_kind.values()]
        return self._doors[claim.nodes]

    def _fit(self, claim: Claim, *, by_demand: bool) -> bool:
        """Put the claim where it fits, with the least to spare or first; False if that is nowhere."""
        best: tuple[float, int, Amount] | None = None
        for example, nodes in self._candidates(claim):
            wants = self._ask(claim, example) if by_demand else self._rooms[example].proportional(claim.gpus)
            fits = (
                (self._free_gpus_N[nodes] >= claim.gpus)
                & (self._free_cpus_N[nodes] >= wants.cpus)
                & (self._free_memory_N[nodes] >= wants.memory_mb)
            )
            found = nodes[fits]
            if not len(found):
                continue
            if self._settings.placement == "first-fit":
                offer = (float(found[0]), int(found[0]), wants)
            else:
                tightest = int(found[self._spare_N[found].argmin()])
                offer = (float(self._spare_N[tightest]), tightest, wants)
            if best is None or offer[:2] < best[:2]:
                best = offer
        if best is None:
            return False
        self._take(claim, Grant(best[1], best[2], by_demand))
        return True

    def _take_back(self, claim: Claim) -> bool:
        """Put the claim on the node with the fewest free GPUs that suffice, and make room for its proportional share there."""
        nodes = np.array(claim.nodes)
        nodes = nodes[self._free_gpus_N[nodes] >= claim.gpus]
        if not len(nodes):
            return False
        node = int(nodes[self._free_gpus_N[nodes].argmin()])
        part, wants = self._rooms[node].proportional(claim.gpus), self._ask(claim, node)
        # Who asks for less than its part does not need the rest of it.
        needs = wants if wants.within(part) else part
        self._make_room(node, needs)
        free = Amount(int(self._free_cpus_N[node]), int(self._free_memory_N[node]))
        given = Amount(max(min(needs.cpus, free.cpus), 0), max(min(needs.memory_mb, free.memory_mb), 0))
        self._take(claim, Grant(node, given, by_demand=False))
        return True

    def _make_room(self, node: int, needs: Amount) -> None:
        """Put jobs on this node back to their proportional shares, the ones with most CPUs for each GPU first."""
        room = self._rooms[node]

        def greed(claim: Claim) -> tuple[bool, float, float]:
            has = self._grants[claim.job].amount
            return claim.held is not None, -has.cpus / claim.gpus, -has.memory_mb / claim.gpus

        for other in sorted(self._on.get(node, ()), key=greed):
            if self._free_cpus_N[node] >= needs.cpus and self._free_memory_N[node] >= needs.memory_mb:
                return
            has, part = self._grants[other.job].amount, room.proportional(other.gpus)
            if not has.within(part) and other.may_exceed:
                self._give_back(other)
                self._take(other, Grant(node, part, by_demand=False))

    def _take(self, claim: Claim, grant: Grant) -> None:
        self._grants[claim.job] = grant
        self._on.setdefault(grant.node, []).append(claim)
        self._add(grant.node, -claim.gpus, -grant.amount.cpus, -grant.amount.memory_mb)

    def _give_back(self, claim: Claim) -> None:
        grant = self._grants.pop(claim.job)
        self._on[grant.node].remove(claim)
        self._add(grant.node, claim.gpus, grant.amount.cpus, grant.amount.memory_mb)

    def _add(self, node: int, gpus: int, cpus: int, memory_mb: int) -> None:
        self._free_gpus_N[node] += gpus
        self._free_cpus_N[node] += cpus
        self._free_memory_N[node] += memory_mb
        self._spare_N[node] += (
            gpus * self._gpus_weight + cpus * self._cpus_weight + memory_mb * self._memory_weight
        )
