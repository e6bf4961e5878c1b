import dataclasses
from typing import Any

import pytest

from penstock_scheduler.model import Configuration, GpuLimit, Phase, Plan, ReasonCode, Snapshot
from penstock_scheduler.rounds.policies import make_policy, queues
from penstock_scheduler.rounds.policies.queues import SlurmBackfill, rho
from tests.scheduler.builders import job, on, snapshot, table, with_facts


def decide(policy: str, state: Snapshot, **settings: Any) -> Plan:
    return make_policy(policy, settings)[0].decide(state)


def wants(job_id: str, gpus: int, **fields: Any):
    return job(job_id, min_gpus=gpus, max_gpus=gpus, adaptivity="rigid", **fields)


def runs(job_id: str, gpus: int, first: int = 0, **fields: Any):
    """A job on nodes of one GPU each, from node `first` on."""
    nodes = {f"t4_{index:02d}": 1 for index in range(first, first + gpus)}
    return wants(job_id, gpus, phase=Phase.RUNNING, allocation=on("t4", **nodes), **fields)


def test_fifo_waits_behind_the_first_that_finds_no_room():
    jobs = [wants("a", 6, submit_s=1), wants("b", 8, submit_s=2), wants("c", 1, submit_s=3)]
    plan = decide("fifo", snapshot("t4:10x1", jobs))
    assert set(plan.chosen) == {"a"}
    assert "job b is before it in the queue" in plan.waiting["c"].text


def textbook() -> Snapshot:
    """Ten GPUs; A holds six for 100 s more. B wants eight: it can start in 100 s, and two are to spare then.

    C wants three for 50 s: it ends before. D wants one for 500 s: it takes one of those to spare, and not of B's. E wants the
    same: what is to spare is taken, by D and for now by C.
    """
    return snapshot(
        "t4:10x1",
        [
            runs("A", 6, submit_s=0, time_limit_s=200.0),
            wants("B", 8, submit_s=1, time_limit_s=300.0),
            wants("C", 3, submit_s=2, time_limit_s=100.0),
            wants("D", 1, submit_s=3, time_limit_s=500.0),
            wants("E", 1, submit_s=4, time_limit_s=500.0),
            wants("F", 1, submit_s=5),
        ],
        attained={"A": {"t4": 600.0}, "C": {"t4": 150.0}},
    )


def test_easy_backfill_does_not_delay_the_first_job():
    plan = decide("fifo", textbook(), backfill="easy")
    assert set(plan.chosen) == {"A", "C", "D"}
    assert plan.assignments["C"].placement.nodes == ("t4-06", "t4-07", "t4-08")
    assert plan.assignments["D"].placement.nodes == ("t4-09",)
    assert plan.waiting["B"].estimated_start_s == 1100.0
    assert "would delay job B" in plan.waiting["E"].text
    assert "would delay job B" in plan.waiting["F"].text, "its duration is unknown"


def test_out_of_order_all_that_fit_start():
    """A has 6 of 10 GPUs. B wants 8, C 3, and D one. C has 150 GPU-seconds behind it, which do not matter here."""
    plan = decide("fifo", textbook(), backfill="out-of-order")
    assert set(plan.chosen) == {"A", "C", "D"}
    assert plan.assignments["D"].reason.text.endswith("job B before it does not fit")
    assert "waits for 8 free GPUs" in plan.waiting["B"].text
    assert "waits for 1 free GPUs" in plan.waiting["E"].text
    assert plan.waiting["B"].estimated_start_s is None, "nothing is reserved"


def test_no_job_passes_the_first_one_if_its_start_is_unknown():
    state = textbook()
    blind = dataclasses.replace(state.jobs[0], time_limit_s=None)
    plan = decide("fifo", dataclasses.replace(state, jobs=(blind, *state.jobs[1:])), backfill="easy")
    assert set(plan.chosen) == {"A"}
    assert "it is unknown when" in plan.waiting["C"].text


