"""Transitions of jobs between states. See `penstock_slurm.agent.agent` for the states."""

from __future__ import annotations

import logging
import math

from penstock_scheduler.api.agent_messages import OrderedJob
from penstock_scheduler.model import JobId, Pack
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.containment import Containment
from penstock_slurm.agent.cuda_checkpoints import CudaCheckpoints
from penstock_slurm.agent.freezer import Freezer
from penstock_slurm.agent.gpu_access import GpuAccess, bind
from penstock_slurm.agent.measuring import Measuring
from penstock_slurm.agent.node_state import NodeState, Slurm
from penstock_slurm.agent.node_view import AgentNodeView
from penstock_slurm.agent.state import LocalJob
from penstock_slurm.gateway import JobGone, Refused, SlurmError
from penstock_slurm.share.topology import Links

log = logging.getLogger(__name__)

Devices = tuple[int, ...]
"""GPUs by Slurm's index."""

WAITS = "waits until"
"""So begins why a job waits for a departing one."""

NAMED = 5
"""Most processes that it names."""


class Transitions:
    """Brings each job a step closer to what its group wants."""

    def __init__(
        self,
        state: NodeState,
        groups: Groups,
        view: AgentNodeView,
        controls: Controls,
        access: GpuAccess,
        containment: Containment,
        slurm: Slurm,
        links: Links,
        freezer: Freezer,
        checkpoints: CudaCheckpoints,
    ) -> None:
        self._state, self._groups, self._view = state, groups, view
        self._controls, self._access, self._containment = controls, access, containment
        self._slurm, self._links, self._freezer, self._checkpoints = slurm, links, freezer, checkpoints

    def advance(self) -> None:
        """Take one step with each job."""
        targets = self._targets()
        for local in self._state.jobs.values():
            self._check_off(local)
        for job in self._state.ordered_jobs:
            local, observed = self._state.jobs[job.job], self._state.observed(job.job)
            local.anywhere = bool(observed.statuses) and all(each.anywhere for each in observed.statuses.values())
            with self._state.guard("change its state", job.job):
                self._step(job, local, targets.get(job.job))

    def _targets(self) -> dict[JobId, Devices]:
        """GPUs of each job whose time slice it is."""
        found: dict[JobId, Devices] = {}
        jobs = self._state.jobs
        gpus = {job.job: job.gpus for job in self._state.ordered_jobs}
        for group in self._groups.groups:
            names = group.order.jobs
            ordered = next((each for each in self._state.ordered_groups if set(names) <= set(each.shared.jobs)), None)
            if ordered is None:
                continue
            with self._state.guard(f"give jobs {', '.join(names)} GPUs"):
                found |= bind(
                    group.running,
                    ordered.devices,
                    {job: jobs[job].devices for job in names if jobs[job].state in ("running", "suspending")},
                    {job: self._view.pinned(job) for job in names},
                    {job: gpus[job] for job in names if job in gpus},
                    self._links,
                )
        return found

    def _step(self, job: OrderedJob, local: LocalJob, target: Devices | None) -> None:
        """Bring one job closer to its target GPUs; None: it is not its time slice."""
        if not job.running or local.gone:
            return
        if local.why.startswith(WAITS):
            local.why = ""  # unless that is still so: see `_may_run`
        if job.job not in self._groups.group_of:
            target = local.devices or job.own_devices  # no job shares with it: it runs where it is
            local.why = ""
            if local.held_out:
                target = None
                local.why = "stands still while the guaranteed job is there: it did not keep to its share"
        if local.state == "running" and not (target and set(target) == set(local.devices or target)):
            if local.mps:
                local.why = "runs beyond its time slice: a client of NVIDIA's MPS is not suspended"
                return
            self._ask_to_move(job, local)
        elif local.state == "suspending":
            if bool(target) and set(target or ()) == set(local.devices):
                self._take_back(job, local)
            else:
                self._suspend(job, local)
        elif local.state in ("waiting", "suspended") and target:
            self._run(job, local, target)
        elif local.state == "suspended" and local.unconfirmed:
            self._ask_to_move(job, local)  # it may run

    # From running to suspended.

    def _ask_to_move(self, job: OrderedJob, local: LocalJob) -> None:
        """Ask a job to move off its GPUs, unless by its own account it is too large for that: then it is only
        frozen."""
        if not self._view.must_freeze_in_place(local):
            self._controls.send(local, suspend=f"{local.control.number + 1}")
        local.moved_mb = self._state.observed(job.job).state_mb
        local.state, local.asked_s, local.why = "suspending", self._state.now_s, ""

    def _take_back(self, job: OrderedJob, local: LocalJob) -> None:
        """Let a job that was asked to move keep its GPUs after all, unless it may be frozen already."""
        if local.unconfirmed or self._state.is_frozen(job.slurm_job):
            local.state, local.free_s = "suspended", self._state.now_s
            return
        self._controls.send(local, suspend=None)
        local.state, local.resumed_s = "running", self._state.now_s

    def _suspend(self, job: OrderedJob, local: LocalJob) -> None:
        """Have Slurm freeze a job that has moved off its GPUs, does not answer, or has not answered in time."""
        state, statuses = self._state, self._state.observed(job.job).statuses.values()
        if state.now_s < local.retry_s:
            return
        answers = [each for each in statuses if each.suspends]
        all_answer = bool(answers) and len(answers) == len(statuses)
        asked = local.control.suspend is not None
        answered = asked and bool(answers) and all(each.suspended == local.control.suspend for each in answers)
        if asked and all_answer and not answered and not state.is_frozen(job.slurm_job):
            if state.now_s - local.asked_s <= state.settings.suspend_wait_s:
                return
            self._containment.contain(
                job,
                "no-answer",
                f"did not move off its GPUs within {state.settings.suspend_wait_s:g} s of being asked to",
                kill=state.settings.no_answer == "kill",
                otherwise="was frozen where it was",
            )
            if local.gone or state.now_s < local.retry_s:
                return
        moved = answered and all_answer
        if self._is_under_way(local) or not (moved or self._checkpoints.save(local)):
            return
        if self._ask_to_suspend(job, local):
            self._suspended(job, local, moved=moved)

    def _ask_to_suspend(self, job: OrderedJob, local: LocalJob) -> bool:
        """Ask Slurm to suspend a job. Returns whether it is suspended."""
        local.unconfirmed = True
        self._state.save()
        try:
            self._slurm.suspend(str(job.slurm_job))
        except JobGone:
            self._containment.job_ended(job, local)
            return False
        except SlurmError as error:
            # Slurm refuses to suspend a job that it has suspended already.
            if not (isinstance(error, Refused) and self._state.is_frozen(job.slurm_job)):
                local.unconfirmed = not isinstance(error, Refused)
                local.why, local.retry_s = f"Slurm does not suspend it: {error}", self._state.retry_at_s()
                return False
        return True

    def _suspended(self, job: OrderedJob, local: LocalJob, *, moved: bool) -> None:
        """Note that Slurm has suspended a job.

        If neither it nor the driver has moved it off its GPUs, it is on them until it is frozen.
        """
        observed, now_s = self._state.observed(job.job), self._state.now_s
        statuses, driver = observed.statuses.values(), not moved and self._checkpoints.is_away(local)
        local.state, local.unconfirmed, local.why = "suspended", False, ""
        local.off = moved or driver
        local.free_s = now_s + (0.0 if local.off else self._state.settings.freeze_s)
        local.left_mb = 0.0
        if moved:
            local.moved_mb = min(sum(each.moved_mb for each in statuses), local.moved_mb)
            local.left_mb = max(each.left_mb for each in statuses)
        elif driver:
            local.moved_mb = local.cuda_needs[1]
        else:
            local.moved_mb, local.left_mb = 0.0, observed.memory_mb
            if why := self._checkpoints.in_place(local):
                local.why = f"other jobs have its GPUs in this time slice, and its memory stays there: {why}"
        local.refusals = 0
        observed.cpu = observed.used_mb = None  # observed before
        log.info("suspended", extra={"job": job.job, "slurm_job": job.slurm_job, "moved": local.off})

    def _check_off(self, local: LocalJob) -> None:
        """A job that was frozen in place is off its GPUs once it is seen frozen. On a busy node that is later than
        `freeze_s`.

        A job without visible processes counts as off then, and so does a job that still runs `suspend_wait_s` later.
        """
        state = self._state
        if local.state != "suspended" or local.unconfirmed or local.off or state.now_s < local.free_s:
            return
        late = state.now_s > local.free_s + state.settings.suspend_wait_s
        if late or local.slurm_job not in state.living or state.stands_still(local.slurm_job):
            local.off, local.free_s = True, state.now_s

    # From waiting or suspended to running.

    def _run(self, job: OrderedJob, local: LocalJob, target: Devices) -> None:
        """Give a job its GPUs once the jobs that had them are off them."""
        if not self._may_run(job, local, target):
            return
        # An agent that has lost its state may find a job frozen that it knows nothing of.
        frozen = local.state == "suspended" or self._state.is_frozen(job.slurm_job)
        if frozen:
            self._controls.send(local, suspend=None)
        if not job.own_devices and target != local.devices and (trouble := self._access.bind(job, local, target)):
            local.why = f"its GPUs cannot be opened to it: {trouble}"
            local.retry_s = self._state.retry_at_s()
            return
        local.devices = target
        if not frozen or self._ask_to_resume(job, local):
            self._runs(job, local)

    def _may_run(self, job: OrderedJob, local: LocalJob, target: Devices) -> bool:
        """Whether the target GPUs are free for the job, and Slurm has done what it was asked last."""
        others = self._others(job.job)
        if self._state.now_s < local.retry_s or any(self._uses(other) & set(target) for other in others):
            return False
        for number, each in self._state.saved.departing.items():
            if number != job.slurm_job and set(each.devices) & set(target):
                local.why = self._waits_for(number)
                return False
        if self._is_under_way(local) or not self._controls.room_made(job.job):
            return False
        group = self._groups.group_of.get(job.job)
        # If it lacks room, another job has the next time slice.
        return group is None or job.job in group.crowded or not self._view.lacks_room(job.job)

    def _waits_for(self, number: int) -> str:
        """Why a job waits whose GPUs a departing job may still be using."""
        pids = self._state.living.get(number, [])
        who = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids[:NAMED]))} of " if pids else ""
        return f"{WAITS} {who}Slurm's job {number}, which leaves its GPUs, {'end' if len(pids) > 1 else 'ends'}"

    def _ask_to_resume(self, job: OrderedJob, local: LocalJob) -> bool:
        """Ask Slurm to resume a job. Returns whether it runs."""
        local.unconfirmed = True
        self._state.save()
        try:
            self._slurm.resume(str(job.slurm_job))
        except JobGone:
            self._containment.job_ended(job, local)
            return False
        except SlurmError as error:
            trouble = str(error)
            if isinstance(error, Refused):  # Slurm has not frozen it. An agent that has lost its state may have.
                try:
                    self._freezer.thaw(self._state.living.get(job.slurm_job, []))
                except OSError as failed:  # no matter if it runs
                    trouble = f"{trouble}; the agent may not thaw it: {failed.strerror}"
            if not isinstance(error, Refused) or self._state.is_frozen(job.slurm_job):
                local.why, local.retry_s = f"Slurm does not resume it: {trouble}", self._state.retry_at_s()
                return False
            log.info("not suspended after all", extra={"job": job.job, "text": str(error)})
        return True

    def _runs(self, job: OrderedJob, local: LocalJob) -> None:
        """Note that a job runs on its GPUs."""
        observed = self._state.observed(job.job)
        observed.begin_measuring()
        local.state, local.resumed_s, local.moved_mb, local.why = "running", self._state.now_s, 0.0, ""
        if observed.statuses and all(each.suspends for each in observed.statuses.values()):
            local.left_mb = 0.0  # it may move off the next time
        local.unconfirmed = False
        devices = ",".join(map(str, local.devices))
        log.info("runs", extra={"job": job.job, "slurm_job": job.slurm_job, "devices": devices})

    # Which job uses which GPUs.

    def _is_under_way(self, local: LocalJob) -> bool:
        """Whether the node has yet to freeze or resume the job as Slurm was last asked.

        slurmd takes 2 s to freeze a job, and may do what it is asked meanwhile in any order. So a job that is resumed
        and suspended again within that time may run although Slurm shows it as suspended.
        """
        state = self._state
        if local.unconfirmed or local.slurm_job not in state.living:
            return False  # the outcome is unknown, or there is no process to see it by
        if local.state == "suspended":
            waits = state.now_s < local.free_s + state.settings.suspend_wait_s
            return waits and not state.stands_still(local.slurm_job)
        return state.is_frozen(local.slurm_job) and state.now_s < local.resumed_s + state.settings.suspend_wait_s

    def _others(self, job: JobId) -> list[JobId]:
        """Jobs that must not be on the job's GPUs while it runs: all that are not in its pack."""
        pack = self._groups.pack_of(job)
        together = pack.jobs if pack is not None else (job,)
        return [other for other in self._state.jobs if other not in together]

    def _uses(self, job: JobId) -> set[int]:
        """GPUs that a job may be using."""
        local, ordered = self._state.jobs[job], self._state.ordered_job(job)
        if ordered is None or not ordered.running or (local.gone and local.slurm_job not in self._state.living):
            return set()
        if local.state == "waiting" and not ordered.own_devices:
            return set()
        if local.state == "suspended" and not local.unconfirmed and local.off:
            return set()
        return set(local.devices or ordered.own_devices)


