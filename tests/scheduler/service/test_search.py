"""An Optuna study with jobs as trials, against the real API; the cluster behind it is made up, and the test plays it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from penstock_profiles.wire import Report, Result, Started
from penstock_scheduler.api import search
from penstock_scheduler.api.messages import Submission
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.api.search import JobObjective, TrialFailed
from penstock_scheduler.model import ClusterState, JobSpec, Phase, Reason, ReasonCode
from penstock_scheduler.people.errors import ConfigError
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import serving

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Played:
    """A cluster on which each job reports its metrics, one a look, and then ends as it should."""

    def __init__(self, api, metrics, ends=lambda rate: "COMPLETED", rests=lambda rate: False) -> None:
        self._api, self._metrics, self._ends, self._rests = api, metrics, ends, rests
        self._said: dict[str, int] = {}
        self._others = set(api.submitter.jobs)
        """Of tests before, which may not have ended."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(0.02)

    def look(self) -> None:
        board, submitter = self._api.board, self._api.submitter
        there, waiting = [], {}
        for number, (user, order) in list(submitter.jobs.items()):
            if number in self._others:
                continue
            rate = order.command[1]
            said, metrics = self._said.get(number, -1), self._metrics(rate)
            if number in submitter.cancelled:
                submitter.ended[number] = Fate("CANCELLED", 0, 1.0)
            elif said >= len(metrics):
                submitter.ended[number] = Fate(self._ends(rate), 0, 1.0)
            if number in submitter.ended:
                continue
            rests = self._rests(rate)
            held = {} if rests else {"allocation": on("t4", t4_00=1)}
            phase = Phase.QUEUED if rests else Phase.RUNNING
            spec = order.spec.model_dump(exclude_unset=True, exclude={"max_gpus"})
            there.append(job(number, user=user, phase=phase, max_gpus=1, **spec, **held))
            if rests:
                waiting[number] = Reason(ReasonCode.STOPPED_BY_GROUP, "others look better")
                continue
            progress = (said + 1) * 10.0
            told = Started(gpu_type="t4", gpu_ids={}) if said < 0 else Result(metric=metrics[said], progress=progress)
            report = Report(job_id=number, epoch=1, sequence=said + 1, time_s=100.0 + said, body=told)
            board.store.add_reports([report])
            board.take_reports([report])
            self._said[number] = said + 1
        plan = dataclasses.replace(board.record.plan, waiting=waiting)
        board.record = dataclasses.replace(board.record, plan=plan)
        board.observed(ClusterState(snapshot("t4:2x4", []).nodes, tuple(there)), time.time())


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("search")) as served:
        yield served


@pytest.fixture(autouse=True)
def anew(api, monkeypatch):
    api.submitter.cancelled.clear()
    monkeypatch.setattr(search, "WAIT_S", 2.0)
    before = set(api.submitter.jobs)
    api.new = lambda: {name: order for name, (_, order) in api.submitter.jobs.items() if name not in before}


def study(name: str, **more):
    return optuna.create_study(study_name=name, **{"direction": "maximize"} | more)


def rates(trial) -> Submission:
    rate = trial.suggest_categorical("rate", ["a", "b", "c"])
    return Submission(command=("train", rate), spec=JobSpec(max_gpus=1))


def fixed(studied, *values: str):
    """Trials that try these values, in this order."""
    for value in values:
        studied.enqueue_trial({"rate": value})
    return studied


@pytest.fixture
def objective(api):
    with api.client("me") as penstock:
        yield lambda **more: JobObjective(rates, client=penstock, samples_per_step=10.0, **more)


