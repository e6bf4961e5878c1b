"""Compares the ledger with AWS's Cost and Usage Report (CUR) in an S3 bucket: each difference by run and instance.

Read from AWS, "Cost and Usage Reports: data dictionary", and for CUR 2.0 "Understanding export delivery" and "Table dictionary".
The manifest of a month names the files, which are CSV under gzip. CUR 2.0 has the same columns under other names, and the tags as
one column of JSON, `resource_tags`, unless its query makes columns of them. Tags are there once they are activated as cost
allocation tags.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.burst.deciding.ledger import month
from penstock_scheduler.burst.manager.book import ORPHAN, Book
from penstock_scheduler.burst.manager.runs import LEAST_S, cost_usd
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.people.units import dollars
from penstock_scheduler.store.cloud_runs import RunStore

SITE, RUN = "resource_tags_user_penstock_site", "resource_tags_user_penstock_run"

CENT = 0.01
"""Smaller differences do not count: the report rounds each hour."""

BOOT_S = 60.0
"""EC2 bills from an instance's state `running` on, some seconds after the launch that the ledger has."""

MONTH_SHARE = 0.05
"""Share by which volumes may differ: AWS bills them by the hours of the month, and the ledger by months of 730."""


@dataclass
class Bill:
    """The site's part of a month's report.

    Attributes:
        instances: instance -> US dollars.
        runs: instance -> its run, by its tag.
        other_usd: the site's other resources, which are volumes.
        until_s: end of the last hour in the report, s since 1970.
        tagged: whether a line of the report has the tag of any site.
    """

    instances: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    runs: dict[str, str] = field(default_factory=dict)
    other_usd: float = 0.0
    until_s: float = 0.0
    tagged: bool = False


@dataclass(frozen=True, slots=True)
class Charge:
    """The part of the ledger for an instance in a month, without its volume and address.

    Attributes:
        usd: US dollars.
        usd_per_h: its price.
        volume_usd: the part for its volume.
        ended_s: when it ended, s since 1970, if it does not run on.
    """

    run: str
    usd: float
    usd_per_h: float = 0.0
    volume_usd: float = 0.0
    ended_s: float | None = None


UNTAGGED = (
    "the report has no tags penstock:site and penstock:run; activate them as cost allocation tags in the AWS Billing console, "
    "and include resource ids in the report"
)


def read_bill(rows: Iterable[Mapping[str, str]], site: str) -> Bill:
    """The bill from the rows of a report. Raises ConfigError: it has no columns of tags."""
    bill, names = Bill(), dict[str, str]()
    for given in rows:
        names = names if names.keys() == given.keys() else {name: _column(name) for name in given}
        row = {names[name]: value for name, value in given.items()}
        if "resource_tags" in row:
            row |= {SITE: "", RUN: ""} | {
                f"resource_tags_{_column(tag)}": value
                for tag, value in json.loads(row["resource_tags"] or "{}").items()
            }
        if not {SITE, RUN} <= row.keys():
            raise ConfigError(UNTAGGED)
        ended = datetime.fromisoformat(row["line_item_usage_end_date"]).replace(tzinfo=UTC)
        bill.until_s = max(bill.until_s, ended.timestamp())
        bill.tagged = bill.tagged or bool(row[SITE])
        if row[SITE] != site:
            continue
        usd, resource = float(row["line_item_unblended_cost"] or 0.0), row["line_item_resource_id"]
        if resource.startswith("i-"):
            bill.instances[resource] += usd
            bill.runs[resource] = row[RUN]
        else:
            bill.other_usd += usd
    return bill


def _column(name: str) -> str:
    """A column's or tag's name as CUR 2.0 writes it: `lineItem/UsageEndDate` is `line_item_usage_end_date`."""
    return re.sub(r"\W", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)).lower()


