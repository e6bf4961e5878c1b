import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from importlib import import_module, resources
from pathlib import Path
from types import SimpleNamespace

import airflow
import httpx
import jsonschema
import pytest
from airflow.models.taskinstancekey import TaskInstanceKey
from airflow.providers.common.compat.sdk import DAG, AirflowFailException, TaskDeferred
from packaging import version

from airflow_provider_penstock import get_provider_info
from airflow_provider_penstock.decorators.penstock import penstock_task
from airflow_provider_penstock.exceptions import (
    PenstockAway,
    PenstockFunctionFailed,
    PenstockJobFailed,
    PenstockRefused,
    failure,
)
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import (
    PenstockCancelOperator,
    PenstockSubmitOperator,
    PenstockWaitOperator,
    job_key,
)
from airflow_provider_penstock.operators.simulate import PenstockForecastOperator, PenstockSimulateOperator, mask_secret
from airflow_provider_penstock.retries import retry_policy
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor
from airflow_provider_penstock.triggers.penstock import PenstockJobEventTrigger, PenstockJobTrigger, connect

LONG = "#!/bin/bash\nsleep 300\n"


def submit(task_id, folder, script=LONG, **arguments):
    arguments = {"poll_interval_s": 0.2, "log_interval_s": 0.2, "output_file": f"{folder}/%j.out"} | arguments
    return PenstockSubmitOperator(task_id=task_id, script=script, **arguments)


def revived(deferred):
    """The trigger of a deferred task, as the triggerer makes it from the database."""
    path, arguments = deferred.value.trigger.serialize()
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)(**json.loads(json.dumps(arguments)))


def first_event(trigger):
    async def first():
        return await anext(trigger.run())

    return asyncio.run(asyncio.wait_for(first(), 60)).payload


def test_provider_info_is_valid_and_what_it_names_is_there():
    info = get_provider_info()
    schema = json.loads((resources.files("airflow") / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                import_module(module)
    decorators = [entry["class-name"] for entry in info["task-decorators"]]
    for path in [*info["extra-links"], *decorators, info["connection-types"][0]["hook-class-name"]]:
        module, name = path.rsplit(".", 1)
        assert getattr(import_module(module), name).__name__ == name


def test_a_connection_says_for_whom_it_is_taken_and_a_wrong_token_is_told():
    assert PenstockHook().test_connection()[0]
    good, sentence = PenstockHook("penstock_wrong").test_connection()
    assert not good
    assert "401" in sentence


def test_tls_is_spoken_and_a_certificate_that_nobody_vouches_for_is_refused(monkeypatch):
    assert PenstockHook().base_url.startswith("https:")
    monkeypatch.setattr("airflow_provider_penstock.hooks.penstock.RETRY_PAUSES_S", ())
    good, sentence = PenstockHook("penstock_stranger").test_connection()
    assert not good
    assert "certificate" in sentence


def test_a_script_is_read_from_its_file_and_an_argument_of_a_program_is_not(tmp_path):
    (tmp_path / "train.sbatch").write_text("#!/bin/bash\n#SBATCH -c 2\necho {{ params.rate }}\n")
    with DAG("files", schedule=None, template_searchpath=str(tmp_path)) as dag:
        script = PenstockSubmitOperator(task_id="script", script="train.sbatch")
        command = PenstockSubmitOperator(task_id="command", command=["bash", "train.sbatch", "{{ params.rate }}.sh"])
    dag.resolve_template_files()
    for task in (script, command):
        task.render_template_fields({"params": {"rate": 0.1}})
    assert script.script.splitlines() == ["#!/bin/bash", "#SBATCH -c 2", "echo 0.1"]
    assert command.command == ["bash", "train.sbatch", "0.1.sh"]


def test_an_impossible_request_fails_at_once_in_the_apis_words(folder, instance):
    operator = submit("impossible", folder, min_gpus="4", max_gpus=2)
    with pytest.raises(AirflowFailException, match="min_gpus"):
        operator.execute({"ti": instance("impossible")})


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"gpu_types": ["h900"]}, "no node here has h900"), ({"min_gpus": 999}, "change min_gpus or max_gpus")],
)
def test_what_could_never_run_fails_at_once_in_the_apis_words(folder, instance, hook, spec, words):
    ti = instance("never")
    with pytest.raises(AirflowFailException, match=words):
        submit("never", folder, **{"max_gpus": 999} | spec).execute({"ti": ti})
    assert hook.find(f"{job_key(ti)}:1") is None
    unchecked = submit("never", folder, check_first=False, wait_for_completion=False, **{"max_gpus": 999} | spec)
    hook.cancel(unchecked.execute({"ti": instance(f"never-{words}")})["job_id"])


