"""The daemon's orders: the agent reads them, takes up the jobs that they name and releases the others."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

from penstock_profiles.files import open_regular
from penstock_profiles.wire import read
from penstock_scheduler.api.agent_messages import MAX_BYTES, NodeOrder, OrderedJob, order_file
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.node_state import NodeState, Slurm
from penstock_slurm.agent.state import DepartingJob, LocalJob
from penstock_slurm.gateway import JobGone, Refused, SlurmError

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]
"""Tells one version of a file from another: modification time, size and inode."""


class Orders:
    """Reads the order and keeps `NodeState.jobs` and the departing jobs in step with it."""

    def __init__(self, state: NodeState, spool: Path, slurm: Slurm, channels: Channels, freezer: Freezer) -> None:
        self._state, self._slurm, self._channels, self._freezer = state, slurm, channels, freezer
        self._path = order_file(spool, state.node)
        self._stamp: Stamp | None = None
        self._resume_s = -math.inf
        """When departing jobs may next be resumed."""

    def set_back(self) -> None:
        """See `NodeState.set_back`."""
        self._resume_s = min(self._resume_s, self._state.retry_at_s())

    def read(self) -> None:
        """Take a new order. If there is none, or the spool cannot be read, the last order stands."""
        order = self._new_order()
        if order is None:
            return
        try:
            for job in order.jobs:
                self._channels.open(job.slurm_job, job.uid)
        except OSError as error:  # the last order stands
            log.warning("the order cannot be carried out yet", extra={"text": str(error)})
            self._stamp = None
            return
        self._take(order)

    def _new_order(self) -> NodeOrder | None:
        try:
            opened = open_regular(self._path)
        except OSError as error:
            log.debug("no order", extra={"text": str(error)})
            return None
        with opened as file:
            about = os.fstat(file.fileno())
            stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
            if stamp == self._stamp or about.st_size > MAX_BYTES:
                return None
            try:
                order = read(NodeOrder, file.read(MAX_BYTES))
                if order.node != self._state.node:
                    raise ValueError(f"is for {order.node}")
            except ValueError as error:
                log.warning("order ignored", extra={"text": str(error)[:300]})
                return None
            finally:
                self._stamp = stamp
        before = self._state.saved.order
        return None if before is not None and before.number == order.number else order

    def _take(self, order: NodeOrder) -> None:
        """Take an order, whole or not at all. What fails is raised, and tried again in the next tick."""
        saved = self._state.saved
        before, jobs, departing = saved.order, dict(saved.jobs), dict(saved.departing)
        try:
            self._take_jobs(order)
        except Exception:
            saved.order, saved.jobs, saved.departing, self._stamp = before, jobs, departing, None
            raise

    def _take_jobs(self, order: NodeOrder) -> None:
        jobs = self._state.jobs
        before = {job.job: job for job in self._state.ordered_jobs}
        self._state.saved.order = order
        log.info("order taken", extra={"number": order.number, "jobs": len(order.jobs), "groups": len(order.groups)})
        for job in order.jobs:
            self._take_job(job, before.get(job.job))
        wanted = {job.job for job in order.jobs}
        for name in [name for name in jobs if name not in wanted]:
            local = jobs.pop(name)
            if name in before:
                self._depart(before[name], local)
            self._state.forget_observed(name)
        self._close_channels({job.slurm_job for job in order.jobs})

    def _take_job(self, job: OrderedJob, before: OrderedJob | None) -> None:
        jobs = self._state.jobs
        local = jobs.get(job.job)
        begun = local is not None and (local.alive or local.state != "waiting")
        # The agent never binds a job with GPUs in Slurm. If such a job is bound, the binding is of an earlier run.
        again = (begun and not job.running) or bool(job.own_devices and self._channels.bound(job.slurm_job))
        if local is None or local.slurm_job != job.slurm_job or again:
            if local is not None and before is not None:
                self._depart(before, local)
            if again or not job.running:
                self._channels.clear(job.slurm_job)  # left by an earlier run
            jobs[job.job] = self._found(job)
            self._state.forget_observed(job.job)
            self._state.saved.account.moved_s.pop(job.job, None)  # that was its last run
        if not jobs[job.job].gone:
            jobs[job.job].cgroup = None  # the folder of the run in the present order
        if job.running:
            self._state.saved.departing.pop(job.slurm_job, None)

    def _close_channels(self, ordered: set[int]) -> None:
        """Close the channels of Slurm jobs that the order does not name, unless they are departing."""
        departing = self._state.saved.departing
        for number in [number for number in self._channels.numbers() if number not in ordered]:
            uid = self._channels.owner(number)
            if uid is None:
                self._channels.close(number)
            elif number not in departing:  # the state was lost, or the job never ran
                departing[number] = DepartingJob(uid, self._channels.bound(number), True, cuda_checkpointed=None)

    def _found(self, job: OrderedJob) -> LocalJob:
        """A job that is new to this agent. It may run already, if the state was lost or an order left the job out."""
        devices = job.own_devices or self._channels.bound(job.slurm_job)
        if not (job.running and devices):
            return LocalJob(job.slurm_job)
        self._state.scan_processes()
        frozen = self._state.is_frozen(job.slurm_job)
        # It is unknown whether a frozen job has moved off its GPUs.
        return LocalJob(
            job.slurm_job,
            "suspended" if frozen else "running",
            devices,
            resumed_s=self._state.now_s,
            unconfirmed=frozen,
            alive=frozen,
            cuda_checkpointed=None,
            mps=self._channels.by_mps(job.slurm_job),
        )

    def _depart(self, job: OrderedJob, local: LocalJob) -> None:
        """Release a job that the order no longer names. If it lives, it may use its GPUs and must not stay frozen."""
        devices = local.devices or job.own_devices
        frozen = local.state in ("suspending", "suspended") or local.unconfirmed or local.stopped
        if devices or frozen:
            departing = DepartingJob(job.uid, devices, frozen, local.cuda_checkpointed, local.cuda_needs, local.cgroup)
            self._state.saved.departing[local.slurm_job] = departing

    def resume_departing(self) -> None:
        """Resume departing jobs that are frozen."""
        for number, departing in self._state.saved.departing.items():
            with self._state.guard(f"resume Slurm's job {number}"):
                if departing.frozen and number in self._state.living and self._state.now_s >= self._resume_s:
                    departing.frozen = not self._resume(number)

    def _resume(self, number: int) -> bool:
        """Resume a departing job. Returns whether it runs."""
        try:
            self._slurm.resume(str(number))
        except (JobGone, Refused) as error:
            log.info("not resumed", extra={"slurm_job": number, "text": str(error)})
            try:
                self._freezer.thaw(self._state.living[number])  # the agent itself may have frozen it
            except OSError:
                if self._state.is_frozen(number):
                    raise
        except SlurmError as error:
            log.warning("not resumed yet", extra={"slurm_job": number, "text": str(error)})
            self._resume_s = self._state.retry_at_s()
            return False
        return True

    def close_ended(self) -> None:
        """Forget the departing jobs whose processes have all ended."""
        departing = self._state.saved.departing
        ordered = {job.slurm_job for job in self._state.ordered_jobs}
        for number in [number for number in departing if number not in self._state.living]:
            del departing[number]
            if number not in ordered:
                self._channels.close(number)
