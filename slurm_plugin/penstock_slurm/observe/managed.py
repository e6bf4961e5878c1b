"""The jobs that Penstock manages: a shell that keeps what `view.py` makes of Slurm's records and the spool up to date.

Most jobs of a large site wait in the queue or run, and nothing happens to them for hours. Such a job is *at rest* (`rests`): it
waits for nothing that passes with time. It is looked at again when Slurm's record of it, its control message, its reports, a
request of `penstock hold` or `penstock release`, the state of its nodes, or something that concerns the whole site has changed,
and in any case once in `EVERYTHING_S`. All other jobs are looked at in every observation.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal

from penstock_profiles.wire import ControlMessage
from penstock_scheduler.api.ports import SpecCheck
from penstock_scheduler.model import GpuClass, Job, JobId, JobSpec, Phase, WaitingJob
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import SlurmJob, SlurmReader, SlurmWriter
from penstock_slurm.gateway.base import ENDED, WAITING
from penstock_slurm.jobs.arrays import Arrays
from penstock_slurm.jobs.holds import Holds
from penstock_slurm.jobs.licences import Licences
from penstock_slurm.jobs.messages import say_all
from penstock_slurm.jobs.notes import lacks_spool, node_choice, request, waits_for
from penstock_slurm.jobs.remembered import Remembered, StateLog
from penstock_slurm.jobs.reused_ids import ReusedIds
from penstock_slurm.jobs.states import HOLDING
from penstock_slurm.jobs.unstarted import Unstarted
from penstock_slurm.observe.sorting import SortedJobs, sort_jobs
from penstock_slurm.observe.view import Scene, Spooled, Views, left_behind, unseen_job

log = logging.getLogger(__name__)

EVERYTHING_S = 60.0
"""Longest time between two looks at the same job."""

UNHEARD_S = 300.0
"""For how long after its start a run that has reported nothing is looked at in each tick."""


def rests(record: SlurmJob, job: Job, spooled: Spooled, scene: Scene) -> bool:
    """Whether a job that a round may place or stop stays as it is until something changes: see the module."""
    control = spooled.control
    if record.gpus_per_node is None:
        return False  # whether its GRES was cleared is in the spool
    if job.phase is Phase.QUEUED:
        return record.held and record.deadline_s is None and (control is None or control.moved_s is None)
    if job.phase is not Phase.RUNNING or record.state != "RUNNING" or record.start_s is None:
        return False
    held_meanwhile = control is not None and control.holding == record.restarts  # a release of it may be tried again
    if left_behind(record, spooled.present):
        return False
    heard = spooled.present is not None or scene.now_s - record.start_s >= UNHEARD_S
    return heard and not held_meanwhile and scene.silent.isdisjoint(record.nodes)


def awaits_reports(record: SlurmJob, job: Job, spooled: Spooled, now_s: float) -> bool:
    """Whether something waits for a job's reports: it was asked to save, or began a moment ago and has reported nothing."""
    begun_s = record.start_s if spooled.present is None and record.state in HOLDING else None
    return job.phase is Phase.STOPPING or (begun_s is not None and now_s - begun_s < UNHEARD_S)


