"""Slurm behind the scheduler's `Cluster` port.

Everything is derived anew from Slurm and the spool at each look; what this object remembers (when it first saw a job
pending, how long a start takes) only makes it wait longer after a restart of the daemon, never do something twice.

How a job gets from one placement to another, one step a tick::

    RUNNING --ask--> saves --answer or time limit--> requeuehold --> PENDING, held --pause--> place + release --> RUNNING

GPU types are chosen by partition and node list, with an untyped GPU count: Slurm 22.05 cannot change the type of a
pending job's GRES. The epoch of the next run is in the spool before the job is released.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from penstock_profiles.wire import Control, Report, Request
from penstock_scheduler.errors import BadWish, ClusterAway, RoundFailed
from penstock_scheduler.model import (
    Action,
    ClusterState,
    Hold,
    Job,
    JobId,
    JobWish,
    Node,
    Outcome,
    Phase,
    Placement,
    Progress,
    Refusal,
    Share,
    parse_wish,
)
from penstock_scheduler.model.wish import WISH_KEY
from penstock_scheduler.ports import Clock, Submitter, WishCheck
from penstock_scheduler.spool import Spool
from penstock_slurm.gateway import (
    ControllerAway,
    Gateway,
    JobGone,
    JobPlacement,
    Refused,
    SlurmError,
    SlurmJob,
    SlurmNode,
    Transient,
)
from penstock_slurm.gateway.base import ENDED
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.site import Site, SiteRules, gpu_limits, reserved

log = logging.getLogger(__name__)

PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})
LEAVING = "COMPLETING"

TRIES = 3
"""Times that a start which Slurm refuses is tried in one round."""

RECENT_S = 86_400.0
"""How far back a daemon that starts looks for reports of jobs that ended without it."""

SAYS = "penstock_says"
"""Key in admin_comment under which a job's user reads why Penstock leaves the job alone."""


