"""Jobs that have not shown that they can save are not moved; what saving and starting take is what a restart costs."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_loopback.demo.simulated import MemoryStore
from penstock_profiles.families import load_families
from penstock_profiles.wire import Body, Checkpointed, Report, SaveFailed, Started
from penstock_scheduler.accounts.limits import PartitionRules, by_partition
from penstock_scheduler.api.ports import ClusterParts
from penstock_scheduler.jobs.learned_models import LearnedModels
from penstock_scheduler.jobs.models import SpecModels
from penstock_scheduler.model import Job, JobSpec, LeaveCause, LeaveRequest, Pack, Phase, SharedGpus
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.rounds.explain import explain, words
from penstock_scheduler.rounds.loop import RoundLoop, RoundTiming
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.triggers import Period
from penstock_scheduler.simulator import EstimatedJob, SimulatedClock, SimulatedCluster, SimulatedJob, nodes_from_spec
from tests.constants import constants
from tests.scheduler.builders import job, on, snapshot, staged, table, with_facts
from tests.scheduler.policies.sharing_cases import running, shared
from tests.scheduler.test_models import NoHistory

POLICIES = sorted(REGISTRY)

RATES = {"t4": {1: 1.0, 2: 1.9, 4: 3.6}, "a100": {1: 4.0, 2: 7.6, 4: 14.4}}


def models(history: NoHistory | None = None) -> LearnedModels:
    return LearnedModels(SpecModels(load_families(), restart_cost_s=30.0), history or NoHistory())


def report(job_id: str, body: Body, *, time_s: float = 1000.0, epoch: int = 1, sequence: int = 0) -> Report:
    return Report(job_id=job_id, epoch=epoch, sequence=sequence, time_s=time_s, body=body)


def saved(job_id: str, seconds: float, sequence: int = 1) -> Report:
    return report(job_id, Checkpointed(progress=1.0, seconds=seconds), sequence=sequence)


def began(job_id: str, time_s: float, epoch: int = 1) -> Report:
    return report(job_id, Started(gpu_type="t4", gpu_ids={}), time_s=time_s, epoch=epoch)


def holds(job_id: str, node: str = "t4_00", gpus: int = 1, **fields: object) -> Job:
    return job(job_id, phase=Phase.RUNNING, allocation=on("t4", **{node: gpus}), started_s=900.0, **fields)


# --- not moved


@pytest.mark.parametrize(("spec", "moves"), [({}, False), ({"checkpointable": True}, True)])
def test_a_job_that_only_sleeps_is_not_restarted_while_others_come_and_go(spec: dict[str, bool], moves: bool):
    """Tried: without a word about saving, `sleep` jobs began from zero two or three times within two minutes."""
    clock = SimulatedClock()
    jobs = [
        SimulatedJob(
            str(i), f"j{i}", JobSpec(max_gpus=4, goodput_table=RATES, **spec), EstimatedJob(table(**RATES), 600.0), at_s
        )
        for i, at_s in enumerate([0.0, 20.0, 25.0, 60.0, 130.0, 260.0])
    ]
    cluster = SimulatedCluster(nodes_from_spec("t4:2x4,a100:1x4"), jobs, clock)
    policy, choice = make_policy("sia")
    loop = RoundLoop(
        ClusterParts(cluster), clock, MemoryStore(), RoundTiming(Period(20.0), 5.0), policy, models(), choice
    )
    while not cluster.finished and clock.now_s() < 3600.0:
        loop.tick()
        clock.sleep(5.0)
    assert cluster.finished
    assert any(each.restarts for each in cluster.jobs.values()) is moves


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_moves_a_job_that_has_not_saved(policy: str):
    """It holds a slow GPU, a faster one is free, and another job waits for its node; one that saves is in the policy's hands."""
    first = holds("old", max_gpus=1)
    jobs = [first, job("new", submit_s=-500.0, min_gpus=4, max_gpus=4, gpu_types=["t4"])]
    state = with_facts(snapshot("t4:1x4,a100:1x4", jobs, {"old": table(**RATES)}), saves={"old": False})
    plan = make_policy(policy)[0].decide(state)
    assert plan.assignments["old"].placement == first.allocation
    assert "has not shown that it can save" in plan.assignments["old"].reason.text


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drain_waits_for_a_job_that_has_not_saved(policy: str):
    """As in Slurm, where a drained node's jobs run to their end."""
    first = holds("1", max_gpus=1)
    state = with_facts(snapshot("t4:2x4", [first]), saves={"1": False})
    asked = dataclasses.replace(state.nodes[0], may_start=False, leave=LeaveRequest(LeaveCause.DRAIN, "a fan"))
    state = dataclasses.replace(state, nodes=(asked, *state.nodes[1:]))
    assert make_policy(policy)[0].decide(state).assignments["1"].placement == first.allocation