def rows_of(s3: Any, bucket: str, prefix: str, month_s: float) -> Iterator[dict[str, str]]:
    """The rows of a month's report, or of its export as CUR 2.0.

    Args:
        s3: boto3's client of S3.
        bucket: the bucket.
        prefix: the report's prefix and its name.
        month_s: begin of the month, s since 1970.

    Raises ConfigError.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    begin, end = (datetime.fromtimestamp(each_s, UTC) for each_s in month(month_s))
    folder = prefix.rstrip("/")
    name = folder.rsplit("/", 1)[-1]
    tried = []
    for part in (f"{begin:%Y%m%d}-{end:%Y%m%d}", f"metadata/BILLING_PERIOD={begin:%Y-%m}"):
        manifest = f"{folder}/{part}/{name}-Manifest.json"
        try:
            found = json.loads(s3.get_object(Bucket=bucket, Key=manifest)["Body"].read())
        except s3.exceptions.NoSuchKey:
            tried.append(f"s3://{bucket}/{manifest}")
            continue
        try:
            for key in found["reportKeys"] if "reportKeys" in found else found["dataFiles"]:
                content = io.BytesIO(
                    s3.get_object(Bucket=bucket, Key=key.removeprefix(f"s3://{bucket}/"))["Body"].read()
                )
                with gzip.open(content, "rt", encoding="utf-8", newline="") as text:
                    yield from csv.DictReader(text)
        except (BotoCoreError, ClientError, OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"s3://{bucket}/{manifest} and its files cannot be read as CSV with gzip: {error!r}"
            ) from None
        return
    raise ConfigError(f"there is neither {' nor '.join(tried)}")


def charges(store: RunStore, month_s: float, settings: CloudSettings, now_s: float) -> dict[str, Charge]:
    """Instance -> its charge in a month, from the records of the runs and the lines of the ledger."""
    book, lines = Book(store), store.cloud_ledger()
    found: dict[str, Charge] = {}
    for job in {line.job for line in lines if line.job}:
        for run in book.of_job(job).runs:
            extras, own = run.extras_usd_per_h, run.usd_per_h - run.extras_usd_per_h
            volume = max(extras - settings.ipv4_usd_per_h, 0.0)
            for slot in run.slots:
                if slot.instance is None:
                    continue
                price = own if slot.usd_per_h is None else slot.usd_per_h - extras
                usd, volume_usd = (
                    slot.by_month(cost_usd(slot.seconds, each), now_s).get(month_s, 0.0) for each in (price, volume)
                )
                if slot.ended_s is None or usd:
                    found[slot.instance] = Charge(run.id, usd, price, volume_usd, slot.ended_s)
    for line in lines:
        of = line.key.split(":")[1]
        if of.startswith(ORPHAN) and line.kind == "usd" and month(line.time_s)[0] == month_s:
            id_ = of.removeprefix(ORPHAN)
            known = found.get(id_, Charge("", 0.0, ended_s=line.time_s))
            lived = re.search(r" (\d+) s of ", line.text)
            hours = 0.0 if lived is None or known.run else max(float(lived[1]), LEAST_S) / 3600
            extras_usd = hours * settings.extras_usd_per_h
            volume_usd = extras_usd - hours * settings.ipv4_usd_per_h
            usd = known.usd + line.amount - extras_usd
            found[id_] = replace(known, usd=usd, volume_usd=known.volume_usd + volume_usd)
    return found


def differences(bill: Bill, charged: Mapping[str, Charge]) -> list[str]:
    """Each difference between the bill and the ledger as a sentence. An instance that has not ended in the report is left out."""
    found = []
    for id_ in sorted({*bill.instances, *charged}):
        billed_usd, charge = bill.instances.get(id_, 0.0), charged.get(id_)
        if charge is None:
            if abs(billed_usd) >= CENT:
                run = bill.runs.get(id_) or "no run"
                found.append(f"{id_} of {run}: {dollars(billed_usd)} billed, and the ledger does not have it")
        elif charge.ended_s is not None and charge.ended_s <= bill.until_s:
            slack_usd = max(CENT, charge.usd_per_h * BOOT_S / 3600)
            if abs(billed_usd - charge.usd) >= slack_usd:
                whose = f"run {charge.run}" if charge.run else "no run"
                found.append(f"{id_} of {whose}: {dollars(billed_usd)} billed, {dollars(charge.usd)} in the ledger")
    volumes_usd = sum(charge.volume_usd for charge in charged.values())
    if abs(bill.other_usd - volumes_usd) >= CENT + MONTH_SHARE * volumes_usd:
        found.append(f"volumes: {dollars(bill.other_usd)} billed, {dollars(volumes_usd)} in the ledger")
    return found


def waiting(bill: Bill, charged: Mapping[str, Charge]) -> int:
    """Number of instances of the month that have not ended in the report."""
    return sum(each.ended_s is None or each.ended_s > bill.until_s for each in charged.values())
