"""Carries actions out: a shell that asks `steps.py` for the next step of each, tells the jobs, and runs the commands."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.api.ports import Clock
from penstock_scheduler.model import (
    Action,
    Hold,
    Job,
    JobId,
    Migrate,
    Node,
    Outcome,
    Phase,
    Placement,
    Progress,
    Resize,
    Start,
)
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.kept_nodes import KeptNodes, Move, MoveStage, nodes_to_keep
from penstock_slurm.act.shrinking import Shrinking
from penstock_slurm.act.steps import MISPLACED, STUCK, Scope, Step, stays, step
from penstock_slurm.gateway import ControllerAway, JobGone, SlurmError, SlurmJob, SlurmWriter, Transient
from penstock_slurm.gateway.base import WAITING
from penstock_slurm.jobs import time_limits
from penstock_slurm.jobs.messages import say
from penstock_slurm.jobs.states import LEAVING
from penstock_slurm.observe.lost_gpus import LostGpus
from penstock_slurm.observe.managed import ManagedJobs
from penstock_slurm.observe.view import Scene, Spooled
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.share.agents import SlurmAgents

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Acting:
    """Acts on what the last observation saw.

    Args:
        sharing: what lets jobs share GPUs, also if only jobs from before still do.
    """

    writer: SlurmWriter
    spool: Spool
    clock: Clock
    settings: SlurmSettings
    managed: ManagedJobs
    lost_gpus: LostGpus
    shrinking: Shrinking
    sharing: SlurmAgents | None
    scene: Scene
    """The last observation."""
    free: dict[str, int] = field(default_factory=dict)
    """Node -> GPUs that no job holds in Slurm, less those of the steps since."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """The managed nodes, as last seen."""
    making_room: frozenset[str] = frozenset()
    """Nodes where Slurm stops plain jobs for jobs that were sent there."""
    due_s: float = math.inf
    """Since when the ordinary job waits that has waited longest for GPUs; infinite: none waits."""
    kept: KeptNodes = field(init=False)
    _wanted: dict[JobId, Placement] = field(default_factory=dict, init=False)
    """Where the jobs of the last actions go whose GPUs are kept. See `_keeps_its_gpus`."""

    def __post_init__(self) -> None:
        self.kept = KeptNodes(self.writer)

    def act(self, actions: Sequence[Action]) -> tuple[list[Outcome], bool]:
        """Take each action one step further. Returns the outcomes, and whether Slurm has gone away meanwhile.

        The commands of all actions go out together: the first command of each action, then the second command of those whose
        first one succeeded, and so on. So no job has two commands in flight, and a thousand jobs cost a few calls.

        Raises:
            ClusterAway: Slurm does not answer, and nothing was done.
        """
        assert len({action.job for action in actions}) == len(actions), "one action a job"
        steps = [self._take_step(action) for action in actions]
        self._wanted = dict(self._protected(actions))
        now_s = self.clock.now_s()
        self.kept.keep(self._nodes_to_keep(steps), now_s)
        failed = self._write(steps)
        done = {each.job for each in steps if each.job not in failed}
        self.kept.keep(self._nodes_to_keep(steps, done), now_s)
        outcomes = [
            each.outcome if each.job not in failed else _failed(each.outcome, failed[each.job]) for each in steps
        ]
        for each in outcomes:
            if each.progress is Progress.FAILED:
                self._count(each)
        return outcomes, any(isinstance(error, ControllerAway) for error in failed.values())

    def _nodes_to_keep(self, steps: Sequence[Step], done: Collection[JobId] = ()) -> frozenset[str]:
        """See `kept_nodes`. `done`: the jobs whose commands Slurm has carried out."""
        if not steps:
            return frozenset()
        moves, free, emptying = [], dict(self.free), set[str]()
        for each in steps:
            record, job = self.managed.records.get(each.job), self.managed.jobs.get(each.job)
            if record is None or job is None:
                continue
            stops = record.state in LEAVING or any(write.kind == "requeue_hold" for write in each.writes)
            if stops and job.allocation is not None:
                emptying |= set(job.allocation.nodes)
            sends = each.new_run or any(write.kind == "put_first" for write in each.writes)
            sent = sends and each.job in done
            if each.job not in self._wanted:
                continue
            if sends and not sent:
                for node, gpus in _counted(each, job).items():
                    free[node] = free.get(node, 0) + gpus
            moves.append(self._move(each, record, job, stops=stops, sent=sent or not sends))
        return nodes_to_keep(moves, free, emptying) if moves else frozenset()

    def _move(self, step: Step, record: SlurmJob, job: Job, *, stops: bool, sent: bool) -> Move:
        """The move that a step belongs to, of a job whose GPUs are kept."""
        wanted = self._wanted[step.job]
        if record.state in WAITING:
            sent = sent and (job.phase is Phase.STARTING or step.new_run)
            return Move(MoveStage.SENT if sent else MoveStage.STOPPED, _gpus(wanted))
        if stops:
            return Move(MoveStage.STOPPED, _gpus(wanted))
        return Move(MoveStage.SAVING, _more(wanted, job))

    def _keeps_its_gpus(self, action: Start | Resize | Migrate, record: SlurmJob, job: Job) -> bool:
        """Whether no other job may have the GPUs of an action's placement. In the cloud, no others can.

        They belong to a job that moves, and to one that has waited longer than any ordinary job. Shared GPUs are kept until the
        placeholder jobs that take them have been submitted: the reservation would keep these away, too.
        """
        if action.placement.partition == self.settings.cloud_partition:
            return False
        if record.state not in WAITING:
            return True
        if self._agents is not None and self._agents.takes_gpus_for(job.id):
            return False
        return (math.isfinite(self.due_s) and job.submit_s <= self.due_s) or self.moves(job)

    def _protected(self, actions: Iterable[Action]) -> Iterator[tuple[JobId, Placement]]:
        """The jobs whose GPUs are kept, and where they go."""
        for action in actions:
            record, job = self.managed.records.get(action.job), self.managed.jobs.get(action.job)
            if record is None or job is None or not isinstance(action, Start | Migrate | Resize):
                continue
            if self._keeps_its_gpus(action, record, job):
                yield action.job, action.placement

    def resume(self, wanted: Mapping[JobId, Placement]) -> None:
        """Jobs were sent to these placements before a restart."""
        self._wanted = dict(wanted)

    def on_way(self) -> Mapping[str, int]:
        """Node -> GPUs that are kept for jobs, beside those that they hold there by now."""
        found: Counter[str] = Counter()
        for job_id, wanted in self._wanted.items():
            if (job := self.managed.jobs.get(job_id)) is not None:
                found.update(+Counter(_more(wanted, job)))  # what it gives back is still its own
        return found

    def moves(self, job: Job) -> bool:
        """Whether Penstock has stopped a job to move it, and it does not run yet."""
        control = self.spool.control(job.id)
        return control is not None and control.moved_s is not None

    def _count(self, failed: Outcome) -> None:
        """Remember that a pending job could not be started. The cloud counts by itself what its nodes do."""
        action, record = failed.action, self.managed.records.get(failed.action.job)
        if record is None or record.state not in WAITING or not isinstance(action, Start | Migrate | Resize):
            return
        if action.placement.partition != self.settings.cloud_partition:
            lack, now_s = record.reason == "Resources", self.clock.now_s()
            self.managed.unstarted.refused(record.id, action.placement, failed.text, now_s, nodes_lack=lack)

    def forget_moves(self, actions: Sequence[Action]) -> None:
        """Forget the moves of jobs that wait without a placement: waiting is no cost of moving."""
        placed = {action.job for action in actions if not isinstance(action, Hold)}
        for job_id, record in self.managed.looked.items():
            if job_id in placed or self.managed.jobs[job_id].phase is not Phase.QUEUED:
                continue
            control = self.spool.control(job_id)
            if control is not None and control.moved_s is not None:
                self.spool.tell(control.model_copy(update={"moved_s": None}), record.uid)

    def _write(self, steps: Sequence[Step]) -> dict[JobId, SlurmError]:
        """Run the steps' commands. Returns the jobs whose commands failed.

        If Slurm goes away in the middle, that is an error of the jobs with commands left: what was done for the others counts.

        Raises:
            ClusterAway: Slurm does not answer, and nothing was done.
        """
        failed: dict[JobId, SlurmError] = {}
        done = 0
        for wave in itertools.count():
            writes = [each.writes[wave] for each in steps if len(each.writes) > wave and each.job not in failed]
            if not writes:
                return failed
            before_s, away = self.clock.now_s(), None
            for write, error in zip(writes, self.writer.write(writes), strict=True):
                if isinstance(error, ControllerAway):
                    away = error
                if error is not None:
                    failed[write.job_id] = error
                    continue
                done += 1
                if write.kind == "requeue_hold":
                    self.managed.remembered.stopped(self.managed.records[write.job_id], before_s, self.clock.now_s())
            if away is not None:
                if not done:
                    raise ClusterAway(str(away)) from away
                left = {each.job for each in steps if len(each.writes) > wave + 1}
                return dict.fromkeys(left, away) | failed
        raise AssertionError("the waves end")

    def _take_step(self, action: Action) -> Step:
        """The next step of an action. What it tells the job is told; its commands are still to be run."""
        slurm_job, job = self.managed.records.get(action.job), self.managed.jobs.get(action.job)
        if slurm_job is None or job is None:
            return Step(Outcome(action, Progress.DONE, "it has ended"))
        scope = self._scope(action, slurm_job, job)
        if isinstance(action, Resize) and (outcome := self.shrinking.shrink(action, scope)) is not None:
            return Step(outcome)
        found = step(action, scope, self.settings)
        if found.control is not None:
            epoch = {"epoch": self.spool.next_epoch(job.id)} if found.new_run else {}
            self.spool.tell(found.control.model_copy(update=epoch), slurm_job.uid)
        self._signal(found, scope)
        if found.message:
            say(self.writer, slurm_job, found.message)
        if found.new_run:
            self.managed.remembered.tries[job.id, action.round] = scope.tries + 1
        for node, gpus in found.freed.items():
            self.free[node] = self.free.get(node, 0) + gpus
        return found

    def _scope(self, action: Action, slurm_job: SlurmJob, job: Job) -> Scope:
        """What is known of an action's job. A job that only waits costs no reading of the spool."""
        waits, now_s, remembered = slurm_job.state in WAITING, self.clock.now_s(), self.managed.remembered
        if waits and isinstance(action, Hold) and slurm_job.held:
            return Scope(slurm_job, job, Spooled(), now_s)
        spooled = self.managed.spooled(slurm_job)
        misplaced = None
        if self.shrinking.stuck(slurm_job):
            misplaced = STUCK
        elif self.sharing is not None and job.id in self.sharing.misplaced:  # since this round, perhaps
            misplaced = MISPLACED
        shares = waits and self._shares(action)
        moves = not waits and not stays(action, job, misplaced=misplaced is not None)
        run = remembered.limited.get(job.id)
        grace_s, counts_total = self.settings.time_limit_grace_s, self.settings.time_limit == "total"
        free, kept_back, limit_s, first = {}, "", None, False
        if waits and not isinstance(action, Hold):
            first = self._keeps_its_gpus(action, slurm_job, job)
            free = {node: self.free.get(node, 0) - self._reserved(node) for node in action.placement.nodes}
            self._count_preemption(job, action.placement, free, now_s)
            if shares and self.sharing is not None:
                kept_back = self.sharing.keeps_back(job.id, action.placement.nodes[0])
            wanted = action.placement.partition
            left_s = time_limits.next_limit_s(slurm_job, run, spooled.control) if counts_total else None
            limit_s = time_limits.limit_there_s(slurm_job, left_s, wanted, self.scene.max_time_s.get(wanted), now_s)
        return Scope(
            slurm=slurm_job,
            job=job,
            spooled=spooled,
            now_s=now_s,
            silent=self._silent(slurm_job),
            lacks_gpus=self.lost_gpus.lacks(slurm_job),
            misplaced=misplaced,
            taken=self._taken(action, moves=moves),
            shares=shares,
            first=first,
            hold_lifted=job.id in self.managed.holds.lifted,
            stand_in=self._agents is not None and self._agents.stand_in,
            kept_back=kept_back,
            leaves_a_gap=moves and self.sharing is not None and self.sharing.leaves_a_gap(job.id),
            free=free,
            released_s=remembered.released_s.get(job.id, now_s),
            makes_room=now_s < remembered.room_until_s.get(job.id, 0.0),
            revoked_for_s=remembered.revoked_for_s(slurm_job, now_s),
            tries=remembered.tries.get((job.id, action.round), 0),
            one_record=self.managed.shares_record(slurm_job),
            signalled=remembered.signalled.get(job.id),
            types_stay=self.scene.rules.features.gpu_types_stay,
            limit_s=limit_s,
            left_s=time_limits.left_s(run, spooled.control, grace_s) if counts_total and run is not None else None,
        )

    def _silent(self, job: SlurmJob) -> bool:
        """Whether one of a job's nodes does not respond, or boots. The scene does not know the cloud's nodes."""
        away = self.settings.cloud_partition in job.partition
        boots = job.state == "CONFIGURING" and (away or job.id in self.scene.booting)
        return boots or not self.scene.silent.isdisjoint(job.nodes)

    def _taken(self, action: Action, *, moves: bool) -> bool:
        """Whether others hold the GPUs of an action's placement by now, so that its job would lose its own for nothing."""
        if not moves or not isinstance(action, Resize | Migrate):
            return False
        there = ((share.gpus, self.nodes.get(share.node)) for share in action.placement.shares)
        return any(node is not None and node.gpus_for_us < gpus for gpus, node in there)

    def _count_preemption(self, job: Job, wanted: Placement, free: dict[str, int], now_s: float) -> None:
        """Add to the free GPUs those that Slurm takes from plain jobs for this one, and note that it does so."""
        above = job.outranks
        if above is None or wanted.partition != above.partition:
            return
        for name in wanted.nodes:
            if (node := self.nodes.get(name)) is not None:
                free[name] += node.without(above.ranks).gpus_for_us - node.gpus_for_us
            if name in self.making_room and job.phase is Phase.STARTING:
                self.managed.remembered.room_until_s.setdefault(job.id, now_s + above.within_s)

    def _shares(self, action: Action) -> bool:
        """Whether a pending job is to start on GPUs of the GPU reservation."""
        return self._agents is not None and self._agents.takes(action)

    @property
    def _agents(self) -> SlurmAgents | None:
        """The agents, if jobs may begin to share."""
        return self.sharing if self.settings.agents else None

    def _reserved(self, node: str) -> int:
        return self.sharing.reserved(node) if self.sharing is not None else 0

    def _signal(self, found: Step, scope: Scope) -> None:
        """Signal a request once to a run that has registered a handler. Without the signal the run may still read the request."""
        control = found.control or scope.spooled.control
        if found.signal is None or control is None or control.request is None:
            return
        self.managed.remembered.signalled[found.job] = control.request.id
        try:
            self.writer.signal(found.job, found.signal)
        except SlurmError as error:
            log.warning("cannot send SIGUSR2", extra={"job": found.job, "text": str(error)})


def _gpus(where: Placement) -> dict[str, int]:
    """Node -> GPUs of a placement."""
    return {share.node: share.gpus for share in where.shares}


def _more(wanted: Placement, job: Job) -> dict[str, int]:
    """Node -> GPUs of a placement beside those that its job holds there; negative: it gives some back."""
    held = _gpus(job.allocation) if job.allocation is not None else {}
    return {node: gpus - held.get(node, 0) for node, gpus in _gpus(wanted).items()}


def _counted(step: Step, job: Job) -> Mapping[str, int]:
    """Node -> GPUs that are counted for a job which Slurm does not start there yet."""
    if step.new_run or job.allocation is None:
        return {node: -gpus for node, gpus in step.freed.items()}
    return _gpus(job.allocation)


def _failed(outcome: Outcome, error: SlurmError) -> Outcome:
    """The outcome of an action after one of its commands failed."""
    if isinstance(error, JobGone):
        return Outcome(outcome.action, Progress.DONE, "it has ended")
    if isinstance(error, Transient | ControllerAway):
        return Outcome(outcome.action, Progress.UNDER_WAY, f"will be tried again: {error}")
    return Outcome(outcome.action, Progress.FAILED, str(error))
