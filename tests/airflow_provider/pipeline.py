"""The example pipeline in a running Airflow, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

from penstock_loopback import wait_for
from tests.airflow_provider.deployment import Deployment
from tests.airflow_provider.jobs import plain, trainer, wait_ended
from tests.end_to_end.site import RATES, Site


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
    wait_ended(airflow, site, dag, run, *["COMPLETED"] * len(rates), task="train")
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
