"""The provider's wheel alone beside Airflow, without the extras that its tests install and without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.airflow_provider.deployment import REPOSITORY

pytestmark = pytest.mark.long

LOOK = """
import json
from pathlib import Path
import airflow_provider_penstock
from airflow.providers_manager import ProvidersManager
try:
    from airflow.dag_processing.dagbag import DagBag
except ImportError:
    from airflow.models.dagbag import DagBag
from airflow.plugins_manager import get_plugin_info

provider = ProvidersManager().providers["airflow-provider-penstock"]
bag = DagBag(str(Path(airflow_provider_penstock.__file__).parent / "example_dags"))
print(json.dumps({
    "version": provider.version,
    "hook": ProvidersManager().hooks["penstock"].hook_name,
    "plugins": [each["name"] for each in get_plugin_info()],
    "dags": sorted(bag.dags),
    "errors": list(bag.import_errors.values()),
}))
"""


def test_the_wheel_beside_airflow_alone_is_discovered_and_its_examples_are_read(tmp_path: Path) -> None:
    def run(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    # With the settings of pip and the network, and without those of Airflow and Python.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON"))}
    environment |= {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", f"--wheel-dir={tmp_path}", REPOSITORY / "airflow_provider")
    (wheel,) = tmp_path.glob("airflow_provider_penstock-*.whl")
    run(python, "-m", "pip", "install", "-q", wheel)
    run(python, "-m", "pip", "check")
    found = json.loads(run(python, "-P", "-c", LOOK).splitlines()[-1])
    assert found["version"] == wheel.name.split("-")[1]
    assert (found["hook"], found["errors"]) == ("Penstock", [])
    assert "penstock" in found["plugins"]
    assert len(found["dags"]) == len([*(REPOSITORY / "airflow_provider").rglob("example_dags/example_*.py")])
    assert "penstock" in run(tmp_path / "venv/bin/airflow", "providers", "list")
