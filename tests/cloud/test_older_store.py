"""The store is restored from a backup. What was launched since then is neither lost nor taken from the job that runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_scheduler.model import BurstJob, Phase
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.store.backup import make_backup, restore_backup
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


class Backup:
    """A backup of the site's store. `restore` puts it back, and a new daemon starts."""

    def __init__(self, site: CloudSite, folder: Path) -> None:
        self._site, self._state, self._file = site, folder / "state", folder / "backup.db"
        make_backup(self._state, self._file)

    def restore(self) -> SqlStore:
        self._site.store.close()
        restore_backup(self._state, self._file, replace=True)
        self._site.store = open_store(self._state, writer=True)
        self._site.crash()
        return self._site.store


def run_in_cloud(site: CloudSite, *jobs: str) -> None:
    for job in jobs:
        site.submit(job)
        site.send(job)
    site.until(lambda: all(site.jobs[job].phase is Phase.RUNNING for job in jobs))
    site.ticks(2)


@pytest.fixture
def end_store(site: CloudSite):
    yield
    site.store.close()


pytestmark = pytest.mark.usefixtures("end_store")


def test_a_run_since_the_backup_goes_on_and_is_paid_for(site: CloudSite, ec2: Ec2, tmp_path: Path) -> None:
    """Job 7 was in the cloud at the backup and has ended since. Job 8 has the very same node now, and job 9 another one."""
    run_in_cloud(site, "7")
    backup = Backup(site, tmp_path)
    nodes = set(site.on)
    site.finish("7")
    site.until(lambda: not site.away)
    run_in_cloud(site, "8", "9")
    ran = {job: site.run_of(job) for job in "89"}
    assert nodes <= set(site.on), "the node is in use again"
    site.ended.clear()
    alive = set(ec2.running())
    backup.restore()
    site.ticks(5)
    assert {run.job: run.state for run in site.state.runs} == {"8": "running", "9": "running"}
    assert {job.id: job.phase for job in site.jobs.values()} == {"8": Phase.RUNNING, "9": Phase.RUNNING}
    assert set(ec2.running()) == alive
    assert not site.ended
    assert not site.refused
    assert {job: site.run_of(job) for job in "89"} == ran
    for job in "89":
        site.finish(job)
    site.until(lambda: not ec2.running() and not site.away)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-3)


@pytest.mark.parametrize("at", ["ordered", "booting", "running"])
def test_a_run_that_has_moved_on_since_the_backup(site: CloudSite, ec2: Ec2, tmp_path: Path, at: str) -> None:
    site.submit("7")
    site.tick()
    site.boots = at == "running"
    site.tick(BurstJob("7", 1, "g5.xlarge", 5.0))
    site.until(lambda: site.store.cloud_runs(job="7")[-1].state == at)
    backup = Backup(site, tmp_path)
    site.boots = True
    site.until(lambda: site.store.cloud_runs(job="7")[-1].state == "running")
    alive = ec2.running()
    site.ended.clear()
    backup.restore()
    site.ticks(5)
    assert [(run.job, run.state) for run in site.state.runs] == [("7", "running")]
    assert site.jobs["7"].phase is Phase.RUNNING
    assert ec2.running() == alive
    assert not site.ended


def test_a_job_that_has_come_back_to_the_site_since_is_left_alone(site: CloudSite, ec2: Ec2, tmp_path: Path) -> None:
    run_in_cloud(site, "7")
    backup = Backup(site, tmp_path)
    site.recall("7")
    site.until(lambda: not site.away)
    site.run_on_site("7")
    backup.restore()
    site.ticks(5)
    site.until(lambda: not site.away)
    assert site.jobs["7"].phase is Phase.RUNNING
    assert not ec2.running()


def test_an_instance_whose_job_has_ended_is_ended_and_paid_for(site: CloudSite, ec2: Ec2, tmp_path: Path) -> None:
    backup = Backup(site, tmp_path)
    run_in_cloud(site, "7")
    site.finish("7")
    backup.restore()
    site.ticks(5)
    site.until(lambda: not ec2.running())
    site.ticks(3)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert owed > 0


def test_nothing_is_done_until_the_cloud_has_answered(site: CloudSite, ec2: Ec2, tmp_path: Path) -> None:
    backup = Backup(site, tmp_path)
    run_in_cloud(site, "7")
    site.ended.clear()
    backup.restore()
    ec2.faults.append(Fault("DescribeInstances", "error", "UnauthorizedOperation", times=1000))
    for _ in range(5):
        with pytest.raises(ClusterAway, match=r"has not yet said which instances there are.*UnauthorizedOperation"):
            site.tick()
    assert not site.ended
    site.crash()
    with pytest.raises(ClusterAway):
        site.tick()
    ec2.faults.clear()
    site.ticks(5)
    assert [(run.job, run.state) for run in site.state.runs] == [("7", "running")]
    assert site.jobs["7"].phase is Phase.RUNNING
    assert not site.ended
    site.crash()
    site.ticks(3)
    assert not site.ended
