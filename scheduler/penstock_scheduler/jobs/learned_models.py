"""What jobs report while they run improves the models that rounds are decided with.

A job's first measurement begins a model of its own. Until then, and while it is like them, ended jobs of its kind tell how fast
it is.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock_profiles.estimators import AnyEstimator, LinearEstimator, TableEstimator, TrainingEstimator
from penstock_profiles.learning import JobModel, Kin, on_all
from penstock_profiles.profiles import Profile
from penstock_profiles.wire import Checkpointed, Ended, Observation, Report, SaveFailed, Started
from penstock_scheduler.jobs import claims
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.jobs.reused_ids import is_another
from penstock_scheduler.jobs.saving import ReportHistory, Saving
from penstock_scheduler.jobs.sensitivities import Sensitivities
from penstock_scheduler.model import Job, JobFacts, JobId, JobSpec, Phase, Promise
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.units import times
from penstock_scheduler.store.leadership.site_clock import site_time_s

log = logging.getLogger(__name__)

Made = TypeVar("Made")

NEWEST = 2000
"""Newest observations of a job that a new daemon learns from."""


class LearnedHistory(ReportHistory, Protocol):
    """The store of measurements: the daemon's store."""

    def observations(self, job: str, newest: int) -> list[Report]:
        """The newest measurements of a job, oldest first."""
        ...

    def observed_since(self, row: int | None) -> tuple[int, frozenset[str]]:
        """The newest stored measurement, and the jobs that were measured since `row`, which an earlier call returned."""
        ...

    def profiles(self, user: str, job_name: str | None = None) -> list[Profile]:
        """A user's profiles of jobs of this name."""
        ...

    def profiled(self) -> frozenset[tuple[str, str]]:
        """(user, job's name) of all profiles."""
        ...

    def add_model(self, job: str, time_s: float, estimator: AnyEstimator) -> None:
        """Save a job's new model."""
        ...