class ManagedJobs:
    """See the module. The mappings are made anew at each observation.

    Args:
        partitions: the managed partitions, that of the cloud included.
        adopt: see `[slurm] adopt`.
        start_patience_s: see `[slurm] start_patience_s`.
    """

    told_round = 0
    """See `ClusterState`."""
    unspooled: frozenset[JobId] = frozenset()
    """See `ClusterState`."""

    def __init__(
        self,
        reader: SlurmReader,
        writer: SlurmWriter,
        spool: Spool,
        partitions: Sequence[str],
        adopt: Sequence[str],
        check: SpecCheck,
        start_patience_s: float,
    ) -> None:
        self._writer, self._spool, self._check, self._partitions, self._adopt = writer, spool, check, partitions, adopt
        self._reused_ids = ReusedIds(spool)
        self._views = Views()
        self._at_rest: dict[JobId, SlurmJob] = {}
        """Jobs at rest, and their records when they were last looked at."""
        self._resting_jobs: dict[JobId, Job] = {}
        self.steady: dict[JobId, SlurmJob] = {}
        """Those of the jobs at rest that run."""
        self._site: object = None
        self._everything_s = -math.inf
        """When all jobs were looked at."""
        self._listed: Sequence[SlurmJob] = ()
        self._counts: Counter[int] | None = None
        self._were: Set[JobId] = frozenset()
        """Listed jobs that this or an earlier observation has sorted among the managed ones."""
        self._arrays, self._licences = Arrays(reader), Licences(reader)
        self._kept_back: dict[JobId, WaitingJob] = {}
        """Jobs that a round does not see yet: they wait for others of their array, or Slurm did not start them."""
        self.unstarted = Unstarted(start_patience_s)
        self.holds = Holds(writer, spool)
        self.states = StateLog()
        self.remembered = Remembered()
        self.records: dict[JobId, SlurmJob] = {}
        """Slurm's records of the jobs that a round may place or stop."""
        self.jobs: dict[JobId, Job] = {}
        """What the scheduler sees of these."""
        self.looked: dict[JobId, SlurmJob] = {}
        """Those that were looked at in this observation."""
        self.behind: dict[JobId, SlurmJob] = {}
        """Those of these whose runs have left nodes that they hold."""
        self.busy: dict[JobId, SlurmJob] = {}
        """These, and all that run. The others are in the queue."""
        self.not_yet: dict[JobId, SlurmJob] = {}
        """Jobs that wait for what their user requested."""
        self.held: dict[JobId, SlurmJob] = {}
        """Pending jobs that somebody holds."""
        self.waiting: tuple[WaitingJob, ...] = ()
        """Both of these, for people."""
        self.unseen: tuple[Job, ...] = ()
        """See `ClusterState`."""
        self.told: dict[JobId, None] = {}
        """Jobs of `jobs` that may report: they are not in the queue, or have had a control message. In
        an order that stays, so that each gets its turn to be read."""
        self.unheard: set[JobId] = set()
        """Jobs that were asked to save, or have begun a moment ago: something waits for their reports."""
        self.gone: dict[JobId, SlurmJob | None] = {}
        """Jobs that were managed and that Slurm lists as ending or ended, or (None) not at all."""
        self.left: set[JobId] = set()
        """Jobs of the last observation's `jobs` that this one does not have."""
        self.listed: set[JobId] = set()
        """All jobs that Slurm has listed."""

    def changed(
        self, records: Sequence[SlurmJob], site: object, now_s: float
    ) -> tuple[list[SlurmJob], frozenset[JobId]]:
        """The jobs to look at; and the ids that other jobs have now, which this observation leaves out.

        Args:
            records: all jobs that Slurm lists.
            site: what every job depends on. If it has changed, all jobs are looked at.
            now_s: the time.
        """
        self.holds.look()
        touched = self._spool.take_changed()
        everything = touched is None or site != self._site or not 0 <= now_s - self._everything_s < EVERYTHING_S
        if touched is None or everything:
            self._site, self._everything_s, found = site, now_s, list(records)
            self._at_rest.clear()
        else:
            for job_id in touched | self.holds.asked_for:
                self._at_rest.pop(job_id, None)
            at_rest = self._at_rest
            found = [job for job in records if at_rest.get(job.id) is not job]
            for job in found:
                at_rest.pop(job.id, None)
        self._listed, self._counts = records, None
        self.listed = {job.id for job in records}
        for job_id in self._at_rest.keys() - self.listed:
            del self._at_rest[job_id]
        self.steady = {job_id: record for job_id, record in self.steady.items() if job_id in self._at_rest}
        replaced = self._reused_ids.look(found, self.listed)
        if replaced:
            found = [job for job in found if job.id not in replaced]
            self.listed -= replaced
        return found, replaced

    def sort(self, records: Iterable[SlurmJob]) -> SortedJobs:
        """Which of these jobs Penstock manages. The others of them are told why, as far as they ask for it."""
        found = sort_jobs(
            records,
            self._partitions,
            adopt=self._adopt,
            cleared=self.cleared,
            sent=self.sent,
            was_managed=self._was_managed,
            shares_by=self._shares_by,
            check=self._check,
        )
        self._were = (self._were & self.listed) | found.managed.keys()
        return found

    def take_over(
        self, found: SortedJobs, records: Sequence[SlurmJob], gone: Mapping[JobId, SlurmJob | None], scene: Scene
    ) -> None:
        """Take over an observation.

        Args:
            found: the managed ones of `records`.
            records: the jobs to look at; the other listed jobs are at rest.
            gone: known jobs that are not listed any more, or end.
            scene: what the observation knows beside the single jobs.
        """
        say_all(self._writer, found.messages)
        self.unseen = tuple(self._unseen(found, scene))
        before, self.gone = self.jobs.keys(), dict(gone)
        records = self._wake(found, records, scene)
        still = {**self._at_rest}
        told = {job_id: None for job_id in self.told if job_id in still}
        looked: dict[JobId, Job] = {}
        resting: dict[JobId, SlurmJob] = {}
        behind: set[JobId] = set()
        self.looked, self.not_yet, self.held, self.unheard, self.told = {}, {}, {}, set(), told
        waiting: list[WaitingJob] = []
        self._views.begin(scene)
        self._views.forget(found.managed.keys() | still.keys())
        for job_id, (record, spec) in found.managed.items():
            job, spooled = self._look(record, spec, scene)
            if job is None:
                continue
            if awaits_reports(record, job, spooled, scene.now_s):
                self.unheard.add(job_id)
            if (why := self._waits(record, job, spooled, scene)) is not None:
                waiting.append(why)
                continue
            self.looked[job_id], looked[job_id] = record, job
            if job.phase is not Phase.QUEUED or spooled.control is not None:
                self.told[job_id] = None
            if left_behind(record, spooled.present):
                behind.add(job_id)
            if rests(record, job, spooled, scene):
                resting[job_id] = record
        self.records, self.jobs, seen = still | self.looked, self._resting_jobs | looked, self.looked
        self._let_rest(resting, looked)
        waiting += self._not_now(scene.now_s)
        self.looked = {job_id: record for job_id, record in seen.items() if job_id in self.jobs}
        self.busy = self.steady | self.looked
        lacks = {job_id for job_id, record in self.looked.items() if lacks_spool(record, self._spool.folder.absolute())}
        self.unspooled = frozenset((self.unspooled & self.steady.keys()) | lacks)
        self.behind = {job_id: record for job_id, record in self.looked.items() if job_id in behind}
        self.waiting, self.left = tuple(waiting), before - self.jobs.keys()
        self.holds.forget({job_id for job_id, job in self.gone.items() if job is None or job.state in ENDED})
        self.remembered.saw(seen, looked, still.keys(), (*records, *self.steady.values()), scene.now_s)

    def _wake(self, found: SortedJobs, records: Sequence[SlurmJob], scene: Scene) -> Sequence[SlurmJob]:
        """Take the jobs with which something is the matter out of those at rest, and into `found`.

        Returns:
            The records of all jobs to look at.
        """
        woken = []
        if scene.silent or scene.without_gpus or scene.misplaced:
            woken = [record for record in self.steady.values() if scene.concerns(record)]
        for record in woken:
            found.managed[record.id] = record, self._resting_jobs[record.id].spec
            del self._at_rest[record.id], self.steady[record.id]
        for job_id in self._resting_jobs.keys() - self._at_rest.keys():
            del self._resting_jobs[job_id]
        return [*records, *woken] if woken else records

    def _look(self, record: SlurmJob, spec: JobSpec, scene: Scene) -> tuple[Job | None, Spooled]:
        """A job as the scheduler sees it, or None if it is ending for good; and what the spool has of it."""
        self._reused_ids.begin(record)
        spooled = self.spooled(record)
        if self.holds.settle(record, spooled.control):
            spooled = self.spooled(record)
        if spooled.control is not None:
            self.told_round = max(self.told_round, spooled.control.round)
        now, job = self._views.of(record, spec, spooled, scene)
        self.states.saw(record.id, now)
        return job, spooled

    def _let_rest(self, resting: Mapping[JobId, SlurmJob], looked: Mapping[JobId, Job]) -> None:
        """Leave these of the jobs that were looked at alone until something changes."""
        self._at_rest |= resting
        self.steady |= {job_id: record for job_id, record in resting.items() if record.state == "RUNNING"}
        self._resting_jobs |= {job_id: looked[job_id] for job_id in resting}

    def _unseen(self, found: SortedJobs, scene: Scene) -> Iterator[Job]:
        """See `ClusterState.unseen`."""
        for each in found.refused:
            record = found.records[each.job]
            control = self._sent_by(record) if each.runs else None
            job = unseen_job(record, control, scene) if control is not None else None
            if job is not None:
                yield job

    def _waits(self, record: SlurmJob, job: Job, spooled: Spooled, scene: Scene) -> WaitingJob | None:
        """A pending job that waits for something else than GPUs; None: it does not."""
        text = self.holds.text(record, spooled.control)
        other = waits_for(record, scene.now_s) if record.state in WAITING and not text else ""
        if not text and not other:
            return None
        (self.held if text else self.not_yet)[job.id] = record
        code: Literal["held", "waiting-cluster"] = "held" if text else "waiting-cluster"
        queued = dataclasses.replace(job, phase=Phase.QUEUED, allocation=None)
        return WaitingJob(queued, code, text or f"waits for {other}")

    def _not_now(self, now_s: float) -> Iterable[WaitingJob]:
        """Take the jobs out of `records` and `jobs` that a round is not to place yet."""
        beyond = self._arrays.beyond(self.records, self.jobs, self._listed)
        lacking = self._licences.lacking(self.records, self.jobs)
        for job_id in lacking.keys() & self._licences.refused:
            if (sent_to := self.jobs[job_id].allocation) is not None:
                self.unstarted.refused(job_id, sent_to, lacking[job_id], now_s)
        beyond |= lacking
        paused = self.unstarted.paused(self.jobs, ChainMap(self.held, self.not_yet), now_s)
        # Slurm has started those that are not pending any more, and boots their nodes.
        beyond |= {job_id: text for job_id, text in paused.items() if self.records[job_id].state in WAITING}
        self._kept_back = {job_id: self._keep_back(job_id, text) for job_id, text in beyond.items()}
        return self._kept_back.values()

    def _keep_back(self, job_id: JobId, text: str) -> WaitingJob:
        """A job that a round is not to place yet. Slurm must not start it by itself: others have a placement there."""
        self.not_yet[job_id], job = self.records.pop(job_id), self.jobs.pop(job_id)
        if job_id in self.told:
            del self.told[job_id]
            self._at_rest.pop(job_id, None)  # it is told again when its turn comes
        if job.phase is not Phase.QUEUED:
            self.holds.keep_back(self.not_yet[job_id])
            job = dataclasses.replace(job, phase=Phase.QUEUED, allocation=None)
        before = self._kept_back.get(job_id)
        same = before is not None and before.job is job and before.text == text
        return before if before is not None and same else WaitingJob(job, "waiting-cluster", text)

    # --- questions

    def sent(self, job: SlurmJob) -> bool:
        """Whether Penstock has sent the job to nodes."""
        return self._sent_by(job) is not None

    def _sent_by(self, job: SlurmJob) -> ControlMessage | None:
        """The control message that says to which nodes Penstock has sent the job; None: it has not."""
        control = self._reused_ids.control(job)
        return control if control is not None and control.nodes is not None else None

    def matters(self, job_id: JobId, restarts: int) -> bool:
        """Whether this is the present or the last run of a job that a round may place or stop."""
        record = self.records.get(job_id)
        return record is not None and restarts in (record.restarts, record.restarts - 1)

    def shares_record(self, job: SlurmJob) -> bool:
        """Whether the job is an array's element that shares a job record with others."""
        if job.array_job_id is None:
            return False
        if self._counts is None:
            self._counts = Counter(each.number for each in self._listed if each.array_job_id is not None)
        return self._counts[job.number] > 1

    def cleared(self, job: SlurmJob) -> bool:
        """Whether Penstock has cleared the job's GRES, because it shares GPUs that the GPU reservation holds."""
        control = self._reused_ids.control(job) if job.gpus_per_node is None else None
        return control is not None and control.shares

    def spooled(self, job: SlurmJob) -> Spooled:
        """What the spool has of a job now."""
        control, epoch = self._spool.control(job.id), self._spool.newest_epoch(job.id)
        superseded = epoch is None or (control is not None and epoch < control.epoch)
        request = control.request if control is not None else None
        failure, failures = self._spool.refused(job.id, request.id) if request is not None else ("", 0)
        return Spooled(
            control=control,
            present=None if superseded or epoch is None else self._spool.started(job.id, epoch),
            epoch=epoch or 0,
            saved=request is not None and self._spool.answered(job.id, request.id) is not None,
            failure=failure,
            failures=failures,
        )

    def _was_managed(self, job: SlurmJob) -> bool:
        """Whether a job without a job spec had one before. A job without one now may get one, so "no" is no final answer."""
        return job.id in self._were or self._reused_ids.control(job) is not None

    def _shares_by(self, job: SlurmJob) -> JobSpec | None:
        """The newest job spec of a job that runs on GPUs of the GPU reservation, or None."""
        control = self._sent_by(job)
        if job.state not in HOLDING or control is None or not self.cleared(job):
            return None
        try:
            request(job), node_choice(job)
        except BadJobSpec:
            return None
        gpus = control.gpus or 1
        unknown = JobSpec(min_gpus=gpus, max_gpus=gpus, gpu_class=GpuClass.OPPORTUNISTIC)  # of an earlier penstockd
        return self.jobs[job.id].spec if job.id in self.jobs else unknown
