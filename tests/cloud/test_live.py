"""The commands that touch an account: `penstock cloud doctor --live` and `penstock cloud adopt`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock_cloud.cli import app
from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.live import GONE_S, check_live, cost
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2, Fault
from tests.cloud.site import CloudSite
from tests.cloud.test_ownership import OTHER, tags_of
from tests.cloud.test_slurm import toml


@pytest.fixture
def config(cloud_settings: Callable[..., CloudSettings], tmp_path: Path) -> Path:
    settings = cloud_settings(markets=("on-demand",))
    settings.share.mkdir()
    file = tmp_path / "penstock.toml"
    file.write_text(f'[daemon]\ncloud = "ec2"\nstate_dir = "{tmp_path}"\n{toml(settings)}')
    return file


def run(config: Path, *args: str, answer: str = "") -> Result:
    result: Result = CliRunner().invoke(app, [*args, "--config", str(config)], input=answer)
    return result


def test_nothing_is_launched_before_the_admin_has_seen_the_cost_and_agreed(config: Path, ec2: Ec2) -> None:
    told = run(config, "doctor", "--live", answer="n\n")
    assert told.exit_code == 0, told.output
    # Three of the cheapest, g4dn.xlarge at $0.526/h: for a minute, and for a quarter of an hour.
    assert "3 instances of each of g4dn.xlarge: about $0.026, and at most $0.39" in told.output
    assert "nothing was launched" in told.output
    assert not ec2.instances()


def test_an_account_that_does_what_penstockd_relies_on(config: Path, ec2: Ec2) -> None:
    told = run(config, "doctor", "--live", answer="y\n")
    assert told.exit_code == 0, told.output
    assert "ok   us-east-1: the same order again, 2 x g4dn.xlarge: the same instances" in told.output
    assert "ok   us-east-1: end 1 x g4dn.xlarge: all are gone" in told.output
    assert len(ec2.instances()) == 3
    assert not ec2.running()
    assert not ec2.groups


def test_nothing_is_launched_while_a_check_fails(config: Path, ec2: Ec2) -> None:
    ec2.faults.append(Fault("DescribeSecurityGroups", "error", "InvalidGroup.NotFound"))
    told = run(config, "doctor", "--live", "--yes")
    assert told.exit_code == 1
    assert "nothing is launched while a check fails" in told.output
    assert not ec2.instances()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault("CreateFleet", "error", "VcpuLimitExceeded"), "raise the quota"),
        (Fault("CreateFleet", "lost-after", times=2), "no answer"),
        (Fault("CreateTags", "error", "UnauthorizedOperation"), "penstock cloud policy"),
        (Fault("DescribeInstances", "error", "UnauthorizedOperation"), "penstock cloud policy"),
        (Fault("TerminateInstances", "error", "UnauthorizedOperation", times=2), ""),
    ],
    ids=["quota", "no answer", "names", "listing", "refused end"],
)
def test_whatever_fails_nothing_is_left_running(site: CloudSite, ec2: Ec2, fault: Fault, told: str) -> None:
    place = Region(ec2.through, site.settings, site.catalogue)
    machines = cost(place, time.time()).machines
    ec2.faults.append(fault)
    found = list(check_live(place, machines, time.time, lambda seconds: None))
    assert not ec2.running()
    assert any(told in f"{each.text} {each.remedy}" for each in found if not each.ok) or not told


def test_an_instance_that_cannot_be_ended_is_named(site: CloudSite, ec2: Ec2) -> None:
    place, ahead = Region(ec2.through, site.settings, site.catalogue), [0.0]
    ec2.faults.append(Fault("TerminateInstances", "error", "UnauthorizedOperation", times=1000, words="explicit deny"))

    def sleep(seconds: float) -> None:
        ahead[0] += GONE_S / 2

    found = list(check_live(place, cost(place, time.time()).machines, lambda: time.time() + ahead[0], sleep))
    bad = [each for each in found if not each.ok]
    assert [each.check for each in bad] == ["end 1 x g4dn.xlarge", "end 2 x g4dn.xlarge"]
    assert ec2.running()[0] in bad[0].text + bad[1].text
    assert "explicit deny" in bad[0].text
    assert "console" in bad[0].remedy


def running_job(site: CloudSite) -> str:
    site.submit("7")
    site.send("7")
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    return site.run_of("7")


def test_instances_of_an_earlier_identity_are_adopted_by_an_explicit_command(
    site: CloudSite, config: Path, cloud_settings: Callable[..., CloudSettings], ec2: Ec2
) -> None:
    """A job's own run goes on; what has no run here is ended and paid for; a stranger's is left alone."""
    ec2.direct().run_instances(ImageId=site.settings.image, MinCount=1, MaxCount=1)  # nobody's
    mine = running_job(site)
    old = {"Key": "penstock:site", "Value": OTHER}
    of_job = next(each["InstanceId"] for each in ec2.instances("running") if "Tags" in each)
    leaked = Region(ec2.through, cloud_settings(site=OTHER, image=site.settings.image))
    from tests.cloud.test_providers import order

    (orphan,) = leaked.launch_gang(order("3.1-x", "a10g-1", site=OTHER)).values()
    ec2.direct().create_tags(Resources=[of_job], Tags=[old])
    asked = run(config, "adopt", OTHER, answer="n\n")
    assert "nothing was adopted" in asked.output
    assert orphan in asked.output
    site.ticks(5)
    assert orphan in ec2.running(), "without the command it is another site's"
    told = run(config, "adopt", OTHER, "--yes")
    assert told.exit_code == 0, told.output
    assert {f"{of_job} is adopted", f"{orphan} is adopted"} <= set(told.output.splitlines())
    site.ticks(5)
    assert orphan not in ec2.running()
    assert site.jobs["7"].phase is Phase.RUNNING
    assert [run.job for run in site.state.runs] == ["7"]
    assert len(ec2.running()) == 2, "the job's, and nobody's"
    site.until(lambda: any(orphan in line.text for line in site.store.cloud_ledger()))
    assert {tags_of(each)["penstock:run"] for each in ec2.instances("running") if "Tags" in each} == {mine}


def test_adopting_needs_the_identity_of_another_site(config: Path, site: CloudSite) -> None:
    assert "no UUID" in str(run(config, "adopt", "physics").exception)
    assert "own identity" in str(run(config, "adopt", str(site.settings.site)).exception)