class LearnedModels:
    """Models from job specs, and from a job's first measurement on, fits of its measurements.

    Jobs with a `goodput_table` keep it as far as their measurements agree. A new daemon fits again from the store's history.
    Reported progress gives the work that is left, unless the job spec has a table. All of it is bounded; see `claims`.

    Args:
        specs: models from job specs.
        history: the store.
        sensitivities: corrects sensitivity profiles.
        kin: recalls earlier jobs of the kind of a job of which nothing else is known; None: nothing is recalled.
        before: the newest round before this daemon started; None: there was none.
    """

    def __init__(
        self,
        specs: SpecModels,
        history: LearnedHistory,
        sensitivities: Sensitivities | None = None,
        kin: Callable[[Sequence[Job]], Mapping[JobId, Kin | None]] | None = None,
        before: RoundRecord | None = None,
    ) -> None:
        self._specs, self._history, self._recall = specs, history, kin
        self._kin: dict[JobId, Kin | None] = {}
        self._like_kin: dict[JobId, TrainingEstimator] = {}
        """The models of jobs that are like their kin, on all GPU types of the site."""
        self._sensitivities = Sensitivities() if sensitivities is None else sensitivities
        self._saving = Saving(history)
        self._models: dict[JobId, tuple[JobSpec, JobModel]] = {}
        self._unmeasured: dict[JobId, JobSpec] = {}
        """Jobs of which the store has neither measurements nor a profile, so that it is not asked again until it has."""
        self._newest_row: int | None = None
        self._profiled: frozenset[tuple[str, str]] = frozenset()
        self._fresh: dict[JobId, list[Report]] = {}
        self._newest: dict[JobId, Number] = {}
        """The newest report of each job that its model has learned from, or that was stored before this daemon started."""
        self._progress: dict[JobId, ReportedProgress] = {}
        self._most_gpus: dict[JobId, int] = {}
        """Most GPUs that a job has held, by the cluster; what it holds now may be nothing, between two runs."""
        self._tables: dict[JobId, tuple[JobSpec, claims.TableCheck]] = {}
        self._made: dict[JobId, dict[str, tuple[object, object, Any]]] = {}
        """Job -> what was made for it -> the model and the rest that it was made of, and the result."""
        self._impossible: dict[JobId, str] = {}
        """What a job has reported that it cannot have measured, as a sentence."""
        self._paces: dict[JobId, claims.PaceCheck] = {}
        self._types: dict[JobId, set[str]] = {}
        """GPU types that a job has held, by the cluster."""
        self._failed: dict[JobId, str] = {}
        """Why no model could be made of a job's measurements."""
        self._submitted_s: dict[JobId, float] = {}
        """When the jobs of the last round were submitted."""
        if before is not None:
            seen = before.snapshot
            self._submitted_s = {job.id: job.submit_s for job in seen.jobs}
            self._most_gpus = {job: facts.largest_run_gpus or 0 for job, facts in seen.facts.items()}
            self._types = {job: set(facts.attained_gpu_s) for job, facts in seen.facts.items()}
        self._lock = threading.Lock()

    def learn(self, reports: Sequence[Report]) -> None:
        """Take over reports. May be called from any thread."""
        with self._lock:
            for report in reports:
                body = report.body
                if isinstance(body, Observation | Started | Checkpointed | SaveFailed):
                    self._fresh.setdefault(report.job_id, []).append(report)
                self._take_progress(report)

    def _take_progress(self, report: Report) -> None:
        self._progress[report.job_id] = self._progress.get(report.job_id, ReportedProgress()).after(report)

    def facts(self, jobs: Sequence[Job], gpu_types: Iterable[str]) -> dict[JobId, JobFacts]:
        """See `ports.ModelSource`."""
        with self._lock:
            news, self._fresh = self._fresh, {}
        there = {job.id for job in jobs if not is_another(job, self._submitted_s.get(job.id))}
        self._submitted_s = {job.id: job.submit_s for job in jobs}
        with self._lock:  # `learn` adds to them from another thread
            for table in (
                self._models,
                self._newest,
                self._progress,
                self._most_gpus,
                self._tables,
                self._made,
                self._paces,
                self._impossible,
                self._types,
                self._kin,
                self._like_kin,
                self._unmeasured,
                self._failed,
            ):
                for gone in [job for job in table if job not in there]:
                    del table[gone]
        self._sensitivities.refresh()
        self._sensitivities.learn(jobs, news)
        fresh = self._newer(jobs, news)
        self._saving.refresh(jobs, fresh)
        known = self._specs.facts(jobs, gpu_types, self._saving.costs(jobs), self._saving.saves)
        self._newest_row, measured = self._history.observed_since(self._newest_row)
        self._profiled = self._history.profiled()
        for job_id in measured & self._unmeasured.keys():
            del self._unmeasured[job_id]
        self._recall_kin(jobs, known)
        for job in jobs:
            self._most_gpus[job.id] = max(
                0 if job.allocation is None else job.allocation.gpus, self._most_gpus.get(job.id, 0)
            )
            if job.allocation is not None:
                self._types.setdefault(job.id, set()).add(job.allocation.gpu_type)
            if known[job.id].largest_run_gpus not in (None, self._most_gpus[job.id]):  # its own runs show how it scales
                known[job.id] = replace(known[job.id], largest_run_gpus=self._most_gpus[job.id])
            if failure := self._saving.failure(job.id):
                known[job.id] = replace(known[job.id], save_failure=failure)
            if starts_until_s := self._saving.starts_until_s(job):
                known[job.id] = replace(known[job.id], starts_until_s=starts_until_s)
            if job.spec.goodput_table is not None and not self._specs.check_claims:
                continue
            of_job = self._facts_of if job.spec.goodput_table is None else self._facts_of_table
            try:
                known[job.id] = of_job(job, known[job.id], fresh.get(job.id, []))
            except (ArithmeticError, TypeError, ValueError) as error:  # it must fail this job, and not the round
                self._fail(job.id, error)
        return known

    def _fail(self, job: JobId, error: Exception) -> None:
        """Log why a job's measurements are of no use, once."""
        text = f"{type(error).__name__}: {error}"[:200]
        if self._failed.get(job) != text:
            self._failed[job] = text
            log.warning("measurements ignored", extra={"job": job, "text": text})

    def _newer(self, jobs: Sequence[Job], news: Mapping[JobId, Sequence[Report]]) -> dict[JobId, list[Report]]:
        """The reports that are newer than all that was known of their job. A daemon that starts reads old ones again."""
        newer = {}
        for job in jobs:
            if job.id not in self._newest:
                ran = job.phase is not Phase.QUEUED or job.restarts
                stored = self._history.newest_reports(job.id, ("started", "observation"), 1) if ran else []
                self._newest[job.id] = max(map(number, stored), default=NOTHING)
            if fresh := [each for each in news.get(job.id, ()) if number(each) > self._newest[job.id]]:
                newer[job.id] = fresh
                self._newest[job.id] = max(map(number, fresh))
        return newer

    def _facts_of(self, job: Job, facts: JobFacts, fresh: Sequence[Report]) -> JobFacts:
        """What is known of a job of which its job spec tells `facts`."""
        kin = self._kin.get(job.id)
        model = self._learnt(job, facts.model, fresh, kin)
        pace = self._paces.setdefault(job.id, claims.PaceCheck())
        for report in fresh:
            if isinstance(report.body, Observation) and self._held(job.id, report):
                pace.saw(report.epoch, report.body, report.time_s)
        if model is not None and facts.unmeasured_types:
            measured = self._models[job.id][1].measured
            left = tuple(name for name in facts.unmeasured_types if name not in measured)
            facts = replace(facts, unmeasured_types=left)
        so_far = self._progress.get(job.id, ReportedProgress())
        if kin is not None and (model is None or self._models[job.id][1].like_kin):
            facts = self._facts_of_kin(job.id, facts, kin, so_far)
        if model is None or isinstance(model, LinearEstimator):
            return self._unless_silent(job.id, facts)
        learnt = model
        self._same(job.id, "stored", learnt, None, lambda: self._history.add_model(job.id, site_time_s(), learnt))
        model, doubt = self._as_it_counts(job.id, model) if self._specs.check_claims else (model, "")
        facts = replace(facts, model=model, doubts=(*facts.doubts, doubt) if doubt else facts.doubts)
        if so_far.total is not None:
            left_work = max(so_far.total - so_far.done, 0.0)
            said = self._promise(job.id, model, so_far, so_far.total if so_far.promised is None else so_far.promised)
            facts = replace(facts, remaining_work=left_work, promise=said if self._specs.check_claims else None)
        return facts if self._models[job.id][1].has_run else self._unless_silent(job.id, facts)

    def _facts_of_kin(self, job: JobId, facts: JobFacts, kin: Kin, so_far: ReportedProgress) -> JobFacts:
        """The facts of a job that is like its kin, as far as can be seen."""
        model = self._like_kin[job]
        return replace(
            facts,
            model=model,
            largest_run_gpus=max(kin.most_gpus, facts.largest_run_gpus or 0),
            likely_work=tuple(work - so_far.done for work in kin.work if work > so_far.done),
            promise=self._promise(job, model, so_far, 0.0),
        )

    def _unless_silent(self, job: JobId, facts: JobFacts) -> JobFacts:
        """The facts of a job that has measured nothing itself, with what counts of them once it has run."""
        gpus, model, wrong = self._most_gpus[job], facts.model, self._impossible.get(job)
        if not self._specs.check_claims or not gpus:
            return facts
        power, ratio = claims.SILENT_POWER if wrong is None else 0.0, self._specs.unmeasured_ratio
        silent = self._same(job, "silent", model, power, lambda: claims.as_silent(model, ratio, power))
        if wrong is not None:
            doubts = (*facts.doubts, wrong)
            return replace(facts, model=silent, likely_work=(claims.VERY_LONG_GPU_S,), promise=None, doubts=doubts)
        if isinstance(facts.model, LinearEstimator):
            return replace(facts, model=silent)
        return replace(facts, promise=replace(facts.promise or Promise(0.0, 0.0, gpus, {}), silent=silent))

    def _as_it_counts(self, job: JobId, model: AnyEstimator) -> tuple[AnyEstimator, str]:
        """The model without what is not plausible, and what that is, as a sentence; the same object while nothing changes."""
        if not isinstance(model, TrainingEstimator):
            return model, ""
        behind = self._paces[job].behind(model) if job in self._paces else {}
        # A factor that changes by a few percent makes no new model.
        by = (
            self._specs.gpu_types,
            tuple((name, round(math.log2(factor), 1)) for name, factor in sorted(behind.items())),
        )
        counts = self._same(
            job, "counts", model, by, lambda: claims.bounded(claims.slower_on(model, behind), self._specs.ratio)
        )
        text = ""
        if behind:
            name = max(behind, key=lambda each: (behind[each], each))
            text = (
                f"on {name}, its steps are {times(behind[name])} as fast as its progress, compared with its other types, so its "
                "progress counts: correct the step times or the progress of its reports"
            )
        return counts, text

    def _promise(self, job: JobId, model: AnyEstimator, so_far: ReportedProgress, work: float) -> Promise:
        gpus, types = self._most_gpus[job], self._specs.gpu_types
        said = self._same(job, "promise", model, gpus, lambda: claims.promise(work, so_far.done, model, gpus, types))
        return replace(said, work=work, done=so_far.done)

    def _same(self, job: JobId, what: str, model: object, by: object, make: Callable[[], Made]) -> Made:
        """The object that was made for this job last, or a new one if the model or `by` has changed since."""
        made = self._made.setdefault(job, {})
        if what not in made or made[what][0] is not model or made[what][1] != by:
            made[what] = model, by, make()
        return made[what][2]  # type: ignore[no-any-return]

    def _facts_of_table(self, job: Job, facts: JobFacts, fresh: Sequence[Report]) -> JobFacts:
        """What is known of a job with a declared table, by that table and by what the job measures."""
        known, news = self._tables.get(job.id), fresh
        if known is None or known[0] != job.spec:
            assert job.spec.goodput_table is not None, "it has a table"
            known = self._tables[job.id] = job.spec, claims.TableCheck(job.spec.goodput_table)
            if job.phase is not Phase.QUEUED or job.restarts:
                news = self._history.observations(job.id, NEWEST) or fresh
        check = known[1]
        for report in news:
            if isinstance(report.body, Observation):
                check.saw(report.body, self._most_gpus[job.id])
        rates, doubt = check.believed(self._specs.unmeasured_ratio, self._specs.ratio)
        doubts = (*facts.doubts, doubt) if doubt else facts.doubts
        facts = replace(facts, doubts=doubts, largest_run_gpus=self._most_gpus[job.id])
        if not check.measured and not self._most_gpus[job.id]:
            return facts
        return replace(facts, model=self._same(job.id, "table", None, rates, lambda: TableEstimator(rates)))

    def _held(self, job: JobId, report: Report) -> bool:
        """Whether the job may have measured this: on no more GPUs than it has held, and of a type that it has held."""
        body, types = report.body, self._types.get(job)
        if (
            not isinstance(body, Observation)
            or not self._specs.check_claims
            or not types
            or body.gpu_type not in self._specs.gpu_types
        ):
            return True  # nothing tells: it may have run in the cloud
        if body.gpu_type in types and body.gpus <= self._most_gpus[job]:
            return True
        self._impossible[job] = (
            f"it reported a speed on {body.gpus} {body.gpu_type} GPUs, and has never held them, so that report does not count: "
            "report the GPUs that the job holds"
        )
        return False

    def _recall_kin(self, jobs: Sequence[Job], known: Mapping[JobId, JobFacts]) -> None:
        """What jobs of their kind have shown, for new jobs whose job spec tells nothing of their speed."""
        if self._recall is None:
            return
        new = [job for job in jobs if job.id not in self._kin and isinstance(known[job.id].model, LinearEstimator)]
        found = self._recall(new) if new else {}
        for job in [job for job in new if job.id in found]:
            kin, self._kin[job.id] = found[job.id], None
            if kin is None:
                continue
            try:
                model = replace(kin.estimator, models=on_all(kin.estimator.models, self._specs.gpu_types))
                model = claims.bounded(model, self._specs.ratio)
                if _serves(model, job, self._specs.gpu_types):
                    self._kin[job.id], self._like_kin[job.id] = kin, model
            except (ArithmeticError, TypeError, ValueError) as error:  # as in `facts`
                self._fail(job.id, error)

    def _learnt(self, job: Job, prior: AnyEstimator, news: Sequence[Report], kin: Kin | None) -> AnyEstimator | None:
        """The estimator of the job's model after `news`. Returns None if neither measurements nor profiles exist yet."""
        news = [report for report in news if self._held(job.id, report)]
        known = self._models.get(job.id)
        if known is not None and known[0] == job.spec:
            model, fresh = known[1], _observations(news)
        elif (begun := self._begin_model(job, prior, news, kin)) is not None:
            model, fresh = begun
        else:
            return None
        for each in fresh:
            try:
                model.observe_report(each)
            except ValueError as error:
                log.warning("observation ignored", extra={"job": job.id, "text": str(error)[:200]})
        return model.estimator

    def _begin_model(
        self, job: Job, prior: AnyEstimator, news: Sequence[Report], kin: Kin | None
    ) -> tuple[JobModel, list[Observation]] | None:
        """A job's new model that knows the profiles, and the observations that it has still to learn from: the stored ones
        and `news`. Returns None if neither exist, and then does not ask the store again until it has some."""
        profiled = (job.user, job.name) in self._profiled
        if not _observations(news) and not profiled and self._unmeasured.get(job.id) == job.spec:
            return None
        stored = self._history.observations(job.id, NEWEST)
        if stored:
            for report in (*self._history.newest_reports(job.id, ("started",)), stored[-1]):
                with self._lock:
                    self._take_progress(report)
        newer = [each for each in news if not stored or number(each) > number(stored[-1])]
        fresh = [*_observations(stored), *_observations(newer)]
        profiles = self._history.profiles(job.user, job.name) if profiled else []
        first = next(iter([*(each for profile in profiles for each in profile.observations), *fresh]), None)
        if first is None:
            self._unmeasured[job.id] = job.spec
            return None
        self._unmeasured.pop(job.id, None)
        model = self._specs.learner(job.spec, prior, first, kin, self._specs.gpu_types)
        for profile in profiles:
            model.observe_profile(profile)
        self._models[job.id] = job.spec, model
        return model, fresh


