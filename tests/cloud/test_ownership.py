"""What a site touches is its own, and it forgets nothing that costs money."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock_cloud.doctor import policy
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.model import BurstJob, Phase, Progress
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.cloud.conftest import SITE
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite

OTHER = "5e1f0000-0000-4000-8000-000000000002"


def run_a_job(site: CloudSite, job: str = "7") -> None:
    site.submit(job)
    site.send(job)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    site.ticks(2)


def tags_of(instance: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}


@pytest.fixture
def other(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2, site: CloudSite, tmp_path: Path
) -> Iterator[CloudSite]:
    """A second site in the same account, with the same name."""
    store = open_store(tmp_path / "other", writer=True)
    yield CloudSite(cloud_settings(site=OTHER, share=tmp_path / "other-share"), store, ec2, ec2.through)
    store.close()


def test_two_sites_of_one_name_in_one_account_leave_each_other_alone(
    site: CloudSite, other: CloudSite, ec2: Ec2
) -> None:
    run_a_job(site)
    run_a_job(other)
    site.crash()
    other.crash()
    other.ticks(5)
    site.ticks(5)
    assert {tags_of(each)["penstock:site"] for each in ec2.instances("running")} == {SITE, OTHER}
    assert [run.job for run in site.state.runs] == [run.job for run in other.state.runs] == ["7"]
    other.finish("7")
    other.until(lambda: not other.state.runs)
    assert [tags_of(each)["penstock:site"] for each in ec2.instances("running")] == [SITE]
    assert not [line for line in site.store.cloud_ledger() if line.kind == "usd"], "and pays for nothing of the other's"


@pytest.fixture
def copy(
    cloud_settings: Callable[..., CloudSettings], ec2: Ec2, site: CloudSite, tmp_path: Path
) -> Iterator[CloudSite]:
    """Another penstockd with a copy of the settings file, a store of its own, and another cluster behind it."""
    store = open_store(tmp_path / "copy", writer=True)
    yield CloudSite(cloud_settings(share=tmp_path / "copy-share"), store, ec2, ec2.through)
    store.close()


def test_a_copy_of_the_settings_ends_and_charges_nothing_that_another_store_launched(
    site: CloudSite, copy: CloudSite, ec2: Ec2
) -> None:
    run_a_job(site)
    (theirs,) = ec2.running()
    copy.ticks(5)
    assert ec2.running() == [theirs]
    assert f"{theirs}: launched under this site's identity by another penstockd" in " ".join(copy.state.closed)
    run_a_job(copy)  # of the same id
    assert len(ec2.running()) == 2
    copy.finish("7")
    copy.until(lambda: not copy.state.runs)
    assert ec2.running() == [theirs]
    assert {line.text for line in copy.store.cloud_ledger() if theirs in line.text} == set()
    site.ticks(5)
    assert [run.job for run in site.state.runs] == ["7"]
    site.finish("7")
    site.until(lambda: not site.state.runs)
    spent, owed = site.bill()
    assert spent + copy.bill()[0] == pytest.approx(owed, abs=1e-9)


def test_an_instance_of_a_lost_store_is_told_and_ended_once_it_is_adopted(
    site: CloudSite, ec2: Ec2, tmp_path: Path
) -> None:
    """The store is gone, and so is the job."""
    run_a_job(site)
    (left,) = ec2.running()
    owner = tags_of(ec2.instances("running")[0])["penstock:owner"]
    del site.jobs["7"]
    site.on.clear()
    site.store.close()
    site.store = open_store(tmp_path / "new", writer=True)
    try:
        site.crash()
        site.ticks(5)
        assert ec2.running() == [left]
        assert f"penstock cloud adopt {owner}" in " ".join(site.state.closed)
        ec2.direct().create_tags(Resources=[left], Tags=[{"Key": "penstock:owner", "Value": "adopted"}])
        site.until(lambda: not ec2.running())
        site.until(lambda: bool([line for line in site.store.cloud_ledger() if left in line.text]))
        assert not site.state.closed
    finally:
        site.store.close()


def test_a_site_must_say_who_it_is(cloud_settings: Callable[..., CloudSettings]) -> None:
    whole = cloud_settings().model_dump()
    with pytest.raises(ValidationError, match=r'Add site = "[0-9a-f-]{36}"'):
        CloudSettings.model_validate({key: value for key, value in whole.items() if key != "site"})
    with pytest.raises(ValidationError, match="name"):
        CloudSettings.model_validate({key: value for key, value in whole.items() if key != "name"})


def test_the_policy_of_aws_allows_to_end_only_what_is_this_sites(
    cloud_settings: Callable[..., CloudSettings],
) -> None:
    rights = {each["Sid"]: each for each in policy(cloud_settings())["Statement"]}
    assert rights["EndOnlyOurs"]["Condition"] == {"StringEquals": {"aws:ResourceTag/penstock:site": SITE}}
    assert rights["LaunchOnlyWithOurTag"]["Condition"] == {"StringEquals": {"aws:RequestTag/penstock:site": SITE}}


def test_a_run_ends_in_its_own_region_after_the_settings_have_changed(site: CloudSite, ec2: Ec2) -> None:
    run_a_job(site)
    site.settings = site.settings.model_copy(update={"region": "eu-west-1"})
    site.client_of("eu-west-1")
    site.crash()
    site.ticks(5)
    assert [run.job for run in site.state.runs] == ["7"], "it goes on, and its commitment stays"
    assert len(ec2.running()) == 1
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not ec2.running()
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_an_instance_that_is_taken_in_a_region_of_earlier_settings_ends_its_run(site: CloudSite, ec2: Ec2) -> None:
    run_a_job(site)
    site.settings = site.settings.model_copy(update={"region": "eu-west-1"})
    site.client_of("eu-west-1")
    site.crash()
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.tick()
    site.until(lambda: not site.state.runs)
    assert site.jobs["7"].phase is Phase.QUEUED
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_an_instance_that_has_lost_its_tag_is_known_and_ended_by_its_id(site: CloudSite, ec2: Ec2) -> None:
    run_a_job(site)
    ec2.direct().delete_tags(Resources=ec2.running(), Tags=[{"Key": "penstock:site"}])
    site.ticks(8)
    assert [run.job for run in site.state.runs] == ["7"]
    assert site.jobs["7"].phase is Phase.RUNNING
    assert "have lost the tag penstock:site" in " ".join(site.state.closed)
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not ec2.running()
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_what_cannot_be_ended_stays_a_run_and_nothing_more_is_launched(site: CloudSite, ec2: Ec2) -> None:
    """Its cost is charged to its real end, nine hours later, beyond the commitment."""
    run_a_job(site)
    site.submit("8")
    site.tick(BurstJob("8", 2, "g4dn.xlarge", 5.0))  # ordered, but not launched before the refusal
    ec2.faults += [
        Fault("CreateFleet", "error", "RequestLimitExceeded"),
        Fault("TerminateInstances", "error", "UnauthorizedOperation", times=1000, words="explicit deny"),
    ]
    site.finish("7")
    site.ticks(2)
    assert "explicit deny" in str(site.store.control(PROTECTED))
    site.submit("9")
    site.tick(BurstJob("9", 3, "g5.xlarge", 5.0))
    assert [(each.progress, "protected mode" in each.text) for each in site.outcomes] == [(Progress.FAILED, True)]
    site.sleep(9 * 3600)
    site.ticks(10)
    assert len(ec2.running()) == 1
    assert site.state.offers == ()
    assert "go on costing money" in " ".join(site.state.closed)
    assert "go on costing money" in site.state.protected
    assert "7" in [run.job for run in site.state.runs], "it is not forgotten"
    ec2.faults.clear()
    site.until(lambda: not site.state.runs)
    assert not ec2.running()
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_what_an_earlier_job_of_the_same_id_has_left_is_not_taken_for_this_ones(
    site: CloudSite, ec2: Ec2, tmp_path: Path
) -> None:
    """After Slurm was set up anew, job ids begin at 1 again: each run still has an id that no other ever had."""
    run_a_job(site)
    first = site.run_of("7")
    new: SqlStore = open_store(tmp_path / "new", writer=True)
    try:
        site.store, site.jobs, site.on = new, {}, {}
        site.crash()
        site.ticks(5)
        run_a_job(site)
        assert site.run_of("7") != first
        assert {tags_of(each)["penstock:run"] for each in ec2.instances("running")} == {first, site.run_of("7")}
        site.finish("7")
        site.until(lambda: not site.state.runs)
        assert [tags_of(each)["penstock:run"] for each in ec2.instances("running")] == [first]
    finally:
        new.close()


def test_a_shared_folder_that_everybody_can_write_is_told(site: CloudSite) -> None:
    """False notices and requests in it could end runs."""
    notices = site.settings.share / "notices"
    notices.mkdir(parents=True)
    assert site.tick().troubles == ()
    notices.chmod(0o777)
    site.sleep(120)
    (told,) = site.tick().troubles
    assert f"everybody can write {notices}" in told
    assert "chmod o-w" in told
    notices.chmod(0o755)
    site.sleep(120)
    assert site.tick().troubles == ()


def test_a_shared_folder_of_a_stranger_is_told_and_one_of_slurms_user_is_not(
    site: CloudSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may write whatever the mode says."""
    notices = site.settings.share / "notices"
    notices.mkdir(parents=True)
    assert site.tick().troubles == ()
    owner = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    if os.geteuid() == 0:
        os.chown(notices, owner.pw_uid, -1)
    else:
        monkeypatch.setattr("penstock_scheduler.burst.manager.share.os.geteuid", lambda: owner.pw_uid + 1)
    site.sleep(120)
    (told,) = site.tick().troubles
    assert f"{notices} belongs to {owner.pw_name}, who could end runs" in told
    assert "chown root" in told
    site.settings = site.settings.model_copy(update={"share_users": ("no-such-user", owner.pw_name)})
    site.crash()
    assert site.tick().troubles == ()
