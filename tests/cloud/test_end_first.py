"""Instances are ended by the ids that the record has, whatever else the cloud refuses, slows down or does not answer."""

from __future__ import annotations

import pytest

from penstock_scheduler.burst.manager.instances import UNENDED_S
from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite


@pytest.fixture
def running(site: CloudSite) -> CloudSite:
    """Job 7 runs in the cloud."""
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.ticks(2)
    return site


@pytest.mark.parametrize(
    ("kind", "code"), [("error", "UnauthorizedOperation"), ("error", "RequestLimitExceeded"), ("lost-before", "")]
)
def test_an_instance_ends_with_its_job_while_instances_cannot_be_listed(
    running: CloudSite, ec2: Ec2, kind: str, code: str
) -> None:
    ec2.faults.append(Fault("DescribeInstances", kind, code, times=10**6))
    for _ in range(31):
        running.sleep(60)
        running.ticks(2)
    running.finish("7")
    running.until(lambda: not ec2.running(), most=5)
    running.ticks(20)
    assert [run.state for run in running.state.runs] == ["ending"], "nobody has said that it is gone"
    ends = [asked for action, asked in ec2.calls if action == "TerminateInstances"]
    assert len(ends) == 1, "it is not asked again and again"
    ec2.faults.clear()
    running.until(lambda: not running.state.runs)
    spent, owed = running.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_an_instance_that_outlives_its_job_is_told(running: CloudSite, ec2: Ec2) -> None:
    """Also where nothing is refused: TerminateInstances is answered, and the instance goes on."""
    (id_,) = ec2.running()
    ec2.faults.append(Fault("TerminateInstances", "lost-before", times=10**6))
    running.finish("7")
    running.ticks(5)
    assert running.state.troubles == ()
    running.sleep(UNENDED_S)
    running.ticks(5)
    (told,) = running.state.troubles
    assert f"{id_} of job 7 should have ended at " in told
    running.sleep(3600)
    running.ticks(2)
    assert running.state.troubles == (told,), "a new text would be a new mail"
    ec2.faults.clear()
    running.sleep(60)
    running.until(lambda: not running.state.runs)
    assert running.tick().troubles == ()


def test_many_runs_end_in_few_calls(site: CloudSite, ec2: Ec2) -> None:
    for job in ("1", "2", "3", "4"):
        site.submit(job)
        site.send(job, "g5.xlarge" if job < "3" else "g4dn.xlarge")
    site.until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()))
    site.ticks(2)
    ec2.calls.clear()
    for job in [*site.jobs]:
        site.finish(job)
    site.until(lambda: not site.state.runs)
    assert not ec2.running()
    assert [action for action, _ in ec2.calls].count("TerminateInstances") == 1


def test_an_id_that_the_cloud_does_not_know_prevents_no_other_end(site: CloudSite, ec2: Ec2) -> None:
    """EC2 ends none of the instances of a call with an unknown id."""
    for job in ("1", "2"):
        site.submit(job)
        site.send(job)
    site.until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()))
    site.ticks(2)
    ec2.direct().terminate_instances(InstanceIds=ec2.running()[:1])
    ec2.forget()
    for job in [*site.jobs]:
        site.finish(job)
    site.until(lambda: not ec2.running(), most=10)
