"""The agent's status, which it writes for the daemon."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from penstock_profiles.files import write_whole
from penstock_scheduler import __version__
from penstock_scheduler.api.agent_messages import CarriedGroup, CarriedJob, NodeStatus, OrderedJob, status_file
from penstock_scheduler.model import JobUse
from penstock_scheduler.rounds.sharing.node import Groups
from penstock_slurm.agent.duty_cycles import frozen_for_s
from penstock_slurm.agent.node_state import NodeState
from penstock_slurm.share.topology import Links

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
