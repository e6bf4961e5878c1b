"""What the states of nodes and partitions mean: each word of Slurm's, alone and beside others."""

from __future__ import annotations

import itertools

import pytest

from penstock_slurm.gateway.abilities import RELEASES
from penstock_slurm.gateway.node_states import NODE_STATES, OWN_REASONS, PARTITION_STATES, node_facts, partition_facts

OPEN = {
    *("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "RESERVED", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"),
    *("RESUME", "UNDRAIN", "CANCEL_REBOOT", "POWERED_DOWN", "POWERING_UP", "POWER_UP"),
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
    words = set(pair)
    if words & {"POWERING_UP", "POWER_UP"}:
        words -= {"NOT_RESPONDING"}  # a node that boots does not respond yet
    assert node_facts(pair).may_start == OPEN.issuperset(words)


@pytest.mark.parametrize(
    ("state", "leave", "silent"),
    [
        ("MIXED+UNKNOWN", False, True),
        ("ALLOCATED+NOT_RESPONDING", False, True),
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


@pytest.mark.parametrize(
    ("state", "asleep", "boots", "open_"),
    [
        ("IDLE+POWERED_DOWN", True, False, True),
        ("IDLE+CLOUD+POWERED_DOWN", True, False, True),
        ("MIXED+POWERED_DOWN", True, False, True),  # a job has just got it, and ResumeProgram has not run yet
        ("IDLE+CLOUD+PLANNED+POWERED_DOWN", True, False, True),
        ("MIXED+NOT_RESPONDING+POWERING_UP", False, True, True),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", False, True, True),
        ("IDLE+POWERING_DOWN", False, False, False),
        ("MIXED+CLOUD+POWER_DOWN", False, False, False),
        ("IDLE+CLOUD+POWER_DOWN+POWERED_DOWN", False, False, False),
        ("DOWN+POWERED_DOWN+NOT_RESPONDING", False, False, False),  # it did not boot in time
        ("DOWN+CLOUD+POWERING_UP", False, True, False),
        ("IDLE+CLOUD+POWERED_DOWN+NOT_RESPONDING", False, False, False),  # plain Slurm starts nothing there either
        ("IDLE+DRAIN+POWERED_DOWN", False, False, False),
        ("IDLE+MAINT+POWERED_DOWN", False, False, False),
        ("MIXED+REBOOT_ISSUED+POWERING_UP", False, True, False),
    ],
)
def test_what_power_saving_shows(state, asleep, boots, open_):
    """As Slurm 22.05.8 printed on a cluster with power saving, and as users of AWS ParallelCluster report."""
    facts = node_facts(state.split("+"))
    assert (facts.asleep, facts.boots, facts.may_start) == (asleep, boots, open_)


# Each as Slurm 22.05 to 26.05 writes it.
BY_SLURM = (
    "batch job complete failure",
    "Bad core count",
    "CoreSpec differ",
    "Could not unpack gres data",
    "Duplicate jobid",
    "Epilog error",
    "Failed to parse dynamic_conf nodeline",
    "Failed to set topology 'default:s1'",
    "gres/gpu count reported lower than configured (3 < 4)",
    "Invalid GRES Links value (0,1) on node n01: i=2 >= link_len=2.",
    "Job env setup error",
    "Kill task failed",
    "Kill task failed (JobId=12 StepId=batch)",
    "Low CPUs",
    "Low RealMemory (reported:1000 < 100.00% of configured:2000)",
    "Low socket*core*thread count, Low CPUs",
    "Low TmpDisk",
    "Prolog error",
    "Prolog/Epilog failure",
    "Reported active features (a) are not a superset of currently active changeable features (b)",
    "RestrictedCoresPerGPU=2 but no gpus on node n01",
    "SlurmdSpoolDir is full",
    "switch_g_job_postfini failed",
)


@pytest.mark.parametrize("reason", BY_SLURM)
def test_a_drain_by_slurm_for_a_fault_asks_nobody_to_leave(reason):
    facts = node_facts({"MIXED", "DRAIN"}, reason)
    assert (facts.may_start, facts.leave) == (False, False)


@pytest.mark.parametrize("reason", ["a fan", "", "NHC: the prolog hangs", "Reboot ASAP", "Not responding", "low CPUs"])
def test_a_drain_by_an_admin_asks_the_jobs_to_leave(reason):
    assert node_facts({"MIXED", "DRAIN"}, reason).leave


def test_each_reason_of_slurm_has_been_seen():
    assert all(any(text.startswith(begin) for text in BY_SLURM) for begin in OWN_REASONS)


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
