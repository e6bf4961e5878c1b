"""The demo where Slurm cannot be had: the same jobs on the simulated cluster, against a plain queue."""

from __future__ import annotations

from penstock_profiles.families import Families
from penstock_scheduler.loop import RoundLoop
from penstock_scheduler.model import JobWish
from penstock_scheduler.models import WishModels
from penstock_scheduler.nodespec import DEFAULT_SPEC
from penstock_scheduler.policies import make_policy
from penstock_scheduler.ports import Trigger
from penstock_scheduler.report import History, JobHistory, NodeShape, Span
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from penstock_scheduler.store import MemoryStore
from penstock_scheduler.triggers import OnEvent, Period
from penstock_slurm.demo.jobs import ARRIVALS_S, JOBS, TIME_SCALE, DemoJob

ROUND_S = 60.0
"""Emulated seconds; a restart costs as much."""


def simulate(families: Families) -> list[History]:
    """Both histories, on the demo's real time scale so that they read like those of a real run."""
    return [
        _history("Under Penstock (simulated)", "sia", Period(ROUND_S), families),
        _history("Plain queue (simulated)", "fifo", OnEvent(), families),
    ]


def _history(title: str, policy_name: str, trigger: Trigger, families: Families) -> History:
    clock = SimulatedClock()
    jobs = [_job(number, job, families, plain=policy_name == "fifo") for number, job in enumerate(JOBS)]
    nodes = nodes_from_spec(DEFAULT_SPEC)
    cluster = SimulatedCluster(nodes, jobs, clock)
    policy, settings = make_policy(policy_name)
    models = WishModels(families, ROUND_S)
    loop = RoundLoop(cluster, clock, MemoryStore(), trigger, policy, models, tick_s=10.0, settings=settings)
    loop.run(lambda: cluster.finished or clock.now_s() > 1e6)
    cluster.close()
    taken: dict[str, list[tuple[float, float, set[int]]]] = {node.name: [] for node in nodes}
    sizes = {node.name: node.gpus for node in nodes}
    spans: dict[str, list[Span]] = {job.id: [] for job in jobs}
    for begin, end, where, job_id in sorted(
        ((run.start_s, run.end_s, run.placement, job.id) for job in jobs for run in job.runs), key=lambda run: run[:2]
    ):
        ids = {}
        for share in where.shares:
            busy = set().union(*(s for b, e, s in taken[share.node] if b < end and begin < e))
            ids[share.node] = tuple([g for g in range(sizes[share.node]) if g not in busy][: share.gpus])
            taken[share.node].append((begin, end, set(ids[share.node])))
        spans[job_id].append(Span(begin / TIME_SCALE, end / TIME_SCALE, where.gpu_type, ids))
    return History(
        title=title,
        nodes=tuple(NodeShape(node.name, node.gpu_type, node.gpus) for node in nodes),
        jobs=tuple(_seen(job, tuple(spans[job.id])) for job in jobs),
        start_s=0.0,
        end_s=max(job.finish_s or 0.0 for job in jobs) / TIME_SCALE,
        note="no processes ran: progress is computed from the models",
    )


def _job(number: int, job: DemoJob, families: Families, *, plain: bool) -> SimulatedJob:
    estimator = families[job.family].estimator(fixed_batch=job.fixed_batch())
    gpu_type, nodes, gpus = job.plain
    fixed = {"adaptivity": "fixed", "min_gpus": nodes * gpus, "max_gpus": nodes * gpus, "gpu_types": [gpu_type]}
    wish = fixed | {"model_family": job.family} if plain else job.wish_fields()
    submit_s = number * ARRIVALS_S / (len(JOBS) - 1) * TIME_SCALE
    truth = EstimatedJob(estimator, job.work(families), ROUND_S)
    return SimulatedJob(str(number + 1), job.name, JobWish.model_validate(wish), truth, submit_s)


def _seen(job: SimulatedJob, spans: tuple[Span, ...]) -> JobHistory:
    goodput: list[tuple[float, float]] = []
    for run in job.runs:
        begin, end, shape = run.start_s, run.end_s, tuple(share.gpus for share in run.placement.shares)
        rate = job.truth.rates(run.placement.gpu_type, shape, None)[0]
        at = rate * TIME_SCALE / job.work
        goodput += [
            (begin / TIME_SCALE, 0.0),
            (begin / TIME_SCALE, at),
            (end / TIME_SCALE, at),
            (end / TIME_SCALE, 0.0),
        ]
    low, high = job.wish.min_gpus, job.wish.max_gpus
    return JobHistory(
        id=job.id,
        name=job.name,
        asks=f"{job.wish.adaptivity.value} {low if low == high else f'{low}-{high}'}",
        submit_s=job.submit_s / TIME_SCALE,
        start_s=spans[0].start_s if spans else None,
        end_s=None if job.finish_s is None else job.finish_s / TIME_SCALE,
        state="COMPLETED" if job.finish_s is not None else "PENDING",
        spans=spans,
        goodput=tuple(goodput),
        restarts=job.restarts,
    )
