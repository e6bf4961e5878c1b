"""TUNE (Synergy, section 4): which node, how many CPUs and how much memory each job gets. Also the optimum to compare with.

`penstock_scheduler.rounds.policies.synergy` explains the algorithm. Here a job is a `Claim` and a node is a `NodeCapacity`. This
module knows nothing of plans, phases or restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from penstock_profiles.sensitivity import Sensitivity
from penstock_scheduler.model import JobId, Node
from penstock_scheduler.rounds.solver import Limits
from penstock_scheduler.rounds.solver.shares import Choice, Shares, ValuedShare, choose_shares


class TuneSettings(BaseModel):
    """Section `[policy.synergy-tune]` of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: Literal["penstock", "paper", "reference"] = Field(
        default="penstock",
        description="Whose details count. penstock: CPUs and memory left on a node go to its jobs that did not get their "
        "demand. paper: they stay idle. reference: they stay idle, jobs are placed in the policy's order instead of the "
        "largest demand first, and each on the first node that fits instead of the tightest. The presets "
        "synergy-tune:paper and synergy-tune:reference set it.",
    )

    gone: ClassVar[dict[str, str]] = {
        "placement": "a job starts on the tightest node; for the first one, use synergy-tune:reference",
        "order": "the largest demand is placed first; for the policy's order, use synergy-tune:reference",
        "spare": "what is left is handed out; to leave it idle, use synergy-tune:paper",
    }


PAPER: dict[str, Any] = {"variant": "paper"}
"""Settings of the preset `synergy-tune:paper`."""

REFERENCE: dict[str, Any] = {"variant": "reference"}
"""Settings of the preset `synergy-tune:reference`: the authors' published runs."""


@dataclass(frozen=True, slots=True)
class Amount:
    """CPUs and memory, in MB, on one node."""

    cpus: int
    memory_mb: int

    def within(self, other: Amount) -> bool:
        """Whether `other` has at least as much of both."""
        return self.cpus <= other.cpus and self.memory_mb <= other.memory_mb

    def __str__(self) -> str:
        memory = f" and {self.memory_mb} MB" if self.memory_mb else ""
        return f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}{memory}"


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What a plan may allocate on a node."""

    name: str
    gpus: int
    cpus: int
    memory_mb: int
    cpus_per_gpu: float
    memory_mb_per_gpu: float

    @classmethod
    def of(cls, node: Node) -> NodeCapacity:
        """Capacity of a node.

        Jobs that Penstock does not manage may hold more than their part. So a GPU's part is the smaller one of its part of the
        whole node and of its part of what is left.
        """
        gpus = node.gpus_for_us

        def part(whole: int, left: int) -> float:
            return min(whole / node.gpus, left / gpus) if gpus else 0.0

        cpus, memory = node.cpus_for_us, node.memory_mb_for_us
        return cls(node.name, gpus, cpus, memory, part(node.cpus, cpus), part(node.memory_mb, memory))

    def proportional(self, gpus: int) -> Amount:
        """The proportional share of `gpus` GPUs, rounded down so that there is enough for all jobs."""
        return Amount(int(self.cpus_per_gpu * gpus + 1e-9), int(self.memory_mb_per_gpu * gpus + 1e-9))

    @property
    def kind(self) -> tuple[int, int, float, float]:
        """Nodes of one kind have the same demands and proportional shares."""
        return self.cpus, self.memory_mb, self.cpus_per_gpu, self.memory_mb_per_gpu


@dataclass(frozen=True, slots=True)
class Claim:
    """A job on one node that is to get CPUs and memory."""

    job: JobId
    gpus: int
    table: Sensitivity | None
    nodes: tuple[int, ...]
    """Indices of the nodes on which it may run."""
    held: Amount | None = None
    """What it holds on its only node, and keeps if it can; None: nothing."""
    may_exceed: bool = True
    """Whether it may get more than the proportional share: only a job that may be restarted can give the excess back."""
    least_gain: float = 1.0
    """Factor by which its speed must grow for a larger share to be worth a restart; 1 for a job that holds nothing."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The node and the share that a claim gets."""

    node: int
    amount: Amount
    by_demand: bool
    """Whether the share is the job's demand, not the proportional share."""


def ask(claim: Claim, room: NodeCapacity) -> Amount:
    """What a job asks for on a node: its demand; or the proportional share if the demand is unknown, or more is not allowed."""
    part = room.proportional(claim.gpus)
    if claim.table is None:
        return part
    least = _speed(claim.table, part, room)
    # Memory of 0 means that the cluster does not allocate memory.
    demand = claim.table.demand(
        room.cpus if claim.may_exceed else part.cpus,
        (room.memory_mb if claim.may_exceed else part.memory_mb) if room.memory_mb else float("inf"),
    )
    if demand is None or demand.speed < least:
        return part
    return Amount(demand.cpus, demand.memory_mb if room.memory_mb else 0)


