"""Faults of Slurm stop no running job: the same runs continue, with the same start times and restart counts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site, wait_saved

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]

JOBS = 12


class Runs:
    """Twelve preemptible jobs that run on t4:6x4 under the gate's defaults."""

    def __init__(self, site: Site) -> None:
        self.site = site
        site.safety = {}
        site.start()
        self.jobs = [site.submit(100_000, rates={"t4": RATES["t4"]}, min_gpus=1, max_gpus=2) for _ in range(JOBS)]
        site.wait_states("RUNNING", *self.jobs)
        wait_for(
            lambda: all((now := site.job(job)).state == "RUNNING" and now.gpus_per_node == 2 for job in self.jobs),
            120,
            "two GPUs each",
            details=site.tail,
        )
        self.before = self._runs()

    def _runs(self) -> dict[str, tuple[str, int, float | None]]:
        found = {job.id: job for job in self.site.gateway.jobs(finished=True) if job.id in self.jobs}
        return {job: (found[job].state, found[job].restarts, found[job].start_s) for job in self.jobs}

    def rounds(self, count: int) -> None:
        """Wait until so many more rounds have been decided."""
        number = self.site.wait_round()
        for _ in range(count):
            number = self.site.wait_round(after=number)

    def assert_same(self) -> None:
        """Every job is in the run in which it was."""
        assert self._runs() == self.before, self.site.tail()
        actions = [line.action for line in open_store(self.site.state).outcomes() if line.action.kind != "start"]
        stops = [action for action in actions if action.round > self.first_round]
        assert stops == [], self.site.tail()

    @property
    def first_round(self) -> int:
        """The last round in which the jobs grew to two GPUs."""
        lines = [line for line in open_store(self.site.state).outcomes() if line.time_s < self._settled_s]
        return max((line.action.round for line in lines), default=0)

    @property
    def _settled_s(self) -> float:
        return max(start_s or 0.0 for _, _, start_s in self.before.values()) + 5.0


@pytest.fixture
def runs(make_loopback: MakeLoopback, make_site: MakeSite) -> Runs:
    return Runs(make_site(make_loopback("t4:6x4")))


def restart(slurm: LoopbackCluster, site: Site, *, kill: bool = True) -> None:
    """End slurmctld, wait until penstockd has noticed, and start it again."""
    before = site.log.read_text().count("ClusterAway")
    if kill:
        wait_saved(slurm)
    (slurm.kill_slurmctld if kill else slurm.stop_slurmctld)()
    wait_for(lambda: site.log.read_text().count("ClusterAway") > before, 120, "a tick to notice", details=site.tail)
    slurm.start_slurmctld()


def test_slurmctld_killed_and_started_again(runs: Runs) -> None:
    """Twice: its nodes have to register again each time."""
    for _ in range(2):
        restart(runs.site.slurm, runs.site)
        runs.rounds(5)
    runs.assert_same()


@pytest.mark.long
def test_slurmctld_restarted_gracefully(runs: Runs) -> None:
    restart(runs.site.slurm, runs.site, kill=False)
    runs.rounds(5)
    runs.assert_same()


@pytest.mark.long
def test_all_partitions_down(runs: Runs) -> None:
    """A job that comes meanwhile waits and says why; it starts when the partition is up again."""
    slurm = runs.site.slurm
    slurm.command("scontrol", "update", "partitionname=all", "state=down")
    runs.site.slurm.command("scancel", runs.jobs[-1])
    late = runs.site.submit(5, rates={"t4": RATES["t4"]})
    runs.rounds(5)
    record = open_store(runs.site.state).last_round()
    assert record is not None
    assert "partition all is DOWN" in record.plan.waiting[late].text
    slurm.command("scontrol", "update", "partitionname=all", "state=up")
    runs.site.wait_completed(late)
    gone = runs.jobs.pop()
    del runs.before[gone]
    runs.assert_same()


@pytest.mark.long
def test_slurmctld_restarted_with_another_configuration(runs: Runs) -> None:
    """Two nodes have left the managed partition, and it is down at the start."""
    slurm = runs.site.slurm
    text = slurm.slurm_conf.read_text()
    slurm.stop_slurmctld()
    changed = re.sub(
        r"(?m)^PartitionName=all .*$",
        "PartitionName=all Nodes=t4-[02-05] Default=YES MaxTime=INFINITE State=DOWN",
        text,
    )
    assert changed != text
    slurm.slurm_conf.write_text(changed)
    slurm.start_slurmctld()
    runs.rounds(5)
    slurm.command("scontrol", "update", "partitionname=all", "state=up")
    runs.rounds(5)
    runs.assert_same()


@pytest.mark.long
def test_half_of_the_nodes_do_not_respond(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    """Their slurmds are killed; Slurm takes them for silent at first, and ends their jobs only after SlurmdTimeout."""
    runs = Runs(make_site(make_loopback("t4:6x4", slurmd_timeout_s=120)))
    slurm = runs.site.slurm
    for node in ("t4-00", "t4-01", "t4-02"):
        slurm.kill_slurmd(node)

    def silent() -> bool:
        return sum("NOT_RESPONDING" in node.state for node in runs.site.gateway.nodes()) == 3

    wait_for(silent, 120, "Slurm to miss three nodes", details=runs.site.tail)
    runs.rounds(5)
    runs.assert_same()
    for node in ("t4-00", "t4-01", "t4-02"):
        slurm.start_slurmd(node)
    wait_for(lambda: not silent(), 120, "the nodes to answer", details=runs.site.tail)
    runs.rounds(2)
    runs.assert_same()


def test_squeue_answers_with_half_of_the_jobs(
    make_loopback: MakeLoopback, make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other record is left out, round after round. Each round has all of the jobs, and none is taken for ended."""
    half, squeue = tmp_path / "half", tmp_path / "squeue"
    squeue.write_text(
        f'#!/bin/sh\n{shutil.which("squeue")} "$@" | awk "$([ -e {half} ] && echo \'NR % 2\' || echo 1)"\n'
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runs = Runs(make_site(make_loopback("t4:6x4")))
    half.touch()
    assert len(runs.site.gateway.jobs()) == JOBS / 2
    first = runs.site.wait_round() + 1
    runs.rounds(6)
    half.unlink()
    store = open_store(runs.site.state)
    seen = [{job.id for job in store.round(number).snapshot.jobs} for number in store.round_numbers() if number > first]
    assert seen
    assert all(each == {*runs.jobs} for each in seen)
    assert store.jobs(states=["ended"]) == []
    runs.rounds(2)
    runs.assert_same()


@pytest.mark.long
def test_the_accounting_database_is_away(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    """Also for a penstockd that starts meanwhile. A job that comes meanwhile runs.

    Slurm enforces limits, so penstockd asks slurmdbd for them in each round.
    """
    slurm = make_loopback("t4:6x4", accounting=True, settings={"AccountingStorageEnforce": "associations,limits,qos"})
    site = make_site(slurm)
    site.constants["slurm"] = {"rules_refresh_s": 0.1}
    runs = Runs(site)
    slurm.kill_slurmdbd()
    asked = "cannot read the site's rules"
    wait_for(lambda: asked in site.log.read_text(), 120, "penstockd to miss slurmdbd", details=site.tail)
    runs.rounds(5)
    slurm.command("scancel", runs.jobs[-1])
    site.wait_completed(site.submit(5, rates={"t4": RATES["t4"]}))
    site.kill()
    site.start()
    runs.rounds(5)
    del runs.before[runs.jobs.pop()]
    runs.assert_same()
