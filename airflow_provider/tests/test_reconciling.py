"""Airflow owns the jobs of its tasks: those of tasks that have ended are cancelled, whatever was away at that time."""

import sys
import threading

import pytest
from airflow.providers.common.compat.sdk import TaskDeferred
from helpers import context

from airflow_provider_penstock import reconciling
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
from airflow_provider_penstock.plugins import penstock as plugin
from airflow_provider_penstock.reconciling import TaskOfJob, look, task_of


def submitted(instance, number=1, **arguments):
    """A job whose task is deferred."""
    operator = PenstockSubmitOperator(
        task_id="train", command=["true"], penstock_conn_id="penstock_fake", check_first=False, **arguments
    )
    with pytest.raises(TaskDeferred):
        operator.execute(context(instance("train", max_tries=2, try_number=number)))


TASK = TaskOfJob("tests", "manual__2026-11-21T00:00:00+00:00", "train", -1)


@pytest.mark.parametrize(
    ("state", "max_tries", "runs"),
    [
        ("failed", 2, False),
        ("success", 2, False),
        ("skipped", 2, False),
        ("removed", 2, False),
        (None, 5, False),  # cleared, and its DAG is paused
        (None, 2, True),
        ("deferred", 2, True),
        ("up_for_retry", 2, True),
        ("queued", 5, True),  # the new try replaces the job itself
        ("scheduled", 2, True),
    ],
)
def test_the_job_of_a_task_that_airflow_has_ended_is_cancelled(fake, instance, state, max_tries, runs):
    """Marked as failed while the triggerer was dead, its job ran to its lease."""
    submitted(instance)
    asked = []

    def states(tasks):
        asked.extend(tasks)
        return {TASK: (state, max_tries)}

    hook = PenstockHook("penstock_fake")
    assert look(hook, states) == ([] if runs else ["1"])
    assert asked == [TASK]
    assert bool(fake.open()) == runs
    assert look(hook, states) == [], "only once"
    if not runs:
        assert next(iter(fake.owners.values()))["given_up"], "the next try has a job of its own"


def test_jobs_that_are_to_outlive_their_task_and_those_of_others_are_left_alone(fake, instance):
    hook, over = PenstockHook("penstock_fake"), {TASK: ("failed", 2)}
    submitted(instance, lease=None)
    assert look(hook, lambda tasks: over) == []
    fake.end("1")
    fake.new({"key": "mine"})
    fake.new({"key": "airflow:other:tests:run:train:-1:1"})
    fake.new({})
    assert look(hook, lambda tasks: over) == []
    fake.owners.clear()
    submitted(instance, 2)
    assert look(hook, lambda tasks: {}) == [], "Airflow's database may be another one"
    assert fake.open() == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("key", "task"),
    [
        ("airflow:prod:dag:manual__2026-11-21T00:00:00+00:00:group.task:3:1763683200000001",
         TaskOfJob("dag", "manual__2026-11-21T00:00:00+00:00", "group.task", 3)),
        ("airflow:executor:0199:1", None),
        ("airflow:prod:" + "0" * 64, None),
        (None, None),
    ],
)  # fmt: skip
def test_a_key_names_its_task(key, task):
    assert task_of(key, "prod") == task


def test_a_look_reads_airflows_database_and_a_connection_that_does_not_work_ends_nothing(fake, instance):
    from airflow.utils.db import initdb

    initdb()
    assert reconciling.states_of({TASK}) == {}
    assert {"penstock_default", "penstock_fake"} <= set(reconciling.connections())
    submitted(instance)
    fake.is_silent = True
    reconciling.look_everywhere()
    fake.is_silent = False
    reconciling.look_everywhere()
    assert fake.open() == ["1"]


def test_a_scheduler_and_a_triggerer_look_when_they_start_and_nothing_else_does(monkeypatch):
    looked = threading.Semaphore(0)
    monkeypatch.setattr(plugin, "BEGIN_S", 0.0)
    monkeypatch.setattr(reconciling, "keep_looking", looked.release)
    for words, looks in (("scheduler --pid 1", True), ("triggerer", True), ("dag-processor", False), ("", False)):
        monkeypatch.setattr(sys, "argv", ["airflow", *words.split()])
        plugin.PenstockPlugin.on_load()
        assert looked.acquire(timeout=10 if looks else 0.3) == looks
    assert not plugin.PenstockPlugin.listeners, "Airflow refuses end_from_trigger beside a listener"