def tune(claims: Sequence[Claim], rooms: Sequence[NodeCapacity], settings: TuneSettings) -> dict[JobId, Grant] | None:
    """TUNE: a node, CPUs and memory for each claim. None if the GPUs alone do not fit this way.

    Each job is at least as fast as with the proportional share, provided that all jobs which hold more than the proportional
    share may be restarted.
    """
    return _Tuning(rooms, settings).run(claims)


class _Tuning:
    """One run of TUNE. Axes: N nodes."""

    def __init__(self, rooms: Sequence[NodeCapacity], settings: TuneSettings) -> None:
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
        # By identity, not value: hashing a tuple of 2,000 nodes for each job took half the time.
        self._nodes_by_kind: dict[int, list[tuple[int, NDArray[np.int64]]]] = {}
        self._nowhere: set[tuple[int, int, int, Amount]] = set()
        """Requests that fit nowhere. An equal request does not fit either, until a job gives something back."""

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
                enough = self._ask(claim, claim.nodes[0]).within(claim.held)
                self._take(claim, Grant(claim.nodes[0], claim.held, enough))
        waiting = [claim for claim in claims if claim.held is None]
        if self._settings.variant != "reference":
            waiting.sort(key=self._size)
        for claim in waiting:
            if not (self._fit(claim, by_demand=True) or self._fit(claim, by_demand=False) or self._take_back(claim)):
                return None
        # Jobs give up a share that does not exist any more, as after jobs of other users have taken CPUs.
        for node in np.flatnonzero((self._free_cpus_N < 0) | (self._free_memory_N < 0)).tolist():
            self._make_room(node, Amount(0, 0))
        if self._settings.variant == "penstock":
            for node in sorted({grant.node for grant in self._grants.values() if not grant.by_demand}):
                self._hand_out(node)
        return self._grants

    def _hand_out(self, node: int) -> None:
        """Give what is left on a node to its jobs that did not get their demand, the largest gain in speed first."""
        room = self._rooms[node]
        short = [claim for claim in self._on[node] if not self._grants[claim.job].by_demand and claim.may_exceed]
        while True:
            best: tuple[float, int, Claim, Amount] | None = None
            for position, claim in enumerate(short):
                has, part = self._grants[claim.job].amount, room.proportional(claim.gpus)
                if claim.table is None or (base := _speed(claim.table, part, room)) <= 0:
                    continue
                now = _speed(claim.table, has, room)
                most = Amount(has.cpus + int(self._free_cpus_N[node]), has.memory_mb + int(self._free_memory_N[node]))
                option = claim.table.demand(most.cpus, most.memory_mb if room.memory_mb else float("inf"))
                if option is None or option.speed <= now * claim.least_gain:
                    continue
                gain = (option.speed - now) / base
                if best is None or gain > best[0]:
                    memory_mb = option.memory_mb if room.memory_mb else 0
                    best = gain, position, claim, Amount(option.cpus, memory_mb)
            if best is None:
                return
            _, _, claim, amount = best
            self._give_back(claim)
            self._take(claim, Grant(node, amount, by_demand=False))

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
        """The claim's nodes by kind: one node of each kind, and all nodes of that kind."""
        if id(claim.nodes) not in self._nodes_by_kind:
            by_kind: dict[object, list[int]] = {}
            for node in claim.nodes:
                by_kind.setdefault(self._rooms[node].kind, []).append(node)
            self._nodes_by_kind[id(claim.nodes)] = [(nodes[0], np.array(nodes)) for nodes in by_kind.values()]
        return self._nodes_by_kind[id(claim.nodes)]

    def _fit(self, claim: Claim, *, by_demand: bool) -> bool:
        """Put the claim on the tightest node, or on the first one, on which it fits; False if it fits nowhere."""
        best: tuple[float, int, Amount] | None = None
        for example, nodes in self._candidates(claim):
            wants = self._ask(claim, example) if by_demand else self._rooms[example].proportional(claim.gpus)
            key = (id(claim.nodes), example, claim.gpus, wants)
            if key in self._nowhere:
                continue
            fits = (
                (self._free_gpus_N[nodes] >= claim.gpus)
                & (self._free_cpus_N[nodes] >= wants.cpus)
                & (self._free_memory_N[nodes] >= wants.memory_mb)
            )
            found = nodes[fits]
            if not len(found):
                self._nowhere.add(key)
                continue
            if self._settings.variant == "reference":
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
        nodes = np.concatenate([alike for _, alike in self._candidates(claim)])
        nodes = nodes[self._free_gpus_N[nodes] >= claim.gpus]
        if not len(nodes):
            return False
        node = int(nodes[self._free_gpus_N[nodes].argmin()])
        part, wants = self._rooms[node].proportional(claim.gpus), self._ask(claim, node)
        # A job that asks for less than the proportional share does not need the rest of it.
        needs = wants if wants.within(part) else part
        self._make_room(node, needs)
        free = Amount(int(self._free_cpus_N[node]), int(self._free_memory_N[node]))
        given = Amount(max(min(needs.cpus, free.cpus), 0), max(min(needs.memory_mb, free.memory_mb), 0))
        self._take(claim, Grant(node, given, by_demand=False))
        return True

    def _make_room(self, node: int, needs: Amount) -> None:
        """Return jobs on this node to their proportional shares, those with the most CPUs per GPU first."""
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
        self._nowhere.clear()
        self._add(grant.node, claim.gpus, grant.amount.cpus, grant.amount.memory_mb)

    def _add(self, node: int, gpus: int, cpus: int, memory_mb: int) -> None:
        self._free_gpus_N[node] += gpus
        self._free_cpus_N[node] += cpus
        self._free_memory_N[node] += memory_mb
        self._spare_N[node] += gpus * self._gpus_weight + cpus * self._cpus_weight + memory_mb * self._memory_weight


