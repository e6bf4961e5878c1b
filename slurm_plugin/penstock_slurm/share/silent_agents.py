"""Agents that have gone silent, and what becomes of the jobs that they have suspended.

An agent writes its status every 5 s: that is its lease on the jobs that it has suspended. Nobody but the agent resumes
them, so an agent that is killed would leave them frozen for ever. Once it has been silent for `agent_patience_s`,
penstockd acts for it, through Slurm's controller, which needs nothing of the agent:

1. A suspended job whose GPUs no other job uses is resumed.
2. A suspended job whose GPUs another job uses starts again from its last checkpoint, if it has one. The other job is
   left alone.
3. A suspended job without a checkpoint stays suspended until its GPUs are free or its agent is back. Its user and the
   admins are told.
4. A suspended job whose GPU memory NVIDIA's driver has moved to the host is not resumed: its CUDA calls would wait for
   the agent, which has the driver move it back. It starts again from its last checkpoint, if it has one, and else waits
   for its agent.

Silence is measured with this host's clock from one heartbeat to the next, since a node's clock may differ. A daemon
that starts waits the whole patience. An agent that comes back finds some of its jobs running, and continues their time
slices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.api.agent_messages import AWAY_S, CarriedJob, NodeStatus
from penstock_scheduler.api.ports import Clock, SilentAgent
from penstock_scheduler.model import Job, JobId, Stop, StopCode, Suspension
from penstock_scheduler.people.units import clock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import SlurmError, SlurmJob, SlurmWriter
from penstock_slurm.jobs.holds import mark
from penstock_slurm.jobs.states import HOLDING, STILL

log = logging.getLogger(__name__)

SUSPENDED = "SUSPENDED"

MOVED = "NVIDIA's driver has moved its GPU memory to the host, from which only the agent has it moved back"


@dataclass(frozen=True, slots=True)
class Held:
    """A suspended job of a silent agent, and the jobs that run on its GPUs meanwhile."""

    job: Job
    slurm: SlurmJob
    node: str
    since_s: float
    """When its agent was last heard of, on this host's clock."""
    users: tuple[JobId, ...]
    moved: bool
    """Whether only its agent can have NVIDIA's driver move its GPU memory back."""


