"""A study of Optuna's on a real Slurm: its trials are jobs that train, report, are pruned and end."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]

STUDY = Path(__file__).parents[2] / "examples" / "optuna_search" / "study.py"
TRIALS = 8


@pytest.fixture
def make(make_loopback: MakeLoopback, make_site: Callable[..., Site]) -> Callable[[str], Site]:
    def started(policy: str) -> Site:
        shares = policy == "gandiva"
        slurm = make_loopback("t4:1x4", agents=shares)
        site = make_site(slurm, policy=policy)
        if shares:
            site.spool = slurm.spool
            site.slurm_settings |= {"agents": True}
            site.extra = "\n[policy.gandiva]\nslice_s = 4.0\n[policy.gandiva.groups]\nfirst_s = 2.0\n"
        site.start()
        return site

    return started


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is missing: pip install optuna")
@pytest.mark.parametrize("policy", ["sia", "gandiva"])
def test_a_study_finishes(make: Callable[[str], Site], tmp_path: Path, policy: str) -> None:
    site = make(policy)
    site.wait_round()
    url = f"unix:{site.state / 'api.sock'}"
    words = ["--trials", str(TRIALS), "--at-once=4", "--folder", str(tmp_path), "--partition=all", "--epoch-s=0.15"]
    done = subprocess.run(
        [sys.executable, str(STUDY), *words, f"--storage=sqlite:///{tmp_path}/study.db"],
        env=os.environ | {"PENSTOCK_URL": url},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{site.tail()}"
    *rows, best = done.stdout.splitlines()
    states = {job: state for _, state, job, *_ in (row.split() for row in rows)}
    assert len(states) == TRIALS, "one job for each trial"
    assert set(states.values()) <= {"COMPLETE", "PRUNED"}, done.stdout + done.stderr
    assert float(best.split()[1]) > 0.9, best
    with Client(url) as penstock:
        views = {job: penstock.wait(job, timeout_s=60) for job in states}
        for job, state in states.items():
            view = views[job]
            assert view.spec.trial_group == "moons"
            assert view.ended == ("COMPLETED" if state == "COMPLETE" else "CANCELLED")
            results = [report["body"] for report in penstock.history(job).results]
            assert view.result is not None
            assert view.result.metric == results[-1]["metric"]
            assert len({each["progress"] for each in results}) == 20 if state == "COMPLETE" else len(results) >= 3
            assert view.result.ran_s >= 0.15 * (len(results) - 1)
    if policy == "gandiva":
        store = open_store(site.state)
        kept = [store.round(number).snapshot.sharing for number in store.round_numbers()]
        assert any(use.results for sharing in kept if sharing is not None for use in sharing.uses.values())
