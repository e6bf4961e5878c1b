"""`penstock cloud reconcile` with a Cost and Usage Report, also 2.0, in moto's S3: no dollar unaccounted, or each difference."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock_cloud.cost_report import read_bill
from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.manager.book import Book
from penstock_scheduler.burst.manager.provider import DescribedInstance
from penstock_scheduler.burst.manager.runs import BurstRun, Slot
from penstock_scheduler.cli import make_app
from penstock_scheduler.model import Offer
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.faults import Ec2

HOUR_S = 3600
NOV_S = int(datetime(2026, 11, 10, tzinfo=UTC).timestamp())
DEC_S = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp())
PRICE, VOLUME, ADDRESS = 1.006, 0.02, 0.005
COLUMNS = [
    "identity/LineItemId",
    "identity/TimeInterval",
    "bill/InvoiceId",
    "bill/BillingEntity",
    "bill/BillType",
    "bill/PayerAccountId",
    "bill/BillingPeriodStartDate",
    "bill/BillingPeriodEndDate",
    "lineItem/UsageAccountId",
    "lineItem/LineItemType",
    "lineItem/UsageStartDate",
    "lineItem/UsageEndDate",
    "lineItem/ProductCode",
    "lineItem/UsageType",
    "lineItem/Operation",
    "lineItem/AvailabilityZone",
    "lineItem/ResourceId",
    "lineItem/UsageAmount",
    "lineItem/NormalizationFactor",
    "lineItem/NormalizedUsageAmount",
    "lineItem/CurrencyCode",
    "lineItem/UnblendedRate",
    "lineItem/UnblendedCost",
    "lineItem/BlendedRate",
    "lineItem/BlendedCost",
    "lineItem/LineItemDescription",
    "lineItem/TaxType",
    "product/ProductName",
    "pricing/term",
    "pricing/unit",
    "resourceTags/user:Name",
    "resourceTags/user:penstock:run",
    "resourceTags/user:penstock:site",
]


COLUMNS_2 = [
    "bill_bill_type",
    "bill_billing_entity",
    "bill_billing_period_end_date",
    "bill_billing_period_start_date",
    "bill_payer_account_id",
    "bill_payer_account_name",
    "cost_category",
    "discount",
    "identity_line_item_id",
    "identity_time_interval",
    "line_item_availability_zone",
    "line_item_blended_cost",
    "line_item_currency_code",
    "line_item_line_item_type",
    "line_item_operation",
    "line_item_product_code",
    "line_item_resource_id",
    "line_item_unblended_cost",
    "line_item_usage_account_id",
    "line_item_usage_amount",
    "line_item_usage_end_date",
    "line_item_usage_start_date",
    "line_item_usage_type",
    "pricing_unit",
    "product",
    "product_instance_type",
    "resource_tags",
]
"""Of CUR 2.0, in the order of its table dictionary."""


class Report:
    """The files of the report of November 2026, as AWS writes them."""

    def __init__(self, s3: Any) -> None:
        self._s3 = s3
        s3.create_bucket(Bucket="bills")
        self.rows: list[dict[str, str]] = []
        self.columns = COLUMNS
        self.add("i-strange", "9.1-x", 12.0, site="5e1f0000-0000-4000-8000-000000000002")
        self.add("arn:aws:s3:::data", "", 3.0, site="", product="AmazonS3")

    def add(
        self, resource: str, run: str, usd: float, site: str = SITE, product: str = "AmazonEC2", hours: int = 2
    ) -> None:
        """Some hours of a resource that ended by the last day of the month."""
        for hour in range(hours):
            begin = datetime(2026, 11, 30, 21 + hour, tzinfo=UTC)
            end = begin.replace(hour=begin.hour + 1)
            times = [f"{each:%Y-%m-%dT%H:%M:%SZ}" for each in (begin, end)]
            row = {
                "identity/TimeInterval": "/".join(times),
                "lineItem/UsageStartDate": times[0],
                "lineItem/UsageEndDate": times[1],
                "lineItem/LineItemType": "Usage",
                "lineItem/ProductCode": product,
                "lineItem/ResourceId": resource,
                "lineItem/UnblendedCost": f"{usd / hours:.10f}",
                "resourceTags/user:penstock:run": run,
                "resourceTags/user:penstock:site": site,
            }
            self.rows.append({key: row.get(key, "") for key in COLUMNS})

    def put(self) -> None:
        """Two files, and the manifest that names them."""
        folder, keys = "daily/cur/20261101-20261201", []
        for number in range(2):
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows[number::2])
            keys.append(f"{folder}/assembly/cur-0000{number}.csv.gz")
            self._s3.put_object(Bucket="bills", Key=keys[-1], Body=gzip.compress(text.getvalue().encode()))
        body = json.dumps({"assemblyId": "assembly", "compression": "GZIP", "reportKeys": keys})
        self._s3.put_object(Bucket="bills", Key=f"{folder}/cur-Manifest.json", Body=body.encode())


class Export(Report):
    """The same of Data Exports, table CUR 2.0. Its tags are one column of JSON, with `_` for each special character."""

    def put(self) -> None:
        files = []
        for number in range(2):
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, COLUMNS_2, restval="")
            writer.writeheader()
            writer.writerows(self.line(row) for row in self.rows[number::2])
            key = f"daily/cur/data/BILLING_PERIOD=2026-11/cur-0000{number + 1}.csv.gz"
            self._s3.put_object(Bucket="bills", Key=key, Body=gzip.compress(text.getvalue().encode()))
            files.append(f"s3://bills/{key}")
        body = json.dumps({"exportName": "cur", "dataFiles": files})
        key = "daily/cur/metadata/BILLING_PERIOD=2026-11/cur-Manifest.json"
        self._s3.put_object(Bucket="bills", Key=key, Body=body.encode())

    def line(self, row: dict[str, str]) -> dict[str, str]:
        tags = {
            f"user_penstock_{name}": row[f"resourceTags/user:penstock:{name}"]
            for name in ("run", "site")
            if row[f"resourceTags/user:penstock:{name}"] and f"resourceTags/user:penstock:{name}" in self.columns
        }
        return {
            "line_item_usage_start_date": row["lineItem/UsageStartDate"].replace("Z", ".000Z"),
            "line_item_usage_end_date": row["lineItem/UsageEndDate"].replace("Z", ".000Z"),
            "line_item_product_code": row["lineItem/ProductCode"],
            "line_item_resource_id": row["lineItem/ResourceId"],
            "line_item_unblended_cost": row["lineItem/UnblendedCost"],
            "cost_category": "{}",
            "resource_tags": json.dumps(tags | {"user_owner": "ann"}) if tags else "",
        }


@pytest.fixture(params=[Report, Export])
def report(ec2: Ec2, request: pytest.FixtureRequest) -> Report:
    made: Report = request.param(ec2.s3())
    return made


def ran(store: SqlStore, job: str, *ids: str, begin_s: int = NOV_S, hours: float = 3.0, over: bool = True) -> None:
    """The ledger and the record of a run."""
    end_s = begin_s + hours * HOUR_S if over else None
    slots = [
        Slot(
            node=f"c-{id_}", instance=id_, launched_s=begin_s, ended_s=end_s, usd_per_h=0.525 if "spot" in id_ else None
        )
        for id_ in ids
    ]
    run = BurstRun(
        id=f"{job}.1-a",
        job=job,
        region="us-east-1",
        user="ann",
        account="physics",
        offer=Offer("g5.xlarge", "a10g", len(ids), len(ids), PRICE + VOLUME + ADDRESS),
        instance_type="g5.xlarge",
        market="spot" if "spot" in ids[0] else "on-demand",
        usd_per_h=PRICE + VOLUME + ADDRESS,
        extras_usd_per_h=VOLUME + ADDRESS,
        usd=100.0,
        round=1,
        ordered_s=begin_s,
        partition="burst",
        state="running",
        slots=tuple(slots),
    )
    book = Book(store)
    book.save(run, begin_s, run.committed())
    if end_s is not None:
        book.save(run.model_copy(update={"state": "over"}), end_s, *run.spent(end_s))


def orphan(store: SqlStore, id_: str) -> None:
    tags = {"run": "8.1-a", "job": "8", "usd_per_h": repr(PRICE + VOLUME + ADDRESS), "account": "physics"}
    end_s = NOV_S + HOUR_S
    Book(store).settle(
        DescribedInstance(id_, "terminated", "g5.xlarge", "us-east-1a", NOV_S, end_s, tags, "us-east-1", gone=True)
    )


Reconcile = Callable[..., Any]


@pytest.fixture
def reconcile(
    cloud_settings: Callable[..., CloudSettings], store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Reconcile:
    cloud_settings()
    monkeypatch.setattr(CloudSettings, "ipv4_usd_per_h", ADDRESS)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[daemon]\nstate_dir = "{tmp_path}/state"\n[cloud]\nsite = "{SITE}"\nname = "p"\nvolume_gb = 100\n'
        f"volume_usd_per_gb_month = {VOLUME * 7.3}\n"
    )
    command = ["cloud", "reconcile", "s3://bills/daily/cur", "--month=2026-11", f"--config={config}"]
    return lambda: CliRunner().invoke(make_app(), command)


def book(store: SqlStore, report: Report) -> None:
    """A ledger, and the report that agrees with it."""
    ran(store, "7", "i-1", "i-2")
    ran(store, "71", "i-spot")
    ran(store, "72", "i-border", begin_s=DEC_S - HOUR_S)
    ran(store, "73", "i-alive", over=False)
    ran(store, "74", "i-old", begin_s=NOV_S - 20 * 86400)
    orphan(store, "i-orphan")
    for id_, run, usd in (
        ("i-1", "7.1-a", 3 * PRICE),
        ("i-2", "7.1-a", 3 * PRICE - 0.004),
        ("i-spot", "71.1-a", 3 * 0.5),
        ("i-border", "72.1-a", PRICE / 2),
        ("i-orphan", "8.1-a", PRICE),
        ("i-alive", "73.1-a", 40.0),
    ):
        report.add(id_, run, usd)
    report.add("vol-1", "", 11 * VOLUME)


def test_a_ledger_that_agrees_leaves_no_dollar_unaccounted(
    store: SqlStore, report: Report, reconcile: Reconcile
) -> None:
    book(store, report)
    report.put()
    done = reconcile()
    assert done.output.splitlines()[-1] == "no dollar unaccounted", done.output
    assert "6 instances" in done.output
    assert "2 more are not in the report yet, or run on" in done.output, "that of the border, and the one that lives"
    assert done.exit_code == 0


def test_each_difference_is_told_by_run_and_instance(store: SqlStore, report: Report, reconcile: Reconcile) -> None:
    book(store, report)
    ran(store, "75", "i-unbilled", hours=1.0)
    report.add("i-2", "7.1-a", 0.5)
    report.add("i-unknown", "6.1-a", 2.0)
    report.add("i-stripped", "", 4.0)
    report.add("vol-2", "", 0.9)
    report.add("i-orphan", "8.1-a", 0.25)
    report.put()
    done = reconcile()
    assert done.exit_code == 1
    assert done.output.splitlines()[:-1] == [
        "i-2 of run 7.1-a: $3.51 billed, $3.02 in the ledger",
        "i-orphan of no run: $1.26 billed, $1.01 in the ledger",
        "i-stripped of no run: $4.00 billed, and the ledger does not have it",
        "i-unbilled of run 75.1-a: $0.00 billed, $1.01 in the ledger",
        "i-unknown of 6.1-a: $2.00 billed, and the ledger does not have it",
        "volumes: $1.12 billed, $0.24 in the ledger",
    ]


def test_a_report_without_the_tags_or_without_files_is_refused(
    store: SqlStore, report: Report, reconcile: Reconcile
) -> None:
    ran(store, "7", "i-1")
    missing = reconcile().exception
    assert isinstance(missing, ConfigError)
    assert "s3://bills/daily/cur/20261101-20261201/cur-Manifest.json" in str(missing)
    assert "s3://bills/daily/cur/metadata/BILLING_PERIOD=2026-11/cur-Manifest.json" in str(missing)
    report.columns = [each for each in COLUMNS if "penstock" not in each]
    report.put()
    untagged = reconcile().exception
    assert isinstance(untagged, ConfigError)
    assert "cost allocation tags" in str(untagged)


def test_tags_that_the_export_selects_as_columns_of_their_own_count_too() -> None:
    """`resource_tags.user_penstock_site AS resource_tags_user_penstock_site`, as AWS's guide to the change to CUR 2.0 has it."""
    row = {
        "line_item_usage_end_date": "2026-11-30T22:00:00.000Z",
        "line_item_unblended_cost": "1.5",
        "line_item_resource_id": "i-1",
        "resource_tags_user_penstock_site": SITE,
        "resource_tags_user_penstock_run": "7.1-a",
    }
    bill = read_bill([row], SITE)
    assert (dict(bill.instances), bill.runs, bill.until_s) == ({"i-1": 1.5}, {"i-1": "7.1-a"}, DEC_S - 2 * HOUR_S)


def test_files_of_another_kind_are_refused(report: Report, reconcile: Reconcile) -> None:
    report.put()
    listed = report._s3.list_objects_v2(Bucket="bills")["Contents"]
    for each in listed:
        if each["Key"].endswith(".gz"):
            report._s3.put_object(Bucket="bills", Key=each["Key"], Body=b"PAR1")
    refused = reconcile().exception
    assert isinstance(refused, ConfigError)
    assert "CSV with gzip" in str(refused)
