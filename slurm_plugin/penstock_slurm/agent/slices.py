"""Groups and time slices: which groups run on the node, and when a slice ends."""

from __future__ import annotations

import dataclasses

from penstock_scheduler.model import SharedGpus
from penstock_scheduler.rounds.sharing.node import Group, Groups, without
from penstock_slurm.agent.measuring import Measuring
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.node_view import AgentNodeView


class Slices:
    """Forms the groups from the jobs that are here, and ends their time slices."""

    def __init__(self, state: NodeState, groups: Groups, view: AgentNodeView, measuring: Measuring) -> None:
        self._state, self._groups, self._view, self._measuring = state, groups, view, measuring

    def set_back(self) -> None:
        """See `NodeState.set_back`."""
        for group in self._groups.groups:
            group.since_s = min(group.since_s, self._state.now_s)

    def form_groups(self) -> None:
        """Form the ordered groups from those of their jobs that run here."""
        jobs = self._state.jobs
        wanted = self._wanted_groups()
        if wanted == [group.order for group in self._groups.groups]:
            return
        sharing = [job for group in wanted for job in group.jobs]
        running = {job: jobs[job].state == "running" and job not in self._groups.group_of for job in sharing}
        for job in sharing:
            if running[job] and self._state.observed(job).alone_since_s:
                self._measuring.count_alone(job)
        for fresh in self._groups.order(wanted, self._state.now_s, running):
            for job in fresh.order.jobs:
                self._state.observed(job).begin_measuring()
        self._state.saved.groups = self._groups.groups

    def _wanted_groups(self) -> list[SharedGpus]:
        jobs = self._state.jobs
        here = {job.job for job in self._state.ordered_jobs if job.running and not jobs[job.job].gone}
        for name in here:
            pack = self._state.ordered_pack(name)
            if pack is None or pack.jobs != jobs[name].held_out or pack.guaranteed not in here:
                jobs[name].held_out = ()
        here = {name for name in here if not jobs[name].held_out}
        wanted: list[SharedGpus] = []
        for ordered in self._state.ordered_groups:
            group = dataclasses.replace(ordered.shared, gpus=min(ordered.shared.gpus, len(ordered.devices)))
            for job in group.jobs:
                if job not in here:
                    group = without(group, job)
            if group.packs:
                wanted.append(group)
        return wanted

    def end(self) -> None:
        """End the time slices that are over."""
        for group in self._groups.groups:
            with self._state.guard(f"end the time slice of jobs {', '.join(group.order.jobs)}"):
                if self._is_over(group) or self._view.finds_no_room(group):
                    self._end(group)

    def _end(self, group: Group) -> None:
        for pack in group.running:
            if len(pack.jobs) == 1:
                self._measuring.learn_alone(pack.jobs[0])
            for name in pack.jobs:
                self._state.jobs[name].why = ""
        self._groups.end_slice(group, self._state.now_s)
        for name in group.order.jobs:
            self._state.observed(name).begin_measuring()

    def _is_over(self, group: Group) -> bool:
        """Whether the slice is over: all departing jobs have left, and each running job has had its GPUs for a whole
        slice.

        Otherwise a job that is slow to leave would return before the next job had its part. If Slurm does not do its
        part, the other jobs do not wait forever. The slice does not begin while one of its jobs is starting: it would
        show nothing. For the same reason a control period lasts until the guaranteed job has made a step in it,
        unless another pack waits.
        """
        state = self._state
        jobs, settings, slice_s = state.jobs, state.settings, group.order.slice_s
        running = [jobs[job] for pack in group.running for job in pack.jobs]
        began_s = max((local.begun_s for local in running if local.state == "running"), default=0.0)
        age_s = state.now_s - max(group.since_s, began_s)
        if age_s < slice_s or age_s > 2 * slice_s + settings.suspend_wait_s + settings.freeze_s:
            return age_s >= slice_s
        if any(jobs[job].state == "suspending" for job in group.order.jobs):
            return False
        if not self._shows(group):
            return False
        return all(local.state == "running" and state.now_s - local.resumed_s >= slice_s for local in running)

    def _shows(self, group: Group) -> bool:
        """Whether the control can learn from this period; True if nothing is controlled, or another pack waits."""
        pack = group.order.packs[0]
        if len(group.order.packs) > 1 or pack.guaranteed is None or len(pack.jobs) == 1:
            return True
        return self._view.steps(pack, group).count > 0
