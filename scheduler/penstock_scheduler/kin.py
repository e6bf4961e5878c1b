"""Recalls what ended jobs of the same kind have reported, for a job of which nothing else is known.

Two jobs are of one kind if they have the same user, the same name but for the numbers in it, and the same batch size and unit of
GPUs in their job specs. What they reported is in the store for as long as it keeps reports, so nothing is saved but what admins
have changed: a job that is deleted from the store is forgotten, kinds may be forgotten, and kinds of another site imported. An
imported kind is for the jobs of all users, and is believed less.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock_profiles.estimators import TrainingEstimator
from penstock_profiles.kin import IMPORTED_CERTAINTY, Kin, kind_by_name
from penstock_profiles.learning import JobModel
from penstock_profiles.wire import Observation, Report
from penstock_scheduler.errors import NoSuchKind, StoreError
from penstock_scheduler.messages import JobView
from penstock_scheduler.model import Job, JobSpec
from penstock_scheduler.model_messages import KindList, KindView, Taught

log = logging.getLogger(__name__)

LOOKED_AT = 200
"""Newest ended jobs of the user among which kin is looked for."""

JOBS = 5
"""Newest jobs of a kind that count."""

REPORTS = 200
"""Newest measurements of each of them."""

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

    def newest_job_change(self) -> int:
        """The number of the newest change of any job."""
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
        self._read_at = -1
        """The newest change of a job when `_by_user` was read."""
        self._by_user: dict[str, list[JobView]] = {}
        self._found: dict[str, tuple[tuple[str, ...], Kin | None]] = {}
        """Kind -> the jobs that taught it, and what they did."""

    def of(self, job: Job) -> Kin | None:
        """What earlier jobs of its kind have shown together; None: nothing. If the store does not answer, nothing is known."""
        try:
            return self._of(job)
        except StoreError as error:
            log.warning("earlier jobs of its kind not recalled", extra={"job": job.id, "text": str(error)[:200]})
            return None

    def _of(self, job: Job) -> Kin | None:
        kind, changed = kind_of(job.user, job.name, job.spec), self._changed()
        earlier = [view for view in self._ended_of(job.user) if view.id != job.id]
        earlier = _newest(earlier, kind, changed["forgotten"])
        ids = tuple(view.id for view in earlier)
        if kind not in self._found or self._found[kind][0] != ids:
            self._found[kind] = ids, self._together(earlier)
        found = self._found[kind][1]
        if found is not None:
            return found
        return _imported(changed["imported"], kind_of("", job.name, job.spec))

    def _ended_of(self, user: str) -> list[JobView]:
        """The user's newest ended jobs. They are read once for all new jobs of a round."""
        if (now := self._ended.newest_job_change()) != self._read_at:
            self._read_at, self._by_user = now, {}
        if user not in self._by_user:
            found = self._ended.jobs(user=user, states=("ended",), limit=LOOKED_AT)
            self._by_user[user] = [view for _, view in found]
        return self._by_user[user]

    def _together(self, earlier: Sequence[JobView]) -> Kin | None:
        """The oldest comes first, so that the newest measurements count most."""
        model: JobModel | None = None
        most_gpus, work = 0, []
        for view in reversed(earlier):
            seen = [report.body for report in self._ended.observations(view.id, REPORTS)]
            measured = [body for body in seen if isinstance(body, Observation)]
            if not measured:
                continue
            model = self._learner(earlier[0].spec, measured[0]) if model is None else model
            for body in measured:
                try:
                    model.observe_report(body)
                except ValueError as error:
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
            counted = _newest(views, name, changed["forgotten"])
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


def _newest(views: Sequence[JobView], kind: str, forgotten: Mapping[str, float]) -> list[JobView]:
    """The newest jobs of a kind that count."""
    since_s = forgotten.get(kind, 0.0)
    alike = [
        view for view in views if kind_of(view.user, view.name, view.spec) == kind and (view.end_s or 0.0) >= since_s
    ]
    return alike[:JOBS]


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
    return Kin(taught.estimator, taught.most_gpus, taught.work, IMPORTED_CERTAINTY)
