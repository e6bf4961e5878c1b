"""The agent of a node, which lets jobs share its GPUs: it binds, suspends, resumes, limits, measures and contains them.

A job goes through these states::

    waiting ──bind──> running ──ask──> suspending ──Slurm freezes──> suspended
                         ^                 │ its slice again              │ its slice, and its GPUs are free
                         └─────────────────┴──────────Slurm resumes───────┘

A job gets GPUs only after the jobs that had them have moved off or are frozen. A job that moves off says so, and is
then frozen. NVIDIA's driver moves the memory of others, if it can.

`sharing.node.Groups` decides which jobs run; the agent carries that out on a real node. All that decides is in the
saved state, which is written before Slurm is asked for anything, and every step may be repeated. So the agent may end
at any line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from penstock_profiles.files import write_whole
from penstock_profiles.node_channel import run_dir
from penstock_profiles.nvml import Sample
from penstock_scheduler import __version__
from penstock_scheduler.api.agent_messages import CarriedGroup, CarriedJob, Lack, NodeStatus, OrderedJob, status_file
from penstock_scheduler.model import JobUse
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.containment import Containment
from penstock_slurm.agent.cuda_checkpoints import CudaCheckpoints
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.duty_cycles import DutyCycles, frozen_for_s
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.gpu_access import GpuAccess
from penstock_slurm.agent.gpu_time import GpuTimes
from penstock_slurm.agent.guarantee import Guarantees, Slices
from penstock_slurm.agent.measuring import Measuring
from penstock_slurm.agent.node_state import NodeState, Slurm
from penstock_slurm.agent.node_view import AgentNodeView
from penstock_slurm.agent.observing import Observer
from penstock_slurm.agent.orders import Orders
from penstock_slurm.agent.processes import Processes
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.agent.transitions import Controls, Transitions
from penstock_slurm.share.topology import Links

DRIVE_S = 0.1
"""Pause between two ticks while the agent freezes and thaws a job to hold it to its share, or the driver moves one."""

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Agent:
    """The agent of one node. Call `tick` every `poll_s`.

    Args:
        node: Slurm's name of the node.
        spool: the folder shared with the daemon.
        settings: the agent's settings.
        state_folder: where the agent saves its state.
        slurm: suspends, resumes and cancels jobs.
        channels: the channels to the jobs.
        processes: the jobs' processes.
        host_memory_mb: the node's memory, MB.
        sample: takes a sample of the GPUs by NVML; None: no NVML.
        plugin: says what is wrong with the node's SPANK plugin, with a sentence; None: nothing.
        device_cgroups: the jobs' device cgroups; None: Slurm constrains no devices.
        links: how well each two GPUs are connected, by Slurm's indexes; empty: unknown.
        gpu_times: the GPU time of processes, which a job cannot falsify; None: unknown.
        driver: version of NVIDIA's driver; None: unknown.
        freezer: freezes processes; None: by this machine's cgroups and signals.
        no_nvml: why there is no NVML where there should be; "": nothing is amiss.
    """

    def __init__(
        self,
        node: str,
        spool: Path,
        settings: AgentSettings,
        state_folder: Path,
        slurm: Slurm,
        channels: Channels,
        processes: Processes,
        host_memory_mb: int,
        sample: Callable[[], Sample] | None = None,
        plugin: Callable[[], tuple[Lack, str] | None] = lambda: None,
        device_cgroups: DeviceCgroups | None = None,
        links: Links = (),
        gpu_times: GpuTimes | None = None,
        driver: str | None = None,
        freezer: Freezer | None = None,
        no_nvml: Callable[[], str] = lambda: "",
    ) -> None:
        boot = BOOT.read_text(encoding="ascii").strip()
        cgroups = device_cgroups or DeviceCgroups(node, lambda: False)
        mps_dir = run_dir(settings.mps_dir, node) if settings.mps_dir is not None else None
        self.state = state = NodeState(node, settings, state_folder, boot, processes, host_memory_mb)
        self.view = view = AgentNodeView(state)
        self.groups = groups = Groups(view, settings.control, state.saved.groups, state.saved.account)
        freezer = freezer or Freezer()
        self._orders = Orders(state, spool, slurm, channels, freezer)
        self._measuring = Measuring(state, groups, channels)
        self._slices = Slices(state, groups, view, self._measuring)
        self._controls = Controls(state, groups, self._measuring, channels)
        self._access = GpuAccess(state, channels, cgroups, mps_dir)
        self._containment = Containment(state, groups, slurm)
        self._guarantees = Guarantees(state, groups, self._containment)
        self._checkpoints = checkpoints = CudaCheckpoints(state, sample, state_folder)
        self._transitions = Transitions(
            state, groups, view, self._controls, self._access, self._containment, slurm, links, freezer, checkpoints
        )
        self._duty_cycles = DutyCycles(state, groups, self._containment, freezer, gpu_times)
        self._observer = Observer(
            state, self._orders, self._containment, sample, plugin, cgroups, mps_dir, driver, freezer, no_nvml
        )
        self._status = StatusWriter(state, groups, spool, links)

    def tick(self, now_s: float) -> None:
        """Do what is due.

        1. Take a new order, and read what the jobs report.
        2. Observe processes and GPUs.
        3. Form the groups, end slices, and choose the jobs of the next ones.
        4. Hold opportunistic jobs to their share. Bring each job closer to what its group wants: ask it to move, suspend
           it, bind it, resume it, limit it.
        5. Begin measurements, and contain the jobs that do what they must not.
        6. Write the status.

        A failure concerns its job, or its part of the tick, alone: see `NodeState.guard`.
        """
        self.state.now_s = now_s
        guard = self.state.guard
        self._set_back()
        with guard("read its order"):
            self._orders.read()
        self._measuring.read_statuses()
        with guard("observe its node"):
            self._observer.observe()
        with guard("resume departing jobs"):
            self._orders.resume_departing()
        with guard("form groups"):
            self._slices.form_groups()
        # Not before: what a job has had is counted when it leaves its group.
        self.state.saved.account.forget({job.job for job in self.state.ordered_jobs})
        self._slices.end()
        with guard("measure jobs that run alone"):
            self._measuring.measure_alone()
        self.groups.take_seen()  # the status has it, with its number
        self.state.save()
        self._duty_cycles.check()
        self._transitions.advance()
        with guard("restore GPU memory"):
            self._checkpoints.restore()
        self._controls.send_limits()
        with guard("open GPUs to their jobs"):
            self._access.open_gpus()
        with guard("begin measurements"):
            self._measuring.begin()
        self._containment.check()
        self._guarantees.check()
        self.state.save()
        self._status.write()

    def close(self) -> None:
        """Thaw what only the agent would thaw, and wait for what was begun and must not be interrupted."""
        self._duty_cycles.close()
        with self.state.guard("save its state"):
            self.state.save()
        self._checkpoints.close()

    @property
    def pause_s(self) -> float:
        """Pause before the next tick, s: short while the agent freezes a job from time to time, or the driver works."""
        busy = self._duty_cycles.driving or self._checkpoints.busy
        return min(self.state.settings.poll_s, DRIVE_S) if busy else self.state.settings.poll_s

    def status(self) -> NodeStatus:
        """The present status."""
        return self._status.status()

    def _set_back(self) -> None:
        """The node's clock may have been set back: times that lie in the future must hold nothing up."""
        self.state.set_back()
        self._orders.set_back()
        self._observer.set_back()
        self._slices.set_back()
        self._guarantees.set_back()
        self._status.set_back()


