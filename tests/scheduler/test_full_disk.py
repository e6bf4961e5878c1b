"""A disk that is full, or a file that is locked, under the round loop: what jobs reported is kept, and what runs is let alone."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from penstock_profiles.families import Families
from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler.api.ports import ClusterParts
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Action, ClusterState, Outcome
from penstock_scheduler.people.errors import RoundFailed, StoreError
from penstock_scheduler.rounds.loop import RoundLoop, RoundTiming
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store import schema
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.scheduler.loops import simulated


class Reporting:
    """The simulated cluster, whose job says something on each tick; what was done to jobs is counted."""

    def __init__(self, cluster) -> None:
        self.cluster, self.said, self.done = cluster, 0, list[Action]()

    def observe(self) -> ClusterState:
        return self.cluster.observe()

    def apply(self, todo: Sequence[Action]) -> tuple[Outcome, ...]:
        self.done += todo
        return self.cluster.apply(todo)

    def reports(self) -> list[Report]:
        self.said += 1
        body = Checkpointed(progress=1.0, seconds=0.1)
        return [Report(job_id="0", epoch=1, sequence=self.said, time_s=1.0, body=body)]


def test_a_full_disk_stops_nothing_and_loses_no_report(small_disk: Path) -> None:
    store = open_store(small_disk, writer=True)
    without_store(store, "full", lambda: _fill(small_disk, store), (small_disk / "filling").unlink)
    store.close()


def test_a_locked_file_stops_nothing_and_loses_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BUSY_S", 0.1)
    store = open_store(tmp_path, writer=True)
    with closing(sqlite3.connect(tmp_path / schema.FILE, isolation_level=None)) as other:
        without_store(store, "locked", lambda: other.execute("BEGIN IMMEDIATE"), other.rollback)
    store.close()


def without_store(store: SqlStore, why: str, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Two jobs run; from `begin` on the store takes nothing, from `end` on it does again."""
    clock = SimulatedClock()
    _, cluster, _ = simulated(2, clock=clock, work=1e6)
    reporting = Reporting(cluster)
    policy, choice = make_policy("sia")
    models = SpecModels(Families(), 30.0)
    parts = ClusterParts(reporting)
    loop = RoundLoop(parts, clock, store, RoundTiming(Period(60.0), 10.0), policy, models, choice)
    for _ in range(30):  # both jobs have come and run
        loop.tick()
        clock.sleep(10.0)
    running = {job.id: job.allocation for job in cluster.observe().jobs}
    assert len(running) == 2
    assert all(running.values())
    before, said = len(reporting.done), reporting.said
    begin()
    for _ in range(20):
        with pytest.raises(RoundFailed, match=why):
            loop.tick()
        clock.sleep(1.0)
    assert len(reporting.done) == before, "no action on a plan that cannot be kept"
    assert {job.id: job.allocation for job in cluster.observe().jobs} == running
    assert reporting.said == said + 20
    end()
    loop.tick()
    kept = [report.sequence for report in store.reports("0")]
    assert kept == list(range(1, reporting.said + 1)), "each once, in order"


def _fill(folder: Path, store: SqlStore) -> None:
    """Fill the disk, to the last page that the database has free."""
    left = os.statvfs(folder)
    (folder / "filling").write_bytes(b"\0" * (left.f_bavail * left.f_bsize - 64 * 1024))
    body = Checkpointed(progress=1.0, seconds=0.1)
    number = 0
    while True:
        try:
            store.add_reports([Report(job_id="other", epoch=1, sequence=number, time_s=1.0, body=body)])
        except StoreError:
            return
        number += 1
