"""What the states of nodes and partitions mean: each word of Slurm's, alone and beside others."""

from __future__ import annotations

import itertools

import pytest

from penstock_slurm.abilities import RELEASES
from penstock_slurm.node_states import NODE_STATES, PARTITION_STATES, node_facts, partition_facts

OPEN = {
    *("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "RESERVED", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"),
    *("RESUME", "UNDRAIN", "CANCEL_REBOOT"),
}
"""Words with which a node takes new work."""

# From the libraries of Slurm 22.05.8, 24.11.5 and 26.05: what `scontrol show node` prints for base states and flags.
PRINTED = {
    *("ALLOCATED", "BLOCKED", "CANCEL_REBOOT", "CLOUD", "COMPLETING", "DOWN", "DRAIN", "DRAINED", "DRAINING"),
    *(
        "DYNAMIC_FUTURE",
        "DYNAMIC_NORM",
        "EXTERNAL",
        "FAIL",
        "FAILING",
        "FUTURE",
        "IDLE",
        "INVAL",
        "INVALID_REG",
        "MAINT",
    ),
    *("MIXED", "NOT_RESPONDING", "NPC", "PERFCTRS", "PLANNED", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"),
    *(
        "POWER_DOWN",
        "POWER_UP",
        "REBOOT",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
        "RESERVED",
        "RESUME",
        "UNDRAIN",
        "UNKNOWN",
    ),
}


def test_every_word_of_slurm_is_in_the_table():
    assert NODE_STATES.keys() >= PRINTED
    assert NODE_STATES.keys() >= RELEASES[-1].node_states


@pytest.mark.parametrize("word", sorted(NODE_STATES))
def test_a_word_alone_means_what_the_issue_wants(word):
    """Only an admin's drain asks jobs to leave."""
    facts = node_facts({word})
    assert facts.may_start == (word in OPEN)
    assert facts.leave == (word in {"DRAIN", "DRAINED", "DRAINING"})
    assert bool(facts.why) != facts.may_start


@pytest.mark.parametrize("pair", list(itertools.combinations(sorted(NODE_STATES), 2)))
def test_two_words_open_a_node_only_if_both_do(pair):
    assert node_facts(pair).may_start == OPEN.issuperset(pair)


@pytest.mark.parametrize(
    ("state", "leave", "silent"),
    [
        ("MIXED+UNKNOWN", False, True),
        ("ALLOCATED+NOT_RESPONDING", False, True),
        ("MIXED+NOT_RESPONDING+POWERING_UP", False, False),
        ("DOWN+NOT_RESPONDING", False, True),
        ("IDLE+DRAIN", True, False),
        ("DOWN+DRAIN", True, True),
        ("MIXED+DRAIN+INVALID_REG", False, False),
        ("ALLOCATED+DRAIN+REBOOT_REQUESTED", True, False),
        ("MIXED+REBOOT_REQUESTED", False, False),
        ("MIXED+MAINT", False, False),
        ("MIXED+FAIL", False, False),
    ],
)
def test_states_that_slurm_shows_together(state, leave, silent):
    """INVALID_REG: the node registered with fewer GPUs, and Slurm drains it by itself; its jobs stay."""
    facts = node_facts(state.split("+"))
    assert not facts.may_start
    assert (facts.leave, facts.silent) == (leave, silent)


def test_a_word_that_nobody_has_heard_of_closes_this_node_and_says_so():
    facts = node_facts({"MIXED", "WOBBLY"})
    assert not facts.may_start
    assert not facts.leave
    assert facts.unknown == ("WOBBLY",)
    assert "does not know the state WOBBLY" in facts.why


@pytest.mark.parametrize("word", sorted(PARTITION_STATES))
def test_a_partition_is_open_or_says_why_not(word):
    may_start, why = partition_facts(word)
    assert may_start == (word == "UP")
    assert bool(why) != may_start


def test_a_partition_in_a_state_that_nobody_has_heard_of_is_closed():
    may_start, why = partition_facts("SIDEWAYS")
    assert not may_start
    assert "does not know the state SIDEWAYS" in why
