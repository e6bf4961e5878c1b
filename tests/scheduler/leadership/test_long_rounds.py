"""A round that takes longer than the lease: its leader keeps the lead meanwhile, and yet gives it up at once when asked to.

Each penstockd is a real one on the simulated cluster. Its policy solves an integer program that takes long, in the solver's own
code and then in Python.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from penstock_scheduler.daemon import penstockd as daemon
from penstock_scheduler.store.leadership.lease import boot_s
from penstock_scheduler.store.sql import open_store
from tests.forking import FORKING

LEASE_S = 4.0
SOLVER_S = 1.5 * LEASE_S
PYTHON_S = 0.25 * LEASE_S


def solve_for(seconds: float) -> None:
    """HiGHS at work on a program that it does not solve in this time."""
    import highspy

    rng, columns, rows = np.random.default_rng(0), 200, 60
    weights = rng.integers(1, 100, (rows, columns)).astype(float)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = -rng.integers(1, 100, columns).astype(float)
    lp.col_lower_, lp.col_upper_ = np.zeros(columns), np.ones(columns)
    lp.row_lower_, lp.row_upper_ = np.full(rows, -highspy.kHighsInf), weights.sum(axis=1) // 2
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = (np.arange(columns + 1) * rows).astype(np.int32)
    lp.a_matrix_.index_ = np.tile(np.arange(rows), columns).astype(np.int32)
    lp.a_matrix_.value_ = weights.T.ravel()
    lp.integrality_ = [highspy.HighsVarType.kInteger] * columns
    highs = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("time_limit", seconds)):
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    begun_s = boot_s()
    highs.run()
    assert boot_s() - begun_s > 0.8 * seconds, "the program is too easy"


class Slow:
    """The policy, but the next round takes long if there is a file `slow`, and as long as there is a file `hold`."""

    def __init__(self, policy, folder: Path) -> None:
        self._policy, self._folder = policy, folder
        self.name = policy.name

    def decide(self, snapshot):
        if (slow := self._folder / "slow").exists():
            slow.rename(self._folder / f"deciding {snapshot.round}")
            solve_for(SOLVER_S)
            until_s = boot_s() + PYTHON_S
            while boot_s() < until_s or (self._folder / "hold").exists():
                sorted(range(1000))
            (self._folder / "decided").touch()
        return self._policy.decide(snapshot)


def penstockd(name: str, folder: Path, url: str) -> None:
    make_decider = daemon.make_decider

    def slow(choice, agents):
        policy, full = make_decider(choice, agents)
        return Slow(policy, folder), full

    daemon.make_decider = slow
    config = folder / f"{name}.toml"
    config.write_text(
        f'[daemon]\ncluster = "simulated"\nstore = "{url}"\nname = "{name}"\nlease_s = {LEASE_S}\n'
        f'round_s = 0.2\ntick_s = 0.1\nstate_dir = "{folder}/{name}"\n[api]\nsocket = "{folder}/{name}.sock"\n'
    )
    with (folder / f"{name}.log").open("w", buffering=1) as log:
        sys.stderr = log
        sys.exit(daemon.main(["--config", str(config)]))


def wait_for(what, seconds: float = 120.0) -> None:
    until_s = boot_s() + seconds
    while not what():
        assert boot_s() < until_s, "it takes too long"
        time.sleep(0.05)


@pytest.fixture
def two(database, tmp_path):
    """Starts a penstockd; all are ended afterwards."""
    started = []

    def start(name: str):
        process = FORKING.Process(target=penstockd, args=(name, tmp_path, database))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_round_may_take_longer_than_the_lease_and_a_handover_does_not_wait_for_it(two, database, tmp_path):
    first = two("first")
    engine = sa.create_engine(database)

    def ask(query: str):
        with engine.connect() as db:
            return db.execute(sa.text(query)).all()

    log = tmp_path / "first.log"
    wait_for(lambda: log.exists() and "event=started" in log.read_text())
    two("second")
    wait_for(lambda: ask("SELECT name FROM standbys") == [("second",)])

    (tmp_path / "slow").touch()
    wait_for((tmp_path / "decided").exists)
    number = int(next(tmp_path.glob("deciding *")).name.split()[1])
    wait_for(lambda: (open_store(database).round_numbers() or [0])[-1] >= number)
    assert ask("SELECT number, holder FROM leadership") == [(1, "first")], "the term went on during the round"
    assert "not confirmed" not in log.read_text()

    for old in ("decided", f"deciding {number}"):
        (tmp_path / old).unlink()
    (tmp_path / "hold").touch()
    (tmp_path / "slow").touch()
    wait_for(lambda: any(tmp_path.glob("deciding *")))
    given_up = int(next(tmp_path.glob("deciding *")).name.split()[1])
    first.terminate()
    wait_for(lambda: ask("SELECT number, holder FROM leadership") == [(2, "second")])
    assert not (tmp_path / "decided").exists(), "the other one leads while this one still decides"
    wait_for(lambda: (open_store(database).round_numbers() or [0])[-1] >= given_up)
    assert not (tmp_path / "decided").exists(), "the other one has decided this round meanwhile"
    written = ask(f"SELECT round, time_s FROM rounds WHERE round = {given_up}")
    (tmp_path / "hold").unlink()
    first.join(60)
    assert first.exitcode == 0
    assert (tmp_path / "decided").exists()
    assert ask(f"SELECT round, time_s FROM rounds WHERE round = {given_up}") == written
    assert "please report this as a bug" not in log.read_text()
    engine.dispose()
