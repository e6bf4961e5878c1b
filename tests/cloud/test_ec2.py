"""The cloud on moto's server, over HTTP by boto3: launches, tags, failures, ends and costs."""

from __future__ import annotations

import base64
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.failures import refusal
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.instances import PROTECTED
from penstock_scheduler.burst.manager.provider import Kind, Order
from penstock_scheduler.model import BurstJob, Phase, Progress
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.detached import DetachedSite
from tests.cloud.faults import PAGES, Ec2, Fault
from tests.cloud.site import CloudSite


def test_a_job_leaves_runs_and_is_paid_for_to_the_second(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7", usd=5.0)
    assert [(line.kind, line.amount) for line in site.store.cloud_ledger()] == [("committed", 5.0)], (
        "before the first call to EC2"
    )
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    (instance,) = ec2.instances()
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert tags["penstock:run"] == site.run_of("7")
    assert tags["penstock:node"] in ("a10g-0", "a10g-1")
    assert float(tags["penstock:lifetime_s"]) == pytest.approx(5.0 / 1.006 * 3600, abs=1)
    assert instance["InstanceType"] == "g5.xlarge"
    site.tick()
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert not ec2.running()
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert not any(action == "CreateTags" for action, _ in ec2.calls), "tags are there from launch"


def test_the_launch_template_is_safe_and_bears_the_user_data(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7")
    site.tick()
    client = ec2.direct()
    (found,) = client.describe_launch_template_versions(Versions=["$Latest"])["LaunchTemplateVersions"]
    data = found["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["InstanceMetadataTags"] == "enabled"
    assert all(each["Ebs"]["Encrypted"] for each in data["BlockDeviceMappings"])
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    script = base64.b64decode(data["UserData"]).decode()
    assert "slurmd -D -N" in script
    assert str(site.settings.share) in script


@pytest.mark.parametrize("kind", ["lost-before", "lost-after", *PAGES])
def test_a_lost_answer_launches_nothing_twice(site: CloudSite, ec2: Ec2, kind: str) -> None:
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", kind))
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert len(ec2.instances()) == 1
    assert ec2.double_launches == 0


@pytest.mark.parametrize("kind", PAGES)
def test_an_answer_that_is_not_ec2s_says_nothing_of_instances(site: CloudSite, ec2: Ec2, kind: str) -> None:
    """A job goes on while all listings are pages of a proxy, and ends its instance through them."""
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    ec2.faults += [Fault("DescribeInstances", kind, times=10**6), Fault("TerminateInstances", kind, times=2)]
    for _ in range(10):
        site.sleep(60)
        state = site.tick()
        assert site.jobs["7"].phase is Phase.RUNNING
        assert ec2.running()
    assert "bug" not in " ".join((*state.closed, *state.words.values()))
    site.finish("7")
    site.until(lambda: not ec2.running())
    ec2.faults.clear()
    site.until(lambda: not site.state.runs)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_no_capacity_rests_the_type_and_the_next_is_offered(site: CloudSite, ec2: Ec2) -> None:
    words = "We currently do not have sufficient g5.xlarge capacity in us-east-1a"
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "fleet", "InsufficientInstanceCapacity", words=words))
    site.send("7")
    site.until(lambda: not site.state.runs)
    state = site.tick()
    assert {offer.id.split("x ")[-1] for offer in state.offers} == {"g4dn.xlarge"}
    assert words in state.words["7"]
    assert any("g5.xlarge is paused" in text for text in state.closed)
    site.send("7", "g4dn.xlarge", 2.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert [each["InstanceType"] for each in ec2.instances()] == ["g4dn.xlarge"]
    site.sleep(601)
    assert {offer.id.split("x ")[-1] for offer in site.tick().offers} == {"g5.xlarge", "g4dn.xlarge"}, (
        "the pause is over"
    )


def test_a_quota_stops_the_family_for_long(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "error", "VcpuLimitExceeded"))
    site.send("7")
    site.until(lambda: not site.state.runs)
    site.sleep(1800)
    state = site.tick()
    assert {offer.id.split("x ")[-1] for offer in state.offers} == {"g4dn.xlarge"}
    assert "quota" in state.words["7"]


def test_nothing_is_offered_at_prices_that_are_too_old(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    state = CloudSite(cloud_settings(price_days=31.0), store, ec2, ec2.through).tick()
    assert state.offers == ()
    assert "prices of g5.xlarge, g4dn.xlarge are as of 2025-06-30" in " ".join(state.closed)
    assert state.troubles, "an admin is told"
    assert "penstock cloud refresh" in " ".join(state.closed)


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "RequestExpired", "ExpiredToken"])
def test_a_throttled_request_is_repeated_without_a_message(site: CloudSite, ec2: Ec2, code: str) -> None:
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "error", code, times=3))
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    assert not site.state.words
    assert sum(action == "CreateFleet" for action, _ in ec2.calls) == 4


