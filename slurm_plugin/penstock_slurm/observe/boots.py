"""The boot times of nodes, measured on those that Slurm wakes.

Slurm's power saving powers idle nodes down and wakes them for jobs (SuspendProgram, ResumeProgram); Penstock never does. It
offers such nodes to the rounds at a price, the time that they take to boot:

1. A type without a boot that was seen takes `FIRST_SHARE` of ResumeTimeout.
2. Later it takes the median of the newest boots of that type.
3. A node whose newest boot failed takes ResumeTimeout, so that other nodes of its type are woken first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from penstock_scheduler.model import host_of
from penstock_scheduler.people.units import duration
from penstock_slurm.gateway import SlurmNode
from penstock_slurm.gateway.node_states import ASLEEP, node_facts

log = logging.getLogger(__name__)

FIRST_SHARE = 0.5
"""Sites set ResumeTimeout to several times what a boot takes."""

KEPT = 9
"""Boots of a type that count, the newest ones."""

STEP_S = 10.0
"""The rest of a boot is told in steps of this length, so that it does not change in each observation."""


class Boots:
    """The boots that the daemon has seen. After a restart it begins with ResumeTimeout again."""

    def __init__(self) -> None:
        self._asleep: set[str] = set()
        """Nodes that were powered down when they were last seen."""
        self._since_s: dict[str, float] = {}
        """Booting node -> when its boot was first seen."""
        self._whole: set[str] = set()
        """Those of them that were seen powered down before, so that the whole boot is known."""
        self._failed: set[str] = set()
        """Nodes whose newest boot failed."""
        self._took_s: dict[str, deque[float]] = {}
        """GPU type -> how long the newest boots took, s."""

    def saw(
        self, nodes: Iterable[SlurmNode], types: Mapping[str, str], resume_timeout_s: float | None, now_s: float
    ) -> dict[str, float]:
        """Take over an observation. Returns how long each node that is asleep or boots takes from now on, s.

        Args:
            nodes: all nodes.
            types: GPU type of each node.
            resume_timeout_s: ResumeTimeout; None: this Slurm wakes no nodes.
            now_s: the time.
        """
        found: dict[str, float] = {}
        if resume_timeout_s is None:
            return found
        for node in nodes:
            name, facts = node.name, node_facts(node.state)
            if not facts.boots and name in self._since_s:
                self._ended(node, types.get(name, ""), now_s)
            if facts.boots:
                self._since_s.setdefault(name, now_s)
                if name in self._asleep:
                    self._whole.add(name)
            usual_s = self._usual_s(name, types.get(name, ""), resume_timeout_s)
            if facts.boots and facts.may_start:
                left_s = usual_s - (now_s - self._since_s[name])
                found[name] = max(STEP_S, -(-left_s // STEP_S) * STEP_S)
            elif facts.asleep:
                found[name] = usual_s
            (self._asleep.add if facts.asleep else self._asleep.discard)(name)
        return found

    def _usual_s(self, node: str, gpu_type: str, resume_timeout_s: float) -> float:
        if node in self._failed:
            return resume_timeout_s
        took_s = self._took_s.get(gpu_type)
        return median(took_s) if took_s else max(resume_timeout_s * FIRST_SHARE, 1.0)

    def _ended(self, node: SlurmNode, gpu_type: str, now_s: float) -> None:
        """A node boots no more: it is awake, or Slurm has given it up or powered it down meanwhile."""
        took_s, whole = now_s - self._since_s.pop(node.name), node.name in self._whole
        self._whole.discard(node.name)
        if failed(node):
            self._failed.add(node.name)
            log.warning("a node did not boot", extra={"node": node.name, "state": "+".join(sorted(node.state))})
        elif node_facts(node.state).may_start and ASLEEP.isdisjoint(node.state):
            self._failed.discard(node.name)
            if whole:
                self._took_s.setdefault(gpu_type, deque(maxlen=KEPT)).append(max(took_s, 1.0))
                log.info("a node has booted", extra={"node": node.name, "took_s": round(took_s)})


def failed(node: SlurmNode) -> bool:
    """Whether Slurm has given a node up because it did not boot in time."""
    return "DOWN" in node.state and (
        not ASLEEP.isdisjoint(node.state) or node.reason.startswith("ResumeTimeout reached")
    )


def note(node: SlurmNode, boot_s: float, resume_timeout_s: float | None) -> str:
    """A remark for people about a node that sleeps, boots or did not boot, as a sentence without its subject."""
    facts = node_facts(node.state)
    if facts.asleep and resume_timeout_s is None:
        return "is powered down, and Slurm has no ResumeProgram to wake it"
    if facts.asleep:
        return f"is powered down; Slurm wakes it in about {duration(boot_s)}"
    if facts.boots and facts.may_start:
        return f"boots, and is ready in about {duration(boot_s)}"
    if failed(node) and resume_timeout_s is not None:
        return (
            f"did not boot within {duration(resume_timeout_s)} (ResumeTimeout), and Slurm has given it up; find out why, then: "
            f"scontrol update NodeName={host_of(node.name)} State=RESUME"
        )
    if "POWERED_DOWN" in node.state and "NOT_RESPONDING" in node.state:
        return (
            "is powered down, and Slurm does not wake it, because it lists it as not responding, too; an admin mends that with: "
            f"scontrol update NodeName={host_of(node.name)} State=POWER_DOWN_FORCE"
        )
    return ""