class SlurmCluster:
    """The cluster; see the module."""

    def __init__(
        self,
        gateway: Gateway,
        spool: Spool,
        clock: Clock,
        settings: SlurmSettings,
        check: WishCheck,
        submitter: Submitter | None = None,
    ) -> None:
        self.submitter = submitter
        self._gateway = gateway
        self._spool = spool
        self._clock = clock
        self._settings = settings
        self._check = check
        self._site = Site(gateway, clock, settings)
        self._slurm_jobs: dict[JobId, SlurmJob] = {}
        self._jobs: dict[JobId, Job] = {}
        self._free: dict[str, int] = {}
        self._owners: dict[JobId, int] = {}
        self._silent: set[str] = set()
        self._reporting = spool.recent(clock.now_s() - RECENT_S)
        self._pending_since_s: dict[tuple[JobId, int], float] = {}
        self._released_s: dict[JobId, float] = {}
        self._refused_starts: dict[tuple[JobId, int], int] = {}
        self._ending: dict[JobId, int] = {}
        """Jobs that are gone and whose end is not known yet -> MB on a node that they were given."""

    def observe(self) -> ClusterState:
        """Nodes, and the jobs that ask for Penstock, in the managed partitions. Four Slurm calls, whatever their number.

        Raises:
            ClusterAway: Slurm does not answer.
            RoundFailed: a managed partition does not exist.
        """
        try:
            partitions = {partition.name: partition for partition in self._gateway.partitions()}
            slurm_nodes = self._gateway.nodes()
            slurm_jobs = self._gateway.jobs()
            reservations = self._gateway.reservations()
        except SlurmError as error:
            raise ClusterAway(str(error)) from error
        missing = [name for name in self._settings.partitions if name not in partitions]
        if missing:
            raise RoundFailed(
                f"[slurm] partitions: Slurm has no partition {', '.join(missing)}; it has {', '.join(sorted(partitions))}"
            )
        now_s, rules = self._clock.now_s(), self._site.rules()
        usable = tuple(name for name in self._settings.partitions if partitions[name].up)
        types = {node.name: gpu_type(node) for node in slurm_nodes}
        managed: dict[JobId, SlurmJob] = {}
        jobs: dict[JobId, Job] = {}
        refused: list[Refusal] = []
        for slurm_job in slurm_jobs:
            if slurm_job.state not in PENDING | RUNNING | {LEAVING}:
                continue
            if not set(slurm_job.partition) & set(self._settings.partitions):
                continue
            try:
                wish = self._wish(slurm_job)
                if wish is None:
                    continue
                _manageable(slurm_job)
                self._check(wish)
            except BadWish as error:
                refused.append(Refusal(slurm_job.id, slurm_job.name, slurm_job.user, str(error)))
                self._say(slurm_job, str(error))
                continue
            job = self._job(slurm_job, wish, usable, types, rules)
            if job is not None:
                managed[slurm_job.id], jobs[slurm_job.id] = slurm_job, job
        self._tell_outgrown(set(self._jobs) - set(jobs))
        self._remember(managed, jobs, now_s)
        self._silent = {node.name for node in slurm_nodes if node.state & {"NOT_RESPONDING", "DOWN"}}
        kept_for = reserved(reservations, now_s, self._settings.reservation_lead_s)
        nodes = tuple(
            dataclasses.replace(node, reservation=kept_for.get(node.name, ""), switch=rules.switches.get(node.name, ""))
            for node in self._nodes(slurm_nodes, jobs.values(), types)
        )
        if rules.features.memory:
            nodes = _with_memory(
                nodes, slurm_nodes, (job for job in jobs.values() if managed[job.id].state not in PENDING)
            )
        self._free = {node.name: node.gpus_for_us for node in nodes}
        for job in jobs.values():
            if job.allocation is not None:
                for share in job.allocation.shares:
                    self._free[share.node] = self._free.get(share.node, 0) - share.gpus
        limits = gpu_limits(rules.limits, managed, (job for job in slurm_jobs if job.state in RUNNING | {LEAVING}))
        return ClusterState(nodes, tuple(jobs.values()), tuple(refused), limits)

    def apply(self, actions: Sequence[Action]) -> tuple[Outcome, ...]:
        """See `ports.Cluster`. Acts on what the last `observe` saw."""
        return tuple(self._apply(action) for action in actions)

    def reports(self) -> Sequence[Report]:
        """What jobs have left in the spool; those that have ended since the last look are read a last time."""
        now = set(self._jobs)
        found = self._spool.read(sorted(now | self._reporting), self._owners)
        self._owners = {job_id: uid for job_id, uid in self._owners.items() if job_id in now}
        self._reporting = now
        self._spool.forget(now)
        return found

    # --- observing

    def _wish(self, job: SlurmJob) -> JobWish | None:
        """The wish, from admin_comment (which only the site can write) or else from the comment. Raises BadWish."""
        ours = _ours(job)
        told = ours is not None and WISH_KEY not in ours  # what we told the user can quote a wish, and is none
        return (None if told else parse_wish(job.admin_comment)) or parse_wish(job.comment)

    def _say(self, job: SlurmJob, text: str) -> None:
        """Leave word for the job's user, once, beside the wish of sbatch's flags, unless the site itself uses the field."""
        ours = _ours(job)
        if job.admin_comment and ours is None:
            return
        wish = {WISH_KEY: ours[WISH_KEY]} if ours and WISH_KEY in ours else {}
        word = json.dumps(wish | {SAYS: text})
        if job.admin_comment == word:
            return
        log.warning("job refused", extra={"job": job.id, "user": job.user, "text": text})
        try:
            self._gateway.set_admin_comment(job.id, word)
        except SlurmError as error:
            log.warning("cannot tell the job's user", extra={"job": job.id, "text": str(error)})

    def _tell_outgrown(self, gone: set[JobId]) -> None:
        """Say which jobs ended because they outgrew the memory that they were given, and what to do about it.

        In the log, not to the user: Slurm takes no comment on a job that has ended.
        """
        self._ending |= {
            job_id: allocation.shares[0].memory_mb
            for job_id in gone
            if (allocation := self._jobs[job_id].allocation) is not None and allocation.shares[0].memory_mb
        }
        if not self._ending:
            return
        try:
            known = {slurm_job.id: slurm_job for slurm_job in self._gateway.jobs(finished=True)}
        except SlurmError as error:
            log.warning("cannot look after jobs that ended", extra={"text": str(error)})
            return
        for job_id, memory_mb in list(self._ending.items()):
            ended = known.get(job_id)
            if ended is not None and ended.state not in ENDED:
                continue  # it is still on its way out
            del self._ending[job_id]
            if ended is not None and (how := _outgrew(ended)):
                text = (
                    f"{how} the {memory_mb} MB on a node that Penstock gave it by its profile; measure it again with "
                    "the memory that it really needs (process_mb), or submit it without a profile for its GPUs' part of a node"
                )
                log.warning("job outgrew its memory", extra={"job": job_id, "user": ended.user, "text": text})

    def _job(
        self,
        slurm_job: SlurmJob,
        wish: JobWish,
        partitions: tuple[str, ...],
        types: dict[str, str],
        rules: SiteRules,
    ) -> Job | None:
        """The job as the scheduler sees it, or None if it is on its way out for good."""
        control = self._spool.control(slurm_job.id)
        asked = control is not None and control.request is not None
        allocation = None
        if slurm_job.state in PENDING:
            # One that Slurm or its user has requeued waits for a begin time, two minutes by default: send it anew.
            sent = not slurm_job.held and bool(slurm_job.required_nodes) and slurm_job.reason != "BeginTime"
            phase = Phase.QUEUED if slurm_job.held else Phase.STARTING
            if sent:
                allocation = _placement(slurm_job, slurm_job.required_nodes, types)
        elif slurm_job.state == LEAVING:
            if not asked:
                return None
            phase = Phase.STOPPING
            allocation = _placement(slurm_job, slurm_job.nodes, types)
        else:
            phase = Phase.STOPPING if asked else Phase.RUNNING
            allocation = _placement(slurm_job, slurm_job.nodes, types)
        allocation = _granted(allocation, control)
        mine = [name for name in slurm_job.partition if name in partitions]
        return Job(
            id=slurm_job.id,
            name=slurm_job.name,
            user=slurm_job.user,
            wish=wish,
            partitions=(*mine, *(name for name in partitions if name not in mine)),
            phase=phase,
            submit_s=_submitted_s(slurm_job, control),
            restarts=slurm_job.restarts,
            allocation=allocation,
            time_limit_s=slurm_job.time_limit_s,
            account=slurm_job.account,
            qos=slurm_job.qos,
            reservation=slurm_job.reservation,
            weight=rules.weight(slurm_job),
        )

    def _remember(self, managed: dict[JobId, SlurmJob], jobs: dict[JobId, Job], now_s: float) -> None:
        self._slurm_jobs, self._jobs = managed, jobs
        self._owners |= {job_id: job.uid for job_id, job in managed.items()}
        # By restarts, too: a run that came and went between two looks leaves a credential of its own.
        pending = {(job_id, job.restarts) for job_id, job in managed.items() if job.state in PENDING}
        self._pending_since_s = {key: self._pending_since_s.get(key, now_s) for key in pending}
        starting = {job_id for job_id, _ in pending if jobs[job_id].allocation is not None}
        self._released_s = {job_id: self._released_s.get(job_id, now_s) for job_id in starting}
        self._refused_starts = {key: count for key, count in self._refused_starts.items() if key[0] in managed}

    def _nodes(self, slurm_nodes: Iterable[SlurmNode], jobs: Iterable[Job], types: dict[str, str]) -> tuple[Node, ...]:
        ours: dict[str, int] = {}
        our_cpus: dict[str, int] = {}
        for job in jobs:
            slurm_job = self._slurm_jobs[job.id]
            if job.allocation is None or slurm_job.state in PENDING:
                continue
            for share in job.allocation.shares:
                ours[share.node] = ours.get(share.node, 0) + share.gpus
                our_cpus[share.node] = our_cpus.get(share.node, 0) + slurm_job.cpus // max(len(slurm_job.nodes), 1)
        managed = set(self._settings.partitions)
        return tuple(
            Node(
                name=node.name,
                gpu_type=types[node.name],
                gpus=sum(node.gpus.values()),
                partitions=tuple(name for name in node.partitions if name in managed),
                usable=node.usable,
                gpus_others=max(sum(node.gpus_used.values()) - ours.get(node.name, 0), 0),
                cpus=node.cpus,
                cpus_others=max(node.cpus_used - our_cpus.get(node.name, 0), 0),
                state="+".join(sorted(node.state)),
            )
            for node in slurm_nodes
            if managed & set(node.partitions) and sum(node.gpus.values()) > 0
        )

    # --- acting

    def _apply(self, action: Action) -> Outcome:
        slurm_job, job = self._slurm_jobs.get(action.job), self._jobs.get(action.job)
        if slurm_job is None or job is None:
            return Outcome(action, Progress.DONE, "it has ended")
        try:
            if slurm_job.state == LEAVING:
                return Outcome(action, Progress.UNDER_WAY, "saves and leaves its GPUs")
            if slurm_job.state in PENDING:
                return (
                    self._hold(action, slurm_job) if isinstance(action, Hold) else self._start(action, slurm_job, job)
                )
            if not isinstance(action, Hold) and job.allocation and action.placement.suits(job.allocation):
                return self._stay(action, slurm_job)
            return self._stop(action, slurm_job)
        except JobGone:
            return Outcome(action, Progress.DONE, "it has ended")
        except ControllerAway as error:
            raise ClusterAway(str(error)) from error
        except Transient as error:
            return Outcome(action, Progress.UNDER_WAY, f"again next time: {error}")
        except Refused as error:
            return Outcome(action, Progress.FAILED, str(error))
        except SlurmError as error:
            return Outcome(action, Progress.FAILED, str(error))

    def _hold(self, action: Action, slurm_job: SlurmJob) -> Outcome:
        if not slurm_job.held:
            self._gateway.hold(slurm_job.id)
        return Outcome(action, Progress.DONE)

    def _start(self, action: Action, slurm_job: SlurmJob, job: Job) -> Outcome:
        """Send a pending job to its placement."""
        assert not isinstance(action, Hold)
        wanted, now_s = action.placement, self._clock.now_s()
        if job.phase is Phase.STARTING and job.allocation is not None and wanted.suits(job.allocation):
            waited_s = now_s - self._released_s[job.id]
            if waited_s < self._settings.start_patience_s:
                return Outcome(action, Progress.UNDER_WAY, "waits for Slurm to start it")
            self._gateway.hold(job.id)
            return Outcome(action, Progress.FAILED, f"Slurm did not start it in {waited_s:.0f} s: {slurm_job.reason}")
        tries = self._refused_starts.get((job.id, action.round), 0)
        if tries >= TRIES:
            return Outcome(action, Progress.FAILED, f"Slurm refused the placement {tries} times: {slurm_job.reason}")
        pending_s = now_s - self._pending_since_s[job.id, slurm_job.restarts]
        if slurm_job.restarts and pending_s < self._settings.credential_pause_s:
            return Outcome(action, Progress.UNDER_WAY, "pauses so that Slurm forgets its last run's credential")
        room = dict(self._free)
        if job.allocation is not None:
            for share in job.allocation.shares:
                room[share.node] = room.get(share.node, 0) + share.gpus
        if any(room.get(share.node, 0) < share.gpus for share in wanted.shares):
            return Outcome(action, Progress.UNDER_WAY, "waits for GPUs that another job still holds")
        if not slurm_job.held:
            self._gateway.hold(job.id)
        shape, share = wanted.configuration, wanted.shares[0]
        self._spool.tell(
            Control(
                job_id=job.id,
                epoch=self._spool.next_epoch(job.id),
                round=action.round,
                gpu_type=shape.gpu_type,
                nodes=shape.nodes,
                gpus=shape.gpus,
                cpus=share.cpus or None,
                memory_mb=share.memory_mb or None,
                submitted_s=job.submit_s,
            ),
            slurm_job.uid,
        )
        placement = JobPlacement(
            partition=wanted.partition,
            nodes=wanted.nodes,
            gpus_per_node=wanted.shares[0].gpus,
            tasks=shape.nodes,
            cpus=shape.nodes * (share.cpus or max(slurm_job.cpus_per_task, 1)),
            cpus_per_task=share.cpus or None,
            memory_mb_per_node=share.memory_mb or None,
        )
        self._refused_starts[job.id, action.round] = tries + 1
        self._gateway.place(job.id, placement)
        self._gateway.release(job.id)
        for share in wanted.shares:
            room[share.node] -= share.gpus
        self._free = room
        return Outcome(action, Progress.UNDER_WAY, "waits for Slurm to start it")

    def _stay(self, action: Action, slurm_job: SlurmJob) -> Outcome:
        """The plan has come back to where the job is: take back what it was asked."""
        control = self._spool.control(slurm_job.id)
        if control is not None and control.request is not None:
            self._spool.tell(control.model_copy(update={"request": None, "round": action.round}), slurm_job.uid)
        return Outcome(action, Progress.DONE, "stays where it is")

    def _stop(self, action: Action, slurm_job: SlurmJob) -> Outcome:
        """Take a running job one step nearer to being held without GPUs, its progress saved."""
        job_id, now_s = slurm_job.id, self._clock.now_s()
        if self._silent & set(slurm_job.nodes):
            # Slurm 22.05.8 requeues it itself when it gives the node up; one that we requeue before that runs without
            # GPUs from then on, whatever its TresPerNode says.
            return Outcome(action, Progress.UNDER_WAY, "waits for Slurm to give up a node that is silent")
        run = self._spool.newest_epoch(job_id)
        control = self._spool.control(job_id)
        if control is None:
            control = Control(job_id=job_id, epoch=run or 0, round=action.round, submitted_s=slurm_job.submit_s)
        started = self._spool.started(job_id, run) if run is not None and run >= control.epoch else None
        answers = started is not None and started.answers_requests
        request = control.request
        if request is None:
            request = Request(id=f"{action.round}-{control.epoch}", asked_s=now_s)
            self._spool.tell(control.model_copy(update={"request": request, "round": action.round}), slurm_job.uid)
            if answers:
                return Outcome(action, Progress.UNDER_WAY, "was asked to save")
        waits = 0 <= now_s - request.asked_s < self._settings.checkpoint_wait_s
        if answers and waits and self._spool.answered(job_id, request.id) is None:
            return Outcome(action, Progress.UNDER_WAY, "was asked to save")
        self._gateway.requeue_hold(job_id)
        how = "has saved" if self._spool.answered(job_id, request.id) else "gets Slurm's signals to save"
        return Outcome(action, Progress.UNDER_WAY, f"{how}, leaves its GPUs")


