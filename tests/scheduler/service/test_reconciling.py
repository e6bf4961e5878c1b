"""Jobs whose end nobody saw: what the cluster's accounts say later counts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import pytest

from penstock_scheduler.api.ports import Fate
from penstock_scheduler.daemon import penstockd as daemon
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.board import Board
from penstock_scheduler.daemon.service.reconciling import EVERY_S, Reconciler
from penstock_scheduler.model import ClusterState, EndedRun, Phase
from penstock_scheduler.people.errors import ClusterAway
from penstock_scheduler.rounds.settings import parse_settings
from penstock_scheduler.store.sql import SqlStore, open_store
from tests.scheduler.builders import job, on, snapshot
from tests.scheduler.service.api import MadeUp

NODES = snapshot("t4:2x4", []).nodes
HELD = on("t4", t4_00=2)
RAN = job("1", user="ada", max_gpus=4, phase=Phase.RUNNING, allocation=HELD)


class Accounts:
    """A cluster that has forgotten its jobs, and accounts that answer once `runs` and `fates` are known."""

    def __init__(self, submitter: MadeUp) -> None:
        self.submitter = submitter
        self.runs: list[EndedRun] = []
        self.away = False
        self.asked = 0

    def know(self, fate: Fate, *runs: tuple[float, float], held=HELD) -> None:
        self.submitter.ended["1"] = fate
        self.runs = [EndedRun("1", held, *times) for times in runs]

    def __call__(self, jobs, since_s: float) -> Sequence[EndedRun]:
        return [run for run in self.runs if run.ended_s > since_s]

    def fates(self, jobs) -> dict[str, Fate | None]:
        self.asked += 1
        if self.away:
            raise ClusterAway("slurmdbd does not answer")
        return {name: self.submitter.ended[name] for name in jobs if name in self.submitter.ended}


@pytest.fixture
def store(tmp_path) -> Iterator[SqlStore]:
    opened = open_store(tmp_path / "state", writer=True)
    yield opened
    opened.close()


@pytest.fixture
def accounts(tmp_path, monkeypatch) -> Accounts:
    submitter = MadeUp(tmp_path)
    found = Accounts(submitter)
    monkeypatch.setattr(submitter, "fates", found.fates)
    return found


@pytest.fixture
def reconciler(store, accounts) -> Reconciler:
    """Job 1 was submitted at 0 s, ran from 1,000 s on, and was gone without a trace at 10,000 s: charged 2 x 4,500 s."""
    board = Board(store, accounts.submitter)
    board.observed(ClusterState(NODES, (dataclasses.replace(RAN, submit_s=0.0),)), 1000.0, {})
    board.observed(ClusterState(NODES, ()), 10_000.0, {"1": {"t4": 9000.0}})
    assert (board.job("1").ended, board.job("1").end_s) == ("UNKNOWN", 10_000.0)
    assert "Slurm has forgotten it" in board.job("1").ended_text
    return Reconciler(store, accounts.submitter, accounts, cloud_nodes, AllocationLog(store, None, cloud_nodes))


def cloud_nodes() -> list[str]:
    return ["cloud-0"]


def charges(store: SqlStore) -> list[tuple[float, float]]:
    """(time, amount) of each entry, oldest first."""
    return [(line.time_s, line.amount) for line in reversed(store.ledger(job="1"))]


def test_the_charge_is_corrected_by_an_entry_and_only_once(store, accounts, reconciler):
    accounts.know(Fate("FAILED", 3, 3000.0), (1000.0, 2000.0), (2500.0, 3000.0))
    for hour in range(3):
        reconciler.observed(ClusterState((), ()), 10_000.0 + hour * EVERY_S)
    view = store.job("1")
    assert (view.ended, view.exit_code, view.end_s, view.ended_text) == ("FAILED", 3, 3000.0, "")
    assert view.gpu_seconds == {"t4": 3000.0}
    assert charges(store) == [(10_000.0, 9000.0), (10_000.0, -6000.0)]
    assert accounts.asked == 2  # at the end, and then once


def test_it_asks_every_hour_until_the_accounts_answer(store, accounts, reconciler):
    accounts.away = True
    reconciler.observed(ClusterState((), ()), 10_000.0)
    accounts.away = False
    accounts.know(Fate("COMPLETED", 0, 5500.0), (1000.0, 5500.0))
    reconciler.observed(ClusterState((), ()), 10_000.0 + EVERY_S - 1)
    assert store.job("1").ended == "UNKNOWN"
    reconciler.observed(ClusterState((), ()), 10_000.0 + EVERY_S)
    assert store.job("1").ended == "COMPLETED"
    assert charges(store) == [(10_000.0, 9000.0)]  # the charge was right


@pytest.mark.parametrize(
    ("fate", "runs", "held", "ended"),
    [
        (
            Fate("COMPLETED", 0, -100.0, submit_s=-300.0),
            [(-200.0, -100.0)],
            HELD,
            "UNKNOWN",
        ),  # an earlier job with this id
        (Fate("COMPLETED", 0, 3000.0), [], HELD, "COMPLETED"),  # no run is known
        (Fate("COMPLETED", 0, 3000.0), [(1000.0, 3000.0)], on("", gone=2), "COMPLETED"),  # its node is gone
    ],
)
def test_what_is_not_known_is_not_corrected(store, accounts, reconciler, fate, runs, held, ended):
    accounts.know(fate, *runs, held=held)
    reconciler.observed(ClusterState((), ()), 10_000.0)
    assert store.job("1").ended == ended
    assert "may lack the time" in store.job("1").ended_text
    assert charges(store) == [(10_000.0, 9000.0)]


def test_runs_in_the_cloud_and_of_an_earlier_job_do_not_count(store, accounts, reconciler):
    accounts.know(Fate("COMPLETED", 0, 3000.0), (-500.0, -50.0), (1000.0, 3000.0))
    accounts.runs.append(EndedRun("1", on("a100", cloud_0=8), 4000.0, 5000.0))
    reconciler.observed(ClusterState((), ()), 10_000.0)
    assert store.job("1").gpu_seconds == {"t4": 4000.0}


def test_the_daemons_first_tick_asks_the_accounts(store, accounts, reconciler, tmp_path, monkeypatch):
    """A simulated cluster with a submitter and accounts, as Slurm with slurmdbd has them."""
    now_s = time.time()
    view = store.job("1")
    store.save_jobs([view.model_copy(update={"submit_s": now_s - 9000, "start_s": now_s - 9000, "end_s": now_s - 100})])
    accounts.know(Fate("COMPLETED", 0, now_s - 5000), (now_s - 8000, now_s - 5000))
    opened = daemon.open_cluster
    monkeypatch.setattr(
        daemon,
        "open_cluster",
        lambda *given: dataclasses.replace(opened(*given), submitter=accounts.submitter, accounts=accounts),
    )
    text = f'[daemon]\ncluster = "simulated"\nstate_dir = "{tmp_path}/state"\n[simulated]\nnodes = "t4:1x4"\n'
    site = daemon.make_site(tmp_path / "penstock.toml", parse_settings(text, "text"), WallClock(), store)
    try:
        site.loop.tick()
    finally:
        site.watcher.notifier.stop()
    assert store.job("1").ended == "COMPLETED"
    assert store.job("1").gpu_seconds == {"t4": pytest.approx(6000.0)}
    assert sum(amount for _, amount in charges(store)) == pytest.approx(6000.0)
