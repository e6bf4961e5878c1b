"""The guarantee of a guaranteed job, by its own speed: whatever the jobs beside it say or do not say.

The control of shares (`sharing.control`) compares control periods with one another, so a job that trains on at share 0
spoils the comparison unseen. The speed that the guaranteed job had alone does not depend on what others report.

1. The speed of a control period, or of `LEAST_STEPS` steps if these take longer, is what the guaranteed job reports to
   have done, over the time that has passed on the node. A job that reports nothing has done nothing.
2. If it is less than `1 - GROSS * tolerance` of the speed alone in two periods in a row, the other jobs of the pack are
   frozen at once.
3. If the guaranteed job is as slow without them, the cause is elsewhere: they come back at once, and the speed alone is
   measured anew.
4. Else they come back after `PAUSE` periods, with the first share that is tried, and the search begins again. The
   second time they stay frozen until the guaranteed job is gone.

Smaller losses are the control's to find.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

from penstock_profiles.node_channel import JobStatus
from penstock_scheduler.model import JobId, Pack, SharedGpus
from penstock_scheduler.rounds.sharing.control import LEAST_STEPS
from penstock_scheduler.rounds.sharing.node import Group, Groups, without
from penstock_slurm.agent.containment import Containment
from penstock_slurm.agent.measuring import Measuring
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.agent.node_view import AgentNodeView
from penstock_slurm.agent.observed import rate_between
from penstock_slurm.agent.state import LocalJob

log = logging.getLogger(__name__)

GROSS = 3.0
"""This many times the tolerance is no matter of measuring any more."""

SLOW_PERIODS = 2
"""Slow control periods in a row after which the other jobs are frozen."""

LATE_S = 2.0
"""By this much its status may be late without its being slow."""

PAUSE = 20
"""Control periods for which they stay frozen the first time."""


@dataclass(slots=True)
class _Watch:
    """What is known of one guaranteed job."""

    mark: JobStatus | None = None
    """Its status when the present control period began; None: it has not begun."""
    marked_s: float = 0.0
    slow: int = 0
    frozen: dict[JobId, int] = field(default_factory=dict)
    """Job that was frozen for its sake -> how often."""
    since_s: float = 0.0
    """Since when they are frozen; 0: they are not."""
    alone: float = 0.0
    """Its speed alone before that."""
    periods: int = 0
    """Control periods since then."""

    @property
    def again(self) -> bool:
        """Whether some job was frozen for the second time, after which it stays frozen."""
        return max(self.frozen.values(), default=0) > 1


class Guarantees:
    """Watches the guaranteed jobs of a node. Call `check` in each tick."""

    def __init__(self, state: NodeState, groups: Groups, containment: Containment) -> None:
        self._state, self._groups, self._containment = state, groups, containment
        self._watches: dict[JobId, _Watch] = {}

    def set_back(self) -> None:
        """See `NodeState.set_back`."""
        for watch in self._watches.values():
            watch.marked_s = min(watch.marked_s, self._state.now_s)
            watch.since_s = min(watch.since_s, self._state.now_s)

    def check(self) -> None:
        """Freeze what makes a guaranteed job too slow, and let go what does not."""
        there: set[JobId] = set()
        for group in self._groups.groups:
            for pack in group.running:
                ordered = self._state.ordered_pack(pack.jobs[0])
                job = ordered.guaranteed if ordered is not None else None
                if ordered is None or job is None or job not in pack.jobs:
                    continue
                there.add(job)
                with self._state.guard("watch its speed", job):
                    self._check(job, pack, ordered, group)
        self._watches = {job: watch for job, watch in self._watches.items() if job in self._state.jobs}
        for job in self._watches.keys() - there:
            self._watches[job].mark = None

    def _check(self, job: JobId, pack: Pack, ordered: Pack, group: Group) -> None:
        state, local = self._state, self._state.jobs[job]
        first = state.observed(job).first
        watch = self._watches.get(job)
        if watch is None:
            watch = self._watches[job] = self._begin(local, ordered)
        if first is None or local.state != "running":
            watch.mark = None
            if watch.since_s and state.now_s - watch.since_s > PAUSE * group.order.slice_s and not watch.again:
                self._come_back(job, watch, ordered, "it reports nothing by which to judge them")
            return
        if watch.mark is None or watch.mark.pid != first.pid:
            watch.mark, watch.marked_s, watch.slow = first, state.now_s, 0
            return
        passed_s = state.now_s - watch.marked_s
        if passed_s < max(group.order.slice_s, LEAST_STEPS * state.observed(job).usual_s):
            return
        reported_s = max(first.time_s - watch.mark.time_s, passed_s - LATE_S)
        if reported_s <= 0:
            return  # its status may just be late
        speed = rate_between(watch.mark, first, reported_s)
        watch.mark, watch.marked_s = first, state.now_s
        least = 1 - GROSS * state.settings.control.tolerance
        if watch.since_s:
            self._while_frozen(job, watch, ordered, speed, least)
            return
        slow = len(pack.jobs) > 1 and local.rate > 0 and speed < least * local.rate
        watch.slow = watch.slow + 1 if slow else 0
        if watch.slow >= SLOW_PERIODS:
            self._freeze(job, watch, pack, ordered, speed / local.rate)

    def _begin(self, local: LocalJob, ordered: Pack) -> _Watch:
        """A new watch. The agent may have frozen jobs before it was started again."""
        frozen = [each for each in ordered.jobs if each in self._state.jobs and self._state.jobs[each].held_out]
        since_s = self._state.now_s if frozen else 0.0
        return _Watch(frozen=dict.fromkeys(frozen, 1), since_s=since_s, alone=local.rate)

    def _freeze(self, job: JobId, watch: _Watch, pack: Pack, ordered: Pack, part: float) -> None:
        watch.slow, watch.periods, watch.since_s = 0, 0, self._state.now_s
        watch.alone = self._state.jobs[job].rate
        for each in self._state.ordered_jobs:
            if each.job in pack.jobs and each.job != job:
                watch.frozen[each.job] = watch.frozen.get(each.job, 0) + 1
                text = f"was there while guaranteed job {job} had {part:.0%} of the speed that it has alone"
                until = "it may try a smaller share" if watch.frozen[each.job] == 1 else ""
                self._containment.hold_out(each, self._state.jobs[each.job], ordered, text, until)

    def _while_frozen(self, job: JobId, watch: _Watch, ordered: Pack, speed: float, least: float) -> None:
        """Let the frozen jobs go if they are not the cause, or have been frozen for long enough."""
        watch.periods += 1
        if watch.periods == 1:
            return  # they were there for a part of it
        innocent = watch.periods <= 1 + SLOW_PERIODS and speed < least * watch.alone
        watch.slow = watch.slow + 1 if innocent else 0
        if watch.slow >= SLOW_PERIODS:
            watch.frozen.clear()
            self._state.jobs[job].rate = speed
            self._come_back(job, watch, ordered, "the cause is elsewhere")
        elif watch.periods > PAUSE and not watch.again:
            self._come_back(job, watch, ordered, "they may try a smaller share")

    def _come_back(self, job: JobId, watch: _Watch, ordered: Pack, why: str) -> None:
        log.info("jobs come back", extra={"job": job, "text": why})
        watch.slow, watch.periods, watch.since_s = 0, 0, 0.0
        for each in ordered.jobs:
            if each in self._state.jobs:
                self._state.jobs[each].held_out = ()


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
