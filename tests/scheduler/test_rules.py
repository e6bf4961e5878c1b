"""Drains, budgets and rules of partitions: what becomes of a round under them."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from penstock_profiles.estimators import LinearEstimator
from penstock_scheduler.accounts.limits import LimitSettings, by_partition
from penstock_scheduler.accounts.rules import Budget, BudgetSettings, SchedulingRules, drained, period_bounds
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.api.messages import Drain
from penstock_scheduler.model import (
    CloudRun,
    CloudState,
    GpuBudget,
    GpuLimit,
    JobFacts,
    Offer,
    Phase,
    ReasonCode,
    Snapshot,
    StopCode,
)
from penstock_scheduler.model.records import RoundRecord, dump_round, load_round
from penstock_scheduler.rounds.explain import explain, words
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.policies.staying import CANNOT_SAVE
from penstock_scheduler.store.cloud_runs import CloudRunRow
from penstock_scheduler.store.sql import open_store
from tests.scheduler.builders import job, on, snapshot

NOW_S = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()
MATHS = BudgetSettings(accounts={"maths": Budget(soft_gpu_hours=2.0, hard_gpu_hours=3.0)})


def running(job_id: str, **fields: object):
    return job(job_id, phase=Phase.RUNNING, allocation=on("t4", t4_00=2), **({"max_gpus": 2} | fields))


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path, writer=True)
    yield store
    store.close()


def used(store, hours: float, *, account: str = "maths", kind: str = "gpu-seconds", time_s: float = NOW_S - 60) -> None:
    amount = hours * 3600 if kind == "gpu-seconds" else hours
    key = f"{account} {kind} {hours} {time_s}"
    line = LedgerLine(
        id=0, key=key, time_s=time_s, account=account, user="ada", job="9", kind=kind, amount=amount, text="t4"
    )
    store.charge([line])


def rules(store, settings: BudgetSettings, told: list | None = None) -> SchedulingRules:
    heard = [] if told is None else told
    return SchedulingRules(settings, LimitSettings(), store, lambda view, limit: heard.append((view.account, limit)))


def seen(*jobs, nodes: str = "t4:1x8", **fields: object) -> Snapshot:
    return snapshot(nodes, list(jobs), time_s=NOW_S, **fields)


@pytest.mark.parametrize(
    ("period", "begin", "end"),
    [
        ("day", (2026, 11, 18), (2026, 11, 19)),
        ("week", (2026, 11, 16), (2026, 11, 23)),
        ("month", (2026, 11, 1), (2026, 12, 1)),
        ("year", (2026, 1, 1), (2027, 1, 1)),
    ],
)
def test_periods_are_those_of_the_calendar_in_utc(period, begin, end):
    expected = tuple(datetime(*day, tzinfo=UTC).timestamp() for day in (begin, end))
    assert period_bounds(period, NOW_S) == expected
    assert period_bounds(period, expected[0]) == expected, "a period begins at its first second"
    assert period_bounds("total", NOW_S) == (0.0, None)


def test_used_is_what_ended_in_the_period_and_what_runs(store):
    """1.5 h of ended jobs, 2 GPUs x 900 s = 0.5 h of one that runs: the soft limit of 2 h is reached, not the hard one of 3."""
    used(store, 1.5)
    used(store, 100.0, time_s=datetime(2026, 10, 31, tzinfo=UTC).timestamp())
    used(store, 100.0, account="arts")
    told: list = []
    site = rules(store, MATHS, told)
    state = site.on(seen(running("1", account="maths"), attained={"1": {"t4": 1800.0}}))
    (line,) = state.budgets
    assert (line.account, line.used_h, line.over_soft, line.over_hard) == ("maths", 2.0, True, False)
    assert site.budgets[0].used_gpu_hours == 2.0
    assert told == [("maths", "soft")]
    site.on(state)
    assert told == [("maths", "soft")], "once, not each round"
    assert rules(store, MATHS, told).on(state).budgets == (line,)
    assert told == [("maths", "soft")], "nor after a restart"


@pytest.mark.parametrize("policy_name", sorted(REGISTRY))
def test_over_the_hard_limit_nothing_starts_and_what_runs_goes_on(policy_name):
    over = GpuBudget("maths", "month", None, 3.0, 3.0)
    state = seen(running("1", account="maths"), job("2", account="maths", max_gpus=1), job("3", max_gpus=1))
    policy, _ = make_policy(policy_name)
    assert policy.decide(state).chosen["2"].gpus == 1
    plan = policy.decide(dataclasses.replace(state, budgets=(over,)))
    assert plan.chosen["1"].gpus == 2
    assert plan.chosen["3"].gpus == 1, "others go on"
    assert plan.waiting["2"].code is ReasonCode.GPU_BUDGET
    assert "the budget of account maths: 3.0 of 3 (hard) GPU-hours used this month" in plan.waiting["2"].text


def test_over_the_hard_limit_nothing_grows():
    over = GpuBudget("maths", "month", None, 3.0, 3.0)
    state = seen(running("1", account="maths", max_gpus=8))
    policy, _ = make_policy("sia")
    assert policy.decide(state).chosen["1"].gpus == 8
    assert policy.decide(dataclasses.replace(state, budgets=(over,))).chosen["1"].gpus == 2


def test_over_the_hard_limit_what_runs_in_the_cloud_leaves_no_room_here():
    """One job holds 2 GPUs here, another 4 in the cloud: the first may not grow by those 4."""
    over = GpuBudget("maths", "month", None, 3.0, 3.0)
    there = job("2", account="maths", phase=Phase.RUNNING, allocation=on("a10g", cloud_0=4), max_gpus=4)
    run = CloudRun("2", Offer("g5.12xlarge", "a10g", 1, 4, 5.0, 1), 0.0, 5.0, "maths")
    state = dataclasses.replace(seen(running("1", account="maths", max_gpus=8), there), cloud=CloudState(runs=(run,)))
    policy, _ = make_policy("sia")
    assert policy.decide(state).chosen["1"].gpus == 8
    assert policy.decide(dataclasses.replace(state, budgets=(over,))).chosen["1"].gpus == 2


def test_what_runs_leaves_only_when_the_grace_is_over_and_never_if_it_may_not_be_stopped(store):
    used(store, 4.0)
    settings = MATHS.model_copy(update={"at_hard": "stop", "grace_s": 600.0})
    jobs = running("1", account="maths"), running("2", account="maths", preemptible=False), running("3", account="arts")
    site = rules(store, settings)
    policy, _ = make_policy("sia")
    first = site.on(seen(*jobs, nodes="t4:1x8"))
    assert {"1", "2", "3"} <= set(policy.decide(first).chosen)
    before = dataclasses.replace(first, time_s=NOW_S + 599, budgets=())
    assert "1" in policy.decide(site.on(before)).chosen
    site = rules(store, settings)  # a daemon that was started anew knows since when
    after = site.on(dataclasses.replace(first, time_s=NOW_S + 600, budgets=()))
    plan = policy.decide(after)
    assert set(plan.chosen) == {"2", "3"}
    assert "the grace for what ran is over" in plan.waiting["1"].text
    finish = rules(store, MATHS.model_copy(update={"grace_s": 0.0}))
    assert "1" in policy.decide(finish.on(dataclasses.replace(first, budgets=()))).chosen, "the default lets it finish"


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    "rule",
    [
        {"budgets": (GpuBudget("maths", "month", None, 3.0, 3.0, stops=True),)},
        {"limits": (GpuLimit("account", "maths", 0),)},
    ],
    ids=["budget", "limit"],
)
@pytest.mark.parametrize("policy", ["sia", "fifo", "srtf", "gandiva"])
def test_no_budget_or_limit_stops_a_job_that_would_lose_all_its_work(policy, rule, saves):
    state = seen(running("1", account="maths"))
    facts = {name: dataclasses.replace(each, saves=saves) for name, each in state.facts.items()}
    state = dataclasses.replace(state, facts=facts, **rule)
    made, choice = make_policy(policy)
    plan = made.decide(state)
    said = explain(RoundRecord(state, choice, plan), "1", remedies=0)
    assert said is not None
    warned = "3.0 of 3 (hard) GPU-hours used this month; it gets no more GPUs, and once it has saved, it leaves those"
    assert (warned in " ".join(words(said, now_s=NOW_S))) == ("budgets" in rule and not saves)
    if saves:  # a queue stops no running job to keep to a limit
        assert plan.stops["1"].code is StopCode.LIMIT if policy == "sia" or "budgets" in rule else not plan.stops
    else:
        assert plan.stops == {}
        assert plan.chosen["1"].gpus == 2
        assert CANNOT_SAVE in plan.assignments["1"].reason.text


def test_over_the_soft_limit_others_go_first():
    """One GPU, two like jobs: that of the account over its soft limit waits, whichever came first."""
    over = GpuBudget("maths", "month", 1.0, None, 1.5, None, 0.1)
    for account in ("maths", "arts"):
        other = {"maths": "arts", "arts": "maths"}[account]
        state = seen(job("1", account=account, min_gpus=1), job("2", account=other, min_gpus=1), nodes="t4:1x1")
        plan = make_policy("sia")[0].decide(dataclasses.replace(state, budgets=(over,)))
        assert set(plan.waiting) == {"1" if account == "maths" else "2"}


def test_explain_says_so_and_a_saved_round_too():
    over = GpuBudget("", "month", None, 3.0, 5.0)
    state = dataclasses.replace(seen(job("2", account="maths", max_gpus=1)), budgets=(over,))
    policy, choice = make_policy("sia")
    record = load_round(dump_round(RoundRecord(state, choice, policy.decide(state))), "here")
    assert policy.decide(record.snapshot).waiting == record.plan.waiting
    said = explain(record, "2")
    assert said is not None
    text = " ".join(words(said, now_s=NOW_S))
    assert "the budget of the site: 5.0 of 3 (hard) GPU-hours used this month" in text
    assert "nothing of it starts" in text


def test_dollars_are_a_line_of_the_clouds_budget(store):
    used(store, 40.0, kind="usd")
    settings = BudgetSettings(per_account=Budget(hard_usd=50.0, period="week"))
    state = dataclasses.replace(seen(job("1", account="maths")), cloud=CloudState())
    cloud = rules(store, settings).on(state).cloud
    assert cloud is not None
    (line,) = cloud.budgets
    assert (line.account, line.period, line.left_usd) == ("maths", "week", 10.0)


def test_a_run_counts_at_what_is_committed_to_it_until_it_is_paid_for(store):
    def entry(kind: str, usd: float) -> LedgerLine:
        key = f"cloud:9.1:{kind}"
        return LedgerLine(
            id=0, key=key, time_s=NOW_S, account="maths", user="ada", job="9", kind=kind, amount=usd, text=""
        )

    def left() -> dict[str, float]:
        settings = BudgetSettings(site=Budget(hard_usd=50.0), per_account=Budget(hard_usd=40.0))
        jobs = job("1", account="maths"), job("2", account="arts")
        cloud = rules(store, settings).on(dataclasses.replace(seen(*jobs), cloud=CloudState())).cloud
        assert cloud is not None
        return {line.account: line.left_usd for line in cloud.budgets if not line.from_h}

    def now(account: str) -> dict[str, float]:
        return {line.account: line.left_usd for line in site.dollars(account, NOW_S) if not line.from_h}

    site = rules(store, BudgetSettings(site=Budget(hard_usd=50.0), per_account=Budget(hard_usd=40.0)))
    site.on(dataclasses.replace(seen(job("1", account="maths")), cloud=CloudState()))
    assert now("maths") == {"": 50.0, "maths": 40.0}
    store.save_cloud_run(CloudRunRow("9.1", "9", "ordered", NOW_S, None, "{}"), [entry("committed", 30.0)])
    # No round has seen that since, and what is ordered goes by it all the same.
    assert now("maths") == {"": 20.0, "maths": 10.0}
    assert now("arts") == {"": 20.0, "arts": 40.0}
    assert rules(store, BudgetSettings()).dollars("maths", NOW_S) == ()
    assert left() == {"": 20.0, "maths": 10.0, "arts": 40.0}
    store.save_cloud_run(CloudRunRow("9.1", "9", "over", NOW_S, NOW_S, "{}"), [entry("usd", 5.0)])
    assert left() == {"": 45.0, "maths": 35.0, "arts": 40.0}


@pytest.mark.parametrize(("kind", "name"), [("node", "t4-00"), ("gpu-type", "t4"), ("partition", "all")])
def test_adaptive_jobs_leave_what_is_drained(store, kind, name):
    site = rules(store, BudgetSettings())
    site.drain(Drain(kind=kind, name=name, why="a fan", by="oz", since_s=1.0))
    again = rules(store, BudgetSettings())
    assert again.drains == site.drains, "also after a restart"
    jobs = running("1"), running("2", preemptible=False)
    nodes = snapshot("t4:1x8,rtx:1x8", []).nodes
    if kind == "partition":
        nodes = (nodes[0], dataclasses.replace(nodes[1], partitions=("other",)))
        jobs = tuple(dataclasses.replace(each, partitions=("all", "other")) for each in jobs)
    state = again.on(dataclasses.replace(seen(*jobs), nodes=nodes))
    plan = make_policy("sia")[0].decide(state)
    assert plan.chosen["1"].gpu_type == "rtx"
    assert plan.chosen["2"].gpu_type == "t4", "what may not be moved stays until it ends"
    assert again.end_drain((kind, name))
    assert not again.end_drain((kind, name))
    assert again.on(dataclasses.replace(seen(*jobs), nodes=nodes)).nodes == nodes


@pytest.mark.parametrize("policy", sorted(REGISTRY))
def test_the_policy_decides_which_jobs_leave_drained_nodes(policy):
    """As docs/admin/operations.md says: three policies move jobs away, queues let them stay and give nothing more of it."""
    first, second = snapshot("t4:2x8", []).nodes
    state = seen(running("1"), job("2", max_gpus=2))
    drain = Drain(kind="node", name="t4-00", why="a fan", by="oz", since_s=1.0)
    plan = make_policy(policy)[0].decide(dataclasses.replace(state, nodes=(drained(first, [drain]), second)))
    moves = policy in ("sia", "pollux", "gavel")
    assert plan.assignments["1"].placement.nodes == (("t4-01",) if moves else ("t4-00",))
    assert plan.assignments["2"].placement.nodes == ("t4-01",)


def test_a_partition_has_rules_of_its_own():
    limits = LimitSettings.model_validate(
        {"partitions": {"debug": {"weight": 2.0, "max_gpus": 4, "preemptible": False, "restart_cost_s": 5.0}}}
    )
    mine = job("1", partitions=("debug", "all"), max_gpus=16, min_gpus=2, weight=1.5)
    large = job("2", partitions=("debug",), max_gpus=16, min_gpus=8, restart_cost_s=9.0)
    other = job("3", partitions=("all", "debug"))  # every job may run in all managed partitions
    facts = {name: JobFacts(LinearEstimator(), 30.0) for name in "123"}
    jobs, facts = by_partition(limits.partitions, [mine, large, other], facts)
    assert (jobs[0].weight, jobs[0].spec.max_gpus, jobs[0].spec.preemptible) == (3.0, 4, False)
    assert jobs[1].spec.max_gpus == 8, "never below its own least"
    assert jobs[2] is other
    assert {name: known.restart_cost_s for name, known in facts.items()} == {"1": 5.0, "2": 30.0, "3": 30.0}


def test_a_soft_limit_is_at_most_the_hard_limit():
    with pytest.raises(ValueError, match="soft_gpu_hours=3 is above hard_gpu_hours=2"):
        Budget(soft_gpu_hours=3.0, hard_gpu_hours=2.0)
    for allowed in ({"soft_usd": 2.0, "hard_usd": 2.0}, {"soft_usd": 2.0}, {"hard_usd": 2.0}):
        assert Budget.model_validate(allowed).model_dump(exclude_none=True) == {"period": "month"} | allowed
