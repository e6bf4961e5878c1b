import asyncio
import contextlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.metadata import version

import httpx
import pytest
from airflow.providers.common.compat.sdk import AirflowFailException, TaskDeferred
from airflow.triggers.base import TaskSuccessEvent
from helpers import away, context, first_event, revived, submit

from airflow_provider_penstock.exceptions import PenstockJobFailed, PenstockRefused, PenstockTimeout
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import PenstockCancelOperator, PenstockWaitOperator
from airflow_provider_penstock.ownership import ownership
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger
from airflow_provider_penstock.triggers.poller import Output, OutputLog, Poller, Waiting, connect, poller

TIMED_OUT = "Trigger/execution timeout" if version("apache-airflow").startswith("2.") else "Trigger timeout"


def test_a_trigger_lets_the_worker_leave_before_it_fires(folder, instance, hook, until, monkeypatch):
    job_id = submit("quick", folder, script="#!/bin/sh\n", wait_for_completion=False).execute(
        context(instance("quick"))
    )["job_id"]
    until(lambda: hook.job(job_id)["state"] == "ended")
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.SETTLE_S", 3.0)
    began_s = time.monotonic()
    assert first_event(PenstockJobTrigger("penstock_default", job_id, 0.2))["job_id"] == job_id
    assert time.monotonic() - began_s >= 3


def test_a_deferred_task_is_told_of_the_end_and_has_the_log(folder, instance, hook, caplog, capsys, monkeypatch):
    ti = instance("deferred")
    gate = folder / "deferred-gate"
    script = f"#!/bin/bash\necho out $AIRFLOW_CTX_TASK_ID\nuntil [ -e {gate} ]; do sleep 0.2; done\necho the end\n"
    operator = submit("deferred", folder, script=script)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context(ti))
    write = OutputLog.write

    def log_and_open(self, output):
        write(self, output)
        if self.shown:
            gate.touch()

    monkeypatch.setattr(OutputLog, "write", log_and_open)
    with caplog.at_level("INFO"):
        event = first_event(revived(deferred))
        told = capsys.readouterr().out + caplog.text  # a trigger's log is structlog's from Airflow 3 on
        assert "out deferred" in told  # while it ran
        assert "is running on 1 " in told
    rest = []
    monkeypatch.setattr(operator, "show_output", rest.extend)
    result = operator.execute_complete(context(ti), event)
    assert "out deferred" not in rest
    assert ("the end" in rest) != ("the end" in told)
    assert (result["job_id"], result["state"], result["exit_code"]) == (ti.pushed["job_id"], "COMPLETED", 0)
    assert "out deferred" in hook.log_lines(result["job_id"])
    assert result["cost_usd"] == 0
    assert result["batch_sizes"] == []
    assert ti.pushed["job_url"].endswith(f"/v1/jobs/{result['job_id']}")
    # A retry, as after a worker that died before it could say so, takes the result of the job that is there.
    assert operator.execute(context(instance("deferred")))["job_id"] == result["job_id"]
    assert PenstockJobSensor(task_id="sensor", job_id=result["job_id"]).poke({})
    waiting = instance("waits")
    assert PenstockWaitOperator(task_id="waits", job_id=result["job_id"]).execute(context(waiting)) == result
    assert waiting.pushed == {"job_url": ti.pushed["job_url"]}
    # Once cleared it is another job: Airflow raises max_tries then.
    cleared = submit("deferred", folder, wait_for_completion=False).execute(
        context(instance("deferred", max_tries=1, try_number=2))
    )
    assert cleared["job_id"] != result["job_id"]
    hook.cancel(cleared["job_id"])


