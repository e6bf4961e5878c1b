import asyncio
import json
import signal
import subprocess
import sys
from importlib import import_module, resources

import httpx
import jsonschema
import pytest
from airflow.providers.common.compat.sdk import AirflowFailException, TaskDeferred

from airflow_provider_penstock import get_provider_info
from airflow_provider_penstock.exceptions import PenstockJobFailed, PenstockRefused
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import (
    PenstockCancelOperator,
    PenstockSubmitOperator,
    PenstockWaitOperator,
    job_key,
)
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger

LONG = "#!/bin/bash\nsleep 300\n"


def submit(task_id, folder, script=LONG, **arguments):
    return PenstockSubmitOperator(
        task_id=task_id, script=script, options={"output": f"{folder}/%j.out"}, poll_interval_s=0.2, **arguments
    )


def test_provider_info_is_valid_and_what_it_names_is_there():
    info = get_provider_info()
    schema = json.loads((resources.files("airflow") / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                import_module(module)
    for path in [*info["extra-links"], info["connection-types"][0]["hook-class-name"]]:
        module, name = path.rsplit(".", 1)
        assert getattr(import_module(module), name).__name__ == name


def test_a_connection_says_for_whom_it_is_taken_and_a_wrong_token_is_told():
    assert PenstockHook().test_connection()[0]
    good, sentence = PenstockHook("penstock_wrong").test_connection()
    assert not good
    assert "401" in sentence


def test_an_impossible_request_fails_at_once_in_the_apis_words(folder, instance):
    operator = submit("impossible", folder, wish={"min_gpus": 4, "max_gpus": 2})
    with pytest.raises(AirflowFailException, match="min_gpus"):
        operator.execute({"ti": instance("impossible")})


def test_a_deferred_task_is_told_of_the_end_and_has_the_log(folder, instance, hook, caplog):
    ti = instance("deferred")
    operator = submit("deferred", folder, script="#!/bin/bash\nsleep 1\necho out $AIRFLOW_CTX_TASK_ID\n")
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute({"ti": ti})
    path, arguments = deferred.value.trigger.serialize()
    module, name = path.rsplit(".", 1)
    trigger = getattr(import_module(module), name)(**json.loads(json.dumps(arguments)))

    async def first():
        return await anext(trigger.run())

    event = asyncio.run(asyncio.wait_for(first(), 60))
    with caplog.at_level("INFO"):
        result = operator.execute_complete({"ti": ti}, event.payload)
    assert (result["job_id"], result["state"], result["exit_code"]) == (ti.pushed["job_id"], "COMPLETED", 0)
    assert "out deferred" in hook.log_lines(result["job_id"])
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
    assert hook.find(f"{job_key(instance('killed'), 0)}:1")["id"] == job_id
    assert hook.find(f"{job_key(instance('killed'), 0)}:2") is None
    again.on_kill()
    again.on_kill()
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


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


def test_many_tasks_that_wait_share_one_poller(folder, instance, monkeypatch):
    asked = []
    real = httpx.AsyncClient.get

    async def counted(self, path, **arguments):
        asked.append(path)
        return await real(self, path, **arguments)

    monkeypatch.setattr(httpx.AsyncClient, "get", counted)
    job_id = submit("shared", folder, wait_for_completion=False).execute({"ti": instance("shared")})["job_id"]

    async def wait():
        triggers = [PenstockJobTrigger("penstock_default", job_id, 0.5) for _ in range(100)]
        tasks = [asyncio.ensure_future(anext(trigger.run())) for trigger in triggers]
        await asyncio.sleep(2)
        before = len(asked)
        await triggers[0].on_kill()
        events = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return before, events

    before, events = asyncio.run(wait())
    assert 1 <= before <= 6
    assert all(event.payload == {"job_id": job_id} for event in events)


def test_a_trigger_for_a_job_that_is_not_there_says_so(instance):
    async def first():
        return await anext(PenstockJobTrigger("penstock_default", "999999").run())

    event = asyncio.run(asyncio.wait_for(first(), 60))
    assert "no job 999999" in event.payload["error"]
    with pytest.raises(PenstockRefused):
        PenstockHook().job("999999")


def test_the_example_dag_runs(folder, hook):
    from airflow.utils.db import initdb

    initdb()
    from airflow_provider_penstock.example_dags.example_penstock import dag

    run = dag.test(run_conf={"folder": str(folder), "epochs": 7})
    assert run.state == "success", [(ti.task_id, ti.state) for ti in run.get_task_instances()]
    job = hook.find(f"airflow:{run.dag_id}:{run.run_id}:train:-1:0:1")
    assert hook.log_lines(job["id"]) == ["trained for 7 epochs in example_penstock"]