def test_a_trigger_lets_the_worker_leave_before_it_fires(folder, instance, hook, until, monkeypatch):
    job_id = submit("quick", folder, script="#!/bin/sh\n", wait_for_completion=False).execute(
        {"ti": instance("quick")}
    )["job_id"]
    until(lambda: hook.job(job_id)["state"] == "ended")
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.SETTLE_S", 3.0)
    began_s = time.monotonic()
    assert first_event(PenstockJobTrigger("penstock_default", job_id, 0.2))["job_id"] == job_id
    assert time.monotonic() - began_s >= 3


def test_dictionaries_and_moments_may_come_from_templates(folder, instance):
    given = {"spec": '{"max_gpus": 3}', "options": '{"memory_mb": 100}', "environment": '{"RATE": 0.1}'}
    body = submit("templates", folder, deadline="2100-01-01T01:00:00+01:00", **given).submission(instance("templates"))
    assert (body["spec"], body["memory_mb"], body["environment"]["RATE"]) == ({"max_gpus": 3}, 100, "0.1")
    assert body["deadline_s"] == 4102444800  # 2100-01-01T00:00:00Z
    for wrong, what in (({"spec": "max_gpus=3"}, "no JSON"), ({"deadline": "2100-01-01"}, "no time zone")):
        with pytest.raises(AirflowFailException, match=what):
            submit("wrong", folder, **wrong).execute({"ti": instance("wrong")})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"deadline": "2001-01-01T00:00:00+00:00", "time_limit_s": 60}, "time limit is invalid"),
        ({"account": "nobody!"}, "account"),
        ({"script": "#!/bin/bash\n#SBATCH -a 1-3\ntrue\n"}, "an array is many jobs"),
        ({"environment": {"SBATCH_ARRAY_INX": "1-3"}}, "an array is many jobs"),
    ],
)
def test_slurms_own_refusal_fails_at_once(folder, instance, arguments, words):
    with pytest.raises(PenstockRefused, match=words):
        submit("refused", folder, **arguments).execute({"ti": instance("refused" + next(iter(arguments)))})


def test_an_array_is_refused_where_the_dag_is_written_with_what_to_do(folder):
    with pytest.raises(ValueError, match="map it, as in partial"):
        submit("array", folder, array="1-3")


def test_a_forecast_submits_nothing_and_fails_for_what_could_never_run(folder, instance, hook):
    arguments = {"command": ["true"], "name": "forecast"}
    forecast = PenstockForecastOperator(task_id="forecast", max_gpus=2, **arguments).execute(
        {"ti": instance("forecast")}
    )
    assert forecast["would"] in ("start", "wait")
    assert forecast["lines"]
    never = PenstockForecastOperator(task_id="never", min_gpus=4000, max_gpus=4000, **arguments)
    with pytest.raises(AirflowFailException, match="never run here"):
        never.execute({"ti": instance("never")})
    assert not hook.ask("GET", "/v1/jobs", params={"name": "forecast"})["jobs"]


def test_a_simulation_is_a_task_and_what_is_wrong_with_it_is_told_by_the_program(tmp_path):
    workload = tmp_path / "two.csv"
    workload.write_text("id,submit_s,gpus,duration_s\none,0,1,600\ntwo,0,1,1200\n")
    program = os.environ["PENSTOCK_TEST_PROGRAM"]

    def simulate(**arguments):
        given = {"program": program, "cluster": "t4:1x2", "workload": str(workload), "policies": ["fifo"]}
        return PenstockSimulateOperator(task_id="simulate", **given | arguments).execute({})

    summary = simulate(out=str(tmp_path / "out"))
    assert (tmp_path / "out/report.html").exists()
    assert "fifo" in json.dumps(summary)
    with pytest.raises(AirflowFailException, match=r"status 1(.|\n)*neither a spec"):
        simulate(cluster="t4")
    with pytest.raises(AirflowFailException, match="cannot be started"):
        simulate(program="/nowhere/penstock")
    with pytest.raises(AirflowFailException, match="either cluster and workload"):
        simulate(store="/nowhere")