def test_a_sensor_waits_in_the_triggerer_and_leaves_the_job_alone(folder, instance, hook, until):
    jobs, gate = {}, folder / "sensed-gate"
    for name, status in (("good", 0), ("bad", 3)):
        script = f"#!/bin/sh\nuntil [ -e {gate} ]; do sleep 0.2; done\nexit {status}\n"
        operator = submit(f"sensed-{name}", folder, script=script, wait_for_completion=False)
        jobs[name] = operator.execute(context(instance(f"sensed-{name}")))["job_id"]
    triggers, sensors = {}, {}
    for name, job_id in jobs.items():
        ti = instance(name)
        sensors[name] = PenstockJobSensor(task_id=name, job_id=job_id, deferrable=True, timeout=600)
        with pytest.raises(TaskDeferred) as deferred:
            sensors[name].execute(context(ti))
        assert deferred.value.timeout == timedelta(seconds=600)
        assert ti.pushed["job_url"].endswith(f"/v1/jobs/{job_id}")
        triggers[name] = revived(deferred)
        assert not triggers[name].cancel
    gate.touch()
    assert sensors["good"].execute_complete({}, first_event(triggers["good"])) is None
    with pytest.raises(PenstockJobFailed, match="FAILED, exit code 3"):
        sensors["bad"].execute_complete({}, first_event(triggers["bad"]))
    # Of a job that has ended it knows at once.
    PenstockJobSensor(task_id="late", job_id=jobs["good"], deferrable=True).execute(context(instance("late")))


def test_a_person_cancels_in_the_triggerer_and_a_restart_does_not(folder, instance, hook, until):
    job_id = submit("stopped", folder, wait_for_completion=False).execute(context(instance("stopped")))["job_id"]

    async def restart():
        trigger = PenstockJobTrigger("penstock_default", job_id, 0.2)
        waiting = asyncio.ensure_future(anext(trigger.run()))
        await asyncio.sleep(1)
        waiting.cancel()
        await trigger.cleanup()

    asyncio.run(restart())
    asyncio.run(PenstockJobTrigger("penstock_default", job_id, 0.2, cancel=False).on_kill())  # of a sensor
    time.sleep(3)
    assert hook.job(job_id)["state"] != "ended"
    asyncio.run(PenstockJobTrigger("penstock_default", job_id, 0.2).on_kill())
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")
    assert (
        PenstockCancelOperator(task_id="cancel", job_id=job_id).execute(context(instance("cancel")))["state"]
        == "CANCELLED"
    )


@pytest.mark.parametrize(("state", "end"), [("deferred", "runs"), ("failed", "CANCELLED"), (None, "CANCELLED")])
def test_where_airflow_does_not_tell_the_tasks_state_does(folder, instance, hook, until, monkeypatch, state, end):
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.HAS_ON_KILL", False)
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.state_of", lambda *names: state)
    ti = instance(f"untold-{state}")
    job_id = submit(ti.task_id, folder, wait_for_completion=False).execute(context(ti))["job_id"]

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
    job_id = submit("shared", folder, wait_for_completion=False).execute(context(instance("shared")))["job_id"]

    async def wait():
        triggers = [PenstockJobTrigger("penstock_default", job_id, 0.5, log_interval_s=0) for _ in range(100)]
        tasks = [asyncio.ensure_future(anext(trigger.run())) for trigger in triggers]
        shared = poller("penstock_default", 0.5)
        while not shared._listening:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)  # the opening of the stream causes a reading
        asked.clear()
        await asyncio.sleep(2)
        before = len(asked)
        await triggers[0].on_kill()
        events = await asyncio.wait_for(asyncio.gather(*tasks), 180)
        return before, events

    before, events = asyncio.run(wait())
    assert before <= 1, "penstockd tells the rest"
    assert all(event.payload == {"job_id": job_id, "key": None, "shown": 0} for event in events)


def test_the_outputs_of_many_jobs_are_read_before_any_of_them_is_logged(monkeypatch):
    """Each time that something is logged, Airflow's triggerer reads all triggers from its database. What a job that has ended
    meanwhile still had to show is left to its end, and the reading of one that does not answer does no harm."""
    done = []

    async def read_output(self, client):
        done.append(f"read {self.job_id}")
        if self.job_id == "ends":
            ending.end.set_result({})
        return None if self.job_id == "silent" else Output([f"line of {self.job_id}"], 7)

    async def show():
        nonlocal ending
        made = Poller("penstock_default", 0.05)
        for job_id in ("one", "silent", "ends", "two"):
            output = OutputLog(job_id, logging.getLogger("task"), 60.0)
            end = asyncio.get_running_loop().create_future()
            waiting = Waiting(output, False, end, job={"state": "running"})
            made._waiting[job_id] = {waiting}
            if job_id == "ends":
                ending = waiting
        task = asyncio.create_task(made._show_outputs(None))
        await asyncio.sleep(0.3)
        task.cancel()
        return [waiting.output.shown for (waiting,) in made._waiting.values()]

    ending = None
    monkeypatch.setattr(OutputLog, "read", read_output)
    write = OutputLog.write
    monkeypatch.setattr(
        OutputLog, "write", lambda self, output: (done.append(f"log {self.job_id}"), write(self, output))
    )
    shown = asyncio.run(show())
    assert done == ["read one", "read silent", "read ends", "read two", "log one", "log silent", "log two"]
    assert shown == [7, 0, 0, 7]