log = logging.getLogger(__name__)

WRITE_S = 5.0
"""A status is written at least this often."""


class StatusWriter:
    """Writes the status whenever it changes."""

    def __init__(self, state: NodeState, groups: Groups, spool: Path, links: Links) -> None:
        self._state, self._groups, self._links = state, groups, links
        self._path = status_file(spool, state.node)
        self._written, self._written_s = "", -math.inf
        self._failed = False
        """Whether the last status could not be written, which has been logged."""

    def set_back(self) -> None:
        """See `NodeState.set_back`."""
        self._written_s = min(self._written_s, self._state.now_s)

    def write(self) -> None:
        """Write the status if it has changed, or is due."""
        status, now_s = self.status(), self._state.now_s
        counts = {"jobs": {"__all__": {"use", "frozen_s"}}}
        text = status.model_copy(update={"time_s": 0.0}).model_dump_json(exclude=counts)
        if text == self._written and now_s - self._written_s < WRITE_S:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, status.model_dump_json())
        except OSError as error:
            log.log(
                logging.DEBUG if self._failed else logging.WARNING,
                "the status cannot be written",
                extra={"text": f"{error}; on NFS root must be able to write there (no_root_squash)"},
            )
            self._failed = True
            return
        self._written, self._written_s, self._failed = text, now_s, False

    def status(self) -> NodeStatus:
        """The present status."""
        state, saved = self._state, self._state.saved
        group_of = {job: group for group in self._groups.groups for job in group.order.jobs}
        groups = []
        for ordered in state.ordered_groups:
            group = next((group_of[job] for job in ordered.shared.jobs if job in group_of), None)
            if group is not None:
                share = min(group.control.share, 1.0)
                groups.append(CarriedGroup(shared=ordered.shared, running=group.running, share=share))
        return NodeStatus(
            node=state.node,
            order=saved.order.number if saved.order is not None else 0,
            time_s=state.now_s,
            history=saved.history,
            release=__version__,
            lacks=tuple(sorted(state.lacks)),
            groups=tuple(groups),
            jobs=tuple(self._job(job) for job in state.ordered_jobs),
            packs=tuple(saved.packs),
            contained=tuple(saved.contained),
            xids=tuple(saved.xids),
            gpu_memory_mb=state.gpu_memory_mb,
            links=self._links,
        )

    def _job(self, job: OrderedJob) -> CarriedJob:
        local, account = self._state.jobs[job.job], self._state.saved.account
        # A job that does not report its steps has no speed alone to compare with, so it counts as not profiled.
        profiled = job.job in account.profiled and local.rate > 0
        use = JobUse(
            job.kind or job.job,
            local.utilisation if profiled else None,
            local.memory_mb,
            account.ran_s.get(job.job, 0.0),
            account.moved_s.get(job.job),
            answers=bool(self._state.observed(job.job).statuses) or (None if local.begun_s == math.inf else False),
        )
        devices, frozen_s = local.devices or job.own_devices, frozen_for_s(local, self._state.now_s)
        since_s = local.asked_s if local.state in ("suspending", "suspended") else 0.0
        return CarriedJob(
            job=job.job,
            state=local.state,
            since_s=local.stopped_s if frozen_s else since_s,
            driven=local.driven or local.stopped,
            frozen=frozen_s > 0,
            frozen_s=local.frozen_s + frozen_s,
            devices=devices,
            use=use,
            mps=local.mps,
            cuda_checkpointed=bool(local.cuda_checkpointed),
            why=local.why,
        )