def best_on(room: NodeCapacity, claims: Sequence[Claim], grants: dict[JobId, Grant], seconds: float) -> float:
    """Optimise the shares of the jobs on one node that do not run yet, in `grants`. Returns the seconds that this took."""
    free = [claim for claim in claims if claim.held is None and claim.may_exceed and claim.table is not None]
    fixed = [grants[claim.job].amount for claim in claims if claim not in free]
    choices = [_choice(claim, room, grants[claim.job].amount) for claim in free]
    cpus = room.cpus - sum(amount.cpus for amount in fixed)
    memory_mb = room.memory_mb - sum(amount.memory_mb for amount in fixed)
    shares = choose_shares(choices, cpus, memory_mb, Limits(seconds=seconds))
    for claim, choice, index in zip(free, choices, shares.option_J, strict=True):
        option = choice.options[index]
        amount = Amount(option.cpus, option.memory_mb)
        grants[claim.job] = Grant(grants[claim.job].node, amount, ask(claim, room).within(amount))
    return shares.report.seconds


def optimum(
    claims: Sequence[Claim], rooms: Sequence[NodeCapacity], limits: Limits | None = None
) -> tuple[Shares, list[Choice]]:
    """The optimum that the paper compares with: the best sum of speeds of these jobs on nodes of one kind, pooled.

    Speeds are relative to the proportional share, which is the first option of each job.
    """
    room = rooms[0]
    choices = [_choice(claim, room, room.proportional(claim.gpus)) for claim in claims]
    cpus, memory_mb = sum(each.cpus for each in rooms), sum(each.memory_mb for each in rooms)
    return choose_shares(choices, cpus, memory_mb, limits), choices


def relative_speed(table: Sensitivity | None, gpus: int, room: NodeCapacity, amount: Amount) -> float:
    """Speed of a job on `gpus` GPUs with this share, relative to the proportional share; 1 if it is unknown."""
    base = _speed(table, room.proportional(gpus), room) if table is not None else 0.0
    return _speed(table, amount, room) / base if table is not None and base > 0 else 1.0


def _speed(table: Sensitivity, amount: Amount, room: NodeCapacity) -> float:
    return table.speed(amount.cpus, amount.memory_mb if room.memory_mb else float("inf"))


def _choice(claim: Claim, room: NodeCapacity, first: Amount) -> Choice:
    """What a job may have on this node: `first`, or any share with which it is at least as fast as the proportional one."""
    value = relative_speed(claim.table, claim.gpus, room, first)
    options = [ValuedShare(first.cpus, first.memory_mb, value)]
    if claim.table is not None:
        for option in claim.table.options():
            amount = Amount(option.cpus, option.memory_mb if room.memory_mb else 0)
            worth = relative_speed(claim.table, claim.gpus, room, amount)
            if worth >= 1 and amount.within(Amount(room.cpus, room.memory_mb)):
                options.append(ValuedShare(amount.cpus, amount.memory_mb, worth))
    return Choice(tuple(dict.fromkeys(options)))
