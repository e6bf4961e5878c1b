"""The states of a run in the cloud, as one table of transitions. It decides; the burst manager asks, does and writes.

In each pass, the manager goes through the rows of the run's state from the top. The first whose fact holds is the run's next
step. If none does, the run stays, and the manager goes on with what the state is for. The documentation prints this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

State = Literal["ordered", "booting", "running", "leaving", "ending", "over"]

STATES: dict[State, str] = {
    "ordered": "The commitment is in the ledger and the run in the store. Then its instances are ordered, all or none.",
    "booting": "The instances exist. The job is sent to their nodes, and Slurm waits for them.",
    "running": "The job runs there.",
    "leaving": "The job was asked to save and leave.",
    "ending": "The instances are ended and the nodes are powered down, again and again until the provider says that they are "
    "gone.",
    "over": "The run is paid for, and its commitment is free.",
}
"""State -> what happens in it."""


class Fact(StrEnum):
    """What may be so of a run, as the documentation says it."""

    SUSPENDED = "Slurm has suspended its nodes"
    RECALLED = "it was recalled"
    JOB_GONE = "its job has ended"
    ELSEWHERE = "its job runs elsewhere"
    PROTECTED = "no instance may be launched: protected mode"
    UNANSWERED = "the provider has not answered for five minutes"
    REFUSED = "the order was refused"
    LAUNCHED = "all its instances were launched"
    INSTANCE_LOST = "an instance has ended by itself"
    JOB_THERE = "its job runs on its nodes"
    MONEY_SPENT = "its committed dollars are spent"
    NEVER_ASKED = "Slurm has not started the job in the time that a boot may take"
    INPUT_LATE = "the input of a detached job has not arrived in that time"
    BOOT_LATE = "its instances have not joined Slurm, or not begun, in that time"
    SAVED_AND_TAKEN = "the provider has taken an instance, and its detached job has saved"
    REQUEUED = "Slurm has put its job back into the queue"
    MONEY_NEARLY_SPENT = "its committed dollars are spent in two minutes"
    NOTICE = "the provider takes an instance back within two minutes"
    HAS_LEFT = "its job has left, or cannot, or has had three minutes"
    ALL_GONE = "the provider and Slurm have let go of all of it"


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table.

    Attributes:
        state: the run's state.
        fact: what must hold.
        to: its next state.
        failed: whether the job's user is told the reason, since the run ended without the job having been done.
        boot: whether it counts as a failed boot: of the type, and towards protected mode.
    """

    state: State
    fact: Fact
    to: State
    failed: bool = False
    boot: bool = False


TABLE: tuple[Transition, ...] = (
    Transition("ordered", Fact.RECALLED, "ending"),
    Transition("ordered", Fact.JOB_GONE, "ending"),
    Transition("ordered", Fact.ELSEWHERE, "ending"),
    Transition("ordered", Fact.PROTECTED, "ending", failed=True),
    Transition("ordered", Fact.UNANSWERED, "ending", failed=True),
    Transition("ordered", Fact.LAUNCHED, "booting"),
    Transition("ordered", Fact.REFUSED, "ending", failed=True),
    Transition("booting", Fact.SUSPENDED, "ending"),
    Transition("booting", Fact.RECALLED, "ending"),
    Transition("booting", Fact.JOB_GONE, "ending"),
    Transition("booting", Fact.INSTANCE_LOST, "ending", failed=True, boot=True),
    Transition("booting", Fact.JOB_THERE, "running"),
    Transition("booting", Fact.ELSEWHERE, "ending"),
    Transition("booting", Fact.MONEY_SPENT, "ending", failed=True),
    Transition("booting", Fact.NEVER_ASKED, "ending", failed=True),
    Transition("booting", Fact.INPUT_LATE, "ending", failed=True),
    Transition("booting", Fact.BOOT_LATE, "ending", failed=True, boot=True),
    Transition("running", Fact.SUSPENDED, "ending"),
    Transition("running", Fact.RECALLED, "leaving"),
    Transition("running", Fact.JOB_GONE, "ending"),
    Transition("running", Fact.SAVED_AND_TAKEN, "leaving"),
    Transition("running", Fact.INSTANCE_LOST, "ending", failed=True),
    Transition("running", Fact.REQUEUED, "ending", failed=True),
    Transition("running", Fact.MONEY_NEARLY_SPENT, "leaving"),
    Transition("running", Fact.NOTICE, "leaving"),
    Transition("leaving", Fact.HAS_LEFT, "ending"),
    Transition("ending", Fact.ALL_GONE, "over"),
)
"""All transitions of a run, in the order in which they are tried."""


def step(state: State, why: Callable[[Fact], str]) -> tuple[Transition, str] | None:
    """The next step of a run, and its reason; None: it stays as it is.

    Args:
        state: the run's state.
        why: fact -> why it holds, as a part of a sentence; empty: it does not. Only facts of this state are asked for, and
            none after the first that holds.
    """
    for row in TABLE:
        if row.state == state and (words := why(row.fact)):
            return row, words
    return None


def rows() -> Iterator[tuple[str, str, str, str]]:
    """The table for the documentation: state, fact, next state, what the user is told."""
    for row in TABLE:
        told = "a failed boot; the user is told" if row.boot else "the user is told" if row.failed else ""
        yield row.state, row.fact.value, row.to, told
