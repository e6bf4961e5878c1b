"""The metrics that Prometheus scrapes. They name neither users nor jobs. docs/admin/observing.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_scheduler import __version__
from penstock_scheduler.api.health_messages import Health, LeaderHealth
from penstock_scheduler.api.messages import ClusterView, JobView
from penstock_scheduler.daemon.service.counts import Counts, Histogram
from penstock_scheduler.model import UnknownValue
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.safe_text import one_line

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CLOUD_STATES = ("ordered", "booting", "running", "leaving", "ending", "unreadable")
"""States of a run in the cloud."""

EVENTS = (
    "connections refused",
    "refused 401",
    "refused 403",
    "refused 422",
    "refused 429",
    "reports accepted",
    "reports of others refused",
    "reports refused",
    "requests",
    "store away",
)
"""Kinds of events that are 0 from the start. Others follow when they happen."""

_Values = dict[tuple[str, ...], float]
"""Label values -> value."""


def metrics(
    cluster: ClusterView,
    live: Sequence[JobView],
    record: RoundRecord | None,
    events: Counter[str],
    counts: Counts,
    unknown: Sequence[UnknownValue],
    spent_usd: float | None,
    committed_usd: float | None,
    health: Health,
    now_s: float,
    silent_agents: int | None = None,
) -> bytes:
    """All metrics in Prometheus' text format.

    Args:
        live: the jobs that have not ended.
        record: the newest round.
        events: kind -> events of the API since the daemon started.
        counts: what else was counted since then.
        unknown: what the newest observation of the cluster could not read.
        spent_usd: dollars spent in the cloud, by the ledger; None: the store is away.
        committed_usd: dollars committed to runs in the cloud that go on; None: the store is away.
        health: the daemon's.
        now_s: s since 1970.
        silent_agents: agents that have stopped reporting; None: there are no agents.
    """
    registry = CollectorRegistry()
    spent = CounterMetricFamily("penstock_cloud_spent_usd", "Dollars spent in the cloud, by the ledger.", spent_usd)
    build = _gauge(
        "build_info", "Always 1; the label is the version of penstockd.", {(__version__,): 1.0}, ("version",)
    )
    families = [build, *_cluster(cluster), *_jobs(live, now_s), *_round(record), *_events(events)]
    families += [_unknown(unknown), spent, *_cloud(record, committed_usd), *_health(health, now_s), *_counted(counts)]
    still: _Values = {(): float(sum(view.suspended is not None and view.suspended.state != "driven" for view in live))}
    silent: _Values = {} if silent_agents is None else {(): float(silent_agents)}
    families += [
        _gauge("agents_silent", "Agents that have stopped reporting, on nodes that respond to Slurm.", silent),
        _gauge(
            "jobs_suspended",
            "Jobs that hold GPUs and stand still.",
            still,
        ),
    ]
    registry.register(_Fixed(families))
    return generate_latest(registry)


def of_api(events: Counter[str], counts: Counts, *, up: bool) -> bytes:
    """The metrics of a penstock-api about itself, beside those of penstockd.

    Args:
        up: whether penstockd answered.
    """
    registry = CollectorRegistry()
    text = "Duration of requests to penstock-api, without those that wait for a change or for events."
    registry.register(
        _Fixed(
            [
                _gauge("api_daemon_up", "1 if penstockd answers penstock-api, else 0.", {(): float(up)}),
                *_events(events, "penstock_api_events", "Events of penstock-api since it started, by kind."),
                _histogram("api_request_duration_seconds", text, counts.requests, "method"),
            ]
        )
    )
    return generate_latest(registry)


def of_standby(health: Health, now_s: float) -> bytes:
    """The metrics of a penstockd that stands by: who leads, and which stand by."""
    registry = CollectorRegistry()
    registry.register(_Fixed(_leader(health.leader, now_s)))
    return generate_latest(registry)


def _cloud(record: RoundRecord | None, committed_usd: float | None) -> list[Metric]:
    cloud = None if record is None else record.snapshot.cloud
    protected: _Values = {} if cloud is None else {(): 1.0 if cloud.protected else 0.0}
    runs = () if cloud is None else cloud.runs
    states: _Values = {(state,): 0.0 for state in CLOUD_STATES} if cloud is not None else {}
    states |= {(state,): float(n) for state, n in Counter(run.state for run in runs).items()}
    paid = sum(run.offer.usd_per_h for run in runs if run.state != "ordered")
    return [
        _gauge("cloud_protected", "Whether the cloud launches nothing until an admin says so.", protected),
        _gauge("cloud_runs", "Jobs in the cloud in the newest round, by the state of their run.", states, ("state",)),
        _gauge(
            "cloud_usd_per_hour",
            "What the instances of the newest round cost in US dollars per hour.",
            {} if cloud is None else {(): paid},
        ),
        _gauge(
            "cloud_committed_usd",
            "Dollars committed to runs in the cloud that go on, by the ledger.",
            {} if committed_usd is None else {(): committed_usd},
        ),
    ]


class _Fixed(Collector):
    """Metric families that were computed before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            for sample in family.samples:
                sample.labels.update({name: one_line(value) for name, value in sample.labels.items()})
        return self._families


