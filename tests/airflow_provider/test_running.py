"""The example DAGs and faults, in a running Airflow against a real penstockd. Slurm's accounting says which jobs really ran."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_slurm.loopback import wait_for
from tests.airflow_provider.conftest import accounted_site, airflow_python, listening
from tests.airflow_provider.deployment import REPOSITORY, Deployment
from tests.airflow_provider.proxy import Proxy
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.end_to_end.site import RATES, UNFORESEEN, Site
from tests.scheduler.databases import postgresql

pytestmark = pytest.mark.slurm

OWN = Path(__file__).parent / "dags"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("running")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    airflow_python()
    with accounted_site(folder) as site:
        yield site
        assert UNFORESEEN not in site.log.read_text(), site.tail()


@pytest.fixture(scope="module")
def connection(site: Site) -> dict[str, object]:
    return listening(site)


@pytest.fixture(scope="module")
def line(connection: dict[str, object]) -> Iterator[Proxy]:
    """The proxy between Airflow's connection `penstock_line` and penstockd."""
    with Proxy(int(str(connection["port"]))) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def airflow(folder: Path, connection: dict[str, object], line: Proxy) -> Iterator[Deployment]:
    connections = {
        "penstock_default": connection,
        "penstock_wrong": connection | {"password": "wrong"},
        "penstock_line": connection | {"port": line.port, "extra": {"tls": False, "timeout_s": 5}},
    }
    python = airflow_python()
    settings = {
        "CORE__EXECUTOR": "LocalExecutor,PenstockExecutor:airflow_provider_penstock.executors.penstock.PenstockExecutor",
        "PENSTOCK_EXECUTOR__PYTHON": python,
        "PENSTOCK_EXECUTOR__OUTPUT_FILE": f"{folder}/executor-%j.out",
        "PENSTOCK_EXECUTOR__ENVIRONMENT": json.dumps(on_nodes(folder / "airflow")),
    }
    with contextlib.ExitStack() as stack:
        if os.environ.get("PENSTOCK_AIRFLOW_DATABASE") == "postgresql":
            url = stack.enter_context(postgresql()).replace("+psycopg:", "+psycopg2:")
            settings["DATABASE__SQL_ALCHEMY_CONN"] = f"{url}/postgres"
        made = Deployment(python, folder / "airflow", connections, sorted(OWN.glob("*.py")), **settings)
        yield stack.enter_context(made)


def on_nodes(home: Path) -> dict[str, str]:
    """The settings that a site writes into the airflow.cfg of its nodes."""
    return {
        "AIRFLOW_HOME": str(home),
        "PYTHONPATH": str(REPOSITORY / "airflow_provider"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home / "logs-of-nodes"),
    }


@pytest.fixture(autouse=True)
def _nothing_left(site: Site) -> Iterator[None]:
    yield
    site.slurm.reset()


def trainer(site: Site, work_s: float, rates: dict[str, dict[str, float]] = RATES) -> str:
    """The command of an emulated trainer, in a job that inherits nothing from the test."""
    return f"env PYTHONPATH={os.environ.get('PYTHONPATH', '')} {site.trainer(work_s, rates).removeprefix('exec ')}"


def plain(site: Site, node: str, gpus: int) -> str:
    """A job that holds GPUs."""
    return site.sbatch("-w", node, f"--gres=gpu:{gpus}", "--output=/dev/null", "--wrap=sleep 3600")


def test_a_pipeline_trains_on_two_types_and_is_resized_and_what_it_trained_starts_another_dag(
    airflow: Deployment, site: Site, folder: Path
) -> None:
    pipeline(airflow, site, folder, [0.1, 1.0], work_s=500)


@pytest.mark.long
def test_a_pipeline_over_twenty_learning_rates(airflow: Deployment, site: Site, folder: Path) -> None:
    pipeline(airflow, site, folder, [round(0.05 * number, 2) for number in range(1, 21)], work_s=150)


