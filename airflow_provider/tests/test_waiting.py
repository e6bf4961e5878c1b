"""One kind of waiting: as patient as the job lives, and each task hears of its own job in its own log."""

import asyncio
import contextvars
import logging
from datetime import timedelta
from importlib.metadata import version
from types import SimpleNamespace

import httpx
import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, TaskDeferred
from fake import TOKEN
from helpers import away, context, first_event, revived

from airflow_provider_penstock.exceptions import PenstockAway, PenstockJobExhausted, PenstockRefused, PenstockTimeout
from airflow_provider_penstock.hooks import penstock
from airflow_provider_penstock.news import News, whole_lines
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator, PenstockWaitOperator
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor
from airflow_provider_penstock.silence import Silence
from airflow_provider_penstock.triggers.penstock import PenstockJobTrigger
from airflow_provider_penstock.triggers.poller import OutputLog, connect

AIRFLOW_3 = not version("apache-airflow").startswith("2.")
FAKE = {"penstock_conn_id": "penstock_fake"}


def task(task_id="train", **arguments):
    usual = {"script": "#!/bin/sh\n", "poll_interval_s": 0.05, "log_interval_s": 0.05, "check_first": False}
    return PenstockSubmitOperator(task_id=task_id, **FAKE, **usual | arguments)


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between requests, which take no time. A number in `events` is the pause at which its function is called."""
    made, events = [], {}

    def sleep(s):
        made.append(s)
        for event in [events.pop(number) for number in [*events] if len(made) >= number]:
            event()

    monkeypatch.setattr(penstock.time, "sleep", sleep)
    return SimpleNamespace(made=made, events=events)


def wake(fake):
    fake.is_silent = False


def said(capsys, caplog):
    """What the log of a task has: structlog's from Airflow 3 on, and before it Python's."""
    return capsys.readouterr().out if AIRFLOW_3 else caplog.text


def test_a_task_on_a_worker_waits_for_longer_than_any_request_and_says_since_when(
    fake, pauses, instance, caplog, capsys
):
    """The API away for three minutes failed both tries of a task after 40 s, and its job ran on."""
    operator = task(deferrable=False)
    wait = penstock.PenstockHook.wait

    def silent_from_now_on(self, job_id):
        fake.is_silent = True
        pauses.events[30] = lambda: (wake(fake), fake.end("1"))
        return wait(self, job_id)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(penstock.PenstockHook, "wait", silent_from_now_on)
        result = operator.execute(context(instance("train")))
    assert result["state"] == "COMPLETED"
    assert sum(pauses.made) > 180
    told = said(capsys, caplog)
    assert told.count("does not answer since") == 1, "one line for one silence"
    assert "the task keeps waiting for job 1" in told
    assert "Penstock answers again" in told


def test_a_task_on_a_worker_goes_on_while_airflow_does_not_tell_it_its_connection(fake, instance, pauses):
    wait, ti = penstock.PenstockHook.wait, instance("train")

    def untold(self, job_id):
        fake.end("1")
        patch.setattr(penstock.PenstockHook, "get_connection", lambda *_: away())
        return wait(self, job_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penstock.PenstockHook, "wait", untold)
        assert task(deferrable=False).execute(context(ti))["state"] == "COMPLETED"


def test_the_triggerer_goes_on_while_airflow_does_not_tell_it_the_connection(fake, monkeypatch):
    async def untold(conn_id):
        raise RuntimeError("the API server does not answer")

    async def scene():
        (waiting,) = await _waiting("1", log := Log())
        await _until(lambda: log)
        monkeypatch.setattr("airflow_provider_penstock.triggers.poller.options_of", untold)
        fake.is_silent = True
        await _until(lambda: any("does not answer since" in line for _, line in log))
        fake.end("1")
        wake(fake)
        return (await waiting).payload

    fake.new({})
    assert asyncio.run(asyncio.wait_for(scene(), 60)) == {"job_id": "1", "key": None, "shown": 0}


def test_the_end_of_a_job_is_read_as_patiently_and_after_the_trigger_too(fake, pauses, instance):
    operator = task()
    with pytest.raises(TaskDeferred):
        operator.execute(context(instance("train")))
    fake.end("1")
    fake.is_silent = True
    pauses.events[20] = lambda: wake(fake)
    assert operator.execute_complete(context(instance("train")), {"job_id": "1"})["state"] == "COMPLETED"


def test_a_task_is_deferred_although_penstock_went_away_after_the_submission(fake, pauses, instance, monkeypatch):
    submit = penstock.PenstockHook.submit

    def then_silent(self, submission):
        job = submit(self, submission)
        fake.is_silent = True
        return job

    monkeypatch.setattr(penstock.PenstockHook, "submit", then_silent)
    with pytest.raises(TaskDeferred):
        task().execute(context(instance("train")))


def test_a_sensor_goes_on_while_penstock_is_away_on_a_worker_and_in_the_triggerer(fake, pauses, caplog, capsys):
    fake.new({})
    sensor = PenstockJobSensor(task_id="sensor", job_id="1", **FAKE)
    assert not sensor.poke({})
    fake.is_silent = True
    assert not sensor.poke({})
    assert not sensor.poke({})
    assert said(capsys, caplog).count("does not answer since") == 1
    fake.end("1")
    pauses.events[len(pauses.made) + 20] = lambda: wake(fake)
    assert sensor.execute_complete({}, {"job_id": "1"}) is None
    assert sensor.poke({})


class Log(list):
    """A log that notes for which task a line was written."""

    of = contextvars.ContextVar("of", default="nobody")

    def info(self, text, *words):
        self.append((self.of.get(), text % words if words else text))

    warning = error = info


async def _waiting(names, log):
    """A trigger for each of the jobs, in a context of its own, as the triggerer starts them."""

    async def run(trigger, name):
        Log.of.set(name)
        return await anext(trigger.run())

    tasks = []
    for name in names:
        trigger = PenstockJobTrigger("penstock_fake", name, 0.05, log_interval_s=0.05)
        trigger.output.log = log
        tasks.append(asyncio.create_task(run(trigger, name)))
        await asyncio.sleep(0.05)
    return tasks


async def _until(condition):
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not true within 30 s")


def test_each_waiting_task_hears_of_a_silence_and_of_its_own_job_in_its_own_log(fake, monkeypatch):
    """The poller logged for the first of its tasks, also half an hour after that one had ended."""
    log, pollers = Log(), Log()

    class OfPoller(logging.Handler):
        def emit(self, record):
            pollers.info(record.getMessage())

    handler = OfPoller(logging.INFO)
    logger = logging.getLogger("airflow_provider_penstock.triggers.poller")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    for _ in "12":
        fake.new({})

    async def scene():
        first, second = await _waiting("12", log)
        await _until(lambda: ("2", "job 2 is queued") in log)
        fake.end("1")
        assert (await first).payload["job_id"] == "1"
        fake.is_silent = True
        await _until(lambda: any("does not answer since" in line for _, line in log))
        wake(fake)
        await _until(lambda: any("answers again" in line for _, line in log))
        fake.job("2", state="running", allocation={"gpus": 2, "gpu_type": "t4", "nodes": {"n1": 2}})
        await _until(lambda: ("2", "job 2 is running on 2 t4 (n1)") in log)
        fake.outputs["2"] = "first\n 1%\r 2%\r 3%\nlast\n"
        await _until(lambda: ("2", "last") in log)
        fake.end("2")
        assert (await second).payload["job_id"] == "2"

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert {of for of, line in log if "answer" in line} == {"2"}, "the first task has ended"
    assert {of for of, line in log if line.startswith("job 1 ")} == {"1"}
    assert {of for of, line in log if line.startswith("job 2 ")} == {"2"}
    assert [line for of, line in log if of == "2"][-3:] == ["first", " 3%", "last"]
    assert {of for of, _ in pollers} == {"nobody"}


def test_a_held_job_says_once_which_hold_it_is_since_when_and_who_ends_it_how():
    """For ever `queued: held`, and nothing else."""
    text = "is held in Slurm (launch failed requeued held); its user can release it with `penstock release 7`"
    job = {
        "id": "7",
        "state": "queued",
        "ended": "",
        "restarts": 1,
        "reason": "held",
        "stopped": "",
        "allocation": None,
    }
    held = job | {"note": text, "note_s": 1764500710.0}
    news = News()
    assert news.of(held)[-1] == f"job 7 is queued: it {text} (since 2025-11-30 11:05:10 UTC)"
    assert news.of(held) == []
    assert news.of(job | {"reason": "no-gpus", "note": "", "note_s": None}) == ["job 7 is queued: no-gpus"]


def test_a_restarted_job_says_that_and_why_and_each_thing_once():
    news = News()
    job = {"id": "7", "state": "running", "ended": "", "restarts": 0, "reason": "", "stopped": "", "allocation": None}
    old, new = (
        {"gpus": n, "gpu_type": kind, "nodes": {node: n}} for n, kind, node in ((2, "t4", "a"), (4, "a100", "b"))
    )
    seen = []
    for changes in (
        {"allocation": old}, {"allocation": old}, {"state": "stopping", "allocation": old, "stopped": "move: it trains faster"},
        {"state": "queued", "stopped": "move: it trains faster"},
        {"allocation": new, "restarts": 1, "stopped": "move: it trains faster"},
        {"allocation": new, "restarts": 2, "stopped": "move: it trains faster"},
        {"state": "ended", "ended": "COMPLETED", "restarts": 2},
    ):  # fmt: skip
        seen += news.of(job | changes)
    assert seen == [
        "job 7 is running on 2 t4 (a)",
        "job 7 is stopped to start again: move: it trains faster",
        "job 7 is stopping on 2 t4 (a)",
        "job 7 is queued",
        "job 7 starts again, restart 1: move: it trains faster",
        "job 7 is running on 4 a100 (b), before on 2 t4 (a)",
        "job 7 starts again, restart 2: move: it trains faster",
    ]
    (first, _) = News().of(job | {"restarts": 2, "stopped": "drain: n1"})
    assert first == "job 7 was restarted before (2 in total): drain: n1"


@pytest.mark.parametrize(
    ("text", "lines", "begun"),
    [
        ("a\nb", ["a"], "b"),
        ("a\r\nb\r\n", ["a", "b"], ""),
        (" 1%\r 2%\r 3%\n", [" 3%"], ""),
        ("\r 1%\r 2%\r 3%", [" 2%"], " 3%"),
        ("a\r", [], "a\r"),
        ("a\x0bb\u2028c\n", ["a\x0bb\u2028c"], ""),
        ("", [], ""),
    ],
)
def test_of_a_line_that_is_written_over_the_last_state_is_shown(text, lines, begun):
    assert whole_lines(text) == (lines, begun)


def give_away(fake, **others):
    """A slurmctld that was killed has lost job 1, and has given its id to another job. penstockd keeps the lost one."""
    lost = {"id": "1@20261130T000000Z", "state": "ended", "ended": "UNKNOWN", "ended_text": "was forgotten by Slurm"}
    fake.jobs[lost["id"]] = fake.jobs["1"] | lost
    fake.job("1", **others)


@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize("key", [None, "airflow:1bc29b36f623ba82aaf6724fd3b16718", "airflow:tests:tests:other:t:-1:1"])
def test_a_job_whose_id_slurm_has_given_to_another_task_is_not_taken_for_the_own(fake, instance, deferrable, key):
    """A slurmctld that was killed lost a job a moment old. The next one got its id, and two tasks succeeded by one job."""
    operator, ti = task(deferrable=deferrable), instance("train")
    wait = penstock.PenstockHook.wait

    def given_away(*words):
        give_away(fake, key=key, state="running")
        return wait(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penstock.PenstockHook, "wait", given_away)
        with pytest.raises(AirflowException, match=r"ended as UNKNOWN.*was forgotten by Slurm") as failed:  # noqa: PT012
            try:
                operator.execute(context(ti))
            except TaskDeferred as deferred:
                trigger = revived(SimpleNamespace(value=deferred))
                give_away(fake, key=key, state="running")
                operator = task(deferrable=True)
                operator.execute_complete(context(ti), first_event(trigger))
    assert not isinstance(failed.value, AirflowFailException), "a retry submits the job again"
    assert fake.jobs["1"]["state"] == "running"


def test_a_stopped_task_does_not_cancel_a_job_that_has_the_id_of_its_own(fake, instance):
    operator, ti = task(deferrable=True), instance("train")
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context(ti))
    give_away(fake, key="airflow:tests:tests:other:t:-1:1", state="running")
    operator.on_kill()
    asyncio.run(revived(deferred).on_kill())
    assert fake.jobs["1"]["state"] == "running"


def test_a_task_whose_job_runs_again_after_its_end_waits_on(fake, instance):
    """A slurmctld that was killed had forgotten the end, after the trigger was told of it."""
    operator, ti = task(deferrable=True), instance("train")
    with pytest.raises(TaskDeferred):
        operator.execute(context(ti))
    fake.job("1", state="queued", ended="")
    with pytest.raises(TaskDeferred):
        task(deferrable=True).execute_complete(context(ti), {"job_id": "1", "key": ti.pushed["job_key"], "shown": 0})
    sensor = PenstockJobSensor(task_id="sense", job_id="1", deferrable=True, penstock_conn_id="penstock_fake")
    with pytest.raises(TaskDeferred):
        sensor.execute_complete(context(instance("sense")), {"job_id": "1", "shown": 0})


OLD_BYTES = "größer ".encode("latin-1")
"""They are no UTF-8: in JSON each is a character that has three bytes in UTF-8."""


def shown_by_a_worker(parts, fake):
    lines, shown = [], 0
    for part in parts:
        fake.outputs["1"] += part
        more, shown = penstock.PenstockHook("penstock_fake").log_since("1", shown, whole=True)
        lines += more
    return lines, shown


def shown_by_the_triggerer(parts, fake):
    async def scene():
        log = Log()
        output = OutputLog("1", log, 0.05)
        async with connect("penstock_fake") as client:
            for part in parts:
                fake.outputs["1"] += part
                output.write(await output.read(client))
        return [line for _, line in log], output.shown

    return asyncio.run(scene())


@pytest.mark.parametrize("shown", [shown_by_a_worker, shown_by_the_triggerer])
def test_bytes_that_are_not_utf_8_neither_repeat_output_nor_lose_it(fake, shown):
    """A line that was not complete yet was counted in bytes after its replacement, so that earlier output came again."""
    fake.new({})
    fake.outputs["1"] = b""
    parts = [
        OLD_BYTES + b"1\n" + 3 * OLD_BYTES,
        b"2\n\xe4 1%\r\xe4 2%\r\xe4 3",
        "%\n…".encode()[:-1],
        "…\n".encode()[-2:],
    ]
    lines, at = shown(parts, fake)
    bad = OLD_BYTES.decode(errors="replace")
    assert lines == [bad + "1", 3 * bad + "2", "\ufffd 2%", "\ufffd 3%", "…"]
    assert at == len(fake.outputs["1"])


def test_output_of_several_parts_has_its_lines_and_characters_whole(fake):
    fake.new({})
    fake.part_bytes = 10
    fake.outputs["1"] = "größer\nähnlich\nlonger than a part\nüber\nENDE".encode()
    hook, size = penstock.PenstockHook("penstock_fake"), len(fake.outputs["1"])
    lines = ["größer", "ähnlich", "longer tha", "n a part", "über"]
    assert hook.log_since("1", 0) == ([*lines, "ENDE"], size)
    assert hook.log_since("1", 0, whole=True) == (lines, size - len("ENDE"))
    assert hook.log_since("1", size) == ([], size)


def test_the_failure_says_once_how_the_job_ended(fake, instance):
    fake.new({})
    fake.end("1", "TIMEOUT", 143, "reached its time limit")
    with pytest.raises(PenstockJobExhausted) as failed:
        PenstockWaitOperator(task_id="waits", job_id="1", **FAKE).execute(context(instance("waits")))
    assert str(failed.value).splitlines() == ["job 1 has ended as TIMEOUT, exit code 143: it reached its time limit"]


@pytest.mark.parametrize(
    ("tries", "arguments", "words", "runs"),
    [
        (1, {}, "the task's next try takes it up; if there is none, Airflow cancels it", True),
        (0, {}, "it is cancelled", False),
        (0, {"cancel_on_kill": False}, "it runs on, because of cancel_on_kill=False", True),
    ],
)
def test_a_task_that_fails_while_its_job_may_live_says_so_and_cancels_it_if_no_try_follows(
    fake, instance, tries, arguments, words, runs
):
    operator, ti = task(**arguments), instance("train", max_tries=tries)
    with pytest.raises(TaskDeferred):
        operator.execute(context(ti))
    with pytest.raises(AirflowException, match="Job 1 may not have ended: " + words):
        operator.execute_complete(context(ti), {"job_id": "1", "error": "RuntimeError: no memory"})
    assert bool(fake.open()) == runs
    ti.xcom_pull = lambda **_: "1"
    with pytest.raises(AirflowException, match="Job 1 may not have ended: "):
        task(**arguments).resume_execution("__fail__", {"error": "Trigger failure"}, context(ti))


def test_a_task_whose_token_was_revoked_says_until_when_its_job_may_run(fake, instance, pauses):
    operator, ti = task(deferrable=False, lease=timedelta(hours=2)), instance("train", max_tries=3)
    wait = penstock.PenstockHook.wait

    def revoked(self, job_id):
        fake.token = "another"
        return wait(self, job_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penstock.PenstockHook, "wait", revoked)
        with pytest.raises(
            PenstockRefused, match=r"Job 1 may not have ended: it could not be cancelled now (.|\n)* UTC"
        ):
            operator.execute(context(ti))
    fake.token = TOKEN
    assert fake.open() == ["1"]


def test_a_try_whose_submission_was_not_answered_says_what_becomes_of_its_job(fake, instance, pauses):
    fake.is_silent = True
    with pytest.raises(PenstockAway, match=r"the key airflow:tests:(.|\n)*next try takes it up(.|\n)* UTC"):
        task().execute(context(instance("train")))


def test_a_stopped_task_and_one_whose_time_is_over_say_that_the_job_could_not_be_cancelled(
    fake, instance, pauses, caplog, capsys
):
    operator, ti = task(execution_timeout=timedelta(seconds=60)), instance("train")
    ti.start_date = context(ti)["dag_run"].start_date
    with pytest.raises(TaskDeferred):
        operator.execute(context(ti))
    fake.is_silent = True
    with caplog.at_level("INFO"):
        operator.on_kill()
    assert "job 1 of the stopped task: it could not be cancelled now" in said(capsys, caplog)
    with pytest.raises(PenstockTimeout, match="it could not be cancelled now"):
        operator.resume_execution("__fail__", {"error": "Trigger timeout"}, context(ti))


def test_an_error_without_a_text_is_told_by_its_name():
    assert Silence(None, "").sentence(httpx.ReadTimeout("")).endswith("UTC (ReadTimeout)")
