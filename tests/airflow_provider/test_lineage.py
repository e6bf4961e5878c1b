"""OpenLineage for real: the events that Airflow's provider writes to a file for tasks with jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_provider.conftest import airflow_python
from tests.airflow_provider.deployment import REPOSITORY

sys.path.append(str(REPOSITORY / "airflow_provider/tests"))

from fake import Fake, connection, serve  # a penstockd without Slurm, of the provider's own tests

pytestmark = pytest.mark.long

DAG = """
from airflow.providers.common.compat.sdk import DAG, Asset
from airflow_provider_penstock.operators.penstock import PenstockSubmitOperator, PenstockWaitOperator

common = {"penstock_conn_id": "penstock_fake"}

with DAG("lineage", schedule=None) as dag:
    PenstockSubmitOperator(
        task_id="trains", command=["true"], inlets=[Asset("file:///data/in")], outlets=[Asset("file:///data/model")], **common
    ) >> [
        PenstockWaitOperator(task_id="waits", job_id="1", **common),
        PenstockSubmitOperator(task_id="fails", command=["false"], deferrable=False, **common),
    ]

if __name__ == "__main__":
    from airflow.utils.db import initdb

    initdb()
    print(dag.test().state)
"""


def end_jobs(fake: Fake, stop: threading.Event) -> None:
    while not stop.wait(0.5):
        for job in fake.open():
            fake.end(job, *(("FAILED", 3) if fake.jobs[job]["name"].endswith("fails") else ()))


def test_openlineage_has_the_job_of_each_task_and_the_job_its_run(tmp_path: Path) -> None:
    python, events = airflow_python(), tmp_path / "events"
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags/lineage.py").write_text(DAG)
    fake, stop = Fake(), threading.Event()
    server = serve(fake)
    threading.Thread(target=end_jobs, args=(fake, stop), daemon=True).start()
    environment = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__OPENLINEAGE__NAMESPACE": "tests",
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "file", "log_file_path": str(events), "append": True}),
        "AIRFLOW_CONN_PENSTOCK_FAKE": connection(server),
    }
    try:
        words = [python, "-P", str(tmp_path / "dags/lineage.py")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
    told = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "failed" in done.stdout.splitlines(), told
    of: dict[tuple[str, str], dict[str, Any]] = {}
    for event in map(json.loads, events.read_text().splitlines()):
        of[event["job"]["name"].removeprefix("lineage."), event["eventType"]] = event
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for task, end, job in (("trains", "COMPLETE", "1"), ("waits", "COMPLETE", "1"), ("fails", "FAIL", "2")):
        facet = of[task, end]["run"]["facets"]["externalQuery"]
        assert (facet["externalQueryId"], facet["source"]) == (job, url)
        assert of[task, "START"]["run"]["runId"] == of[task, end]["run"]["runId"]
    trained, failed = of["trains", "COMPLETE"], of["fails", "FAIL"]
    assert [each["name"] for each in (*trained["inputs"], *trained["outputs"])] == ["/data/in", "/data/model"]
    assert "job 2 has ended as FAILED, exit code 3" in failed["run"]["facets"]["errorMessage"]["message"]
    for task, event, job in (("trains", trained, "1"), ("fails", failed, "2")):
        environment = fake.bodies[job]["environment"]
        root = event["run"]["facets"]["parent"]["root"]["run"]["runId"]
        assert environment["OPENLINEAGE_PARENT_ID"] == f"tests/lineage.{task}/{event['run']['runId']}"
        assert environment["OPENLINEAGE_ROOT_PARENT_ID"] == f"tests/lineage/{root}"