def test_trials_are_jobs_of_one_group_and_their_last_metric_is_the_value(api, objective):
    curves = {"a": [0.1, 0.2], "b": [0.5, 0.9], "c": [0.3, 0.4]}
    studied = fixed(study("night run"), "a", "b", "c")
    with Played(api, curves.get):
        studied.optimize(objective(), n_trials=3, n_jobs=3)
    assert studied.best_params == {"rate": "b"}
    assert sorted(trial.value for trial in studied.trials) == [0.2, 0.4, 0.9]
    steps = {trial.params["rate"]: trial.intermediate_values for trial in studied.trials}
    assert all(found and set(found.items()) <= set(enumerate(curves[rate], 1)) for rate, found in steps.items())
    orders = api.new()
    assert {trial.user_attrs["penstock_job"] for trial in studied.trials} == set(orders)
    assert {order.spec.trial_group for order in orders.values()} == {"night-run"}
    assert len({order.key for order in orders.values()}) == 3
    assert {order.name for order in orders.values()} == {"night-run-0", "night-run-1", "night-run-2"}


def test_a_study_that_minimises_gets_what_the_job_turned(api, objective):
    studied = fixed(study("loss", direction="minimize"), "a", "b")
    with Played(api, {"a": [-3.0, -2.0], "b": [-9.0, -1.0]}.get):
        studied.optimize(objective(), n_trials=2)
    assert (studied.best_value, studied.best_params) == (1.0, {"rate": "b"})
    assert all(value > 0 for trial in studied.trials for value in trial.intermediate_values.values())


def test_the_pruner_ends_a_job(api, objective):
    class Threshold(optuna.pruners.BasePruner):
        def prune(self, study, trial) -> bool:
            return trial.last_step >= 1 and trial.intermediate_values[trial.last_step] < 0.5

    studied = fixed(study("pruned", pruner=Threshold()), "a", "b")
    curves = {"a": [0.6, 0.1] + [0.1] * 10_000, "b": [0.6, 0.7]}
    with Played(api, curves.get):
        studied.optimize(objective(), n_trials=2)
    pruned, done = studied.trials
    assert (pruned.state.name, done.state.name, done.value) == ("PRUNED", "COMPLETE", 0.7)
    assert api.submitter.cancelled == [pruned.user_attrs["penstock_job"]]


def test_a_trial_that_rests_for_long_or_is_cancelled_is_pruned_and_one_that_fails_fails(api, objective):
    ends = {"b": "CANCELLED", "c": "FAILED"}
    studied = fixed(study("ends"), "a", "b", "c")
    with Played(api, lambda rate: [0.5], ends.get, rests=lambda rate: rate == "a"):
        studied.optimize(objective(rest_s=0.3), n_trials=3, catch=TrialFailed)
    assert [trial.state.name for trial in studied.trials] == ["PRUNED", "PRUNED", "FAIL"]
    assert api.submitter.cancelled == [studied.trials[0].user_attrs["penstock_job"]]


def test_a_job_without_a_metric_says_what_to_do(api, objective):
    with Played(api, lambda rate: []), pytest.raises(TrialFailed, match="penstock-report metric"):
        study("mute").optimize(objective(), n_trials=1)


def test_a_study_waits_for_a_daemon_that_does_not_answer_for_a_while(api, objective, monkeypatch):
    from penstock_scheduler.api.client import Client, DaemonAway

    monkeypatch.setattr(search, "AGAIN_S", 0.01)
    ask, away = Client.job, [DaemonAway("gone")] * 3

    def job_of(self, *words, **more):
        if away:
            raise away.pop()
        return ask(self, *words, **more)

    monkeypatch.setattr(Client, "job", job_of)
    studied = study("away")
    with Played(api, lambda rate: [0.5] * (10**6 if away else 1)):  # the job lives until it has been asked for
        studied.optimize(objective(), n_trials=1)
        assert studied.best_value == 0.5
        assert not away
        away += [DaemonAway("gone")] * 3
        with pytest.raises(DaemonAway):
            studied.optimize(objective(patience_s=0.0), n_trials=1)


def test_a_study_of_several_objectives_is_refused(objective):
    with pytest.raises(ConfigError, match="several objectives"):
        optuna.create_study(directions=["maximize", "minimize"]).optimize(objective(), n_trials=1)


def test_impossible_numbers_are_refused(api):
    with api.client("me") as penstock, pytest.raises(ConfigError, match="above 0"):
        JobObjective(rates, client=penstock, rest_s=0.0)
