"""The cloud beside the policies: compared with the site's GPUs, within budgets, and no job in two places."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_scheduler.model import BudgetLine, CloudRun, CloudState, GpuLimit, Offer, Phase, ReasonCode
from penstock_scheduler.model.records import RoundRecord, dump_round, load_round
from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from penstock_scheduler.rounds.diff import actions, cloud_actions
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings
from tests.scheduler.builders import job, on, snapshot, table

A10G = Offer("g5.12xlarge@b", "a10g", 1, 4, 5.0, count=2, boot_s=0)
DEAR = Offer("p4d@a", "a100", 1, 8, 32.0, count=1, boot_s=0)
PLENTY = (BudgetLine("", "total", 1000.0, 0.0),)
RATES = {"t4": {1: 1.0, 2: 1.9, 4: 3.6}, "a10g": {4: 8.0}, "a100": {8: 30.0}}


def with_cloud(base, **fields):
    state = {"offers": (A10G,), "budgets": PLENTY, "by_default": True, "margin": 0.0} | fields
    return dataclasses.replace(base, cloud=CloudState(**state))


def decide(base, policy="sia", **fields):
    return make_policy(policy)[0].decide(with_cloud(base, **fields))


def one_job(nodes="t4:1x1", **fields):
    """A job with 8 h of work on one T4, an hour on 4 A10G, after 1000 s in the queue."""
    return snapshot(nodes, [job("j", max_gpus=4, **fields)], {"j": table(**RATES)}, remaining={"j": 8 * 3600.0})


def test_a_small_run_here_beats_four_a10g_for_5_dollars_where_a_dollar_weighs_much():
    """On one T4 the job costs 1; on 4 A10G, 8 times as fast, 8 ** -0.5 + 5 k. k = 0.2: 1.35, k = 0.1: 0.85."""
    here = decide(one_job(), cost_per_usd=0.2)
    assert here.assignments["j"].placement == on("t4", t4_00=1)
    there = decide(one_job(), cost_per_usd=0.1)
    assert there.bursts["j"].offer == A10G
    assert there.bursts["j"].usd == pytest.approx(5.0)
    assert not there.assignments
    assert "about $5.00, at most $5.00" in there.bursts["j"].reason.text


def test_a_job_without_gpus_on_site_leaves_at_any_price_once_its_wait_is_over():
    base = one_job()
    full = dataclasses.replace(base, nodes=tuple(dataclasses.replace(n, gpus_others=1) for n in base.nodes))
    assert decide(full, cost_per_usd=10.0).bursts["j"].offer == A10G


def test_no_job_leaves_before_its_wait_is_over():
    """Compute-wait, alpha 0.1: with no GPU here to tell its time on, 4 GPUs count for an hour: 0.4 h. It came 1000 s ago."""
    base = dataclasses.replace(one_job(), nodes=())
    waiting = WaitingPolicy(Wait.COMPUTE, 0.1)
    assert not decide(base, waiting=waiting).bursts
    assert decide(dataclasses.replace(base, time_s=1e5), waiting=waiting).bursts


def queue_of(*lengths_s, **fields):
    """One T4, and jobs of these lengths that each want one, the oldest first."""
    jobs = [job(f"j{n}", max_gpus=1, submit_s=float(n), runtime_s=each, **fields) for n, each in enumerate(lengths_s)]
    return snapshot("t4:1x1", jobs, {each.id: table(t4={1: 1.0}, a10g={1: 1.0}) for each in jobs})


SMALL = Offer("g5.xlarge", "a10g", 1, 1, 1.0, count=2, boot_s=0)
PATIENT = WaitingPolicy(Wait.CONSTANT, 1000.0)


@pytest.mark.parametrize(("most", "leave"), [(None, set()), (3, set()), (2, {"j3"}), (1, {"j2", "j3"})])
def test_the_newest_leave_when_the_queue_is_too_long(most, leave):
    """Of four jobs one runs here, and three wait. Nobody's wait is over."""
    plan = decide(queue_of(*[3600.0] * 4), "fifo", offers=(SMALL,), waiting=PATIENT, max_queue=most)
    assert set(plan.bursts) == leave
    assert set(plan.assignments) == {"j0"}


