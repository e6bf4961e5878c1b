"""Runs the provider's own suite, airflow_provider/tests, with an interpreter that has Airflow, against a real penstockd.

penstockd listens on loopback over a loopback Slurm; afterwards Slurm's own records say which jobs there were.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from penstock_scheduler.client import Client
from penstock_scheduler.messages import TokenOrder
from penstock_slurm.loopback import LoopbackCluster
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).parents[2]


def airflow_python() -> str:
    """An interpreter with Airflow, or the test is skipped."""
    named = os.environ.get("PENSTOCK_AIRFLOW_PYTHON")
    made = REPOSITORY / ".venv-airflow/bin/python"
    if named or made.exists():
        return named or str(made)
    pytest.skip(
        "no Airflow: `script/test airflow` makes .venv-airflow, or PENSTOCK_AIRFLOW_PYTHON names an interpreter"
    )


def test_the_providers_suite_passes_and_each_key_ran_once(loopback: LoopbackCluster, tmp_path: Path) -> None:
    python = airflow_python()
    site = Site(loopback, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site.extra = f'[api]\nlisten = "127.0.0.1:{port}"\n'
    site.start()
    try:
        with Client(f"unix:{site.state / 'api.sock'}") as admin:
            token = admin.create_token(TokenOrder(user=admin.me().user)).token
        extra = {"tls": False}
        connection = {"conn_type": "penstock", "host": "127.0.0.1", "port": port, "password": token, "extra": extra}
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON"))}
        environment |= {
            "PYTHONPATH": str(REPOSITORY / "airflow_provider"),
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(REPOSITORY / "airflow_provider/airflow_provider_penstock/example_dags"),
            "AIRFLOW_CONN_PENSTOCK_DEFAULT": json.dumps(connection),
            "AIRFLOW_CONN_PENSTOCK_WRONG": json.dumps(connection | {"password": "wrong"}),
            "PENSTOCK_TEST_FOLDER": str(tmp_path),
        }
        done = subprocess.run(
            # A folder of its own: pytest closes the shared one to other users, which other tests need open.
            [python, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'pytest'}"],
            cwd=REPOSITORY / "airflow_provider",
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-12000:]}\n{done.stderr[-3000:]}\n{site.tail()}"
        comments = [job.comment for job in site.gateway.jobs(finished=True)]
        keys = Counter(json.loads(comment)["penstock_key"] for comment in comments if "penstock_key" in comment)
        assert any(":killed:" in key for key in keys)
        assert set(keys.values()) == {1}, keys
    finally:
        site.stop()
