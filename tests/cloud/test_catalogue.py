from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from penstock_cloud.catalogue import Catalogue, Fetched, Fetcher, KeptCatalogue, fetch, gpu_type_of, load, save, shipped
from penstock_cloud.ec2 import Ec2 as Region
from penstock_cloud.ec2 import connect
from penstock_cloud.settings import CloudSettings
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.model import Phase
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.faults import KEYS, Ec2, Fault
from tests.cloud.other_cloud import OtherSite
from tests.cloud.site import CloudSite

TYPES = ("g5.xlarge", "g4dn.xlarge", "g6.xlarge", "g6f.large", "p3dn.24xlarge", "g9.none")
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_the_shipped_table_is_dated_and_whole() -> None:
    table = shipped()
    assert (table.region, table.at) == ("us-east-1", date(2025, 6, 30))
    assert table.types["g5.12xlarge"].gpus == 4
    assert table.types["p4d.24xlarge"].gpu_type == "a100"
    assert table.types["p4de.24xlarge"].gpu_type == "a100_80gb"
    assert all(known.usd_per_h for known in table.types.values())
    assert not any(known.spot_usd_per_h for known in table.types.values()), "a table has no spot prices"
    assert {known.gpu_type for known in table.types.values()} <= set(load_gpus())


def test_what_ec2_says_replaces_the_table(ec2: Ec2, tmp_path: Path) -> None:
    ec2.on_demand = {"g5.xlarge": 1.1, "g4dn.xlarge": 0.5}
    ec2.spot = {("g5.xlarge", "us-east-1a"): 0.4, ("g5.xlarge", "us-east-1b"): 0.3}
    session = boto3.session.Session(**KEYS)
    found = fetch(session, "us-east-1", TYPES, load_gpus(), now=NOW).catalogue
    assert found.usd_per_h("g5.xlarge", "on-demand", ()) == 1.1
    assert found.usd_per_h("g5.xlarge", "spot", ("us-east-1a", "us-east-1b")) == 0.4, (
        "the order may be served in the more expensive zone"
    )
    assert found.usd_per_h("g5.xlarge", "spot", ("us-east-1c",)) is None
    assert found.types["p3dn.24xlarge"].gpu_type == "v100_32gb"
    assert not any(name.startswith("g6f") for name in found.types), "a slice of a GPU is not a GPU"
    assert found.usd_per_h("g6.xlarge", "on-demand", ()) is None, "a price that EC2 does not report is unknown"
    kept = KeptCatalogue(tmp_path / "c.json", "us-east-1")
    assert kept.now() == shipped()
    save(found, tmp_path / "c.json")
    assert kept.now() == found


def test_a_refused_refresh_changes_neither_prices_nor_the_time_at_which_they_were_true(ec2: Ec2) -> None:
    session = boto3.session.Session(**KEYS)

    def refreshed(known: Catalogue | None, now: datetime, region: str = "us-east-1") -> Fetched:
        return fetch(session, region, TYPES, load_gpus(), now=now, known=known)

    first = refreshed(shipped(), NOW)
    assert first.catalogue.usd_per_h("g5.xlarge", "on-demand", ()) == 1.006
    assert first.catalogue.at == NOW.date()
    assert f"{first.catalogue.as_of('g5.xlarge', 'on-demand'):%Y-%m-%d}" == "2025-06-30"
    assert "on-demand prices of us-east-1 were refused: AccessDeniedException" in first.refused[0]
    elsewhere = refreshed(shipped(), NOW, "eu-west-1").catalogue
    assert elsewhere.usd_per_h("g5.xlarge", "on-demand", ()) is None, "prices of one region do not hold for another"
    ec2.on_demand = {"g5.xlarge": 1.1}
    second = refreshed(first.catalogue, NOW)
    assert (second.refused, second.catalogue.as_of("g5.xlarge", "on-demand")) == ((), NOW)
    ec2.on_demand = {}
    third = refreshed(second.catalogue, NOW + timedelta(days=40))
    assert third.catalogue.usd_per_h("g5.xlarge", "on-demand", ()) == 1.1, "not the table's"
    assert third.catalogue.as_of("g5.xlarge", "on-demand") == NOW


def test_a_site_whose_prices_are_too_old_fetches_new_ones_by_itself(
    ec2: Ec2, cloud_settings: Callable[..., CloudSettings], store: SqlStore, tmp_path: Path
) -> None:
    ec2.on_demand = {"g5.xlarge": 1.1}
    settings = cloud_settings(price_days=31.0)
    kept = KeptCatalogue(tmp_path / "c.json", "us-east-1", Fetcher(settings), 3600.0)
    client = ec2.through = ec2.through or connect(settings)
    state = OtherSite(settings, store, Region(client, settings, kept.now, kept)).tick()
    assert {(offer.id, offer.usd_per_h) for offer in state.offers if offer.nodes == 1} == {("g5.xlarge", 1.1)}
    assert not state.troubles


