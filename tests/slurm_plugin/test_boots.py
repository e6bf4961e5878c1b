"""What Penstock learns of nodes that Slurm's power saving powers down and wakes: how long a boot takes, and which one failed."""

from __future__ import annotations

import pytest

from penstock_slurm.gateway import SlurmNode
from penstock_slurm.gateway.parse import parse_features
from penstock_slurm.observe.boots import Boots, failed, note

TYPES = {"a0": "a100", "a1": "a100", "t0": "t4"}


def node(name: str, state: str, reason: str = "") -> SlurmNode:
    return SlurmNode(name, {}, {}, frozenset(state.split("+")), ("all",), 1, 0, 0, 0, reason=reason)


def saw(boots: Boots, now_s: float, timeout_s: float | None = 600.0, **states: str) -> dict[str, float]:
    return boots.saw([node(name, state) for name, state in states.items()], TYPES, timeout_s, now_s)


def test_a_boot_counts_as_half_of_resume_timeout_until_one_of_the_type_was_seen():
    boots = Boots()
    assert saw(boots, 0.0, a0="IDLE+POWERED_DOWN", a1="IDLE+POWERED_DOWN", t0="IDLE") == {"a0": 300.0, "a1": 300.0}
    left = saw(boots, 10.0, a0="MIXED+NOT_RESPONDING+POWERING_UP", a1="IDLE+POWERED_DOWN", t0="IDLE+POWERED_DOWN")
    assert left == {"a0": 300.0, "a1": 300.0, "t0": 300.0}
    assert saw(boots, 95.0, a0="MIXED+POWERING_UP", a1="IDLE+POWERED_DOWN")["a0"] == 220.0, "in steps of 10 s"
    assert saw(boots, 100.0, a0="MIXED", a1="IDLE+POWERED_DOWN", t0="IDLE+POWERED_DOWN") == {"a1": 90.0, "t0": 300.0}


def test_the_median_of_the_newest_boots_of_a_type_counts():
    boots, now_s = Boots(), 0.0
    for took_s in (50.0, 400.0, 60.0):
        saw(boots, now_s, a0="IDLE+POWERED_DOWN")
        saw(boots, now_s + 1, a0="ALLOCATED+POWERING_UP")
        saw(boots, now_s + 1 + took_s, a0="ALLOCATED")
        now_s += 1000
    assert saw(boots, now_s, a1="IDLE+POWERED_DOWN") == {"a1": 60.0}


def test_a_boot_that_was_not_seen_from_its_beginning_teaches_nothing():
    boots = Boots()
    saw(boots, 0.0, a0="MIXED+POWERING_UP")
    saw(boots, 1.0, a0="MIXED")
    assert saw(boots, 2.0, a0="IDLE+POWERED_DOWN") == {"a0": 300.0}


def test_a_boot_that_takes_longer_than_usual_is_due_soon_and_never_awake():
    boots = Boots()
    saw(boots, 0.0, a0="IDLE+POWERED_DOWN")
    saw(boots, 1.0, a0="MIXED+POWERING_UP")
    assert saw(boots, 1000.0, a0="MIXED+POWERING_UP") == {"a0": 10.0}


def test_a_node_that_did_not_boot_is_woken_after_the_others_of_its_type():
    boots = Boots()
    saw(boots, 0.0, a0="IDLE+POWERED_DOWN")
    saw(boots, 1.0, a0="MIXED+POWERING_UP")
    assert saw(boots, 700.0, a0="DOWN+POWERED_DOWN+NOT_RESPONDING") == {}
    assert saw(boots, 800.0, a0="IDLE+POWERED_DOWN", a1="IDLE+POWERED_DOWN") == {"a0": 600.0, "a1": 300.0}
    saw(boots, 801.0, a0="MIXED+POWERING_UP")
    saw(boots, 831.0, a0="MIXED")
    assert saw(boots, 900.0, a0="IDLE+POWERED_DOWN") == {"a0": 30.0}, "it has booted since"


def test_where_slurm_wakes_no_nodes_none_is_offered():
    assert saw(Boots(), 0.0, None, a0="IDLE+POWERED_DOWN", a1="MIXED+POWERING_UP") == {}


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("IDLE", "", ""),
        ("IDLE+CLOUD+POWERED_DOWN", "", "is powered down; Slurm wakes it in about 2 min"),
        ("MIXED+NOT_RESPONDING+POWERING_UP", "", "boots, and is ready in about 2 min"),
        ("DOWN+POWERED_DOWN+NOT_RESPONDING", "ResumeTimeout reached", "did not boot within 10 min (ResumeTimeout)"),
        ("DOWN", "ResumeTimeout reached", "did not boot within"),
        ("DOWN", "Not responding", ""),
        ("IDLE+CLOUD+POWERED_DOWN+NOT_RESPONDING", "", "State=POWER_DOWN_FORCE"),
        ("IDLE+POWERING_DOWN", "", ""),
        ("IDLE+DRAIN+POWERED_DOWN", "a fan", ""),
    ],
)
def test_people_read_what_a_node_does(state: str, reason: str, text: str):
    said = note(node("n", state, reason), 90.0, 600.0)
    assert text in said
    assert bool(said) is bool(text)


def test_a_node_that_an_admin_took_down_did_not_fail_to_boot():
    assert not failed(node("n", "DOWN+DRAIN", "a fan"))
    assert "no ResumeProgram" in note(node("n", "IDLE+POWERED_DOWN"), 0.0, None)


CONFIG = "ClusterName = c\nAccountingStorageType = accounting_storage/none\nPriorityType = priority/basic\n"


@pytest.mark.parametrize(
    ("lines", "timeout_s"),
    [
        ("ResumeProgram = (null)\nResumeTimeout = 60 sec\n", None),
        ("", None),
        ("ResumeProgram = /opt/slurm/resume\nResumeTimeout = 1800 sec\n", 1800.0),
        ("ResumeProgram = /opt/slurm/resume\nResumeTimeout = soon\n", 60.0),
    ],
)
def test_resume_timeout_is_read_where_slurm_can_wake_nodes(lines: str, timeout_s: float | None):
    assert parse_features(CONFIG + lines).resume_timeout_s == timeout_s
