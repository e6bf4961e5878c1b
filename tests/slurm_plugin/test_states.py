"""The state machine: every state of Slurm's with every combination of facts, and the table of transitions."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.abilities import RELEASES
from penstock_slurm.gateway.base import ENDED, WAITING
from penstock_slurm.jobs.states import HOLDING, LEAVING, SLURM_STATES, TRANSITIONS, Facts, State, state

# What job_state_string of Slurm 22.05 to 26.05 can return (src/common/slurm_protocol_defs.c): flags first, then base states.
KNOWN_STATES = {
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING", "EXPEDITING"),
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
    *("PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
}

FACTS = [Facts(*values) for values in itertools.product([False, True], repeat=len(dataclasses.fields(Facts)))]


def job(word: str, *, priority: int = 0) -> SlurmJob:
    return SlurmJob(
        id="7",
        number=7,
        name="j",
        user="u",
        uid=1000,
        account="",
        partition=("p",),
        state=word,
        reason="",
        nodes=("n1",) if word in HOLDING | LEAVING else (),
        required_nodes=(),
        node_count=1,
        gpus_per_node=1,
        gpu_type=None,
        cpus=1,
        cpus_per_task=1,
        tasks=1,
        comment="",
        admin_comment="",
        submit_s=0.0,
        eligible_s=None,
        start_s=None,
        end_s=None,
        time_limit_s=None,
        restarts=0,
        requeue=True,
        priority=priority,
    )


def test_every_word_of_slurm_is_known_and_in_one_class():
    assert SLURM_STATES == KNOWN_STATES == frozenset.union(*(each.job_states for each in RELEASES))
    for one, other in itertools.combinations((WAITING, HOLDING, LEAVING, ENDED), 2):
        assert not one & other


@pytest.mark.parametrize("word", sorted(KNOWN_STATES))
def test_every_word_with_all_facts_has_the_state_that_the_words_mean(word):
    for facts, priority in itertools.product(FACTS, (0, 5)):
        found = state(job(word, priority=priority), facts)
        if word in ENDED:
            wanted = State.DONE
        elif word in ("COMPLETING", "STAGE_OUT", "EXPEDITING"):
            wanted = State.STOPPING
        elif word in ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT") or (
            word in WAITING and (priority == 0 or facts.kept_back)
        ):
            wanted = State.HELD
        elif word in WAITING:
            wanted = State.PLACING
        elif facts.silent:
            wanted = State.LOST
        elif word == "CONFIGURING" and facts.boots and not facts.asked:
            wanted = State.PLACING
        elif facts.asked and facts.answers and not facts.saved:
            wanted = State.CHECKPOINTING
        elif facts.asked:
            wanted = State.STOPPING
        elif word in ("SUSPENDED", "STOPPED"):
            wanted = State.SUSPENDED
        else:
            wanted = State.RUNNING
        assert found is wanted, f"{word} priority={priority} {facts}"


@pytest.mark.parametrize("facts", FACTS)
def test_a_job_that_slurm_does_not_know_is_done_if_it_said_so_and_lost_if_not(facts):
    assert state(None, facts) is (State.DONE if facts.ended else State.LOST)


def test_an_unknown_state_is_no_reason_to_touch_the_job():
    assert {state(job("DREAMING"), facts) for facts in FACTS} == {State.LOST}


def test_the_table_of_transitions_is_whole():
    """From everywhere to the end, from the start to everywhere, and none without its cause."""

    def reached(start: State) -> set[State]:
        seen, edge = {start}, [start]
        while edge:
            here = edge.pop()
            for source, target in TRANSITIONS:
                if source is here and target not in seen:
                    seen.add(target)
                    edge.append(target)
        return seen

    assert reached(State.HELD) == set(State)
    assert all(State.DONE in reached(start) for start in State)
    assert all(source is not target and cause for (source, target), cause in TRANSITIONS.items())


def test_gpus_are_never_left_without_stopping_or_ending():
    """From a state that holds GPUs to one that holds none the way leads through STOPPING, DONE or LOST."""
    holds = {State.RUNNING, State.CHECKPOINTING, State.SUSPENDED}
    free = {State.HELD, State.PLACING}
    assert not [pair for pair in TRANSITIONS if pair[0] in holds and pair[1] in free]


def test_the_picture_shows_every_state_and_every_transition():
    picture = (Path(__file__).parents[2] / "docs" / "images" / "states.svg").read_text()
    assert set(re.findall(r'<g id="state-(\w+)"', picture)) == {each.value for each in State}
    drawn = set(re.findall(r'<path id="(\w+)-(\w+)"', picture))
    assert drawn == {(source.value, target.value) for source, target in TRANSITIONS}
