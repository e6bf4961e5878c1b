"""Recalls what ended jobs of the same kind have reported, for a job of which nothing else is known.

Two jobs are of one kind if they have the same user, the same name but for the numbers in it, and the same batch size and unit of
GPUs in their job specs. Where the user has no ended job of the kind, those of others in the same account count, and then an
import from another site. Both are believed less, and those of others do not tell how long a job is.

What jobs reported is in the store for as long as it keeps reports, so nothing is saved but what admins have changed: a job that
is deleted from the store is forgotten, kinds may be forgotten, and kinds of another site imported.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.learning import STRANGERS_CERTAINTY, JobModel, Kin, kind_by_name
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.api.model_messages import KindList, KindView, Taught
from penstock_scheduler.model import Job, JobId, JobSpec
from penstock_scheduler.people.errors import NoSuchKind, StoreError

log = logging.getLogger(__name__)

LOOKED_AT = 200
"""Newest ended jobs, of the user or of all users, among which kin is looked for."""

JOBS = 5
"""Newest jobs of a kind that count."""

REPORTS = 200
"""Newest measurements of each of them."""

READ = 3 * JOBS * REPORTS
"""Reports of ended jobs that a round reads at most, about a millisecond each, and those of the kind at which it is reached."""

KEPT = 1000
"""Kinds of which what they have shown is kept, because more jobs of them may come."""

LISTED = 2000
"""Newest ended jobs whose kinds are listed."""

CONTROL = "models"
"""What admins have changed, in the store: kind -> when it was forgotten; kind -> (when, what) was imported."""


class EndedJobs(Protocol):
    """Ended jobs, their measurements, and what admins have changed: the daemon's store."""

    def jobs(
        self, *, user: str | None = None, states: Sequence[str] = (), limit: int | None = None
    ) -> list[tuple[int, JobView]]:
        """(number, job), newest first."""
        ...

    def ended_with_model(self, limit: int) -> list[JobView]:
        """Ended jobs of which a model was saved, newest first."""
        ...

    def observations(self, job: str, newest: int) -> list[Report]:
        """The newest measurements of a job, oldest first."""
        ...

    def control(self, name: str) -> Any:
        """What admins have set under this name; None: nothing."""
        ...

    def set_control(self, name: str, value: Any) -> None:
        """Save what an admin sets."""
        ...