def _gauge(name: str, text: str, values: _Values, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"penstock_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def _cluster(cluster: ClusterView) -> list[Metric]:
    gpus: _Values = {}
    for gpu_type, total in cluster.gpus.items():
        allocated, others = cluster.allocated.get(gpu_type, 0), cluster.others.get(gpu_type, 0)
        out = cluster.unusable.get(gpu_type, 0)
        free = max(total - allocated - others - out, 0)
        states = {"allocated": allocated, "others": others, "unusable": out, "free": free}
        gpus |= {(gpu_type, state): count for state, count in states.items()}
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
        _gauge(
            "last_observation_timestamp_seconds",
            "When the cluster was last observed, in seconds since 1970.",
            {} if cluster.observed_s is None else {(): cluster.observed_s},
        ),
    ]


def _jobs(live: Sequence[JobView], now_s: float) -> list[Metric]:
    oldest_s = max((now_s - view.submit_s for view in live if view.state == "queued"), default=0.0)
    return [
        _gauge(
            "oldest_wait_seconds",
            "Seconds that the oldest waiting job has waited since its submission.",
            {(): max(oldest_s, 0.0)},
        ),
    ]


def _round(record: RoundRecord | None) -> list[Metric]:
    if record is None:
        return []
    plan = record.plan
    gap: _Values = {(): plan.solve.gap} if plan.solve else {}
    return [
        _gauge("round", "Number of the newest round.", {(): float(plan.round)}),
        _gauge(
            "last_round_timestamp_seconds",
            "When the newest round was decided, in seconds since 1970.",
            {(): record.snapshot.time_s},
        ),
        _gauge("round_gap_ratio", "Bound on how far the newest plan is from the best plan, as a share.", gap),
        _gauge(
            "plan_refused",
            "1 while the plan gate refuses the plans of the policy, else 0.",
            {(): float(bool(record.gate.refused))},
        ),
        _gauge("round_waiting", "Jobs that wait after the newest round.", {(): float(len(plan.waiting))}),
    ]


def _unknown(unknown: Sequence[UnknownValue]) -> Metric:
    values: _Values = {}
    for each in unknown:
        values[each.kind, each.field] = values.get((each.kind, each.field), 0.0) + len(each.names)
    text = "Values in the newest answers of Slurm that Penstock does not know, by kind of record and field."
    return _gauge("unknown_values", text, values, ("kind", "field"))


