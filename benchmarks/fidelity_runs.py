"""Compares the same jobs on a real Slurm and in the simulator.

How long starts and stops take on the real Slurm is measured on a separate run (`CALIBRATION`), never on the run that is compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np

from penstock_loopback.demo.jobs import DemoJob
from penstock_loopback.demo.simulated import Pace
from penstock_loopback.demo.site import HALF_A_SECOND, START_S, TICK_S, DemoSite, read_reports
from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.families import Families
from penstock_profiles.wire import Checkpointed, Ended, Report, Started
from penstock_scheduler.model import Progress
from penstock_scheduler.model.nodespec import parse_nodes
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.people.drawing.history import History
from penstock_scheduler.people.errors import PenstockError
from penstock_scheduler.simulator import Latencies
from penstock_scheduler.store.sql import SqlStore, open_store

CALIBRATION = (
    (DemoJob("a", "resnet18-cifar10", 3, {"max_gpus": 16}, ("rtx", 1, 4)), 1.0),
    (DemoJob("b", "bert-squad", 6, {"max_gpus": 16}, ("a100", 1, 8)), 8.0),
    (DemoJob("c", "deepspeech2", 2, {"max_gpus": 16}, ("t4", 1, 4)), 15.0),
    (DemoJob("d", "resnet50-imagenet", 6, {"max_gpus": 16}, ("rtx", 1, 8)), 22.0),
    (DemoJob("e", "yolov3", 1, {"max_gpus": 8}, ("t4", 2, 4)), 29.0),
    (DemoJob("f", "bert-squad", 2, {"max_gpus": 8}, ("rtx", 1, 8)), 36.0),
)
"""Jobs and their arrivals for `measure`: a minute and a half in which some jobs are resized and moved."""

TIME_SCALE = 20.0
"""Emulated seconds in one real second."""

AT_ONCE_S = 0.7
"""Processes that Slurm starts together report this within some tenths of a second."""

COUNTS = (1, 2, 4, 8, 16)
"""GPU counts for which a job's rates are given."""


