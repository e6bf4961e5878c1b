"""What identifies a job and its results is made once, at its submission, and found by a retry, a clear and a changed run."""

import random
import re
from datetime import timedelta
from pathlib import Path

import cloudpickle
import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowException, AirflowFailException, TaskDeferred
from helpers import STARTED, Store, context

from airflow_provider_penstock.decorators.penstock import penstock_task
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.reconciling import TaskOfJob, look


class Airflow:
    """One task of a DAG run, as Airflow 3.3 treats it. `retries` tries follow the first one."""

    def __init__(self, fake, instance, folder, run_id="manual__1", retries=2):
        self.fake, self.make, self.folder, self.run_id, self.retries = fake, instance, folder, run_id, retries
        self.try_number, self.max_tries, self.started, self.store = 1, retries, STARTED, Store()
        self.state, self.kept, self.result = "queued", None, None
        self.tries_run = 0

    def operator(self):
        with DAG("tests", schedule=None):
            return penstock_task(
                task_id="train", shared_folder=str(self.folder), penstock_conn_id="penstock_fake", check_first=False
            )(lambda: None)().operator

    def context(self):
        ti = self.make("train", max_tries=self.max_tries, try_number=self.try_number)
        ti.run_id = self.run_id
        return context(ti, self.started, task_state_store=self.store)

    def begin(self):
        """A worker runs the try."""
        self.tries_run, self.is_marked = self.tries_run + 1, False
        self._run(lambda: self.operator().execute(self.context()))

    def resume(self):
        """A worker goes on after the trigger."""
        event = {"job_id": self.job, "shown": 0}
        self._run(lambda: self.operator().execute_complete(self.context(), event=event, **self.kept))

    def _run(self, work):
        try:
            self.result, self.state = work(), "success"
        except TaskDeferred as deferred:
            self.state, self.kept = "deferred", dict(deferred.kwargs or {})
        except AirflowFailException:
            self.state = "failed"
        except AirflowException:
            self.lose()

    @property
    def job(self):
        name = f"airflow:tests:tests:{self.run_id}:train:-1"
        return self.fake.owners[name]["job"] if name in self.fake.owners else None

    def lose(self):
        """The try fails, for example with its worker. Nobody cancels its job."""
        if self.try_number <= self.max_tries:
            self.try_number, self.state = self.try_number + 1, "queued"
        else:
            self.state = "failed"

    def queue_run(self):
        """Somebody queues the DAG run again, so that it starts again while the task waits."""
        self.started += timedelta(minutes=1)

    def clear(self):
        self.result = None
        self.max_tries, self.try_number = self.try_number + self.retries, self.try_number + 1
        self.state = "queued"
        self.started += timedelta(minutes=1)

    def mark(self, state):
        """A person marks the task while the triggerer is dead."""
        self.state, self.is_marked = state, True

    def reconcile(self, hook):
        return look(
            hook,
            lambda tasks: (
                {TaskOfJob("tests", self.run_id, "train", -1): (self.state, self.max_tries)}
                if self.state in ("success", "failed")
                else {}
            ),
        )


def run(fake, job_id, state="COMPLETED"):
    """The job runs, as `run.py` does in the folder that its script names, and ends."""
    if state == "COMPLETED":
        folder = re.search(r"(\S+)/run\.py", fake.bodies[job_id]["script"].splitlines()[-1]).group(1)
        assert Path(folder, "call.pkl").exists(), "the function is there"
        Path(folder, f"{job_id}.result").write_bytes(cloudpickle.dumps(f"result of {job_id}"))
    fake.end(job_id, state, 0 if state == "COMPLETED" else 1)


@pytest.fixture
def airflow(fake, instance, tmp_path):
    return Airflow(fake, instance, tmp_path / "shared")


def test_a_run_that_is_queued_again_while_its_task_waits_loses_no_result(fake, airflow):
    """The job had completed, the task failed "without a result", and its next try did the work again."""
    airflow.begin()
    airflow.queue_run()
    run(fake, "1")
    airflow.resume()
    assert (airflow.state, airflow.result) == ("success", "result of 1")
    assert list(fake.jobs) == ["1"]


def test_a_try_after_the_run_was_queued_again_takes_up_the_job(fake, airflow):
    airflow.begin()
    airflow.queue_run()
    airflow.lose()
    airflow.begin()
    run(fake, "1")
    airflow.resume()
    assert (airflow.result, list(fake.jobs)) == ("result of 1", ["1"])


def test_the_result_is_found_although_the_dags_shared_folder_was_changed_meanwhile(fake, airflow, tmp_path):
    airflow.begin()
    airflow.folder = tmp_path / "other"
    airflow.lose()
    run(fake, "1")
    airflow.begin()
    assert (airflow.result, list(fake.jobs)) == ("result of 1", ["1"])


def test_a_task_that_an_earlier_release_deferred_finds_its_result(fake, airflow):
    """It kept nothing."""
    airflow.begin()
    airflow.kept = {}
    airflow.store.clear()
    run(fake, "1")
    airflow.resume()
    assert airflow.result == "result of 1"


def act(fake, task, hook, chance):
    """Something happens to the task, if it can happen now."""
    job = fake.jobs.get(task.job)
    runs = task.state == "deferred" and job is not None and job["state"] != "ended"
    what = {
        "begin": (task.state == "queued", task.begin),
        "queue": (True, task.queue_run),
        "complete": (runs, lambda: run(fake, job["id"])),
        "fail": (runs, lambda: run(fake, job["id"], "FAILED")),
        "resume": (task.state == "deferred" and not runs, task.resume),
        "lose": (task.state == "deferred", task.lose),
        "clear": (task.state != "queued", task.clear),
        "mark": (task.state == "deferred", lambda: task.mark(chance.choice(("failed", "success")))),
        "reconcile": (True, lambda: task.reconcile(hook)),
    }
    chance.choice([do for can, do in what.values() if can])()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_between_submission_and_end_each_try_has_one_job_and_no_result_is_lost(
    fake, airflow, instance, seed
):
    chance, hook = random.Random(seed), PenstockHook("penstock_fake")
    tasks = (airflow, Airflow(fake, instance, airflow.folder, run_id="backfill__1"))  # of the same DAG
    for _ in range(chance.randrange(3, 25)):
        act(fake, chance.choice(tasks), hook, chance)
        assert len(fake.open()) <= 2, "each task has one at most"
    for task in tasks:
        _finish(fake, task, hook)
        of_task = [body for body in fake.bodies.values() if f":{task.run_id}:" in body["key"]]
        assert len(of_task) <= task.tries_run, "one job for each try at most"
        done = [body["owner"]["generation"].split(":")[1] for body in of_task if _completed(fake, body)]
        assert len(done) == len(set(done)), "finished work runs again only after a clear"
    assert fake.open() == []


def _completed(fake, body):
    return fake.jobs[fake.keys[body["key"]]]["ended"] == "COMPLETED"


def _finish(fake, task, hook):
    """Let the task come to its end. Its job completes."""
    for _ in range(10):
        if task.state == "queued":
            task.begin()
        if task.state == "deferred":
            if fake.jobs[task.job]["state"] != "ended":
                run(fake, task.job)
            task.resume()
    task.reconcile(hook)
    assert task.state in ("success", "failed")
    if task.state == "success" and not task.is_marked:
        assert task.result == f"result of {task.job}"