def gpu_type(node: SlurmNode) -> str:
    """A node's GPU type as in its GRES; `gpu` where GRES has none. Of a node with several types, all joined by `+`."""
    return "+".join(sorted(name or "gpu" for name in node.gpus))


def _manageable(job: SlurmJob) -> None:
    """Raises BadWish if the job was submitted in a way that keeps it from being placed."""
    if job.het_job_id is not None:
        raise BadWish(
            "it is part of a heterogeneous job, which cannot be moved in parts; submit it as a job of its own"
        )
    if job.array_job_id is not None:
        raise BadWish(
            "it is an element of a job array, which Penstock does not manage yet; submit a job for each element"
        )
    if job.gpu_type is not None:
        raise BadWish(
            f"it asks Slurm for GPUs of type {job.gpu_type}, and Slurm cannot change that later; submit it with "
            f'--gres=gpu:1 and name the types in the wish, such as "gpu_types": ["{job.gpu_type}"]'
        )
    if job.gpus_per_node is None:
        raise BadWish("it asks Slurm for no GPUs per node, so there is no count to change; submit it with --gres=gpu:1")
    if not job.requeue:
        raise BadWish("Slurm may not requeue it, so it cannot be moved; submit it with --requeue")


def _outgrew(job: SlurmJob) -> str:
    """Whether a job ended for want of memory, in words; empty if not.

    Where cgroups keep jobs within their memory Slurm says so. With JobAcctGatherParams=OverMemoryKill, Slurm 22.05 only
    kills: state FAILED, signal 9, reason JobLaunchFailure.
    """
    if job.state == "OUT_OF_MEMORY":
        return "ended because it outgrew"
    if job.state == "FAILED" and (job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal:9")):
        return "was killed, and if its output says that it exceeded a memory limit, then it outgrew"
    return ""


def _granted(held: Placement | None, control: Control | None) -> Placement | None:
    """What a job holds, with the CPUs and the memory that it was sent there with, if those were ours to give."""
    if held is None or control is None or control.cpus is None or control.nodes != len(held.shares):
        return held
    cpus, memory_mb = control.cpus, control.memory_mb or 0
    shares = tuple(dataclasses.replace(share, cpus=cpus, memory_mb=memory_mb) for share in held.shares)
    return dataclasses.replace(held, shares=shares)


def _with_memory(nodes: tuple[Node, ...], slurm_nodes: Iterable[SlurmNode], running: Iterable[Job]) -> tuple[Node, ...]:
    """Nodes with the memory that Slurm gives out there, and what others than these jobs hold of it."""
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


def _ours(job: SlurmJob) -> dict[str, Any] | None:
    """What we, or job_submit.lua, wrote into the admin_comment; None if nothing, or if the site itself uses it."""
    try:
        document = json.loads(job.admin_comment)
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.keys() & {WISH_KEY, SAYS} else None


def _submitted_s(job: SlurmJob, control: Control | None) -> float:
    """When the job was first submitted: Slurm sets its SubmitTime anew at each requeue, so the spool keeps the first."""
    kept = control.submitted_s if control is not None else None
    return job.submit_s if kept is None else min(kept, job.submit_s)


def _placement(job: SlurmJob, nodes: tuple[str, ...], types: dict[str, str]) -> Placement:
    gpus = job.gpus_per_node or 0
    shares = tuple(Share(name, gpus) for name in sorted(nodes))
    return Placement(types.get(nodes[0], "") if nodes else "", job.partition[0] if job.partition else "", shares)
