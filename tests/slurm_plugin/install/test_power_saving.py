"""What `penstock slurm check` says of Slurm's power saving."""

from __future__ import annotations

from penstock_slurm.gateway import SlurmNode, SlurmPartition
from penstock_slurm.install.answers import Finding
from penstock_slurm.install.checks import judge_power_saving

SITE = {"SLURM_CONF": "/etc/slurm/slurm.conf", "PrivateData": "cloud"}
WAKES = SITE | {"ResumeProgram": "/opt/slurm/resume", "ResumeTimeout": "1800 sec"}
"""As on AWS ParallelCluster."""


def judged(config: dict[str, str], *hidden: str, **states: str) -> list[Finding]:
    nodes = [
        SlurmNode(name, {"t4": 4}, {}, frozenset(each.split("+")), ("q",), 1, 0, 0, 0) for name, each in states.items()
    ]
    partition = SlurmPartition("q", (*states, *hidden), up=True, default=True, max_time_s=None)
    return list(judge_power_saving(config, nodes, [partition]))


def test_a_site_without_power_saving_reads_nothing_of_it():
    assert judged(SITE | {"ResumeProgram": "(null)"}, a="IDLE") == []


def test_powered_down_nodes_are_counted_with_the_time_that_slurm_gives_them():
    (finding,) = judged(WAKES, a="IDLE+CLOUD+POWERED_DOWN", b="MIXED")
    assert not finding.remedy
    assert finding.what.startswith(
        "1 of 2 nodes are powered down; Slurm wakes each for a job within 30 min (ResumeTimeout)"
    )


def test_each_node_that_cannot_be_woken_fails_with_its_remedy():
    _, broken, stuck = judged(
        WAKES,
        a="DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING",
        b="IDLE+CLOUD+POWERED_DOWN+NOT_RESPONDING",
        c="IDLE+CLOUD+POWERING_DOWN",
        d="IDLE+DRAIN",
    )
    assert broken.what.startswith("node a did not boot within 30 min")
    assert broken.remedy == "find out why, then: scontrol update NodeName=a State=RESUME"
    assert stuck.what.startswith("node b is powered down, and Slurm does not wake it")
    assert "State=POWER_DOWN_FORCE" in stuck.remedy


def test_a_powered_down_node_without_a_resume_program_fails():
    (finding,) = judged(SITE, a="IDLE+POWERED_DOWN")
    assert "(a)" in finding.what
    assert finding.remedy.startswith("set ResumeProgram in /etc/slurm/slurm.conf")


def test_nodes_that_slurm_hides_fail_unless_it_shows_cloud_nodes():
    _, finding = judged(WAKES | {"PrivateData": "none"}, "c1", "c2", a="IDLE")
    assert "c1, c2" in finding.what
    assert "PrivateData=cloud" in finding.remedy
    assert len(judged(WAKES, "c1", a="IDLE")) == 1