def test_a_full_queue_sends_nobody_who_may_not_leave_or_whom_a_budget_keeps():
    state = queue_of(*[3600.0] * 4, burst="never")
    assert not decide(state, "fifo", offers=(SMALL,), waiting=PATIENT, max_queue=0).bursts
    state = queue_of(*[3600.0] * 4)
    little = (BudgetLine("", "total", 1.0, 0.0),)
    plan = decide(state, "fifo", offers=(SMALL,), waiting=PATIENT, max_queue=0, budgets=little)
    assert set(plan.bursts) == {"j3"}, "$1.00 pays for one"


@pytest.mark.parametrize("policy", ["fifo", "sia"])
def test_short_jobs_leave_even_if_gpus_are_free(policy):
    """j0 takes a minute. j1 takes an hour, and gets the free GPU; it has one offer and $1.00 less to choose from."""
    waiting = WaitingPolicy(Wait.CONSTANT, 1000.0, short_h=0.1)
    plan = decide(queue_of(60.0, 3600.0), policy, offers=(SMALL,), waiting=waiting)
    assert set(plan.bursts) == {"j0"}
    assert set(plan.assignments) == {"j1"}
    plan = decide(queue_of(60.0, 60.0), policy, offers=(dataclasses.replace(SMALL, count=1),), waiting=waiting)
    assert set(plan.bursts) == {"j0"}, "no more than there are"
    assert set(plan.assignments) == {"j1"}, "and one that cannot leave runs here"


def test_the_spec_decides_whether_a_job_may_leave():
    full = "a100:1x8"  # no type that the job can use
    assert decide(one_job(full, gpu_types=["t4", "a10g"])).bursts
    assert not decide(one_job(full, gpu_types=["t4", "a10g"], burst="never")).bursts
    assert not decide(one_job(full, gpu_types=["t4", "a10g"]), by_default=False).bursts
    assert decide(one_job(full, gpu_types=["t4", "a10g"], burst="allowed"), by_default=False).bursts
    assert decide(one_job(burst="only"), cost_per_usd=100.0).bursts, "although there is room here"


@pytest.mark.parametrize("policy", sorted(REGISTRY))
def test_without_a_cloud_a_job_for_the_cloud_alone_gets_nothing_on_site(policy):
    both = [job("j", max_gpus=1, burst="only"), job("other", max_gpus=1, burst="allowed")]
    models = {"j": table(**RATES), "other": table(**RATES)}
    plan = make_policy(policy)[0].decide(snapshot("t4:1x4", both, models))
    assert set(plan.assignments) == {"other"}
    assert plan.waiting["j"].code is ReasonCode.NEVER_FITS
    assert "this site has no cloud" in plan.waiting["j"].text
    held = [job("j", max_gpus=1, burst="only", phase=Phase.RUNNING, allocation=on("t4", t4_00=1))]
    plan = make_policy(policy)[0].decide(snapshot("t4:1x4", held, models))
    assert "j" in plan.assignments, "what runs stays"


def test_at_the_cap_nothing_starts_and_the_reason_says_so():
    full = one_job("a100:1x8", gpu_types=["t4", "a10g"])
    plan = decide(full, budgets=(BudgetLine("", "month", 100.0, 96.0),))
    assert not plan.bursts
    reason = plan.waiting["j"]
    assert reason.code is ReasonCode.CLOUD_BUDGET
    assert "the site, $100.00 this month ($96.00 of it used or committed) does not allow the $5.00" in reason.text
    assert decide(full, budgets=(BudgetLine("other", "total", 0.0, 0.0),)).bursts, "another account's cap"


def test_a_job_that_needs_longer_than_the_cloud_allows_does_not_leave():
    """$5 pay for an hour of 4 A10G."""
    full = one_job("a100:1x8", gpu_types=["t4", "a10g"])
    assert decide(full, longest_s=3601.0).bursts
    plan = decide(full, longest_s=3599.0)
    assert not plan.bursts
    assert "1 h are to be committed, and runs there last 1 h at most; declare" in plan.waiting["j"].text


