"""Slurm behind the scheduler's `Cluster` port: a thin shell that reads, calls the pure core, and writes.

`view.py` makes of Slurm's records what the scheduler sees, and `steps.py` turns an action into the next commands. Everything is
derived anew from Slurm and the spool at each observation. What this object remembers, such as when it first saw a job pending,
only makes it wait longer after a restart of the daemon; it never does anything twice. The epoch of the next run is in the
spool before the job is released.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler import report_quota
from penstock_scheduler.errors import ClusterAway
from penstock_scheduler.model import (
    Action,
    ClusterState,
    EndedRun,
    Hold,
    Job,
    JobId,
    Node,
    Outcome,
    Phase,
    Progress,
    Resize,
    Stop,
    WaitingJob,
)
from penstock_scheduler.ports import Clock, SpecCheck
from penstock_scheduler.report_quota import ReportQuota
from penstock_scheduler.spool import Spool
from penstock_slurm import plain_jobs, time_limits
from penstock_slurm.agents import SlurmAgents
from penstock_slurm.begin_times import BeginTimes, let_deadlines_count
from penstock_slurm.cloud_nodes import SlurmCloudNodes
from penstock_slurm.endings import Endings
from penstock_slurm.gateway import ControllerAway, Gateway, JobGone, SlurmError, SlurmJob, SlurmNode, Transient
from penstock_slurm.gateway.base import ENDED
from penstock_slurm.holds import Holds
from penstock_slurm.lost_gpus import LostGpus
from penstock_slurm.messages import note_shares, say
from penstock_slurm.notes import waits_for
from penstock_slurm.pauses import measured
from penstock_slurm.records import Records, expect_partitions, read, unknown_values
from penstock_slurm.remembered import Remembered, StateLog
from penstock_slurm.reused_ids import ReusedIds
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.shrinking import Shrinking
from penstock_slurm.site import SlurmSite, gpu_limits, reserved
from penstock_slurm.states import HOLDING, LEAVING, WAITING
from penstock_slurm.steps import Scope, Step, stays, step
from penstock_slurm.view import (
    Scene,
    SortedJobs,
    Spooled,
    Views,
    accounted_run,
    ended_run,
    free_gpus,
    gpu_type,
    node_views,
    partition_views,
    silent_nodes,
    sort_jobs,
    unlisted_nodes,
)

log = logging.getLogger(__name__)

RECENT_S = 86_400.0
"""How far back a new daemon searches for reports of jobs that ended while no daemon ran."""

UNHEARD_S = 300.0
"""For how long after its start a run that has reported nothing is looked at in each tick."""


class SlurmCluster:
    """The cluster; see the module."""

    def __init__(
        self,
        gateway: Gateway,
        spool: Spool,
        clock: Clock,
        settings: SlurmSettings,
        check: SpecCheck,
        cloud_nodes: SlurmCloudNodes | None = None,
        sharing: SlurmAgents | None = None,
    ) -> None:
        """`sharing` is also needed if the settings have no agents any more, for jobs that still share."""
        self._sharing = sharing
        self._agents = sharing if settings.agents else None
        self._cloud_nodes = cloud_nodes
        self._gateway, self._spool, self._clock = gateway, spool, clock
        self._settings, self._check = settings, check
        self._site = SlurmSite(gateway, clock, settings)
        self._lost_gpus = LostGpus(gateway, spool)
        self._shrinking = Shrinking(gateway, spool)
        self._quota = ReportQuota()
        self._reused_ids = ReusedIds(spool)
        self._begin_times = BeginTimes(gateway, settings.plain_after_s)
        self._endings = Endings(spool.control)
        self._states = StateLog()
        self._holds = Holds(gateway, spool)
        self._remembered = Remembered()
        self._views = Views()
        self._has_observed = False
        self._scene = Scene(clock.now_s(), settings.partitions, (), {})
        self._slurm_nodes: dict[str, SlurmNode] = {}
        self._slurm_jobs: dict[JobId, SlurmJob] = {}
        self._jobs: dict[JobId, Job] = {}
        self._not_yet: dict[JobId, SlurmJob] = {}
        """Jobs that wait for what their user requested."""
        self._plain: dict[JobId, bool] = {}
        """Jobs without a job spec -> whether they had one before."""
        self._held: dict[JobId, SlurmJob] = {}
        """Pending jobs that somebody holds."""
        self._waiting: tuple[WaitingJob, ...] = ()
        """Both of these, for people."""
        self._one_record: set[int] = set()
        """Numbers of job records that several elements of an array share."""
        self._free: dict[str, int] = {}
        self._gone: dict[JobId, SlurmJob | None] = {}
        self._unheard: set[JobId] = set()
        """Jobs that were asked to save, or have begun a moment ago: something waits for their reports."""
        self._slurm_ids: set[JobId] = set()
        """All jobs that Slurm has listed."""
        self._owners: dict[JobId, int] = {}
        self._saved: set[JobId] = set()
        """Jobs that have reported a checkpoint."""
        self._reporting = spool.recent(clock.now_s() - RECENT_S)

    # --- observing

    def observe(self) -> ClusterState:
        """Nodes and jobs with a job spec in the managed partitions. Four Slurm calls, whatever the number of jobs.

        Raises:
            ClusterAway: Slurm does not answer.
            RoundFailed: a managed partition does not exist.
        """
        known = self._jobs.keys() | self._states.jobs
        look_back = bool(self._endings.awaited) or not self._has_observed
        records = read(self._gateway, self._slurm_jobs, known, look_back=look_back)
        cloud = self._settings.cloud_partition
        ours = (*self._settings.partitions, *([cloud] if cloud else []))
        expect_partitions(ours, records.partitions)
        slurm_jobs = records.jobs if self._sharing is None else self._sharing.reservations.saw(records.jobs)
        replaced = self._reused_ids.look(slurm_jobs)
        slurm_jobs = tuple(job for job in slurm_jobs if job.id not in replaced) if replaced else slurm_jobs
        self._has_observed, self._gone = True, {**records.gone, **dict.fromkeys(replaced)}
        found = sort_jobs(
            slurm_jobs,
            ours,
            cleared=self._cleared,
            sent=lambda job: (control := self._reused_ids.control(job)) is not None and control.nodes is not None,
            was_managed=self._was_managed,
            check=self._check,
        )
        for refusal in found.refused:
            say(self._gateway, next(job for job in slurm_jobs if job.id == refusal.job), refusal.text)
        self._plain = {job.id: self._plain[job.id] for job in slurm_jobs if job.id in self._plain}
        managed = (slurm_job for slurm_job, _ in found.managed.values())
        every_node = (*records.nodes, *unlisted_nodes(managed, records.nodes, self._slurm_nodes))
        self._slurm_nodes = {node.name: node for node in every_node}
        in_cloud = [node for node in every_node if cloud in node.partitions]
        slurm_nodes = [node for node in every_node if cloud not in node.partitions]
        if self._cloud_nodes is not None:
            self._cloud_nodes.saw(in_cloud, slurm_jobs)
        scene = self._scene = self._see(records, slurm_jobs)
        self._slurm_ids = {job.id for job in slurm_jobs}
        gone = set(self._jobs)
        self._take_over(found, slurm_jobs)
        self._endings.saw(gone - self._jobs.keys(), records.ended)
        nodes = self._nodes(records, slurm_nodes, slurm_jobs)
        cleared = {job_id for job_id, slurm_job in self._slurm_jobs.items() if self._cleared(slurm_job)}
        if self._sharing is not None:
            names = {node.name for node in nodes}
            shared = [node for node in slurm_nodes if node.name in names]
            self._sharing.saw(shared, self._jobs, self._slurm_jobs, cleared, scene.up, scene.types, scene.silent)
            for job_id, job in self._jobs.items():
                if (suspension := self._sharing.watch.suspension(job_id)) is not None:
                    self._jobs[job_id] = dataclasses.replace(job, suspension=suspension)
        self._free = free_gpus(nodes, in_cloud, self._jobs.values(), cleared)
        # To Slurm's limits what runs in the cloud counts too, but no policy takes it away: so it is what others hold.
        clouds = {node.name for node in in_cloud}
        here = {job.id: job for job in self._slurm_jobs.values() if clouds.isdisjoint(job.nodes)}
        limits = gpu_limits(scene.rules.limits, here, (job for job in slurm_jobs if job.state in HOLDING | LEAVING))
        ended = (ended_run(job, self._spool.control, scene) for job in records.ended)
        return ClusterState(
            nodes,
            tuple(self._jobs.values()),
            tuple(found.refused),
            limits,
            tuple(run for run in ended if run),
            partition_views(records.partitions, scene.managed),
            unknown_values(records),
            self._waiting,
            replaced,
        )

    def _see(self, records: Records, slurm_jobs: Sequence[SlurmJob]) -> Scene:
        """What this observation knows beside the single jobs."""
        now_s, rules = self._clock.now_s(), self._site.rules()
        ended = [job for job in records.ended if job.id in records.gone]
        counts_gpus = rules.features.counts_gpus
        self._lost_gpus.check((*slurm_jobs, *ended), self._jobs, counts_gpus=counts_gpus)
        return Scene(
            now_s=now_s,
            managed=self._settings.partitions,
            up=tuple(name for name in self._settings.partitions if records.partitions[name].up),
            types={node.name: gpu_type(node) for node in self._slurm_nodes.values()},
            silent=silent_nodes(self._slurm_nodes.values()),
            max_time_s={name: each.max_time_s for name, each in records.partitions.items()},
            rules=rules,
            stopped_s=self._remembered.stopped_s,
            without_gpus={job.id for job in slurm_jobs if self._lost_gpus.lacks(job)},
            misplaced=self._sharing.misplaced if self._sharing is not None else (),
        )

    def _take_over(self, found: SortedJobs, slurm_jobs: Sequence[SlurmJob]) -> None:
        """Take over the managed jobs of this observation."""
        self._slurm_jobs, self._jobs, self._not_yet, self._held, self._unheard = {}, {}, {}, {}, set()
        waiting: list[WaitingJob] = []
        self._holds.look()
        self._views.begin(self._scene)
        self._views.forget(found.managed.keys())
        for job_id, (slurm_job, spec) in found.managed.items():
            self._reused_ids.begin(slurm_job)
            spooled = self._spooled(slurm_job)
            if self._holds.settle(slurm_job, spooled.control):
                spooled = self._spooled(slurm_job)
            now, job = self._views.of(slurm_job, spec, spooled, self._scene)
            self._states.saw(job_id, now)
            if job is None:
                continue
            begun_s = slurm_job.start_s if spooled.present is None and slurm_job.state in HOLDING else None
            if job.phase is Phase.STOPPING or (begun_s is not None and self._scene.now_s - begun_s < UNHEARD_S):
                self._unheard.add(job_id)
            pending = slurm_job.state in WAITING
            text = self._holds.text(slurm_job, spooled.control)
            other = waits_for(slurm_job, self._scene.now_s) if pending and not text else ""
            if text or other:
                (self._held if text else self._not_yet)[job_id] = slurm_job
                queued = dataclasses.replace(job, phase=Phase.QUEUED, allocation=None)
                code: Literal["held", "waiting-cluster"] = "held" if text else "waiting-cluster"
                waiting.append(WaitingJob(queued, code, text or f"waits for {other}"))
            else:
                self._slurm_jobs[job_id], self._jobs[job_id] = slurm_job, job
        self._waiting = tuple(waiting)
        self._holds.forget({job_id for job_id, job in self._gone.items() if job is None or job.state in ENDED})
        self._owners |= {job_id: job.uid for job_id, job in self._slurm_jobs.items()}
        runs = self._remembered.saw(self._slurm_jobs, self._jobs, slurm_jobs, self._scene.now_s)
        self._lost_gpus.forget(runs)
        self._shrinking.forget(runs)
        numbers = Counter(job.number for job in slurm_jobs if job.array_job_id is not None)
        self._one_record = {number for number, count in numbers.items() if count > 1}

    def _nodes(
        self, records: Records, slurm_nodes: Sequence[SlurmNode], slurm_jobs: Iterable[SlurmJob]
    ) -> tuple[Node, ...]:
        """The managed nodes, with GPUs set aside for plain jobs."""
        scene, placeholders = self._scene, {}
        if self._sharing is not None:
            reservations = self._sharing.reservations
            placeholders = {each.node: reservations.gpus(each.node) for each in reservations.placeholders}
        kept_for = reserved(records.reservations, scene.now_s, self._settings.reservation_lead_s)
        jobs = {job_id: (self._slurm_jobs[job_id], job) for job_id, job in self._jobs.items()}
        nodes = node_views(slurm_nodes, jobs, scene, kept_for=kept_for, placeholders=placeholders)
        ours = self._slurm_jobs.keys() | self._not_yet.keys() | self._held.keys()
        plain = (job for job in slurm_jobs if job.id not in ours)
        patience_s = self._settings.plain_patience_s
        return plain_jobs.with_room(
            nodes, plain, self._jobs.values(), scene.managed, now_s=scene.now_s, patience_s=patience_s
        )

    def _was_managed(self, job: SlurmJob) -> bool:
        """Whether a job without a job spec had one before. The spool is asked once a job."""
        if job.id in self._slurm_jobs or job.id in self._held or job.id in self._not_yet:
            self._plain[job.id] = True
        elif job.id not in self._plain:
            self._plain[job.id] = self._reused_ids.control(job) is not None
        return self._plain[job.id]

    def _cleared(self, job: SlurmJob) -> bool:
        """Whether Penstock has cleared the job's GRES, because it shares GPUs that the GPU reservation holds."""
        control = self._reused_ids.control(job) if job.gpus_per_node is None else None
        return control is not None and control.shares

    def _spooled(self, job: SlurmJob) -> Spooled:
        """What the spool has of a job now."""
        control, epoch = self._spool.control(job.id), self._spool.newest_epoch(job.id)
        superseded = epoch is None or (control is not None and epoch < control.epoch)
        request = control.request if control is not None else None
        return Spooled(
            control=control,
            present=None if superseded or epoch is None else self._spool.started(job.id, epoch),
            epoch=epoch or 0,
            saved=request is not None and self._spool.answered(job.id, request.id) is not None,
        )

    # --- acting

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`. Acts on what the last `observe` saw.

        The commands of all actions go out together: the first command of each action, then the second command of those whose
        first one succeeded, and so on. So no job has two commands in flight, and a thousand jobs cost a few calls.
        """
        assert len({action.job for action in actions}) == len(actions), "one action a job"
        if self._sharing is not None:
            if self._agents is None:
                self._sharing.share(())
            running = [job for job in self._slurm_jobs.values() if job.state in HOLDING]
            note_shares(self._gateway, running, self._sharing.note)
        self._forget_moves(self._jobs.keys() - {action.job for action in actions if not isinstance(action, Hold)})
        stopped = self._lost_gpus.stop(self._slurm_jobs.values(), self._scene.silent)
        if self._sharing is not None:
            stopped |= self._sharing.watch.relieve(self._gateway, self._spool, self._saved)
        if self._cloud_nodes is not None:
            stopped |= self._cloud_nodes.take_stops()
        steps = [self._take_step(action) for action in actions]
        failed = self._write(steps)
        if not any(isinstance(error, ControllerAway) for error in failed.values()):
            self._holds.carry_out()
            now_s, waiting = self._clock.now_s(), (*self._slurm_jobs.values(), *self._not_yet.values())
            self._begin_times.renew(waiting, {action.job for action in actions}, now_s)
            let_deadlines_count(self._gateway, self._not_yet.values(), now_s)
        outcomes = [
            each.outcome if each.job not in failed else _failed(each.outcome, failed[each.job]) for each in steps
        ]
        return (*self._own(stopped, outcomes), *outcomes)

    def _own(self, stopped: Mapping[JobId, Stop], outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Outcomes of stops that no round decided, for the jobs' history."""
        found = []
        for job_id, stop in stopped.items():
            control = self._spool.control(job_id)
            hold = Hold(job_id, control.round if control is not None else 0)
            if not any(each.action.job == job_id and isinstance(each.action, Hold) for each in outcomes):
                found.append(Outcome(hold, Progress.DONE, stop.text, stop))
        return tuple(found)

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
            before_s, away = self._clock.now_s(), None
            for write, error in zip(writes, self._gateway.write(writes), strict=True):
                if isinstance(error, ControllerAway):
                    away = error
                if error is not None:
                    failed[write.job_id] = error
                    continue
                done += 1
                if write.kind == "requeue_hold":
                    self._remembered.stopped(self._slurm_jobs[write.job_id], before_s, self._clock.now_s())
            if away is not None:
                if not done:
                    raise ClusterAway(str(away)) from away
                left = {each.job for each in steps if len(each.writes) > wave + 1}
                return dict.fromkeys(left, away) | failed
        raise AssertionError("the waves end")

    def _take_step(self, action: Action) -> Step:
        """The next step of an action. What it tells the job is told; its commands are still to be run."""
        slurm_job, job = self._slurm_jobs.get(action.job), self._jobs.get(action.job)
        if slurm_job is None or job is None:
            return Step(Outcome(action, Progress.DONE, "it has ended"))
        scope = self._scope(action, slurm_job, job)
        if isinstance(action, Resize) and (outcome := self._shrinking.shrink(action, scope)) is not None:
            return Step(outcome)
        found = step(action, scope, self._settings)
        if found.control is not None:
            epoch = {"epoch": self._spool.next_epoch(job.id)} if found.new_run else {}
            self._spool.tell(found.control.model_copy(update=epoch), slurm_job.uid)
        self._signal(found, scope)
        if found.message:
            say(self._gateway, slurm_job, found.message)
        if found.new_run:
            self._remembered.tries[job.id, action.round] = scope.tries + 1
        for node, gpus in found.freed.items():
            self._free[node] = self._free.get(node, 0) + gpus
        return found

    def _scope(self, action: Action, slurm_job: SlurmJob, job: Job) -> Scope:
        """What is known of an action's job. A job that only waits costs no reading of the spool."""
        waits, now_s, remembered = slurm_job.state in WAITING, self._clock.now_s(), self._remembered
        if waits and isinstance(action, Hold) and slurm_job.held:
            return Scope(slurm_job, job, Spooled(), now_s)
        spooled = self._spooled(slurm_job)
        misplaced = self._sharing is not None and job.id in self._sharing.misplaced  # since this round, perhaps
        shares = waits and self._shares(action, slurm_job, job)
        moves = not waits and not stays(action, job, misplaced=misplaced)
        free, kept_back = {}, ""
        if waits and not isinstance(action, Hold):
            free = {node: self._free.get(node, 0) - self._reserved(node) for node in action.placement.nodes}
            if shares and self._sharing is not None:
                kept_back = self._sharing.keeps_back(job.id, action.placement.nodes[0])
        run = remembered.limited.get(job.id)
        grace_s, counts_total = self._settings.time_limit_grace_s, self._settings.time_limit == "total"
        limit_s = None
        if waits and not isinstance(action, Hold):
            wanted = action.placement.partition
            left_s = time_limits.next_limit_s(slurm_job, run, spooled.control, grace_s) if counts_total else None
            limit_s = time_limits.limit_there_s(slurm_job, left_s, wanted, self._scene.max_time_s.get(wanted), now_s)
        return Scope(
            slurm=slurm_job,
            job=job,
            spooled=spooled,
            now_s=now_s,
            silent=not self._scene.silent.isdisjoint(slurm_job.nodes),
            lacks_gpus=self._lost_gpus.lacks(slurm_job),
            misplaced=misplaced,
            shares=shares,
            stand_in=self._agents is not None and self._agents.stand_in,
            kept_back=kept_back,
            leaves_a_gap=moves and self._sharing is not None and self._sharing.leaves_a_gap(job.id),
            free=free,
            released_s=remembered.released_s.get(job.id, now_s),
            pending_s=now_s - remembered.pending_since_s.get((job.id, slurm_job.restarts), now_s),
            tries=remembered.tries.get((job.id, action.round), 0),
            one_record=slurm_job.number in self._one_record,
            signalled=remembered.signalled.get(job.id),
            limit_s=limit_s,
            left_s=time_limits.left_s(run, spooled.control, grace_s) if counts_total and run is not None else None,
        )

    def _shares(self, action: Action, slurm_job: SlurmJob, job: Job) -> bool:
        """Whether a pending job is to start on GPUs of the GPU reservation. If so, they are reserved for it."""
        if self._agents is None or isinstance(action, Hold) or len(action.placement.nodes) != 1:
            return False
        sent_with_gpus = job.phase is Phase.STARTING and slurm_job.gpus_per_node is not None
        node, gpus = action.placement.nodes[0], action.placement.gpus
        return not sent_with_gpus and self._agents.takes(job.id, node, gpus)

    def _reserved(self, node: str) -> int:
        return self._sharing.reserved(node) if self._sharing is not None else 0

    def _signal(self, found: Step, scope: Scope) -> None:
        """Signal a request once to a run that has registered a handler. Without the signal the run may still read the request."""
        control = found.control or scope.spooled.control
        if found.signal is None or control is None or control.request is None:
            return
        self._remembered.signalled[found.job] = control.request.id
        try:
            self._gateway.signal(found.job, found.signal)
        except SlurmError as error:
            log.warning("cannot send SIGUSR2", extra={"job": found.job, "text": str(error)})

    def _forget_moves(self, job_ids: Iterable[JobId]) -> None:
        """Forget the moves of jobs that wait without a placement: waiting is no cost of moving."""
        for job_id in job_ids:
            if self._jobs[job_id].phase is not Phase.QUEUED:
                continue
            control = self._spool.control(job_id)
            if control is not None and control.moved_s is not None:
                self._spool.tell(control.model_copy(update={"moved_s": None}), self._slurm_jobs[job_id].uid)

    # --- reports and accounts

    def reports(self) -> Sequence[Report]:
        """Reports in the spool. Jobs that have ended since the last observation are read for a last time.

        A job that its user cancels, or that reaches its time limit, is not managed any more, but still saves and reports it.
        """
        gone = self._reporting - self._jobs.keys()
        may_report = [
            job_id
            for job_id, job in self._jobs.items()
            if job.phase is not Phase.QUEUED or self._spool.control(job_id) is not None
        ]
        found = self._spool.read([*may_report, *sorted(gone)], self._owners, gone | self._unheard)
        self._saved |= {report.job_id for report in found if isinstance(report.body, Checkpointed)}
        self._saved &= {*self._reporting, *self._jobs}
        for report in found:
            self._measure_pause(report)
        kept, over = self._quota.admit(found, self._clock.now_s())
        for job_id in over & self._slurm_jobs.keys():
            say(self._gateway, self._slurm_jobs[job_id], report_quota.TEXT)
        self._states.ended(
            {job_id: job for job_id, job in self._gone.items() if job_id not in self._jobs}, self._spool.ended
        )
        self._reporting = self._jobs.keys() | (self._gone.keys() & self._states.jobs)
        self._owners = {job_id: uid for job_id, uid in self._owners.items() if job_id in self._reporting}
        self._spool.forget(self._reporting, self._slurm_ids)
        self._quota.forget(self._reporting)
        return kept

    def _measure_pause(self, report: Report) -> None:
        slurm_job = self._slurm_jobs.get(report.job_id)
        control = self._spool.control(report.job_id) if slurm_job is not None else None
        found = measured(control, report)
        if slurm_job is not None and found is not None:
            self._spool.tell(found, slurm_job.uid)
            pause_s = round(found.pauses_s[-1], 2)
            log.info("pause", extra={"round": found.round, "job": report.job_id, "pause_s": pause_s})

    def accounts(self, jobs: Collection[JobId], since_s: float) -> tuple[EndedRun, ...]:
        """See `ports.Accounts`: the records of slurmdbd, if there is one."""
        if not self._site.rules().features.counts_gpus:
            return ()
        try:
            runs = self._gateway.runs(jobs, since_s)
        except SlurmError as error:
            log.info("cannot read Slurm's accounts", extra={"jobs": len(jobs), "text": str(error)})
            return ()
        return tuple(
            accounted_run(run, None if run.gpus else self._spool.control(run.job_id), self._scene.types) for run in runs
        )


def _failed(outcome: Outcome, error: SlurmError) -> Outcome:
    """The outcome of an action after one of its commands failed."""
    if isinstance(error, JobGone):
        return Outcome(outcome.action, Progress.DONE, "it has ended")
    if isinstance(error, Transient | ControllerAway):
        return Outcome(outcome.action, Progress.UNDER_WAY, f"will be tried again: {error}")
    return Outcome(outcome.action, Progress.FAILED, str(error))
