"""What a job may have in the cloud, worked by hand: when it leaves, for how much, and when it comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock_scheduler.burst.deciding.choices import choices, leaves_s, recalls, runtime
from penstock_scheduler.model import BudgetLine, CloudRun, CloudState, Offer, Snapshot
from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from tests.scheduler.builders import job, snapshot, table

A10G = Offer("g5.12xlarge@b", "a10g", 1, 4, 4.0, boot_s=360.0)
SIX_MINUTES, HOUR = 360.0, 3600.0
RATES = {"t4": {1: 1.0, 4: 2.0}, "a10g": {4: 8.0}}
"""4 A10Gs are four times as fast as the 4 T4s that the job asks for."""


def site(nodes: str = "t4:1x4", remaining: float | None = None, time_s: float = 1e6, **spec: Any) -> Snapshot:
    limit_s = spec.pop("time_limit_s", None)
    waits = dataclasses.replace(job("j", max_gpus=4, submit_s=100.0, **spec), time_limit_s=limit_s)
    left = {} if remaining is None else {"j": remaining}
    return snapshot(nodes, [waits], {"j": table(**RATES)}, remaining=left, time_s=time_s)


def with_cloud(base: Snapshot, **fields: Any) -> Snapshot:
    budget = (BudgetLine("", "total", 1000.0, 0.0),)
    return dataclasses.replace(
        base, cloud=CloudState(**({"offers": (A10G,), "budgets": budget, "by_default": True} | fields))
    )


def test_a_job_leaves_after_its_wait_from_its_submission_or_its_return():
    """Constant wait of 2 h; the job was submitted at 100 s, or came back at 5000 s."""
    waiting = WaitingPolicy(Wait.CONSTANT, 2.0)
    state = with_cloud(site(), waiting=waiting)
    (waits,) = state.jobs
    assert leaves_s(waits, state) == 100 + 2 * HOUR
    state = with_cloud(site(), waiting=waiting, returned={"j": 5000.0})
    assert leaves_s(waits, state) == 5000 + 2 * HOUR
    assert choices(with_cloud(site(time_s=100 + 2 * HOUR), waiting=waiting))[0], "at that very moment"
    assert not choices(with_cloud(site(time_s=100 + 2 * HOUR - 1), waiting=waiting))[0]


def test_the_running_time_is_the_best_of_what_is_known():
    history = {"j": (10.0, 30.0, 20.0)}
    for state, seconds in [
        (with_cloud(site(remaining=600.0, runtime_s=77.0, time_limit_s=99.0), history_s=history), 77.0),
        (with_cloud(site(remaining=600.0, time_limit_s=99.0), history_s=history), 300.0),  # 600 / 2.0 on 4 T4s
        (with_cloud(site(time_limit_s=99.0), history_s=history), 20.0),
        (with_cloud(site(time_limit_s=99.0)), 99.0),
        (with_cloud(site()), None),
    ]:
        assert runtime(state.jobs[0], state).runtime_s == seconds
    without_cloud = site(time_limit_s=99.0)
    assert runtime(without_cloud.jobs[0], without_cloud).runtime_s == 99.0


def test_only_nodes_with_gpus_count_for_the_speed_on_site():
    """Without a T4 on site, work of 600 has no running time; nodes without GPUs do not count and do not divide by zero."""
    state = with_cloud(site("t4:1x4", remaining=600.0))
    empty = dataclasses.replace(state, nodes=tuple(dataclasses.replace(node, gpus=0) for node in state.nodes))
    assert runtime(empty.jobs[0], empty).runtime_s is None


def test_a_cpu_slot_is_only_for_jobs_that_name_it():
    """However cheap it is: a job without gpu_types may have any GPU, and a CPU slot has none."""
    slot = Offer("c5.xlarge", "cpu", 1, 1, 0.01)
    offers = (slot, A10G)

    def found(**spec: Any) -> list[str]:
        waits = job("j", max_gpus=4, submit_s=100.0, runtime_s=HOUR, **spec)
        rates = table(**RATES, cpu={1: 1.0})
        state = with_cloud(snapshot("t4:1x4", [waits], {"j": rates}, time_s=1e6), offers=offers)
        return [choice.offer.id for choice in choices(state)[0].get("j", [])]

    assert found() == [A10G.id]
    assert found(gpu_types=("cpu",)) == [slot.id]
    assert found(gpu_types=("a10g",)) == [A10G.id]
    assert found(excluded_gpu_types=("t4",)) == [A10G.id]


@pytest.mark.parametrize(
    ("spec", "runs_s"),
    [
        ({"remaining": 8 * HOUR}, HOUR),  # 8 h of work at a rate of 8
        ({"runtime_s": 4 * HOUR}, HOUR),  # 4 h on 4 T4s, and the A10Gs are four times as fast
        ({"time_limit_s": 2 * HOUR}, HOUR / 2),
    ],
    ids=["by its work", "by its user's estimate", "by its time limit"],
)
def test_the_price_is_boot_data_and_run_and_a_margin_on_the_time(spec: dict[str, float], runs_s: float):
    """10 GB at 10 MB/s are 1000 s on the instance, and cost 0.5 dollars a GB. The margin of 25 % is on the time alone. Two
    minutes in which the job is asked to leave come on top."""
    state = with_cloud(
        site(data_size_bytes=10**10, **spec), bytes_per_s=1e7, usd_per_gb=0.5, margin=0.25, leave_s=120.0
    )
    ((choice,),) = choices(state)[0].values()
    seconds = SIX_MINUTES + 1000 + runs_s
    assert choice.expected_usd == pytest.approx(seconds * 4 / HOUR + 5.0)
    assert choice.usd == pytest.approx((seconds * 1.25 + 120) * 4 / HOUR + 5.0)


def test_without_data_nothing_is_added():
    ((choice,),) = choices(with_cloud(site(runtime_s=4 * HOUR), usd_per_gb=0.5, margin=0.0))[0].values()
    assert choice.expected_usd == pytest.approx((SIX_MINUTES + HOUR) * 4 / HOUR)
    assert choice.usd == choice.expected_usd


def test_a_boot_that_takes_as_long_as_it_may_takes_nothing_from_the_job():
    """A boot is expected to take 360 s, and may take 1000 s: these are committed, although 450 s are the margin's share."""
    slow = dataclasses.replace(A10G, latest_boot_s=1000.0)
    ((choice,),) = choices(with_cloud(site(runtime_s=4 * HOUR), offers=(slow,), margin=0.25))[0].values()
    assert choice.usd == pytest.approx((1000 + HOUR * 1.25) * 4 / HOUR)
    assert choice.expected_usd == pytest.approx((SIX_MINUTES + HOUR) * 4 / HOUR)


