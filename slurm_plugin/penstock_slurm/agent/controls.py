"""Control messages to jobs: what each job may use, and whether it must move off its GPUs."""

from __future__ import annotations

import math

from penstock_scheduler.model import JobId, Pack
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.measuring import Measuring
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.state import LocalJob


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