def test_a_trigger_for_a_job_that_is_not_there_says_so(instance):
    assert "no job 999999" in first_event(PenstockJobTrigger("penstock_default", "999999"))["error"]
    with pytest.raises(PenstockRefused):
        PenstockHook().job("999999")


def test_of_a_long_output_the_end_is_shown_and_a_line_without_end_does_not_stop_it(folder, instance, hook):
    script = "#!/bin/bash\nhead -c 1500000 /dev/zero | tr '\\0' x\nprintf '\\nthe end\\n'\n"
    operator = submit("lengthy", folder, script=script, deferrable=False)
    job_id = operator.execute(context(instance("lengthy")))["job_id"]
    lines, end = hook.log_since(job_id, 0)
    assert end == 1_500_009
    assert lines[0] == f"({end - (1 << 20)} bytes left out)"
    assert lines[-1] == "the end"
    output = PenstockJobTrigger("penstock_default", job_id).output

    async def read():
        shown = []
        async with connect("penstock_default") as client:
            for _ in range(10):
                output.write(await output.read(client))
                shown.append(output.shown)
        return shown

    shown = asyncio.run(read())
    assert sorted(shown) == shown
    assert shown[-1] == end


def test_a_job_is_cancelled_once_penstockd_answers_again(folder, instance, hook, until, monkeypatch):
    job_id = submit("unheard", folder, wait_for_completion=False).execute(context(instance("unheard")))["job_id"]
    real, tries, answers = httpx.AsyncClient.post, [], []

    async def unheard(self, path, **arguments):
        tries.append(path)
        if len(tries) < 3:
            away()
        answers.append(await real(self, path, **arguments))
        return answers[-1]

    monkeypatch.setattr(httpx.AsyncClient, "post", unheard)

    async def kill():
        killing = PenstockJobTrigger("penstock_default", job_id).on_kill()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(killing, 0.5)  # as Airflow ends it after on_kill_timeout
        while not answers:
            await asyncio.sleep(0.1)

    asyncio.run(kill())
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


def test_a_token_that_was_replaced_is_read_again_and_a_wrong_one_fails_the_task(folder, instance, monkeypatch, hook):
    job_id = submit("rotated", folder, wait_for_completion=False).execute(context(instance("rotated")))["job_id"]
    good = os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"]
    monkeypatch.setattr("airflow_provider_penstock.triggers.poller.RECHECK_S", 0.5)
    monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_ROTATED", good)

    async def wait(after):
        waiting = asyncio.ensure_future(anext(PenstockJobTrigger("penstock_rotated", job_id, 0.2).run()))
        ours = poller("penstock_rotated", 0.2)
        while not ours._is_known:
            await asyncio.sleep(0.1)
        ours.client.headers["Authorization"] = "Bearer revoked"  # as after `penstock token revoke`
        monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_ROTATED", after)
        await asyncio.wait({waiting}, timeout=3 if after == good else 180)
        still_waits = not waiting.done()
        await asyncio.to_thread(hook.cancel, job_id)
        return still_waits, (await asyncio.wait_for(waiting, 180)).payload

    still_waits, payload = asyncio.run(wait(good))
    assert still_waits
    assert payload == {"job_id": job_id, "key": None, "shown": payload["shown"]}  # Slurm may print a line about the end
    job_id = submit("revoked", folder, wait_for_completion=False).execute(context(instance("revoked")))["job_id"]
    still_waits, payload = asyncio.run(wait(os.environ["AIRFLOW_CONN_PENSTOCK_WRONG"]))
    assert not still_waits
    assert "401" in payload["error"]


