"""A running job that is stopped in the cloud has a reason that its owner can read; a job that ends by itself has none."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


def reasons(site: CloudSite, most: int = 60) -> set[str]:
    """Why the jobs of open runs were stopped, as rounds see it until all runs are over."""
    told: set[str] = set()

    def over() -> bool:
        told.update(run.stopped for run in site.state.runs)
        return not site.state.runs

    site.until(over, most)
    return told - {""}


@pytest.fixture
def running(site: CloudSite) -> CloudSite:
    """Job 7 runs in the cloud, for $1.006, which is an hour."""
    site.submit("7")
    site.send("7", usd=1.006)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.ticks(2)
    assert [run.stopped for run in site.state.runs] == [""]
    assert [run.user for run in site.state.runs] == ["ann"]
    return site


def test_money(running: CloudSite) -> None:
    running.sleep(3590)
    assert reasons(running) == {"the $1.01 committed to it are spent"}


def test_money_by_the_time_at_which_the_step_is_taken(running: CloudSite, ec2: Ec2) -> None:
    """The listing before it takes a minute, in which the time to leave comes."""
    running.sleep(3480 - 30 - (running.now_s() - ec2.instances()[0]["LaunchTime"].timestamp()))
    assert [run.state for run in running.tick().runs] == ["running"]
    ec2.slow = lambda action: running.sleep(60) if action == "DescribeInstances" else None
    running.sleep(5)
    assert [run.state for run in running.tick().runs] == ["leaving"]


def test_a_recall(running: CloudSite) -> None:
    running.recall("7")
    assert reasons(running) == {"it was recalled"}


def test_gpus_on_site_are_kept_for_three_minutes_from_the_moment_at_which_a_job_is_asked_to_leave(
    running: CloudSite, ec2: Ec2
) -> None:
    """EC2 does not say that the instance has ended, and idle GPUs are not kept for as long as that takes."""
    assert [run.kept_until_s for run in running.state.runs] == [0.0]
    ec2.faults.append(Fault("DescribeInstances", "error", "RequestLimitExceeded", times=100))
    begin_s = running.now_s()
    running.recall("7")
    kept = []
    for _ in range(6):
        running.sleep(60)
        kept += [run.kept_until_s for run in running.tick().runs if run.ending]
    assert len(kept) > 4
    assert max(kept) < begin_s + 360
    assert min(kept) >= begin_s + 180


def test_an_instance_that_is_taken(running: CloudSite, ec2: Ec2) -> None:
    (id_,) = ec2.running()
    ec2.direct().terminate_instances(InstanceIds=[id_])
    assert reasons(running) == {f"the cloud has taken instance {id_}"}


def test_a_job_that_ends_was_not_stopped(running: CloudSite) -> None:
    running.finish("7")
    assert reasons(running) == set()


def test_a_job_that_never_ran_was_not_stopped(site: CloudSite) -> None:
    site.boots = False
    site.submit("7")
    site.send("7")
    site.sleep(site.settings.boot_timeout_s)
    assert reasons(site) == set()