@pytest.mark.parametrize("policy", ["sia", "fifo", "gavel"])
def test_of_three_jobs_of_5_dollars_two_leave_within_12(policy):
    jobs = [job(name, max_gpus=4, submit_s=at) for at, name in enumerate("abc")]
    base = snapshot(
        "k80:1x1", jobs, {each.id: table(**RATES) for each in jobs}, remaining=dict.fromkeys("abc", 8 * 3600.0)
    )
    many = (dataclasses.replace(A10G, count=9),)
    plan = decide(base, policy, offers=many, budgets=(BudgetLine("", "total", 112.0, 100.0),))
    assert len(plan.bursts) == 2
    assert len(plan.waiting) == 1


def test_a_jobs_own_budget_holds():
    plan = decide(one_job("a100:1x8", gpu_types=["t4", "a10g"], burst_budget_usd=4.0, burst="allowed"))
    assert "burst_budget_usd=$4.00" in plan.waiting["j"].text


def test_the_cheapest_by_dollars_for_the_work_not_by_dollars_an_hour():
    """On 4 A10G at $5/h an hour: $5. On 8 A100 at $16/h, 30 times a T4: 16 minutes, $4.27."""
    offers = (A10G, dataclasses.replace(DEAR, usd_per_h=16.0))
    full = snapshot("k80:1x1", [job("j", max_gpus=8)], {"j": table(**RATES)}, remaining={"j": 8 * 3600.0})
    for policy in ("fifo", "sia"):
        assert decide(full, policy, offers=offers).bursts["j"].offer.id == "p4d@a", policy


def test_data_is_carried_in_paid_time():
    """125 GB at 125 MB/s are 1000 s, on the instance's time: $5 x (3600 + 1000) / 3600, and $0.02 a GB."""
    full = one_job("a100:1x8", gpu_types=["t4", "a10g"], data_size_bytes=125 * 10**9)
    assert decide(full, usd_per_gb=0.02).bursts["j"].usd == pytest.approx(5 * 4600 / 3600 + 2.5)


def run(**fields):
    return CloudRun(**({"job": "j", "offer": A10G, "since_s": 0.0, "usd": 5.0} | fields))


def test_a_job_in_the_cloud_gets_nothing_on_site_and_is_not_sent_twice():
    base = with_cloud(one_job(burst="only"), runs=(run(),))
    plan = make_policy("sia")[0].decide(base)
    assert not plan.assignments
    assert plan.bursts["j"].reason.code is ReasonCode.BURST
    assert actions(plan, base.jobs, {"j"}) == ()
    assert cloud_actions(plan, base.jobs, base.cloud.runs) == ()
    assert cloud_actions(plan, base.jobs, ()) == (), "its run is over meanwhile: only a new round sends it again"


def test_star_wait_recalls_long_first_runs_and_only_once():
    waiting = WaitingPolicy(Wait.STAR, 1.0, t_max_h=0.25)
    full = dataclasses.replace(one_job(), nodes=())
    assert "j" in decide(full, runs=(run(),), waiting=waiting).recalls  # 1000 s > 900 s
    assert "j" not in decide(full, runs=(run(since_s=200.0),), waiting=waiting).recalls
    assert "j" not in decide(full, runs=(run(),), waiting=waiting, returned={"j": 50.0}).recalls


def test_an_idle_site_recalls_a_job_that_has_more_to_pay_than_a_restart_loses():
    def plan(work_s, **fields):
        base = snapshot("t4:1x4", [job("j", max_gpus=4, **fields)], {"j": table(**RATES)}, remaining={"j": work_s})
        return decide(base, runs=(run(),))

    assert plan(8 * 3600.0).recalls["j"].code is ReasonCode.RECALLED
    assert not plan(8 * 20.0).recalls  # 20 s are left there, and a restart takes 30
    rigid = {"adaptivity": "rigid", "min_gpus": 4}
    assert not plan(8 * 900.0, **rigid).recalls, "without checkpoints it loses 1000 s of work"
    assert plan(8 * 900.0, checkpoint_every_s=300.0, **rigid).recalls  # it loses 100 s