def _observations(reports: Iterable[Report]) -> list[Observation]:
    return [report.body for report in reports if isinstance(report.body, Observation)]


def _serves(model: TrainingEstimator, job: Job, gpu_types: Collection[str]) -> bool:
    """Whether the model gives progress where the job runs, and with the fewest GPUs of some type that it may have.

    A model that is only recalled must not keep a job from its GPUs.
    """

    def progresses(gpu_type: str, nodes: int, gpus: int) -> bool:
        return bool(model.goodput(gpu_type, np.array([nodes]), np.array([gpus]))[0] > 0)

    held, spec = job.running_on, job.spec
    if held is not None and not progresses(held.gpu_type, len(held.shares), held.gpus):
        return False
    fewest = {name: -(-spec.min_gpus // spec.unit(name)) * spec.unit(name) for name in sorted(gpu_types)}
    return any(spec.allows(name, gpus) and progresses(name, 1, gpus) for name, gpus in fewest.items())


Number = tuple[int, int]
"""Epoch and sequence of a report, by which the reports of a job are in order."""

NOTHING: Number = (-1, -1)
"""Before the first report."""


def number(report: Report) -> Number:
    """The number of a report."""
    return report.epoch, report.sequence


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """The newest that a job has reported of its progress, in samples of the initial batch size."""

    number: Number = NOTHING
    """Of the report that says so."""
    done: float = 0.0
    total: float | None = None
    """Progress at which the job is done; None: unknown."""
    promised: float | None = None
    """The first `total` that it reported."""
    failure: str = ""
    """Why its newest run failed, if it has, in the words of the process that reported it first."""
    cannot_save: str = ""
    """Why its last checkpoint could not be written, if it could not."""

    def after(self, report: Report) -> ReportedProgress:
        """What is known after a report.

        A daemon that has started reads the reports of running jobs again, from the first one: only newer ones change anything.
        """
        if number(report) <= self.number:
            return self
        body = report.body
        if isinstance(body, Started):
            promised = body.total if self.promised is None else self.promised
            return ReportedProgress(number(report), body.progress, body.total, promised, cannot_save=self.cannot_save)
        if isinstance(body, SaveFailed | Checkpointed):
            text = (body.text or "it gave no reason") if isinstance(body, SaveFailed) else ""
            return replace(self, number=number(report), cannot_save=text)
        # A run that fails before it has read its checkpoint ends with progress 0.
        if isinstance(body, Observation):
            return replace(self, number=number(report), done=body.progress)
        if isinstance(body, Ended):
            failure = self.failure or (body.text if body.outcome == "failed" else "")
            return replace(self, number=number(report), done=body.progress or self.done, failure=failure)
        return self
