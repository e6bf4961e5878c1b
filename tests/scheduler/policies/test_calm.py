"""The budget of moves: exchanges of GPUs between running jobs cost a share of the running GPU-time at most."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import Assignment, Job, JobId, Phase, Placement, Plan, Reason, ReasonCode, Snapshot
from penstock_scheduler.model.snapshot import MoveBudget, MoveCost
from penstock_scheduler.rounds.policies.calm import HELD_BACK, charged
from penstock_scheduler.rounds.policies.staying import Staying
from tests.scheduler.builders import job, on, snapshot, with_facts

NOW_S = 10_000.0
AN_HOUR_S = 3600.0


class Fixed:
    """Gives the jobs that it sees these placements; a job whose place another one holds keeps its own."""

    name = "fixed"

    def __init__(self, **placements: Placement) -> None:
        self.placements = placements

    def decide(self, snapshot: Snapshot) -> Plan:
        free = {node.name: node.gpus_for_us for node in snapshot.nodes}
        given: dict[JobId, Assignment] = {}
        for each in snapshot.jobs:
            wanted, held = self.placements.get(each.id), each.running_on
            fits = wanted is not None and all(free[share.node] >= share.gpus for share in wanted.shares)
            where = wanted if fits else held
            if where is not None:
                goodput = float(where.gpus)
                given[each.id] = Assignment(where, Reason(ReasonCode.CHOSEN, "as told"), goodput)
                for share in where.shares:
                    free[share.node] -= share.gpus
        waiting = {
            each.id: Reason(ReasonCode.WAITING_CAPACITY, "no GPU") for each in snapshot.jobs if each.id not in given
        }
        return Plan(snapshot.round, given, waiting)


def running(name: str, where: Placement, **fields: object) -> Job:
    return job(name, phase=Phase.RUNNING, allocation=where, **fields)


def site(
    *more: Job, cost_s: float = 30.0, share: float = 0.05, spent_gpu_s: float = 0.0, ago_s: float = 600.0
) -> Snapshot:
    """Two jobs on one node, on 1 and 3 of its 4 GPUs."""
    jobs = [running("a", on("t4", t4_00=1), user="ada"), running("b", on("t4", t4_00=3), user="bob"), *more]
    state = snapshot("t4:2x4", jobs, time_s=NOW_S)
    state = with_facts(state, restart_cost_s=dict.fromkeys([each.id for each in jobs], cost_s))
    spent = (MoveCost(NOW_S - ago_s, spent_gpu_s),) if spent_gpu_s else ()
    return dataclasses.replace(state, moves=MoveBudget(share, spent))


EXCHANGE = Fixed(b=on("t4", t4_00=1), a=on("t4", t4_00=3))
"""`a` gets what `b` had, and costs 4 GPUs x 30 s = 120 GPU-seconds. An hour of the 4 GPUs has 14,400, and 5 % are 720."""


def stops(state: Snapshot, policy: Fixed = EXCHANGE) -> set[JobId]:
    return set(Staying(policy).decide(state).stops)


def test_an_exchange_within_the_budget_is_made_and_counted() -> None:
    state = site()
    plan = Staying(EXCHANGE).decide(state)
    assert set(plan.stops) == {"a", "b"}
    assert charged(state, plan) == (MoveCost(NOW_S, 120.0),)


def test_an_exchange_beyond_the_budget_is_held_back() -> None:
    state = site(spent_gpu_s=601.0)
    plan = Staying(EXCHANGE).decide(state)
    assert not plan.stops
    assert plan.assignments["a"].reason.text == f"keeps 1 t4: {HELD_BACK}"
    assert charged(state, plan) == state.moves.spent  # type: ignore[union-attr]
    assert stops(site(spent_gpu_s=600.0)) == {"a", "b"}
    assert stops(site(spent_gpu_s=601.0, ago_s=AN_HOUR_S)) == {"a", "b"}


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_smaller_share_and_a_dearer_move_are_held_back(share: float) -> None:
    assert not stops(site(share=share, spent_gpu_s=100.0))
    assert not stops(site(cost_s=300.0, spent_gpu_s=1.0))


def test_an_exchange_that_is_dearer_than_an_hour_waits_until_it_is_paid_for() -> None:
    assert stops(site(cost_s=300.0)) == {"a", "b"}
    assert not stops(site(cost_s=300.0, share=0.0))
    state = site(cost_s=300.0)
    after = charged(state, Staying(EXCHANGE).decide(state))
    assert after == (MoveCost(NOW_S, 1200.0),)
    budget = MoveBudget(0.05, after)
    assert budget.counting(NOW_S + 5999.0, 4) == after  # 1,200 GPU-seconds at 5 % of 4 GPUs
    assert not budget.counting(NOW_S + 6000.0, 4)


def test_a_move_to_idle_gpus_is_neither_counted_nor_held_back() -> None:
    grows = Fixed(a=on("t4", t4_01=4))
    state = site(spent_gpu_s=5000.0)
    plan = Staying(grows).decide(state)
    assert set(plan.stops) == {"a"}
    assert charged(state, plan) == state.moves.spent  # type: ignore[union-attr]


def test_room_for_a_job_that_starts_is_made_in_any_case() -> None:
    starts = Fixed(c=on("t4", t4_00=2), b=on("t4", t4_00=1))
    state = site(job("c", user="eve"), spent_gpu_s=5000.0)
    state = dataclasses.replace(state, jobs=(state.jobs[1], state.jobs[0], state.jobs[2]))
    plan = Staying(starts).decide(state)
    assert set(plan.stops) == {"b"}
    assert plan.assignments["c"].placement.gpus == 2
    assert charged(state, plan) == state.moves.spent  # type: ignore[union-attr]


def test_without_a_budget_no_exchange_is_held_back() -> None:
    state = dataclasses.replace(site(spent_gpu_s=5000.0), moves=None)
    assert stops(state) == {"a", "b"}
    assert charged(state, Staying(EXCHANGE).decide(state)) == ()


def test_the_exchange_that_gains_most_for_its_cost_is_made() -> None:
    """Two exchanges of which the budget has room for one: `c` grows by two GPUs, of which `d` gives up one only."""
    jobs = [running("c", on("t4", t4_01=1), user="eve"), running("d", on("t4", t4_01=2), user="dan")]
    state = with_facts(site(*jobs, share=0.006), restart_cost_s={"a": 30.0, "b": 30.0, "c": 20.0, "d": 20.0})
    both = Fixed(**EXCHANGE.placements, d=on("t4", t4_01=1), c=on("t4", t4_01=3))
    assert stops(state, both) == {"c", "d"}


def test_while_moved_jobs_hold_nothing_no_job_is_moved_for_a_gain() -> None:
    """Neither an exchange nor a move to idle GPUs, whatever the budget; room for a job that starts is made nevertheless."""
    lost = dataclasses.replace(site(), no_gain="2 jobs hold no GPUs")
    for policy in (EXCHANGE, Fixed(a=on("t4", t4_01=4))):
        plan = Staying(policy).decide(lost)
        assert not plan.stops
        assert plan.assignments["a"].reason.text == "keeps 1 t4: 2 jobs hold no GPUs"
    starts = Fixed(c=on("t4", t4_00=2), b=on("t4", t4_00=1), a=on("t4", t4_01=4))
    order = (lost.jobs[1], job("c", user="eve"), lost.jobs[0])
    plan = Staying(starts).decide(dataclasses.replace(lost, jobs=order, facts=lost.facts | {"c": lost.facts["a"]}))
    assert set(plan.stops) == {"b"}
    assert plan.assignments["c"].placement.gpus == 2
