"""Slurm behind the scheduler's `Cluster` port.

Everything is derived anew from Slurm and the spool at each observation. What this object remembers, such as when it first saw
a job pending, only makes it wait longer after a restart of the daemon; it never does anything twice.

How a job moves from one placement to another, one step a tick::

    RUNNING --ask--> saves --answer or time limit--> requeuehold --> PENDING, held --pause--> place + release --> RUNNING

GPU types are chosen by partition and node list, with an untyped GPU count: Slurm 22.05 cannot change the type of a
pending job's GRES. The epoch of the next run is in the spool before the job is released.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from penstock_profiles.wire import ControlMessage, Report, Request, Started
from penstock_scheduler.errors import BadJobSpec, ClusterAway, RoundFailed
from penstock_scheduler.model import (
    Action,
    Adaptivity,
    ClusterState,
    EndedRun,
    Hold,
    Job,
    JobId,
    JobSpec,
    Node,
    Outcome,
    Phase,
    Placement,
    Progress,
    Refusal,
    Resize,
    Share,
    parse_spec,
)
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.ports import Clock, SpecCheck
from penstock_scheduler.spool import Spool
from penstock_slurm import plain_jobs, time_limits
from penstock_slurm.abilities import Abilities, Ability
from penstock_slurm.agents import SlurmAgents
from penstock_slurm.cloud_nodes import SlurmCloudNodes
from penstock_slurm.endings import exceeded_memory
from penstock_slurm.gateway import (
    ControllerAway,
    Gateway,
    JobGone,
    JobPlacement,
    Refused,
    SlurmError,
    SlurmJob,
    SlurmNode,
    TimedOut,
    Transient,
    Write,
)
from penstock_slurm.gateway.base import ENDED
from penstock_slurm.notes import SHARES, kept_by_begin, notes, overdue, plain_shape, waits_for, with_message, with_note
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.site import SlurmRules, SlurmSite, gpu_limits, reserved
from penstock_slurm.states import HOLDING, LEAVING, WAITING, Facts, State, state

log = logging.getLogger(__name__)

TRIES = 3
"""Attempts in one round to start a job that Slurm refuses."""

CLOCKS_DIFFER_S = 60.0
"""Largest expected difference between the clocks of Slurm and of the daemon."""

RECENT_S = 86_400.0
"""How far back a new daemon searches for reports of jobs that ended while no daemon ran."""

CHECKS = 20
"""Most jobs, in one observation, whose GPUs are requested from Slurm: about 5 ms each."""

MOST_RESTARTS = 1000
"""Restarts after which a job that fails without its GPUs is not requeued again, in case Slurm always starts it so."""

PAUSES = 8
"""Newest pauses of a job that are kept."""


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
        self._gateway = gateway
        self._spool = spool
        self._clock = clock
        self._settings = settings
        self._check = check
        self._site = SlurmSite(gateway, clock, settings)
        self._slurm_jobs: dict[JobId, SlurmJob] = {}
        self._jobs: dict[JobId, Job] = {}
        self._free: dict[str, int] = {}
        self._owners: dict[JobId, int] = {}
        self._silent: set[str] = set()
        self._types: dict[str, str] = {}
        self._states: dict[JobId, State] = {}
        """Job -> state as logged, of managed jobs and of jobs whose processes are still ending."""
        self._gone: dict[JobId, SlurmJob | None] = {}
        """Jobs of `_states` that Slurm lists as ending or ended, or (None) not at all."""
        self._has_observed = False
        self._asked_s = 0.0
        """When Slurm's list of jobs was requested."""
        self._reporting = spool.recent(clock.now_s() - RECENT_S)
        self._pending_since_s: dict[tuple[JobId, int], float] = {}
        self._released_s: dict[JobId, float] = {}
        self._refused_starts: dict[tuple[JobId, int], int] = {}
        self._runs: dict[JobId, time_limits.LimitedRun] = {}
        self._not_yet: dict[JobId, SlurmJob] = {}
        self._shared: set[int] = set()
        self._stopped_s: dict[tuple[JobId, int], float] = {}
        """(job, restarts of the run) -> when Penstock stopped it, because Slurm does not tell that of a requeued job."""
        self._signalled: dict[JobId, str] = {}
        self._shrunk: dict[tuple[JobId, int], list[tuple[str, ...]]] = {}
        """(job, restarts of the run) -> its nodes at each attempt to shrink it."""
        self._abilities = Abilities(spool.folder, gateway.version)
        self._without_gpus: dict[tuple[JobId, int], bool] = {}
        """(job, restarts of the run) -> whether Slurm has started it without its GPUs, as far as that was checked."""
        self._renewed_s: dict[JobId, float] = {}
        self._ending: dict[JobId, int] = {}
        """Jobs that are gone and whose end is not known yet -> MB that Penstock allocated on a node."""

    def observe(self) -> ClusterState:  # noqa: C901, PLR0915 (one pass over all records)
        """Nodes and jobs with a job spec in the managed partitions. Four Slurm calls, whatever the number of jobs.

        Raises:
            ClusterAway: Slurm does not answer.
            RoundFailed: a managed partition does not exist.
        """
        try:
            partitions = {partition.name: partition for partition in self._gateway.partitions()}
            slurm_nodes = self._gateway.nodes()
            self._asked_s = self._clock.now_s()
            slurm_jobs = self._gateway.jobs()
            reservations = self._gateway.reservations()
            # What became of jobs that are not listed any more; in the first observation, of all that Slurm remembers.
            gone = (self._jobs.keys() | self._states.keys()) - {
                job.id for job in slurm_jobs if job.state not in LEAVING
            }
            found = self._gateway.jobs(finished=True) if gone or self._ending or not self._has_observed else ()
        except SlurmError as error:
            raise ClusterAway(str(error)) from error
        cloud = self._settings.cloud_partition
        ours = {*self._settings.partitions, *([cloud] if cloud else [])}
        missing = [name for name in (*self._settings.partitions, *([cloud] if cloud else [])) if name not in partitions]
        if missing:
            raise RoundFailed(
                f"[slurm] partitions: Slurm has no partition {', '.join(missing)}; it has {', '.join(sorted(partitions))}"
            )
        if self._sharing is not None:
            slurm_jobs = self._sharing.reservations.saw(slurm_jobs)
        now_s, rules = self._clock.now_s(), self._site.rules()
        self._has_observed = True
        self._gone = dict.fromkeys(gone) | {job.id: job for job in found if job.id in gone}
        # A cloud node that boots is silent too, but it will answer.
        self._silent = {
            node.name
            for node in slurm_nodes
            if node.state & {"NOT_RESPONDING", "DOWN"} and "POWERING_UP" not in node.state
        }
        in_cloud: dict[str, SlurmNode] = {}
        if cloud:
            in_cloud = {node.name: node for node in slurm_nodes if cloud in node.partitions}
            slurm_nodes = tuple(node for node in slurm_nodes if node.name not in in_cloud)
            if self._cloud_nodes is not None:
                self._cloud_nodes.saw(in_cloud.values(), slurm_jobs)
        usable = tuple(name for name in self._settings.partitions if partitions[name].up)
        types = self._types = {node.name: gpu_type(node) for node in (*slurm_nodes, *in_cloud.values())}
        ended = tuple(run for job in found if (run := self._ended_run(job, types)) is not None)
        managed: dict[JobId, SlurmJob] = {}
        jobs: dict[JobId, Job] = {}
        refused: list[Refusal] = []
        not_yet: dict[JobId, SlurmJob] = {}
        self._check_gpus((*slurm_jobs, *(job for job in found if job.id in gone)), rules)
        for slurm_job in slurm_jobs:
            if slurm_job.state not in WAITING | HOLDING | LEAVING:
                continue
            if not set(slurm_job.partition) & ours:
                continue
            try:
                spec = self._spec(slurm_job)
                if spec is None:
                    continue
                _manageable(slurm_job, cleared=self._cleared(slurm_job))
                self._check(spec)
                if slurm_job.state in WAITING and waits_for(slurm_job, now_s):
                    not_yet[slurm_job.id] = slurm_job
                    continue
            except BadJobSpec as error:
                refused.append(Refusal(slurm_job.id, slurm_job.name, slurm_job.user, str(error)))
                self._say(slurm_job, str(error))
                continue
            job = self._job(slurm_job, spec, usable, types, rules)
            if job is not None:
                managed[slurm_job.id], jobs[slurm_job.id] = slurm_job, job
        self._log_exceeded_memory(set(self._jobs) - set(jobs), found)
        self._remember(managed, jobs, now_s)
        self._not_yet = not_yet
        numbers = Counter(job.number for job in slurm_jobs if job.array_job_id is not None)
        self._shared = {number for number, count in numbers.items() if count > 1}
        self._runs = time_limits.seen(self._runs, slurm_jobs, now_s)
        kept_for = reserved(reservations, now_s, self._settings.reservation_lead_s)
        nodes = tuple(
            dataclasses.replace(node, reservation=kept_for.get(node.name, ""), switch=rules.switches.get(node.name, ""))
            for node in self._nodes(slurm_nodes, jobs.values(), types, usable)
        )
        cleared = {job_id for job_id, slurm_job in managed.items() if self._cleared(slurm_job)}
        if self._sharing is not None:
            ours_too = [node for node in slurm_nodes if node.name in {each.name for each in nodes}]
            self._sharing.saw(ours_too, jobs, managed, cleared, usable, types)
        aside = self._for_plain_jobs(slurm_jobs, managed.keys() | not_yet.keys(), nodes, now_s)
        nodes = tuple(
            dataclasses.replace(node, gpus_others=node.gpus_others + aside.get(node.name, 0)) for node in nodes
        )
        if rules.features.memory:
            nodes = _with_memory(
                nodes, slurm_nodes, (job for job in jobs.values() if managed[job.id].state not in WAITING)
            )
        self._free = {node.name: node.gpus_for_us for node in nodes}
        self._free |= {node.name: sum(node.gpus.values()) for node in in_cloud.values()}
        for job in jobs.values():
            if job.allocation is not None and job.id not in cleared:
                for share in job.allocation.shares:
                    self._free[share.node] = self._free.get(share.node, 0) - share.gpus
        # To Slurm's limits what runs in the cloud counts too, but no policy takes it away: so it is what others hold.
        here = {job.id: job for job in managed.values() if in_cloud.keys().isdisjoint(job.nodes)}
        limits = gpu_limits(rules.limits, here, (job for job in slurm_jobs if job.state in HOLDING | LEAVING))
        return ClusterState(nodes, tuple(jobs.values()), tuple(refused), limits, ended)

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`. Acts on what the last `observe` saw.

        The commands of all actions go out together: the first command of each action, then the second command of those whose
        first one succeeded, and so on. So no job has two commands in flight, and a thousand jobs cost a few calls.
        """
        assert len({action.job for action in actions}) == len(actions), "one action a job"
        if self._sharing is not None:
            if self._agents is None:
                self._sharing.share(())
            self._note_shares(self._sharing)
        self._forget_moves(self._jobs.keys() - {action.job for action in actions if not isinstance(action, Hold)})
        self._stop_without_gpus()
        steps = [self._step(action) for action in actions]
        failed: dict[JobId, SlurmError] = {}
        for wave in itertools.count():
            writes = [step.writes[wave] for step in steps if len(step.writes) > wave and step.job not in failed]
            if not writes:
                break
            before_s = self._clock.now_s()
            for write, error in zip(writes, self._gateway.write(writes), strict=True):
                if isinstance(error, ControllerAway):
                    raise ClusterAway(str(error)) from error
                if error is not None:
                    failed[write.job_id] = error
                elif write.kind == "requeue_hold":
                    self._note_stop(write.job_id, before_s)
        self._leave_to_slurm({action.job for action in actions})
        self._let_deadlines_count()
        return tuple(
            step.outcome if step.job not in failed else _failed(step.outcome, failed[step.job]) for step in steps
        )

    def reports(self) -> Sequence[Report]:
        """Reports in the spool. Jobs that have ended since the last observation are read for a last time.

        A job that its user cancels, or that reaches its time limit, is not managed any more, but still saves and reports it.
        """
        found = self._spool.read(sorted(self._jobs.keys() | self._reporting), self._owners)
        self._measure_pauses(found)
        self._log_ends()
        self._reporting = self._jobs.keys() | (self._gone.keys() & self._states.keys())
        self._owners = {job_id: uid for job_id, uid in self._owners.items() if job_id in self._reporting}
        self._spool.forget(self._reporting)
        return found

    def accounts(self, jobs: Collection[JobId], since_s: float) -> tuple[EndedRun, ...]:
        """See `ports.Accounts`: the records of slurmdbd, if there is one."""
        if not self._site.rules().features.counts_gpus:
            return ()
        try:
            runs = self._gateway.runs(jobs, since_s)
        except SlurmError as error:
            log.info("cannot read Slurm's accounts", extra={"jobs": len(jobs), "text": str(error)})
            return ()
        found = []
        for run in runs:
            gpus = run.gpus
            if not gpus and (control := self._spool.control(run.job_id)) is not None and control.shares:
                gpus = control.gpus or 0  # Slurm counts its GPUs for the placeholder jobs of the GPU reservation
            each = gpus // max(len(run.nodes), 1)
            shares = tuple(Share(name, each) for name in sorted(run.nodes))
            gpu_type = self._types.get(run.nodes[0], "") if run.nodes else ""
            found.append(EndedRun(run.job_id, Placement(gpu_type, "", shares), run.start_s, run.end_s))
        return tuple(found)

    # --- observing

    def _spec(self, job: SlurmJob) -> JobSpec | None:
        """The job spec, from admin_comment (which only the site can write) or else from the comment. Raises BadJobSpec."""
        ours = notes(job)
        told = ours is not None and SPEC_KEY not in ours  # a message to the user may quote a job spec, but is none
        spec = (None if told else parse_spec(job.admin_comment)) or parse_spec(job.comment)
        if spec is not None and spec.trial_group == "array" and job.array_job_id is not None:
            return spec.model_copy(update={"trial_group": f"array {job.array_job_id}"})
        return spec

    def _say(self, job: SlurmJob, text: str) -> None:
        """Write a message to the job's user into its AdminComment, once, unless the site itself uses the field."""
        comment = with_message(job, text)
        if comment is None:
            return
        log.warning("message to a job's user", extra={"job": job.id, "user": job.user, "text": text})
        try:
            self._gateway.set_admin_comment(job.id, comment)
        except SlurmError as error:
            log.warning("cannot tell the job's user", extra={"job": job.id, "text": str(error)})

    def _cleared(self, job: SlurmJob) -> bool:
        """Whether Penstock has cleared the job's GRES, because it shares GPUs that the GPU reservation holds."""
        control = self._spool.control(job.id) if job.gpus_per_node is None else None
        return control is not None and control.shares

    def _note_shares(self, sharing: SlurmAgents) -> None:
        """Note which jobs share GPUs, for the accounts: Slurm counts these GPUs for placeholder jobs."""
        for job_id, slurm_job in self._slurm_jobs.items():
            comment = with_note(slurm_job, SHARES, sharing.note(job_id)) if slurm_job.state in HOLDING else None
            if comment is not None:
                try:
                    self._gateway.set_admin_comment(job_id, comment)
                except (ControllerAway, TimedOut) as error:
                    raise ClusterAway(str(error)) from error
                except SlurmError as error:
                    log.info("cannot note which jobs share", extra={"job": job_id, "text": str(error)})

    def _log_exceeded_memory(self, gone: set[JobId], found: Iterable[SlurmJob]) -> None:
        """Log which jobs ended because they exceeded the memory that Penstock allocated, with the remedy.

        Slurm takes no comment on a job that has ended; users learn it from `Submitter.fates`.
        """
        self._ending |= {
            job_id: control.memory_mb
            for job_id in gone  # also if no observation has shown it running
            if (control := self._spool.control(job_id)) is not None and control.memory_mb
        }
        known = {slurm_job.id: slurm_job for slurm_job in found}
        for job_id, memory_mb in list(self._ending.items()):
            ended = known.get(job_id)
            if ended is not None and ended.state in LEAVING:
                continue
            del self._ending[job_id]  # a job that goes on is not managed any more
            if ended is not None and ended.state in ENDED and (text := exceeded_memory(ended, memory_mb)):
                log.warning("job exceeded its memory", extra={"job": job_id, "user": ended.user, "text": text})

    def _job(
        self,
        slurm_job: SlurmJob,
        spec: JobSpec,
        partitions: tuple[str, ...],
        types: dict[str, str],
        rules: SlurmRules,
    ) -> Job | None:
        """The job as the scheduler sees it; None: it is ending for good."""
        control = self._spool.control(slurm_job.id)
        facts = self._facts(slurm_job, control)
        now = self._log_state(slurm_job.id, state(slurm_job, facts))
        allocation = None
        match now:
            case State.DONE:
                return None
            case State.HELD:
                phase = Phase.QUEUED
            case State.PLACING:
                phase = Phase.STARTING
                # A job that Slurm or its user has requeued waits for a begin time, two minutes by default: send it again.
                later = slurm_job.reason == "BeginTime" and (slurm_job.eligible_s or 0.0) > self._clock.now_s()
                if slurm_job.required_nodes and not later:
                    allocation = _placement(slurm_job, slurm_job.required_nodes, types, control)
            case _:
                if slurm_job.state in LEAVING and not facts.asked:
                    return None
                lacks = self._lacks_gpus(slurm_job)
                misplaced = self._sharing is not None and slurm_job.id in self._sharing.misplaced
                phase = Phase.STOPPING if facts.asked or lacks or misplaced else Phase.RUNNING
                allocation = None if lacks else _placement(slurm_job, slurm_job.nodes, types, control)
        allocation = _granted(allocation, control)
        # The first partition stays while it is down, because it decides which policy and rules apply. It has no nodes then.
        managed, told = self._settings.partitions, control.submitted_to if control is not None else None
        asked = (told,) if told in managed else slurm_job.partition
        mine = [name for at, name in enumerate(asked) if name in (partitions if at else managed)]
        return Job(
            id=slurm_job.id,
            name=slurm_job.name,
            user=slurm_job.user,
            spec=spec,
            partitions=(*mine, *(name for name in partitions if name not in mine)),
            phase=phase,
            submit_s=_submitted_s(slurm_job, control),
            restarts=slurm_job.restarts,
            allocation=allocation,
            leaving=slurm_job.state in LEAVING,
            started_s=slurm_job.start_s if slurm_job.state in HOLDING else None,
            suspended_s=_suspended_s(slurm_job, self._asked_s),
            stopped_s=self._ended_s(slurm_job),
            requeued_s=slurm_job.submit_s if slurm_job.restarts else None,
            pauses_s=control.pauses_s if control is not None else (),
            time_limit_s=slurm_job.time_limit_s,
            account=slurm_job.account,
            qos=slurm_job.qos,
            reservation=slurm_job.reservation,
            weight=rules.weight(slurm_job),
        )

    def _ended_run(self, job: SlurmJob, types: dict[str, str]) -> EndedRun | None:
        """The last run of a job with a job spec; None: it has not ended, or never ran."""
        if job.state not in LEAVING | ENDED or job.start_s is None or job.end_s is None or not job.nodes:
            return None
        if job.end_s > self._clock.now_s() + CLOCKS_DIFFER_S:
            return (
                None  # while it is requeued after a node failure, Slurm shows its time limit, or a year if it has none
            )
        try:
            if self._spec(job) is None or not set(job.partition) & set(self._settings.partitions):
                return None
        except BadJobSpec:
            return None
        held = _placement(job, job.nodes, types, self._spool.control(job.id) if job.gpus_per_node is None else None)
        return EndedRun(job.id, held, job.start_s, job.end_s)

    def _facts(self, slurm_job: SlurmJob, control: ControlMessage | None) -> Facts:
        """What the spool and the nodes tell about a job."""
        request = control.request if control is not None else None
        return Facts(
            asked=request is not None,
            answers=_answers(self._present_run(slurm_job.id, control)),
            saved=request is not None and self._spool.answered(slurm_job.id, request.id) is not None,
            kept_back=kept_by_begin(slurm_job, self._clock.now_s()),
            silent=bool(self._silent & set(slurm_job.nodes)),
        )

    def _present_run(self, job_id: JobId, control: ControlMessage | None) -> Started | None:
        """What the job's present run reported when it began; None: it has not reported yet."""
        run = self._spool.newest_epoch(job_id)
        if run is None or (control is not None and run < control.epoch):
            return None
        return self._spool.started(job_id, run)

    def _forget_moves(self, job_ids: Iterable[JobId]) -> None:
        """Forget the moves of jobs that wait without a placement: waiting is no cost of moving."""
        for job_id in job_ids:
            if self._jobs[job_id].phase is not Phase.QUEUED:
                continue
            control = self._spool.control(job_id)
            if control is not None and control.moved_s is not None:
                self._spool.tell(control.model_copy(update={"moved_s": None}), self._slurm_jobs[job_id].uid)

    def _measure_pauses(self, reports: Iterable[Report]) -> None:
        """Measure pauses of moves. The clocks of nodes and daemon agree well enough, because munge refuses large differences."""
        for report in reports:
            slurm_job, control = self._slurm_jobs.get(report.job_id), self._spool.control(report.job_id)
            if not isinstance(report.body, Started) or slurm_job is None or control is None:
                continue
            if control.moved_s is not None and report.epoch >= control.epoch and control.request is None:
                pause_s = max(report.time_s - control.moved_s, 0.0)
                pauses_s = (*control.pauses_s, pause_s)[-PAUSES:]
                self._spool.tell(control.model_copy(update={"moved_s": None, "pauses_s": pauses_s}), slurm_job.uid)
                log.info("pause", extra={"round": control.round, "job": report.job_id, "pause_s": round(pause_s, 2)})

    def _log_state(self, job_id: JobId, now: State) -> State:
        before = self._states.get(job_id)
        if before is not now:
            self._states[job_id] = now
            log.info("state", extra={"job": job_id, "state": now.value, "before": before and before.value})
        return now

    def _log_ends(self) -> None:
        """Log what became of jobs that Slurm does not list any more."""
        for job_id, slurm_job in self._gone.items():
            if job_id in self._states and job_id not in self._jobs:
                now = self._log_state(job_id, state(slurm_job, Facts(ended=self._spool.ended(job_id))))
                if now is not State.STOPPING:  # else its processes are still ending
                    del self._states[job_id]

    def _remember(self, managed: dict[JobId, SlurmJob], jobs: dict[JobId, Job], now_s: float) -> None:
        self._slurm_jobs, self._jobs = managed, jobs
        self._owners |= {job_id: job.uid for job_id, job in managed.items()}
        # By restarts, too: a run between two observations leaves a credential of its own.
        pending = {(job_id, job.restarts) for job_id, job in managed.items() if job.state in WAITING}
        self._pending_since_s = {key: self._pending_since_s.get(key, now_s) for key in pending}
        starting = {job_id for job_id, _ in pending if jobs[job_id].allocation is not None}
        self._released_s = {job_id: self._released_s.get(job_id, now_s) for job_id in starting}
        self._refused_starts = {key: count for key, count in self._refused_starts.items() if key[0] in managed}
        runs = {(job_id, job.restarts - before) for job_id, job in managed.items() for before in (0, 1)}
        self._stopped_s = {key: at_s for key, at_s in self._stopped_s.items() if key in runs}
        self._without_gpus = {key: lacks for key, lacks in self._without_gpus.items() if key in runs}
        self._shrunk = {key: tries for key, tries in self._shrunk.items() if key in runs}
        self._signalled = {job_id: request for job_id, request in self._signalled.items() if job_id in managed}

    def _nodes(
        self, slurm_nodes: Iterable[SlurmNode], jobs: Iterable[Job], types: dict[str, str], up: Collection[str]
    ) -> tuple[Node, ...]:
        ours: dict[str, int] = {}
        our_cpus: dict[str, int] = {}
        if self._sharing is not None:
            ours |= {
                placeholder.node: self._sharing.reservations.gpus(placeholder.node)
                for placeholder in self._sharing.reservations.placeholders
            }
        for job in jobs:
            slurm_job = self._slurm_jobs[job.id]
            if job.allocation is None or slurm_job.state in WAITING:
                continue
            for share in job.allocation.shares:
                held = 0 if slurm_job.gpus_per_node is None else share.gpus
                ours[share.node] = ours.get(share.node, 0) + held
                our_cpus[share.node] = our_cpus.get(share.node, 0) + slurm_job.cpus // max(len(slurm_job.nodes), 1)
        managed = set(self._settings.partitions)
        return tuple(
            Node(
                name=node.name,
                gpu_type=types[node.name],
                gpus=sum(node.gpus.values()),
                partitions=tuple(name for name in node.partitions if name in up),
                usable=node.usable,
                # Right after a restart, slurmctld may count the GPUs of a completing job twice: 8 of 4 used.
                gpus_others=max(min(sum(node.gpus_used.values()), sum(node.gpus.values())) - ours.get(node.name, 0), 0),
                cpus=node.cpus,
                cpus_others=max(node.cpus_used - our_cpus.get(node.name, 0), 0),
                state="+".join(sorted(node.state)),
            )
            for node in slurm_nodes
            if managed & set(node.partitions) and sum(node.gpus.values()) > 0
        )

    # --- acting

    def _step(self, action: Action) -> _Step:
        """The next step of an action."""
        slurm_job, job = self._slurm_jobs.get(action.job), self._jobs.get(action.job)
        if slurm_job is None or job is None:
            return _Step(Outcome(action, Progress.DONE, "it has ended"))
        if slurm_job.state in LEAVING:
            return _Step(Outcome(action, Progress.UNDER_WAY, "saves and leaves its GPUs"))
        if self._lacks_gpus(slurm_job):
            return _Step(Outcome(action, Progress.UNDER_WAY, "Slurm started it without its GPUs: it is stopped first"))
        if slurm_job.state in WAITING:
            if isinstance(action, Hold):
                return _Step(Outcome(action, Progress.DONE), _held(slurm_job))
            return self._start(action, slurm_job, job)
        misplaced = self._sharing is not None and job.id in self._sharing.misplaced
        if not isinstance(action, Hold) and job.allocation and action.placement.suits(job.allocation) and not misplaced:
            return _Step(self._stay(action, slurm_job))
        if isinstance(action, Resize) and (outcome := self._shrink(action, slurm_job, job)) is not None:
            return _Step(outcome)
        return self._stop(action, slurm_job)

    def _start(self, action: Action, slurm_job: SlurmJob, job: Job) -> _Step:
        """Send a pending job to its placement."""
        assert not isinstance(action, Hold)
        wanted, now_s = action.placement, self._clock.now_s()
        sent_with_gpus = job.phase is Phase.STARTING and slurm_job.gpus_per_node is not None
        shares = (
            self._agents is not None
            and len(wanted.nodes) == 1
            and not sent_with_gpus
            and self._agents.takes(job.id, wanted.nodes[0], wanted.gpus)
        )
        if job.phase is Phase.STARTING and job.allocation is not None and wanted.suits(job.allocation):
            waited_s = now_s - self._released_s[job.id]
            # The cloud limits how long its nodes may take to boot.
            if waited_s < self._settings.start_patience_s or wanted.partition == self._settings.cloud_partition:
                return _Step(Outcome(action, Progress.UNDER_WAY, "waits for Slurm to start it"))
            late = Outcome(action, Progress.FAILED, f"Slurm did not start it in {waited_s:.0f} s: {slurm_job.reason}")
            return _Step(late, _held(slurm_job))
        tries = self._refused_starts.get((job.id, action.round), 0)
        if tries >= TRIES:
            return _Step(
                Outcome(action, Progress.FAILED, f"Slurm refused the placement {tries} times: {slurm_job.reason}")
            )
        pending_s = now_s - self._pending_since_s[job.id, slurm_job.restarts]
        if slurm_job.restarts and pending_s < self._settings.credential_pause_s:
            return _Step(
                Outcome(action, Progress.UNDER_WAY, "pauses until Slurm has forgotten the credential of its last run")
            )
        if slurm_job.number in self._shared:
            taken_out = Outcome(action, Progress.UNDER_WAY, "is taken out of its array")
            return _Step(taken_out, (Write(job.id, "split"),))
        room = dict(self._free)
        if job.allocation is not None and slurm_job.gpus_per_node is not None:
            for share in job.allocation.shares:
                room[share.node] = room.get(share.node, 0) + share.gpus
        if shares:
            assert self._sharing is not None
            if reason := self._sharing.keeps_back(job.id, wanted.nodes[0]):
                return _Step(Outcome(action, Progress.UNDER_WAY, reason))
        elif any(room.get(share.node, 0) - self._reserved(share.node) < share.gpus for share in wanted.shares):
            return _Step(Outcome(action, Progress.UNDER_WAY, "waits for GPUs that another job still holds"))
        waits_by_begin = kept_by_begin(slurm_job, now_s)
        shape, share = wanted.configuration, wanted.shares[0]
        before = self._spool.control(job.id)
        limit_s = self._time_limit_s(slurm_job, before)
        self._spool.tell(
            ControlMessage(
                job_id=job.id,
                epoch=self._spool.next_epoch(job.id),
                round=action.round,
                gpu_type=shape.gpu_type,
                nodes=shape.nodes,
                gpus=shape.gpus,
                cpus=share.cpus or None,
                memory_mb=share.memory_mb or None,
                submitted_s=job.submit_s,
                submitted_to=(before and before.submitted_to) or next(iter(job.partitions), None),
                slurm_job=None if slurm_job.array_job_id is None else str(slurm_job.number),
                time_limit_s=limit_s,
                time_limit_restarts=None if limit_s is None else slurm_job.restarts,
                moved_s=before.moved_s if before is not None else None,
                pauses_s=before.pauses_s if before is not None else (),
                # A cleared job has no GPUs until Slurm has given them back; the daemon may die before that.
                shares=shares or slurm_job.gpus_per_node is None,
            ),
            slurm_job.uid,
        )
        placement = JobPlacement(
            partition=wanted.partition,
            nodes=wanted.nodes,
            gpus_per_node=0 if shares else wanted.shares[0].gpus,
            stand_in=shares and self._agents is not None and self._agents.stand_in,
            tasks=shape.nodes,
            cpus=shape.nodes * (share.cpus or max(slurm_job.cpus_per_task, 1)),
            cpus_per_task=share.cpus or None,
            memory_mb_per_node=share.memory_mb or None,
            time_limit_s=limit_s,
        )
        self._refused_starts[job.id, action.round] = tries + 1
        for share in wanted.shares if not shares else ():
            room[share.node] -= share.gpus
        self._free = room
        place = Write(job.id, "place", placement)
        # The placement ends the begin time of a job that it keeps back, so the job needs no release.
        sent = (place,) if waits_by_begin else (*_held(slurm_job), place, Write(job.id, "release"))
        if shares:
            sent += (Write(job.id, "put_first"),)
        return _Step(Outcome(action, Progress.UNDER_WAY, "waits for Slurm to start it"), sent)

    def _reserved(self, node: str) -> int:
        return self._sharing.reserved(node) if self._sharing is not None else 0

    def _stay(self, action: Action, slurm_job: SlurmJob) -> Outcome:
        """The plan leaves the job where it is after all: withdraw the request to save."""
        control = self._spool.control(slurm_job.id)
        if control is not None and control.request is not None:
            taken_back = {"request": None, "moved_s": None, "round": action.round}
            self._spool.tell(control.model_copy(update=taken_back), slurm_job.uid)
        return Outcome(action, Progress.DONE, "stays where it is")

    def _stop(self, action: Action, slurm_job: SlurmJob) -> _Step:
        """Stop a running job, one step further: it saves, leaves its GPUs and is held."""
        job_id, now_s = slurm_job.id, self._clock.now_s()
        if self._silent & set(slurm_job.nodes):
            # Slurm 22.05.8 requeues the job when it gives the node up. If Penstock requeues it before, it runs without GPUs
            # from then on, whatever its TresPerNode says.
            return _Step(Outcome(action, Progress.UNDER_WAY, "waits for Slurm to give up a silent node"))
        control = self._spool.control(job_id)
        present = self._present_run(job_id, control)
        answers = _answers(present)
        if control is None:
            epoch = self._spool.newest_epoch(job_id) or 0
            submitted = {"submitted_s": slurm_job.submit_s, "submitted_to": slurm_job.partition[0]}
            control = ControlMessage(job_id=job_id, epoch=epoch, round=action.round, **submitted)
        request = control.request
        if request is None:
            request = Request(id=f"{action.round}-{control.epoch}", asked_s=now_s)
            moved_s = None if isinstance(action, Hold) else now_s
            asked = {"request": request, "moved_s": moved_s, "round": action.round}
            self._spool.tell(control.model_copy(update=asked), slurm_job.uid)
        self._send_signal(job_id, present, request)
        waits = 0 <= now_s - request.asked_s < self._settings.checkpoint_wait_s
        if answers and waits and self._spool.answered(job_id, request.id) is None:
            return _Step(Outcome(action, Progress.UNDER_WAY, "was asked to save"))
        saved = self._spool.answered(job_id, request.id) is not None
        if answers and not saved:
            waited_s = now_s - request.asked_s
            self._say(slurm_job, f"it did not save within {waited_s:.0f} s of the request, and was stopped")
        if self._sharing is not None and self._sharing.leaves_a_gap(job_id):
            return _Step(
                Outcome(action, Progress.UNDER_WAY, "waits until its GPUs are reserved for the jobs that share them")
            )
        how = "has saved" if saved else "gets Slurm's signals to save"
        self._keep_time_limit(slurm_job, control)
        left = Outcome(action, Progress.UNDER_WAY, f"{how}, leaves its GPUs")
        return _Step(left, (Write(job_id, "requeue_hold"),))

    def _ended_s(self, job: SlurmJob) -> float | None:
        """When the job's last run ended. Slurm tells that of a job that is over, but not of a requeued job."""
        if job.state in LEAVING | ENDED and job.end_s is not None:
            return job.end_s
        return self._stopped_s.get((job.id, job.restarts - 1))

    def _note_stop(self, job_id: JobId, asked_s: float) -> None:
        # Whole seconds, as in Slurm.
        stopped_s = float(math.floor((asked_s + self._clock.now_s()) / 2))
        self._stopped_s[job_id, self._slurm_jobs[job_id].restarts] = stopped_s

    def _send_signal(self, job_id: JobId, present: Started | None, request: Request) -> None:
        """Signal a request once to a run that has registered a handler. Without the signal the run may still read the request."""
        if present is None or present.usr2 is None or self._signalled.get(job_id) == request.id:
            return
        self._signalled[job_id] = request.id
        try:
            self._gateway.signal(job_id, present.usr2)
        except SlurmError as error:
            log.warning("cannot send SIGUSR2", extra={"job": job_id, "text": str(error)})

    def _shrink(self, action: Resize, slurm_job: SlurmJob, job: Job) -> Outcome | None:
        """Take whole nodes from a run that survives it, where this Slurm can; None: the run has to be stopped."""
        control, held = self._spool.control(job.id), job.allocation
        present = self._present_run(job.id, control)
        if control is None or control.request is not None or held is None or slurm_job.state != "RUNNING":
            return None
        if present is None or not present.survives_losing_nodes or self._silent & set(slurm_job.nodes):
            return None
        wanted = action.placement
        kept = {(share.node, share.gpus) for share in wanted.shares}
        if not kept < {(share.node, share.gpus) for share in held.shares} or slurm_job.nodes[0] not in wanted.nodes:
            return None
        tries = self._shrunk.setdefault((job.id, slurm_job.restarts), [])
        ability: Ability = "shrink-again" if tries else "shrink"
        if slurm_job.nodes in tries:  # it was tried without effect
            return None
        tries.append(slurm_job.nodes)
        try:
            if not self._abilities.may(ability):
                return None
            self._gateway.shrink(job.id, wanted.nodes)
            self._abilities.record(ability, True)
        except (Refused, Transient) as error:
            self._abilities.refused(ability, error)
            return None
        except ControllerAway as error:
            raise ClusterAway(str(error)) from error
        except SlurmError as error:
            log.info("cannot shrink the job", extra={"job": job.id, "text": str(error)})
            return None
        shape = {"nodes": wanted.configuration.nodes, "gpus": wanted.gpus, "round": action.round}
        self._spool.tell(control.model_copy(update=shape), slurm_job.uid)
        return Outcome(action, Progress.UNDER_WAY, "goes on and gives up whole nodes")

    # --- jobs without their GPUs

    def _check_gpus(self, jobs: Iterable[SlurmJob], rules: SlurmRules) -> None:
        """Find managed jobs that Slurm has started without their GPUs.

        Slurm 22.05.8 does that once after it requeued a job while one of its nodes was silent, and on a node that has not
        registered since slurmctld started. Requeued jobs are checked in detail, a few at a time.
        """
        asked = 0
        for job in jobs:
            run = job.id, job.restarts
            if job.id not in self._jobs or job.state not in ("RUNNING", "FAILED") or not job.gpus_per_node:
                continue
            if run in self._without_gpus:
                pass
            elif rules.features.counts_gpus and not job.gpus_counted.get("", 0):
                self._without_gpus[run] = True
            elif job.restarts and asked < CHECKS:
                asked += 1
                try:
                    self._without_gpus[run] = self._gateway.gpus_held(job.id) == 0
                except SlurmError as error:
                    log.info("cannot read the GPUs of a job", extra={"job": job.id, "text": str(error)})
            if job.state == "FAILED" and self._without_gpus.get(run):
                self._bring_back(job)

    def _lacks_gpus(self, job: SlurmJob) -> bool:
        return job.state == "RUNNING" and self._without_gpus.get((job.id, job.restarts), False)

    def _bring_back(self, job: SlurmJob) -> None:
        """Requeue a job that failed because Slurm had started it without its GPUs."""
        if not job.requeue or job.restarts >= MOST_RESTARTS:
            return
        try:
            self._gateway.bring_back(job.id)
        except SlurmError as error:
            log.warning("cannot requeue a job that failed without its GPUs", extra={"job": job.id, "text": str(error)})
            return
        text = "Slurm started it without its GPUs, and it failed"
        log.warning("job requeued", extra={"job": job.id, "nodes": ",".join(job.nodes), "text": text})

    def _stop_without_gpus(self) -> None:
        """Stop runs without their GPUs at once. A round starts them again, and then they have their GPUs."""
        for job in self._slurm_jobs.values():
            if not self._lacks_gpus(job) or self._silent & set(job.nodes):
                continue
            try:
                self._gateway.requeue_hold(job.id)
            except SlurmError as error:
                log.warning("cannot stop a job without its GPUs", extra={"job": job.id, "text": str(error)})
                continue
            text = (
                "Slurm started it without its GPUs; it will start again. Slurm may go on counting GPUs of its nodes as "
            )
            text += "used until `scontrol reconfigure`"
            log.warning("job stopped", extra={"job": job.id, "nodes": ",".join(job.nodes), "text": text})

    def _for_plain_jobs(
        self, slurm_jobs: Iterable[SlurmJob], managed: Collection[JobId], nodes: Sequence[Node], now_s: float
    ) -> dict[str, int]:
        """Node -> GPUs set aside for a plain job that has waited long enough."""
        patience_s = self._settings.plain_patience_s
        plain = (job for job in slurm_jobs if job.id not in managed)
        job = plain_jobs.longest_waiting(plain, self._settings.partitions, now_s, patience_s)
        first_s = min((each.submit_s for each in self._jobs.values() if each.phase is Phase.QUEUED), default=now_s)
        if job is None or (job.eligible_s or now_s) > first_s:
            return {}
        held: Counter[str] = Counter()
        pinned: Counter[str] = Counter()
        for each in self._jobs.values():
            for share in each.allocation.shares if each.allocation is not None else ():
                held[share.node] += share.gpus
                if not each.spec.preemptible or each.spec.adaptivity is Adaptivity.FIXED:
                    pinned[share.node] += share.gpus
        return plain_jobs.set_aside(job, nodes, pinned, held)

    # --- what a job keeps over its restarts, and while the daemon is away

    def _time_limit_s(self, slurm_job: SlurmJob, control: ControlMessage | None) -> float | None:
        """The time limit for this start; None: the job keeps its limit."""
        if self._settings.time_limit == "run" or not slurm_job.restarts:
            return None
        run, grace_s = self._runs.get(slurm_job.id), self._settings.time_limit_grace_s
        return time_limits.next_limit_s(slurm_job, run, control, grace_s)

    def _keep_time_limit(self, slurm_job: SlurmJob, control: ControlMessage) -> None:
        """Save the rest of a job's time limit in the spool before the job is stopped, because the daemon may die meanwhile."""
        run = self._runs.get(slurm_job.id)
        if self._settings.time_limit == "total" and run is not None:
            left_s = time_limits.left_s(run, self._spool.control(slurm_job.id), self._settings.time_limit_grace_s)
            kept = {"time_limit_s": left_s, "time_limit_restarts": slurm_job.restarts + 1}
            control = self._spool.control(slurm_job.id) or control
            self._spool.tell(control.model_copy(update=kept), slurm_job.uid)

    def _let_deadlines_count(self) -> None:
        for job in self._not_yet.values():
            if job.held and overdue(job, self._clock.now_s()):
                try:
                    self._gateway.release(job.id)
                except SlurmError as error:
                    log.info("cannot release the job to its deadline", extra={"job": job.id, "text": str(error)})

    def _leave_to_slurm(self, acted: set[JobId]) -> None:
        """Renew the begin time after which Slurm starts waiting jobs by itself: one command for all, twice in `plain_after_s`.

        A held job, for example after a stop, gets such a time and the shape in which it would run.
        """
        after_s, now_s = self._settings.plain_after_s, self._clock.now_s()
        if after_s is None:
            return
        # Slurm does not tell the begin time of a job with a dependency.
        renewed_s = self._renewed_s

        def begins_s(job: SlurmJob) -> float:
            return max(job.eligible_s or 0.0, renewed_s.get(job.id, -after_s) + after_s)

        due = []
        for job in (*self._slurm_jobs.values(), *self._not_yet.values()):
            shape = plain_shape(job)
            if shape is None or job.state not in WAITING or job.id in acted or overdue(job, now_s):
                continue
            try:
                if job.held or (job.required_nodes and kept_by_begin(job, now_s)):
                    cpus = shape.nodes * max(job.cpus_per_task, 1)
                    self._gateway.leave_to_slurm(job.id, shape, cpus, after_s)
                elif not job.required_nodes and begins_s(job) - now_s < after_s / 2:
                    due.append(job.id)
            except SlurmError as error:
                log.warning("cannot leave the job to Slurm", extra={"job": job.id, "text": str(error)})
        if due:
            try:
                self._gateway.begin_later(due, after_s)
            except SlurmError as error:
                log.warning("cannot renew begin times", extra={"jobs": len(due), "text": str(error)})
                return
        waiting = self._slurm_jobs.keys() | self._not_yet.keys()
        self._renewed_s = {job: at_s for job, at_s in renewed_s.items() if job in waiting} | dict.fromkeys(due, now_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """The present step of an action: Slurm commands, one after another, and the outcome if they succeed."""

    outcome: Outcome
    writes: tuple[Write, ...] = ()

    @property
    def job(self) -> JobId:
        return self.outcome.action.job


def _answers(present: Started | None) -> bool:
    """Whether a run can be asked to save: it reads requests, or does so on a signal."""
    return present is not None and (present.answers_requests or present.usr2 is not None)


def _held(job: SlurmJob) -> tuple[Write, ...]:
    """The command that holds a pending job; none if it is held already."""
    return () if job.held else (Write(job.id, "hold"),)


def _failed(outcome: Outcome, error: SlurmError) -> Outcome:
    """The outcome of an action after one of its commands failed."""
    if isinstance(error, JobGone):
        return Outcome(outcome.action, Progress.DONE, "it has ended")
    if isinstance(error, Transient):
        return Outcome(outcome.action, Progress.UNDER_WAY, f"will be tried again: {error}")
    return Outcome(outcome.action, Progress.FAILED, str(error))


def gpu_type(node: SlurmNode) -> str:
    """A node's GPU type from its GRES; `gpu` if GRES has none. Several types are joined by `+`."""
    return "+".join(sorted(name or "gpu" for name in node.gpus))


def _manageable(job: SlurmJob, *, cleared: bool) -> None:
    """Raises BadJobSpec if a job cannot be placed because of the way it was submitted."""
    if job.het_job_id is not None:
        raise BadJobSpec(
            "it is part of a heterogeneous job, which cannot be moved in parts; submit it as a job of its own"
        )
    if job.exclusive:
        raise BadJobSpec(
            "it requests whole nodes (--exclusive), but Penstock allocates GPUs; submit it without --exclusive"
        )
    if job.licenses:
        raise BadJobSpec(
            f"it requests licences ({job.licenses}), but Penstock does not know which are free; submit it without a job spec"
        )
    if job.gpu_type is not None:
        raise BadJobSpec(
            f"it requests GPUs of type {job.gpu_type} from Slurm, which cannot change that later; submit it with "
            f'--gres=gpu:1 and name the types in the job spec, such as "gpu_types": ["{job.gpu_type}"]'
        )
    if job.gpus_per_node is None and not cleared:
        raise BadJobSpec("it requests no GPUs per node, so there is no number to change; submit it with --gres=gpu:1")
    if not job.requeue:
        raise BadJobSpec("Slurm may not requeue it, so it cannot be moved; submit it with --requeue")


def _granted(held: Placement | None, control: ControlMessage | None) -> Placement | None:
    """What a job holds, with the CPUs and memory that Penstock allocated, if it did."""
    if held is None or control is None or control.cpus is None or control.nodes != len(held.shares):
        return held
    cpus, memory_mb = control.cpus, control.memory_mb or 0
    shares = tuple(dataclasses.replace(share, cpus=cpus, memory_mb=memory_mb) for share in held.shares)
    return dataclasses.replace(held, shares=shares)


def _with_memory(nodes: tuple[Node, ...], slurm_nodes: Iterable[SlurmNode], running: Iterable[Job]) -> tuple[Node, ...]:
    """Nodes with the memory that Slurm allocates there, and how much of it other jobs hold."""
    known = {node.name: node for node in slurm_nodes}
    ours: dict[str, int] = {}
    for job in running:
        for share in job.allocation.shares if job.allocation is not None else ():
            ours[share.node] = ours.get(share.node, 0) + share.memory_mb
    return tuple(
        dataclasses.replace(
            node,
            memory_mb=known[node.name].memory_mb,
            memory_others_mb=max(known[node.name].memory_used_mb - ours.get(node.name, 0), 0),
        )
        for node in nodes
    )


def _submitted_s(job: SlurmJob, control: ControlMessage | None) -> float:
    """When the job was first submitted. Slurm changes its SubmitTime at each requeue, so the spool keeps the first one."""
    kept = control.submitted_s if control is not None else None
    return job.submit_s if kept is None else min(kept, job.submit_s)


def _placement(
    job: SlurmJob, nodes: tuple[str, ...], types: dict[str, str], control: ControlMessage | None = None
) -> Placement:
    gpus = job.gpus_per_node or 0
    if job.gpus_per_node is None and control is not None and control.shares:
        gpus = (control.gpus or 0) // (control.nodes or 1)
    shares = tuple(Share(name, gpus) for name in sorted(nodes))
    return Placement(types.get(nodes[0], "") if nodes else "", job.partition[0] if job.partition else "", shares)


def _suspended_s(job: SlurmJob, asked_s: float) -> float:
    """How long a job's present run has been suspended. Slurm tells how long it was not, in whole seconds."""
    if job.state not in HOLDING or job.start_s is None or job.ran_s is None:
        return 0.0
    return max(math.floor(asked_s) - job.start_s - job.ran_s, 0.0)
