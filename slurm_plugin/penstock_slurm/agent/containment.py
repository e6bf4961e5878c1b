"""Containment: what the agent does about jobs that exceed their limits or report something that is not true."""

from __future__ import annotations

import contextlib
import logging
from typing import Literal

from penstock_scheduler.api.agent_messages import Contained, OrderedJob
from penstock_scheduler.model import Pack
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.node_state import NodeState, Slurm
from penstock_slurm.agent.state import LocalJob, next_number
from penstock_slurm.gateway import JobGone, SlurmError

log = logging.getLogger(__name__)

Cause = Literal["no-answer", "no-freeze", "died", "memory", "lies", "share"]

OVER = 1.05
"""A job may use this many times its memory limit, because NVML counts the driver's context and the framework does
not."""

SURE_S = 1.0
"""A job that reports that it stands still is contained once it has counted steps for this long. Until then, its status may be
late."""

CONTEXT_MB = 2048
"""Most memory that NVIDIA's driver keeps in a process's context. Some 500 MB are usual."""

IDLE_CPU = 0.2
"""A job that stands still only polls, and uses less of a core than this."""


class Containment:
    """Finds jobs that break a limit, and cancels, freezes or reports them."""

    def __init__(self, state: NodeState, groups: Groups, slurm: Slurm) -> None:
        self._state, self._groups, self._slurm = state, groups, slurm

    def check(self) -> None:
        """Check each running job of the order."""
        for job in self._state.ordered_jobs:
            local = self._state.jobs[job.job]
            if local.gone or not job.running:
                continue
            for check in (self._check_memory, self._check_claims, self._check_frozen):
                with self._state.guard("check whether it keeps to its limits", job.job):
                    check(job, local)

    def _check_memory(self, job: OrderedJob, local: LocalJob) -> None:
        """A job in a pack must keep to its memory limit."""
        used_mb, limit_mb = self._state.observed(job.job).memory_mb, local.control.memory_mb
        local.memory_mb = max(local.memory_mb, int(used_mb))
        over = local.state == "running" and limit_mb > 0 and used_mb > OVER * limit_mb
        self._watch(job, "memory", over, f"holds {used_mb:.0f} MB of a GPU on which its limit is {limit_mb} MB")

    def _check_claims(self, job: OrderedJob, local: LocalJob) -> None:
        """A job that reports that it has moved off its GPUs must not train or hold memory there."""
        observed = self._state.observed(job.job)
        first = observed.first
        claims = first is not None and first.suspended is not None and first.suspended == local.control.suspend
        said = "says that it stands still, moved off its GPUs, and"
        self._watch(job, "lies", claims and observed.makes_steps(), f"{said} trains on", patience_s=SURE_S)
        left_mb = sum(each.left_mb for each in observed.statuses.values())
        holds = claims and observed.used_mb is not None and observed.used_mb > left_mb + CONTEXT_MB
        self._watch(job, "lies", holds, f"{said} holds {observed.used_mb or 0:.0f} MB of one")

    def _check_frozen(self, job: OrderedJob, local: LocalJob) -> None:
        """A job that Slurm has suspended must not compute. Slurm is asked once more, since an admin may have resumed it.

        Not before the node has frozen it, or has had enough time to: slurmd may do what it is asked in any order.
        """
        state, settings = self._state, self._state.settings
        frozen = local.state == "suspended" and not local.unconfirmed
        frozen = frozen and state.now_s > local.free_s + settings.freeze_s
        local.frozen = frozen and (local.frozen or state.stands_still(job.slurm_job))
        frozen = frozen and (local.frozen or state.now_s > local.free_s + settings.suspend_wait_s)
        runs_on = frozen and self._computes(job)
        if runs_on and "no-freeze" not in self._state.observed(job.job).wrong_since_s:
            with contextlib.suppress(SlurmError):
                self._slurm.suspend(str(job.slurm_job))
        self._watch(job, "no-freeze", runs_on, "continues to run although Slurm has suspended it")

    def _computes(self, job: OrderedJob) -> bool:
        """Whether its processes used more of the processor between the last two observations than idle ones do."""
        observed = self._state.observed(job.job)
        before_s, before_cpu_s, cores = observed.cpu or (0.0, 0.0, 0.0)
        seconds = self._state.now_s - before_s
        if seconds < self._state.settings.sample_s:
            return cores > IDLE_CPU
        states = map(self._state.processes.state, self._state.living.get(job.slurm_job, []))
        cpu_s = sum(state.cpu_s for state in states if state is not None)
        cores = (cpu_s - before_cpu_s) / seconds if observed.cpu is not None else 0.0
        observed.cpu = (self._state.now_s, cpu_s, cores)
        return cores > IDLE_CPU

    def hold_out(self, job: OrderedJob, local: LocalJob, pack: Pack, text: str, until: str = "") -> None:
        """Keep a job out of its pack until the guaranteed job leaves or the pack changes, and tell its user.

        `until`: what ends it before that, as the rest of the sentence "it was frozen until".
        """
        if local.mps:
            done = "was left as it is, since a client of NVIDIA's MPS is not suspended"
        else:
            local.held_out = pack.jobs
            done = f"was frozen until {until or f'job {pack.guaranteed} is gone'}"
        remedy = "a program that uses Penstock's executor keeps to its share"
        self.contain(job, "share", text, kill=False, otherwise=f"{done}; {remedy}")

    # Consequences.

    def _watch(self, job: OrderedJob, cause: Cause, wrong: bool, text: str, patience_s: float | None = None) -> None:
        """Contain a job that has broken a limit for too long."""
        since = self._state.observed(job.job).wrong_since_s
        key = text.partition(" holds ")[0] if cause == "lies" else cause
        if not wrong:
            since.pop(key, None)
            return
        settings, began_s = self._state.settings, since.setdefault(key, self._state.now_s)
        if self._state.now_s - began_s >= (settings.misuse_s if patience_s is None else patience_s):
            text = f"{text}, for {self._state.now_s - began_s:.0f} s"
            self.contain(job, cause, text, kill=settings.misuse == "kill", otherwise="was left as it is")

    def contain(self, job: OrderedJob, cause: Cause, text: str, *, kill: bool, otherwise: str) -> None:
        """Contain a job, once for each cause, and report it to its user.

        Args:
            job: the job.
            cause: why it is contained.
            text: what it did, as the rest of the sentence that "job 7" begins.
            kill: whether it is cancelled.
            otherwise: what was done if it is not cancelled, as the rest of the sentence that "it" begins.
        """
        local = self._state.jobs[job.job]
        if cause in local.told or (kill and self._state.now_s < local.retry_s):
            return
        killed = False
        if kill:
            try:
                self._slurm.cancel(str(job.slurm_job))
                killed = True
            except JobGone:
                pass
            except SlurmError as error:
                log.warning("not cancelled yet", extra={"job": job.job, "text": str(error)})
                local.retry_s = self._state.retry_at_s()
                return
        local.told.add(cause)
        done = "it was cancelled" if killed else f"it {otherwise}" if cause != "died" else otherwise
        contained = self._state.saved.contained
        contained.append(
            Contained(
                number=next_number(contained),
                job=job.job,
                time_s=self._state.now_s,
                cause=cause,
                text=f"job {job.job} {text}: {done}.",
                killed=killed,
            )
        )
        log.warning("contained", extra={"job": job.job, "text": contained[-1].text})
        if killed:
            local.told.add("killed")
            self.job_ended(job, local)

    def job_ended(self, job: OrderedJob, local: LocalJob) -> None:
        """Give the time slice of a job that has ended to the next one."""
        local.gone = True
        group = self._groups.left(job.job, self._state.now_s)
        self._state.saved.groups = self._groups.groups
        for each in group.order.jobs if group is not None else ():
            self._state.observed(each).begin_measuring()
