"""The CPU and memory that come with a job's GPUs, and how much faster they make it: for `explain` and `efficiency`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_profiles.sensitivity import Option
from penstock_scheduler.model import JobId, Placement, Snapshot
from penstock_scheduler.rounds.policies.tuning import Amount, NodeCapacity, relative_speed


@dataclass(frozen=True, slots=True)
class ShareUse:
    """CPU and memory of a job on each of its nodes. Memory is 0 where the cluster does not allocate memory."""

    nodes: int
    amount: Amount
    part: Amount
    """The part of the node that is proportional to its GPUs."""
    profile: str = ""
    """The sensitivity profile for this number of GPUs on one node; empty: there is none."""
    speed: float = 1.0
    """Speed relative to that with the proportional part, by the profile."""
    options: tuple[Option, ...] = ()
    """Its sensitivity: useful amounts and their relative speeds."""


def share_use(snapshot: Snapshot, job: JobId, placement: Placement) -> ShareUse | None:
    """What a job has with this placement; None: what its user requested, which Penstock does not know."""
    first = placement.shares[0]
    node = next((node for node in snapshot.nodes if node.name == first.node), None)
    if not first.cpus or node is None:
        return None
    room = NodeCapacity.of(node)
    amount, part = Amount(first.cpus, first.memory_mb), room.proportional(first.gpus)
    profile = snapshot.facts[job].sensitivity
    table = profile.at(first.gpus) if profile is not None and len(placement.shares) == 1 else None
    if profile is None or table is None or table.speed(part.cpus, part.memory_mb or float("inf")) <= 0:
        return ShareUse(len(placement.shares), amount, part)
    options = []
    for option in table.options():
        has = Amount(option.cpus, option.memory_mb if room.memory_mb else 0)
        if option.cpus <= node.cpus and has.memory_mb <= node.memory_mb:
            options.append(Option(has.cpus, has.memory_mb, relative_speed(table, first.gpus, room, has)))
    speed = relative_speed(table, first.gpus, room, amount)
    return ShareUse(1, amount, part, profile.model, speed, tuple(dict.fromkeys(options)))


def describe_share(use: ShareUse) -> list[str]:
    """`use` in sentences."""
    where = "On its node" if use.nodes == 1 else f"On each of its {use.nodes} nodes"
    lines = [f"{where} the job has {use.amount}; the part proportional to its GPUs is {use.part}."]
    if not use.profile:
        lines.append(
            "No profile tells how its speed depends on CPU and memory there. Measure it with "
            "penstock profile sensitivity measure."
        )
        return lines
    lines.append(
        f"By the profile {use.profile} it is {use.speed:.2f} times as fast as with the proportional part; "
        f"at most {max(option.speed for option in use.options):.2f} times is possible: {describe_sensitivity(use.options)}."
    )
    return lines


def describe_sensitivity(options: Sequence[Option]) -> str:
    """Amounts and their speeds, in one line."""
    return ", ".join(f"{option.speed:.2f} with {Amount(option.cpus, option.memory_mb)}" for option in options)