def test_each_price_expires_by_its_own_age(cloud_settings: Callable[..., CloudSettings]) -> None:
    settings, now_s = cloud_settings(price_days=31.0, markets=("on-demand", "spot")), NOW.timestamp()
    known = shipped()
    new = {"priced_at": NOW, "spot_usd_per_h": {"us-east-1a": 0.4}, "spot_at": NOW - timedelta(days=2)}
    both = known.model_copy(
        update={"types": known.types | {"g5.xlarge": known.types["g5.xlarge"].model_copy(update=new)}}
    )
    assert both.is_fresh("g5.xlarge", "on-demand", now_s, settings)
    assert not both.is_fresh("g5.xlarge", "spot", now_s, settings)
    assert not both.is_fresh("g4dn.xlarge", "on-demand", now_s, settings)
    assert both.expired(now_s, settings) == (
        "in us-east-1, on-demand prices of g4dn.xlarge are as of 2025-06-30; "
        "spot prices of g5.xlarge are as of 2026-11-19: too old to be used"
    )


def test_prices_are_fetched_when_they_are_due_and_a_failure_is_told(
    ec2: Ec2, cloud_settings: Callable[..., CloudSettings], tmp_path: Path
) -> None:
    file, now_s = tmp_path / "c.json", time.time()
    kept = KeptCatalogue(file, "us-east-1", Fetcher(cloud_settings()), 6 * 3600.0)

    def asked() -> int:
        return sum(action == "DescribeInstanceTypes" for action, _ in ec2.calls)

    kept.refresh(now_s)
    assert "on-demand prices of us-east-1 were refused" in kept.trouble
    assert file.exists(), "types are known all the same"
    ec2.on_demand = {"g5.xlarge": 1.1}
    kept.refresh(now_s + 3600)
    assert asked() == 1, "nothing is due"
    kept.refresh(now_s + 6.1 * 3600)
    assert (asked(), kept.trouble) == (2, "")
    known = kept.now()
    assert known is not None
    assert known.usd_per_h("g5.xlarge", "on-demand", ()) == 1.1
    ec2.faults.append(Fault("DescribeInstanceTypes", "error", "UnauthorizedOperation", times=9))
    kept.refresh(now_s + 13 * 3600)
    kept.refresh(now_s + 13 * 3600 + 60)
    assert asked() == 3, "a refresh that failed is not repeated at once"
    assert "does not describe its types" in kept.trouble
    assert kept.now() == known


def test_the_endpoint_of_ec2_is_no_price_list(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    """With only EC2's private endpoint, no request for prices goes to it."""
    ec2.on_demand = {"g5.xlarge": 1.1}
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    session = boto3.session.Session(**KEYS)
    found = fetch(session, "us-east-1", TYPES, load_gpus(), now=NOW, known=shipped()).catalogue
    assert found.usd_per_h("g5.xlarge", "on-demand", ()) == 1.006, "the shipped table's"


def test_another_region_is_not_known_before_it_was_asked(tmp_path: Path) -> None:
    assert load(tmp_path / "c.json", "eu-west-1") is None
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ConfigError, match="penstock cloud refresh"):
        load(tmp_path / "c.json", "us-east-1")
    Catalogue.model_validate_json(shipped().model_dump_json())


def test_a_gpu_that_no_catalogue_knows_keeps_its_name() -> None:
    assert gpu_type_of("RTX PRO Server 6000", 98304, load_gpus()) == "rtx_pro_server_6000"


def test_settings_say_what_is_wrong(cloud_settings: Callable[..., CloudSettings]) -> None:
    with pytest.raises(ValueError, match="name"):
        cloud_settings(name="a b")


def test_a_type_without_a_gpu_is_a_cpu_slot_and_runs_a_job_that_names_it(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, ec2: Ec2
) -> None:
    """Types with other accelerators are neither."""
    types = ("c5.xlarge", "inf1.xlarge", "f1.2xlarge", "g5.xlarge")
    ec2.on_demand = {"c5.xlarge": 0.17, "inf1.xlarge": 0.2, "f1.2xlarge": 1.6, "g5.xlarge": 1.0}
    session = boto3.session.Session(**KEYS)
    found = fetch(session, "us-east-1", types, load_gpus(), now=datetime.now(UTC)).catalogue
    assert {name: (each.gpu_type, each.gpus) for name, each in found.types.items()} == {
        "c5.xlarge": ("cpu", 1),
        "g5.xlarge": ("a10g", 1),
    }
    settings = cloud_settings(instance_types=types)
    site = CloudSite(settings, store, ec2, connect(settings))
    site.catalogue = lambda: found
    site.names = {"cpu-0": "cpu", "a10g-0": "a10g"}
    site.submit("7", gpu_types=("cpu",), max_gpus=1)
    site.send("7", "c5.xlarge", 1.0)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    (instance,) = ec2.instances("running")
    assert instance["InstanceType"] == "c5.xlarge"
    assert site.jobs["7"].allocation is not None
    assert site.jobs["7"].allocation.nodes == ("cpu-0",)
    assert {offer.gpu_type for offer in site.state.offers} == {"a10g"}, "its only node is taken"
    site.finish("7")
    site.until(lambda: not site.state.runs and not ec2.running())
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert spent == pytest.approx(60 / 3600 * 0.17, rel=0.5)