def _leader(leader: LeaderHealth | None, now_s: float) -> list[Metric]:
    if leader is None:
        return []
    since: _Values = {} if leader.since_age_s is None else {(): now_s - leader.since_age_s}
    confirmed: _Values = {} if leader.lease_age_s is None else {(): now_s - leader.lease_age_s}
    lags: _Values = {(each.name,): float(each.lag) for each in leader.standbys if each.lag is not None}
    seen: _Values = {(each.name,): now_s - each.seen_age_s for each in leader.standbys}
    return [
        _gauge("leader", "1 if this penstockd leads, else 0.", {(): float(leader.here)}),
        _gauge(
            "leader_fencing_number", "Number of the present term. It grows with each takeover.", {(): leader.number}
        ),
        _gauge("leader_since_timestamp_seconds", "When the leader took the lead.", since),
        _gauge("leader_confirmed_timestamp_seconds", "When the leader last confirmed that it leads.", confirmed),
        _gauge("standby_seen_timestamp_seconds", "When a standby was last heard of.", seen, ("standby",)),
        _gauge("standby_lag_rounds", "Rounds that a standby has not read yet.", lags, ("standby",)),
    ]


def _health(health: Health, now_s: float) -> list[Metric]:
    steps, disks = health.steps, health.disks
    return [
        *_leader(health.leader, now_s),
        _gauge("ready", "1 if the daemon can do its work, else 0.", {(): float(health.status == "ok")}),
        _gauge("warnings", "Warnings of penstock doctor about the daemon.", {(): float(len(health.warnings))}),
        _gauge(
            "step_last_success_timestamp_seconds",
            "When a step of the round loop last succeeded, in seconds since 1970.",
            {(step.step,): now_s - step.age_s for step in steps if step.age_s is not None},
            ("step",),
        ),
        _gauge(
            "step_failing",
            "1 if a step of the round loop hangs or fails for longer than [health] allows, else 0.",
            {(step.step,): float(bool(step.problem)) for step in steps},
            ("step",),
        ),
        _gauge(
            "last_report_timestamp_seconds",
            "When the newest report of a job came, in seconds since 1970.",
            {} if health.report_age_s is None else {(): now_s - health.report_age_s},
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
            "disk_time_left_seconds",
            "Time until that file system is full at its present growth; absent: it does not grow.",
            {(disk.what,): disk.days_left * 86_400 for disk in disks if disk.days_left is not None},
            ("disk",),
        ),
        _gauge(
            "disk_low",
            "1 if that file system will be full soon by [health], else 0.",
            {(disk.what,): float(bool(disk.warning)) for disk in disks},
            ("disk",),
        ),
    ]


def _events(
    counters: Counter[str],
    name: str = "penstock_events",
    text: str = "Events of the API since the daemon started, by kind.",
) -> list[Metric]:
    family = CounterMetricFamily(name, text, labels=("kind",))
    for kind, count in sorted((dict.fromkeys(EVENTS, 0) | counters).items()):
        family.add_metric((kind,), count)
    return [family]


def _counted(counts: Counts) -> list[Metric]:
    stops = CounterMetricFamily(
        "penstock_stops", "Runs that rounds have stopped, by the code of the reason.", labels=("code",)
    )
    for code, count in sorted(counts.stops.items()):
        stops.add_metric((code,), count)
    return [
        stops,
        CounterMetricFamily("penstock_job_restarts", "Restarts of jobs.", counts.restarts),
        _histogram("round_duration_seconds", "Duration of rounds, by phase.", counts.rounds, "phase"),
        _histogram(
            "request_duration_seconds",
            "Duration of the API's requests, without those that wait for a change or for events.",
            counts.requests,
            "method",
        ),
        _histogram("job_wait_seconds", "Time of jobs from submission to their first start.", {"": counts.waits}),
    ]


def _histogram(name: str, text: str, values: Mapping[str, Histogram], label: str = "") -> Metric:
    family = HistogramMetricFamily(f"penstock_{name}", text, labels=(label,) if label else ())
    for key, histogram in sorted(values.items()):
        buckets, sum_s = histogram.read()
        family.add_metric((key,) if label else (), buckets, sum_s)
    return family