def test_execution_timeout_counts_while_the_task_waits_and_cancels_the_job(folder, instance, hook, until):
    ti = instance("overdue")
    ti.start_date = datetime.now(UTC) - timedelta(seconds=300)
    operator = submit("overdue", folder, execution_timeout=timedelta(minutes=10))
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context(ti))
    assert timedelta(0) < deferred.value.timeout < timedelta(seconds=301)
    ti.xcom_pull = lambda task_ids, key, map_indexes: ti.pushed[key]
    again = submit("overdue", folder, execution_timeout=timedelta(minutes=10))
    with pytest.raises(PenstockTimeout, match=r"execution_timeout=0:10:00: it is cancelled"):
        again.resume_execution("__fail__", {"error": TIMED_OUT}, context(ti))
    until(lambda: hook.job(ti.pushed["job_id"])["ended"] == "CANCELLED")


def test_a_job_that_somebody_cancelled_fails_its_task_without_a_retry(folder, instance, hook):
    job_id = submit("stopped", folder, wait_for_completion=False).execute(context(instance("stopped-by")))["job_id"]
    hook.cancel(job_id)
    with pytest.raises(AirflowFailException, match="CANCELLED"):
        PenstockWaitOperator(task_id="waits", job_id=job_id, deferrable=False).execute(context(instance("waits")))


def test_a_task_that_waits_renews_its_jobs_lease(folder, instance, hook, monkeypatch):
    ti = instance("leased")
    with pytest.raises(TaskDeferred) as deferred:
        submit("leased", folder).execute(context(ti))
    name = ownership(context(ti), hook.deployment).name
    assert hook.owner(name)["lease_s"] == 3 * 86400
    job_id, renewed, real = ti.pushed["job_id"], [], httpx.AsyncClient.post

    async def noted(self, path, **arguments):
        answer = await real(self, path, **arguments)
        renewed.append((path, answer.json()["jobs"]))
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "post", noted)
    monkeypatch.setattr("airflow_provider_penstock.triggers.poller.RENEW_S", 0.1)
    monkeypatch.setattr("airflow_provider_penstock.triggers.poller.RECHECK_S", 0.1)

    async def wait():
        waiting = asyncio.ensure_future(anext(revived(deferred).run()))
        while len(renewed) < 2:
            await asyncio.sleep(0.1)
        waiting.cancel()

    asyncio.run(asyncio.wait_for(wait(), 180))
    assert renewed[:2] == [("/v1/jobs/renew", [job_id])] * 2
    hook.cancel(job_id)


def test_a_job_that_is_to_outlive_its_task_has_no_lease(folder, instance, hook):
    for number, more in enumerate(({"cancel_on_kill": False}, {"lease": None}, {"wait_for_completion": False})):
        ti = instance(f"unleased-{number}")
        with contextlib.suppress(TaskDeferred):
            submit(ti.task_id, folder, **more).execute(context(ti))
        owner = hook.owner(ownership(context(ti), hook.deployment).name)
        assert owner.get("lease_s") is None
        hook.cancel(owner["job"])
    with pytest.raises(ValueError, match="shorter than 0:10:00"):
        submit("short", folder, lease=timedelta(seconds=30))


def test_a_task_may_end_in_the_triggerer_with_its_summary_and_the_whole_log(
    folder, instance, hook, caplog, capsys, monkeypatch
):
    ti, stored = instance("ends-there"), {}
    if not version("apache-airflow").startswith(
        "2."
    ):  # the triggerer's process, which asks the API server, is not here
        monkeypatch.setattr(
            "airflow.sdk.execution_time.xcom.XCom.set", lambda key, value, **names: stored.update({key: value, **names})
        )
    script = "#!/bin/bash\necho the first line\necho the last line\n"
    with pytest.raises(TaskDeferred) as deferred:
        submit(ti.task_id, folder, script=f"{script}sleep 1\n", end_from_trigger=True).execute(context(ti))

    async def ending():
        trigger = revived(deferred)
        trigger.task_instance = ti
        return await asyncio.wait_for(anext(trigger.run()), 180)

    with caplog.at_level("INFO"):
        event = asyncio.run(ending())
    told = capsys.readouterr().out
    for line in ("the first line", "the last line"):  # Airflow 2 may log to both
        assert max(told.count(line), caplog.text.count(line)) == 1
    assert isinstance(event, TaskSuccessEvent)
    result = (event.xcoms or stored)["return_value"]
    assert (result["job_id"], result["state"], result["cost_usd"]) == (ti.pushed["job_id"], "COMPLETED", 0)
    assert not stored or (stored["run_id"], stored["task_id"], stored["map_index"]) == (ti.run_id, ti.task_id, -1)


