"""What jobs used and what it cost: `usage` for Python users, and the sums behind `GET /v1/usage`.

A job counts with the GPU-hours that it used between the two times, by its allocation spans. The ledger has the amount of each
job, and the spans say when it was used; so the periods of a year add up to what the ledger has. A job without spans, which ended
before penstockd kept them, counts at its end, and so does a run in the cloud. Budgets count all jobs at their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from penstock_scheduler.api.history_messages import AllocationSpan
from penstock_scheduler.api.ledger_messages import Usage, UsageBy, UsageLine
from penstock_scheduler.api.messages import JobView
from penstock_scheduler.store.ledger import UsedRow

if TYPE_CHECKING:
    import pandas as pd

Where = Literal["site", "cloud"]

DTYPES = {
    "name": "object",
    "gpu_type": "object",
    "where": "object",
    "jobs": "int64",
    "gpu_hours": "float64",
    "usd": "float64",
}
"""Column of the DataFrame -> its dtype. The column `name` has the name of `by`: `user`, `account` or `partition`. By GPU type,
there is only `gpu_type`. `usd` is NaN where the site has no price. `UsageLine` describes the columns."""


def usage(by: UsageBy = "user", from_: datetime | str | None = None, to: datetime | str | None = None) -> pd.DataFrame:
    """What jobs used and what it cost, as a DataFrame with the columns and dtypes of `DTYPES`: what `penstock usage` shows.

    Users see their own jobs, operators all. The daemon is found as by the command line (PENSTOCK_URL, PENSTOCK_TOKEN).

    Args:
        by: what to add up by.
        from_: the first time that counts, such as "2026-11-01"; local time unless it has an offset. None: the beginning.
        to: the first time that does not count any more. None: now.

    Raises:
        ValueError: a time is not in ISO 8601.
        PenstockError: penstockd does not answer, or refuses the request.
    """
    from penstock_scheduler.api.client import Client

    with Client.open() as penstock:
        return to_frame(penstock.usage(by, from_s=since_1970(from_), to_s=since_1970(to)))


def since_1970(time: datetime | str | None) -> float | None:
    """A time in seconds since 1970. A time without an offset is local. Raises ValueError: a text is not in ISO 8601."""
    if time is None:
        return None
    return (datetime.fromisoformat(time) if isinstance(time, str) else time).timestamp()


def to_frame(found: Usage) -> pd.DataFrame:
    """Usage as a DataFrame: see `DTYPES`."""
    import pandas as pd

    columns = {
        name: pd.Series([getattr(line, name) for line in found.lines], dtype=dtype) for name, dtype in DTYPES.items()
    }
    frame = pd.DataFrame(columns)
    return frame.drop(columns="name") if found.by == "gpu-type" else frame.rename(columns={"name": found.by})


def add_up(
    by: UsageBy, rows: Iterable[UsedRow], live: Iterable[JobView], prices: Mapping[str, float]
) -> list[UsageLine]:
    """Add up the usage of ended and live jobs, largest first.

    Args:
        rows: sums over the ledger.
        live: jobs that have not ended, with their live figures.
        prices: GPU type -> price of a GPU-hour at the site, USD.
    """
    jobs: dict[tuple[Where, str, str], int] = {}
    seconds: dict[tuple[Where, str, str], float] = {}
    dollars: dict[tuple[Where, str, str], float] = {}
    for row in (*rows, *_of_live(by, live)):
        where: Where = "site" if row.kind == "gpu-seconds" else "cloud"
        key = (where, row.name, row.gpu_type)
        amounts = dollars if row.kind == "usd" else seconds
        amounts[key] = amounts.get(key, 0.0) + row.amount
        # A run in the cloud has two entries; of these, that of the dollars is always there.
        jobs[key] = jobs.get(key, 0) + (row.jobs if row.kind != "cloud-gpu-seconds" else 0)
    lines = []
    for key, count in jobs.items():
        where, name, gpu_type = key
        hours = seconds.get(key, 0.0) / 3600
        price = prices.get(gpu_type)
        usd = dollars.get(key, 0.0) if where == "cloud" else None if price is None else hours * price
        lines.append(UsageLine(name=name, gpu_type=gpu_type, where=where, jobs=count, gpu_hours=hours, usd=usd))
    return sorted(lines, key=lambda line: (-line.gpu_hours, line.name, line.gpu_type, line.where))


def share_between(
    spans: Iterable[AllocationSpan], gpu_type: str, from_s: float, to_s: float, now_s: float
) -> float | None:
    """The part of a job's GPU-seconds of a type that it used in `from_s <= time < to_s`; None: it has no span on such GPUs."""
    whole = inside = 0.0
    for span in spans:
        if span.gpu_type == gpu_type and span.where == "site":
            end_s = max(now_s, span.from_s) if span.to_s is None else span.to_s
            whole += (end_s - span.from_s) * span.gpus
            inside += max(min(end_s, to_s) - max(span.from_s, from_s), 0.0) * span.gpus
    return inside / whole if whole > 0 else None


def between(view: JobView, spans: Sequence[AllocationSpan], from_s: float, to_s: float, now_s: float) -> JobView:
    """A job that has not ended with the GPU-seconds that it used between two times. Without spans, all count now."""
    otherwise = 1.0 if from_s <= now_s <= to_s else 0.0
    used = {}
    for gpu_type, amount in view.gpu_seconds.items():
        share = share_between(spans, gpu_type, from_s, to_s, now_s)
        if (share := otherwise if share is None else share) > 0:
            used[gpu_type] = amount * share
    return view.model_copy(update={"gpu_seconds": used})


def _of_live(by: UsageBy, live: Iterable[JobView]) -> Sequence[UsedRow]:
    return [
        UsedRow("gpu-seconds", gpu_type if by == "gpu-type" else str(getattr(view, by)), gpu_type, 1, amount)
        for view in live
        for gpu_type, amount in view.gpu_seconds.items()
    ]
