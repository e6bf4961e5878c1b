import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib import import_module, resources
from pathlib import Path
from types import SimpleNamespace

import airflow
import httpx
import jsonschema
import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowFailException
from helpers import away, context, first_event, submit
from packaging import version

import airflow_provider_penstock
from airflow_provider_penstock import get_provider_info
from airflow_provider_penstock.exceptions import PenstockAway, PenstockFunctionFailed, PenstockRefused, failure
from airflow_provider_penstock.hooks.penstock import PenstockHook
from airflow_provider_penstock.notifications.penstock import PenstockCancelNotifier
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator, PenstockWaitOperator
from airflow_provider_penstock.operators.simulate import PenstockSimulateOperator
from airflow_provider_penstock.reconciling import TaskOfJob, states_of
from airflow_provider_penstock.retries import retry_policy
from airflow_provider_penstock.sensors.penstock import PenstockJobSensor
from airflow_provider_penstock.triggers.penstock import PenstockJobEventTrigger, PenstockJobTrigger


def test_provider_info_is_valid_and_what_it_names_is_there():
    info = get_provider_info()
    schema = json.loads((resources.files("airflow") / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                import_module(module)
    decorators = [entry["class-name"] for entry in info["task-decorators"]]
    commands = info["cli"] if is_newest() else []
    named = [*info["extra-links"], *info["notifications"], *decorators, *commands]
    for path in [*named, info["connection-types"][0]["hook-class-name"]]:
        module, name = path.rsplit(".", 1)
        assert getattr(import_module(module), name).__name__ == name


def test_the_form_of_a_connection_is_penstocks_and_has_a_field_for_everything_that_extra_may_have():
    """A form that an Airflow cannot make costs the connection type its name: it becomes `generic`."""
    if airflow.__version__.startswith("3.1."):  # its API server stands in for the library of forms
        from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService

        (ours,) = (each for each in HookMetaService.hook_meta_data() if each.connection_type == "penstock")
        named, fields = ours.hook_name, {f"extra__penstock__{name}" for name in ours.extra_fields}
    else:
        from airflow.providers_manager import ProvidersManager

        manager = ProvidersManager()
        named = manager.hooks["penstock"].hook_name
        fields = {name for name in manager.connection_form_widgets if name.startswith("extra__penstock__")}
    assert named == "Penstock"
    code = (Path(airflow_provider_penstock.__file__).parent / "hooks/penstock.py").read_text()
    known = set(re.findall(r'(?:extra|extra_dejson)\.get\("([a-z_]+)"', code))
    assert known >= {"tls", "deployment"}
    assert fields == {f"extra__penstock__{name}" for name in known}


def test_a_connection_says_for_whom_it_is_taken_and_a_wrong_token_is_told():
    assert PenstockHook().test_connection()[0]
    good, sentence = PenstockHook("penstock_wrong").test_connection()
    assert not good
    assert "401" in sentence


def test_a_request_is_repeated_for_as_long_as_another_penstockd_needs_to_take_over(hook, monkeypatch):
    """A restart takes some seconds, and a takeover 15 s."""
    now_s, real = [0.0], httpx.Client.request
    monkeypatch.setattr("airflow_provider_penstock.hooks.penstock.time.sleep", lambda s: now_s.append(now_s[-1] + s))
    monkeypatch.setattr(httpx.Client, "request", lambda *a, **k: real(*a, **k) if now_s[-1] > 25 else away())
    assert hook.ask("GET", "/v1/me")["role"]
    now_s.clear()
    now_s.append(0.0)
    assert not hook.test_connection()[0]
    assert now_s[-1] < 5, "a person waits for the answer"


def test_a_worker_that_read_a_token_just_before_it_was_replaced_reads_it_again(hook, monkeypatch):
    good, reads, real = os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"], [], PenstockHook.get_conn

    def rotated(self):
        reads.append(1)
        monkeypatch.setenv(
            "AIRFLOW_CONN_PENSTOCK_TURNED", os.environ["AIRFLOW_CONN_PENSTOCK_WRONG"] if len(reads) == 1 else good
        )
        return real(self)

    monkeypatch.setattr(PenstockHook, "get_conn", rotated)
    assert PenstockHook("penstock_turned").ask("GET", "/v1/me")["role"]
    assert len(reads) == 2
    reads.clear()
    with pytest.raises(PenstockRefused, match="401"):
        PenstockHook("penstock_wrong").ask("GET", "/v1/me")
    assert len(reads) == 2, "a wrong token is wrong"


def test_of_several_hosts_the_one_that_leads_is_asked(folder, instance, monkeypatch):
    given = json.loads(os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"])
    monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_TWO", json.dumps(given | {"host": "127.0.0.2, 127.0.0.1"}))
    monkeypatch.setattr("airflow_provider_penstock.hooks.penstock._unanswered_s", {})
    hook = PenstockHook("penstock_two")
    assert hook.ask("GET", "/v1/me")["role"]
    assert "//127.0.0.1:" in hook.base_url, "the next request begins with it"
    monkeypatch.setattr("airflow_provider_penstock.hooks.penstock._unanswered_s", {})
    event = first_event(PenstockJobTrigger("penstock_two", "999999", 0.2))
    assert "no job 999999" in event["error"], "the triggerer has asked the one that answers"


def test_a_command_says_what_to_change_before_the_first_task_runs(monkeypatch, capsys):
    check = import_module("airflow_provider_penstock.cli.check")
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    check.check(SimpleNamespace(conn_id="penstock_default"))
    told = capsys.readouterr().out.splitlines()[-1]  # Airflow 2 logs to the output as well
    assert told.startswith("ok:     connection penstock_default: penstockd accepts the token as ")
    monkeypatch.setenv(
        "AIRFLOW__CORE__EXECUTOR", "LocalExecutor,airflow_provider_penstock.executors.penstock.PenstockExecutor"
    )
    for conn_id, sentence in {
        "penstock_wrong": "the token is unknown or revoked",
        "penstock_nameless": "does not name this Airflow",
        "not_there": "not_there",
    }.items():
        with pytest.raises(SystemExit):
            check.check(SimpleNamespace(conn_id=conn_id))
        first, second = capsys.readouterr().out.splitlines()[-2:]
        assert first.startswith("change: ")
        assert sentence in first
        assert "task_queued_timeout is 600 s" in second
    monkeypatch.setenv("AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT", "86400")
    check.check(SimpleNamespace(conn_id="penstock_default"))
    if is_newest():
        from airflow.cli.cli_parser import get_parser

        chosen = get_parser().parse_args(["penstock", "check", "--conn-id", "penstock_wrong"])
        with pytest.raises(SystemExit):
            chosen.func(chosen)


def test_the_command_finds_a_connection_in_airflows_database():
    """A process of its own, as at a shell: this one's variables name connections, which Airflow finds anywhere."""
    from airflow.models import Connection
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session

    if version.parse(airflow.__version__) < version.parse("3.2"):
        pytest.skip("the command needs Airflow 3.2")
    initdb()
    named = json.loads(os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"])
    with create_session() as session:
        session.add(Connection(conn_id="penstock_in_database", **named | {"extra": json.dumps(named["extra"])}))
    try:
        words = [sys.executable, "-P", "-m", "airflow", "penstock", "check", "--conn-id", "penstock_in_database"]
        environment = os.environ | {"AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "86400"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
        assert "ok:     connection penstock_in_database: penstockd accepts the token" in done.stdout, done.stdout
        assert done.returncode == 0
    finally:
        with create_session() as session:
            session.delete(session.query(Connection).filter(Connection.conn_id == "penstock_in_database").one())


def test_a_notifier_cancels_the_jobs_that_a_run_has_left(folder, instance, hook, until):
    jobs = []
    for number in range(3):
        ti = instance(f"left-{number}")
        jobs.append(submit(ti.task_id, folder, wait_for_completion=False).execute(context(ti))["job_id"])
    given = {"left": jobs[0], "dag": DAG("left", schedule=None)}
    PenstockCancelNotifier("{{ left }}")(given)
    asyncio.run(PenstockCancelNotifier([jobs[1], "999999"]).async_notify(given))
    for nothing in (None, "{{ none }}", "None"):
        PenstockCancelNotifier(nothing)(given)
    until(lambda: [hook.job(job)["ended"] for job in jobs[:2]] == ["CANCELLED"] * 2)
    assert hook.job(jobs[2])["state"] != "ended"
    with pytest.raises(PenstockRefused, match="401"):
        PenstockCancelNotifier(jobs[2], "penstock_wrong").notify(given)  # Airflow 2.11.0 only logs what a call raises
    hook.cancel(jobs[2])


def test_the_settings_of_the_executor_are_airflows_and_have_their_defaults():
    from airflow.providers.common.compat.sdk import conf

    options = get_provider_info()["config"]["penstock_executor"]["options"]
    code = (Path(airflow_provider_penstock.__file__).parent / "executors/penstock.py").read_text()
    assert set(re.findall(r'SECTION, "([a-z_]+)"', code)) == set(options)
    if is_newest():
        assert {name: conf.get("penstock_executor", name, fallback=None) for name in options} == {
            name: each["default"] for name, each in options.items()
        }


def test_tls_is_spoken_and_a_certificate_that_nobody_vouches_for_is_refused(monkeypatch):
    assert PenstockHook().base_url.startswith("https:")
    monkeypatch.setattr("airflow_provider_penstock.hooks.penstock.TEST_PAUSES_S", ())
    good, sentence = PenstockHook("penstock_stranger").test_connection()
    assert not good
    assert "certificate" in sentence


def test_certificates_are_read_once_until_they_change(monkeypatch, tmp_path):
    given = json.loads(os.environ["AIRFLOW_CONN_PENSTOCK_DEFAULT"])
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(Path(given["extra"]["ca_file"]).read_bytes())
    named = given | {"extra": given["extra"] | {"ca_file": str(ca_file)}}
    monkeypatch.setenv("AIRFLOW_CONN_PENSTOCK_OWN_CA", json.dumps(named))
    reads, real = [], ssl.create_default_context

    def counted(**arguments):
        reads.append(arguments)
        return real(**arguments)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    for _ in range(3):
        assert PenstockHook("penstock_own_ca").test_connection()[0]
    assert first_event(PenstockJobTrigger("penstock_own_ca", "999999", 0.2))["error"]
    assert len(reads) == 1
    os.utime(ca_file, (1, 1))
    assert PenstockHook("penstock_own_ca").test_connection()[0]
    assert len(reads) == 2


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


@pytest.mark.parametrize("example", ["example_penstock", "example_penstock_search"])
def test_the_example_dags_run(example, folder, hook):
    from airflow.utils.db import initdb

    initdb()
    dag = import_module(f"airflow_provider_penstock.example_dags.{example}").dag
    run = dag.test(run_conf={"folder": str(folder), "epochs": 7, "python": sys.executable})
    assert run.state == "success", [(ti.task_id, ti.state) for ti in run.get_task_instances()]
    if example == "example_penstock":
        train = next(ti for ti in run.get_task_instances() if ti.task_id == "train")
        task = TaskOfJob(train.dag_id, train.run_id, "train", -1)
        assert states_of({task}) == {task: ("success", train.max_tries)}
        assert hook.log_lines(train.xcom_pull(task_ids="train", key="job_id")) == [
            "trained for 7 epochs in example_penstock"
        ]
        if is_newest():
            links_are_those_of_the_executors_job(train)
    else:
        best = next(ti for ti in run.get_task_instances() if ti.task_id == "best")
        assert best.xcom_pull(task_ids="best") == {"learning_rate": 0.1, "loss": 0.0}


def links_are_those_of_the_executors_job(ti):
    """The task as if PenstockExecutor had run it in job 7. The scheduler stores the id that the executor tells it."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.plugins_manager import get_global_operator_extra_links
    from airflow.utils.session import create_session
    from sqlalchemy import update

    def links():
        found = {link.name: link.get_link(None, ti_key=ti.key) for link in get_global_operator_extra_links()}
        return [found["Penstock job"], found["Why it has these GPUs"]]

    def ran(**values):
        with create_session() as session:
            session.execute(update(TaskInstance).where(TaskInstance.id == ti.id).values(**values))
        return links()

    assert ran(external_executor_id="7") == ["", ""], "another executor ran it"
    page = f"{PenstockHook().base_url}/v1/jobs/7/page"
    assert ran(executor="PenstockExecutor") == [page, f"{page}#explain"]
    page = "https://penstock.example.org/v1/jobs/7/page"
    assert ran(executor_config={"penstock": {"conn_id": "penstock_other"}}) == [page, f"{page}#explain"]
    assert ran(executor_config={"penstock": {"conn_id": "not_there"}}) == ["", ""], (
        "the page of the task is shown anyway"
    )
    assert ran(executor="NoSuchExecutor") == ["", ""]


def is_newest():
    return version.parse(airflow.__version__) >= version.parse("3.3")


OURS = (PenstockSubmitOperator, PenstockWaitOperator, PenstockSimulateOperator, PenstockJobSensor)
HOW_TO = Path(__file__).parents[2] / "docs/user/airflow-how-to.md"
RECIPES = Path(__file__).parent / "system/penstock"


def test_each_class_links_to_its_guide_and_each_recipe_is_in_one():
    page, info = HOW_TO.read_text(encoding="utf-8"), get_provider_info()
    paths = [path for kind in ("operators", "sensors") for path in info[kind][0]["python-modules"]]
    classes = {name: made for path in paths for name, made in vars(import_module(path)).items()}
    guides = {
        f"howto/{kind.lower()}:{name}": made.__doc__
        for name, made in classes.items()
        if (kind := re.sub("Penstock.*(Operator|Sensor)", r"\1", name)) in ("Operator", "Sensor")
    }
    assert len(guides) == 6
    decorator = import_module("airflow_provider_penstock.decorators.penstock").penstock_task
    guides["howto/decorator:penstock"] = decorator.__doc__
    guides["howto/notifier:PenstockCancelNotifier"] = PenstockCancelNotifier.__doc__
    guides["howto/trigger:PenstockJobEventTrigger"] = PenstockJobEventTrigger.__doc__
    for label, docstring in guides.items():
        assert f":ref:`{label}`" in docstring, label
        assert f"({label})=\n" in page
    shown = re.findall(r'penstock/(\S+)\n:language: python\n:start-after: "(.*)"\n:end-before: "(.*)"\n', page)
    assert sorted(name for name, _, _ in shown) == sorted(path.name for path in RECIPES.glob("*.py"))
    for name, start, end in shown:
        recipe = (RECIPES / name).read_text(encoding="utf-8").splitlines()
        assert [recipe.count(f"# {start}"), recipe.count(f"# {end}")] == [1, 1]
        assert start.replace("START", "END") == end


def test_the_recipes_of_the_how_to_page_are_dags_whose_jobs_penstockd_would_take(hook, instance):
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # before Airflow 3.2
        from airflow.models.dagbag import DagBag
    recipes = [*RECIPES.glob("*.py")]
    bag = DagBag(str(RECIPES))
    newer = {path for path in bag.import_errors if "airflow.sdk" in Path(path).read_text()}
    assert set(bag.import_errors) == (set() if is_newest() else newer), bag.import_errors
    assert len(bag.dags) >= len(recipes) - len(newer)
    for dag in bag.dags.values():
        for task in dag.tasks:
            if not isinstance(task, OURS) or hasattr(task, "python_callable"):
                continue
            ti = instance(task.task_id)
            ti.xcom_pull = lambda **_: "1"
            run = SimpleNamespace(start_date=datetime.now(UTC))
            # A run that is triggered without a date has no `ds`, `logical_date` and so on.
            given = {"params": {"rate": 0.1, "job_id": "12"}, "ti": ti, "dag_run": run}
            task.render_template_fields(given | {"macros": SimpleNamespace(timedelta=timedelta)})
            if not isinstance(task, PenstockSubmitOperator):
                continue
            assert hook.forecast(task.submission(ti))["would"] in ("start", "wait"), dag.dag_id
