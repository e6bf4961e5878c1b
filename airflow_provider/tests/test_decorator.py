import os
import sys
import threading

import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowFailException, AirflowSkipException, TaskDeferred
from helpers import Store, context, first_event, revived

from airflow_provider_penstock.decorators.folder import TaskFolder
from airflow_provider_penstock.decorators.penstock import penstock_task
from airflow_provider_penstock.exceptions import PenstockFunctionFailed, PenstockJobFailed


def of_function(function, folder, task_id, *args, **arguments):
    """A task of `@task.penstock`, as the worker has it."""
    usual = {"shared_folder": f"{folder}/shared", "python": sys.executable, "poll_interval_s": 0.2, "deferrable": False}
    with DAG("functions", schedule=None):
        task = penstock_task(
            task_id=task_id,
            output_file=f"{folder}/%j.out",
            **usual | arguments,
        )
        return task(function)(*args).operator


def test_a_function_runs_in_a_job_and_its_result_is_the_tasks(folder, instance):
    def multiply(factor, numbers, *, offset=0):

        return {"products": [factor * number + offset for number in numbers], "job": os.environ["SLURM_JOB_ID"]}

    operator = of_function(multiply, folder, "multiply", 3, [1, 2])
    ti = instance("multiply")
    result = operator.execute(context(ti))
    assert result == {"products": [3, 6], "job": ti.pushed["job_id"]}


def test_a_function_whose_retries_somebody_changes_finds_its_job_and_its_folder(folder, instance):
    def where():

        return os.environ["SLURM_JOB_ID"]

    def result(retries):
        ti = instance("changed", max_tries=1)
        return of_function(where, folder, "changed", retries=retries).execute(context(ti, task_state_store=store))

    store = Store()
    assert result(1) == result(0)


def test_a_function_that_raises_comes_back_with_its_traceback(folder, instance):
    def divide(number):
        return 1 / number

    operator = of_function(divide, folder, "divide", 0, deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context(instance("divide")))
    event = first_event(revived(deferred))
    with pytest.raises(PenstockFunctionFailed, match=r"in divide(.|\n)*ZeroDivisionError") as failed:
        of_function(divide, folder, "divide", 0).execute_complete(context(instance("divide")), event)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_another_python_is_told_by_name_and_what_cannot_be_sent_fails_at_once(folder, instance, tmp_path):
    other = tmp_path / "python"
    other.write_text(
        f'#!/bin/sh\nsed -i \'s/"python": "[0-9.]*"/"python": "2.7.1"/\' $2/made_by.json\nexec {sys.executable} "$@"\n'
    )
    other.chmod(0o755)
    with pytest.raises(PenstockJobFailed, match=r"comes from Python 2\.7\.1: name an interpreter"):
        of_function(lambda: 1, folder, "other_python", python=str(other)).execute(context(instance("other_python")))
    with pytest.raises(AirflowFailException, match="cannot be sent"):
        of_function(lambda lock: 1, folder, "lock", threading.Lock()).execute(context(instance("lock")))

    def with_ti(ti):
        return ti.task_id

    ti = instance("with_ti")
    ti.itself, ti.lock = ti, threading.Lock()
    with pytest.raises(AirflowFailException, match=r"argument ti of with_ti cannot be sent(.|\n)*\{\{ run_id \}\}"):
        of_function(with_ti, folder, "with_ti").execute(context(ti))
    with pytest.raises(AirflowFailException, match="cannot be written"):
        of_function(lambda: 1, "/proc", "nowhere").execute(context(instance("nowhere")))


def test_a_function_may_skip_its_task(folder, instance):
    def skip():
        raise AirflowSkipException("nothing to train on")

    with pytest.raises(AirflowSkipException, match="nothing to train on"):
        of_function(skip, folder, "skip").execute(context(instance("skip")))


def test_a_function_that_asks_airflow_for_a_variable_fails_with_the_remedy(folder, instance, monkeypatch):
    pytest.importorskip("airflow.sdk", reason="Airflow 2 has no task SDK")

    def rate(name):
        from airflow.sdk import Variable

        return Variable.get(name, default="0.1")

    with pytest.raises(PenstockFunctionFailed, match=r"Variable\.get\('rate'\)(.|\n)*\{\{ var\.value\.rate \}\}"):
        of_function(rate, folder, "variable", "rate").execute(context(instance("variable")))
    found = of_function(rate, folder, "given", "rate", environment={"AIRFLOW_VAR_RATE": "0.2"})
    assert found.execute(context(instance("given"))) == "0.2"


def files(folder):
    """Path -> mode, of all that is below a folder."""
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o7777 for path in folder.rglob("*")}


@pytest.mark.parametrize(("shared_mode", "folders", "plain"), [(0o755, 0o700, 0o600), (0o2770, 0o2770, 0o660)])
def test_files_are_private_and_go_once_their_result_was_read(
    folder, instance, tmp_path, monkeypatch, shared_mode, folders, plain
):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(shared_mode)
    seen = {}
    put = TaskFolder.put

    def noted(self, *words):
        put(self, *words)
        seen.update(files(shared))

    monkeypatch.setattr(TaskFolder, "put", noted)
    operator = of_function(lambda: "secret", folder, f"private-{plain}", shared_folder=str(shared))
    assert operator.execute(context(instance(operator.task_id))) == "secret"
    (task,) = [name for name, mode in seen.items() if "/" not in name]
    assert seen == {task: folders} | {f"{task}/{name}": plain for name in ("call.pkl", "made_by.json", "run.py")}
    left = {name: mode for name, mode in files(shared).items() if name.startswith(task)}
    assert left.pop(task) == folders
    assert list(left.values()) == [plain], "only the result, for a try after a worker that died"
    assert operator.execute(context(instance(operator.task_id, try_number=2))) == "secret"
    for old in (shared / "taken" / task, shared / "taken" / ".swept"):
        os.utime(old, (1, 1))
    waiting = shared / ("0" * 32)  # of a job that waits in the queue, for however long
    waiting.mkdir()
    os.utime(waiting, (1, 1))
    other = of_function(lambda: 1, folder, f"other-{plain}", shared_folder=str(shared))
    other.execute(context(instance(other.task_id)))
    assert not (shared / task).exists()
    assert waiting.exists()


def test_a_folder_that_other_users_may_change_is_refused(folder, instance, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(AirflowFailException, match="every user may replace files"):
        of_function(lambda: 1, folder, "open", shared_folder=str(tmp_path)).execute(context(instance("open")))
    tmp_path.chmod(0o1777)
    operator = of_function(lambda: 1, folder, "foreign", shared_folder=str(tmp_path))
    foreign = operator._new_folder(context(instance("foreign"))).path
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)
    with pytest.raises(AirflowFailException, match="belongs to another user"):
        operator.execute(context(instance("foreign")))
    assert list(foreign.iterdir()) == []


def test_a_job_of_a_user_who_may_not_read_the_folder_says_what_to_do(folder, instance, monkeypatch):
    put = TaskFolder.put

    def hidden(self, *words):
        put(self, *words)
        (self.path / "run.py").unlink()  # root may read everything

    monkeypatch.setattr(TaskFolder, "put", hidden)
    with pytest.raises(PenstockJobFailed, match=r"cannot read (.|\n)*chmod 2770"):
        of_function(lambda: 1, folder, "hidden").execute(context(instance("hidden")))
