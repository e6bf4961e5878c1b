"""Measurements: how fast jobs train alone and beside others, and whether they do what they were told."""

from __future__ import annotations

import math

from penstock_scheduler.api.agent_messages import OrderedJob
from penstock_scheduler.model import JobId
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.node_state import NodeState

ALONE_S = 60.0
"""Length of a measurement of a job that has its GPUs to itself."""


class Measuring:
    """Reads what jobs report, and measures them."""

    def __init__(self, state: NodeState, groups: Groups, channels: Channels) -> None:
        self._state, self._groups, self._channels = state, groups, channels

    def read_statuses(self) -> None:
        """Read what each job reports."""
        for job in self._state.ordered_jobs:
            with self._state.guard("judge its reports", job.job):
                self._read_statuses(job)

    def _read_statuses(self, job: OrderedJob) -> None:
        state = self._state
        observed, local = state.observed(job.job), state.jobs[job.job]
        told = local.control.number
        observed.statuses = {}  # a job whose reports cannot be read counts as one that does not report
        with state.guard("read its reports", job.job):
            observed.statuses = self._channels.statuses(job.slurm_job, job.uid)
        statuses = observed.statuses.values()
        if not statuses or any(each.number != told for each in statuses):
            observed.obeyed = (-1, 0.0)
        elif observed.obeyed[0] != told:
            observed.obeyed = (told, min(max(each.time_s for each in statuses), state.now_s))
        if local.begun_s < math.inf:
            return
        if any(each.steps for each in statuses):
            local.begun_s = state.now_s
            pack = self._groups.pack_of(job.job)
            for each in pack.jobs if pack is not None else (job.job,):
                state.observed(each).begin_measuring()
        elif local.state == "running" and state.now_s - local.resumed_s >= state.settings.start_wait_s:
            local.begun_s = 0.0

    def obeys(self, job: JobId, at_s: float = math.inf) -> bool:
        """Whether the job carried out its present control message at that time. A job that never reports counts as
        obedient."""
        observed, local = self._state.observed(job), self._state.jobs[job]
        number, since_s = observed.obeyed
        silent = not observed.statuses and local.begun_s < math.inf
        # A job that the agent drives has its share whatever it reports.
        return silent or local.driven or (number == local.control.number and since_s <= at_s)

    def begin(self) -> None:
        """Begin measurements of the jobs that run as they were told, if all jobs of their pack do."""
        for job in self._state.ordered_jobs:
            local, observed = self._state.jobs[job.job], self._state.observed(job.job)
            first, pack = observed.first, self._groups.pack_of(job.job)
            if observed.mark is not None or first is None or local.state != "running":
                continue
            group = self._groups.group_of.get(job.job)
            # Its latest report may be from before its time slice, when the jobs beside it had another share.
            since_s = max(local.resumed_s, group.since_s if group is not None else 0.0)
            if first.time_s < since_s or first.suspended is not None:
                continue
            if pack is None or all(self.obeys(each, first.time_s) for each in pack.jobs):
                observed.mark = first

    # Jobs that have their GPUs to themselves.

    def measure_alone(self) -> None:
        """Measure the jobs that are in no group, `ALONE_S` at a time."""
        state = self._state
        for job in state.ordered_jobs:
            local, observed = state.jobs[job.job], state.observed(job.job)
            if job.job in self._groups.group_of or not job.running or local.gone or local.held_out:
                observed.alone_since_s = 0.0
            elif not observed.alone_since_s:
                observed.begin_measuring()
                observed.alone_since_s = state.now_s
                if job.job not in state.saved.account.moved_s:
                    self._groups.started(job.job, state.now_s)
            elif self._trained_s(job.job, observed.alone_since_s) >= ALONE_S:
                self.count_alone(job.job)

    def count_alone(self, job: JobId) -> None:
        """Count the time for which the job has had its GPUs to itself, and learn its speed if that was long enough."""
        observed = self._state.observed(job)
        seconds = self._trained_s(job, observed.alone_since_s)
        self._groups.ran_alone(job, seconds, self._state.now_s, ALONE_S)
        if seconds >= ALONE_S:
            self.learn_alone(job)
        observed.begin_measuring()
        observed.alone_since_s = self._state.now_s

    def learn_alone(self, job: JobId) -> None:
        """Take the present measurement for the job's speed and utilisation alone."""
        local, observed = self._state.jobs.get(job), self._state.observed(job)
        if local is None:
            return
        local.rate = observed.rate or local.rate
        if observed.busy:
            local.utilisation = min(sum(observed.busy) / len(observed.busy), 1.0)
        elif observed.first is not None and observed.first.utilisation is not None:
            local.utilisation = observed.first.utilisation

    def _trained_s(self, job: JobId, since_s: float) -> float:
        """Seconds since then for which a job that has GPUs has also started."""
        local = self._state.jobs.get(job)
        begun_s = local.begun_s if local is not None else 0.0
        return max(self._state.now_s - max(since_s, begun_s), 0.0)