class Controls:
    """Sends control messages, in an order that keeps the memory limits of a pack within its GPUs."""

    def __init__(self, state: NodeState, groups: Groups, measuring: Measuring, channels: Channels) -> None:
        self._state, self._groups, self._measuring, self._channels = state, groups, measuring, channels

    def send(self, local: LocalJob, **changes: object) -> None:
        """Send the job a control message with these fields changed, unless nothing changes."""
        control = local.control.model_copy(update=changes)
        if control == local.control and control.number:
            return
        control = control.model_copy(update={"number": control.number + 1})
        self._channels.tell(local.slurm_job, control)
        local.control = control

    def send_limits(self) -> None:
        """Send each job its limits."""
        for job in self._state.ordered_jobs:
            with self._state.guard("send it its limits", job.job):
                self._send_limits(job.job, self._state.jobs[job.job])

    def _send_limits(self, job: JobId, local: LocalJob) -> None:
        """Raise a memory limit only after all lower limits of the pack are in force."""
        pack = self._groups.pack_of(job)
        if local.gone or (job in self._groups.group_of and pack is None):
            return
        if local.held_out:
            self.send(local, compute=0.0)
            return
        memory_mb, before_mb = (pack.limit(job).memory_mb if pack is not None else 0), local.control.memory_mb
        raised = (memory_mb or math.inf) > (before_mb or math.inf)
        others = [each for each in pack.jobs if each != job] if pack is not None else []
        if raised and not all(
            self._within_limit(each, pack) or self._state.jobs[each].state != "running" for each in others
        ):
            memory_mb = before_mb
        if local.most_mb:
            memory_mb = min(memory_mb or local.most_mb, local.most_mb)  # more fails, whatever the plan says by now
        compute = 1.0 if local.driven else self._groups.compute(job)
        self.send(local, compute=compute, memory_mb=memory_mb)

    def room_made(self, job: JobId) -> bool:
        """Whether the other jobs of the pack keep to their memory limits, or have had enough time to."""
        pack = self._groups.pack_of(job)
        others = [each for each in pack.jobs if each != job] if pack is not None else []
        group = self._groups.group_of.get(job)
        waited_s = self._state.now_s - group.since_s if group is not None else math.inf
        # A job that has not run yet has nothing on a GPU.
        others = [each for each in others if self._state.jobs[each].state != "waiting"]
        limited = [each for each in others if pack is not None and pack.limit(each).memory_mb]
        late = waited_s > self._state.settings.suspend_wait_s
        return late or all(self._within_limit(each, pack) for each in limited)

    def _within_limit(self, job: JobId, pack: Pack | None) -> bool:
        """Whether the job keeps to its limit in the pack, or to a lower one that is still to be raised."""
        now_mb = self._state.jobs[job].control.memory_mb or math.inf
        return pack is not None and now_mb <= (pack.limit(job).memory_mb or math.inf) and self._measuring.obeys(job)
