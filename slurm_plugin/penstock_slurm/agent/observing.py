"""Observations of the node: the jobs' processes, the GPUs, and what the node lacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from penstock_profiles.cuda_checkpoint import FIRST_DRIVER, too_old
from penstock_profiles.nvml import Sample, by_job
from penstock_scheduler.api.agent_messages import Lack, XidSeen
from penstock_scheduler.model import JobId
from penstock_slurm.agent import limits, mps
from penstock_slurm.agent.containment import Containment
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.orders import Orders
from penstock_slurm.agent.state import next_number

log = logging.getLogger(__name__)

INSPECT_S = 15.0
"""How often the agent checks whether the node lacks anything."""

STRANGERS = 5
"""Most of them that one line of the log names."""


class Observer:
    """Observes the node: what changes often and is cheap to read more often than the rest.

    Args:
        state: the node's state.
        orders: is notified when processes have ended.
        containment: is notified when a job has ended.
        sample: takes a sample of the GPUs by NVML; None: no NVML.
        plugin: says what is wrong with the node's SPANK plugin, with a sentence; None: nothing.
        device_cgroups: the jobs' device cgroups.
        mps_dir: folder of the site's MPS control daemon; None: no MPS.
        driver: version of NVIDIA's driver; None: unknown.
        freezer: freezes processes.
        no_nvml: why there is no NVML where there should be; "": nothing is amiss.
    """

    def __init__(
        self,
        state: NodeState,
        orders: Orders,
        containment: Containment,
        sample: Callable[[], Sample] | None,
        plugin: Callable[[], tuple[Lack, str] | None],
        device_cgroups: DeviceCgroups,
        mps_dir: Path | None,
        driver: str | None,
        freezer: Freezer,
        no_nvml: Callable[[], str],
    ) -> None:
        self._state, self._orders, self._containment = state, orders, containment
        self._sample, self._plugin, self._device_cgroups, self._mps_dir = sample, plugin, device_cgroups, mps_dir
        self._driver, self._freezer, self._no_nvml = driver, freezer, no_nvml
        self._sampled_s = self._inspected_s = -math.inf
        self._strangers: dict[tuple[int, int], str] = {}
        """(Process, when it began) that used a GPU which jobs share, and belonged to no job, at the last sample."""
        self._seen_before: set[tuple[int, int]] = set()
        """Those of the last inspection."""

    def set_back(self) -> None:
        """See `NodeState.set_back`."""
        self._sampled_s = min(self._sampled_s, self._state.now_s)
        self._inspected_s = min(self._inspected_s, self._state.now_s)

    def observe(self) -> None:
        """Observe what is due."""
        now_s = self._state.now_s
        if now_s - self._sampled_s >= self._state.settings.sample_s:
            self._sampled_s = now_s
            self._observe_processes()
            with self._state.guard("observe its GPUs"):
                self._observe_gpus()
        elif self._awaits_ends():
            self._observe_processes()
        if now_s - self._inspected_s >= INSPECT_S:
            self._inspected_s = now_s
            self._inspect()

    def _awaits_ends(self) -> bool:
        """Whether a job may be waiting for GPUs until processes have ended."""
        gone = (local.slurm_job for local in self._state.jobs.values() if local.gone)
        departing = self._state.saved.departing.values()
        return any(each.devices for each in departing) or any(map(self._state.living.__contains__, gone))

    def _observe_processes(self) -> None:
        state = self._state
        state.scan_processes()
        self._orders.close_ended()
        for job in state.ordered_jobs:
            local = state.jobs[job.job]
            if job.slurm_job in state.living and job.running:
                local.alive, local.gone = True, local.gone and "killed" in local.told
            elif local.alive and not local.gone:
                if local.state == "suspended":
                    text, done = "ended while it was suspended", "its time slice goes to the next job"
                    self._containment.contain(job, "died", text, kill=False, otherwise=done)
                self._containment.job_ended(job, local)

    def _observe_gpus(self) -> None:
        if self._sample is None:
            return
        try:
            sample = self._sample()
        except Exception:  # an error of the driver must not stop time slices
            log.warning("GPUs cannot be sampled", exc_info=True)
            self._state.forget_memory()
            return
        for reading in sample.readings:
            if reading.device.memory_mb is not None:
                self._state.gpu_memory_mb[reading.device.gpu_type] = int(reading.device.memory_mb)
        self._note_errors(sample)
        self._note_uses(sample)
        self._note_strangers(sample)

    def _note_errors(self, sample: Sample) -> None:
        xids = self._state.saved.xids
        errors = [(reading.device.index, reading.xids) for reading in sample.readings]
        errors += [(lost.index, lost.xids) for lost in sample.lost]
        for index, codes in errors:
            for xid in codes:
                xids.append(XidSeen(number=next_number(xids), time_s=self._state.now_s, device=index, xid=xid))

    def _note_uses(self, sample: Sample) -> None:
        """Note each job's memory and utilisation."""
        state = self._state
        jobs = {job.slurm_job: job for job in state.ordered_jobs}

        def job_of(pid: int) -> str | None:
            number = state.processes.job_of(pid)
            return jobs[number].job if number in jobs else None

        uses: dict[JobId, list[tuple[float | None, float | None]]] = {}
        for (name, _), use in by_job(sample, job_of).items():
            uses.setdefault(name, []).append((use.used_mb, use.utilisation))
        for job in jobs.values():
            observed, local = state.observed(job.job), state.jobs[job.job]
            used = [mb for mb, _ in uses.get(job.job, []) if mb is not None]
            busy = [share for _, share in uses.get(job.job, []) if share is not None]
            observed.used_mb = max(used, default=None)
            if local.state == "suspended" and observed.used_mb is not None:
                local.left_mb = observed.used_mb
            if busy:
                observed.busy.append(sum(busy) / len(busy))
            local.memory_mb = max(local.memory_mb, int(observed.used_mb or 0))

    def _note_strangers(self, sample: Sample) -> None:
        """Note the processes that use GPUs which jobs share, and belong to no job that does.

        The agent cannot hold them to a share. With proctrack/linuxproc, a process can leave its job and outlive it.
        """
        shared = {device for group in self._state.ordered_groups for device in group.devices}
        self._strangers.clear()
        for reading in sample.readings:
            for process in (reading.processes or ()) if reading.device.index in shared else ():
                found = self._state.processes.state(process.pid)
                if found is None or self._state.processes.job_of(process.pid) is not None:
                    continue
                if self._mps_dir is None or not found.program.startswith(mps.PROGRAM):
                    text = f"process {process.pid} ({found.program}) uses GPU {reading.device.index}"
                    self._strangers[process.pid, found.began] = text

    def _inspect(self) -> None:
        """Check what the node lacks. New lacks are logged."""
        state = self._state
        lacks: dict[Lack, str] = {"unknown": "a check of the node failed"}
        with state.guard("find out what the node lacks"):
            lacks = self._find_lacks()
        for lack, text in lacks.items():
            if lack not in state.lacks:
                log.warning("the node lacks what sharing needs", extra={"lack": lack, "text": text})
        state.lacks = lacks

    def _find_lacks(self) -> dict[Lack, str]:
        state, lacks = self._state, dict[Lack, str]()
        if (found := self._plugin()) is not None:
            lacks[found[0]] = found[1]
        if self._mps_dir is not None and (text := mps.trouble(self._mps_dir)):
            lacks["no-mps"] = f"no nvidia-cuda-mps-control answers, packs run without it: {text}"
        if state.settings.limiter is not None and (text := limits.trouble(state.settings.limiter)):
            lacks["no-limiter"] = f"no HAMi-core, packs run without it: {text}"
        if text := self._no_nvml():
            lacks["no-nvml"] = f"neither GPU memory nor GPU time of jobs is measured: {text}"
        if state.settings.cuda_checkpoint == "auto" and too_old(self._driver):
            text = f"NVIDIA's driver {self._driver} cannot checkpoint processes, {FIRST_DRIVER} or later can"
            lacks["old-driver"] = f"{text}: jobs that do not move off their GPUs are frozen with their memory there"
        living = any(job.slurm_job in state.living for job in state.sharing_jobs())
        # A process that was just started may belong to a job by the next look.
        stay = [text for process, text in self._strangers.items() if process in self._seen_before]
        self._seen_before = set(self._strangers)
        if stay:
            lacks["strangers"] = f"{'; '.join(stay[:STRANGERS])}, which jobs share, and belongs to none of them"
        if text := self._freezer.trouble(
            [pid for job in state.ordered_jobs for pid in state.living.get(job.slurm_job, [])]
        ):
            lacks["no-freezer"] = f"jobs cannot be held to their shares: {text}"
        if text := self._device_cgroups.trouble(living=living):
            lacks["no-devices"] = f"GPUs cannot be opened to co-located jobs, to which Slurm denies them: {text}"
        return lacks