def tabled(job: DemoJob, spec: str, families: Families) -> DemoJob:
    """The same job with measured rates instead of its model. Then nothing is learned, and only Slurm differs."""
    estimator: AnyEstimator = families[job.family].estimator(fixed_batch=job.fixed_batch())
    sizes = {node.gpu_type: node.gpus for node in parse_nodes(spec)}
    rates: dict[str, dict[int, float]] = {}
    for gpu_type, node_gpus in sizes.items():
        found = estimator.goodput(gpu_type, np.array([-(-gpus // node_gpus) for gpus in COUNTS]), np.array(COUNTS))
        rates[gpu_type] = {gpus: round(float(rate), 4) for gpus, rate in zip(COUNTS, found, strict=True) if rate > 0}
    return replace(job, rates={gpu_type: table for gpu_type, table in rates.items() if table})


@dataclass(frozen=True, slots=True)
class RealRun:
    """The run of jobs on a real Slurm."""

    history: History
    order: list[str]
    """`order_by_plan` or, without Penstock, `order_by_start`."""
    pace: Pace | None
    """The result of `measure`. None without Penstock, or if no job was moved."""
    longest_round_s: float | None
    """The longest time between two rounds. If it exceeds the median, the machine was overloaded. None without Penstock."""


def run_on_slurm(
    title: str,
    folder: Path,
    spec: str,
    jobs: Sequence[DemoJob],
    arrivals_s: Sequence[float],
    families: Families,
    *,
    penstock: bool,
    limit_s: float,
) -> RealRun:
    """Run jobs on a loopback Slurm of their own, to the end.

    Args:
        title: the history's title.
        folder: holds cluster, daemon and jobs. It is made if missing.
        spec: the nodes.
        jobs: each with its `rates`.
        arrivals_s: when each job is submitted. Under penstockd, time 0 is that of a round, as in the simulation.
        families: the catalogue.
        penstock: whether penstockd decides, by `sia`. Otherwise Slurm does, by each job's plain request.
        limit_s: real seconds after which the run is given up.

    Raises:
        PenstockError: not all jobs have ended after `limit_s`, or penstockd has.
    """
    site = DemoSite(folder, spec, penstock=penstock, time_scale=TIME_SCALE)
    site.up()
    try:
        begun_s = site.next_round_s() if penstock else time.time()
        for job, at_s in zip(jobs, arrivals_s, strict=True):
            time.sleep(max(begun_s + at_s - time.time(), 0.0))
            site.submit(job, families)
        while site.ended < len(jobs):
            if time.time() > begun_s + limit_s or site.daemon_died:
                states = {job.name: job.state for job in site.records.values()}
                raise PenstockError(f"not all jobs ended within {limit_s:.0f} s; see {folder}: {states}")
            time.sleep(0.5)
            site.observe()
        history = site.history(title, "real slurmctld, slurmd and processes", begun_s, time.time(), families)
        if not penstock:
            return RealRun(history, order_by_start(history), None, None)
        rounds = _rounds(open_store(site.state))
        longest_round_s = max(later.snapshot.time_s - each.snapshot.time_s for each, later in pairwise(rounds))
        return RealRun(history, order_by_plan(rounds), measure(site), longest_round_s)
    finally:
        site.down()


def measure(site: DemoSite) -> Pace | None:
    """How long things took under penstockd, as medians over the runs of ended jobs. None if no job was moved."""
    store = open_store(site.state)
    rounds = _rounds(store)
    round_s = median(later.snapshot.time_s - each.snapshot.time_s for each, later in pairwise(rounds))
    tick_s = TICK_S + median(record.seconds["observe"] for record in rounds)
    tick_s = round_s / max(round(round_s / tick_s), 1)
    asked, started, running = _orders(store)
    starts, launches, leaves, lost, pauses, exits = [], [], [], [], [], []
    for job_id, record in site.records.items():
        runs = read_reports(site.spool / job_id / "reports")
        orders = started.get(job_id, [])
        for run, order_s in zip(runs, orders, strict=False):
            starts.append(_when(run, Started) + START_S - order_s)
        launches += [at_s - order_s for order_s, at_s in zip(orders, running.get(job_id, []), strict=False)]
        if record.end_s is not None:
            exits.append(record.end_s + HALF_A_SECOND - _when(runs[-1], Ended))
        for run, asked_s, again_s in zip(runs, asked.get(job_id, []), orders[1:], strict=False):
            left_s = _when(run, Ended)
            leaves.append(left_s - asked_s)
            lost.append(sum(r.body.seconds for r in run if isinstance(r.body, Checkpointed) and r.time_s >= asked_s))
            pauses.append(again_s - left_s)
    if not leaves:
        return None
    exit_s = max(fmean(exits), 0.0)
    return Pace(
        time_scale=site.time_scale,
        round_s=round_s,
        tick_s=tick_s,
        start_s=median(starts),
        latencies=Latencies(
            # The daemon observes changes half a tick late on average, and so does the simulated one.
            launch_s=max(median(launches) - tick_s / 2, 0.0),
            leave_s=median(leaves) + exit_s,
            lost_s=median(lost) + exit_s,
            pause_s=max(median(pauses) - exit_s - tick_s / 2, 0.0),
            exit_s=exit_s,
        ),
    )


def _orders(store: SqlStore) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]], Mapping[str, list[float]]]:
    """By job: when it was asked to leave, when it was sent to a placement, and when its start was observed."""
    asked: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    done: dict[str, list[float]] = {}
    for line in store.outcomes():
        job, starts = line.action.job, line.action.kind == "start"
        if line.text == "waits for Slurm to start it":
            sent.setdefault(job, []).append(line.time_s)
        elif line.text == "was asked to save" and len(asked.get(job, [])) < len(sent.get(job, [])):
            asked.setdefault(job, []).append(line.time_s)
        elif starts and line.progress is Progress.DONE and len(done.get(job, [])) < len(sent.get(job, [])):
            done.setdefault(job, []).append(line.time_s)
    return asked, sent, done


def _when(run: Sequence[Report], kind: type[Started] | type[Ended]) -> float:
    return next(report.time_s for report in run if isinstance(report.body, kind))


# Comparing histories.


@dataclass(frozen=True, slots=True)
class Difference:
    """How a simulated history differs from the real one."""

    average_jct: float
    """Simulated over real, minus 1, like the other two."""
    makespan: float
    longest_jct: float
    same_starts: bool
    """Whether the jobs started in the same order. Jobs that one round starts are ordered as in the round."""
    same_placements: bool
    """Whether each job had the same sequence of GPU types and counts."""

    def within(self, share: float) -> bool:
        """Whether average and makespan differ by at most `share`."""
        return abs(self.average_jct) <= share and abs(self.makespan) <= share


def compare(real: History, simulated: History, real_order: Sequence[str], simulated_order: Sequence[str]) -> Difference:
    """Compare two histories. Raises PenstockError if jobs of either have not ended."""
    shares = []
    for of in ("average_jct_s", "makespan_s", "longest_jct_s"):
        values = [getattr(each, of) for each in (simulated, real)]
        if values[0] is None or values[1] is None:
            raise PenstockError("not all jobs ended, so the histories cannot be compared")
        shares.append(values[0] / values[1] - 1)
    average, makespan, longest = shares
    same = list(real_order) == list(simulated_order)
    return Difference(average, makespan, longest, same, configurations(real) == configurations(simulated))


def configurations(history: History) -> dict[str, list[str]]:
    """By the job's name: the configurations on which it ran, in order."""
    return {
        job.name: [f"{span.gpus} {span.gpu_type} on {len(span.gpu_ids)}" for span in job.spans] for job in history.jobs
    }


def order_by_plan(rounds: Iterable[RoundRecord]) -> list[str]:
    """Every new placement of a job as `job: placement`, in the order of the rounds."""
    order: list[str] = []
    before: dict[str, str] = {}
    for record in rounds:
        names = {job.id: job.name for job in record.snapshot.jobs}
        now = {
            names[job_id]: str(each.placement) for job_id, each in record.plan.assignments.items() if job_id in names
        }
        order += [f"{name}: {where}" for name, where in sorted(now.items()) if before.get(name) != where]
        before = now
    return order


def order_by_start(history: History) -> list[str]:
    """The jobs' names in the order of their first starts. Jobs that start within `AT_ONCE_S` of another are sorted by name."""
    started = sorted((job.start_s, job.name) for job in history.jobs if job.start_s is not None)
    groups: list[list[str]] = []
    last_s = -math.inf
    for start_s, name in started:
        if start_s - last_s >= AT_ONCE_S:
            groups.append([])
        groups[-1].append(name)
        last_s = start_s
    return [name for group in groups for name in sorted(group)]


def _rounds(store: SqlStore) -> list[RoundRecord]:
    return [store.round(number) for number in store.round_numbers()]