@pytest.mark.parametrize(("others", "back"), [((4, 0), True), ((2, 2), False)])
def test_a_job_comes_back_only_if_it_fits_on_the_idle_gpus(others, back):
    """4 T4s are idle, on one node or on two. A job that wants them on one node would only wait, and leave again."""
    fields = {"max_gpus": 4, "min_gpus": 4, "adaptivity": "rigid", "checkpoint_every_s": 60.0}
    rates = {"t4": {4: 3.6}, "a10g": {4: 8.0}}
    base = snapshot("t4:2x4", [job("j", **fields)], {"j": table(**rates)}, remaining={"j": 8 * 3600.0})
    nodes = tuple(dataclasses.replace(node, gpus_others=taken) for node, taken in zip(base.nodes, others, strict=True))
    assert bool(decide(dataclasses.replace(base, nodes=nodes), "fifo", runs=(run(),)).recalls) is back


@pytest.mark.parametrize("policy", ["sia", "fifo"])
@pytest.mark.parametrize(
    ("nodes", "fields", "until_s", "starts"),
    [
        ("t4:1x1", {}, 1001.0, set()),
        ("t4:2x1", {}, 1001.0, {"new"}),
        ("t4:1x1", {}, 1000.0, {"new"}),
        ("t4:1x1", {"submit_s": 900.0}, 1001.0, {"new"}),
        ("t4:1x1", {"burst": "only"}, 1001.0, {"new"}),
        ("t4:1x1", {"min_gpus": 2}, 1001.0, {"new"}),
    ],
)
def test_idle_gpus_are_kept_for_a_job_on_its_way_back_from_jobs_that_came_later(nodes, fields, until_s, starts, policy):
    """At 1000 s `j` still leaves the cloud. Without a GPU when it is back, it would go there again and be paid twice."""
    jobs = [
        job("j", **{"max_gpus": 4, "submit_s": 0.0} | fields),
        job("new", max_gpus=1, submit_s=800.0, burst="never"),
    ]
    base = snapshot(nodes, jobs, {each.id: table(**RATES) for each in jobs})
    plan = decide(base, policy, runs=(run(ending=True, kept_until_s=until_s),))
    assert set(plan.assignments) == starts


def test_at_the_cap_what_runs_is_finished_or_recalled_by_setting():
    used_up = (BudgetLine("", "total", 5.0, 5.0),)
    full = dataclasses.replace(one_job(), nodes=())
    assert not decide(full, runs=(run(),), budgets=used_up).recalls
    plan = decide(full, runs=(run(),), budgets=used_up, at_cap="recall")
    assert "is used up" in plan.recalls["j"].text
    assert [action.kind for action in cloud_actions(plan, full.jobs, (run(),))] == ["recall"]


def test_a_round_with_a_cloud_is_saved_and_decides_again_to_the_same():
    base = with_cloud(one_job("a100:1x8", gpu_types=["t4", "a10g"]))
    policy, in_full = make_policy("sia")
    plan = policy.decide(base)
    again = load_round(dump_round(RoundRecord(base, in_full, plan)), "here")
    assert again.plan.bursts == plan.bursts
    assert make_policy("sia")[0].decide(again.snapshot).bursts == plan.bursts


