"""The example DAGs, and what can go wrong, in a running Airflow against a real penstockd and Slurm; checked in Slurm's own accounting."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_slurm.loopback import wait_for
from tests.airflow_provider.conftest import accounted_site, airflow_python, listening
from tests.airflow_provider.deployment import Deployment
from tests.airflow_provider.proxy import Proxy
from tests.end_to_end.site import RATES, UNFORESEEN, Site

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
    """Between Airflow's connection `penstock_line` and penstockd."""
    with Proxy(int(str(connection["port"]))) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def airflow(folder: Path, connection: dict[str, object], line: Proxy) -> Iterator[Deployment]:
    connections = {
        "penstock_default": connection,
        "penstock_wrong": connection | {"password": "wrong"},
        "penstock_line": connection | {"port": line.port, "extra": {"tls": False, "timeout_s": 5}},
    }
    with Deployment(airflow_python(), folder / "airflow", connections, sorted(OWN.glob("*.py"))) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_left(site: Site) -> Iterator[None]:
    yield
    site.slurm.reset()


def trainer(site: Site, work_s: float) -> str:
    """The command of an emulated trainer, in a job that inherits nothing of ours."""
    return f"env PYTHONPATH={os.environ.get('PYTHONPATH', '')} {site.trainer(work_s).removeprefix('exec ')}"


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
        wish={"goodput_table": {name: RATES[name] for name in ("t4", "a100")}},
        learning_rates=rates,
        python=airflow.python,
    )

    def started() -> list[str]:
        ids = [airflow.xcom(dag, run, "train", "job_id", index) for index in range(len(rates))]
        return [each for each in ids if each is not None and site.starts(each)]

    wait_for(lambda: len(started()) >= 2, 240, "two trials to run", poll_s=1.0, details=lambda: airflow.story(dag, run))
    airflow.wait_task(dag, run, "train", "deferred", map_index=0)
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
    assert sum(each["restarts"] for each in summaries) >= 1, "nobody was resized"
    assert any(len(set(site.starts(job))) > 1 for job in jobs)
    for job in jobs:
        site.assert_progress_kept(job, lost=work_s / 4)
    assert ended(site, dag, run, "train") == ["COMPLETED"] * len(rates)
    links = airflow.links(dag, run, "train", 0)
    assert links["Penstock job"].endswith(f"/v1/jobs/{jobs[0]}/page")
    # The jobs are called train-...: each of them is an event of the asset, and a run answers one or several.
    asset = "example_penstock_asset"
    wait_for(lambda: len(airflow.runs(asset)) > asset_runs, 60, "the asset's DAG to run", details=airflow.tail)
    newest = airflow.runs(asset)[-1]
    airflow.wait(asset, newest, timeout_s=180)
    assert "evaluate what job" in airflow.log(asset, newest, "evaluate")


def ended(site: Site, dag: str, run: str, task: str) -> list[str]:
    """The states in which Slurm's accounting has the jobs that ran for a task, however often it was tried or cleared."""
    said = site.slurm.command("sacct", "--allusers", "--noheader", "--parsable2", "-X", "--format=JobID,State,Comment%2000")
    states = []
    for each in said.stdout.splitlines():
        _, state, comment = each.split("|", 2)
        if f"airflow:{dag}:{run}:{task}:" in comment:
            states.append(state.split()[0])
    return sorted(states)
