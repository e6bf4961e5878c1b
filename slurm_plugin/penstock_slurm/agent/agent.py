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

from collections.abc import Callable
from pathlib import Path

from penstock_profiles.node_channel import run_dir
from penstock_profiles.nvml import Sample
from penstock_scheduler.api.agent_messages import Lack, NodeStatus
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.containment import Containment
from penstock_slurm.agent.controls import Controls
from penstock_slurm.agent.cuda_checkpoints import CudaCheckpoints
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.duty_cycles import DutyCycles
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.gpu_access import GpuAccess
from penstock_slurm.agent.gpu_time import GpuTimes
from penstock_slurm.agent.guarantee import Guarantees
from penstock_slurm.agent.measuring import Measuring
from penstock_slurm.agent.node_state import NodeState, Slurm
from penstock_slurm.agent.node_view import AgentNodeView
from penstock_slurm.agent.observing import Observer
from penstock_slurm.agent.orders import Orders
from penstock_slurm.agent.processes import Processes
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.agent.slices import Slices
from penstock_slurm.agent.status import StatusWriter
from penstock_slurm.agent.transitions import Transitions
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
