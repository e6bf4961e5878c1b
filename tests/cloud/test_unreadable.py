"""A record of a run that cannot be read is an error for that run: the daemon, the other runs and the job go on."""

from __future__ import annotations

import dataclasses
import json

import pytest

from penstock_scheduler.model import BurstJob, Phase, Progress
from penstock_scheduler.people.errors import NoSuchRun
from tests.cloud.faults import Ec2
from tests.cloud.site import CloudSite


def lose_the_region(site: CloudSite, job: str) -> None:
    """Take the region out of the record of the job's newest run, as a record of an older version has none."""
    row = site.store.cloud_runs(job=job)[-1]
    record = json.loads(row.record)
    del record["region"]
    site.store.save_cloud_run(dataclasses.replace(row, record=json.dumps(record)))


@pytest.fixture
def damaged(site: CloudSite) -> CloudSite:
    """Jobs 7 and 8 run in the cloud. The record of 7 is damaged, and the daemon has started anew."""
    for job in "78":
        site.submit(job)
        site.send(job)
    site.until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()))
    site.ticks(2)
    lose_the_region(site, "7")
    site.crash()
    return site


def test_one_bad_record_stops_neither_the_daemon_nor_another_run_nor_its_own_job(damaged: CloudSite, ec2: Ec2) -> None:
    site = damaged
    site.ticks(5)
    assert {run.job: run.state for run in site.state.runs} == {"7": "unreadable", "8": "running"}
    assert [job.phase for job in site.jobs.values()] == [Phase.RUNNING] * 2
    assert len(ec2.running()) == 2, "the instance on which the job runs is left alone"
    (trouble,) = site.state.troubles
    assert site.run_of("7") in trouble
    assert "region: Field required" in trouble
    assert "penstock cloud forget" in trouble
    committed = next(line for line in site.store.cloud_ledger() if line.job == "7")
    assert (site.state.budgets[0].used_usd, committed.amount) == (10.0, 5.0), "both commitments stay"
    site.finish("8")
    site.until(lambda: site.away == ["7"])
    assert len(ec2.running()) == 1


def test_its_job_is_not_ordered_a_second_time(damaged: CloudSite) -> None:
    damaged.tick()
    damaged.tick(BurstJob("7", 9, "g4dn.xlarge", 1.0))
    (outcome,) = damaged.outcomes
    assert outcome.progress is Progress.FAILED
    assert "cannot be read" in outcome.text


def test_its_instance_ends_with_its_job_and_is_paid_for(damaged: CloudSite, ec2: Ec2) -> None:
    site = damaged
    site.finish("8")
    site.until(lambda: site.away == ["7"])
    site.finish("7")
    site.until(lambda: not ec2.running())
    site.ticks(3)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert [run.state for run in site.state.runs] == ["unreadable"], "an admin closes it"


def test_an_admin_closes_the_run_and_its_commitment_stays(damaged: CloudSite, ec2: Ec2) -> None:
    site, run = damaged, damaged.run_of("7")
    for job in "78":
        site.finish(job)
    site.until(lambda: not ec2.running())
    assert site.cloud.forget(run) == "7"
    with pytest.raises(NoSuchRun, match="is no open run with an unreadable record"):
        site.cloud.forget(run)
    for _ in range(2):
        site.submit("9")
        site.ticks(2)
        assert not site.state.troubles
        assert site.state.budgets[0].used_usd > 5.0
        site.crash()