def pipeline(airflow: Deployment, site: Site, folder: Path, rates: list[float], work_s: float) -> None:
    dag = "example_penstock_pipeline"
    asset_runs = len(airflow.runs("example_penstock_asset"))
    blockers = [plain(site, "a100-00", 8), plain(site, "a100-01", 7)]
    site.wait_states("RUNNING", *blockers)
    run = airflow.trigger(
        dag,
        folder=str(folder / "shared"),
        train=trainer(site, work_s),
        spec={"goodput_table": {name: RATES[name] for name in ("t4", "a100")}, "checkpointable": True},
        learning_rates=rates,
        python=airflow.python,
    )

    def started() -> list[str]:
        ids = [airflow.xcom(dag, run, "train", "job_id", index) for index in range(len(rates))]
        return [each for each in ids if each is not None and site.starts(each)]

    wait_for(lambda: len(started()) >= 2, 240, "two trials to run", poll_s=1.0, details=lambda: airflow.story(dag, run))
    airflow.wait_task(dag, run, "train", "deferred", "success", map_index=0)
    early = airflow.xcom(dag, run, "train", "job_id", 0)
    site.slurm.command("scancel", *blockers)
    wait_for(
        lambda: f"job {early} is running on" in airflow.log(dag, run, "train", map_index=0),
        240,
        "the log of a task that waits to say where its job runs",
        details=lambda: airflow.story(dag, run),
    )
    airflow.wait(dag, run, timeout_s=1500)
    summaries = [airflow.xcom(dag, run, "train", map_index=index) for index in range(len(rates))]
    jobs = [each["job_id"] for each in summaries]
    assert airflow.xcom(dag, run, "evaluate")["jobs"] == jobs
    assert len(set(jobs)) == len(rates)
    assert {each["state"] for each in summaries} == {"COMPLETED"}
    assert {gpu_type for each in summaries for gpu_type in each["gpu_hours"]} == {"t4", "a100"}
    assert sum(each["restarts"] for each in summaries) >= 1, "no job was resized"
    assert any(len(set(site.starts(job))) > 1 for job in jobs)
    for job in jobs:
        site.assert_progress_kept(job, lost=work_s / 4)
    assert ended(site, dag, run, "train") == ["COMPLETED"] * len(rates)
    told = airflow.ask("GET", "/assets/events", params={"source_dag_id": dag, "source_run_id": run, "limit": 100})
    assert {event["extra"]["job"]["job_id"] for event in told["asset_events"]} == set(jobs)
    links = airflow.links(dag, run, "train", 0)
    assert links["Penstock job"].endswith(f"/v1/jobs/{jobs[0]}/page")
    # The jobs are called train-...: each of them is an event of the asset, and a run answers one or several.
    asset = "example_penstock_asset"
    wait_for(lambda: len(airflow.runs(asset)) > asset_runs, 120, "the asset's DAG to run", details=airflow.tail)
    newest = airflow.runs(asset)[-1]
    airflow.wait(asset, newest, timeout_s=180)
    evaluated = airflow.xcom(asset, newest, "evaluate", "job_id")
    assert "evaluate what job" in (folder / f"{evaluated}.out").read_text()


def ended(site: Site, dag: str, run: str, task: str) -> list[str]:
    """The states of all jobs of a task in Slurm's accounting, however often it was tried or cleared.

    The accounting has a job's comment, and so its key, once it has ended; until then slurmctld has it.
    """
    said = site.slurm.command(
        "sacct", "--allusers", "--noheader", "--parsable2", "-X", "--format=JobID,State,Comment%2000"
    )
    open_comments = {job.id: job.comment for job in site.gateway.jobs()}
    states = []
    for each in said.stdout.splitlines():
        job, state, comment = each.split("|", 2)
        if f"airflow:{dag}:{run}:{task}:" in (comment or open_comments.get(job, "")):
            states.append(state.split()[0])
    return sorted(states)


