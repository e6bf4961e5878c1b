"""Where nothing new may start, what runs stays: silent nodes, partitions that are down, groups of jobs that share GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_profiles.estimators import TableEstimator
from penstock_scheduler.model import (
    GpuBudget,
    GpuLimit,
    LeaveCause,
    LeaveRequest,
    Pack,
    Partition,
    Phase,
    Placement,
    ReasonCode,
    Share,
    SharedGpus,
)
from penstock_scheduler.people.units import clock
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.policies.staying import Staying
from penstock_scheduler.rounds.sharing.rules import broken
from tests.scheduler.builders import job, on, snapshot, staged, table, with_facts
from tests.scheduler.policies.sharing_cases import running, shared

POLICIES = sorted(REGISTRY)


def with_nodes(state, **changes):
    """The snapshot with changes of single nodes: `t4_00={"may_start": False}`."""
    by_name = {name.replace("_", "-"): fields for name, fields in changes.items()}
    nodes = tuple(dataclasses.replace(node, **by_name.get(node.name, {})) for node in state.nodes)
    return dataclasses.replace(state, nodes=nodes)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_jobs_stay_while_no_node_has_registered(policy):
    """slurmctld has just restarted: every node is silent, and one job waits."""
    jobs = [running(str(i), f"t4-0{i}", 4) for i in range(3)]
    state = snapshot("t4:3x4", [*jobs, job("new", max_gpus=4)])
    silent = {"may_start": False, "state": "UNKNOWN"}
    plan = make_policy(policy)[0].decide(with_nodes(state, t4_00=silent, t4_01=silent, t4_02=silent))
    assert {name: each.placement for name, each in plan.assignments.items()} == {j.id: j.allocation for j in jobs}
    assert plan.assignments["0"].reason.code is ReasonCode.KEPT
    assert "node t4-00 takes no new work (UNKNOWN)" in plan.assignments["0"].reason.text
    assert set(plan.waiting) == {"new"}


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_of_a_partition_that_is_down_stay_and_those_that_wait_for_it_say_so(policy):
    held = Placement("t4", "fast", (Share("t4-00", 2),))
    ran = job("ran", phase=Phase.RUNNING, allocation=held, partitions=("fast",), max_gpus=4)
    waits = job("waits", partitions=("fast",), max_gpus=1)
    other = job("other", partitions=("all",), max_gpus=1)
    state = snapshot("t4:1x4", [ran, waits, other])
    state = with_nodes(state, t4_00={"partitions": ("all", "fast")})
    down = (Partition("all"), Partition("fast", may_start=False, state="DOWN"))
    plan = make_policy(policy)[0].decide(dataclasses.replace(state, partitions=down))
    assert plan.assignments["ran"].placement == held
    assert "partition fast is DOWN" in plan.assignments["ran"].reason.text
    assert plan.assignments["other"].placement.partition == "all"
    assert plan.waiting["waits"].code is ReasonCode.WAITING_PARTITION
    assert plan.waiting["waits"].text == ("partition fast is DOWN: nothing starts there until an admin sets it to UP")


@pytest.mark.parametrize("policy", ["sia", "pollux", "gavel"])
def test_a_job_whose_model_gives_no_progress_where_it_runs_stays(policy):
    """The model is wrong: the job runs there. It was made of a profile, or of earlier jobs."""
    nothing = TableEstimator({"a100": {1: 4.0}})
    runs, other = running("1", "t4-00", 4), job("2", min_gpus=4, max_gpus=4, weight=100.0)
    plan = make_policy(policy)[0].decide(snapshot("t4:1x4,a100:1x1", [runs, other], {"1": nothing}))
    assert plan.assignments["1"].placement == runs.allocation
    assert plan.assignments["1"].reason.text.endswith("so that nothing tells what a stop would cost")
    assert plan.stops == {}


def test_a_job_on_its_way_into_a_partition_that_went_down_starts_elsewhere():
    bound = Placement("t4", "fast", (Share("t4-00", 2),))
    going = job("g", phase=Phase.STARTING, allocation=bound, target=bound, partitions=("fast", "all"), max_gpus=2)
    state = with_nodes(snapshot("t4:1x4", [going]), t4_00={"partitions": ("all", "fast")})
    down = (Partition("all"), Partition("fast", may_start=False, state="DOWN"))
    plan = make_policy("sia")[0].decide(dataclasses.replace(state, partitions=down))
    assert plan.assignments["g"].placement.partition == "all"


@pytest.mark.parametrize("policy", ["sia", "fifo", "gavel"])
def test_what_stays_counts_against_nodes_and_limits(policy):
    """A job on a silent and an open node holds 4 of the open one's GPUs, and 8 of its user's 10."""
    held = Placement("t4", "all", (Share("t4-00", 4), Share("t4-01", 4)))
    stays = job("stays", phase=Phase.RUNNING, allocation=held, min_gpus=8, max_gpus=8)
    jobs = [stays, *(job(name, min_gpus=1, max_gpus=1, submit_s=at) for at, name in enumerate("abc"))]
    state = dataclasses.replace(snapshot("t4:3x4", jobs), limits=(GpuLimit("user", "ada", 10),))
    plan = make_policy(policy)[0].decide(with_nodes(state, t4_00={"may_start": False, "state": "DOWN*"}))
    assert plan.assignments["stays"].placement == held
    others = [each.placement for name, each in plan.assignments.items() if name != "stays"]
    assert [where.nodes for where in others] == [("t4-02",), ("t4-02",)], "not on t4-01, and two of three by the limit"


@pytest.mark.parametrize("policy", ["sia", "pollux", "gavel"])
def test_a_request_to_leave_moves_a_job_also_from_a_silent_node(policy):
    state = snapshot("t4:2x4", [running("1", "t4-00", 2)])
    asked = {"may_start": False, "leave": LeaveRequest(LeaveCause.DRAIN, "a fan", by_s=2000.0)}
    plan = make_policy(policy)[0].decide(with_nodes(state, t4_00=asked))
    assert plan.assignments["1"].placement.nodes == ("t4-01",)


@pytest.mark.parametrize("cause", [LeaveCause.DRAIN, LeaveCause.PENSTOCK_DRAIN])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_drain_stops_no_job_that_would_find_no_place(policy, cause):
    """Two jobs have to leave t4-00, and t4-01 has room for at most one. A third one waits."""
    low, high = running("1", "t4-00", 2), running("2", "t4-00", 2)
    other = job("other", phase=Phase.RUNNING, allocation=on("t4", t4_01=2), min_gpus=2, max_gpus=2, preemptible=False)
    state = snapshot("t4:2x4", [low, high, other, job("new", min_gpus=2, max_gpus=2)])
    drained = with_nodes(state, t4_00={"may_start": False, "leave": LeaveRequest(cause, "a fan")})
    plan = make_policy(policy)[0].decide(drained)
    stay = [name for name in ("1", "2") if plan.assignments[name].placement.nodes == ("t4-00",)]
    assert stay, "both have GPUs, and there is no room for both elsewhere"
    assert broken(drained, plan) == ()
    for name in stay:
        assert name not in plan.stops
        if policy in ("sia", "gavel", "pollux"):  # the others move no job from a node that drains
            assert "(a fan), but there is no other place for the job now" in plan.assignments[name].reason.text


@pytest.mark.parametrize("cause", [LeaveCause.DRAIN, LeaveCause.PENSTOCK_DRAIN])
@pytest.mark.parametrize("policy", ["sia", "gavel", "pollux"])
def test_a_drain_waits_until_a_new_run_has_begun_and_no_longer_than_a_start_may_take(policy, cause):
    """Tried: a drain 11 s after a grow, while the run imported, cost two restarts, 69 s. The round is at 1000 s."""
    state = snapshot("t4:2x4", [running("1", "t4-00", 2, min_gpus=2)])
    state = with_nodes(state, t4_00={"may_start": False, "leave": LeaveRequest(cause, "a fan")})
    plan = make_policy(policy)[0].decide(with_facts(state, starts_until_s={"1": 1100.0}))
    assert plan.assignments["1"].placement == on("t4", t4_00=2)
    assert plan.stops == {}
    text = plan.assignments["1"].reason.text
    assert "node t4-00 asks its jobs to leave" in text
    assert f"its new run has not reported its first step; this waits for that, at most until {clock(1100.0)}" in text
    for begun in ({}, {"1": 1000.0}):
        plan = make_policy(policy)[0].decide(with_facts(state, starts_until_s=begun))
        assert plan.assignments["1"].placement.nodes == ("t4-01",)


def test_a_job_whose_new_run_has_not_begun_is_not_moved_for_a_gain():
    rates = table(t4={1: 1.0}, a100={1: 4.0})
    state = snapshot("t4:1x1,a100:1x1", [running("1", "t4-00", 1, min_gpus=1, max_gpus=1)], {"1": rates})
    plan = make_policy("sia")[0].decide(with_facts(state, starts_until_s={"1": 1100.0}))
    assert plan.assignments["1"].placement == on("t4", t4_00=1)
    assert make_policy("sia")[0].decide(state).assignments["1"].placement.gpu_type == "a100"


@pytest.mark.parametrize("other", ["runs", "waits"])
def test_a_job_whose_new_run_has_not_begun_makes_room_for_jobs_that_wait_alone(other):
    """Job 2 is worth much more on the A100 that job 1 holds; it runs on a T4, or waits where nothing else is free."""
    rates = {"1": table(t4={1: 1.0}, a100={1: 1.1}), "2": table(t4={1: 1.0}, a100={1: 50.0})}
    first = job("1", phase=Phase.RUNNING, allocation=on("a100", a100_00=1), max_gpus=1, min_gpus=1)
    second = running("2", "t4-00", 1, min_gpus=1, max_gpus=1) if other == "runs" else job("2", min_gpus=1, max_gpus=1)
    state = snapshot("t4:2x1,a100:1x1" if other == "runs" else "t4:1x1,a100:1x1", [first, second], rates)
    if other == "waits":
        state = dataclasses.replace(state, jobs=(first, dataclasses.replace(second, weight=100.0)))
        state = with_nodes(state, t4_00={"gpus_others": 1})
    free = make_policy("sia")[0].decide(state)
    starts = make_policy("sia")[0].decide(with_facts(state, starts_until_s={"1": 1100.0}))
    assert "1" in free.stops, "else this shows nothing"
    assert ("1" in starts.stops) is (other == "waits")


def test_a_reservation_with_its_deadline_waits_for_no_first_step():
    state = snapshot("t4:2x4", [running("1", "t4-00", 2, min_gpus=2)])
    asked = LeaveRequest(LeaveCause.RESERVATION, "exam", by_s=1200.0)
    state = with_nodes(state, t4_00={"may_start": False, "leave": asked})
    plan = make_policy("sia")[0].decide(with_facts(state, starts_until_s={"1": 1100.0}))
    assert plan.assignments["1"].placement.nodes == ("t4-01",)


def test_a_drained_job_whose_budget_is_used_up_is_stopped():
    state = snapshot("t4:1x4", [running("1", "t4-00", 2)])
    state = with_nodes(state, t4_00={"may_start": False, "leave": LeaveRequest(LeaveCause.DRAIN)})
    used_up = GpuBudget("maths", "total", None, 1.0, 2.0, stops=True)
    jobs = tuple(dataclasses.replace(each, account="maths") for each in state.jobs)
    plan = make_policy("sia")[0].decide(dataclasses.replace(state, jobs=jobs, budgets=(used_up,)))
    assert set(plan.waiting) == {"1"}


def test_a_reservation_asks_the_others_to_leave_by_its_start():
    node = snapshot("t4:1x4", []).nodes[0]
    kept = dataclasses.replace(node, reservation="exam", reserved_s=5000.0)
    request = kept.leave_request("")
    assert request is not None
    assert (request.cause, request.by_s) == (LeaveCause.RESERVATION, 5000.0)
    assert kept.leave_request("exam") is None
    assert node.leave_request("") is None


def test_a_node_that_the_cluster_does_not_name_keeps_its_job():
    state = snapshot("t4:2x4", [job("1", phase=Phase.RUNNING, allocation=on("t4", t4_07=2), max_gpus=8)])
    plan = make_policy("sia")[0].decide(state)
    assert plan.assignments["1"].placement == on("t4", t4_07=2)
    assert "does not tell about node t4-07" in plan.assignments["1"].reason.text


GROUP = SharedGpus("t4-00", 2, (Pack(("a",), 2), Pack(("b", "gone"), 2)))


@pytest.mark.parametrize(
    "choice", ["gandiva", "antman", staged("sia", "gandiva-share"), staged("fifo", "antman-share")], ids=str
)
def test_jobs_that_share_gpus_stay_together(choice):
    """One of the two is in a partition that is down; the job that has left the group is not in it any more."""
    apart = Placement("t4", "fast", (Share("t4-00", 2),))
    a = job("a", phase=Phase.RUNNING, allocation=apart, partitions=("fast", "all"), min_gpus=2, max_gpus=2)
    state = with_nodes(snapshot("t4:2x2", [a, running("b", "t4-00", 2)]), t4_00={"partitions": ("all", "fast")})
    down = (Partition("all"), Partition("fast", may_start=False, state="DOWN"))
    state = shared(dataclasses.replace(state, partitions=down), GROUP)
    plan = make_policy(choice)[0].decide(state)
    assert {name: each.placement for name, each in plan.assignments.items()} == {j.id: j.allocation for j in state.jobs}
    assert plan.shared == (SharedGpus("t4-00", 2, (Pack(("a",), 2), Pack(("b",), 2))),)
    assert broken(state, plan) == ()


def test_a_pack_that_stays_on_a_silent_node_is_not_judged_by_its_memory():
    """Nobody could do anything about it there; the round must not fail for it."""
    state = snapshot("t4:1x2", [running("a", "t4-00"), running("b", "t4-00")])
    state = shared(with_nodes(state, t4_00={"may_start": False}), SharedGpus("t4-00", 1, (Pack(("a", "b")),)))
    assert state.sharing is not None
    little = dataclasses.replace(state.sharing, gpu_memory_mb={"t4": 1500})
    state = dataclasses.replace(state, sharing=little)
    plan = make_policy("gandiva")[0].decide(state)
    assert [group.jobs for group in plan.shared] == [("a", "b")]
    assert broken(state, plan) == ()


def test_a_policy_sees_open_nodes_as_the_same_objects():
    """Policies recognise what has not changed from round to round by that."""
    state = with_nodes(snapshot("t4:3x4", [running("1", "t4-00", 2)]), t4_00={"may_start": False})
    seen = []

    class Watching:
        name = "watching"

        def decide(self, snapshot):
            seen.append(snapshot)
            return make_policy("fifo")[0].decide(snapshot)

    Staying(Watching()).decide(state)
    assert seen[0].jobs == ()
    assert [new is old for new, old in zip(seen[0].nodes, state.nodes, strict=True)] == [False, True, True]


@pytest.mark.parametrize("policy", ["sia", "gavel", "fifo"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partitions": ("other",)}, "node t4-00 is no longer open to the job"),
        ({"gpus": 1}, "node t4-00 shows only 1 GPUs now"),
    ],
)
def test_a_job_stays_where_slurm_was_configured_anew(policy, changes, words):
    """There is a free node, to which it could move."""
    ran = running("1", "t4-00", 2, min_gpus=1, max_gpus=2)
    plan = make_policy(policy)[0].decide(with_nodes(snapshot("t4:2x4", [ran]), t4_00=changes))
    assert plan.assignments["1"].placement == ran.allocation
    assert words in plan.assignments["1"].reason.text


def test_a_job_stays_when_its_reservation_is_over():
    ran = running("1", "t4-00", 2, reservation="exam")
    plan = make_policy("sia")[0].decide(snapshot("t4:2x4", [ran]))
    assert plan.assignments["1"].placement == ran.allocation
