"""A node for tests of its agent: real processes as jobs, and a stand-in for Slurm that suspends them by the same signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock_profiles.node_channel import JobControl, JobStatus, control_path
from penstock_profiles.nvml import Sample
from penstock_scheduler.api.agent_messages import (
    Lack,
    NodeOrder,
    NodeStatus,
    OrderedGroup,
    OrderedJob,
    order_file,
    status_file,
)
from penstock_scheduler.model import JobId, Pack, SharedGpus
from penstock_slurm.agent.agent import Agent
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.gpu_time import GpuTimes
from penstock_slurm.agent.processes import Processes
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.gateway import JobGone, Refused
from tests.constants import with_constants

STEPPING = Path(__file__).parents[2] / "executor" / "stepping.py"
PATIENCE_S = 180.0
TICK_S = 0.05


class Signals:
    """Stand-in for Slurm: SIGTSTP and shortly afterwards SIGSTOP; SIGCONT; SIGKILL."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.calls: list[tuple[str, int]] = []
        self.freeze_after_s, self.resume_after_s = 0.2, 0.0
        self._stops: dict[int, threading.Timer] = {}
        self._starts: dict[int, threading.Timer] = {}

    def suspend(self, job_id: str) -> None:
        process = self._process("suspend", job_id)
        process.send_signal(signal.SIGTSTP)
        self._stops[int(job_id)] = stop = threading.Timer(self.freeze_after_s, process.send_signal, [signal.SIGSTOP])
        stop.start()

    def resume(self, job_id: str) -> None:
        process = self._process("resume", job_id)
        if int(job_id) in self._stops:
            self._stops[int(job_id)].join()  # a pending SIGSTOP must not arrive after it
        if self.letter(int(job_id)) != "T":
            raise Refused("Requested operation is presently disabled", command="scontrol resume", job_id=job_id)
        self._starts[int(job_id)] = start = threading.Timer(self.resume_after_s, process.send_signal, [signal.SIGCONT])
        start.start()

    def cancel(self, job_id: str) -> None:
        process = self._process("cancel", job_id)
        process.kill()
        process.wait()

    def letter(self, number: int) -> str:
        """The kernel's letter for the state of the job's process."""
        return Path(f"/proc/{self.processes[number].pid}/stat").read_text().rpartition(")")[2].split()[0]

    def close(self) -> None:
        for timer in (*self._stops.values(), *self._starts.values()):
            timer.cancel()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _process(self, call: str, job_id: str) -> subprocess.Popen[bytes]:
        self.calls.append((call, int(job_id)))
        process = self.processes.get(int(job_id))
        if process is None or process.poll() is not None:
            raise JobGone("Invalid job id specified", command=f"scontrol {call}", job_id=job_id)
        return process


