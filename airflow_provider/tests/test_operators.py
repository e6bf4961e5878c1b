import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowException, AirflowFailException, AirflowSkipException
from helpers import LONG, STARTED, Store, context, submit

from airflow_provider_penstock.exceptions import PenstockJobFailed, PenstockRefused
from airflow_provider_penstock.hooks import penstock
from airflow_provider_penstock.hooks.penstock import OPEN, PenstockHook
from airflow_provider_penstock.operators.penstock import (
    PenstockCancelOperator,
    PenstockSubmitOperator,
    PenstockWaitOperator,
)
from airflow_provider_penstock.ownership import ownership
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor


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
        operator.execute(context(instance("impossible")))


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"gpu_types": ["h900"]}, "no node here has h900"), ({"min_gpus": 999}, "change min_gpus or max_gpus")],
)
def test_what_could_never_run_fails_at_once_in_the_apis_words(folder, instance, hook, spec, words):
    ti = instance("never")
    with pytest.raises(AirflowFailException, match=words):
        submit("never", folder, **{"max_gpus": 999} | spec).execute(context(ti))
    assert hook.owner(ownership(context(ti), hook.deployment).name) is None
    unchecked = submit("never", folder, check_first=False, wait_for_completion=False, **{"max_gpus": 999} | spec)
    hook.cancel(unchecked.execute(context(instance(f"never-{words}")))["job_id"])


def test_a_job_may_wait_for_gpus_that_are_down(folder, instance, hook, monkeypatch):
    """They come back. Nodes of other tests are not taken down here."""
    monkeypatch.setattr(PenstockHook, "is_whole", lambda self: False)
    operator = submit("down", folder, wait_for_completion=False, min_gpus=999, max_gpus=999)
    hook.cancel(operator.execute(context(instance("down")))["job_id"])


def test_a_job_for_the_cloud_alone_fails_at_once_where_there_is_no_cloud(folder, instance):
    with pytest.raises(AirflowFailException, match="this site has no cloud"):
        submit("cloud", folder, burst="only", max_gpus=1).execute(context(instance("cloud")))


def test_the_result_has_what_the_job_wrote_into_its_result_file(folder, instance, hook):
    def run(name, script, **arguments):
        file = f"{folder}/{name}-%j.json"
        operator = submit(
            name, folder, script=f"#!/bin/sh\n{script}\n", result_file=file, deferrable=False, **arguments
        )
        return operator.execute(context(instance(name)))

    written = f"echo '{{\"loss\": 0.5}}' >{folder}/written-$SLURM_JOB_ID.json"
    assert run("written", written)["result_file"] == {"loss": 0.5}
    with pytest.raises(AirflowException, match="name a file in a folder that nodes and workers share"):
        run("absent", "exit 0")
    with pytest.raises(AirflowException, match="is not JSON"):
        run("garbled", f"echo loss >{folder}/garbled-$SLURM_JOB_ID.json")
    with pytest.raises(AirflowException, match="has more than 1048576 bytes"):
        run("large", f"head -c 1100000 /dev/zero >{folder}/large-$SLURM_JOB_ID.json")
    with pytest.raises(ValueError, match="is read on a worker"):
        submit("unread", folder, result_file="x.json", end_from_trigger=True)


def test_links_lead_to_the_address_for_browsers(folder, instance, hook):
    assert hook.job_url("7") == f"{hook.base_url}/v1/jobs/7"
    assert PenstockHook("penstock_other").job_url("7") == "https://penstock.example.org/v1/jobs/7"
    for operator in (PenstockSubmitOperator, PenstockWaitOperator, PenstockCancelOperator, PenstockJobSensor):
        assert [link.name for link in operator.operator_extra_links] == ["Penstock job", "Why it has these GPUs"]


def test_a_connection_that_does_not_name_this_airflow_is_refused_with_the_remedy(folder, instance, hook):
    ti = instance("nameless")
    with pytest.raises(
        AirflowFailException, match="connection penstock_nameless does not name this Airflow; set `deployment`"
    ):
        submit("nameless", folder, penstock_conn_id="penstock_nameless").execute(context(ti))
    assert "does not name this Airflow" in PenstockHook("penstock_nameless").test_connection()[1]