def test_work_that_is_left_is_an_estimate_too_and_a_restart_counts():
    """A's 120 units at 6 a second are 20 s, taken as the shortest, 60 s. C's at 3 a second: 30 s + 30 s to start just fits."""
    state = textbook()
    told = with_facts(state, remaining_work={"A": 120.0, "C": 90.0})
    plan = decide("fifo", told, backfill="easy")
    assert plan.waiting["B"].estimated_start_s == 1060.0
    assert "C" in plan.chosen
    assert "C" not in decide("fifo", with_facts(told, remaining_work={"A": 120.0, "C": 91.0}), backfill="easy").chosen


def test_slurm_reserves_for_every_job_in_its_order():
    """Four GPUs, A holds three for 100 s. B wants all four and gets them then, for 100 s. C and D come after B: D, one for 250 s,
    would keep B from its four. E, one for 90 s, starts now."""
    jobs = [
        runs("A", 3, submit_s=0, time_limit_s=100.0),
        wants("B", 4, submit_s=1, time_limit_s=100.0),
        wants("C", 2, submit_s=2, time_limit_s=100.0),
        wants("D", 1, submit_s=3, time_limit_s=250.0),
        wants("E", 1, submit_s=4, time_limit_s=90.0),
    ]
    plan = decide("slurm-backfill", snapshot("t4:4x1", jobs))
    assert set(plan.chosen) == {"A", "E"}
    starts = {job_id: reason.estimated_start_s for job_id, reason in plan.waiting.items()}
    assert starts == {"B": 1100.0, "C": 1200.0, "D": 1200.0}


def test_slurm_keeps_the_second_reservation_where_easy_does_not():
    """Six GPUs, A holds four for 100 s. B wants four then, C all six after that. D wants two for 250 s: EASY sees that
    they are not B's and starts it; Slurm sees that C would start later."""
    jobs = [
        runs("A", 4, submit_s=0, time_limit_s=100.0),
        wants("B", 4, submit_s=1, time_limit_s=100.0),
        wants("C", 6, submit_s=2, time_limit_s=100.0),
        wants("D", 2, submit_s=3, time_limit_s=250.0),
    ]
    state = snapshot("t4:6x1", jobs)
    assert set(decide("fifo", state, backfill="easy").chosen) == {"A", "D"}
    plan = decide("slurm-backfill", state)
    assert set(plan.chosen) == {"A"}
    assert plan.waiting["C"].estimated_start_s == 1200.0


def test_slurm_plans_a_day_ahead_and_a_year_where_there_is_no_limit():
    """A has no limit, so B would start beyond the window: nothing is kept for it, and C starts."""
    jobs = [runs("A", 3, submit_s=0), wants("B", 4, submit_s=1), wants("C", 1, submit_s=2, time_limit_s=4e7)]
    state = snapshot("t4:4x1", jobs)
    assert set(decide("slurm-backfill", state).chosen) == {"A", "C"}
    assert set(decide("slurm-backfill", state, default_time_limit_s=3600.0).chosen) == {"A"}


def test_slurm_reserves_gpus_for_the_first_jobs_only(monkeypatch):
    jobs = [
        runs("A", 4, submit_s=0, time_limit_s=100.0),
        wants("B", 4, submit_s=1, time_limit_s=100.0),
        wants("C", 6, submit_s=2, time_limit_s=100.0),
        wants("D", 2, submit_s=3, time_limit_s=250.0),
    ]
    monkeypatch.setattr(SlurmBackfill, "reservations", 1)
    assert "D" in decide("slurm-backfill", snapshot("t4:6x1", jobs)).chosen


def test_las_serves_the_job_with_least_service_and_stops_the_one_with_most():
    jobs = [runs("much", 2, submit_s=0), runs("some", 2, first=2, submit_s=0), wants("none", 2, submit_s=5)]
    attained = {"much": {"t4": 7300.0}, "some": {"t4": 3700.0}}
    plan = decide("las", snapshot("t4:4x1", jobs, attained=attained))
    assert set(plan.chosen) == {"some", "none"}
    assert plan.assignments["none"].placement == on("t4", t4_00=1, t4_01=1)
    assert "makes room for job none" in plan.waiting["much"].text