@st.composite
def situations(draw):
    jobs, runs, models, remaining = [], [], {}, {}
    for number in range(draw(st.integers(3, 12))):
        name = f"j{number}"
        most = draw(st.sampled_from([1, 2, 4, 8]))
        fields = {"max_gpus": most, "account": draw(st.sampled_from(["a", "b"]))}
        fields["burst"] = draw(st.sampled_from([None, "never", "allowed", "allowed", "only"]))
        rigid = draw(st.booleans())
        fields |= {"adaptivity": "rigid", "min_gpus": most} if rigid else {}
        each = job(name, submit_s=float(number), **fields)
        models[name] = table(
            t4={1: 1.0, 2: 1.9, 4: 3.6, 8: 7.0}, a10g={1: 2.5, 4: 8.0, 8: 15.0}, a100={8: 30.0, 4: 16.0}
        )
        if draw(st.integers(0, 4)):
            remaining[name] = draw(st.sampled_from([500.0, 2e4, 5e4, 1e5]))
        if draw(st.integers(0, 3)) == 0:
            runs.append(CloudRun(name, A10G, 100.0, draw(st.floats(1, 50)), each.account, draw(st.booleans())))
        jobs.append(each)
    base = snapshot("t4:1x2", jobs, models, remaining=remaining)
    limits = [("", draw(st.sampled_from([0.0, 10.0, 25.0, 60.0]))), ("a", draw(st.sampled_from([0.0, 10.0, 30.0])))]
    lines = tuple(BudgetLine(account, "total", limit, draw(st.sampled_from([0.0, 3.5]))) for account, limit in limits)
    one = Offer("g5.xlarge", "a10g", 1, 1, 1.0, count=draw(st.integers(0, 4)))
    return with_cloud(
        base,
        offers=(one, A10G, DEAR),
        runs=tuple(runs),
        budgets=lines,
        by_default=draw(st.booleans()),
        at_cap=draw(st.sampled_from(["finish", "recall"])),
        cost_per_usd=draw(st.sampled_from([0.001, 0.1, 1.0])),
        max_queue=draw(st.sampled_from([None, 0, 2])),
        waiting=WaitingPolicy(
            draw(st.sampled_from(list(Wait))),
            draw(st.sampled_from([0.0, 0.01, 0.3])),
            draw(st.sampled_from([None, 0.5, 1e9])),
        ),
    )


@pytest.mark.parametrize("name", sorted(REGISTRY))
@settings(max_examples=12)
@given(base=situations())
def test_budgets_hold_and_no_job_is_in_two_places(name, base):
    cloud = base.cloud
    plan = make_policy(name)[0].decide(base)
    away = {run.job for run in cloud.runs}
    new = {job_id: burst for job_id, burst in plan.bursts.items() if job_id not in away}
    accounts = {each.id: each.account for each in base.jobs}
    for line in cloud.budgets:
        committed = sum(burst.usd for job_id, burst in new.items() if line.covers(accounts[job_id]))
        assert committed <= line.left_usd
    for offer in cloud.offers:
        assert sum(burst.offer.id == offer.id for burst in new.values()) <= offer.count
    ids = [*plan.assignments, *plan.waiting, *plan.bursts]
    assert sorted(ids) == sorted(accounts), "every job has one fate"
    todo = actions(plan, base.jobs, away)
    clouds = cloud_actions(plan, base.jobs, cloud.runs)
    assert not {action.job for action in todo} & {action.job for action in clouds}
    assert not {action.job for action in todo} & away
    for each in base.jobs:
        assert each.phase is Phase.QUEUED
        if each.spec.burst == "never":
            assert each.id not in new
        if each.spec.burst == "only":
            assert each.id not in plan.assignments


def test_limits_on_the_sites_gpus_do_not_count_the_clouds():
    """Ada may hold 1 GPU on site: one job runs on it, and the other may leave for 4 in the cloud."""
    jobs = [job("a", max_gpus=1, burst="never"), job("b", max_gpus=4, submit_s=1.0)]
    base = snapshot("t4:1x4", jobs, {each.id: table(**RATES) for each in jobs}, remaining={"a": 1e4, "b": 1e4})
    limited = dataclasses.replace(base, limits=(GpuLimit("user", "ada", 1),))
    plan = Sia(SiaSettings()).decide(with_cloud(limited, cost_per_usd=0.01))
    assert set(plan.assignments) == {"a"}
    assert set(plan.bursts) == {"b"}, "in the program itself, not because it was left waiting"