@dataclass(slots=True)
class SilentAgents:
    """Watches the agents' heartbeats.

    Args:
        clock: this host's.
        patience_s: for how long an agent may be silent before its jobs are resumed or started again.
    """

    clock: Clock
    patience_s: float
    _beats: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Node -> time of its agent's newest status by the node's clock, and when that was first read by this host's."""
    suspended: dict[JobId, Suspension] = field(default_factory=dict)
    """Why each job that is suspended, frozen or driven stands still, and what ends that."""
    frozen_s: dict[JobId, float] = field(default_factory=dict)
    """For how long its agent has kept each running job frozen, s. Slurm counts this time as running."""
    _held: tuple[Held, ...] = ()
    _silent: dict[str, float] = field(default_factory=dict)

    def saw(
        self,
        statuses: Mapping[str, NodeStatus],
        jobs: Mapping[JobId, Job],
        slurm_jobs: Mapping[JobId, SlurmJob],
        unreachable: Collection[str],
        off: Collection[str] = (),
    ) -> None:
        """Take over an observation.

        Args:
            statuses: newest status of each node's agent.
            jobs: the managed jobs.
            slurm_jobs: Slurm's records of them.
            unreachable: nodes that do not respond to Slurm. Their jobs are Slurm's matter.
            off: nodes that Slurm powers down or wakes. Their agents are not silent, nor are they at once when a node is awake.
        """
        self._hear(statuses, unreachable, off)
        carried = {each.job: (node, each) for node, status in statuses.items() for each in status.jobs}
        on_gpus = {
            job: (carried[job][0], frozenset(carried[job][1].devices))
            for job, record in slurm_jobs.items()
            if job in carried and record.state in HOLDING and record.state != SUSPENDED
        }
        held, self.suspended = [], {}
        self._see_driven({job: carried[job] for job in on_gpus})
        for job, record in slurm_jobs.items():
            if record.state not in STILL:
                continue
            if record.state != SUSPENDED:
                text = (
                    f"a signal has stopped it ({record.state} in Slurm); `scancel --full --signal=CONT {job}` ends that"
                )
                self.suspended[job] = Suspension(None, text)
                continue
            node, mine = carried.get(job, ("", None))
            if mine is None or mine.state not in ("suspended", "suspending"):
                text = f"somebody has suspended it in Slurm; `scontrol resume {job}` ends that"
                self.suspended[job] = Suspension(None, text)
                continue
            users = tuple(
                sorted(other for other, (at, its) in on_gpus.items() if at == node and not its.isdisjoint(mine.devices))
            )
            self.suspended[job] = Suspension(mine.since_s or None, self._why(node, mine, users))
            if node in self._silent:
                held.append(Held(jobs[job], record, node, self._silent[node], users, mine.cuda_checkpointed))
        self._held = tuple(held)

    def _see_driven(self, running: Mapping[JobId, tuple[str, CarriedJob]]) -> None:
        """Note which running jobs their agents freeze. If the agent is silent, its guard has thawed them."""
        self.frozen_s = {job: each.frozen_s for job, (_, each) in running.items() if each.frozen_s}
        for job, (node, each) in running.items():
            if each.driven and node not in self._silent:
                self.suspended[job] = _driven(node, each)

    def _hear(self, statuses: Mapping[str, NodeStatus], unreachable: Collection[str], off: Collection[str]) -> None:
        """Note which agents have written a newer status, and which are silent."""
        now_s = self.clock.now_s()
        self._beats = {
            node: before
            if (before := self._beats.get(node)) and before[0] == status.time_s and node not in off
            else (status.time_s, now_s)
            for node, status in statuses.items()
        }
        self._silent = {
            node: at_s for node, (_, at_s) in self._beats.items() if now_s - at_s > AWAY_S and node not in unreachable
        }

    def silent(self) -> tuple[SilentAgent, ...]:
        """The agents that are silent now, with the jobs that nobody resumes."""
        jobs: dict[str, list[JobId]] = {}
        for each in self._held:
            jobs.setdefault(each.node, []).append(each.job.id)
        return tuple(
            SilentAgent(node, since_s, tuple(sorted(jobs.get(node, ())))) for node, since_s in self._silent.items()
        )

    def relieve(self, writer: SlurmWriter, spool: Spool, saved: Collection[JobId]) -> dict[JobId, Stop]:
        """Act for the agents that have been silent for too long. Returns why, for each job that is stopped now.

        Args:
            writer: to Slurm.
            spool: where a stop is noted before it happens.
            saved: jobs that have completed a checkpoint.
        """
        stopped: dict[JobId, Stop] = {}
        resumed: set[str] = set()
        """Nodes where a job was resumed now. The next observation tells which GPUs are left."""
        for each in sorted(self._held, key=lambda held: (-held.job.sharing_priority, held.job.submit_s)):
            if self.clock.now_s() - each.since_s < self.patience_s:
                continue
            if not each.users and not each.moved:
                if each.node not in resumed and self._resume(writer, each):
                    resumed.add(each.node)
            elif each.job.movable and (each.job.spec.says_it_saves or each.job.id in saved):
                stop = Stop(
                    StopCode.SHARING,
                    f"the agent of {each.node}, which had suspended it, has been silent since {clock(each.since_s)}, and "
                    f"{_jobs(each.users) + ' on its GPUs' if each.users else MOVED}; it starts again from its last checkpoint",
                )
                if self._requeue(writer, spool, each, stop):
                    stopped[each.job.id] = stop
        return stopped

    def _resume(self, writer: SlurmWriter, held: Held) -> bool:
        try:
            writer.resume(held.job.id)
        except SlurmError as error:
            log.warning("cannot resume a job of a silent agent", extra={"job": held.job.id, "text": str(error)})
            return False
        text = f"the agent of {held.node} has been silent since {clock(held.since_s)}, and no job uses its GPUs"
        log.warning("job resumed", extra={"job": held.job.id, "node": held.node, "text": text})
        return True

    def _requeue(self, writer: SlurmWriter, spool: Spool, held: Held, stop: Stop) -> bool:
        try:
            mark(spool, held.slurm, held.slurm.restarts + 1)
            writer.requeue_hold(held.job.id)
        except SlurmError as error:
            log.warning("cannot requeue a job of a silent agent", extra={"job": held.job.id, "text": str(error)})
            return False
        log.warning("job stopped", extra={"job": held.job.id, "node": held.node, "text": stop.text})
        return True

    def _why(self, node: str, carried: CarriedJob, users: Sequence[JobId]) -> str:
        """Why a job that its agent has suspended stands still, and what ends that."""
        silent_s = self._silent.get(node)
        if silent_s is None:
            return carried.why or "other jobs have its GPUs in this time slice"
        until = clock(silent_s + self.patience_s)
        what = f"Penstock resumes it at {until} if the agent is still silent"
        if users or carried.cuda_checkpointed:
            now, end = (f"{_jobs(users)} on its GPUs meanwhile", "its GPUs are free")
            if carried.cuda_checkpointed:
                now, end = MOVED, "the agent is back"
            what = (
                f"{now}. If the agent is still silent at {until}, a job with a checkpoint starts again from that, and "
                f"another one stays suspended until {end}"
            )
        return f"the agent of {node}, which would resume it, has been silent since {clock(silent_s)}; {what}"


def _driven(node: str, carried: CarriedJob) -> Suspension:
    """Why a running job is driven or frozen by its agent."""
    share = f"the agent of {node} holds it to its share beside a guaranteed job"
    if carried.frozen:
        return Suspension(carried.since_s or None, f"{share}, and keeps it frozen for now", "frozen")
    text = f"{share}, and freezes it in turns; a program that uses Penstock's executor keeps to its share by itself"
    return Suspension(None, text, "driven")


def _jobs(jobs: Sequence[JobId]) -> str:
    return f"job {jobs[0]} runs" if len(jobs) == 1 else f"jobs {', '.join(jobs)} run"
