"""The metrics that Prometheus scrapes. They name neither users nor jobs. docs/admin/observing.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_scheduler.health_messages import Health
from penstock_scheduler.messages import ClusterView, JobView
from penstock_scheduler.model import UnknownValue
from penstock_scheduler.records import RoundRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Values = dict[tuple[str, ...], float]
"""Label values -> value."""


def metrics(
    cluster: ClusterView,
    live: Sequence[JobView],
    record: RoundRecord | None,
    counters: Counter[str],
    unknown: Sequence[UnknownValue],
    spent_usd: float | None,
    health: Health,
    now_s: float,
) -> bytes:
    """All metrics in Prometheus' text format.

    Args:
        live: the jobs that have not ended.
        record: the newest round.
        counters: what the API has counted since the daemon started.
        unknown: what the newest observation of the cluster could not read.
        spent_usd: dollars spent in the cloud, by the ledger; None: the store is away.
        health: the daemon's.
        now_s: s since 1970.
    """
    registry = CollectorRegistry()
    spent = _gauge(
        "cloud_spent_usd", "Dollars spent in the cloud, by the ledger.", {} if spent_usd is None else {(): spent_usd}
    )
    families = [*_cluster(cluster, now_s), *_jobs(live, now_s), *_round(record, now_s), *_counts(counters)]
    families += [_unknown(unknown), spent, _protected(record), *_health(health)]
    registry.register(_Fixed(families))
    return generate_latest(registry)


def _protected(record: RoundRecord | None) -> Metric:
    cloud = None if record is None else record.snapshot.cloud
    values: _Values = {} if cloud is None else {(): 1.0 if cloud.protected else 0.0}
    return _gauge("cloud_protected", "Whether the cloud launches nothing until an admin says so.", values)


class _Fixed(Collector):
    """Metric families that were computed before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, text: str, values: _Values, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"penstock_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def _cluster(cluster: ClusterView, now_s: float) -> list[Metric]:
    gpus: _Values = {}
    for gpu_type, total in cluster.gpus.items():
        allocated, others = cluster.allocated.get(gpu_type, 0), cluster.others.get(gpu_type, 0)
        out = cluster.unusable.get(gpu_type, 0)
        free = max(total - allocated - others - out, 0)
        states = {"allocated": allocated, "others": others, "unusable": out, "free": free}
        gpus |= {(gpu_type, state): count for state, count in states.items()}
    age_s: _Values = {} if cluster.observed_s is None else {(): max(now_s - cluster.observed_s, 0.0)}
    return [
        _gauge("gpus", "GPUs by type and state.", gpus, ("gpu_type", "state")),
        _gauge("jobs", "Jobs that have not ended.", {(state,): n for state, n in cluster.jobs.items()}, ("state",)),
        _gauge(
            "gpu_price",
            "Price of a GPU in the newest round, in the unit of the policy's objective.",
            {(t,): p for t, p in cluster.prices.items()},
            ("gpu_type",),
        ),
        _gauge("paused", "1 while an admin has paused the rounds, else 0.", {(): float(cluster.paused)}),
        _gauge("observed_age_seconds", "Seconds since the cluster was last observed.", age_s),
    ]


def _jobs(live: Sequence[JobView], now_s: float) -> list[Metric]:
    oldest_s = max((now_s - view.submit_s for view in live if view.state == "queued"), default=0.0)
    return [
        _gauge(
            "oldest_wait_seconds",
            "Seconds that the oldest waiting job has waited since its submission.",
            {(): max(oldest_s, 0.0)},
        ),
        _gauge(
            "restarts",
            "Restarts of the jobs that have not ended.",
            {(): float(sum(view.restarts for view in live))},
        ),
    ]


