"""How much work decisions are, in calls of functions: unlike seconds, the same on quiet and on loaded machines.

Speed was lost twice without a word, because what came anew was measured on small rounds alone. A test here fails where a change
makes more than 5 % more calls. If the change is worth them, measure it with `benchmarks/scale.py` and `benchmarks/windows.py`
beside the commit before, write the figures into docs/measurements/solver.md, and set the number anew. The numbers are those of
Python 3.11; later releases make fewer calls for the same work.
"""

from __future__ import annotations

import cProfile
import dataclasses
import os
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from benchmarks import scale
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.simulator.cluster import nodes_from_spec
from penstock_scheduler.simulator.profiles import Profiles
from penstock_scheduler.simulator.run import prepare, simulate_policy
from penstock_scheduler.simulator.workloads import read_workload

DATA = os.environ.get("PENSTOCK_TEST_DATA")
MORE = 1.05

JOBS = 2_000
CALLS = {"first": 838_250, "next": 409_626, "steady": 215_049}
"""Of `decide()` for 2,000 jobs on 4,288 GPUs; see `benchmarks/scale.py`."""

WINDOW_CALLS = 1_826_132
"""Of a simulation of the first 40 jobs of Sia's window philly-2."""

Made = TypeVar("Made")


def counted(work: Callable[[], Made]) -> tuple[Made, int]:
    profile = cProfile.Profile()
    made = profile.runcall(work)
    return made, int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_decisions_are_no_more_work_than_they_were():
    state, policy, found = scale.generate(JOBS), make_policy("sia")[0], {}
    for name, changed in (("first", 0), ("next", 0), ("steady", JOBS // 100)):
        state = scale.with_new_models(state, changed)
        plan, found[name] = counted(lambda: policy.decide(state))  # noqa: B023  # it is called at once
        state = scale.carried_out(state, plan)
    assert all(calls <= MORE * CALLS[name] for name, calls in found.items()), f"{found}, and before {CALLS}"


@pytest.mark.skipif(not DATA, reason="PENSTOCK_TEST_DATA names no folder with Sia's windows (docs/developer/data.md)")
def test_a_window_is_no_more_work_than_it_was():
    folder = Path(str(DATA)) / "sia"
    whole = read_workload(folder / "workloads" / "philly" / "workload-2.csv")
    window = dataclasses.replace(whole, jobs=whole.jobs[:40])
    scenario = prepare(nodes_from_spec("t4:6x4,rtx:3x8,a100:2x8"), window, Profiles(folder / "profiles"))
    _, calls = counted(lambda: simulate_policy(scenario, "sia"))
    assert calls <= MORE * WINDOW_CALLS, f"{calls}, and before {WINDOW_CALLS}"