@pytest.mark.long
def test_a_job_goes_to_the_cloud_and_the_task_after_it_sees_the_bill(
    airflow: Deployment, cloud_site: tuple[Site, Hypervisor], ec2: Ec2, folder: Path
) -> None:
    cloud, hypervisor = cloud_site
    cloud.stop()
    connection = listening(cloud)
    airflow.connect("penstock_cloud", connection)
    rates = {"t4": {"1": 1.0}, "a10g": {"1": 2.0}}
    dag = "example_penstock_burst"
    run = airflow.trigger(
        dag,
        connection="penstock_cloud",
        folder=str(folder),
        train=trainer(cloud, 8.0, rates),
        spec={"runtime_s": 60, "goodput_table": rates},
        options={"partition": "t4"},
    )
    airflow.wait(dag, run, timeout_s=600)
    job = airflow.xcom(dag, run, "train")
    assert hypervisor.booted or hypervisor.console(), "it ran on site"
    assert 0 < airflow.xcom(dag, run, "bill") == job["cost_usd"] < 5
    assert list(job["gpu_hours"]) == ["a10g"]
    assert 8 / 3600 < job["gpu_hours"]["a10g"] < 0.25
    assert len(ec2.instances()) == 1
    assert [each.state for each in cloud.gateway.jobs(finished=True)] == ["COMPLETED"]  # this Slurm has no accounting


class Gate:
    """The gate that jobs and tasks of tests/airflow_provider/dags/faults.py wait for."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gate"
        self.conf = {"gate": str(self.file), "folder": str(folder), "marker": str(folder / "marker")}

    def open(self, status: int = 0) -> None:
        """Let the jobs end with this exit status."""
        beside = self.file.with_suffix(".tmp")
        beside.write_text(str(status))
        beside.replace(self.file)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def running(airflow: Deployment, site: Site, dag: str, run: str, number: int = 1) -> None:
    """Wait until the task's newest job, of `number`, runs."""
    wait_for(
        lambda: len(states := ended(site, dag, run, "job")) == number and "RUNNING" in states,
        240,
        f"job {number} of {run} to run",
        poll_s=1.0,
        details=lambda: f"{ended(site, dag, run, 'job')} {airflow.story(dag, run)}",
    )


def wait_ended(airflow: Deployment, site: Site, dag: str, run: str, *states: str, timeout_s: float = 120) -> None:
    """Wait until Slurm's accounting has these states for the jobs of the task, and no other jobs."""
    wait_for(
        lambda: ended(site, dag, run, "job") == sorted(states),
        timeout_s,
        f"the jobs of {run} to have ended as {states}",
        poll_s=1.0,
        details=lambda: f"{ended(site, dag, run, 'job')} {airflow.story(dag, run)}",
    )


@pytest.mark.long
def test_a_worker_killed_right_after_submission_submits_once(airflow: Deployment, site: Site, gate: Gate) -> None:
    gate.open()
    run = airflow.trigger("faults_dying", **gate.conf)
    airflow.wait("faults_dying", run)
    assert airflow.task("faults_dying", run, "job")["try_number"] >= 2  # a busy machine may cost it another
    assert airflow.xcom("faults_dying", run, "job")["job_id"] == Path(gate.conf["marker"]).read_text()
    wait_ended(airflow, site, "faults_dying", run, "COMPLETED")


@pytest.mark.long
def test_a_task_that_waits_outlives_triggerer_penstockd_and_network(
    airflow: Deployment, site: Site, gate: Gate, line: Proxy
) -> None:
    run = airflow.trigger("faults", **gate.conf)
    airflow.wait_task("faults", run, "job", "deferred")
    running(airflow, site, "faults", run)
    airflow.kill("triggerer")
    airflow.start("triggerer")
    site.kill()
    site.start()
    line.cut()
    time.sleep(60)
    gate.open()  # the job ends while the line is cut
    wait_ended(airflow, site, "faults", run, "COMPLETED")
    assert airflow.task("faults", run, "job")["state"] == "deferred"
    line.fix()
    airflow.wait("faults", run)
    assert airflow.task("faults", run, "job")["try_number"] == 1
    wait_ended(airflow, site, "faults", run, "COMPLETED")