def _round(record: RoundRecord | None, now_s: float) -> list[Metric]:
    if record is None:
        return []
    plan = record.plan
    goodput = sum(each.goodput for each in plan.assignments.values() if each.goodput is not None)
    gap: _Values = {(): plan.solve.gap} if plan.solve else {}
    return [
        _gauge("round", "Number of the newest round.", {(): float(plan.round)}),
        _gauge(
            "round_age_seconds",
            "Seconds since the newest round was decided.",
            {(): max(now_s - record.snapshot.time_s, 0.0)},
        ),
        _gauge(
            "round_seconds",
            "Seconds that the newest round took, by phase.",
            {(p,): s for p, s in record.seconds.items()},
            ("phase",),
        ),
        _gauge("round_gap_ratio", "Bound on how far the newest plan is from the best plan, as a share.", gap),
        _gauge(
            "plan_refused",
            "1 while the plan gate refuses the plans of the policy, else 0.",
            {(): float(bool(record.gate.refused))},
        ),
        _gauge(
            "round_stops",
            "Running jobs that the newest round stops, by the code of the reason.",
            {(code,): float(n) for code, n in Counter(stop.code.value for stop in plan.stops.values()).items()},
            ("code",),
        ),
        _gauge("round_waiting", "Jobs that wait after the newest round.", {(): float(len(plan.waiting))}),
        _gauge(
            "goodput",
            "Sum of the expected goodput of all jobs in the newest round, in samples per second.",
            {(): goodput},
        ),
    ]


def _unknown(unknown: Sequence[UnknownValue]) -> Metric:
    values: _Values = {}
    for each in unknown:
        values[each.kind, each.field] = values.get((each.kind, each.field), 0.0) + len(each.names)
    text = "Values in the newest answers of Slurm that Penstock does not know, by kind of record and field."
    return _gauge("unknown_values", text, values, ("kind", "field"))


def _health(health: Health) -> list[Metric]:
    steps, disks = health.steps, health.disks
    return [
        _gauge("ready", "1 if the daemon can do its work, else 0.", {(): float(health.status == "ok")}),
        _gauge("warnings", "Warnings of penstock doctor about the daemon.", {(): float(len(health.warnings))}),
        _gauge(
            "step_age_seconds",
            "Seconds since a step of the round loop last succeeded.",
            {(step.step,): step.age_s for step in steps if step.age_s is not None},
            ("step",),
        ),
        _gauge(
            "step_failing",
            "1 if a step of the round loop hangs or fails for longer than [health] allows, else 0.",
            {(step.step,): float(bool(step.problem)) for step in steps},
            ("step",),
        ),
        _gauge(
            "report_age_seconds",
            "Seconds since the newest report of a job.",
            {} if health.report_age_s is None else {(): health.report_age_s},
        ),
        _gauge(
            "disk_writable",
            "1 if the newest check could write to the store or the spool, else 0.",
            {(disk.what,): float(not disk.problem) for disk in disks},
            ("disk",),
        ),
        _gauge(
            "disk_free_bytes",
            "Free space of the file system of the store or the spool.",
            {(disk.what,): float(disk.free_bytes) for disk in disks if disk.free_bytes is not None},
            ("disk",),
        ),
        _gauge(
            "disk_used_bytes",
            "What the store takes.",
            {(disk.what,): float(disk.used_bytes) for disk in disks if disk.used_bytes is not None},
            ("disk",),
        ),
        _gauge(
            "disk_days_left",
            "Days until that file system is full at its present growth; absent: it does not grow.",
            {(disk.what,): disk.days_left for disk in disks if disk.days_left is not None},
            ("disk",),
        ),
        _gauge(
            "disk_low",
            "1 if that file system will be full soon by [health], else 0.",
            {(disk.what,): float(bool(disk.warning)) for disk in disks},
            ("disk",),
        ),
    ]


def _counts(counters: Counter[str]) -> list[Metric]:
    family = CounterMetricFamily(
        "penstock_events", "Events of the API since the daemon started, by kind.", labels=("kind",)
    )
    for kind, count in sorted(counters.items()):
        family.add_metric((kind,), count)
    return [family]
