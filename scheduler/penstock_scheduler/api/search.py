"""A search by Optuna whose trials are jobs: `study.optimize(JobObjective(submission), n_trials=100, n_jobs=8)`.

::

    def submission(trial):
        rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        return Submission(command=("python", "/home/ada/train.py", f"--rate={rate}"), spec=JobSpec(max_gpus=4))

Each trial is one job. The jobs of a study are one trial group, so the site's policy compares them too. Optuna's pruner sees what
a job reports (`run.report`, `penstock-report metric`); the last report is the trial's value. Optuna is imported when the first
trial begins; `pip install optuna`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock_scheduler.api.client import ApiError, Client, DaemonAway
from penstock_scheduler.api.messages import JobView, Submission
from penstock_scheduler.model import ReasonCode
from penstock_scheduler.people.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""Longest time between two requests for the state of a job."""

AGAIN_S = 5.0
"""Time between two attempts to reach a daemon that is away."""

NAME_LENGTH = 100

Answer = TypeVar("Answer")


class TrialFailed(PenstockError):
    """The trial's job ended without a value. `study.optimize(..., catch=TrialFailed)` goes on with the other trials."""


class JobObjective:
    """An objective for `study.optimize`, one call a trial. Calls may run at the same time (`n_jobs`).

    A higher metric of a job is better. A study that minimises gets metrics with the opposite sign, which matches
    `run.report(loss, minimize=True)`.

    Args:
        submission: the job of a trial, from what Optuna suggests; `key` and the job spec's `trial_group` are set here.
        client: the connection to penstockd; None: as the environment variables say.
        samples_per_step: progress that makes one step, for example the samples of an epoch. Optuna's pruners compare trials at
            the same step. Results without progress count as steps 1, 2, and so on.
        rest_s: how long a trial may wait because the policy prefers better trials of its group. Then it is pruned.
        patience_s: how long the daemon may be away.

    Raises:
        TrialFailed: in a call: the job failed, or ended without a report of its metric.
        ConfigError: in a call: Optuna is not installed, or the study has several objectives.
        ApiError, DaemonAway: in a call: penstockd refuses, or is away for longer than `patience_s`.
    """

    def __init__(
        self,
        submission: Callable[[optuna.Trial], Submission],
        *,
        client: Client | None = None,
        samples_per_step: float = 1.0,
        rest_s: float = 600.0,
        patience_s: float = 600.0,
    ) -> None:
        if not (samples_per_step > 0 and rest_s > 0 and patience_s >= 0):
            raise ConfigError("samples_per_step and rest_s must be above 0, patience_s at least 0")
        self._submission = submission
        self._client = client if client is not None else Client.open()
        self._samples_per_step, self._rest_s, self._patience_s = samples_per_step, rest_s, patience_s

    def __call__(self, trial: optuna.Trial) -> float:
        """Run a trial and return its value. Raises optuna.TrialPruned if the pruner, the group's policy or a user ended it."""
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"{error}; pip install optuna") from None
        if len(trial.study.directions) != 1:
            raise ConfigError(
                "the study has several objectives, but a job reports one metric; use a study with one objective"
            )
        sign = -1.0 if trial.study.direction == optuna.study.StudyDirection.MINIMIZE else 1.0
        order = named(self._submission(trial), trial)
        view = self._patiently(partial(self._client.submit, order))
        log.info("trial=%d job=%s submitted", trial.number, view.id)
        trial.set_user_attr("penstock_job", view.id)
        heard = _ReportedResults(trial, sign, self._samples_per_step)
        try:
            view, reason = self._follow(view, heard)
        except (KeyboardInterrupt, SystemExit):
            self._client.cancel(view.id)
            raise
        if reason:
            self._patiently(partial(self._client.cancel, view.id))
            raise optuna.TrialPruned(f"job {view.id} {reason}")
        if view.ended == "CANCELLED":
            raise optuna.TrialPruned(f"job {view.id} was cancelled")
        if view.ended != "COMPLETED":
            more = f": it {view.ended_text}" if view.ended_text else ""
            raise TrialFailed(f"job {view.id} has ended: {view.ended}{more}; see penstock logs {view.id}")
        if view.result is None:
            raise TrialFailed(
                f"job {view.id} has reported no metric: call run.report(...) in the script, or penstock-report metric"
            )
        return sign * view.result.metric

    def _follow(self, view: JobView, heard: _ReportedResults) -> tuple[JobView, str]:
        """Wait until the job has ended (with reason ""), or until it must be ended, for the reason that is returned."""
        rests_since_s: float | None = None
        told = None
        while True:
            if view.result is not None and view.result != told:
                told = view.result
                results = self._patiently(partial(self._client.history, view.id)).results
                if heard.take(results) and view.state != "ended":
                    return view, "was ended by the study's pruner"
            if view.state == "ended":
                return view, ""
            now_s = time.monotonic()
            wait_s = WAIT_S
            if view.state == "queued" and view.reason == ReasonCode.STOPPED_BY_GROUP.value:
                rests_since_s = now_s if rests_since_s is None else rests_since_s
                left_s = rests_since_s + self._rest_s - now_s
                if left_s <= 0:
                    return view, f"has waited for {self._rest_s:g} s: other trials are better"
                wait_s = min(wait_s, left_s)
            else:
                rests_since_s = None
            view = self._patiently(partial(self._client.job, view.id, wait_s=wait_s, since=view.version))

    def _patiently(self, call: Callable[[], Answer]) -> Answer:
        """The answer to a request that may be repeated. Repeats it while the daemon is away or overloaded."""
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except (DaemonAway, ApiError) as error:
                passing = isinstance(error, DaemonAway) or error.status in (429, 503)
                if not passing or time.monotonic() >= until_s:
                    raise
                log.warning("asked again in %g s: %s", AGAIN_S, error)
            time.sleep(AGAIN_S)


def named(order: Submission, trial: optuna.Trial) -> Submission:
    """The job of this trial: with a key of its own, in the study's trial group."""
    study = re.sub(r"[^A-Za-z0-9_.@+-]", "-", trial.study.study_name)[:NAME_LENGTH]
    # Another storage numbers its trials anew, and may have a study of the same name.
    began = trial.datetime_start
    moment = f"{began:%Y%m%dT%H%M%S%f}" if began is not None else "0"
    spec = order.spec.model_copy(update={"trial_group": study})
    name = order.name or f"{study}-{trial.number}"
    return order.model_copy(update={"key": f"optuna:{study}:{trial.number}:{moment}", "spec": spec, "name": name})


class _ReportedResults:
    """The results of a job that Optuna knows."""

    def __init__(self, trial: optuna.Trial, sign: float, samples_per_step: float) -> None:
        self._trial, self._sign, self._samples_per_step = trial, sign, samples_per_step
        self._newest = (-1, -1)
        self._steps: set[int] = set()

    def take(self, reports: list[dict[str, Any]]) -> bool:
        """Report new results to Optuna. Returns whether its pruner wants to end the trial."""
        news = False
        for report in reports:
            number = report["epoch"], report["sequence"]
            if number <= self._newest:
                continue
            self._newest = number
            body = report["body"]
            progress = body["progress"] / self._samples_per_step
            step = round(progress) if progress > 0 else max(self._steps, default=0) + 1
            if step not in self._steps:  # a restarted run may reach the same step again
                self._steps.add(step)
                self._trial.report(self._sign * body["metric"], step)
                news = True
        return news and bool(self._trial.should_prune())
