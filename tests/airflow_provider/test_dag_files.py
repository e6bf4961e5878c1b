"""Every recipe of the how-to page and every example, read by a real dag-processor into Airflow's database."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from tests.airflow_provider.conftest import airflow_python
from tests.airflow_provider.deployment import EXAMPLES, REPOSITORY, Deployment

HOW_TO = REPOSITORY / "docs/user/airflow-how-to.md"
EXECUTORS = "LocalExecutor,PenstockExecutor:airflow_provider_penstock.executors.penstock.PenstockExecutor"
OWN = Path(__file__).parent / "dags"


def dag_ids(text: str) -> list[str]:
    return re.findall(r'\bDAG\(\s*"([a-z_]+)"', text)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A DAG file for each recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    found = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)
    files = [folder / f"recipe_{number}.py" for number in range(len(found))]
    for file, text in zip(files, found, strict=True):
        file.write_text(text)
    return files


def test_the_dag_processor_reads_every_recipe_and_every_example(recipes: list[Path], tmp_path: Path) -> None:
    """A DAG that the dag-processor cannot send to its parent process disappears without an import error."""
    files = [*recipes, *OWN.glob("*.py")]
    airflow = Deployment(airflow_python(), tmp_path / "airflow", {}, files, CORE__EXECUTOR=EXECUTORS)
    airflow.command("db", "migrate")
    told = airflow.command("dag-processor", "--num-runs", "1")
    wanted = {dag for file in (*files, *EXAMPLES.glob("example_*.py")) for dag in dag_ids(file.read_text())}
    assert len(wanted) > len(recipes)
    with sqlite3.connect(tmp_path / "airflow/airflow.db") as database:
        errors = database.execute("SELECT filename, stacktrace FROM import_error").fetchall()
        read = {row[0] for row in database.execute("SELECT dag_id FROM serialized_dag")}
    assert errors == []
    assert wanted - read == set(), told[-6000:]
