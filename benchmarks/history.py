"""How fast the tables made for reading grow: samples, allocation spans and the queue of 2,000 running and 2,000 waiting jobs.

Writes whole days of made-up observations through the code of the daemon into an SQLite store, as fast as it can, and prints what
each day adds to the file, and the processor time. No wall clock is involved. A run that is longer than --keep-days
shows what thinning out leaves.

    python benchmarks/history.py --jobs 2000 --hours 24
    python benchmarks/history.py --jobs 200 --hours 240 --keep-days 2 --moves 0
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock_profiles.wire import Observation, Report
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.samples import Sampler
from penstock_scheduler.daemon.service.waits import WaitLog
from penstock_scheduler.model import ClusterState, Job, JobSpec, Node, Phase, Placement, Plan, Reason, ReasonCode, Share
from penstock_scheduler.model.plan import Assignment
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.model.snapshot import Snapshot
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.settings import DaemonSettings
from penstock_scheduler.store.sql import SqlStore, open_store

START_S = 1_800_000_000.0
MB = 1e6


def running(number: int, restarts: int, started_s: float) -> Job:
    """A job that has one GPU of a node."""
    held = Placement("a100", "all", (Share(f"n{number // 8:05}", 1),))
    job = Job(
        str(1_000_000 + number), f"train-{number}", f"user{number % 50}", JobSpec(), ("all",), Phase.RUNNING, START_S
    )
    return dataclasses.replace(job, allocation=held, restarts=restarts, started_s=started_s, account="vision")


def observed(rng: np.random.Generator, job: Job, minutes: int) -> Report:
    """What such a job reports."""
    body = Observation(
        gpu_type="a100",
        nodes=1,
        gpus=1,
        atomic_batch=128,
        steps=100,
        step_time_s=float(rng.uniform(0.1, 0.3)),
        progress=minutes * 38_400.0 * float(rng.uniform(0.99, 1.01)),
        goodput=float(rng.uniform(500.0, 700.0)),
        utilisation=float(rng.uniform(0.6, 1.0)),
        device_memory_mb=float(rng.integers(20_000, 40_000)),
    )
    return Report(job_id=job.id, epoch=1, sequence=minutes, time_s=START_S, body=body)


def main() -> None:
    """Write the hours and print the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000, help="running jobs, and as many that wait")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--moves", type=int, default=4, help="moves of each job in a day")
    parser.add_argument("--keep-days", type=float, default=7.0)
    parser.add_argument("--every", type=int, default=6, help="hours between two lines")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-history-") as folder:
        store = open_store(folder, writer=True)
        with store.write() as db:
            db.exec_driver_sql("SELECT 1")
        _write(store, given)
        store.close()


def _write(store: SqlStore, given: argparse.Namespace) -> None:
    rng = np.random.default_rng(given.seed)
    settings = DaemonSettings(keep_days=2 * given.keep_days).model_copy(update={"keep_samples_days": given.keep_days})
    sampler = Sampler(store, settings)
    spans, waits = AllocationLog(store, None, list), WaitLog(store)
    nodes = tuple(Node(f"n{number:05}", "a100", 8, ("all",)) for number in range((given.jobs + 7) // 8))
    runs = [running(number, 0, START_S) for number in range(given.jobs)]
    queued = tuple(
        dataclasses.replace(job, id=f"2{job.id}", phase=Phase.QUEUED, allocation=None, started_s=None) for job in runs
    )
    kept = Reason(ReasonCode.KEPT, "it keeps what it has")
    policy = make_policy("fifo")[1]
    before, cpu_s = _size(store), time.process_time()
    per_minute = given.jobs * given.moves / 1440
    for minutes in range(given.hours * 60):
        now_s = START_S + 60.0 * minutes
        for number in rng.choice(given.jobs, rng.poisson(per_minute), replace=False) if minutes else ():
            runs[number] = running(number, runs[number].restarts + 1, now_s - 20.0)
        text = f"{given.jobs} jobs have the GPUs until about minute {minutes}"
        full = Reason(ReasonCode.WAITING_CAPACITY, text, "1 GPU", now_s + 3600.0)
        plan = Plan(
            minutes,
            {job.id: Assignment(job.allocation, kept, 600.0) for job in runs if job.allocation is not None},
            {job.id: full for job in queued},
            prices={"a100": 1.5},
        )
        record = RoundRecord(Snapshot(minutes, now_s, nodes, (), {}), policy, plan, {"decide": 0.5})
        state = ClusterState(nodes, (*runs, *queued))
        sampler.take_reports([observed(rng, job, minutes) for job in runs])
        for each in (sampler, spans, waits):
            each.decided(record)
        spans.observed(state, now_s)
        waits.observed(state, now_s)
        sampler.tick(state, now_s)
        for second in range(
            1, 60 if minutes % 60 < 10 else 1
        ):  # the other ticks of the minute, while they have something to do
            sampler.tick(state, now_s + second)
        if (minutes + 1) % (60 * given.every) == 0:
            size, used_s = _size(store), time.process_time() - cpu_s
            print(
                f"{(minutes + 1) // 60:5} h: {size / MB:8.1f} MB (+{(size - before) / MB:.1f}), {used_s:.0f} s of CPU"
            )
            before, cpu_s = size, time.process_time()


def _size(store: SqlStore) -> int:
    """Bytes of the file, without the log of what was written last."""
    with store.engine.connect() as db:
        db.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    return Path(store.name).stat().st_size


if __name__ == "__main__":
    main()