def test_a_password_in_a_stores_url_is_neither_logged_nor_shown_nor_on_the_command_line(monkeypatch, tmp_path):
    masker = import_module(mask_secret.__module__)
    shown = []
    url = "postgresql+psycopg://ada:not%40for-you@db:5432/penstock"
    program = tmp_path / "penstock"
    program.write_text('#!/bin/sh\necho "{\\"words\\": \\"$*\\", \\"store\\": \\"$PENSTOCK_STORE\\"}"\n')
    program.chmod(0o755)
    with DAG("secrets", schedule=None):
        task = PenstockSimulateOperator(task_id="simulate", store="{{ params.url }}", program=str(program))
    monkeypatch.setattr(task.log, "info", lambda form, *words: shown.append(form % words))
    task.render_template_fields({"params": {"url": url}})
    assert task.store == url
    rendered = masker.redact({"store": task.store, "error": "no user with not@for-you"})
    assert rendered == {"store": "postgresql+psycopg://ada:***@db:5432/penstock", "error": "no user with ***"}
    words = "whatif --policy=sia --seeds=1 --json"
    assert task.execute({}) == {"words": words, "store": url}
    assert shown == [f"{program} {words}", "store postgresql+psycopg://ada:***@db:5432/penstock"]


def test_a_deferred_task_is_told_of_the_end_and_has_the_log(folder, instance, hook, caplog, capsys, monkeypatch):
    ti = instance("deferred")
    gate = folder / "deferred-gate"
    script = f"#!/bin/bash\necho out $AIRFLOW_CTX_TASK_ID\nuntil [ -e {gate} ]; do sleep 0.2; done\necho the end\n"
    operator = submit("deferred", folder, script=script)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute({"ti": ti})
    shows = PenstockJobTrigger._show

    async def show_and_open(self, client):
        await shows(self, client)
        if self._shown:
            gate.touch()

    monkeypatch.setattr(PenstockJobTrigger, "_show", show_and_open)
    with caplog.at_level("INFO"):
        event = first_event(revived(deferred))
        told = capsys.readouterr().out + caplog.text  # a trigger's log is structlog's from Airflow 3 on
        assert "out deferred" in told  # while it ran
        assert "is running on 1 " in told
    rest = []
    monkeypatch.setattr(operator, "_show", rest.extend)
    result = operator.execute_complete({"ti": ti}, event)
    assert "out deferred" not in rest
    assert ("the end" in rest) != ("the end" in told)
    assert (result["job_id"], result["state"], result["exit_code"]) == (ti.pushed["job_id"], "COMPLETED", 0)
    assert "out deferred" in hook.log_lines(result["job_id"])
    assert result["cost_usd"] == 0
    assert result["batch_sizes"] == []
    assert ti.pushed["job_url"].endswith(f"/v1/jobs/{result['job_id']}")
    # A retry, as after a worker that died before it could say so, takes the result of the job that is there.
    assert operator.execute({"ti": instance("deferred")})["job_id"] == result["job_id"]
    assert PenstockJobSensor(task_id="sensor", job_id=result["job_id"]).poke({})
    assert PenstockWaitOperator(task_id="waits", job_id=result["job_id"]).execute({}) == result
    # Once cleared it is another job: Airflow raises max_tries then.
    cleared = submit("deferred", folder, wait_for_completion=False).execute({"ti": instance("deferred", max_tries=1)})
    assert cleared["job_id"] != result["job_id"]
    hook.cancel(cleared["job_id"])


def test_a_failed_job_fails_the_task_with_its_last_lines_and_a_retry_is_a_new_job(folder, instance):
    script = "#!/bin/bash\necho the reason is here\nexit 3\n"
    messages = []
    for _ in range(2):
        with pytest.raises(PenstockJobFailed, match=r"FAILED, exit code 3(.|\n)*the reason is here") as failed:
            submit("failing", folder, script=script, deferrable=False).execute({"ti": instance("failing")})
        messages.append(str(failed.value).split()[1])
    assert len(set(messages)) == 2


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
from conftest import Instance
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
sent = PenstockHook.submit
def submit_and_die(self, submission):
    sent(self, submission)
    os.kill(os.getpid(), signal.SIGKILL)
