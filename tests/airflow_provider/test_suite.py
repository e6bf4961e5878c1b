"""Runs the provider's own suite, airflow_provider/tests, with an interpreter that has Airflow, against a real penstockd.

penstockd listens on loopback over a loopback Slurm; afterwards Slurm's own records say which jobs there were.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock_loopback.fixtures import MakeLoopback
from tests.airflow_provider.conftest import CLUSTER, airflow_python, listening
from tests.airflow_provider.deployment import REPOSITORY
from tests.end_to_end.site import Site
from tests.scheduler.service.conftest import certificate

__all__ = ["certificate"]  # a fixture

pytestmark = pytest.mark.slurm


def command_line(folder: Path) -> Path:
    """The program `penstock` of this checkout, for an environment that has another PYTHONPATH."""
    program = folder / "penstock"
    path = shlex.quote(":".join(filter(None, sys.path)))
    code = "import sys; from penstock_scheduler.cli import main; sys.exit(main())"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    return program


OWN_AIRFLOW = bool(os.environ.get("PENSTOCK_AIRFLOW_PYTHON"))
"""Whether one Airflow was chosen; otherwise it is the newest, every dependency at its lower bound, and a release between them."""
OLDEST = ".venv-airflow-oldest"
BETWEEN = pytest.param(".venv-airflow-3.1.8", marks=pytest.mark.long)

SIMULATION = "tests/test_simulate.py::test_a_simulation_is_a_task_and_what_is_wrong_with_it_is_told_by_the_program"
"""It takes two minutes at load, in Penstock's simulator, and runs with one Airflow only."""


@pytest.mark.parametrize("folder", [".venv-airflow"] if OWN_AIRFLOW else [".venv-airflow", OLDEST, BETWEEN])
def test_the_providers_suite_passes_and_each_key_ran_once(
    make_loopback: MakeLoopback,
    tmp_path: Path,
    certificate: tuple[Path, Path],
    folder: str,
) -> None:
    if folder == OLDEST and sys.version_info >= (3, 13):
        pytest.skip("Airflow 2.11 is for Python up to 3.12")
    python = airflow_python(folder)
    left_out = [f"--deselect={SIMULATION}"] if folder != ".venv-airflow" else []
    # A Slurm of its own, because a job that another run left has the same key. By default, it forgets ended jobs after 5 minutes.
    site = Site(make_loopback(CLUSTER, settings={"MinJobAge": "7200"}), tmp_path)
    try:
        connection = listening(site, certificate)
        extra = connection["extra"]
        assert isinstance(extra, dict)
        nameless = {name: value for name, value in extra.items() if name != "deployment"}
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON"))}
        environment |= {
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(REPOSITORY / "airflow_provider/airflow_provider_penstock/example_dags"),
            "AIRFLOW_CONN_PENSTOCK_DEFAULT": json.dumps(connection),
            "AIRFLOW_CONN_PENSTOCK_WRONG": json.dumps(connection | {"password": "wrong"}),
            "AIRFLOW_CONN_PENSTOCK_NAMELESS": json.dumps(connection | {"extra": nameless}),
            "AIRFLOW_CONN_PENSTOCK_OTHER": json.dumps(
                connection | {"extra": extra | {"deployment": "other", "public_url": "https://penstock.example.org/"}}
            ),
            "AIRFLOW_CONN_PENSTOCK_STRANGER": json.dumps(connection | {"extra": {}}),
            "PENSTOCK_TEST_FOLDER": str(tmp_path),
            "PENSTOCK_TEST_PROGRAM": str(command_line(tmp_path)),
        }
        done = subprocess.run(
            # -P: the provider is the one that is installed, not the folder here.
            # A folder of its own: pytest closes the shared one to other users, which other tests need open.
            [python, "-P", "-m", "pytest", "-q", "--durations=12", f"--basetemp={tmp_path / 'pytest'}", *left_out],
            cwd=REPOSITORY / "airflow_provider",
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,  # a machine that is busy takes several times what a quiet one does
            check=False,
        )
        print(done.stdout[-3000:])
        assert done.returncode == 0, f"{done.stdout[-12000:]}\n{done.stderr[-3000:]}\n{site.tail()}"
        comments = [job.comment for job in site.gateway.jobs(finished=True)]
        keys = Counter(json.loads(comment)["penstock_key"] for comment in comments if "penstock_key" in comment)
        assert any(":killed:" in key for key in keys)
        assert set(keys.values()) == {1}, keys
    finally:
        site.stop()
