"""The jobs of Airflow's tasks, as Slurm's records have them."""

from __future__ import annotations

import os

from penstock_loopback import wait_for
from tests.airflow_provider.deployment import Deployment
from tests.end_to_end.site import RATES, Site


def trainer(site: Site, work_s: float, rates: dict[str, dict[str, float]] = RATES) -> str:
    """The command of an emulated trainer, in a job that inherits nothing from the test."""
    return f"env PYTHONPATH={os.environ.get('PYTHONPATH', '')} {site.trainer(work_s, rates).removeprefix('exec ')}"


def plain(site: Site, node: str, gpus: int) -> str:
    """A job that holds GPUs."""
    return site.sbatch("-w", node, f"--gres=gpu:{gpus}", "--output=/dev/null", "--wrap=sleep 3600")


def ended(site: Site, dag: str, run: str, task: str) -> list[str]:
    """The states of all jobs of a task in Slurm's accounting, however often it was tried or cleared.

    The accounting has a job's comment, and so its key, once it has ended; until then slurmctld has it.
    """
    said = site.slurm.command(
        "sacct", "--allusers", "--noheader", "--parsable2", "-X", "--format=JobID,State,Comment%2000"
    )
    open_comments = {job.id: job.comment for job in site.gateway.jobs()}
    states = []
    for each in said.stdout.splitlines():
        job, state, comment = each.split("|", 2)
        if f":{dag}:{run}:{task}:" in (comment or open_comments.get(job, "")):
            states.append(state.split()[0])
    return sorted(states)


def running(airflow: Deployment, site: Site, dag: str, run: str, number: int = 1) -> None:
    """Wait until the task's newest job, of `number`, runs."""
    wait_for(
        lambda: len(states := ended(site, dag, run, "job")) == number and "RUNNING" in states,
        240,
        f"job {number} of {run} to run",
        poll_s=1.0,
        details=lambda: f"{ended(site, dag, run, 'job')} {airflow.story(dag, run)}",
    )


def wait_ended(
    airflow: Deployment, site: Site, dag: str, run: str, *states: str, task: str = "job", timeout_s: float = 120
) -> None:
    """Wait until Slurm's accounting has these states for the jobs of the task, and no other jobs."""
    wait_for(
        lambda: ended(site, dag, run, task) == sorted(states),
        timeout_s,
        f"the jobs of {run} to have ended as {states}",
        poll_s=1.0,
        details=lambda: f"{ended(site, dag, run, task)} {airflow.story(dag, run)}",
    )
