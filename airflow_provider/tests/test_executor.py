import json
import os
from importlib import import_module

import httpx
import pytest
from airflow.models.taskinstancekey import TaskInstanceKey
from helpers import away

from airflow_provider_penstock.hooks.penstock import PenstockHook


class Workload:
    """What an executor reads of a task that is queued."""

    def __init__(self, number):
        self.ti = TaskInstance(number)

    def model_dump_json(self):
        return json.dumps({"number": self.ti.id})


class TaskInstance:
    dag_id, task_id, executor_config, external_executor_id = (
        "executor",
        "task",
        {"penstock": {"name": "by-executor"}},
        None,
    )

    def __init__(self, number):
        self.id, self.key = number, key(number)


def key(number):
    return TaskInstanceKey("executor", "task", number, 1, -1)


def job_of(executor, number):
    """The id of the job of a task that the executor watches."""
    watched = executor.watched[key(number)]
    return watched.line.hook.find(watched.key)["id"]


def executor_with(python, monkeypatch, folder):
    pytest.importorskip("airflow.sdk", reason="executors were others before Airflow 3")
    module = import_module("airflow_provider_penstock.executors.penstock")
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__PYTHON", python)
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__OUTPUT_FILE", f"{folder}/%j.out")
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__POLL_INTERVAL_S", "0")
    return module.PenstockExecutor()


def test_an_executor_submits_once_and_tells_how_its_tasks_end(folder, monkeypatch, tmp_path, until):
    python = tmp_path / "python"
    gate = folder / "executor-gate"
    python.write_text(f'#!/bin/sh\necho this is $3; until [ -e {gate} ]; do sleep 0.2; done; grep -q good "$4"\n')
    python.chmod(0o755)
    executor = executor_with(str(python), monkeypatch, folder)
    tasks = [Workload("good-1"), Workload("bad-1")]
    executor._process_workloads(tasks)
    executor._process_workloads(tasks[:1])  # it is queued again before its job has ended
    again = executor_with(str(python), monkeypatch, folder)
    again._process_workloads(tasks)  # as after a scheduler that was killed before it could say so
    assert again.watched.keys() == executor.watched.keys()
    assert all(again.watched[each].key == executor.watched[each].key for each in again.watched)
    gate.touch()
    assert executor.running == {key("good-1"), key("bad-1")}
    assert {state for state, _ in executor.event_buffer.values()} == {"running"}
    good = job_of(executor, "good-1")

    def ended():
        executor.sync()
        return not executor.watched

    until(ended)
    events = executor.get_event_buffer()
    assert events[key("good-1")][0] == "success"
    assert events[key("bad-1")][0] == "failed"
    assert "FAILED, exit code 1" in events[key("bad-1")][1]
    assert not executor.running
    said = executor.get_task_log(tasks[0].ti, 1)
    page = PenstockHook().job_url(good) + "/page"
    assert said == ([f"output of job {good}, {page}"], ["this is --json-path"])


def test_an_executor_takes_over_what_runs_and_cancels_what_is_revoked(folder, monkeypatch, hook, until):
    executor = executor_with("sleep 300 #", monkeypatch, folder)
    monkeypatch.setattr("airflow_provider_penstock.executors.penstock.shlex.quote", str)
    task = Workload("long-1")
    executor._process_workloads([task])
    job_id = job_of(executor, "long-1")
    after = executor_with("python3", monkeypatch, folder)
    never = Workload("never-submitted")
    assert after.try_adopt_task_instances([task.ti, never.ti]) == [never.ti]
    assert job_of(after, "long-1") == job_id
    after.sync()
    assert after.watched
    after.revoke_task(ti=task.ti)
    after.revoke_task(ti=never.ti)
    assert not after.running
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


def test_a_task_that_is_queued_again_after_it_was_revoked_has_another_job(folder, monkeypatch, hook, until):
    executor = executor_with("sleep 300 #", monkeypatch, folder)
    monkeypatch.setattr("airflow_provider_penstock.executors.penstock.shlex.quote", str)
    task = Workload("revoked-1")
    executor._process_workloads([task])
    first = job_of(executor, "revoked-1")
    with monkeypatch.context() as cut:
        cut.setattr(httpx.Client, "request", away)
        executor.revoke_task(ti=task.ti)  # it cannot be cancelled now
    assert hook.job(first)["state"] != "ended"
    executor._process_workloads([task])
    second = job_of(executor, "revoked-1")
    assert second != first
    until(lambda: hook.job(first)["ended"] == "CANCELLED")
    executor.revoke_task(ti=task.ti)
    until(lambda: hook.job(second)["ended"] == "CANCELLED")


