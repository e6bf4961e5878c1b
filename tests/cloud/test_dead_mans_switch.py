"""The function that ends a site's instances by their tag, on moto, while penstockd is away."""

from __future__ import annotations

import importlib.util
import time
from types import ModuleType, SimpleNamespace

import pytest

from penstock_scheduler.model import Phase
from tests.cloud.conftest import SITE
from tests.cloud.faults import Ec2
from tests.cloud.site import CloudSite
from tests.end_to_end.pages import ROOT

LIFE_S = 1800.0
"""What a run of $0.503 pays for: g5.xlarge costs $1.006 an hour."""


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("SITE", SITE)
    monkeypatch.setenv("REGIONS", "us-east-1 eu-west-1")
    spec = importlib.util.spec_from_file_location("dead_mans_switch", ROOT / "deploy/dead_mans_switch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def later(switch: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(switch, "time", SimpleNamespace(time=lambda: time.time() + seconds))


def running(site: CloudSite, ec2: Ec2, job: str) -> str:
    """The instance of a job that runs."""
    before = {*ec2.running()}
    site.submit(job)
    site.send(job, usd=0.503)
    site.until(lambda: site.jobs[job].phase is Phase.RUNNING)
    (id_,) = {*ec2.running()} - before
    return id_


def launch(ec2: Ec2, region: str, **tags: str) -> str:
    client = ec2.direct_in(region)
    image = client.register_image(Name="node", RootDeviceName="/dev/xvda", Architecture="x86_64")["ImageId"]
    named = [{"Key": f"penstock:{key}", "Value": value} for key, value in tags.items()]
    specification = [{"ResourceType": "instance", "Tags": named}] if named else []
    made = client.run_instances(ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=specification)
    return str(made["Instances"][0]["InstanceId"])


def test_an_instance_ends_when_its_longest_life_and_the_grace_are_over(
    site: CloudSite, ec2: Ec2, switch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = running(site, ec2, "7")
    others = launch(ec2, "us-east-1", site="5e1f0000-0000-4000-8000-000000000002", lifetime_s="1")
    plain = launch(ec2, "us-east-1")
    there = launch(ec2, "eu-west-1", site=SITE, lifetime_s=f"{LIFE_S:.0f}")
    later(switch, monkeypatch, LIFE_S + 600 - 60)
    assert switch.handler({}, None) == []
    later(switch, monkeypatch, LIFE_S + 600 + 60)
    assert switch.handler({}, None) == [mine, there]
    assert {*ec2.running()} == {others, plain}
    assert switch.handler({}, None) == []
    site.until(lambda: not site.state.runs)  # penstockd is back
    assert site.jobs["7"].phase is Phase.QUEUED
    assert any(mine in line.text for line in site.store.cloud_ledger() if line.kind == "usd")


def test_instances_that_do_not_end_make_it_fail_after_the_others_have_ended(
    ec2: Ec2, switch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = launch(ec2, "us-east-1", site=SITE, lifetime_s="1")
    untold = launch(ec2, "us-east-1", site=SITE)
    ended = launch(ec2, "us-east-1", site=SITE, lifetime_s="1")
    there = launch(ec2, "eu-west-1", site=SITE, lifetime_s="1")
    ec2.direct().modify_instance_attribute(InstanceId=kept, DisableApiTermination={"Value": True})
    later(switch, monkeypatch, 3600)
    with pytest.raises(RuntimeError, match=f"{kept}: .*OperationNotPermitted.*{untold}: KeyError.*lifetime_s") as told:
        switch.handler({}, None)
    assert ended not in str(told.value)
    assert {*ec2.running()} == {kept, untold}
    assert there not in ec2.running()


def test_a_region_that_does_not_answer_does_not_hold_up_the_others(
    ec2: Ec2, switch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = launch(ec2, "eu-west-1", site=SITE, lifetime_s="1")
    ec2.silent.add("us-east-1")
    later(switch, monkeypatch, 3600)
    with pytest.raises(RuntimeError, match="us-east-1: "):
        switch.handler({}, None)
    assert there not in ec2.running()
