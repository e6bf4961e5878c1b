"""What Slurm's states of nodes and partitions mean for jobs, as tables. `docs/admin/node-states.md` prints them.

Two facts of a node are kept apart: whether new work may start there, and whether the work that is there is asked to leave. Only
an admin's drain asks it to leave. A node that Slurm drains by itself, does not respond or has not registered yet takes no new
work, and what runs there stays. A node that is DOWN is left to Slurm, which ends its jobs. A node that is powered down or boots
takes new work where Slurm wakes nodes by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

UNLISTED = "UNLISTED"
"""Penstock's own word for a node that Slurm did not list while a managed job runs there, and for a waiting job that it lacked."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one word in a node's state means."""

    text: str
    may_start: bool = False
    """Whether new work may start there."""
    leave: bool = False
    """Whether an admin asks the jobs there to leave."""
    silent: bool = False
    """Whether the node cannot be asked anything now, so that no job there is stopped by Penstock."""


_IN_USE = Meaning("in use", may_start=True)
_NOTE = Meaning("a note of Slurm's, without effect on jobs", may_start=True)
_DRAIN = Meaning("an admin drains it", leave=True)
_REBOOT = Meaning("an admin wants it rebooted once its jobs have ended")
_ASLEEP = Meaning("it is powered down; Slurm wakes it for a job", may_start=True)
_POWERING_DOWN = Meaning("it is about to be powered down, and cannot be woken before that")
_BOOTS = Meaning("it boots", may_start=True)
_MAINT = Meaning("it is in a maintenance reservation; the reservation says which jobs leave, and when")
_FAILS = Meaning("an admin expects it to fail soon")
_BAD = Meaning("it registered with less than slurm.conf says, and Slurm drained it by itself")
_BUSY = Meaning("Slurm keeps it for something else")

NODE_STATES: Mapping[str, Meaning] = {
    "IDLE": _IN_USE,
    "MIXED": _IN_USE,
    "ALLOCATED": _IN_USE,
    "COMPLETING": _IN_USE,
    "PLANNED": _NOTE,
    "RESERVED": _NOTE,
    "CLOUD": _NOTE,
    "DYNAMIC_NORM": _NOTE,
    "DYNAMIC_FUTURE": _NOTE,
    "RESUME": _NOTE,
    "UNDRAIN": _NOTE,
    "CANCEL_REBOOT": _NOTE,
    "DRAIN": _DRAIN,
    "DRAINED": _DRAIN,
    "DRAINING": _DRAIN,
    "MAINT": _MAINT,
    "MAINTENANCE": _MAINT,
    "FAIL": _FAILS,
    "FAILING": _FAILS,
    "REBOOT": _REBOOT,
    "REBOOT_REQUESTED": _REBOOT,
    "REBOOT_ISSUED": _REBOOT,
    "POWER_DOWN": _POWERING_DOWN,
    "POWER_DRAIN": _POWERING_DOWN,
    "POWERING_DOWN": _POWERING_DOWN,
    "POWERED_DOWN": _ASLEEP,
    "POWER_UP": _BOOTS,
    "POWERING_UP": _BOOTS,
    "INVAL": _BAD,
    "INVALID_REG": _BAD,
    "FUTURE": Meaning("it is not configured yet"),
    "BLOCKED": _BUSY,
    "PERFCTRS": _BUSY,
    "NPC": _BUSY,
    "EXTERNAL": Meaning("it is not Slurm's to start jobs on"),
    "UNKNOWN": Meaning("slurmctld has restarted, and the node has not registered yet", silent=True),
    "NOT_RESPONDING": Meaning("it does not respond", silent=True),
    "DOWN": Meaning("Slurm has given it up and ends its jobs by itself", silent=True),
    "ERROR": Meaning("Slurm reports an error of the node"),
    UNLISTED: Meaning("Slurm's list of nodes lacks it, although a job runs there", silent=True),
}
"""Every word that scontrol of Slurm 22.05, 24.11 and 26.05 prints for a node, and `UNLISTED`."""

BOOTS = frozenset({"POWERING_UP", "POWER_UP"})
"""States of a node that boots. It is silent, but it will answer."""

ASLEEP = frozenset({"POWERED_DOWN"})
"""States of a node that is powered down."""

OFF = ASLEEP | BOOTS | {"POWERING_DOWN"}
"""States of a node on which neither slurmd nor an agent need run, because of Slurm's power saving."""

