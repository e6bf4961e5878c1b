"""A real Slurm with one node, a plan made by the test, and the part of the daemon between the two."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from penstock_loopback import LoopbackCluster, wait_for
from penstock_profiles.files import write_whole
from penstock_scheduler.api.agent_messages import (
    CarriedGroup,
    CarriedJob,
    NodeOrder,
    NodeStatus,
    order_file,
    status_file,
)
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.model import (
    Assignment,
    ClusterState,
    JobUse,
    Pack,
    Phase,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Share,
    SharedGpus,
    Stop,
    StopCode,
)
from penstock_scheduler.rounds.diff import actions
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway, SlurmJob, abilities
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.share.agents import SlurmAgents
from penstock_slurm.share.gpu_reservation import NAME, GpuReservations

NODE = "t4-00"
CHOSEN = Reason(ReasonCode.CHOSEN, "by the test")
STOP = Stop(StopCode.ASKED, "by the test")


class Rig:
    """See the module. The node's agent is a stand-in, unless the cluster has real ones."""

    def __init__(self, slurm: LoopbackCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.spool_folder = slurm.spool if slurm.agents else folder / "spool"
        self.commands = CliGateway(conf=slurm.slurm_conf, timeout_s=20)
        self.plan = Plan(1)
        self.bound: dict[str, tuple[int, ...]] = {}
        self.answers = True
        """Whether the agent answers. Jobs that start while it does not get their GPUs from Slurm."""
        self.frozen_s: dict[str, float] = {}
        """Jobs that the agent keeps frozen, and for how long by now."""
        self.begin()

    def begin(self) -> None:
        """A daemon that has just started: it knows only what is in Slurm and in the spool."""
        self.spool = Spool(self.spool_folder)
        settings = SlurmSettings(
            partitions=("all",),
            conf=self.slurm.slurm_conf,
            spool_dir=self.spool.folder,
            checkpoint_wait_s=1,
            agents=True,
        )
        clock = WallClock()
        stand_in = not abilities.release(self.commands.version()).empty_tres_clears_gpus
        self.agents = SlurmAgents(GpuReservations(self.commands), self.spool.folder, clock, stand_in=stand_in)
        self.cluster = SlurmCluster(
            self.commands, self.commands, self.spool, clock, settings, lambda spec: None, sharing=self.agents
        )

    def submit(self, *flags: str, gpus: int = 1, script: str = "exec sleep 1000") -> str:
        spec = f"--comment={json.dumps({'penstock': {'max_gpus': 4}})}"
        held = ("sbatch", "--parsable", "--hold", "--requeue", f"--gres=gpu:{gpus}", spec, "--output=/dev/null", *flags)
        says = (
            f"echo $CUDA_MPS_PIPE_DIRECTORY >>{self.folder}/mps-$SLURM_JOB_ID; "
            f"echo $SLURM_GPUS_ON_NODE: $CUDA_VISIBLE_DEVICES >>{self.folder}/seen-$SLURM_JOB_ID"
        )
        return self.slurm.command(*held, f"--wrap={says}; {script}").stdout.strip()

    def sees(self, job: str) -> str | None:
        """CUDA_VISIBLE_DEVICES in the job's newest run; None: the script has not written its first line yet."""
        seen = self.folder / f"seen-{job}"
        lines = seen.read_text().splitlines() if seen.exists() else []  # the shell makes the file, then fills it
        if not lines:
            return None
        count, _, devices = lines[-1].partition(": ")
        assert int(count) == len(devices.split(",")), "scripts start SLURM_GPUS_ON_NODE processes"
        return devices

    def mps(self, job: str) -> str:
        """CUDA_MPS_PIPE_DIRECTORY in the job's newest run, once `sees` returns its devices."""
        return (self.folder / f"mps-{job}").read_text().splitlines()[-1]

    def plain(self, gpus: int) -> str:
        """A plain job."""
        flags = (f"--gres=gpu:{gpus}", f"--nodelist={NODE}", "--output=/dev/null", "--wrap=exec sleep 1000")
        return self.slurm.command("sbatch", "--parsable", *flags).stdout.strip()

    def wants(self, gpus: dict[str, int], *groups: SharedGpus) -> None:
        """Set the plan: these groups, and these jobs with this many GPUs. It may stop every job: without a reason, none stops."""
        assignments = {
            job: Assignment(Placement("t4", "all", (Share(NODE, count),)), CHOSEN, 1.0) for job, count in gpus.items()
        }
        known = {job.id for job in self.cluster.observe().jobs}
        waiting = dict.fromkeys(known - assignments.keys(), CHOSEN)
        stops = dict.fromkeys(known | assignments.keys(), STOP)
        self.plan = Plan(self.plan.round + 1, assignments, waiting, shared=groups, stops=stops)

    def tick(self) -> ClusterState:
        self.agent()
        state = self.cluster.observe()
        wanted = actions(self.plan, state.jobs)
        self.agents.share(self.plan.shared, wanted)
        self.cluster.apply(wanted)
        self.cluster.reports()
        self.leaving = {job.id for job in state.jobs if job.id not in self.plan.assignments} | {
            job.id for job in state.jobs if job.phase is Phase.STOPPING
        }
        self.check()
        return state

    def check(self) -> None:
        """Only placeholder jobs and co-located jobs hold GPUs to which a job is bound."""
        jobs = {job.id: job for job in self.commands.jobs() if job.state in ("RUNNING", "SUSPENDED")}
        group_of = {job: group for group in self.plan.shared for job in group.jobs}
        for job_id, job in jobs.items():
            if not job.gpus_per_node or job.name == NAME:
                continue
            theirs = set(self.commands.gpu_indexes(job_id, job.nodes[0]))
            for other, devices in self.bound.items():
                shared = other == job_id or (other in group_of and group_of.get(job_id) == group_of[other])
                if other in jobs and jobs[other].gpus_per_node is None and not shared and job_id not in self.leaving:
                    assert theirs.isdisjoint(devices), f"job {other} uses {devices}, and {theirs} are {job_id}'s"

    def status(self) -> NodeStatus | None:
        """The agent's last status."""
        try:
            return NodeStatus.model_validate_json(status_file(self.spool.folder, NODE).read_bytes())
        except FileNotFoundError:
            return None

    def agent(self) -> None:
        """Bind running jobs to devices of their group, the least used first, and report it; or read a real agent's status."""
        if self.slurm.agents:
            status = self.status()
            self.bound = {each.job: each.devices for each in status.jobs} if status is not None else {}
            return
        try:
            order = NodeOrder.model_validate_json(order_file(self.spool.folder, NODE).read_bytes())
        except FileNotFoundError:
            order = NodeOrder(node=NODE, number=0, written_s=0)
        there = {job.job for job in order.jobs if job.running}
        self.bound = {job: devices for job, devices in self.bound.items() if job in there}
        for path in (self.folder / "run" / NODE).glob("*"):
            if path.name not in {str(job.slurm_job) for job in order.jobs}:
                shutil.rmtree(path)
        told = []
        for job in order.jobs:
            group = next((each for each in order.groups if job.job in each.shared.jobs), None)
            if job.own_devices:
                self.bound[job.job] = job.own_devices
            elif job.running and group is not None and job.job not in self.bound:
                taken = [device for devices in self.bound.values() for device in devices]
                self.bound[job.job] = tuple(
                    sorted(group.devices, key=lambda device: (taken.count(device), device))[: job.gpus]
                )
            devices = self.bound.get(job.job, ())
            folder = self.folder / "run" / NODE / str(job.slurm_job)
            folder.mkdir(parents=True, exist_ok=True)
            if not job.running:
                (folder / "devices").unlink(missing_ok=True)  # left by the previous run
            elif devices and not job.own_devices:
                write_whole(folder / "devices", ",".join(map(str, devices)) + "\n")
            carried = CarriedJob(
                job=job.job, state="running" if devices else "waiting", devices=devices, use=JobUse("k")
            )
            if (frozen_s := self.frozen_s.get(job.job)) is not None:
                carried = carried.model_copy(update={"driven": True, "frozen": True, "frozen_s": frozen_s})
            told.append(carried)
        groups = tuple(CarriedGroup(shared=each.shared) for each in order.groups)
        status = NodeStatus(
            node=NODE,
            order=order.number,
            time_s=time.time() - (0 if self.answers else 100),
            history="h",
            groups=groups,
            jobs=tuple(told),
        )
        path = status_file(self.spool.folder, NODE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(status.model_dump_json())

    def until(self, done: Callable[[], object], what: str) -> None:
        def once() -> bool:
            self.tick()
            return bool(done())

        wait_for(once, 180, what, poll_s=0.1, details=lambda: self.slurm.command("squeue", "-a").stdout)

    def jobs(self) -> dict[str, SlurmJob]:
        return {job.id: job for job in self.commands.jobs()}

    def state(self, job: str) -> str:
        found = self.jobs().get(job)
        return found.state if found is not None else "gone"

    def placeholders(self, *states: str) -> list[SlurmJob]:
        return [job for job in self.jobs().values() if job.name == NAME and (not states or job.state in states)]


def packs(*jobs: str) -> tuple[Pack, ...]:
    return tuple(Pack((job,)) for job in jobs)
