"""Random operations on jobs that share, on a real Slurm with the real agent. No job is lost, and none runs outside its time
slice."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import Pack, SharedGpus
from tests.slurm_plugin.sharing.rig import NODE, Rig

pytestmark = pytest.mark.slurm

GPUS = 4
MOST_JOBS = 6
LATE_S = 30.0
"""How long a pack may continue to run after another plan has replaced its plan."""
START_S = 10.0
"""How long one job more may run than its group has GPUs: a job that has just started runs until the agent suspends it."""


def on_gpus(conf: Path, jobs: Collection[str]) -> set[tuple[int, str]]:
    """(GPU, job) for jobs whose processes see a GPU and are not stopped, by the kernel, at one moment.

    It reads the processes twice, since reading takes a while: a process stopped in between did not run together with one
    resumed later.
    """
    return _on_gpus(conf, jobs) & _on_gpus(conf, jobs)


def _on_gpus(conf: Path, jobs: Collection[str]) -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            pairs = (process / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        said = dict(pair.partition("=")[::2] for pair in pairs)
        job = said.get("SLURM_JOB_ID", "")
        if state not in "TtZX" and said.get("SLURM_CONF") == str(conf) and job in jobs:
            devices = said.get("CUDA_VISIBLE_DEVICES", "").split(",")
            found |= {(int(device), job) for device in devices if device.isdigit()}
    return found


class Storm:
    """Draws operations, carries them out, and checks the jobs after each."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.random = rig, random.Random(seed)
        self.jobs: list[str] = []
        self.strangers: list[str] = []
        self.all: set[str] = set()
        """Managed and plain jobs, including ended ones."""
        self.ran: set[str] = set()
        """Jobs that were seen on a GPU."""
        self.packs: list[tuple[float, list[frozenset[str]]]] = []
        """(end time, packs) of each plan."""
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
            self.check()

    def submit(self) -> None:
        if len(self.jobs) < MOST_JOBS:
            self.jobs.append(self.rig.submit())
            self.all.add(self.jobs[-1])
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
            self.all.add(self.strangers[-1])
        self.done.append("stranger")

    def restart(self) -> None:
        self.rig.begin()
        self.done.append("restart")

    def agent_dies(self) -> None:
        self.rig.slurm.kill_agent(NODE)
        self.rig.slurm.start_agent(NODE)
        self.done.append("agent dies")

    def controller_dies(self) -> None:
        time.sleep(6)  # Slurm itself loses changes after its last save
        self.rig.slurm.kill_slurmctld()
        self.rig.slurm.start_slurmctld()
        self.crashed = True
        self.done.append("controller dies")

    def repair_nodes(self) -> None:
        """Repair as an admin does after a crash: a controller that died within 5 s of starting a job starts it again, the node
        refuses, and the controller drains the node."""
        for node in self.rig.commands.nodes():
            if "DRAIN" in node.state:
                assert node.reason.startswith("Duplicate jobid"), node.reason
                self.rig.slurm.command("scontrol", "update", f"NodeName={node.name}", "State=RESUME")
                self.done.append("node resumed")

    def count_anew(self) -> None:
        """Repair as an admin does when a killed controller counts GPUs as used that no job has."""
        if self.done[-1] != "counted again":
            print(self.rig.slurm.command("scontrol", "show", "nodes", "-d").stdout, flush=True)
            print(self.rig.slurm.command("squeue", "-a", "-o", "%i %j %T %r %b").stdout, flush=True)
            self.rig.slurm.command("scontrol", "reconfigure")
            self.done.append("counted again")

    def plan(self) -> None:
        """A random plan: some jobs share GPUs, some of them packed; others have their own GPUs, or wait."""
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
        self.wants(wanted, *groups)
        self.done.append(f"plan {wanted} {[group.packs for group in groups]}")

    def check(self) -> None:
        """Check that no job is lost, and that the jobs that run on each GPU belong to one pack of the plan or of a recent plan.

        /proc says which jobs run where, not Slurm or the agent.
        """
        if self.crashed:
            self.repair_nodes()
        found = self.rig.jobs()
        lost = [job for job in self.jobs if job not in found]
        assert not lost, f"lost {lost}; {self.done[-12:]}"
        users: dict[int, set[str]] = {}
        for gpu, job in self.running(self.all):
            users.setdefault(gpu, set()).add(job)
            self.ran.add(job)
        now_s = time.monotonic()
        packs = [pack for until_s, packs in self.packs if now_s < until_s for pack in packs]
        for gpu, jobs in users.items():
            assert len(jobs) == 1 or any(jobs <= pack for pack in packs), f"GPU {gpu}: {jobs}; {self.done[-12:]}"

    def running(self, jobs: Collection[str]) -> set[tuple[int, str]]:
        return on_gpus(self.rig.slurm.slurm_conf, jobs)

    def wants(self, wanted: dict[str, int], *groups: SharedGpus) -> None:
        """Set the plan. The packs of the previous plan end soon."""
        soon_s = time.monotonic() + LATE_S
        before = [(min(until_s, soon_s), packs) for until_s, packs in self.packs]
        self.packs = [*before, (math.inf, [frozenset(pack.jobs) for group in groups for pack in group.packs])]
        self.rig.wants(wanted, *groups)

    def settle(self) -> None:
        """Give each job its part: all run or wait for their time slice, and each has had one."""
        while len(self.jobs) < 2:
            self.submit()
        for stranger in self.strangers:
            self.rig.slurm.command("scancel", stranger)
        group = SharedGpus(NODE, 2, tuple(Pack((job,)) for job in self.jobs), slice_s=1.5)
        self.wants(dict.fromkeys(self.jobs, 1), group)
        settled = False
        enough_s = time.monotonic()
        lost_s = time.monotonic() + 60.0

        def all_there() -> bool:
            self.rig.tick()
            self.check()
            there = {self.rig.state(job) for job in self.jobs} <= {"RUNNING", "SUSPENDED"}
            if self.crashed and not there and time.monotonic() > lost_s:
                self.count_anew()
            return there

        wait_for(all_there, 300, "all jobs to run or to be suspended", details=lambda: self.done[-12:])
        self.ran.clear()

        def all_have_run() -> bool:
            self.rig.tick()
            self.check()
            nonlocal settled, enough_s
            settled = settled or self.settled(group)
            on = self.running(self.jobs)
            if not settled or len(on) <= group.gpus:
                enough_s = time.monotonic()
            assert time.monotonic() < enough_s + START_S, on
            return settled and self.ran >= set(self.jobs)

        wait_for(all_have_run, 300, "a time slice of each job", details=lambda: (settled, self.ran, self.rig.status()))
        self.rig.slurm.command("scancel", "--name=wrap")  # a crash of Slurm may have undone an earlier scancel
        self.rig.wants({})

        def nothing_left() -> bool:
            self.rig.tick()
            return not self.rig.jobs()

        wait_for(
            nothing_left,
            300,
            "the GPU reservation to go",
            details=lambda: self.rig.slurm.command("squeue", "-a").stdout,
        )

    def settled(self, group: SharedGpus) -> bool:
        """Whether the agent carries out this group, and every job that runs by /proc also runs by the agent's status."""
        status = self.rig.status()
        if status is None or [each.shared for each in status.groups] != [group]:
            return False
        running = {(device, each.job) for each in status.jobs if each.state == "running" for device in each.devices}
        return len(running) <= group.gpus and self.running(self.jobs) <= running


@pytest.mark.parametrize(
    ("count", "seed"), [(30, 1), *(pytest.param(1000, seed, marks=pytest.mark.long) for seed in (2,))]
)
def test_random_operations_lose_no_job(make_loopback, tmp_path: Path, count: int, seed: int) -> None:
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("the SPANK plugin cannot be built here (Debian: make gcc libslurm-dev)")
    slurm = make_loopback("t4:1x4", agents=True)
    with slurm.settings_file.open("a") as file:  # its last section is [agent]
        file.write("start_wait_s = 0\n")  # these jobs make no steps, so time slices must begin at once
    slurm.kill_agent(NODE)
    slurm.start_agent(NODE)
    rig = Rig(slurm, tmp_path)
    wait_for(rig.status, 120, "the agent to answer")
    storm = Storm(rig, seed)
    for number in range(1, count + 1):
        storm.step(crashes=count > 100)
        if number % 50 == 0 or number == count:
            done = Counter(each.split()[0] for each in storm.done)
            print(f"{number} of {count} operations: {dict(done)}", flush=True)
    storm.settle()
