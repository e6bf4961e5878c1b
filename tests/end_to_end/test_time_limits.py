"""Time limits, MaxTime, DefaultTime and deadlines of jobs that Penstock moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]

BACKFILL = "batch_sched_delay=0,sched_min_interval=0,sched_interval=5,bf_interval=3,partition_job_depth=1"
"""With a plain job that waits in the partition, only Slurm's backfill scheduler starts others."""


def shown(site: Site, job: str) -> str:
    """The time limit that Slurm shows."""
    return site.slurm.command("squeue", "-h", "-O", "TimeLimit", "-j", job).stdout.strip()


def move(site: Site, job: str) -> None:
    """Drain the job's node, and wait until it runs elsewhere."""
    site.wait_states("RUNNING", job)
    wait_for(lambda: site.starts(job), 120, f"job {job} to begin", details=site.tail)
    runs = len(site.starts(job))
    (node,) = site.job(job).nodes
    site.slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    wait_for(lambda: len(site.starts(job)) > runs, 120, f"job {job} to move", details=site.tail)
    site.wait_states("RUNNING", job)
    assert node not in site.job(job).nodes


def test_a_job_without_a_limit_shows_none_after_backfill_has_started_it(
    make_loopback: MakeLoopback, make_site: MakeSite
) -> None:
    """In plain Slurm it shows 365-00:00:00."""
    site = make_site(make_loopback("t4:3x4", settings={"SchedulerParameters": BACKFILL}))
    plain = [site.sbatch("--gres=gpu:4", "--nodelist=t4-00", "--output=/dev/null", "--wrap=sleep 600") for _ in "12"]
    wait_for(lambda: sorted(site.states(*plain).values()) == ["PENDING", "RUNNING"], 120, "one to wait for the other")
    site.start()
    job = site.submit(10_000, max_gpus=1)
    site.wait_states("RUNNING", job)
    assert shown(site, job) == "UNLIMITED"
    move(site, job)
    assert shown(site, job) == "UNLIMITED"


def test_a_job_keeps_its_partitions_limit_and_goes_nowhere_where_that_is_too_long(
    make_loopback: MakeLoopback, make_site: MakeSite
) -> None:
    """T4s for 30 minutes, A100s for 5. A job without --time stays on the slower T4s, one with --time=4 gets an A100. A
    move adds a minute for what it costs, but nothing beyond MaxTime, with which Slurm would not start the job."""
    site = make_site(make_loopback("t4:2x4,a100:1x4"))
    site.partitions = ["t4", "a100"]
    site.slurm.command("scontrol", "update", "PartitionName=t4", "MaxTime=30", "DefaultTime=30")
    site.slurm.command("scontrol", "update", "PartitionName=a100", "MaxTime=5", "DefaultTime=5")
    site.start()
    long = site.submit(10_000, "--partition=t4", rates=RATES, max_gpus=1)
    short = site.submit(10_000, "--partition=t4", "--time=4", rates=RATES, max_gpus=1)
    site.wait_states("RUNNING", long, short)
    assert site.job(short).partition == ("a100",)
    assert shown(site, short) == "4:00", "not the default of its new partition"
    move(site, long)
    assert site.job(long).partition == ("t4",)
    assert shown(site, long) == "30:00"
    assert {gpu_type for gpu_type, _, _ in site.starts(long)} == {"t4"}


def test_a_deadline_holds_over_a_move(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    """Its limit and what the move adds would end after the deadline, for which Slurm ends the job at once."""
    site = make_site(make_loopback("t4:2x4"))
    site.start()
    job = site.submit(10_000, "--time=5", "--deadline=now+330", max_gpus=1)
    move(site, job)
    pause(8.0)  # Slurm looks at deadlines every few seconds
    now = site.job(job)
    assert now.state == "RUNNING"
    assert now.end_s is not None
    assert now.deadline_s is not None
    assert now.end_s <= now.deadline_s