def test_las_does_not_swap_jobs_within_a_step(monkeypatch):
    jobs = [runs("runs", 4, submit_s=5), wants("waits", 4, submit_s=0)]
    state = snapshot("t4:4x1", jobs, attained={"runs": {"t4": 3000.0}, "waits": {"t4": 0.0}})
    assert set(decide("las", state).chosen) == {"runs"}
    monkeypatch.setattr(queues, "STEP_GPU_S", 1.0)
    assert set(decide("las", state).chosen) == {"waits"}


def test_no_job_is_stopped_for_a_job_that_would_still_not_fit():
    jobs = [runs("runs", 2, submit_s=0), runs("kept", 2, first=2, submit_s=0), wants("big", 4, submit_s=5)]
    pinned = dataclasses.replace(jobs[1], spec=jobs[1].spec.model_copy(update={"preemptible": False}))
    state = snapshot("t4:4x1", [jobs[0], pinned, jobs[2]], attained={"runs": {"t4": 9999.0}})
    assert set(decide("las", state).chosen) == {"runs", "kept"}


def test_only_those_in_the_way_are_stopped():
    """The job needs a whole node, and only the other one can be freed: the job further behind keeps its own."""
    last = wants("last", 1, phase=Phase.RUNNING, allocation=on("t4", t4_00=1), submit_s=0)
    other = wants("other", 2, phase=Phase.RUNNING, allocation=on("t4", t4_01=2), submit_s=0)
    state = snapshot(
        "t4:2x2", [last, other, wants("new", 2, submit_s=5)], attained={"last": {"t4": 9e4}, "other": {"t4": 5e4}}
    )
    shared = dataclasses.replace(state.nodes[0], gpus_others=1)
    plan = decide("las", dataclasses.replace(state, nodes=(shared, state.nodes[1])))
    assert plan.assignments["new"].placement == on("t4", t4_01=2)
    assert set(plan.chosen) == {"last", "new"}


def test_srtf_takes_the_shortest_by_work_or_by_limit_and_the_unknown_last():
    """300 units at 1 a second on t4: 300 s and 30 s to start. Its limit leaves `limit` 200 s, and `runs` needs 400 s more."""
    jobs = [
        runs("runs", 1, submit_s=0),
        wants("work", 1, submit_s=3),
        wants("limit", 1, submit_s=4, time_limit_s=200.0),
        wants("unknown", 1, submit_s=1),
    ]
    state = snapshot("t4:2x1", jobs, remaining={"runs": 400.0, "work": 300.0})
    assert set(decide("srtf", state).chosen) == {"limit", "work"}
    sooner = with_facts(state, remaining_work={"runs": 320.0, "work": 300.0})
    assert set(decide("srtf", sooner).chosen) == {"limit", "runs"}


def test_ftf_is_that_of_themis():
    """Four GPUs and two jobs: a share of two. Submitted 1000 s ago, ran for 100 s on four, 300 s to go:
    (1000 + 300) / ((100 + 300) x 4 / 2) = 1.625; on two GPUs or fewer it is (1000 + 300) / 400 = 3.25."""
    four, two = runs("four", 4, submit_s=0), wants("two", 2, submit_s=0)
    state = snapshot("t4:4x1", [four, two], remaining={"four": 1200.0, "two": 0.0}, attained={"four": {"t4": 400.0}})
    assert rho(state, four, Configuration(4, 4, "t4"), 4.0) == pytest.approx(1.625)
    unknown = with_facts(state, remaining_work={}, attained_gpu_s={"two": {"t4": 400.0}})
    assert rho(unknown, two, Configuration(2, 2, "t4"), 2.0) == pytest.approx((1000 + 200) / 400)
    assert rho(with_facts(unknown, attained_gpu_s={}), two, Configuration(2, 2, "t4"), 2.0) == float("inf")


def test_ftf_serves_the_least_fairly_treated(monkeypatch):
    """On one GPU: `old` has waited 1000 s for 100 s of work, rho 11.3 / 1.3; `young` waited 100 s for 100 s, rho 2.3 / 1.3."""
    jobs = [runs("young", 1, submit_s=900), wants("old", 1, submit_s=0)]
    state = snapshot("t4:1x1", jobs, remaining={"young": 100.0, "old": 100.0})
    assert set(decide("ftf", state).chosen) == {"old"}
    close = snapshot("t4:1x1", [jobs[0], wants("old", 1, submit_s=880)], remaining={"young": 100.0, "old": 100.0})
    monkeypatch.setattr(queues, "STEP_RHO", 10.0)
    assert set(decide("ftf", close).chosen) == {"young"}