def test_a_bad_configuration_stops_everything_until_an_admin_says_so(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    ec2.faults.append(
        Fault("CreateFleet", "error", "InvalidSubnetID.NotFound", words="The subnet ID 'subnet-1' does not exist")
    )
    site.send("7")
    site.until(lambda: not site.state.runs)
    assert site.tick().offers == ()
    site.crash()
    state = site.tick()
    assert state.offers == (), "a restart does not end it"
    assert "does not exist" in " ".join(state.closed)
    site.store.set_control(PROTECTED, None)
    assert site.tick().offers


def test_without_the_right_to_fleets_instances_are_run_one_by_one(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    ec2.faults += [
        Fault("CreateFleet", "error", "UnauthorizedOperation"),
        Fault("RunInstances", "error", "InsufficientInstanceCapacity"),
    ]
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    asked = [fields["SubnetId"] for action, fields in ec2.calls if action == "RunInstances"]
    assert asked == list(site.settings.subnets), "the second zone, since the first had no capacity"


def test_boots_that_fail_lead_to_protected_mode(site: CloudSite, ec2: Ec2) -> None:
    site.boots = False
    site.submit("7")
    for number in range(site.settings.protected_after):
        site.send("7")
        site.tick()
        site.sleep(site.settings.boot_timeout_s)
        site.until(lambda: not site.state.runs)
        site.tick()
        assert (site.store.control(PROTECTED) is not None) == (number == site.settings.protected_after - 1)
        site.sleep(3601)
        site.tick()
    assert not ec2.running()
    assert "did not join Slurm" in site.tick().words["7"]


def test_slurm_gives_nodes_up_that_have_not_booted_before_ec2_says_that_they_are_gone(
    site: CloudSite, ec2: Ec2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job leaves nodes that boot only with that: Slurm 22.05.8 starts one that is requeued there without GPUs."""
    given_up: list[str] = []
    monkeypatch.setattr(site, "power_down", given_up.extend)
    monkeypatch.setattr(site, "_queue", lambda job: None)
    site.boots = False
    site.submit("7")
    site.send("7")
    site.tick()
    site.sleep(site.settings.boot_timeout_s)
    ec2.faults += [Fault("DescribeInstances", "error", "RequestLimitExceeded", times=1000)]
    site.until(lambda: given_up)
    assert [run.state for run in site.state.runs] == ["ending"]


def test_a_job_that_slurm_does_not_start_is_no_failed_boot(site: CloudSite, ec2: Ec2) -> None:
    site.starts = False
    site.submit("7")
    site.send("7")
    site.sleep(site.settings.boot_timeout_s)
    site.until(lambda: not site.state.runs)
    state = site.tick()
    assert state.words["7"] == "Slurm did not start it: AssocGrpBilling"
    assert "g5.xlarge" in {offer.id for offer in state.offers}, "nothing is wrong with the type"
    assert not ec2.running()


def test_a_boot_costs_no_more_than_was_committed(site: CloudSite, ec2: Ec2) -> None:
    """5 cents at $1.006 an hour are 179 s, less than a boot may take."""
    site.boots = False
    site.submit("7")
    site.send("7", usd=0.05)
    site.sleep(180)
    site.until(lambda: not site.state.runs)
    state = site.tick()
    assert "spent before it ran" in state.words["7"]
    assert "g5.xlarge" in {offer.id for offer in state.offers}
    assert not ec2.running()


@pytest.mark.parametrize("fleets", [True, False])
def test_a_spot_instance_costs_no_more_than_was_offered(site: CloudSite, ec2: Ec2, fleets: bool) -> None:
    if not fleets:
        ec2.faults.append(Fault("CreateFleet", "error", "UnauthorizedOperation"))
    fleet = Region(ec2.through, site.settings)
    fleet.launch_gang(Order("7.1-x", "token", "g5.xlarge", "spot", ("a10g-0",), {}, 0.4))
    _, asked = ec2.calls[-1]
    limits = [value for key, value in asked.items() if key.endswith("MaxPrice")]
    assert limits == ["0.400000"] * (len(site.settings.subnets) if fleets else 1)


def test_an_instance_is_forgotten_only_when_ec2_says_that_it_is_gone(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7", usd=5.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    ec2.faults.append(Fault("DescribeInstances", "hide", times=1000))
    site.sleep(10 * 3600)
    site.ticks(20)
    assert [run.job for run in site.state.runs] == ["7"], "an empty answer does not say that the instance is gone"
    assert not [line for line in site.store.cloud_ledger() if line.kind == "usd"], "the commitment stays"
    assert not ec2.running(), "it was ended by its id"
    ec2.faults.clear()
    site.until(lambda: not site.state.runs)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


def test_an_instance_that_ec2_has_forgotten_is_paid_for_until_its_money_was_used_up(site: CloudSite, ec2: Ec2) -> None:
    """EC2 forgets an instance an hour after its end, and says so when it is asked for the id."""
    site.submit("7")
    site.send("7", usd=5.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    ec2.forget()
    site.sleep(10 * 3600)
    site.until(lambda: not site.state.runs)
    spent = [line.amount for line in site.store.cloud_ledger() if line.kind == "usd"]  # two lines at a month's end
    assert sum(spent) == pytest.approx(5.0)
    used = [line for line in site.store.ledger() if line.kind == "cloud-gpu-seconds"]
    assert {line.text for line in used} == {"a10g"}
    assert sum(line.amount for line in used) == pytest.approx(5.0 / 1.006 * 3600)


def test_a_job_that_comes_to_another_ones_instance_is_sent_back(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.ticks(2)
    assert not site.refused
    site.submit("stranger")
    site.on = dict.fromkeys(site.on, "stranger")
    site.tick()
    assert site.refused == ["stranger"]


def test_a_type_that_a_zone_does_not_offer_is_no_bad_configuration(site: CloudSite, ec2: Ec2) -> None:
    words = (
        "Your requested instance type (g5.xlarge) is not supported in your requested Availability Zone (us-east-1e)."
    )
    site.submit("7")
    ec2.faults.append(Fault("CreateFleet", "fleet", "InvalidFleetConfiguration", words=words))
    site.send("7")
    site.until(lambda: not site.state.runs)
    assert {offer.id.split("x ")[-1] for offer in site.tick().offers} == {"g4dn.xlarge"}
    assert refusal("InvalidFleetConfiguration", "The fleet request is malformed").kind is Kind.UNKNOWN


def test_data_that_goes_along_is_within_what_is_committed(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    """100 GB at $0.01 are $1 of the $5. $4 are left for the instance, and the ledger has both at the end."""
    site = CloudSite(cloud_settings(usd_per_gb=0.01), store, ec2, ec2.through)
    site.submit("7", data_size_bytes=100 * 10**9)
    site.send("7", usd=5.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    (instance,) = ec2.instances()
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert float(tags["penstock:lifetime_s"]) == pytest.approx(4.0 / 1.006 * 3600, abs=1)
    site.tick()
    site.finish("7")
    site.until(lambda: not site.state.runs)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed + 1.0, abs=1e-9)
    assert "and 100 GB of data for $1.00" in [line.text for line in site.store.cloud_ledger()][-1]


def test_an_order_counts_the_volume_and_the_address_of_its_instance(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    """200 GB at $0.73 a month of 730 h are $0.20 an hour, and the address $0.05: $1.256 an hour with the instance."""
    settings = cloud_settings(volume_usd_per_gb_month=0.73, ipv4_usd_per_h=0.05, markets=("on-demand", "spot"))
    site = CloudSite(settings, store, ec2, ec2.through)
    site.catalogue = lambda: DetachedSite.catalogue()
    site.crash()
    offers = {offer.id: offer.usd_per_h for offer in site.tick().offers}
    assert offers["g5.xlarge"] == pytest.approx(1.256)
    site.submit("7")
    site.send("7", "g5.xlarge spot", usd=0.65)
    asked = next(fields for action, fields in ec2.calls if action == "CreateFleet")
    limits = {value for key, value in asked.items() if key.endswith("MaxPrice")}
    assert limits == {"0.400000"}, "the address is no reason to pay more for the instance"
    (instance,) = ec2.instances()
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert float(tags["penstock:lifetime_s"]) == pytest.approx(3600, abs=1), "$0.65 an hour"
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.finish("7")
    site.until(lambda: not site.state.runs)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert spent > 0


def test_a_job_that_starts_on_a_node_ordered_for_another_is_sent_back(site: CloudSite, ec2: Ec2) -> None:
    site.boots = site.starts = False
    site.submit("7")
    site.send("7")
    (tags,) = [{tag["Key"]: tag["Value"] for tag in each["Tags"]} for each in ec2.instances()]
    node = tags["penstock:node"]
    site.submit("8")
    site.refused.clear()
    (site.settings.share / "resume").mkdir(parents=True)
    asked = {"jobs": {"8": [node], "7": [node]}, "nodes": [node], "time_s": 0.0}
    (site.settings.share / "resume" / "1.json").write_text(json.dumps(asked))
    site.tick()
    assert site.refused == ["8"]
    assert len(ec2.running()) == 1, "the job that it was ordered for keeps it"


def test_a_recalled_job_comes_back_and_its_instance_ends(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.tick()
    site.recall("7")
    site.until(lambda: not site.state.runs)
    assert site.jobs["7"].phase is Phase.QUEUED
    assert "7" in site.tick().returned
    assert not ec2.running()


def test_a_run_is_ended_before_it_costs_more_than_was_committed(site: CloudSite, ec2: Ec2) -> None:
    """$1.006 at $1.006 an hour is an hour; two minutes before its end the job is asked to leave."""
    site.submit("7")
    site.send("7", usd=1.006)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.sleep(3400)
    site.ticks(2)
    assert site.jobs["7"].phase is Phase.RUNNING
    site.sleep(90)
    site.until(lambda: not site.state.runs)
    assert site.jobs["7"].phase is Phase.QUEUED
    assert not ec2.running()


def run_until_taken_back(site: CloudSite, ec2: Ec2, job: str) -> None:
    """The job runs in the cloud; then EC2 ends its instance, and the run is over."""
    site.submit(job)
    site.send(job)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    site.tick()
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    site.until(lambda: not site.state.runs)


def test_an_instance_that_ec2_takes_back_ends_the_run_and_its_job_is_queued(site: CloudSite, ec2: Ec2) -> None:
    run_until_taken_back(site, ec2, "7")
    assert site.jobs["7"].phase is Phase.QUEUED
    assert "the cloud has taken" in site.tick().words["7"]


def test_a_run_that_is_over_is_not_ordered_again_by_the_round_that_ordered_it(site: CloudSite, ec2: Ec2) -> None:
    run_until_taken_back(site, ec2, "7")
    site.tick(BurstJob("7", site.round, "g5.xlarge", 5.0))
    assert "the next round decides again" in site.outcomes[0].text
    assert not site.tick().runs
    site.send("7")
    assert [run.job for run in site.tick().runs] == ["7"]


def test_an_order_that_the_ledger_has_no_money_for_any_more_is_refused(site: CloudSite) -> None:
    """$1000 in total, of which $600 are committed to one job. So a plan's $600 for another job are too much."""
    site.submit("7")
    site.submit("8")
    site.tick()
    site.tick(BurstJob("7", 1, "g5.xlarge", 600.0), BurstJob("8", 1, "g5.xlarge", 600.0))
    assert [outcome.progress for outcome in site.outcomes] == [Progress.UNDER_WAY, Progress.FAILED]
    assert "does not allow $600.00 any more" in site.outcomes[1].text


def test_a_notice_of_interruption_makes_the_job_save_and_leave(site: CloudSite, ec2: Ec2) -> None:
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.tick()
    assert site.jobs["7"].allocation is not None
    notice = site.settings.share / "notices" / site.jobs["7"].allocation.shares[0].node
    notice.parent.mkdir(parents=True)
    notice.write_text('{"action": "terminate", "time": "2026-11-21T16:00:00Z"}')
    site.until(lambda: not site.state.runs)
    assert site.jobs["7"].phase is Phase.QUEUED
    assert not notice.exists()


def test_instances_of_others_are_left_alone(site: CloudSite, ec2: Ec2) -> None:
    client = ec2.direct()
    other = {"ResourceType": "instance", "Tags": [{"Key": "penstock:cluster", "Value": "another"}]}
    client.run_instances(ImageId=site.settings.image, MinCount=1, MaxCount=1, TagSpecifications=[other])
    client.run_instances(ImageId=site.settings.image, MinCount=1, MaxCount=1)
    site.ticks(5)
    assert len(ec2.running()) == 2


def test_a_cloud_that_is_away_offers_nothing_and_fails_no_tick(site: CloudSite, ec2: Ec2) -> None:
    site.tick()
    ec2.faults.append(Fault("DescribeInstances", "lost-before", times=2))
    assert site.tick().offers == ()
    assert "does not list the instances" in " ".join(site.state.closed)
    site.tick()
    assert site.tick().offers


@pytest.mark.parametrize(("action", "started"), [("CreateFleet", False), ("DescribeInstances", True)])
def test_a_silent_ec2_is_asked_once_a_tick_however_many_runs_there_are(
    site: CloudSite, ec2: Ec2, action: str, started: bool
) -> None:
    for job in "789":
        site.submit(job)
    site.tick()
    orders = [
        BurstJob(job, 1, offer, 5.0) for job, offer in zip("789", ["g5.xlarge"] * 2 + ["g4dn.xlarge"], strict=True)
    ]
    site.tick(*orders)
    if started:
        site.until(lambda: all(job.phase is Phase.RUNNING for job in site.jobs.values()))
        site.tick()
        for job in "789":
            site.finish(job)
        site.tick()  # all are ending from now on
    ec2.faults.append(Fault(action, "lost-before", times=1000))
    for _ in range(5):
        site.sleep(40)
        asked = len(ec2.calls)
        site.tick()
        assert sum(each == action for each, _ in ec2.calls[asked:]) <= 1
    ec2.faults.clear()
    site.until(lambda: len(ec2.running()) == (0 if started else 3))


def test_trouble_with_the_share_stops_nothing(site: CloudSite, ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.settings.share / "suspend" / "1-1.json").mkdir(parents=True)  # cannot be read, nor deleted like a file
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    site.tick()

    def stale(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        for method in ("exists", "glob", "unlink", "mkdir"):
            patched.setattr(Path, method, lambda *_, **__: stale())
        site.ticks(2)
        assert site.away == ["7"]
        site.finish("7")
        site.until(lambda: not site.state.runs)
    assert not ec2.running()
