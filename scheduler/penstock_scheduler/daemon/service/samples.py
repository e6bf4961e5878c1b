"""Samples what jobs report and what the cluster is, once a minute, and thins out what is older.

The round loop calls it once a tick. A job that reports nothing has no samples, so they cost nothing. Thinning takes a few jobs a
tick, so that no tick waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from penstock_profiles.wire import Observation, Report
from penstock_scheduler.api.history_messages import JobSample
from penstock_scheduler.api.ports import NOT_COUNTED, GpuSecondsByJob, RoundListener
from penstock_scheduler.model import ClusterState, Phase, Snapshot
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.settings import DaemonSettings
from penstock_scheduler.store.sql import SqlStore

DAY_S, HOUR_S = 86_400.0, 3600.0
THIN_AT_ONCE = 10
"""Jobs that one tick thins out: about 1 ms each."""


class Sampler(RoundListener):
    """Writes samples to the store. `take_reports` may be called from any thread, the rest by the round loop's alone."""

    def __init__(self, store: SqlStore, settings: DaemonSettings) -> None:
        self._store = store
        self._every_s = settings.sample_s
        self._raw_s, self._hourly_s = settings.keep_samples_days * DAY_S, settings.keep_days * DAY_S
        self._newest: dict[str, Observation] = {}
        """Job -> its newest observation since the last sample."""
        self._record: RoundRecord | None = store.last_round()
        self._rounds: Counter[str] = Counter()
        self._largest: dict[str, float] = {}
        self._sampled_s: float | None = None
        self._thinned: str | None = None
        """How far thinning has come; None: it is done for this hour."""
        self._thinned_s = -math.inf

    def take_reports(self, reports: Sequence[Report]) -> None:
        """Take in reports, by whatever transport they came."""
        for report in reports:
            if isinstance(report.body, Observation):
                self._newest[report.job_id] = report.body

    def decided(self, record: RoundRecord) -> None:
        """Take in a round."""
        self._record = record
        for name, value in round_figures(record).items():
            if name in ("rounds.decide_s", "rounds.gap"):
                self._largest[name] = max(value, self._largest.get(name, 0.0))
            else:
                self._rounds[name] += round(value)

    def observed(self, state: ClusterState, now_s: float, gpu_seconds: GpuSecondsByJob = NOT_COUNTED) -> None:
        """Take a sample if one is due, and thin out some old ones. Raises StoreError."""
        if self._sampled_s is None or now_s - self._sampled_s >= self._every_s or now_s < self._sampled_s:
            self._sample(state, now_s)
            self._sampled_s = now_s
        if now_s - self._thinned_s >= HOUR_S:
            self._thinned, self._thinned_s = "", now_s
        if self._thinned is not None:
            raw, gone = now_s - self._raw_s, now_s - self._hourly_s
            self._thinned = self._store.thin(raw, gone, self._thinned, THIN_AT_ONCE) or None

    def _sample(self, state: ClusterState, now_s: float) -> None:
        newest, self._newest = self._newest, {}
        given = self._record.plan.assignments if self._record is not None else {}
        running = {job.id: job for job in state.jobs if job.running_on is not None}
        samples = [
            (job, job_sample(body, given[job].goodput if job in given else None))
            for job, body in newest.items()
            # A report of the run before the last move says nothing of what the round expects now.
            if job in running and (held := running[job].running_on) is not None and held.gpus == body.gpus
        ]
        figures = cluster_figures(state)
        if self._record is not None:
            figures |= {f"price.{name}": price for name, price in self._record.plan.prices.items()}
        figures |= {"rounds.decided": 0.0, "rounds.stops": 0.0, "rounds.moves": 0.0, "rounds.refused": 0.0}
        figures |= {name: float(count) for name, count in self._rounds.items()} | self._largest
        shares = [each.goodput / each.expected for _, each in samples if each.goodput is not None and each.expected]
        if shares:
            figures["as-expected"] = sum(shares) / len(shares)
        figures |= _busy(each for _, each in samples)
        self._store.add_samples(math.floor(now_s), samples, figures)
        self._rounds, self._largest = Counter(), {}


def _busy(samples: Iterable[JobSample]) -> dict[str, float]:
    """The mean utilisation of the GPUs, as far as it was measured."""
    busy = [(each.gpus, each.utilisation) for each in samples if each.utilisation is not None]
    return {"busy": sum(gpus * share for gpus, share in busy) / sum(gpus for gpus, _ in busy)} if busy else {}


def job_sample(body: Observation, expected: float | None) -> JobSample:
    """A job's newest observation as a sample."""
    memory_mb = body.device_memory_mb if body.device_memory_mb is not None else body.memory_mb
    return JobSample(
        time_s=0.0,
        span_s=0.0,
        gpus=body.gpus,
        progress=body.progress,
        goodput=body.goodput,
        expected=None if body.goodput is None else expected,
        batch=body.samples,
        utilisation=body.utilisation,
        memory_mb=None if memory_mb is None else round(memory_mb),
    )


def cluster_figures(state: ClusterState) -> dict[str, float]:
    """GPUs by type, and jobs by what they do."""
    gpus: Counter[str] = Counter()
    types = {node.name: node.gpu_type for node in state.nodes}
    for node in state.nodes:
        gpus[f"gpus.{node.gpu_type}.all"] += node.gpus
        gpus[f"gpus.{node.gpu_type}.others"] += node.gpus_others
        gpus[f"gpus.{node.gpu_type}.allocated"] += 0
        gpus[f"gpus.{node.gpu_type}.unusable"] += node.gpus_out_of_reach if node.may_start else node.gpus
    held: Counter[str] = Counter()
    for job in state.jobs:
        if job.allocation is not None and job.phase in (Phase.RUNNING, Phase.STOPPING):
            for share in job.allocation.shares:
                held[share.node] += share.gpus
    sizes = {node.name: node.gpus - node.gpus_others for node in state.nodes}
    for name, count in held.items():
        if name in types:  # jobs that share GPUs count these once
            gpus[f"gpus.{types[name]}.allocated"] += min(count, max(sizes[name], 0))
    jobs = Counter({f"jobs.{phase.value}": 0 for phase in Phase})
    jobs.update(f"jobs.{job.phase.value}" for job in state.jobs)
    jobs.update({"jobs.held": len(state.waiting), "jobs.refused": len(state.refused)})
    return {name: float(count) for name, count in (*gpus.items(), *jobs.items())}


def round_figures(record: RoundRecord) -> dict[str, float]:
    """What a round cost and changed."""
    plan = record.plan
    figures = {
        "rounds.decided": 1.0,
        "rounds.stops": float(len(plan.stops)),
        "rounds.moves": float(_moves(record.snapshot, record)),
        "rounds.refused": 1.0 if record.gate.refused else 0.0,
        "rounds.decide_s": record.seconds.get("decide", 0.0),
    }
    return figures | ({"rounds.gap": plan.solve.gap} if plan.solve is not None else {})


def _moves(seen: Snapshot, record: RoundRecord) -> int:
    """Running jobs that the plan brings to other GPUs."""
    given = record.plan.assignments
    return sum(1 for job in seen.jobs if job.id in record.plan.stops and job.running_on is not None and job.id in given)
