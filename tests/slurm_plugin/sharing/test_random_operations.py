"""Random operations on jobs that share, on a real Slurm with the real agent: no job is lost, nobody runs out of turn."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock_scheduler.model import Pack, SharedGpus
from penstock_slurm.loopback import wait_for
from penstock_slurm.loopback.cluster import AGENT_SETTINGS
from tests.slurm_plugin.sharing.rig import NODE, Rig

pytestmark = pytest.mark.slurm

GPUS = 4
MOST_JOBS = 6


class Storm:
    """Draws operations, does them, and looks after each."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.random = rig, random.Random(seed)
        self.jobs: list[str] = []
        self.strangers: list[str] = []
        self.done: list[str] = []
        self.crashed = False

    def step(self, *, crashes: bool) -> None:
        weights = {self.submit: 3, self.end: 1, self.plan: 6, self.restart: 1, self.stranger: 1, self.agent_dies: 1}
        if crashes:
            weights[self.controller_dies] = 0.1
        operation = self.random.choices(list(weights), list(weights.values()))[0]
        operation()
        for _ in range(self.random.randint(1, 2)):
            self.rig.tick()
            self.look()

    def submit(self) -> None:
        if len(self.jobs) < MOST_JOBS:
            self.jobs.append(self.rig.submit())
            self.done.append(f"submit {self.jobs[-1]}")

    def end(self) -> None:
        if self.jobs:
            job = self.jobs.pop(self.random.randrange(len(self.jobs)))
            self.rig.slurm.command("scancel", job)
            self.done.append(f"end {job}")

    def stranger(self) -> None:
        if self.strangers and self.random.random() < 0.5:
            self.rig.slurm.command("scancel", self.strangers.pop())
        elif len(self.strangers) < 2:
            self.strangers.append(self.rig.plain(1))
        self.done.append("stranger")

    def restart(self) -> None:
        self.rig.begin()
        self.done.append("restart")

    def agent_dies(self) -> None:
        self.rig.slurm.kill_agent(NODE)
        self.rig.slurm.start_agent(NODE)
        self.done.append("agent dies")

    def controller_dies(self) -> None:
        time.sleep(6)  # what is younger than its last save is lost, which is Slurm's own
        self.rig.slurm.kill_slurmctld()
        self.rig.slurm.start_slurmctld()
        self.crashed = True
        self.done.append("controller dies")

    def look_after_nodes(self) -> None:
        """As an admin does after a crash: a controller that died within 5 s of starting a job starts it anew, which its node
        refuses, and then drains that node."""
        for node in self.rig.commands.nodes():
            if "DRAIN" in node.state:
                assert node.reason.startswith("Duplicate jobid"), node.reason
                self.rig.slurm.command("scontrol", "update", f"NodeName={node.name}", "State=RESUME")
                self.done.append("node resumed")

    def plan(self) -> None:
        """Any jobs share some GPUs, some of them packed; others have theirs alone, or wait."""
        jobs = self.random.sample(self.jobs, len(self.jobs))
        free = GPUS
        groups: list[SharedGpus] = []
        wanted: dict[str, int] = {}
        while jobs and free:
            gpus = self.random.randint(1, free)
            several = jobs[: self.random.randint(1, 4)]
            jobs = jobs[len(several) :]
            packs: list[Pack] = []
            for job in several:
                if packs and self.random.random() < 0.3 and len(packs[-1].jobs) == 1:
                    packs[-1] = Pack((*packs[-1].jobs, job))
                else:
                    packs.append(Pack((job,)))
            wanted |= dict.fromkeys(several, 1)
            if len(several) > 1 or self.random.random() < 0.3:
                groups.append(SharedGpus(NODE, gpus, tuple(packs), slice_s=3.0))
                free -= gpus
            else:
                free -= 1
        self.rig.wants(wanted, *groups)
        self.done.append(f"plan {wanted} {[group.packs for group in groups]}")

    def look(self) -> None:
        """All jobs are there; and on each GPU those who run are of one pack, but for one that is being suspended."""
        if self.crashed:
            self.look_after_nodes()
        found = self.rig.jobs()
        lost = [job for job in self.jobs if job not in found]
        assert not lost, f"lost {lost}; {self.done[-12:]}"
        status = self.rig.status()
        assert status is not None
        pack_of = {job: pack.jobs for group in status.groups for pack in group.shared.packs for job in pack.jobs}
        users: dict[int, set[tuple[str, ...]]] = {}
        for each in status.jobs:
            if each.state == "running" and each.job in found and found[each.job].state == "RUNNING":
                for device in each.devices:
                    users.setdefault(device, set()).add(pack_of.get(each.job, (each.job,)))
        assert all(len(packs) == 1 for packs in users.values()), f"{users}; {self.done[-12:]}"

    def settle(self) -> None:
        """Give each job its part: all run, or wait for their turn."""
        while len(self.jobs) < 2:
            self.submit()
        for stranger in self.strangers:
            self.rig.slurm.command("scancel", stranger)
        group = SharedGpus(NODE, 2, tuple(Pack((job,)) for job in self.jobs), slice_s=3.0)
        self.rig.wants(dict.fromkeys(self.jobs, 1), group)

        def all_there() -> bool:
            self.rig.tick()
            self.look()
            return {self.rig.state(job) for job in self.jobs} <= {"RUNNING", "SUSPENDED"}

        wait_for(all_there, 300, "all jobs to run or to be suspended", details=lambda: self.done[-12:])
        self.rig.slurm.command("scancel", "--name=wrap")  # a crash of Slurm's may have undone an earlier scancel
        self.rig.wants({})

        def nothing_left() -> bool:
            self.rig.tick()
            return not self.rig.jobs()

        wait_for(nothing_left, 300, "the fence to go", details=lambda: self.rig.slurm.command("squeue", "-a").stdout)


@pytest.mark.parametrize(
    ("count", "seed"), [(50, 1), *(pytest.param(1000, seed, marks=pytest.mark.long) for seed in (2,))]
)
def test_random_operations_lose_no_job(make_loopback, tmp_path: Path, count: int, seed: int) -> None:
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    slurm = make_loopback("t4:1x4", agents=True)
    with (slurm.slurm_conf.parent / AGENT_SETTINGS).open("a") as file:  # its last section is [agent]
        file.write("start_wait_s = 0\n")  # these jobs make no steps: they are to take turns at once
    slurm.kill_agent(NODE)
    slurm.start_agent(NODE)
    rig = Rig(slurm, tmp_path)
    wait_for(rig.status, 120, "the agent to answer")
    storm = Storm(rig, seed)
    for number in range(1, count + 1):
        storm.step(crashes=count > 100)
        if number % 50 == 0:
            done = Counter(each.split()[0] for each in storm.done)
            print(f"{number} of {count} operations: {dict(done)}", flush=True)
    storm.settle()
