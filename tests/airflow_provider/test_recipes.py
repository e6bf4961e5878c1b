"""What the documentation shows, in a running Airflow with the provider's wheel, against a real penstockd and a real Slurm.

The connection is in Airflow's database, the real dag-processor reads recipes and examples, and each component is killed once.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from tests.airflow_provider.conftest import OWN, airflow_python
from tests.airflow_provider.deployment import EXAMPLES, POLL_S, REPOSITORY, Deployment
from tests.airflow_provider.jobs import wait_ended
from tests.airflow_provider.pipeline import pipeline
from tests.end_to_end.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_left")]

RECIPES = REPOSITORY / "airflow_provider/tests/system/penstock"
TRAINER = """import pathlib, sys, time
print("waiting for the gate", flush=True)
while not pathlib.Path(sys.path[0], "gate").exists():
    time.sleep(0.3)
print("trained", flush=True)
"""


def recipes(folder: Path) -> list[str]:
    """The recipes of the how-to page, with scripts and outputs in `folder`. They are not started before a test does it."""
    found = [path.read_text(encoding="utf-8") for path in sorted(RECIPES.glob("*.py"))]
    defaults = f'is_paused_upon_creation=True, default_args={{"output_file": "{folder}/%j.out"}}'
    changed = {
        '"/tmp/': f'"{folder}/',
        '"prepare.py"': '"--version"',
        '"train.py"': f'"{folder}/train.py"',
        'python="python3"': f'python="{airflow_python()}"',
    }
    for number, text in enumerate(found):
        for old, new in changed.items():
            text = text.replace(old, new)
        found[number] = re.sub(r'\bDAG\("([a-z_]+)"', rf'DAG("\1", {defaults}', text)
    return found


def dag_ids(text: str) -> list[str]:
    return re.findall(r'\bDAG\(\s*"([a-z_]+)"', text)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Path:
    shared = folder / "shared"
    shared.mkdir()
    (shared / "train.py").write_text(TRAINER)
    return shared


@pytest.fixture(scope="module")
def dag_files(folder: Path, shared: Path) -> list[Path]:
    files = []
    for number, text in enumerate(recipes(shared)):
        files.append(folder / f"recipe_{number}.py")
        files[-1].write_text(text)
    return [*files, *OWN.glob("*.py")]


def test_the_dag_processor_reads_every_recipe_and_every_example(airflow: Deployment, dag_files: list[Path]) -> None:
    """A DAG that the dag-processor cannot send to its parent process disappears without an import error."""
    wanted = {dag for file in (*dag_files, *EXAMPLES.glob("example_*.py")) for dag in dag_ids(file.read_text())}
    assert len(wanted) > len(dag_files)
    missing = wanted

    def all_read() -> bool:
        nonlocal missing
        assert airflow.ask("GET", "/importErrors")["import_errors"] == []
        missing = wanted - {each["dag_id"] for each in airflow.ask("GET", "/dags", params={"limit": 100})["dags"]}
        return not missing

    wait_for(all_read, 180, "all DAGs", poll_s=POLL_S, details=lambda: f"{missing} {airflow.tail()}")


@pytest.mark.long
def test_five_recipes_run_and_outlive_a_kill_of_every_component(airflow: Deployment, site: Site, shared: Path) -> None:
    dags = ["how_to_submit", "how_to_results", "how_to_depend", "how_to_function", "how_to_forecast"]
    runs = {}
    for dag in dags:
        airflow.wait_dag(dag)
        airflow.ask("PATCH", f"/dags/{dag}", json={"is_paused": False})
        runs[dag] = airflow.trigger(dag)
    waiting = [("how_to_submit", "train"), ("how_to_results", "train"), ("how_to_depend", "second")]
    for dag, task in waiting:
        airflow.wait_task(dag, runs[dag], task, "deferred")
    for dag in ("how_to_function", "how_to_forecast"):
        airflow.wait(dag, runs[dag])
    for name in ("triggerer", "scheduler", "dag-processor", "api-server"):
        airflow.kill(name)
        airflow.start(name)
    site.kill()
    site.start()
    (shared / "gate").touch()
    wait_for(airflow.answers, 180, "Airflow's API to answer again", poll_s=POLL_S, details=airflow.tail)
    for dag, run in runs.items():
        airflow.wait(dag, run)
    for dag, task in waiting:
        assert airflow.task(dag, runs[dag], task)["try_number"] == 1
    for dag, task in (*waiting, ("how_to_depend", "first")):
        wait_ended(airflow, site, dag, runs[dag], "COMPLETED", task=task)
    wait_ended(airflow, site, "how_to_function", runs["how_to_function"], *["COMPLETED"] * 3, task="train")
    assert "trained" in airflow.log("how_to_submit", runs["how_to_submit"], "train").splitlines()
    job = airflow.xcom("how_to_results", runs["how_to_results"], "train", "job_id")
    assert airflow.xcom("how_to_results", runs["how_to_results"], "report").startswith(f"job {job}: COMPLETED")
    losses = [airflow.xcom("how_to_function", runs["how_to_function"], "train", map_index=index) for index in range(3)]
    assert [each["rate"] for each in losses] == [0.01, 0.1, 1.0]


def test_a_pipeline_trains_on_two_types_and_is_resized_and_what_it_trained_starts_another_dag(
    airflow: Deployment, site: Site, folder: Path
) -> None:
    pipeline(airflow, site, folder, [0.1, 1.0], work_s=500)
