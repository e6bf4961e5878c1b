"""The example of another cloud: OpenStack by Libcloud. test_providers.py has the contract of all providers, for it as well."""

from __future__ import annotations

import base64
import gzip

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.provider import Kind, LaunchFailed, Order
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.openstack_cloud import OpenStackCloud
from tests.cloud.other_cloud import OtherSite
from tests.cloud.test_providers import order


def test_a_job_lives_on_openstack(openstack: OpenStackCloud, plain: CloudSettings, store: SqlStore) -> None:
    site = OtherSite(plain, store, openstack.provider(SITE))
    site.submit("7", max_gpus=2)
    site.send("7", "2x g5.xlarge", usd=3.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    first, second = openstack.nova.servers.values()
    assert {first["metadata"]["node"], second["metadata"]["node"]} == {first["name"], second["name"]}
    for each in (first, second):
        life = int(float(each["metadata"]["lifetime_s"]))
        script = base64.b64decode(each["user_data"]).decode()
        assert (
            script == f"#!/bin/sh\nshutdown -P +$(({each['metadata']['lifetime_s']} / 60))\nslurmd -N {each['name']}\n"
        )
        assert life > 0
    site.crash()
    site.ticks(2)
    assert site.jobs["7"].phase is Phase.RUNNING
    site.finish("7")
    site.until(lambda: not site.state.runs)
    assert openstack.nova.servers == {}
    assert site.spent_usd() == pytest.approx(2 * 60 / 3600, abs=1e-6), "a minute at least"


def test_a_run_without_a_network_to_the_site_has_its_guest(openstack: OpenStackCloud) -> None:
    guest = gzip.compress(b"#!/bin/sh\n")
    asked = order("7.1-x", "a")
    openstack.provider(SITE).launch_gang(
        Order(asked.run, asked.token, "g5.xlarge", "on-demand", ("a",), asked.tags, 1.0, guest=guest)
    )
    (server,) = openstack.nova.servers.values()
    assert base64.b64decode(server["user_data"]) == guest


HTTP = [
    (401, {"error": {"message": "no"}}, Kind.CONFIG, "401"),
    (
        403,
        {"forbidden": {"code": 403, "message": "Quota exceeded for cores: Requested 16, but already used"}},
        Kind.QUOTA,
        "cores",
    ),
    (403, {"forbidden": {"code": 403, "message": "Policy doesn't allow this"}}, Kind.CONFIG, "Policy"),
    (429, {"overLimit": {"code": 429, "message": "This request was rate-limited."}}, Kind.THROTTLED, "429"),
    (400, {"badRequest": {"code": 400, "message": "Invalid imageRef provided."}}, Kind.CONFIG, "imageRef"),
    (409, {"conflictingRequest": {"code": 409, "message": "Multiple possible networks"}}, Kind.UNKNOWN, "networks"),
    (503, {"after": {"code": 503, "message": "The server is currently unavailable."}}, Kind.LOST, "503"),
    (502, {"after": "a proxy's page"}, Kind.LOST, "a server for a"),
]


@pytest.mark.parametrize(("status", "body", "kind", "words"), HTTP, ids=[f"{each[0]}-{each[2].name}" for each in HTTP])
def test_openstacks_refusals_are_told_in_the_words_of_the_contract(
    openstack: OpenStackCloud, status: int, body: dict[str, object], kind: Kind, words: str
) -> None:
    place = openstack.provider(SITE)
    openstack.nova.faults["POST"] = status, body
    with pytest.raises(LaunchFailed) as refused:
        place.launch_gang(order("7.1-x", "a"))
    assert refused.value.kind is kind
    assert words in str(refused.value)
    lost = kind is Kind.LOST
    assert len(openstack.nova.servers) == lost, "a lost answer's server is found by its tags"
    assert [each.tags["node"] for each in place.list("7.1-x") if not each.gone] == ["a"] * lost


def test_a_lost_answer_launches_nothing_twice(openstack: OpenStackCloud) -> None:
    place = openstack.provider(SITE)
    openstack.nova.faults["POST"] = 503, {"after": {"code": 503, "message": "unavailable"}}
    with pytest.raises(LaunchFailed):
        place.launch_gang(order("7.1-x", "a", "b"))
    assert len(openstack.nova.servers) == 1
    assert set(place.launch_gang(order("7.1-x", "a", "b"))) == {"a", "b"}
    assert len(openstack.nova.servers) == 2


def test_a_server_that_has_stopped_itself_is_ended(openstack: OpenStackCloud) -> None:
    place = openstack.provider(SITE)
    (id_,) = place.launch_gang(order("7.1-x", "a")).values()
    openstack.nova.servers[id_]["status"] = "SHUTOFF"
    place.list()
    assert openstack.nova.servers == {}
    (seen,) = place.list()
    assert seen.gone


def test_a_part_of_the_cloud_that_does_not_answer_ends_no_run(openstack: OpenStackCloud) -> None:
    """Nova leaves the servers of such a part out of its lists."""
    place = openstack.provider(SITE)
    (id_,) = place.launch_gang(order("7.1-x", "a")).values()
    place.list()
    openstack.nova.missing.add(id_)
    with pytest.raises(LaunchFailed) as refused:
        place.list()
    assert refused.value.kind is Kind.LOST
    openstack.nova.missing.clear()
    (seen,) = place.list()
    assert not seen.gone


def test_a_server_of_another_is_never_ended(openstack: OpenStackCloud) -> None:
    place = openstack.provider(SITE)
    (id_,) = place.launch_gang(order("7.1-x", "a")).values()
    openstack.nova.servers[id_]["metadata"] = {"owner": "somebody else"}
    place.terminate([id_])
    assert list(openstack.nova.servers) == [id_]


def test_what_the_settings_lack_is_said(openstack: OpenStackCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    place = openstack.provider(SITE)
    text = openstack.settings.read_text()
    monkeypatch.delenv("OS_PASSWORD")
    with pytest.raises(LaunchFailed, match="environment has no OS_PASSWORD"):
        place.list()
    openstack.settings.write_text(text.replace("memory =", "memories ="))
    monkeypatch.setenv("OS_PASSWORD", "right")
    with pytest.raises(LaunchFailed, match=r"openstack.toml lacks 'memory'"):
        place.list()
    openstack.settings.write_text(text.replace("memory =", "memory"))
    with pytest.raises(LaunchFailed, match=r"openstack.toml: .*line"):
        place.list()
    monkeypatch.setenv("OS_PASSWORD", "wrong")
    openstack.settings.write_text(text)
    with pytest.raises(LaunchFailed, match="refuses the credentials"):
        place.list()
