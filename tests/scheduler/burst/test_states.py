"""The table of a run's states: every way through it is one that costs no money for ever and stops no job without a reason."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.burst.deciding.states import STATES, TABLE, Fact, State, step

ORDER: tuple[State, ...] = ("ordered", "booting", "running", "leaving", "ending", "over")

facts = st.sets(st.sampled_from(Fact))


def walk(state: State, passes: list[set[Fact]]) -> list[State]:
    """The states of a run in which these facts hold in one pass after another."""
    seen = [state]
    for holds in passes:
        taken = step(seen[-1], lambda fact, holds=holds: str(fact) if fact in holds else "")  # type: ignore[misc]
        if taken is not None:
            seen.append(taken[0].to)
    return seen


@given(st.lists(facts, max_size=30))
def test_a_run_never_goes_back_and_over_is_the_end(passes: list[set[Fact]]) -> None:
    """So a run is launched once, and what is paid for stays paid for."""
    seen = walk("ordered", passes)
    places = [ORDER.index(state) for state in seen]
    assert places == sorted(set(places))


@given(st.sampled_from(ORDER), st.lists(facts, max_size=30))
def test_every_run_is_over_once_its_job_has_ended_and_all_is_gone(state: State, passes: list[set[Fact]]) -> None:
    """Whatever has happened before: no state keeps instances of a job that is not there."""
    before = walk(state, passes)[-1]
    end = {Fact.JOB_GONE, Fact.HAS_LEFT, Fact.ALL_GONE}
    assert walk(before, [end] * len(ORDER))[-1] == "over"


@given(st.sampled_from(ORDER[:-1]), facts)
def test_instances_are_let_go_of_only_after_the_provider_has_said_that_they_are_gone(
    state: State, holds: set[Fact]
) -> None:
    taken = step(state, lambda fact: str(fact) if fact in holds else "")
    if taken is not None and taken[0].to == "over":
        assert state == "ending"
        assert taken[0].fact is Fact.ALL_GONE


def test_a_running_job_is_ended_without_being_asked_only_where_it_does_not_run_any_more() -> None:
    """What takes a job that runs to `ending` at once is that it, its nodes or its instance are gone already."""
    at_once = {row.fact for row in TABLE if row.state == "running" and row.to == "ending"}
    assert at_once == {Fact.SUSPENDED, Fact.JOB_GONE, Fact.INSTANCE_LOST, Fact.REQUEUED}


def test_each_row_can_be_reached_and_each_state_is_described() -> None:
    assert set(STATES) == set(get_args(State)) == {row.state for row in TABLE} | {"over"}
    rows = [(row.state, row.fact) for row in TABLE]
    assert len(rows) == len(set(rows)), "a second row of the same state and fact is never taken"
    assert {row.fact for row in TABLE} == set(Fact)
    for row in TABLE:
        assert step(row.state, lambda fact, row=row: "so" if fact is row.fact else "") == (row, "so")  # type: ignore[misc]


def test_no_fact_is_asked_for_after_the_first_that_holds() -> None:
    """Asking may cost a call to a provider."""
    asked: list[Fact] = []

    def why(fact: Fact) -> str:
        asked.append(fact)
        return "so" if fact is Fact.JOB_GONE else ""

    taken = step("running", why)
    assert taken is not None
    assert asked == [Fact.SUSPENDED, Fact.RECALLED, Fact.JOB_GONE]