def test_a_run_whose_record_cannot_be_read_is_not_recalled():
    cloud: dict[str, Any] = {"budgets": (BudgetLine("", "total", 100.0, 100.0),), "at_cap": "recall"}
    run = CloudRun("j", A10G, 1e6 - 7200, 5.0)
    for trouble, back in [("", True), ("its record cannot be read", False)]:
        state = with_cloud(site(), runs=(dataclasses.replace(run, trouble=trouble),), **cloud)
        facts = {"j": dataclasses.replace(state.facts["j"], saves=True)}
        found = recalls(dataclasses.replace(state, facts=facts), {"t4": 4}, queue_empty=True)
        assert bool(found) == back


def test_a_job_of_unknown_length_is_committed_for_a_day():
    ((choice,),) = choices(with_cloud(site()))[0].values()
    assert choice.usd == choice.expected_usd == 24 * 4.0


def test_a_job_that_makes_no_progress_there_has_no_choice():
    state = with_cloud(site(runtime_s=HOUR))
    assert not choices(
        dataclasses.replace(state, facts={"j": dataclasses.replace(state.facts["j"], model=table(t4={1: 1.0}))})
    )[0]


@pytest.mark.parametrize("why", ["the cap is reached", "star-wait"])
@pytest.mark.parametrize(
    ("spec", "saves"),
    [({"preemptible": False}, True), ({"adaptivity": "fixed", "min_gpus": 4}, True), ({}, False)],
    ids=["not preemptible", "fixed", "it has not saved"],
)
def test_a_job_that_may_not_be_stopped_is_never_recalled(why: str, spec: dict[str, Any], saves: bool):
    """Whatever the reason: all its work would be lost, or its owner has said that it may not be stopped."""
    cloud: dict[str, Any] = {"waiting": WaitingPolicy(Wait.STAR, 1.0, t_max_h=0.5)}
    if why != "star-wait":
        cloud = {"budgets": (BudgetLine("", "total", 100.0, 100.0),), "at_cap": "recall"}
    run = CloudRun("j", A10G, 1e6 - 7200, 5.0)

    def back(state: Snapshot, saves: bool) -> bool:
        facts = {"j": dataclasses.replace(state.facts["j"], saves=saves)}
        return bool(recalls(dataclasses.replace(state, facts=facts), {"t4": 4}, queue_empty=True))

    assert back(with_cloud(site(), runs=(run,), **cloud), True)
    assert not back(with_cloud(site(**spec), runs=(run,), **cloud), saves)


@pytest.mark.parametrize(("left_usd", "back"), [(0.0, True), (0.5, False), (1.0, False)])
def test_a_job_is_recalled_when_nothing_at_all_is_left_of_a_budget(left_usd: float, back: bool):
    budget = (BudgetLine("", "total", 100.0, 100.0 - left_usd),)
    state = with_cloud(site(), runs=(CloudRun("j", A10G, 1e6 - 60, 5.0),), budgets=budget, at_cap="recall")
    assert (recalls(state, {}, queue_empty=False) != {}) is back


@pytest.mark.parametrize(("beyond_s", "back"), [(0.0, False), (1.0, True)])
def test_star_wait_recalls_a_first_run_after_more_than_t_max(beyond_s: float, back: bool):
    waiting = WaitingPolicy(Wait.STAR, 1.0, t_max_h=0.5)
    run = CloudRun("j", A10G, 1e6 - 1800 - beyond_s, 5.0)
    assert (recalls(with_cloud(site(), runs=(run,), waiting=waiting), {}, queue_empty=False) != {}) is back
    assert recalls(with_cloud(site(), runs=(run,), waiting=waiting, returned={"j": 1.0}), {}, queue_empty=False) == {}