@pytest.mark.long
def test_a_task_submitted_while_the_network_is_cut_has_one_job_afterwards(
    airflow: Deployment, site: Site, gate: Gate, line: Proxy
) -> None:
    gate.open()
    line.cut()
    run = airflow.trigger("faults_patient", **gate.conf)
    airflow.wait_task("faults_patient", run, "job", "up_for_retry")
    assert ended(site, "faults_patient", run, "job") == []
    line.fix()
    airflow.wait("faults_patient", run)
    wait_ended(airflow, site, "faults_patient", run, "COMPLETED")


@pytest.mark.long
@pytest.mark.parametrize(("dag", "waits"), [("faults", "deferred"), ("faults_on_worker", "running")])
def test_a_task_that_is_marked_failed_cancels_its_job_and_a_cleared_one_has_another(
    airflow: Deployment, site: Site, gate: Gate, dag: str, waits: str
) -> None:
    run = airflow.trigger(dag, **gate.conf)
    airflow.wait_task(dag, run, "job", waits)
    running(airflow, site, dag, run)
    airflow.mark(dag, run, "job", "failed")
    wait_ended(airflow, site, dag, run, "CANCELLED")
    airflow.clear(dag, run, "job")
    running(airflow, site, dag, run, number=2)
    airflow.wait_task(dag, run, "job", waits)
    airflow.clear(dag, run, "job")  # while its job runs
    running(airflow, site, dag, run, number=3)
    wait_ended(airflow, site, dag, run, "CANCELLED", "CANCELLED", "RUNNING")
    gate.open()
    airflow.wait(dag, run)
    wait_ended(airflow, site, dag, run, "CANCELLED", "CANCELLED", "COMPLETED")


@pytest.mark.long
def test_the_job_of_a_task_that_was_marked_failed_while_nothing_could_be_told_ends_with_its_lease(
    airflow: Deployment, site: Site, gate: Gate
) -> None:
    run, other = (airflow.trigger("faults_leased", **gate.conf) for _ in range(2))
    for each in (run, other):
        airflow.wait_task("faults_leased", each, "job", "deferred")
        running(airflow, site, "faults_leased", each)
    airflow.kill("triggerer")
    airflow.mark("faults_leased", run, "job", "failed")
    airflow.start("triggerer")
    wait_ended(airflow, site, "faults_leased", run, "CANCELLED", timeout_s=400)
    running(airflow, site, "faults_leased", other)
    gate.open()
    airflow.wait("faults_leased", other)
    wait_ended(airflow, site, "faults_leased", other, "COMPLETED")


@pytest.mark.long
def test_execution_timeout_ends_the_job_of_a_task_that_waits(airflow: Deployment, site: Site, gate: Gate) -> None:
    run = airflow.trigger("faults_overdue", **gate.conf)
    airflow.wait("faults_overdue", run, "failed")
    wait_ended(airflow, site, "faults_overdue", run, "CANCELLED")
    assert "execution_timeout=0:00:40, and is cancelled" in airflow.log("faults_overdue", run, "job")


@pytest.mark.long
def test_a_job_that_an_admin_cancels_fails_its_task_although_it_has_retries(
    airflow: Deployment, site: Site, gate: Gate
) -> None:
    run = airflow.trigger("faults", **gate.conf)
    airflow.wait_task("faults", run, "job", "deferred")
    running(airflow, site, "faults", run)
    site.slurm.command("scancel", airflow.xcom("faults", run, "job", "job_id"))
    airflow.wait("faults", run, "failed")
    assert airflow.task("faults", run, "job")["try_number"] == 1
    wait_ended(airflow, site, "faults", run, "CANCELLED")