class Node:
    """One node with its agent, which works only during `run`."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.name = f"n{os.getpid()}"
        self.spool, self.run_dir = folder / "spool", folder / "run"
        self.settings = with_constants(AgentSettings, {"poll_s": TICK_S, "sample_s": 0.2, "freeze_s": 0.4, **settings})
        self.slurm = Signals()
        self.sample: Callable[[], Sample] | None = None
        self.device_cgroups: DeviceCgroups | None = None
        self.plugin: Callable[[], tuple[Lack, str] | None] = lambda: None
        self.links: tuple[tuple[int, ...], ...] = ()
        self.gpu_times: GpuTimes | None = None
        self.driver: str | None = None
        self.freezer: Freezer | None = None
        self.no_nvml: Callable[[], str] = lambda: ""
        self.number = 0
        self.spool.mkdir()
        self.agent = self.start()

    def start(self) -> Agent:
        """A new agent, as after a restart."""
        self.agent = Agent(
            self.name,
            self.spool,
            self.settings,
            self.run_dir.with_name("state"),
            self.slurm,
            Channels(self.run_dir),
            Processes(self.name),
            host_memory_mb=64_000,
            sample=self.sample,
            plugin=self.plugin,
            device_cgroups=self.device_cgroups,
            links=self.links,
            gpu_times=self.gpu_times,
            driver=self.driver,
            freezer=self.freezer,
            no_nvml=self.no_nvml,
        )
        return self.agent

    def job(self, number: int, *options: str, cores: set[int] | None = None) -> subprocess.Popen[bytes]:
        """Start a job, as Slurm does."""
        environment = os.environ | {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": self.name}
        command = [sys.executable, str(STEPPING), str(self.run_dir), str(number), *options]
        process = subprocess.Popen(command, env=environment)
        if cores:
            os.sched_setaffinity(process.pid, cores)
        self.slurm.processes[number] = process
        return process

    def order(
        self,
        packs: Sequence[Pack],
        devices: Sequence[int],
        slice_s: float = 1.0,
        *,
        running: Sequence[int] | None = None,
        more: Sequence[OrderedJob] = (),
        fields: Mapping[int, dict[str, object]] | None = None,
    ) -> SharedGpus:
        """The daemon's order: these packs on these GPUs. A job's id is `j` and its number in Slurm. `fields` overrides fields
        of some jobs."""
        shared = SharedGpus(self.name, len(devices), tuple(packs), slice_s)
        numbers = [int(job[1:]) for job in shared.jobs]
        self.number += 1
        order = NodeOrder(
            node=self.name,
            number=self.number,
            written_s=time.time(),
            groups=(OrderedGroup(shared=shared, devices=tuple(devices), gpu_type="v100"),) if packs else (),
            jobs=(
                *(
                    OrderedJob(
                        job=JobId(f"j{number}"),
                        slurm_job=number,
                        uid=os.getuid(),
                        gpus=1,
                        running=number in running if running is not None else True,
                    ).model_copy(update=(fields or {}).get(number))
                    for number in numbers
                ),
                *more,
            ),
        )
        path = order_file(self.spool, self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(order.model_dump_json())
        path.with_suffix(".tmp").rename(path)
        return shared

    def run(self, seconds: float, check: Callable[[], None] | None = None) -> None:
        """Let the agent work for this long, and call `check` after each tick."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.agent.tick(time.time())
            if check is not None:
                check()
            time.sleep(TICK_S)

    def until(self, what: Callable[[], object], text: str) -> None:
        """Let the agent work until the condition is true."""
        end_s = time.monotonic() + PATIENCE_S
        self.agent.tick(time.time())
        while not what():
            assert time.monotonic() < end_s, (
                f"no {text} within {PATIENCE_S:g} s: {self.agent.status().model_dump_json()}"
            )
            time.sleep(TICK_S)
            self.agent.tick(time.time())

    def states(self) -> dict[str, str]:
        return {each.job: each.state for each in self.agent.status().jobs}

    def devices(self) -> dict[str, tuple[int, ...]]:
        return {each.job: each.devices for each in self.agent.status().jobs}

    def said(self, number: int) -> JobStatus | None:
        return Channels(self.run_dir).statuses(number, os.getuid()).get(0)

    def told(self) -> NodeStatus:
        """The status, as the daemon reads it."""
        return NodeStatus.model_validate_json(status_file(self.spool, self.name).read_bytes())

    def close(self) -> None:
        self.slurm.close()


def alone(*numbers: int) -> list[Pack]:
    return [Pack((JobId(f"j{number}"),)) for number in numbers]


def steps(node: Node, number: int) -> int:
    said = node.said(number)
    return said.steps if said is not None else 0


def control(node: Node, number: int) -> JobControl:
    return JobControl.model_validate_json(control_path(node.run_dir, number).read_bytes())


def at_once(node: Node) -> list[str]:
    """Jobs that may use the same GPU as another job."""
    users: dict[int, list[str]] = {}
    for each in node.agent.status().jobs:
        for device in each.devices if each.state in ("running", "suspending") else ():
            users.setdefault(device, []).append(each.job)
    return [job for jobs in users.values() if len(jobs) > 1 for job in jobs]
