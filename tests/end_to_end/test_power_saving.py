"""Nodes that Slurm's own power saving has powered down: Slurm wakes them for our jobs, and nothing of ours keeps them awake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from tests.end_to_end.power_saving import asleep, states, with_cloud_nodes, with_power_saving
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

TWO = "--comment=" + json.dumps({"penstock": {"min_gpus": 2, "max_gpus": 2}})
OURS = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null")


@pytest.mark.long
def test_a_powered_down_node_is_woken_by_slurm_and_sleeps_again(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Two jobs share one node, so the other one sleeps on. Slurm begins jobs up to 30 s after their node is ready."""
    slurm, power = with_power_saving(make_loopback, tmp_path, "t4:2x4")
    site = make_site(slurm)
    site.slurm_settings["start_patience_s"] = 5
    site.start()

    def told() -> str:
        return f"{states(slurm)}\n{power.log.read_text()}\n{site.tail()}"

    wait_for(lambda: asleep(slurm), 90, "Slurm powers the nodes down beside penstockd", details=told)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(
            lambda: {node.note for node in penstock.nodes()} == {"is powered down; Slurm wakes it in about 30 s"},
            30,
            "the nodes are shown as powered down",
            details=told,
        )
        assert power.resumed() == []
        first = site.sbatch(*OURS, TWO, "--wrap=sleep 15")
        wait_for(
            lambda: (
                [job.state for job in penstock.jobs() if job.id == first] == ["starting"]
                and site.states(first) == {first: "CONFIGURING"}
            ),
            60,
            "the job's node boots",
            details=told,
        )
        second = site.sbatch(*OURS, TWO, "--wrap=sleep 15")
        site.wait_states("CONFIGURING", second)
        site.wait_states("RUNNING", first, second)
        assert [site.job(job).restarts for job in (first, second)] == [0, 0]
        assert len(power.resumed()) == 1, told()
        awake = site.job(first).nodes
        assert site.job(second).nodes == awake
        other = next(name for name in states(slurm) if name not in awake)
        assert asleep(slurm, other)
        sleeping = next(node for node in penstock.nodes() if node.name == other)
        assert sleeping.may_start
        assert 3.0 <= sleeping.boot_s < 15.0, sleeping  # measured; before that, it was half of ResumeTimeout
    site.wait_states("COMPLETED", first, second)
    wait_for(lambda: asleep(slurm), 90, "Slurm powers the node down again", details=told)
    assert len(power.resumed()) == 1


@pytest.mark.long
def test_a_node_that_does_not_boot_costs_the_job_no_more_than_resume_timeout(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], tmp_path: Path
) -> None:
    slurm, power = with_power_saving(make_loopback, tmp_path, "t4:2x4", timeout_s=15)
    for name in states(slurm):
        (power.broken / name).touch()
    site = make_site(slurm)
    site.slurm_settings["start_patience_s"] = 5
    site.start()

    def told() -> str:
        return f"{states(slurm)}\n{power.log.read_text()}\n{site.tail()}"

    wait_for(lambda: asleep(slurm), 90, "Slurm powers the nodes down", details=told)
    job = site.sbatch(*OURS, TWO, "--wrap=sleep 5")
    (broken,) = wait_for(lambda: power.resumed(), 60, "Slurm wakes a node", details=told)
    (other,) = states(slurm).keys() - {broken}
    (power.broken / other).unlink()
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: "DOWN" in states(slurm)[broken].split("+"), 60, "Slurm gives the node up", details=told)
        site.wait_states("RUNNING", job)
        assert site.job(job).nodes == (other,)
        notes = {node.name: node.note for node in penstock.nodes()}
        assert "did not boot within 15 s (ResumeTimeout)" in notes[broken]
        assert not notes[other]


@pytest.mark.long
def test_cloud_nodes_are_woken_for_a_job_of_two_nodes_and_an_awake_type_of_equal_worth_comes_first(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], tmp_path: Path
) -> None:
    """As on AWS ParallelCluster: the nodes have never run. A job that is killed while they boot leaves nothing behind."""
    slurm, power = with_cloud_nodes(make_loopback, tmp_path)
    site = make_site(slurm)
    site.slurm_settings["start_patience_s"] = 5
    site.start()

    def told() -> str:
        return f"{states(slurm)}\n{power.log.read_text()}\n{site.tail()}"

    cloud = ("q1-dy-a100-1", "q1-dy-a100-2")
    assert {states(slurm)[name] for name in cloud} == {"IDLE+CLOUD+POWERED_DOWN"}, told()
    rates = {"t4": {"1": 1.0}, "a100": {"1": 1.01}}
    short = site.submit(4.0, rates=rates)
    site.wait_completed(short)
    assert site.job(short).nodes == ("t4-00",)
    assert power.resumed() == []
    four = "--comment=" + json.dumps({"penstock": {"min_gpus": 4, "max_gpus": 4}})
    first, second = (site.sbatch(*OURS, four, "--wrap=sleep 5") for _ in range(2))
    site.wait_states("CONFIGURING", first)
    site.slurm.command("scancel", first)
    site.wait_states("RUNNING", second)
    assert site.job(second).nodes == cloud
    site.wait_states("COMPLETED", second)
    wait_for(
        lambda: {states(slurm)[name] for name in cloud} == {"IDLE+CLOUD+POWERED_DOWN"}, 90, "they sleep", details=told
    )
    assert "t4-00" not in power.log.read_text()