@pytest.mark.parametrize(("timeout_s", "warnings"), [("600", 1), ("86400", 0)])
def test_an_executor_warns_of_a_short_task_queued_timeout(folder, monkeypatch, timeout_s, warnings):
    executor = executor_with("python3", monkeypatch, folder)
    monkeypatch.setenv("AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT", timeout_s)
    told = []
    monkeypatch.setattr(executor.log, "warning", lambda form, *words: told.append(form % words))
    executor.start()
    assert ["task_queued_timeout is 600 s" in each for each in told] == [True] * warnings


def test_an_executor_asks_a_penstockd_that_does_not_answer_once(folder, monkeypatch):
    executor = executor_with("python3", monkeypatch, folder)
    asked = []
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: away(asked.append(1)))
    tasks = [TaskInstance(f"adopted-{number}") for number in range(20)]
    assert executor.try_adopt_task_instances(tasks) == []
    assert {name: each.key for name, each in executor.watched.items()} == {ti.key: "" for ti in tasks}
    assert len(asked) == 1
    executor._process_workloads([Workload(f"queued-{number}") for number in range(20)])
    assert len(asked) == 2


def test_reading_the_connection_from_the_database_leaves_the_schedulers_session_alone(folder, monkeypatch):
    """The scheduler holds a session while executors adopt tasks: with another use of it, all its rows are detached."""
    executor = executor_with("python3", monkeypatch, folder)
    from airflow.models import Connection, Pool
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session
    from sqlalchemy import inspect, select

    initdb()
    named = json.loads(os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"])
    row = Connection(conn_id="penstock_stored", **named | {"extra": json.dumps(named["extra"])})
    with create_session() as session:
        session.add(row)
    try:
        monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
        monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__CONN_ID", "penstock_stored")
        executor = executor_with("python3", monkeypatch, folder)
        with create_session() as session:
            pool = session.scalars(select(Pool)).first()
            tasks = [TaskInstance("stored-1"), TaskInstance("stored-2")]
            assert executor.try_adopt_task_instances(tasks) == tasks, "penstockd was asked, and has no such jobs"
            executor.revoke_task(ti=tasks[0])
            assert not inspect(pool).detached
    finally:
        with create_session() as session:
            session.delete(session.scalars(select(Connection).where(Connection.conn_id == "penstock_stored")).one())


def test_an_executor_keeps_its_tasks_while_penstockd_is_away(folder, monkeypatch, hook):
    executor = executor_with("python3", monkeypatch, folder)
    task = Workload("away-1")
    executor.queued_tasks[task.ti.key] = task

    with monkeypatch.context() as cut:
        cut.setattr(httpx.Client, "request", away)
        executor._process_workloads([task])
        assert list(executor.queued_tasks) == [key("away-1")]
        assert executor.try_adopt_task_instances([task.ti]) == []
        executor.sync()
        assert executor.watched[key("away-1")].key == ""
    executor.sync()
    assert executor.get_event_buffer()[key("away-1")] == ("failed", "penstockd knows no job of this task")
    task.ti.executor_config = {"penstock": {"spec": {"min_gpus": 4, "max_gpus": 2}}}
    executor._process_workloads([task])
    assert "max_gpus=2 is less than min_gpus=4" in executor.get_event_buffer()[key("away-1")][1]
    assert not executor.queued_tasks


def test_each_task_has_its_jobs_by_its_own_connection_and_one_that_is_away_delays_no_other(
    folder, monkeypatch, hook, until
):
    executor = executor_with("sleep 300 #", monkeypatch, folder)
    monkeypatch.setattr("airflow_provider_penstock.executors.penstock.shlex.quote", str)
    good = json.loads(os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"])
    monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_AWAY", json.dumps(good | {"host": "127.0.0.2"}))
    tasks = {conn_id: Workload(f"own-{conn_id}") for conn_id in ("penstock_away", "penstock_wrong", "penstock_other")}
    for conn_id, task in tasks.items():
        task.ti.executor_config = {"penstock": {"conn_id": conn_id}}
    executor._process_workloads([*tasks.values(), *tasks.values()])
    assert executor.watched.keys() == {tasks["penstock_other"].ti.key}
    assert "401" in executor.get_event_buffer()[tasks["penstock_wrong"].ti.key][1]
    assert executor.try_adopt_task_instances([tasks["penstock_away"].ti]) == []
    executor.sync()
    assert set(executor.watched) == {tasks["penstock_away"].ti.key, tasks["penstock_other"].ti.key}
    page = executor.get_task_log(tasks["penstock_other"].ti, 1)[0][0].rpartition(" ")[2]
    assert page.startswith("https://penstock.example.org/v1/jobs/")
    job_id = job_of(executor, "own-penstock_other")
    hook.cancel(job_id)
    until(lambda: hook.job(job_id)["state"] == "ended")
    real = httpx.Client.request

    def forbidden(self, method, url, **more):  # such as by a proxy in between
        no = httpx.Response(403, json={"error": {"code": "forbidden", "message": "not now"}})
        return no if "key" in more.get("params", {}) else real(self, method, url, **more)

    with monkeypatch.context() as refused:
        refused.setattr(httpx.Client, "request", forbidden)
        executor.sync()
    assert tasks["penstock_other"].ti.key in executor.watched, "its job is not known to have ended"

    def failed():
        executor.sync()
        return tasks["penstock_other"].ti.key not in executor.watched

    until(failed)


def test_an_executor_that_waits_says_once_since_when_penstock_does_not_answer(fake, monkeypatch, tmp_path, caplog):
    executor = executor_with("python3", monkeypatch, tmp_path)
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__CONN_ID", "penstock_fake")
    task = Workload("silent-1")
    executor._process_workloads([task])
    fake.is_silent = True
    with caplog.at_level("INFO"):
        for _ in range(5):
            executor.sync()
            executor._process_workloads([Workload("silent-2")])
        assert "Penstock does not answer since" in executor.get_task_log(task.ti, 1)[0][0]
        fake.is_silent = False
        executor.sync()
    assert caplog.text.count("does not answer") == 1
    assert "answers again" in caplog.text
    assert job_of(executor, "silent-1") == "1"
    fake.end("1", "FAILED", 3)
    executor.sync()
    assert executor.get_event_buffer()[key("silent-1")] == ("failed", "job 1 has ended as FAILED, exit code 3")


def give_away(fake, state="queued", ended=""):
    """A slurmctld that was killed has lost job 1, and has given its id to a job of another task."""
    lost = fake.job("1", state="ended", ended="UNKNOWN", ended_text="was forgotten by Slurm")
    fake.jobs["1@20261130T000000Z"] = lost | {"id": "1@20261130T000000Z"}
    fake.job("1", key="airflow:executor:another:1", state=state, ended=ended, exit_code=0)


def fake_executor(monkeypatch, folder):
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__CONN_ID", "penstock_fake")
    return executor_with("python3", monkeypatch, folder)


@pytest.mark.parametrize("others", [("running", ""), ("ended", "COMPLETED")])
def test_a_job_whose_id_slurm_has_given_to_another_task_does_not_end_this_one(fake, monkeypatch, tmp_path, others):
    executor = fake_executor(monkeypatch, tmp_path)
    task = Workload("lost-1")
    executor._process_workloads([task])
    give_away(fake, *others)
    executor.sync()
    state, told = executor.get_event_buffer()[task.ti.key]
    assert state == "failed"
    assert "UNKNOWN" in told
    assert "was forgotten by Slurm" in told
    assert not executor.watched


def test_a_revoked_task_cancels_no_job_of_another_task_that_has_its_id_now(fake, monkeypatch, tmp_path):
    executor = fake_executor(monkeypatch, tmp_path)
    task = Workload("revoked-2")
    executor._process_workloads([task])
    give_away(fake, "running")
    executor.revoke_task(ti=task.ti)
    assert fake.jobs["1"]["state"] == "running"
    executor._process_workloads([task])
    own = executor.watched[task.ti.key].key
    assert [job["id"] for job in fake.jobs.values() if job["key"] == own and job["state"] == "queued"] != []
    assert fake.jobs["1"]["state"] == "running"


def test_a_job_that_has_the_id_of_a_revoked_one_is_not_cancelled(fake, monkeypatch, tmp_path):
    executor = fake_executor(monkeypatch, tmp_path)
    revoked, task = Workload("revoked-3"), Workload("later-3")
    executor._process_workloads([revoked])
    executor.revoke_task(ti=revoked.ti)
    give_away(fake, "queued")
    fake.job("1", key="airflow:executor:later-3:1")
    executor._process_workloads([task])
    assert fake.jobs["1"]["state"] == "queued"
    assert len(fake.open()) == 1