OWN_DRAIN = frozenset({"INVAL", "INVALID_REG"})
"""States with which Slurm drains a node by itself. That is no request to leave."""

OWN_REASONS = (
    "batch job complete failure",
    "Bad core count",
    "CoreSpec differ",
    "Could not unpack gres data",
    "Duplicate jobid",
    "Epilog error",
    "Failed to parse dynamic_conf nodeline",
    "Failed to set topology",
    "gres/",
    "Invalid GRES",
    "Job env setup error",
    "Kill task failed",
    "Low CPUs",
    "Low RealMemory",
    "Low socket*core*thread count",
    "Low TmpDisk",
    "Prolog error",
    "Prolog/Epilog failure",
    "Reported active features",
    "RestrictedCoresPerGPU",
    "SlurmdSpoolDir is full",
    "switch_g_job_postfini failed",
)
"""How the reasons begin with which Slurm 22.05 to 26.05 drains a node by itself, for a fault. That is no request to leave: in
plain Slurm the jobs there go on to their end. An admin's drain always has a reason of the admin's own."""

PARTITION_STATES: Mapping[str, Meaning] = {
    "UP": Meaning("open", may_start=True),
    "DOWN": Meaning("jobs wait in it and do not start"),
    "DRAIN": Meaning("it takes no new jobs"),
    "INACTIVE": Meaning("it takes no new jobs, and none of its jobs start"),
}
"""Every state of a partition in Slurm 22.05, 24.11 and 26.05. What runs in a partition stays in every state."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the state of a node means for jobs."""

    may_start: bool
    leave: bool
    """Whether an admin asks the jobs there to leave."""
    silent: bool
    """Whether no job there is stopped by Penstock, because the node cannot be asked."""
    unknown: tuple[str, ...] = ()
    """Words that Penstock does not know. Nothing starts on such a node, and what runs there stays."""
    why: str = ""
    """Why nothing starts there, for people; empty: work may start."""
    boots: bool = False
    """Whether it boots."""
    asleep: bool = False
    """Whether it is powered down, and Slurm wakes it for a job. One that Slurm has given up is not asleep."""


def node_facts(state: Iterable[str], reason: str = "") -> NodeFacts:
    """The facts of a node with this state, such as {"IDLE", "DRAIN"}, and the reason that Slurm shows for it."""
    return _facts(frozenset(state), reason)


@functools.lru_cache(maxsize=1024)
def _facts(state: frozenset[str], reason: str) -> NodeFacts:
    words = sorted(state)
    unknown = tuple(word for word in words if word not in NODE_STATES)
    known = [NODE_STATES[word] for word in words if word in NODE_STATES]
    boots = not BOOTS.isdisjoint(words)
    closed = [
        NODE_STATES[word].text
        for word in words
        if word in NODE_STATES and not NODE_STATES[word].may_start and not (boots and word == "NOT_RESPONDING")
    ]
    if unknown:
        closed.append(f"Penstock does not know the state {'+'.join(unknown)}, and starts nothing there")
    return NodeFacts(
        may_start=not closed,
        leave=any(each.leave for each in known) and OWN_DRAIN.isdisjoint(words) and not reason.startswith(OWN_REASONS),
        silent=any(each.silent for each in known) and not boots,
        unknown=unknown,
        why="; ".join(dict.fromkeys(closed)),
        boots=boots,
        asleep=not closed and not boots and not ASLEEP.isdisjoint(words),
    )


def partition_facts(state: str) -> tuple[bool, str]:
    """Whether work may start in a partition with this state, and why not; empty: it may."""
    known = PARTITION_STATES.get(state)
    if known is None:
        return False, f"Penstock does not know the state {state}, and starts nothing there"
    return known.may_start, "" if known.may_start else known.text