class KinOfJobs:
    """Finds the kin of jobs, and shows and changes what is recalled. `of` is for one thread; all else may be called from any.

    Args:
        ended: the store.
        learner: makes a model for a job spec; the second argument is its first measurement.
        recalls: whether new jobs start with what is found here; for people.
    """

    def __init__(
        self, ended: EndedJobs, learner: Callable[[JobSpec, Observation], JobModel], *, recalls: bool = True
    ) -> None:
        self._ended, self._learner, self.recalls = ended, learner, recalls
        self._changing = threading.Lock()
        self._found: dict[str, tuple[tuple[str, ...], Kin | None]] = {}
        """Kind -> the jobs that taught it, and what they did. The kinds of the last `KEPT` jobs."""
        self._calls, self._read_for = 0, dict[str, int]()
        """Calls of `of`; user who has new jobs -> the last one that read reports for them."""

    def of(self, jobs: Sequence[Job]) -> dict[JobId, Kin | None]:
        """What earlier jobs of each one's kind have shown together; None: nothing.

        Jobs are left out after `READ` reports, and all if the store does not answer: ask again.
        """
        found: dict[JobId, Kin | None] = {}
        try:
            changed, views = self._changed(), _EndedViews(self._ended)
            for job in self._in_turn(jobs):
                before = views.read
                with suppress(_Later):
                    found[job.id] = self._try(job, views, changed)
                if views.read > before:
                    self._read_for[job.user] = self._calls
        except StoreError as error:
            log.warning("earlier jobs of their kind not recalled", extra={"jobs": len(jobs), "text": str(error)[:200]})
            return {}
        return found

    def _in_turn(self, jobs: Sequence[Job]) -> list[Job]:
        """The first job of each user, then the second of each, and so on; first of users for whom least lately was read."""
        self._calls += 1
        self._read_for = {job.user: self._read_for.get(job.user, 0) for job in jobs}
        ranks, seen = dict[JobId, int](), Counter[str]()
        for job in jobs:
            ranks[job.id] = seen[job.user]
            seen[job.user] += 1
        last = self._read_for
        return sorted(jobs, key=lambda job: (ranks[job.id], last[job.user]))

    def _try(self, job: Job, views: _EndedViews, changed: Mapping[str, Any]) -> Kin | None:
        """As `_of`; None also if it fails: what others have reported, or an import, must not end a round."""
        try:
            return self._of(job, views, changed)
        except (ArithmeticError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"[:200]
            log.warning("earlier jobs of its kind not recalled", extra={"job": job.id, "text": text})
            return None

    def _of(self, job: Job, views: _EndedViews, changed: Mapping[str, Any]) -> Kin | None:
        kind, forgotten = kind_of("", job.name, job.spec), changed["forgotten"]
        own = self._shown_by(f"{job.user}{kind}", job, views.of_user(job.user, kind), forgotten, views)
        if own is not None:
            return own
        if job.account:
            alike = views.of_account(job.account, kind)
            others = self._shown_by(f"{job.account}:{kind}", job, alike, forgotten, views)
            if others is not None:
                return replace(others, work=(), certainty=STRANGERS_CERTAINTY)
        return _imported(changed["imported"], kind)

    def _shown_by(
        self, key: str, job: Job, alike: Sequence[JobView], forgotten: Mapping[str, float], views: _EndedViews
    ) -> Kin | None:
        """What these jobs of its kind have shown. It is kept until they are others. Raises _Later if enough was read."""
        earlier = _counted([view for view in alike if view.id != job.id], forgotten)
        ids = tuple(view.id for view in earlier)
        if not ids:
            return None
        known = self._found.get(key)
        if known is None or known[0] != ids:
            if views.read >= READ:
                raise _Later
            known = ids, self._together(earlier, views.observations)
        self._found.pop(key, None)
        self._found[key] = known
        if len(self._found) > KEPT:
            del self._found[next(iter(self._found))]
        return self._found[key][1]

    def _together(
        self, earlier: Sequence[JobView], observations: Callable[[str, int], list[Report]] | None = None
    ) -> Kin | None:
        """The oldest comes first, so that the newest measurements count most."""
        read = self._ended.observations if observations is None else observations
        model: JobModel | None = None
        most_gpus, work = 0, []
        for view in reversed(earlier):
            seen = [report.body for report in read(view.id, REPORTS)]
            measured = [body for body in seen if isinstance(body, Observation)]
            if not measured:
                continue
            model = self._learner(earlier[0].spec, measured[0]) if model is None else model
            for body in measured:
                try:
                    model.observe_report(body)
                except (ArithmeticError, TypeError, ValueError) as error:
                    log.warning("observation ignored", extra={"job": view.id, "text": str(error)[:200]})
            most_gpus = max(most_gpus, *(body.gpus for body in measured))
            if view.ended == "COMPLETED":
                work.append(view.total if view.total is not None else measured[-1].progress)
        if model is None or not isinstance(model.estimator, TrainingEstimator):
            return None
        return Kin(model.estimator, most_gpus, tuple(each for each in work if each > 0))

    def kinds(self, kind: str | None = None) -> KindList:
        """The kinds of the newest ended jobs, newest first, and the imported ones; or one, with what it has shown.

        Jobs with a table or a family of the catalogue are left out, because new jobs like them recall nothing.

        Raises:
            NoSuchKind: no ended job is of this kind.
        """
        changed, by_kind = self._changed(), dict[str, list[JobView]]()
        for view in self._ended.ended_with_model(LISTED):
            if view.spec.goodput_table is None and view.spec.model_family is None:
                by_kind.setdefault(kind_of(view.user, view.name, view.spec), []).append(view)
        found = []
        for name, views in by_kind.items():
            counted = _counted(views, changed["forgotten"])
            if not counted or (kind is not None and name != kind):
                continue
            taught = None if kind is None else _taught(counted[0], self._together(counted))
            newest_s = counted[0].end_s or 0.0
            found.append(KindView(kind=name, user=counted[0].user, jobs=len(counted), newest_s=newest_s, taught=taught))
        for name, (at_s, what) in changed["imported"].items():
            if kind is None or name == kind:
                taught = None if kind is None else Taught.model_validate(what, extra="ignore")
                found.append(KindView(kind=name, user="", jobs=0, newest_s=at_s, taught=taught))
        if kind is not None and not found:
            raise NoSuchKind(f"no ended job is of the kind {kind!r}; `penstock models list` shows the kinds")
        return KindList(kinds=sorted(found, key=lambda each: -each.newest_s), recalled=self.recalls)

    def forget(self, kind: str, now_s: float) -> KindView:
        """Let jobs of this kind that have ended teach no more, or drop an import. Jobs that are there keep what they recalled.

        Raises:
            NoSuchKind: no ended job is of this kind.
        """
        with self._changing:
            known = self.kinds(kind).kinds[0]
            changed = self._changed()
            if changed["imported"].pop(kind, None) is None:
                changed["forgotten"][kind] = now_s
            self._ended.set_control(CONTROL, changed)
        return known

    def bring(self, taught: Sequence[Taught], now_s: float) -> list[str]:
        """Import what another site has learned, for jobs of all users. Returns the kinds. The same kind is replaced."""
        with self._changing:
            changed = self._changed()
            kinds = [f"/{each.name}{each.request}" for each in taught]
            for kind, each in zip(kinds, taught, strict=True):
                changed["imported"][kind] = now_s, each.model_dump(mode="json")
            self._ended.set_control(CONTROL, changed)
        return kinds

    def _changed(self) -> dict[str, Any]:
        return {"forgotten": {}, "imported": {}} | (self._ended.control(CONTROL) or {})


class _Later(Exception):
    """This round has read enough; a later one recalls the job's kin."""


class _EndedViews:
    """The newest ended jobs by kind, each list read once: many new jobs may come in one round."""

    def __init__(self, ended: EndedJobs) -> None:
        self._ended = ended
        self._by_kind: dict[str | None, dict[str, list[JobView]]] = {}
        """User, or None for all users -> kind without its user -> jobs, newest first."""
        self.read = 0
        """Reports that were read."""

    def observations(self, job: str, newest: int) -> list[Report]:
        """As those of the store; they are counted."""
        found = self._ended.observations(job, newest)
        self.read += len(found)
        return found

    def of_user(self, user: str | None, kind: str) -> list[JobView]:
        """Those of a user or, with None, of all users."""
        if user not in self._by_kind:
            found: dict[str, list[JobView]] = {}
            for _, view in self._ended.jobs(user=user, states=("ended",), limit=LOOKED_AT):
                found.setdefault(kind_of("", view.name, view.spec), []).append(view)
            self._by_kind[user] = found
        return self._by_kind[user].get(kind, [])

    def of_account(self, account: str, kind: str) -> list[JobView]:
        """Those in an account."""
        return [view for view in self.of_user(None, kind) if view.account == account]


def kind_of(user: str, name: str, spec: JobSpec) -> str:
    """The kind of a job, as people write it: `ada/train-#@64-512`."""
    return f"{user}/{kind_by_name(name)}{_request(spec)}"


def _request(spec: JobSpec) -> str:
    given = (spec.batch_size, spec.max_batch_size, "fixed" if spec.fixed_batch else None)
    batches = "-".join(str(each) for each in given if each is not None)
    unit: int | str = (
        spec.scale_unit
        if isinstance(spec.scale_unit, int)
        else ",".join(f"{gpu_type}={gpus}" for gpu_type, gpus in sorted(spec.scale_unit.items()))
    )
    return "".join(
        (
            f"@{batches}" if batches else "",
            f"x{unit}" if unit != 1 else "",
            f"+{spec.model_family}" if spec.model_family is not None else "",
        )
    )


def _counted(alike: Sequence[JobView], forgotten: Mapping[str, float]) -> list[JobView]:
    """The newest of these jobs that count: those whose user's kind was not forgotten since they ended."""
    counted = (
        view for view in alike if (view.end_s or 0.0) >= forgotten.get(kind_of(view.user, view.name, view.spec), 0.0)
    )
    return list(islice(counted, JOBS))


def _taught(like: JobView, kin: Kin | None) -> Taught | None:
    if kin is None:
        return None
    return Taught(
        name=kind_by_name(like.name),
        request=_request(like.spec),
        estimator=kin.estimator,
        most_gpus=kin.most_gpus,
        work=kin.work,
    )


def _imported(imported: Mapping[str, tuple[float, Any]], kind: str) -> Kin | None:
    if kind not in imported:
        return None
    taught = Taught.model_validate(imported[kind][1], extra="ignore")
    return Kin(taught.estimator, taught.most_gpus, taught.work, STRANGERS_CERTAINTY)