def test_the_end_of_a_task_reads_no_connection_again(folder, instance, hook, monkeypatch):
    """A triggerer answers its triggers one by one: a thousand tasks that end would wait for their connections for a minute."""
    ti, reads = instance("read-once"), []
    real = import_module("airflow_provider_penstock.triggers.poller").get_async_connection

    async def read_once(conn_id):
        reads.append(1)
        if len(reads) > 1:
            raise RuntimeError("the API server does not answer")
        return await real(conn_id)

    with pytest.raises(TaskDeferred) as deferred:
        submit(ti.task_id, folder, script="#!/bin/sh\nsleep 1\n", end_from_trigger=True).execute(context(ti))
    monkeypatch.setattr("airflow_provider_penstock.triggers.poller.get_async_connection", read_once)
    monkeypatch.setattr(PenstockJobTrigger, "_success", lambda self, result: asyncio.sleep(0, TaskSuccessEvent()))

    async def first():
        return await asyncio.wait_for(anext(revived(deferred).run()), 180)

    assert isinstance(asyncio.run(first()), TaskSuccessEvent)


def test_a_task_whose_end_cannot_be_read_ends_on_a_worker(folder, instance, hook, monkeypatch):
    """For example because the token was replaced meanwhile."""
    ti = instance("unread")

    async def refused(client, job_id):
        raise PenstockRefused("the token is not valid", "unauthorized")

    with pytest.raises(TaskDeferred) as deferred:
        submit(ti.task_id, folder, script="#!/bin/sh\nsleep 1\n", end_from_trigger=True).execute(context(ti))
    monkeypatch.setattr("airflow_provider_penstock.triggers.penstock.final_summary", refused)
    assert first_event(revived(deferred)) == {"job_id": ti.pushed["job_id"], "key": ti.pushed["job_key"], "shown": 0}


def test_tasks_that_wait_for_the_bill_of_the_cloud_take_no_thread_from_other_triggers(
    folder, instance, hook, monkeypatch
):
    """Their own connections, other providers and DNS use the same few threads."""
    ti = instance("billed")
    with pytest.raises(TaskDeferred) as deferred:
        submit(ti.task_id, folder, script="#!/bin/sh\nsleep 1\n", end_from_trigger=True).execute(context(ti))
    asked, real, real_async = [], httpx.Client.request, httpx.AsyncClient.request

    def unpaid():
        asked.append(1)
        return httpx.Response(200, json={"lines": [{"kind": "committed", "key": "run-1:committed", "amount": 5.0}]})

    def request(self, method, url, **more):
        return unpaid() if url == "/v1/ledger" else real(self, method, url, **more)

    async def request_async(self, method, url, **more):
        return unpaid() if url == "/v1/ledger" else await real_async(self, method, url, **more)

    monkeypatch.setattr(httpx.Client, "request", request)
    monkeypatch.setattr(httpx.AsyncClient, "request", request_async)
    monkeypatch.setattr("airflow_provider_penstock.hooks.penstock.BILL_PAUSES_S", (60.0,))

    async def others_wait_s():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        tasks = []
        for _ in range(8):
            trigger = revived(deferred)
            trigger.task_instance = ti
            tasks.append(asyncio.create_task(anext(trigger.run())))
        while len(asked) < 4:
            await asyncio.sleep(0.1)
        begun_s = time.monotonic()
        await asyncio.to_thread(int)
        found_s = time.monotonic() - begun_s
        for each in tasks:
            each.cancel()
        return found_s

    assert asyncio.run(asyncio.wait_for(others_wait_s(), 180)) < 30.0


def test_a_job_that_fails_ends_its_task_on_a_worker_which_says_why_and_retries_it(folder, instance):
    ti = instance("fails-there")
    with pytest.raises(TaskDeferred) as deferred:
        submit(ti.task_id, folder, script="#!/bin/sh\nsleep 1\nexit 3\n", end_from_trigger=True).execute(context(ti))
    assert first_event(revived(deferred))["job_id"] == ti.pushed["job_id"]
    with pytest.raises(ValueError, match="events for the task's outlets"):
        submit("outlets", folder, end_from_trigger=True, outlets=[object()])
