"""The experiment of Gandiva's authors: a search finds the good trial sooner by early results."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from benchmarks.replays.trial_searches import (
    Configuration,
    by_early_results,
    by_policy,
    configurations,
    run_to_completion,
)

from penstock_scheduler.rounds.sharing.groups import GroupSettings


def begun(trials: Sequence[Configuration], gpus: int, by_s: float) -> int:
    """Number of configurations that have begun to train by then, if run to completion."""
    return gpus * math.ceil(by_s / trials[0].training_s)


@pytest.mark.parametrize("gpus", [4, 16])
@pytest.mark.parametrize("at", [0.25, 0.5, 0.75])
def test_a_search_finds_the_good_one_sooner_by_early_results_and_tries_more(gpus: int, at: float) -> None:
    ratios, tried = [], []
    for seed in range(3):
        trials = configurations(100, at, random.Random(seed))
        slow, soon = run_to_completion(trials, gpus), by_early_results(trials, gpus, GroupSettings())
        assert math.isfinite(soon.found_s)
        ratios.append(slow.found_s / soon.found_s)
        tried.append(soon.seen / begun(trials, gpus, soon.found_s))
    assert sum(ratios) / 3 > 2.5
    assert sum(tried) / 3 > 4


@pytest.mark.parametrize("at", [0.25, 0.5])
def test_the_policy_in_the_round_loop_finds_it_sooner_and_tries_more(at: float) -> None:
    """With time slices, starts and rounds, as on a cluster. Without early results, time slices would try twice as many."""
    trials = configurations(100, at, random.Random(0))
    slow, soon = run_to_completion(trials, 4), by_policy(trials, 4)
    assert slow.found_s / soon.found_s > 2.5
    assert soon.seen / begun(trials, 4, soon.found_s) > 4