def test_two_airflows_with_one_token_leave_each_others_jobs_of_equal_ids_alone(folder, instance, hook):
    """A task of the same DAG, run and task id, which started later, has a job of its own beside the other's."""
    ours = submit("equal", folder, wait_for_completion=False)
    first = ours.execute(context(instance("equal")))["job_id"]
    theirs = submit("equal", folder, wait_for_completion=False, penstock_conn_id="penstock_other")
    second = theirs.execute(context(instance("equal"), STARTED + timedelta(hours=1)))["job_id"]
    assert first != second
    assert hook.job(first)["state"] in OPEN
    assert ours.execute(context(instance("equal")))["job_id"] == first, "nobody has superseded it"
    for each in (first, second):
        hook.cancel(each)


def test_dictionaries_and_moments_may_come_from_templates(folder, instance):
    given = {"spec": '{"max_gpus": 3}', "options": '{"memory_mb": 100}', "environment": '{"RATE": 0.1}'}
    body = submit("templates", folder, deadline="2100-01-01T01:00:00+01:00", **given).submission(instance("templates"))
    assert (body["spec"], body["memory_mb"], body["environment"]["RATE"]) == ({"max_gpus": 3}, 100, "0.1")
    assert body["deadline_s"] == 4102444800  # 2100-01-01T00:00:00Z
    for wrong, what in (({"spec": "max_gpus=3"}, "not JSON"), ({"deadline": "2100-01-01"}, "no time zone")):
        with pytest.raises(AirflowFailException, match=what):
            submit("wrong", folder, **wrong).execute(context(instance("wrong")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"deadline": "2001-01-01T00:00:00+00:00", "time_limit_s": 60}, "time limit is invalid"),
        ({"account": "nobody!"}, "account"),
        ({"script": "#!/bin/bash\n#SBATCH -a 1-3\ntrue\n"}, "an array is several jobs"),
        ({"environment": {"SBATCH_ARRAY_INX": "1-3"}}, "an array is several jobs"),
    ],
)
def test_slurms_own_refusal_fails_at_once(folder, instance, arguments, words):
    with pytest.raises(PenstockRefused, match=words):
        submit("refused", folder, **arguments).execute(context(instance("refused" + next(iter(arguments)))))


def test_an_array_is_refused_where_the_dag_is_written_with_what_to_do(folder):
    with pytest.raises(ValueError, match="map it, as in partial"):
        submit("array", folder, array="1-3")


def test_a_failed_job_fails_the_task_with_its_last_lines_and_a_retry_is_a_new_job(folder, instance):
    script = "#!/bin/bash\necho the reason is here\nexit 3\n"
    messages = []
    for number in (1, 2):
        with pytest.raises(PenstockJobFailed, match=r"FAILED, exit code 3(.|\n)*the reason is here") as failed:
            submit("failing", folder, script=script, deferrable=False).execute(
                context(instance("failing", try_number=number))
            )
        messages.append(str(failed.value).split()[1])
    assert len(set(messages)) == 2


def test_a_retry_starts_no_job_in_place_of_one_that_somebody_cancelled_and_one_after_a_timeout_does(
    folder, instance, hook, until
):
    """The first tries were lost before they heard of the end, for example with their workers."""

    def job_of(name, number):
        operator = submit(name, folder, wait_for_completion=False)
        operator.execute(context(instance(name, try_number=number)))
        return operator

    stopped = job_of("stopped-by-somebody", 1).job_id
    hook.cancel(stopped)
    until(lambda: hook.job(stopped)["ended"] == "CANCELLED")
    with pytest.raises(AirflowFailException, match=f"job {stopped}, the job of an earlier try, was cancelled"):
        job_of("stopped-by-somebody", 2)
    overdue = job_of("stopped-by-itself", 1)
    overdue.on_kill()
    until(lambda: hook.job(overdue.job_id)["ended"] == "CANCELLED")
    again = job_of("stopped-by-itself", 2).job_id
    assert again != overdue.job_id
    hook.cancel(again)


@pytest.mark.parametrize("codes", [3, (2, 3)])
def test_a_job_may_skip_its_task_by_its_exit_code(folder, instance, codes):
    task = f"skips-{codes}".translate(str.maketrans("(, )", "____"))
    operator = submit(task, folder, script="#!/bin/sh\nexit 3\n", deferrable=False, skip_on_exit_code=codes)
    with pytest.raises(AirflowSkipException, match="exit code 3"):
        operator.execute(context(instance(task)))


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
from conftest import Instance
from helpers import context
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator
sent = PenstockHook.submit
def submit_and_die(self, submission):
    sent(self, submission)
    os.kill(os.getpid(), signal.SIGKILL)
