"""A running Airflow against penstockd's real service, whose jobs are made up: what needs no Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from tests.airflow_provider.conftest import airflow_python
from tests.airflow_provider.deployment import Deployment
from tests.scheduler.service.api import Api, serving
from tests.scheduler.service.test_submitting import end

pytestmark = pytest.mark.long

DAGS = Path(__file__).parent / "dags/made_up.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made-up")


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    with serving(folder) as api:
        yield api


@pytest.fixture(scope="module")
def airflow(folder: Path, api: Api) -> Iterator[Deployment]:
    connection = {
        "conn_type": "penstock",
        "host": "127.0.0.1",
        "port": int(api.url.rpartition(":")[2]),
        "password": api.tokens["me"],
        "extra": {"tls": False, "deployment": "tests"},
    }
    made = Deployment(airflow_python(), folder / "airflow", {"penstock_default": connection}, [DAGS])
    with made as airflow:
        yield airflow


def test_a_task_ends_in_the_triggerer_and_the_next_task_reads_its_result(
    airflow: Deployment, api: Api, folder: Path
) -> None:
    run = airflow.trigger("ends_in_the_triggerer")
    airflow.wait_task("ends_in_the_triggerer", run, "train", "deferred")
    job = airflow.xcom("ends_in_the_triggerer", run, "train", "job_id")
    (folder / f"{job}.out").write_text("the first line\nthe last line\n")
    end(api, job, "COMPLETED")
    airflow.wait("ends_in_the_triggerer", run)
    assert airflow.xcom("ends_in_the_triggerer", run, "after") == ["dict", "COMPLETED"]
    told = airflow.log("ends_in_the_triggerer", run, "train")
    assert told.count("the first line") == told.count("the last line") == 1


def test_a_dag_run_that_is_deleted_and_triggered_again_has_another_job(airflow: Deployment, api: Api) -> None:
    def job_of_a_new_run() -> str:
        known = set(api.submitter.jobs)
        airflow.ask("POST", "/dags/on_a_worker/dagRuns", json={"logical_date": None, "dag_run_id": "again"})

        def new() -> list[str]:
            return [job for job in set(api.submitter.jobs) - known if api.board.live_job(job) is not None]

        wait_for(new, 120, "a job", details=airflow.tail)
        (job,) = new()
        return job

    airflow.wait_dag("on_a_worker")
    first = job_of_a_new_run()
    end(api, first, "COMPLETED")
    airflow.wait("on_a_worker", "again")
    airflow.ask("DELETE", "/dags/on_a_worker/dagRuns/again")
    second = job_of_a_new_run()
    airflow.ask("PATCH", "/dags/on_a_worker/dagRuns/again", json={"state": "failed"})
    airflow.ask("DELETE", "/dags/on_a_worker/dagRuns/again")  # while its job has not ended
    third = job_of_a_new_run()
    assert second in api.submitter.cancelled
    assert api.submitter.jobs[third][1].dependency == f"afterany:{second}"
    end(api, second, "CANCELLED")
    end(api, third, "COMPLETED")
    airflow.wait("on_a_worker", "again")
    assert airflow.xcom("on_a_worker", "again", "train")["job_id"] == third