@pytest.mark.parametrize("choice", ["gandiva", staged("sia", "gandiva-share")], ids=str)
def test_a_job_that_shares_gpus_and_has_not_saved_stays_where_it_is(choice):
    """The other job can save, so the policy may move it to free GPUs."""
    group = SharedGpus("t4-00", 2, (Pack(("a",), 2), Pack(("b",), 2)))
    jobs = [running("a", "t4-00", 2), running("b", "t4-00", 2)]
    state = with_facts(shared(snapshot("t4:1x2,a100:1x4", jobs), group), saves={"a": False})
    plan = make_policy(choice)[0].decide(state)
    assert plan.assignments["a"].placement == jobs[0].allocation
    assert "b" in plan.assignments


def test_jobs_that_have_not_saved_get_time_slices():
    """A suspended job keeps its memory, so it loses nothing."""
    jobs = [running("a", "t4-00", 2), job("b", min_gpus=2, max_gpus=2, submit_s=1.0)]
    state = with_facts(shared(snapshot("t4:1x2", jobs)), saves={"a": False})
    plan = make_policy("gandiva")[0].decide(state)
    assert plan.assignments["a"].placement == jobs[0].allocation
    assert [set(each.jobs) for each in plan.shared] == [{"a", "b"}]


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_that_has_not_saved_is_not_migrated_off_its_time_slices(saves: bool):
    """A node is free, so a job that saves leaves the node on which it gets time slices."""
    group = SharedGpus("t4-00", 2, (Pack(("a",), 2), Pack(("b",), 2)))
    jobs = [running("a", "t4-00", 2), running("b", "t4-00", 2)]
    state = with_facts(shared(snapshot("t4:2x2", jobs), group), saves={"a": saves, "b": saves})
    with constants({"policy.gandiva": {"interval_s": 0.0}}):
        plan = make_policy("gandiva")[0].decide(state)
    moved = [each.id for each in jobs if plan.assignments[each.id].placement != each.allocation]
    assert len(moved) == (1 if saves else 0)


def explained(jobs: list[Job], saves: dict[str, bool], failure: str = "") -> str:
    state = with_facts(snapshot("t4:1x4", jobs), saves=saves, save_failure={"1": failure})
    policy, choice = make_policy("sia")
    found = explain(RoundRecord(state, choice, policy.decide(state)), "1")
    assert found is not None
    return "\n".join(words(found, now_s=1000.0))


def test_explain_says_what_a_stop_would_cost():
    text = explained([holds("1")], {"1": False})
    assert "a restart would cost it 2 min of training" in text
    assert "docs/user/saving.md" in text
    assert "For a move, sia counts" not in text
    assert "A restart costs it about 30 s" in explained([holds("1")], {"1": True})
    assert "saving.md" not in explained([holds("1", preemptible=False)], {"1": False}), "it is never moved"
    text = explained([holds("1")], {"1": False}, "the disk is full")
    assert "It could not save its state (the disk is full): Penstock neither moves nor resizes it" in text


# --- what shows that a job can save


def can_save(source: LearnedModels, *jobs: Job) -> dict[str, bool]:
    return {name: facts.saves for name, facts in source.facts(jobs, ["t4"]).items()}


def test_a_completed_checkpoint_shows_it_and_so_does_the_job_spec():
    source = models()
    jobs = [holds("1"), holds("2", checkpointable=True), holds("3", checkpoint_every_s=600.0), holds("4")]
    source.learn([began("1", 910.0), began("4", 910.0)])
    assert can_save(source, *jobs) == {"1": False, "2": True, "3": True, "4": False}
    source.learn([saved("1", 2.0)])
    assert can_save(source, *jobs) == {"1": True, "2": True, "3": True, "4": False}
    assert can_save(source, *jobs)["1"], "also in the next round"
    queued = job("1", restarts=1)
    assert can_save(source, queued)["1"], "also between two runs"


def test_a_checkpoint_that_fails_takes_the_proof_back_until_the_next_one():
    history = NoHistory()
    source, there = models(history), holds("1", checkpointable=True)
    failed = report("1", SaveFailed(text="the disk is full"), sequence=2)
    source.learn([saved("1", 2.0), failed])
    assert can_save(source, there) == {"1": False}
    assert source.facts([there], ["t4"])["1"].save_failure == "the disk is full"
    source.learn([saved("1", 2.0, sequence=3)])
    assert can_save(source, there) == {"1": True}
    assert source.facts([there], ["t4"])["1"].save_failure == ""
    history.seen = [saved("1", 2.0), failed]
    assert can_save(models(history), there) == {"1": False}, "a daemon that starts knows it"