@pytest.mark.parametrize(
    ("left", "idle", "empty", "back"),
    [(31.0, 1, True, True), (30.0, 1, True, False), (31.0, 0, True, False), (31.0, 1, False, False)],
    ids=["pays", "what is left is what a restart loses", "no idle GPU", "others wait"],
)
def test_a_job_comes_back_if_more_is_left_to_pay_than_a_restart_loses(left: float, idle: int, empty: bool, back: bool):
    """Work for `left` seconds at the rate of 8; a restart costs 30 s; the job saves when it is asked to."""
    state = with_cloud(site(remaining=8 * left), runs=(CloudRun("j", A10G, 1e6 - 1000, 5.0),))
    assert (recalls(state, {"t4": idle}, queue_empty=empty) != {}) is back


@pytest.mark.parametrize(
    "spec",
    [{"preemptible": False}, {"adaptivity": "fixed", "min_gpus": 4}, {"burst": "only"}],
    ids=["not preemptible", "fixed", "only in the cloud"],
)
def test_a_job_that_may_not_be_moved_does_not_come_back_to_idle_gpus(spec: dict[str, Any]):
    run = CloudRun("j", A10G, 1e6 - 1000, 5.0)
    assert recalls(with_cloud(site(remaining=8e4), runs=(run,)), {"t4": 4}, queue_empty=True)
    assert recalls(with_cloud(site(remaining=8e4, **spec), runs=(run,)), {"t4": 4}, queue_empty=True) == {}


def test_a_job_that_asks_for_several_nodes_is_timed_on_whole_ones():
    """8 GPUs on nodes of 4 are two nodes; the rate there is 3, and work of 600 takes 200 s. On a node of 16 it is a part."""
    wants = dataclasses.replace(job("j", max_gpus=8), time_limit_s=None)
    for nodes, rates in (("t4:2x4", {8: 3.0}), ("t4:1x16", {8: 3.0})):
        state = with_cloud(snapshot(nodes, [wants], {"j": table(t4=rates)}, remaining={"j": 600.0}))
        assert runtime(wants, state).runtime_s == pytest.approx(200.0)


def test_a_job_comes_back_to_idle_gpus_once():
    """Else it could go back and forth, for example while others take the GPUs that it comes back for."""
    away = {"runs": (CloudRun("j", A10G, 1e6 - 1000, 5.0),)}
    assert recalls(with_cloud(site(remaining=8e4), **away), {"t4": 4}, queue_empty=True)
    assert not recalls(with_cloud(site(remaining=8e4), returned={"j": 5.0}, **away), {"t4": 4}, queue_empty=True)


@pytest.mark.parametrize(("state", "back"), [("ordered", True), ("booting", False), ("running", True)])
def test_no_job_is_recalled_while_its_nodes_boot(state: str, back: bool):
    """Slurm before 23.02 holds a job that it took from a booting node and then starts on site ("launch failed requeued held")."""
    idle = with_cloud(site(remaining=8e4), runs=(CloudRun("j", A10G, 1e6 - 60, 5.0, state=state),))
    assert (recalls(idle, {"t4": 4}, queue_empty=True) != {}) is back
    used_up = with_cloud(site(), runs=idle.cloud.runs, budgets=(BudgetLine("", "total", 5.0, 5.0),), at_cap="recall")
    assert (recalls(used_up, {}, queue_empty=True) != {}) is back


def test_nothing_of_a_run_that_is_still_booting_would_be_lost():
    """Ordered a minute ago, boots for six: a rigid job without checkpoints would lose no work, only the restart of 30 s."""
    run = CloudRun("j", A10G, 1e6 - 60, 5.0)
    for left, back in ((31.0, True), (30.0, False)):
        state = with_cloud(site(remaining=8 * left, adaptivity="rigid", min_gpus=4), runs=(run,))
        assert (recalls(state, {"t4": 4}, queue_empty=True) != {}) is back


@pytest.mark.parametrize(("idle", "back"), [(4, False), (7, False), (8, True)])
def test_gpus_for_which_a_job_is_on_its_way_back_are_not_given_to_another(idle: int, back: bool):
    """`first` was recalled in an earlier round and still saves. Its 4 idle GPUs are not a reason to recall `j` too."""
    base = site("t4:2x4", remaining=8e4, min_gpus=4)
    first = job("first", min_gpus=4, max_gpus=4, submit_s=100.0)
    both = snapshot("t4:2x4", [first, *base.jobs], {each: table(**RATES) for each in ("first", "j")}, time_s=1e6)
    runs = (CloudRun("first", A10G, 1e6 - 2000, 5.0, ending=True), CloudRun("j", A10G, 1e6 - 1000, 5.0))
    assert set(recalls(with_cloud(both, runs=runs), {"t4": idle}, queue_empty=True)) == ({"j"} if back else set())
