"""The programs that share out CPU and memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.rounds.solver import Limits, SolveFailed
from penstock_scheduler.rounds.solver.shares import Choice, ValuedShare, choose_shares, spread


def test_shares_go_where_they_add_up_to_most():
    """12 CPUs: two images (3 CPUs: 1, 9 CPUs: 3) and a language model (3 CPUs: 1, 1 CPU: 1): 9 + 1 + ... leaves 2 < 3.

    With the language model on 1 CPU and one image on 9, the other image has 2 of the 3 that it needs: no. So 3 + 3 + 3.
    With 13 CPUs it is 9 + 3 + 1, worth 3 + 1 + 1.
    """
    image = Choice((ValuedShare(3, 10, 1.0), ValuedShare(9, 10, 3.0)))
    language = Choice((ValuedShare(3, 10, 1.0), ValuedShare(1, 10, 1.0)))
    assert choose_shares([image, image, language], 12, 100).report.objective == 3
    shares = choose_shares([image, image, language], 13, 100)
    assert shares.report.objective == 5
    assert shares.option_J == (1, 0, 1), "of jobs that are alike, the first gets more"


def test_memory_binds_too():
    choice = Choice((ValuedShare(1, 10, 1.0), ValuedShare(1, 30, 2.0)))
    assert choose_shares([choice, choice], 10, 59).report.objective == 3
    assert choose_shares([choice, choice], 10, 60).report.objective == 4


def test_what_does_not_fit_at_all_is_said():
    with pytest.raises(SolveFailed, match="do not fit"):
        choose_shares([Choice((ValuedShare(3, 1, 1.0),))], 2, 100)


options = st.builds(ValuedShare, st.integers(1, 9), st.integers(1, 9), st.sampled_from([1.0, 1.5, 2.0, 2.94]))
choices = st.lists(options, min_size=1, max_size=4).map(lambda found: Choice(tuple(dict.fromkeys(found))))


@settings(max_examples=40)
@given(st.lists(choices, min_size=1, max_size=4), st.integers(0, 12), st.integers(0, 12))
def test_it_finds_what_trying_all_finds(given_choices: list[Choice], more_cpus: int, more_memory: int):
    cpus = sum(choice.options[0].cpus for choice in given_choices) + more_cpus
    memory = sum(choice.options[0].memory_mb for choice in given_choices) + more_memory
    best = max(
        sum(option.value for option in taken)
        for taken in itertools.product(*(choice.options for choice in given_choices))
        if sum(option.cpus for option in taken) <= cpus and sum(option.memory_mb for option in taken) <= memory
    )
    shares = choose_shares(given_choices, cpus, memory, Limits(gap=0.0))
    assert shares.report.objective == pytest.approx(best)
    assert shares.report.bound >= best - 1e-9


def test_without_time_the_incumbent_stands():
    rng = np.random.default_rng(1)
    many = [
        Choice(
            (
                ValuedShare(3, 3, 1.0),
                *(ValuedShare(int(c), int(m), float(v)) for c, m, v in rng.uniform(1, 20, (30, 3))),
            )
        )
        for _ in range(200)
    ]
    shares = choose_shares(many, 700, 700, Limits(seconds=1e-9))
    assert shares.report.status is SolveStatus.TIME_LIMIT
    assert shares.report.objective >= 200
    assert shares.report.bound > shares.report.objective


def test_jobs_are_spread_over_nodes():
    """Three jobs of 4 CPUs on two nodes of 6: one has to be cut."""
    part_SJ = spread(np.array([[1.0, 4.0, 1.0]] * 3), np.array([[8.0, 6.0, 8.0]] * 2))
    assert part_SJ is not None
    assert part_SJ.sum(axis=0) == pytest.approx([1, 1, 1])
    assert (part_SJ @ np.array([4.0, 4.0, 4.0]) <= 6 + 1e-6).all()
    assert spread(np.array([[1.0, 13.0, 1.0]]), np.array([[8.0, 6.0, 8.0]] * 2)) is None
