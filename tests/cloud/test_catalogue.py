from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

import boto3
import pytest

from penstock_cloud.catalogue import Catalogue, Kept, fetch, gpu_type_of, load, save, shipped
from penstock_cloud.settings import CloudSettings
from penstock_profiles.gpus import load_gpus
from penstock_scheduler.errors import ConfigError
from tests.cloud.faults import KEYS, Ec2

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
    found = fetch(boto3.session.Session(**KEYS), "us-east-1", TYPES, load_gpus(), now=NOW, endpoint=ec2.url)
    assert found.usd_per_h("g5.xlarge", "on-demand", ()) == 1.1
    assert found.usd_per_h("g5.xlarge", "spot", ("us-east-1a", "us-east-1b")) == 0.4, (
        "the order may be served in the more expensive zone"
    )
    assert found.usd_per_h("g5.xlarge", "spot", ("us-east-1c",)) is None
    assert found.types["p3dn.24xlarge"].gpu_type == "v100_32gb"
    assert not any(name.startswith("g6f") for name in found.types), "a slice of a GPU is not a GPU"
    assert found.usd_per_h("g6.xlarge", "on-demand", ()) is None, "a price that EC2 does not report is unknown"
    kept = Kept(tmp_path / "c.json", "us-east-1")
    assert kept.now() == shipped()
    save(found, tmp_path / "c.json")
    assert kept.now() == found


def test_without_the_right_to_ask_for_prices_the_table_stands_in(ec2: Ec2) -> None:
    session = boto3.session.Session(**KEYS)
    found = fetch(session, "us-east-1", TYPES, load_gpus(), now=NOW, endpoint=ec2.url)
    assert found.usd_per_h("g5.xlarge", "on-demand", ()) == 1.006
    elsewhere = fetch(session, "eu-west-1", TYPES, load_gpus(), now=NOW, endpoint=ec2.url)
    assert elsewhere.usd_per_h("g5.xlarge", "on-demand", ()) is None, "prices of one region do not hold for another"
    assert (found.at, found.prices_as_of) == (NOW.date(), shipped().at), "the table's prices have the table's date"
    assert "as of 2025-06-30" in (found.expired(NOW.date(), 31.0) or "")
    assert found.expired(date(2025, 7, 31), 31.0) is None
    ec2.on_demand = {"g5.xlarge": 1.1}
    asked = fetch(session, "us-east-1", TYPES, load_gpus(), now=NOW, endpoint=ec2.url)
    assert asked.prices_as_of == NOW.date()


def test_the_endpoint_of_ec2_is_no_price_list(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    """With only EC2's private endpoint, no request for prices goes to it."""
    ec2.on_demand = {"g5.xlarge": 1.1}
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    found = fetch(boto3.session.Session(**KEYS), "us-east-1", TYPES, load_gpus(), now=NOW, endpoint=ec2.url)
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