PenstockHook.submit = submit_and_die
PenstockSubmitOperator(task_id="killed", script="#!/bin/bash\\nsleep 300\\n").execute({"ti": Instance("killed")})
"""


def test_a_worker_that_is_killed_after_submission_submits_once(folder, instance, hook, until):
    assert subprocess.run([sys.executable, "-c", KILLED], timeout=120).returncode == -signal.SIGKILL
    again = submit("killed", folder, wait_for_completion=False)
    job_id = again.execute({"ti": instance("killed")})["job_id"]
    assert hook.find(f"{job_key(instance('killed'))}:1")["id"] == job_id
    assert hook.find(f"{job_key(instance('killed'))}:2") is None
    again.on_kill()
    again.on_kill()
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


class Store(dict):
    """As `context["task_state_store"]` is from Airflow 3.3 on: a clear leaves it as it was."""

    set = dict.__setitem__


def test_a_cleared_task_runs_again_where_airflow_keeps_what_its_last_run_stored(folder, instance, hook, until):
    store = Store()

    def job_of(max_tries, script="#!/bin/sh\n"):
        operator = submit("kept", folder, script, wait_for_completion=False, retries=1)
        context = {"ti": instance("kept", max_tries=max_tries), "task_state_store": store}
        return operator.execute(context)["job_id"]

    first = job_of(1)
    until(lambda: hook.job(first)["ended"] == "COMPLETED")
    assert job_of(1) == first, "a retry takes the result that is there"
    second = job_of(2, LONG)
    assert second != first, "it was cleared"
    third = job_of(3)  # cleared while its job runs, or is on the way out
    assert third not in (first, second)
    hook.cancel(second)


def test_a_person_cancels_in_the_triggerer_and_a_restart_does_not(folder, instance, hook, until):
    job_id = submit("stopped", folder, wait_for_completion=False).execute({"ti": instance("stopped")})["job_id"]

    async def restart():
        trigger = PenstockJobTrigger("penstock_default", job_id, 0.2)
        waiting = asyncio.ensure_future(anext(trigger.run()))
        await asyncio.sleep(1)
        waiting.cancel()
        await trigger.cleanup()

    asyncio.run(restart())
    assert hook.job(job_id)["state"] != "ended"
    asyncio.run(PenstockJobTrigger("penstock_default", job_id, 0.2).on_kill())
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")
    assert PenstockCancelOperator(task_id="cancel", job_id=job_id).execute({})["state"] == "CANCELLED"


@pytest.mark.parametrize(("state", "end"), [("deferred", "runs"), ("failed", "CANCELLED"), (None, "CANCELLED")])
def test_where_airflow_does_not_tell_the_tasks_state_does(folder, instance, hook, until, monkeypatch, state, end):
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.TELLS", False)
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.state_of", lambda *names: state)
    ti = instance(f"untold-{state}")
    job_id = submit(ti.task_id, folder, wait_for_completion=False).execute({"ti": ti})["job_id"]

    async def stop():
        trigger = PenstockJobTrigger("penstock_default", job_id, 0.2)
        trigger.task_instance = ti
        waiting = asyncio.ensure_future(anext(trigger.run()))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(stop())
    if end == "runs":
        assert hook.job(job_id)["state"] != "ended"
        hook.cancel(job_id)
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


def test_many_tasks_that_wait_share_one_poller(folder, instance, monkeypatch):
    asked = []
    real = httpx.AsyncClient.get

    async def counted(self, path, **arguments):
        asked.append(path)
        return await real(self, path, **arguments)

    monkeypatch.setattr(httpx.AsyncClient, "get", counted)
    job_id = submit("shared", folder, wait_for_completion=False).execute({"ti": instance("shared")})["job_id"]

    async def wait():
        triggers = [PenstockJobTrigger("penstock_default", job_id, 0.5, log_interval_s=0) for _ in range(100)]
        tasks = [asyncio.ensure_future(anext(trigger.run())) for trigger in triggers]
        await asyncio.sleep(2)
        before = len(asked)
        await triggers[0].on_kill()
        events = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return before, events

    before, events = asyncio.run(wait())
    assert 1 <= before <= 3, "penstockd tells the rest"
    assert all(event.payload == {"job_id": job_id, "shown": 0} for event in events)


def test_a_trigger_for_a_job_that_is_not_there_says_so(instance):
    assert "no job 999999" in first_event(PenstockJobTrigger("penstock_default", "999999"))["error"]
    with pytest.raises(PenstockRefused):
        PenstockHook().job("999999")


def test_an_asset_watcher_hears_of_the_jobs_that_it_is_for(folder, instance, hook):
    async def watch():
        trigger = PenstockJobEventTrigger("watched-*", poll_interval_s=0.3)
        again = PenstockJobEventTrigger(**trigger.serialize()[1])
        event = asyncio.ensure_future(anext(again.run()))
        await asyncio.sleep(1)
        ids = []
        for name, script in (("other", "exit 0"), ("watched-bad", "exit 1"), ("watched-good", "exit 0")):
            order = {"key": f"watcher:{time.time()}", "name": name, "script": f"#!/bin/bash\n{script}\n"}
            ids.append((await asyncio.to_thread(hook.submit, order | {"output": f"{folder}/%j.out"}))["id"])
        return ids, (await asyncio.wait_for(event, 60)).payload

    ids, payload = asyncio.run(watch())
    assert (payload["id"], payload["ended"], payload["name"]) == (ids[2], "COMPLETED", "watched-good")


def test_the_retry_policy_tries_again_what_the_job_is_not_to_blame_for():
    retry_policy_module = pytest.importorskip("airflow.sdk.definitions.retry_policy")
    policy = retry_policy_module.ExceptionRetryPolicy.deserialize(retry_policy().serialize())

    def chosen(error):
        return policy.evaluate(error, 1, 3).action.value

    assert [chosen(failure(state)("")) for state in ("PREEMPTED", "NODE_FAIL", "FAILED")] == [
        "retry",
        "retry",
        "default",
    ]
    assert chosen(PenstockAway("")) == "retry"
    assert chosen(PenstockFunctionFailed("")) == "fail"
    assert all(issubclass(failure(state), AirflowFailException) for state in ("OUT_OF_MEMORY", "TIMEOUT", "DEADLINE"))


def test_a_job_knows_the_run_that_openlineage_has_for_its_task(folder, instance, monkeypatch):
    macros = pytest.importorskip("airflow.providers.openlineage.plugins.macros")
    monkeypatch.setattr("airflow.providers.openlineage.conf.is_disabled", lambda: False)
    monkeypatch.setattr(macros, "lineage_parent_id", lambda ti: f"ours/{ti.task_id}/1")
    monkeypatch.setattr(macros, "lineage_root_parent_id", lambda ti: f"ours/{ti.dag_id}/1")
    operator = submit("lineage", folder)
    environment = operator.submission(instance("lineage"))["environment"]
    assert environment["OPENLINEAGE_PARENT_ID"] == "ours/lineage/1"
    assert environment["OPENLINEAGE_ROOT_PARENT_ID"] == "ours/tests/1"
    operator.job_id = "12"
    assert operator.get_openlineage_facets_on_complete(None).run_facets["externalQuery"].externalQueryId == "12"


def of_function(function, folder, task_id, *args, **arguments):
    """A task of `@task.penstock`, as the worker has it."""
    with DAG("functions", schedule=None):
        task = penstock_task(
            task_id=task_id,
            shared_folder=f"{folder}/shared",
            output_file=f"{folder}/%j.out",
            **{"python": sys.executable, "poll_interval_s": 0.2, "deferrable": False} | arguments,
        )
        return task(function)(*args).operator


def test_a_function_runs_in_a_job_and_its_result_is_the_tasks(folder, instance):
    def multiply(factor, numbers, *, offset=0):
        import os

        return {"products": [factor * number + offset for number in numbers], "job": os.environ["SLURM_JOB_ID"]}

    operator = of_function(multiply, folder, "multiply", 3, [1, 2])
    ti = instance("multiply")
    result = operator.execute({"ti": ti})
    assert result == {"products": [3, 6], "job": ti.pushed["job_id"]}


def test_a_function_whose_retries_somebody_changes_finds_its_job_and_its_folder(folder, instance):
    def where():
        import os

        return os.environ["SLURM_JOB_ID"]

    def result(retries):
        ti = instance("changed", max_tries=1)
        return of_function(where, folder, "changed", retries=retries).execute({"ti": ti, "task_state_store": store})

    store = Store()
    assert result(1) == result(0)


def test_a_function_that_raises_comes_back_with_its_traceback(folder, instance):
    def divide(number):
        return 1 / number

    operator = of_function(divide, folder, "divide", 0, deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute({"ti": instance("divide")})
    event = first_event(revived(deferred))
    with pytest.raises(PenstockFunctionFailed, match=r"in divide(.|\n)*ZeroDivisionError") as failed:
        of_function(divide, folder, "divide", 0).execute_complete({"ti": instance("divide")}, event)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_another_python_is_told_by_name_and_what_cannot_be_sent_fails_at_once(folder, instance, tmp_path):
    other = tmp_path / "python"
    other.write_text(
        f'#!/bin/sh\nsed -i \'s/"python": "[0-9.]*"/"python": "2.7.1"/\' $2/made_by.json\nexec {sys.executable} "$@"\n'
    )
    other.chmod(0o755)
    with pytest.raises(PenstockJobFailed, match=r"comes from Python 2\.7\.1: name an interpreter"):
        of_function(lambda: 1, folder, "other_python", python=str(other)).execute({"ti": instance("other_python")})
    with pytest.raises(AirflowFailException, match="cannot be sent"):
        of_function(lambda lock: 1, folder, "lock", threading.Lock()).execute({"ti": instance("lock")})
    with pytest.raises(AirflowFailException, match="cannot be written"):
        of_function(lambda: 1, "/proc", "nowhere").execute({"ti": instance("nowhere")})


@pytest.mark.parametrize("example", ["example_penstock", "example_penstock_search"])
def test_the_example_dags_run(example, folder, hook):
    from airflow.utils.db import initdb

    initdb()
    dag = import_module(f"airflow_provider_penstock.example_dags.{example}").dag
    run = dag.test(run_conf={"folder": str(folder), "epochs": 7, "python": sys.executable})
    assert run.state == "success", [(ti.task_id, ti.state) for ti in run.get_task_instances()]
    if example == "example_penstock":
        job = hook.find(f"airflow:{run.dag_id}:{run.run_id}:train:-1:2:1")
        assert hook.log_lines(job["id"]) == ["trained for 7 epochs in example_penstock"]
    else:
        best = next(ti for ti in run.get_task_instances() if ti.task_id == "best")
        assert best.xcom_pull(task_ids="best") == {"learning_rate": 0.1, "loss": 0.0}


def is_newest():
    return version.parse(airflow.__version__) >= version.parse("3.3")


HOW_TO = Path(__file__).parents[2] / "docs/user/airflow-how-to.md"


def test_the_recipes_of_the_how_to_page_are_dags_whose_jobs_penstockd_would_take(tmp_path, hook, instance):
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # before Airflow 3.2
        from airflow.models.dagbag import DagBag
    page = HOW_TO.read_text(encoding="utf-8")
    recipes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for number, recipe in enumerate(recipes):
        (tmp_path / f"{number}.py").write_text(recipe)
    bag = DagBag(str(tmp_path))
    newer = {path for path in bag.import_errors if "airflow.sdk" in Path(path).read_text()}
    assert set(bag.import_errors) == (set() if is_newest() else newer), bag.import_errors
    assert len(bag.dags) >= len(recipes) - len(newer)
    for dag in bag.dags.values():
        for task in dag.tasks:
            if not isinstance(task, PenstockSubmitOperator) or hasattr(task, "python_callable"):
                continue
            ti = instance(task.task_id)
            ti.xcom_pull = lambda **_: "1"
            run = SimpleNamespace(start_date=datetime.now(UTC))
            given = {"params": {"rate": 0.1}, "ti": ti, "dag_run": run, "macros": SimpleNamespace(timedelta=timedelta)}
            task.render_template_fields(given)
            assert hook.forecast(task.submission(ti))["would"] in ("start", "wait"), dag.dag_id
    info = get_provider_info()
    modules = [import_module(name) for kind in ("operators", "sensors") for name in info[kind][0]["python-modules"]]
    classes = {name for module in modules for name in vars(module) if re.fullmatch("Penstock.*(Operator|Sensor)", name)}
    assert {name for name in classes if f": `{name}`\n" not in page} == set()


def test_of_a_long_output_the_end_is_shown_and_a_line_without_end_does_not_stop_it(folder, instance, hook):
    script = "#!/bin/bash\nhead -c 1500000 /dev/zero | tr '\\0' x\nprintf '\\nthe end\\n'\n"
    operator = submit("lengthy", folder, script=script, deferrable=False)
    job_id = operator.execute({"ti": instance("lengthy")})["job_id"]
    lines, end = hook.log_since(job_id, 0)
    assert end == 1_500_009
    assert lines[0] == f"({end - (1 << 20)} bytes left out)"
    assert lines[-1] == "the end"
    trigger = PenstockJobTrigger("penstock_default", job_id)

    async def looks():
        shown = []
        async with await connect("penstock_default") as client:
            for _ in range(10):
                await trigger._show(client)
                shown.append(trigger._shown)
        return shown

    shown = asyncio.run(looks())
    assert sorted(shown) == shown
    assert shown[-1] == end


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


def executor_with(python, monkeypatch, folder):
    pytest.importorskip("airflow.sdk", reason="executors were others before Airflow 3")
    module = import_module("airflow_provider_penstock.executors.penstock")
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__PYTHON", python)
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__OUTPUT_FILE", f"{folder}/%j.out")
    monkeypatch.setenv("AIRFLOW__PENSTOCK_EXECUTOR__POLL_INTERVAL_S", "0")
    return module.PenstockExecutor()


def away(*_, **__):
    raise httpx.ConnectError("nobody there")


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
    assert again.jobs == executor.jobs
    gate.touch()
    assert executor.running == {key("good-1"), key("bad-1")}
    assert {state for state, _ in executor.event_buffer.values()} == {"running"}
    jobs = dict(executor.jobs)

    def ended():
        executor.sync()
        return not executor.jobs

    until(ended)
    events = executor.get_event_buffer()
    assert events[key("good-1")][0] == "success"
    assert events[key("bad-1")][0] == "failed"
    assert "FAILED, exit code 1" in events[key("bad-1")][1]
    assert not executor.running
    said = executor.get_task_log(tasks[0].ti, 1)
    assert said == ([f"output of job {jobs[key('good-1')]}"], ["this is --json-path"])


def test_an_executor_takes_over_what_runs_and_cancels_what_is_revoked(folder, monkeypatch, hook, until):
    executor = executor_with("sleep 300 #", monkeypatch, folder)
    monkeypatch.setattr("airflow_provider_penstock.executors.penstock.shlex.quote", str)
    task = Workload("long-1")
    executor._process_workloads([task])
    job_id = executor.jobs[key("long-1")]
    after = executor_with("python3", monkeypatch, folder)
    never = Workload("never-submitted")
    assert after.try_adopt_task_instances([task.ti, never.ti]) == [never.ti]
    assert after.jobs == {key("long-1"): job_id}
    after.sync()
    assert after.jobs
    after.revoke_task(ti=task.ti)
    after.revoke_task(ti=never.ti)
    assert not after.running
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


def test_a_task_that_is_queued_again_after_it_was_revoked_has_another_job(folder, monkeypatch, hook, until):
    executor = executor_with("sleep 300 #", monkeypatch, folder)
    monkeypatch.setattr("airflow_provider_penstock.executors.penstock.shlex.quote", str)
    task = Workload("revoked-1")
    executor._process_workloads([task])
    first = executor.jobs[key("revoked-1")]
    with monkeypatch.context() as cut:
        cut.setattr(httpx.Client, "request", away)
        executor.revoke_task(ti=task.ti)  # it cannot be cancelled now
    assert hook.job(first)["state"] != "ended"
    executor._process_workloads([task])
    second = executor.jobs[key("revoked-1")]
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
    assert executor.jobs == {ti.key: "" for ti in tasks}
    assert len(asked) == 1


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
        assert executor.jobs == {key("away-1"): ""}
    executor.sync()
    assert executor.get_event_buffer()[key("away-1")] == ("failed", "penstockd knows no job of this task")
    task.ti.executor_config = {"penstock": {"spec": {"min_gpus": 4, "max_gpus": 2}}}
    executor._process_workloads([task])
    assert "max_gpus=2 is less than min_gpus=4" in executor.get_event_buffer()[key("away-1")][1]
    assert not executor.queued_tasks
