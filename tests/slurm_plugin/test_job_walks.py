"""Walks of a job through the table of transitions: whatever happens to it, one thing at a time, the table says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.base import WAITING
from penstock_slurm.jobs.states import HOLDING, TRANSITIONS, Facts, State, state
from tests.slurm_plugin.test_states import job

HELD = job("PENDING", priority=0)


@dataclass
class World:
    """One job in Slurm, and what is known beside its record."""

    record: SlurmJob | None = HELD
    facts: Facts = field(default_factory=Facts)

    def become(self, word: str, *, priority: int = 9, **facts: bool) -> None:
        self.record, self.facts = job(word, priority=priority), dataclasses.replace(self.facts, **facts)

    @property
    def word(self) -> str:
        return self.record.state if self.record is not None else ""

    @property
    def priority(self) -> int:
        return self.record.priority if self.record is not None else 0


EVENTS: dict[str, tuple[Callable[[World], bool], Callable[[World], None]]] = {
    "a round allocates GPUs to it": (
        lambda w: w.word == "PENDING" and w.priority == 0,
        lambda w: w.become("PENDING", asked=False, saved=False),
    ),
    "a round takes its place back": (
        lambda w: w.word == "PENDING" and w.priority > 0,
        lambda w: w.become("PENDING", priority=0),
    ),
    "Slurm starts it": (lambda w: w.word == "PENDING" and w.priority > 0, lambda w: w.become("RUNNING", answers=False)),
    "its run reports that it reads requests": (
        lambda w: w.word == "RUNNING" and not w.facts.asked,
        lambda w: w.become("RUNNING", answers=True),
    ),
    "a round asks it to save": (
        lambda w: w.word in ("RUNNING", "SUSPENDED") and not w.facts.asked,
        lambda w: w.become(w.word, asked=True, saved=False),
    ),
    "it answers": (
        lambda w: w.word == "RUNNING" and w.facts.asked and w.facts.answers,
        lambda w: w.become("RUNNING", saved=True),
    ),
    "a later round leaves it where it is": (
        lambda w: w.word == "RUNNING" and w.facts.asked,
        lambda w: w.become("RUNNING", asked=False),
    ),
    "its run ends, by requeuehold or by itself": (
        lambda w: w.word in ("RUNNING", "SUSPENDED") and (w.facts.asked or not w.facts.silent),
        lambda w: w.become("COMPLETING", priority=0),
    ),
    "Slurm has its GPUs back, and it is held": (
        lambda w: w.word == "COMPLETING",
        lambda w: w.become("PENDING", priority=0, asked=False, saved=False, answers=False, silent=False),
    ),
    "Slurm has cleaned up, and it was requeued": (
        lambda w: w.word == "COMPLETING",
        lambda w: w.become("PENDING", asked=False, saved=False, answers=False, silent=False),
    ),
    "Slurm has cleaned up after its end": (lambda w: w.word == "COMPLETING", lambda w: w.become("COMPLETED")),
    "it ends": (lambda w: w.word in WAITING | HOLDING, lambda w: w.become("CANCELLED")),
    "its user requeues it": (
        lambda w: w.word in ("COMPLETED", "CANCELLED"),
        lambda w: w.become("PENDING", asked=False, saved=False, answers=False, silent=False),
    ),
    "scontrol suspend": (
        lambda w: w.word == "RUNNING" and not w.facts.asked,
        lambda w: w.become("SUSPENDED"),
    ),
    "scontrol resume": (
        lambda w: w.word == "SUSPENDED" and not w.facts.asked,
        lambda w: w.become("RUNNING"),
    ),
    "its node falls silent": (lambda w: w.word in HOLDING, lambda w: w.become(w.word, silent=True)),
    "its node answers again": (lambda w: w.facts.silent, lambda w: w.become(w.word, silent=False)),
    "Slurm gives its node up and requeues it": (
        lambda w: w.facts.silent and w.word in HOLDING,
        lambda w: w.become("PENDING", asked=False, saved=False, answers=False, silent=False),
    ),
}
"""What can happen -> whether it can happen now, and what it does to Slurm's record and to what is known."""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(EVENTS) - 1), min_size=20, max_size=60))
def test_every_step_of_a_walk_is_a_transition_of_the_table(walk: list[int]) -> None:
    """Each number chooses one of the events that can happen now."""
    world, seen = World(), State.HELD
    for number in walk:
        possible = [event for event, (may, _) in EVENTS.items() if may(world)]
        event = possible[number % len(possible)]
        EVENTS[event][1](world)
        now = state(world.record, world.facts)
        assert now is seen or (seen, now) in TRANSITIONS, f"{event}: {seen.value} to {now.value}"
        seen = now


def test_the_walks_come_through_the_whole_table_but_what_slurm_forgets() -> None:
    """Every transition is some event's, in some state: the table has no line that cannot happen."""
    facts = [Facts(*(bool(bits >> at & 1) for at in range(len(dataclasses.fields(Facts))))) for bits in range(64)]
    worlds = [
        World(job(word, priority=priority), each)
        for word in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "COMPLETED", "CANCELLED")
        for priority in (0, 9)
        for each in facts
        if not each.kept_back
    ]
    found = set()
    for world in worlds:
        for may, does in EVENTS.values():
            before, after = state(world.record, world.facts), World(world.record, world.facts)
            if may(after):
                does(after)
                found.add((before, state(after.record, after.facts)))
    forgotten = {(each, State.LOST) for each in (State.HELD, State.PLACING)}
    by_hand = {(State.DONE, State.HELD), (State.LOST, State.HELD)}
    assert set(TRANSITIONS) - found <= forgotten | by_hand
