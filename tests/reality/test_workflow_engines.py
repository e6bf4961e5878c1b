"""Jobs as Snakemake's and Nextflow's Slurm executors submit them: accepted when adaptive, left alone when plain.

The options are those of get_submit_command and set_gres_string in snakemake-executor-plugin-slurm and of getDirectives in
Nextflow's SlurmExecutor.groovy; the questions about states are those of query_job_status_squeue (job_status_query.py) and
queueStatusCommand there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.model import parse_spec
from tests.reality.cluster import TWO_TYPES
from tests.reality.differential import Differential, running

pytestmark = pytest.mark.slurm

SNAKEMAKE = (
    "--job-name 6ba7b810-9dad-11d1-80b4-00c04fd430c8 --export=ALL --comment rule_train_wildcards_a -p gpu -t 60 "
    "--mem 1000 --ntasks-per-gpu=1 --cpus-per-gpu=2 --gpus=1"
)
"""A rule with gpu=1, cpus_per_gpu=2, mem_mb=1000, runtime=60."""

NEXTFLOW = ("-J nf-train_(1)", "--no-requeue", "--signal B:USR2@30", "-c 2", "-t 01:00:00", "--mem 1000M", "-p gpu")
"""#SBATCH lines of a process with cpus, time, memory and queue; clusterOptions come last."""

FAILED_FOR_SNAKEMAKE = {
    "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "ERROR"
}  # fmt: skip
KNOWN_TO_NEXTFLOW = {"PD": "waits", "CF": "waits", "R": "runs", "CG": "runs", "CD": "done"}
"""What Nextflow takes for a job that has not failed."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Differential]:
    with running(tmp_path_factory.mktemp("engines"), TWO_TYPES) as differential:
        differential.site.start()
        yield differential
        differential.clean()


def snakemake(site: Differential, extra: str = "") -> str:
    """The job's id, as the plugin reads it from standard output."""
    options = f"--parsable --output /dev/null {SNAKEMAKE} {extra}".split()
    return site.command("sbatch", *options, "--wrap=sleep 600").strip().split(";")[0]


def nextflow(site: Differential, folder: Path, *cluster_options: str) -> tuple[str, str]:
    """The job's id, as Nextflow reads it from the output, and sbatch's messages if it was refused."""
    lines = [f"#SBATCH {text}" for text in ("-o /dev/null", *NEXTFLOW, *cluster_options)]
    (folder / ".command.run").write_text("\n".join(["#!/bin/bash", *lines, "sleep 600", ""]))
    done = site.cluster.command("sbatch", f"{folder}/.command.run", check=False)
    found = re.search(r"Submitted batch job (\d+)", done.stdout + done.stderr)
    return (found[1] if found else "", done.stderr)


def is_adaptive(site: Differential, job: str) -> bool:
    return parse_spec(site.site.job(job).admin_comment) is not None


def test_a_plain_job_is_left_alone(site: Differential, tmp_path: Path) -> None:
    jobs = [snakemake(site), nextflow(site, tmp_path, "--gres=gpu:1")[0]]
    site.site.wait_states("RUNNING", *jobs)
    assert [is_adaptive(site, job) for job in jobs] == [False, False]
    site.clean()


def test_nextflows_job_is_adaptive_with_requeue_in_its_cluster_options(site: Differential, tmp_path: Path) -> None:
    refused, why = nextflow(site, tmp_path, "--gres=gpu:1 --adaptive --non-preemptible")
    assert (refused, "--no-requeue cannot be used with --adaptive" in why) == ("", True), why
    job, why = nextflow(site, tmp_path, "--gres=gpu:1 --adaptive --non-preemptible --requeue")
    assert job, why
    assert is_adaptive(site, job)
    site.site.wait_states("RUNNING", job)
    site.clean()


def test_snakemakes_job_that_is_moved_never_looks_failed(site: Differential) -> None:
    job = snakemake(site, "--adaptive --checkpointable")
    assert is_adaptive(site, job)
    site.site.wait_states("RUNNING", job)
    (first,) = site.site.job(job).nodes
    site.command("scontrol", "update", f"NodeName={first}", "State=DRAIN", "Reason=test")
    seen, codes = set[str](), set[str]()

    def moved() -> bool:
        name = SNAKEMAKE.split()[1]
        lines = site.command("squeue", "--format=%i|%T", "--states=all", "--noheader", "--name", name).split()
        seen.update(state for each, _, state in (line.partition("|") for line in lines) if each == job)
        lines = site.command("squeue", "--noheader", "-o", "%i %t", "-t", "all", "-p", "gpu").splitlines()
        codes.update(code for each, code in (line.split() for line in lines) if each == job)
        record = site.site.job(job)
        return record.state == "RUNNING" and record.nodes not in ((), (first,))

    wait_for(moved, 120, "the job to run on the other node", details=site.site.tail)
    site.command("scontrol", "update", f"NodeName={first}", "State=RESUME")
    assert len(seen) > 1, "the move was seen"
    assert seen & FAILED_FOR_SNAKEMAKE == set()
    assert codes - set(KNOWN_TO_NEXTFLOW) == set()
    site.clean()