@pytest.mark.long
def test_plain_scripts_are_never_restarted(airflow: Deployment, site: Site, gate: Gate) -> None:
    """They save nothing, so that a restart, for example to measure them on another type of GPU, would lose their work."""
    run = airflow.trigger("plain_scripts", **gate.conf)
    wait_for(
        lambda: ended(site, "plain_scripts", run, "job") == ["RUNNING"] * 6,
        240,
        "all scripts to run",
        poll_s=1.0,
        details=lambda: airflow.story("plain_scripts", run),
    )
    time.sleep(100)  # measuring a job takes some 40 GPU-seconds
    assert [job.restarts for job in site.gateway.jobs() if f":{run}:" in job.comment] == [0] * 6
    gate.open()
    airflow.wait("plain_scripts", run)
    wait_ended(airflow, site, "plain_scripts", run, *["COMPLETED"] * 6)


@pytest.mark.long
def test_a_dag_run_that_failed_and_is_tried_again_has_a_job_for_each_try(
    airflow: Deployment, site: Site, gate: Gate
) -> None:
    gate.open(3)
    run = airflow.trigger("faults", **gate.conf)
    airflow.wait("faults", run, "failed")
    wait_ended(airflow, site, "faults", run, "FAILED", "FAILED")
    told = airflow.log("faults", run, "job", 2)
    assert "has ended as FAILED, exit code 3" in told
    assert f"waiting for {gate.file}" in told
    gate.open(0)
    airflow.clear("faults", run)
    airflow.wait("faults", run)
    wait_ended(airflow, site, "faults", run, "COMPLETED", "FAILED", "FAILED")


@pytest.mark.long
def test_what_penstockd_refuses_fails_at_once_in_its_own_words(airflow: Deployment, site: Site, gate: Gate) -> None:
    run = airflow.trigger("refused", **gate.conf)
    airflow.wait("refused", run, "failed")
    words = {
        "wrong_token": "the token is unknown or revoked",
        "unknown_type": "h900",
        "max_below_min": "max_gpus=2 is less than min_gpus=4",
        "more_than_there_are": "4000",
        "no_cloud": "this site has no cloud",
    }
    for task, sentence in words.items():
        found = airflow.task("refused", run, task)
        assert (found["state"], found["try_number"]) == ("failed", 1), airflow.story("refused", run)
        assert sentence in airflow.log("refused", run, task), airflow.log("refused", run, task)
        assert ended(site, "refused", run, task) == []


@pytest.mark.long
def test_a_task_runs_in_a_job_of_the_executor_and_outlives_the_scheduler(
    airflow: Deployment, site: Site, gate: Gate
) -> None:
    run = airflow.trigger("on_gpu", **gate.conf)
    airflow.wait_task("on_gpu", run, "where", "running")
    wait_for(
        lambda: "the task waits for the gate" in airflow.log("on_gpu", run, "where"),
        120,
        "the log of a task that runs in a job",
        poll_s=1.0,
        details=lambda: airflow.story("on_gpu", run),
    )
    job_id = airflow.task("on_gpu", run, "where")["id"]
    airflow.kill("scheduler")
    airflow.start("scheduler")
    time.sleep(30)  # longer than the new scheduler waits before the old one counts as dead
    gate.open()
    airflow.wait("on_gpu", run)
    assert airflow.task("on_gpu", run, "where")["id"] == job_id, "another try"
    where = airflow.xcom("on_gpu", run, "where")
    site.wait_states("COMPLETED", where["SLURM_JOB_ID"])
    assert len([job for job in site.gateway.jobs(finished=True) if "airflow:executor" in job.comment]) == 1
    # A user marks one as failed: Airflow ends the task, and so its job.
    gate.file.unlink()
    run = airflow.trigger("on_gpu", **gate.conf)
    airflow.wait_task("on_gpu", run, "where", "running")
    airflow.mark("on_gpu", run, "where", "failed")
    wait_for(
        lambda: not [job for job in site.gateway.jobs() if "airflow:executor" in job.comment],
        120,
        "the job of a task that was marked as failed to end",
        details=lambda: airflow.story("on_gpu", run),
    )