def test_part_of_a_node_comes_from_the_fullest():
    """Of 4 and 2 free GPUs, best-fit takes the node with 2."""
    jobs = [wants("a", 2, phase=Phase.RUNNING, allocation=on("t4", t4_01=2), submit_s=0), wants("b", 2, submit_s=1)]
    state = snapshot("t4:2x4", jobs)
    assert decide("fifo", state).assignments["b"].placement == on("t4", t4_01=2)


def test_a_job_over_its_limit_waits_and_delays_no_other_job():
    jobs = [runs("a", 2, submit_s=0), wants("b", 2, submit_s=1), wants("c", 1, submit_s=2)]
    state = dataclasses.replace(snapshot("t4:4x1", jobs), limits=(GpuLimit("user", "ada", 3),))
    plan = decide("fifo", state)
    assert set(plan.chosen) == {"a", "c"}
    assert "the limit of 3 GPUs for user ada" in plan.waiting["b"].text


def test_an_odd_request_and_one_that_can_never_be():
    plan = decide("fifo", snapshot("t4:1x4", [wants("three", 3), wants("five", 5)]))
    assert plan.chosen == {"three": Configuration(1, 3, "t4")}
    assert plan.waiting["five"].code is ReasonCode.NEVER_FITS


def test_a_type_on_which_the_job_makes_no_progress_is_not_given():
    state = snapshot("a100:1x1,t4:1x1", [wants("j", 1)], {"j": table(t4={1: 1.0})})
    assert decide("fifo", state).chosen == {"j": Configuration(1, 1, "t4")}


def test_a_job_gets_the_most_that_it_asks_for_or_waits():
    busy = wants("busy", 4, phase=Phase.RUNNING, allocation=on("t4", t4_00=4), submit_s=0)
    state = snapshot("t4:2x4", [busy, job("j", max_gpus=8, submit_s=1)])
    assert set(decide("fifo", state).chosen) == {"busy"}
    assert decide("fifo", snapshot("t4:2x4", [job("j", max_gpus=8)])).chosen == {"j": Configuration(2, 8, "t4")}


def test_a_running_job_on_a_draining_node_stays():
    state = snapshot("t4:2x1", [runs("j", 1, submit_s=0)])
    drained = dataclasses.replace(state.nodes[0], may_start=False)
    for policy in ("fifo", "las"):
        plan = decide(policy, dataclasses.replace(state, nodes=(drained, state.nodes[1])))
        assert plan.assignments["j"].placement == on("t4", t4_00=1)


def test_what_is_kept_from_round_to_round_is_no_longer_used_when_it_has_changed():
    fifo = make_policy("fifo")[0]
    here = snapshot("a100:1x2,t4:1x2", [wants("j", 1)], {"j": table(t4={1: 1.0, 2: 1.5})})
    assert fifo.decide(here).chosen == {"j": Configuration(1, 1, "t4")}
    larger = dataclasses.replace(here, jobs=(wants("j", 2),))
    assert fifo.decide(larger).chosen == {"j": Configuration(1, 2, "t4")}
    faster = with_facts(here, model={"j": table(a100={1: 9.0, 2: 1.5})})
    assert fifo.decide(faster).chosen == {"j": Configuration(1, 1, "a100")}
    gone = dataclasses.replace(here, nodes=here.nodes[:1])
    assert fifo.decide(gone).waiting["j"].code is ReasonCode.NEVER_FITS


def test_a_job_that_outlives_what_its_user_said_is_not_always_about_to_end():
    """It said 1 s and has run for 600 s: it may run for 600 s more, and the other needs 500 s."""
    said = runs("said", 1, runtime_s=1.0, time_limit_s=10_000.0)
    other = wants("other", 1, time_limit_s=500.0, submit_s=1.0)
    state = with_facts(snapshot("t4:1x1", [said, other]), attained_gpu_s={"said": {"t4": 600.0}})
    plan = decide("srtf", state)
    assert set(plan.chosen) == {"other"}
