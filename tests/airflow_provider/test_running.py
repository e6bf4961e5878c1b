"""The example DAGs and faults, in a running Airflow against a real penstockd. Slurm's accounting says which jobs really ran."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.access_messages import NewToken, TokenOrder
from penstock_scheduler.api.client import Client
from tests.airflow_provider.conftest import listening
from tests.airflow_provider.deployment import Deployment
from tests.airflow_provider.jobs import ended, running, trainer, wait_ended
from tests.airflow_provider.pipeline import pipeline
from tests.airflow_provider.proxy import Proxy
from tests.cloud.faults import Ec2
from tests.cloud.hypervisor import Hypervisor
from tests.end_to_end.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("nothing_left")]


def test_a_pipeline_over_twenty_learning_rates(airflow: Deployment, site: Site, folder: Path) -> None:
    pipeline(airflow, site, folder, [round(0.05 * number, 2) for number in range(1, 21)], work_s=150)


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


def test_a_worker_killed_right_after_submission_submits_once(airflow: Deployment, site: Site, gate: Gate) -> None:
    gate.open()
    run = airflow.trigger("faults_dying", **gate.conf)
    airflow.wait("faults_dying", run)
    assert airflow.task("faults_dying", run, "job")["try_number"] >= 2  # a busy machine may cost it another
    assert airflow.xcom("faults_dying", run, "job")["job_id"] == Path(gate.conf["marker"]).read_text()
    wait_ended(airflow, site, "faults_dying", run, "COMPLETED")


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


def test_a_penstockd_that_is_away_for_as_long_as_a_takeover_costs_no_try(
    airflow: Deployment, site: Site, gate: Gate
) -> None:
    """Once while the worker submits the job, and once while the worker takes its result."""
    site.kill()
    run = airflow.trigger("faults", **gate.conf)
    airflow.wait_task("faults", run, "job", "running")
    time.sleep(20)
    site.start()
    airflow.wait_task("faults", run, "job", "deferred")
    running(airflow, site, "faults", run)
    gate.open()
    wait_ended(airflow, site, "faults", run, "COMPLETED")
    site.kill()
    time.sleep(20)
    site.start()
    airflow.wait("faults", run)
    assert airflow.task("faults", run, "job")["try_number"] == 1
    wait_ended(airflow, site, "faults", run, "COMPLETED")


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


@pytest.mark.parametrize("component", ["triggerer", "scheduler"])
def test_the_job_of_a_task_that_was_marked_failed_while_the_triggerer_was_dead_ends_once_one_of_them_starts(
    airflow: Deployment, site: Site, gate: Gate, component: str
) -> None:
    """A worker looks for no such jobs: none has anything to do without a scheduler, which does it alone here."""
    run, other = (airflow.trigger("faults", **gate.conf) for _ in range(2))
    for each in (run, other):
        airflow.wait_task("faults", each, "job", "deferred")
        running(airflow, site, "faults", each)
    airflow.kill("triggerer")
    if component == "scheduler":
        airflow.kill("scheduler")
    airflow.mark("faults", run, "job", "failed")
    airflow.start(component)
    wait_ended(airflow, site, "faults", run, "CANCELLED", timeout_s=120)  # its lease is of three days
    running(airflow, site, "faults", other)
    if component == "scheduler":
        airflow.start("triggerer")
    gate.open()
    airflow.wait("faults", other)
    wait_ended(airflow, site, "faults", other, "COMPLETED")


@pytest.mark.parametrize("dag", ["faults_patient", "faults_on_worker_patient"])
def test_a_task_that_is_cleared_while_penstockd_is_away_never_has_two_jobs_at_once(
    airflow: Deployment, site: Site, gate: Gate, dag: str
) -> None:
    run = airflow.trigger(dag, **gate.conf)
    airflow.wait_task(dag, run, "job", "deferred", "running")
    running(airflow, site, dag, run)
    site.kill()
    airflow.clear(dag, run, "job")
    time.sleep(20)  # the triggerer's or worker's requests to cancel the job fail
    site.start()
    running(airflow, site, dag, run, number=2)
    assert ended(site, dag, run, "job") == ["CANCELLED", "RUNNING"]
    gate.open()
    airflow.wait(dag, run)
    wait_ended(airflow, site, dag, run, "CANCELLED", "COMPLETED")


def test_a_task_that_is_marked_failed_while_penstockd_is_away_loses_its_job_once_it_is_back(
    airflow: Deployment, site: Site, gate: Gate
) -> None:
    run = airflow.trigger("faults_patient", **gate.conf)
    airflow.wait_task("faults_patient", run, "job", "deferred")
    running(airflow, site, "faults_patient", run)
    site.kill()
    airflow.mark("faults_patient", run, "job", "failed")
    time.sleep(40)  # longer than Airflow waits for `on_kill` of a trigger
    site.start()
    wait_ended(airflow, site, "faults_patient", run, "CANCELLED")


def test_a_token_that_is_replaced_while_a_task_waits_costs_neither_a_try_nor_the_job(
    airflow: Deployment, site: Site, gate: Gate, connection: dict[str, object]
) -> None:
    def renewed() -> NewToken:
        with Client(f"unix:{site.state / 'api.sock'}") as admin:
            return admin.create_token(TokenOrder(user=admin.me().user))

    first = renewed()
    airflow.connect("penstock_rotated", connection | {"password": first.token})
    run = airflow.trigger("faults_rotated", **gate.conf)
    airflow.wait_task("faults_rotated", run, "job", "deferred")
    running(airflow, site, "faults_rotated", run)
    airflow.connect("penstock_rotated", connection | {"password": renewed().token})
    with Client(f"unix:{site.state / 'api.sock'}") as admin:
        admin.revoke_token(first.view.id)
    time.sleep(40)  # the triggerer asks every 30 s
    gate.open()
    airflow.wait("faults_rotated", run)
    assert airflow.task("faults_rotated", run, "job")["try_number"] == 1
    wait_ended(airflow, site, "faults_rotated", run, "COMPLETED")


def test_execution_timeout_ends_the_job_of_a_task_that_waits(airflow: Deployment, site: Site, gate: Gate) -> None:
    run = airflow.trigger("faults_overdue", **gate.conf)
    airflow.wait("faults_overdue", run, "failed")
    wait_ended(airflow, site, "faults_overdue", run, "CANCELLED")
    assert "execution_timeout=0:00:40, and is cancelled" in airflow.log("faults_overdue", run, "job")


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
    (job,) = [job.id for job in site.gateway.jobs() if "airflow:executor" in job.comment]
    links = {name: url.partition("/v1/")[2] for name, url in airflow.links("on_gpu", run, "where").items()}
    assert links == {"Penstock job": f"jobs/{job}/page", "Why it has these GPUs": f"jobs/{job}/page#explain"}
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