def test_a_daemon_that_starts_knows_what_a_job_has_shown():
    history = NoHistory()
    history.seen = [saved("1", 2.0)]
    assert can_save(models(history), holds("1"), holds("2")) == {"1": True, "2": False}


def test_traces_are_of_jobs_that_save():
    facts = SpecModels(load_families(), 30.0).facts([holds("1")], ["t4"])
    assert facts["1"].saves


# --- whether a new run has begun


def starts_until(source: LearnedModels, there: Job) -> float:
    return source.facts([there], ["t4"])["1"].starts_until_s


def test_a_run_starts_until_its_first_report():
    """Slurm began the first run at 900 s and the second one at 2000 s. The first one's start took 50 s, and 3 * 50 = 150."""
    source = models()
    assert starts_until(source, holds("1")) == 0.0, "whether it ever reports is not known"
    source.learn([began("1", 950.0), saved("1", 2.0)])
    assert starts_until(source, holds("1")) == 0.0, "it has begun"
    again = dataclasses.replace(holds("1"), started_s=2000.0, restarts=1)
    assert starts_until(source, job("1", restarts=1)) == 0.0, "it does not run"
    assert starts_until(source, again) == 2150.0
    assert starts_until(source, again) == 2150.0, "also in the next round"
    source.learn([began("1", 2030.0, epoch=2)])
    assert starts_until(source, again) == 0.0


@pytest.mark.parametrize(("took_s", "patience_s"), [(1.0, 120.0), (39.0, 120.0), (100.0, 300.0), (1e9, 600.0)])
def test_a_start_is_waited_for_within_bounds_whatever_a_job_reports(took_s: float, patience_s: float):
    source = models()
    source.learn([began("1", 900.0 + took_s)])
    starts_until(source, holds("1"))
    later = 900.0 + 2 * took_s
    assert starts_until(source, dataclasses.replace(holds("1"), started_s=later)) == later + patience_s


def test_a_daemon_that_starts_waits_for_the_run_of_a_job_that_has_reported():
    history = NoHistory()
    history.seen = [began("1", 950.0)]
    assert starts_until(models(history), dataclasses.replace(holds("1"), started_s=2000.0)) == 2120.0
    assert starts_until(models(history), holds("1")) == 0.0
    history.seen = []
    assert starts_until(models(history), dataclasses.replace(holds("1"), started_s=2000.0)) == 0.0


# --- what a restart costs


def costs(source: LearnedModels, *jobs: Job) -> dict[str, float]:
    return {name: facts.restart_cost_s for name, facts in source.facts(jobs, ["t4"]).items()}


def test_a_restart_costs_what_saving_and_starting_took():
    """Slurm began the run at 900 s, and it reported at 912 s; saving took 2, 9 and 3 s. 3 + 12 s, not the site's 30 s."""
    source = models()
    ours = holds("1")
    source.learn([began("1", 912.0), saved("1", 2.0)])
    assert costs(source, ours) == {"1": 14.0}
    source.learn([saved("1", 9.0, 2), saved("1", 3.0, 3)])
    assert costs(source, ours) == {"1": 15.0}
    assert costs(source, dataclasses.replace(ours, pauses_s=(20.0,))) == {"1": 20.0}, "a whole move tells more"
    assert costs(source, holds("1", restart_cost_s=50.0)) == {"1": 15.0}, "also more than its job spec"


def test_the_start_of_an_earlier_run_is_not_that_of_this_one():
    source = models()
    source.learn([began("1", 850.0), saved("1", 2.0)])
    assert costs(source, holds("1")) == {"1": 30.0}


def test_jobs_of_its_family_and_on_its_nodes_say_what_it_may_cost():
    """`2` is of the family: 2 + 12 s. `3` saves by itself, in 5 s, on the node where a start took 12 s. `4` is like none."""
    source = models()
    ours = holds("1", model_family="yolov3")
    others = [
        holds("2", "t4_01", model_family="yolov3"),
        holds("3", "t4_00"),
        holds("4", "t4_01"),
        holds("5", "t4_01", model_family="yolov3", restart_cost_s=50.0),
    ]
    source.learn([began("1", 912.0), saved("1", 2.0), saved("3", 5.0)])
    assert costs(source, ours, *others) == {"1": 14.0, "2": 14.0, "3": 17.0, "4": 30.0, "5": 50.0}


def test_a_partitions_constant_gives_way_to_what_was_measured():
    source = models()
    jobs = (holds("1"), holds("2"))
    source.learn([began("1", 912.0), saved("1", 2.0)])
    rules = {"all": PartitionRules(restart_cost_s=99.0)}
    _, facts = by_partition(rules, jobs, source.facts(jobs, ["t4"]))
    assert {name: known.restart_cost_s for name, known in facts.items()} == {"1": 14.0, "2": 99.0}