PenstockHook.submit = submit_and_die
PenstockSubmitOperator(task_id="killed", script="#!/bin/bash\\nsleep 300\\n").execute(context(Instance("killed")))
"""


def test_a_worker_that_is_killed_after_submission_submits_once(folder, instance, hook, until):
    assert subprocess.run([sys.executable, "-c", KILLED], timeout=120).returncode == -signal.SIGKILL
    again = submit("killed", folder, wait_for_completion=False)
    job_id = again.execute(context(instance("killed")))["job_id"]
    second = submit("killed", folder, wait_for_completion=False)
    assert second.execute(context(instance("killed", try_number=2)))["job_id"] == job_id
    assert hook.find(ownership(context(instance("killed")), hook.deployment).key)["id"] == job_id
    again.on_kill()
    again.on_kill()
    until(lambda: hook.job(job_id)["ended"] == "CANCELLED")


@pytest.mark.parametrize("token", ["known", "replaced"])
def test_a_task_that_is_killed_while_it_asks_airflow_for_its_connection_cancels_its_job(
    folder, instance, hook, until, monkeypatch, token
):
    """Airflow calls `on_kill` in a signal handler. There, another question to Airflow would wait for the interrupted one."""
    operator = submit(f"killed-asking-{token}", folder, wait_for_completion=False)
    operator.execute(context(instance(f"killed-asking-{token}")))
    with monkeypatch.context() as patch:
        if token == "known":
            patch.setattr(PenstockHook, "get_connection", lambda *_: pytest.fail("it asks Airflow"))
        else:
            known = penstock._read_options["penstock_default"]
            patch.setitem(
                penstock._read_options, "penstock_default", known | {"headers": {"Authorization": "Bearer of-old"}}
            )
        operator.on_kill()
    until(lambda: hook.job(operator.job_id)["ended"] == "CANCELLED")


def test_a_try_that_airflow_runs_twice_has_one_job_although_the_task_was_edited_in_between(
    folder, instance, hook, until
):
    def job_of(script):
        return submit("edited", folder, script=script, wait_for_completion=False).execute(context(instance("edited")))

    first = job_of("#!/bin/sh\nexit 1\n")["job_id"]
    until(lambda: hook.job(first)["ended"] == "FAILED")
    assert job_of(LONG)["job_id"] == first, "another job is for the next try"


def test_a_cleared_task_runs_again_where_airflow_keeps_what_its_last_run_stored(folder, instance, hook, until):
    store = Store()

    def job_of(max_tries, script="#!/bin/sh\n"):
        operator = submit("kept", folder, script, wait_for_completion=False, retries=1)
        ti = instance("kept", max_tries=max_tries, try_number=max_tries)
        return operator.execute(context(ti, task_state_store=store))["job_id"]

    first = job_of(1)
    until(lambda: hook.job(first)["ended"] == "COMPLETED")
    assert job_of(1) == first, "a retry takes the result that is there"
    second = job_of(2, LONG)
    assert second != first, "it was cleared"
    third = job_of(3)  # cleared while its job runs, or is on the way out
    assert third not in (first, second)
    until(lambda: hook.job(second)["ended"] == "CANCELLED")
    until(lambda: hook.job(third)["ended"] == "COMPLETED")


def test_a_dag_run_that_was_deleted_and_triggered_again_runs_anew(folder, instance, hook, until):
    """Airflow gives the new run's tasks the same names and numbers."""

    def job_of(started, script="#!/bin/sh\n"):
        operator = submit("deleted", folder, script, wait_for_completion=False)
        return operator.execute(context(instance("deleted"), started=started))["job_id"]

    first = job_of(STARTED)
    until(lambda: hook.job(first)["ended"] == "COMPLETED")
    assert job_of(STARTED) == first
    second = job_of(STARTED + timedelta(minutes=1), LONG)
    assert second != first, "this run has done nothing yet"
    third = job_of(STARTED + timedelta(minutes=2), LONG)  # deleted while its job ran
    until(lambda: hook.job(second)["ended"] == "CANCELLED")
    with pytest.raises(PenstockRefused, match=f"job {third} of a later try"):
        job_of(STARTED + timedelta(minutes=1), LONG)  # a worker that nobody has stopped
    assert hook.job(third)["state"] in OPEN
    hook.cancel(third)  # Slurm looks at dependencies every half minute


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
