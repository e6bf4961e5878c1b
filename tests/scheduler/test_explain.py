"""What `explain` says of jobs that wait and of jobs that run, on rounds that were really decided."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_profiles.sensitivity import Option, Sensitivity, SensitivityProfile
from penstock_scheduler.model import (
    BudgetLine,
    CloudRun,
    CloudState,
    Configuration,
    GpuLimit,
    NodeChoice,
    Offer,
    Phase,
    ReasonCode,
    ResourceRequest,
    Snapshot,
)
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.model.waiting import Wait, WaitingPolicy
from penstock_scheduler.rounds.explain import explain, words
from penstock_scheduler.rounds.policies import make_policy
from penstock_scheduler.rounds.policies.tuning import Amount
from penstock_scheduler.rounds.shares import ShareUse
from tests.scheduler.builders import job, on, snapshot, staged, table, with_facts

FAST = table(a100={1: 100.0, 2: 190.0, 4: 360.0, 8: 650.0}, t4={1: 20.0, 2: 38.0, 4: 70.0})


def decided(snapshot: Snapshot, policy: PolicyChoice | str = "sia") -> RoundRecord:
    made, choice = make_policy(policy)
    return RoundRecord(snapshot, choice, made.decide(snapshot))


def full_cluster(**spec: object) -> RoundRecord:
    """Job 1 holds the only A100s and may not be moved; job 2 wants A100s; four T4 are free."""
    held = on("a100", a100_00=4)
    jobs = [
        job("1", phase=Phase.RUNNING, allocation=held, min_gpus=4, max_gpus=4, preemptible=False, time_limit_s=3600.0),
        job("2", submit_s=900.0, **spec),
    ]
    return decided(snapshot("t4:1x4,a100:1x4", jobs, {"1": FAST, "2": FAST}, attained={"1": {"a100": 4 * 600.0}}))


def test_a_waiting_job_is_told_which_jobs_hold_its_gpus_and_what_would_help():
    said = explain(full_cluster(min_gpus=2, max_gpus=2, gpu_types=("a100",)), "2")
    assert said is not None
    assert said.assignment is None
    assert [(use.gpu_type, use.gpus, use.allocated, use.others, use.free) for use in said.uses] == [
        ("a100", 4, 4, 0, 0)
    ]
    # Job 1 may run for 3600 s and has run for 4 x 600 / 4.
    assert [(e.job, e.gpus, e.gpu_type, e.until_s) for e in said.holders] == [("1", 4, "a100", 1000.0 + 3000.0)]
    assert {remedy.change: remedy.gets for remedy in said.remedies} == {
        "any GPU type (no --gpu-types)": Configuration(1, 2, "t4"),
    }
    text = words(said, now_s=1060.0)
    assert text[0].startswith("Job 2 waits: ")
    assert text[0].endswith("It needs 2 GPUs of type a100.")
    assert "Of 4 a100 GPUs that it may use, 4 are allocated to other jobs, 0 are free." in text
    assert "Job 1 has 4 a100: expected end in 49 min." in text  # 2940 s from now
    assert "With any GPU type (no --gpu-types) it would have started in this round, on 2 t4." in text
    assert any("not known" in line for line in text)


def test_a_job_learns_of_holders_without_a_known_end_too():
    """Half of the 4 GPUs that job 9 needs are held by a job that cannot move. Nothing there "does more for other jobs"."""
    held = on("t4", t4_00=2)
    jobs = [
        job("1", phase=Phase.RUNNING, allocation=held, min_gpus=2, max_gpus=2, preemptible=False),
        job("9", adaptivity="rigid", min_gpus=4, max_gpus=4),
    ]
    said = explain(decided(snapshot("t4:1x4", jobs, {"1": FAST, "9": FAST})), "9")
    assert said is not None
    text = words(said, now_s=1000.0)
    assert text[0] == ("Job 9 waits: other jobs have the GPUs that it could use. It needs 4 GPUs of any type.")
    assert "Of 4 t4 GPUs that it may use, 2 are allocated to other jobs, 2 are free." in text
    assert "Job 1 has 2 t4: its end is not known." in text
    assert any(line.startswith("With --adaptive=strong-scaling --min-gpus=1 it would have started") for line in text)


def test_many_holders_are_summed_up():
    jobs = [
        job(
            str(n),
            phase=Phase.RUNNING,
            allocation=on("t4", **{f"t4_{n:02}": 4}),
            min_gpus=4,
            max_gpus=4,
            preemptible=False,
        )
        for n in range(7)
    ]
    state = snapshot("t4:7x4", [*jobs, job("9", min_gpus=4, max_gpus=4)], dict.fromkeys("01234569", FAST))
    text = words(explain(decided(state), "9"), now_s=1000.0)  # type: ignore[arg-type]
    assert sum("its end is not known" in line for line in text) == 5
    assert "2 further jobs have 8 GPUs that it could use." in text


def test_changes_that_help_only_together_are_named_together():
    """The only free GPU is a T4, and job 3 may have neither one GPU nor T4s."""
    jobs = [
        job("1", phase=Phase.RUNNING, allocation=on("a100", a100_00=4), min_gpus=4, max_gpus=4, preemptible=False),
        job("2", phase=Phase.RUNNING, allocation=on("t4", t4_00=3), min_gpus=3, max_gpus=3, preemptible=False),
        job("3", min_gpus=2, max_gpus=2, gpu_types=("a100",)),
    ]
    record = decided(snapshot("t4:1x4,a100:1x4", jobs, dict.fromkeys("123", FAST)))
    said = explain(record, "3")
    assert said is not None
    assert [(r.change, r.gets) for r in said.remedies] == [
        ("any GPU type (no --gpu-types) and --min-gpus=1", Configuration(1, 1, "t4"))
    ]
    assert explain(record, "3", remedies=0).remedies == ()  # type: ignore[union-attr]


def test_a_rigid_job_is_told_what_adapting_would_give():
    held = on("t4", t4_00=3)
    jobs = [
        job("1", phase=Phase.RUNNING, allocation=held, min_gpus=3, max_gpus=3, preemptible=False),
        job("2", adaptivity="rigid", min_gpus=4, max_gpus=4),
    ]
    said = explain(decided(snapshot("t4:1x4", jobs, {"1": FAST, "2": FAST})), "2")
    assert said is not None
    assert [(r.change, r.gets.gpus) for r in said.remedies] == [
        ("--adaptive=strong-scaling --min-gpus=1", 1),
        ("--min-gpus=1 --max-gpus=1", 1),
    ]


def test_a_job_that_never_fits_gets_no_promise():
    said = explain(decided(snapshot("t4:1x4", [job("2", min_gpus=64, max_gpus=64)], {"2": FAST})), "2")
    assert said is not None
    assert said.reason.code is ReasonCode.NEVER_FITS
    text = words(said, now_s=1000.0)
    assert text[0].startswith("Job 2 cannot start: needs 64 GPUs, but")
    assert not any("not known" in line for line in text)


def test_a_running_job_hears_its_numbers():
    running = job("1", phase=Phase.RUNNING, allocation=on("a100", a100_00=4), max_gpus=4, restarts=2, submit_s=0.0)
    other = job("2", max_gpus=4, gpu_types=("t4",))
    record = decided(snapshot("t4:1x4,a100:1x4", [running, other], {"1": FAST, "2": FAST}, time_s=1000.0))
    said = explain(record, "1")
    assert said is not None
    assert said.assignment is not None
    held = [option for option in said.options if option.held]
    assert [(o.configuration, o.goodput) for o in held] == [(Configuration(1, 4, "a100"), 360.0)]
    assert held[0].price == pytest.approx(4 * record.plan.prices["a100"])
    assert [o.goodput for o in said.options] == sorted((o.goodput for o in said.options), reverse=True)
    text = words(said, now_s=1000.0)
    assert text[0] == "Job 1 runs. Round 1: " + said.reason.text + "."
    assert "about 18 times as fast as on 1 t4" in said.reason.text
    assert "A restart costs it about 30 s of training; so far it was moved 2 times." in text
    # (1000 s - 2 * 30 s) / (1000 s + 30 s), times T / (T + 30 s): nobody knows how long
    # it still runs, but longer where it is slower.
    assert "For a move, sia counts 71% to 86% of the job's goodput elsewhere, because of the restart." in text
    assert "No other job would gain from more a100 GPUs in this round." in text
    assert any(line.startswith("Its expected speed, relative to its best configuration: 4 a100: 100%") for line in text)


@pytest.mark.parametrize("policy", ["fifo", staged("fifo", partitions={"debug": "sia"})])
def test_a_policy_that_weighs_no_move_says_nothing_of_moves(policy):
    """Under fifo no job hears what sia would count for a move; beside it, a partition under sia does."""
    running = job("1", phase=Phase.RUNNING, allocation=on("a100", a100_00=4), max_gpus=4)
    said = explain(decided(snapshot("t4:1x4,a100:1x4", [running], {"1": FAST}), policy), "1")
    assert said is not None
    assert said.remarks == ()
    assert not any("goodput" in line or "sia" in line for line in words(said, now_s=0.0))


def test_the_policy_of_its_partition_explains_a_job():
    nodes = tuple(dataclasses.replace(node, partitions=("debug",)) for node in snapshot("t4:1x4", []).nodes)
    state = snapshot(nodes, [job("1", partitions=("debug",), max_gpus=4)], {"1": FAST})
    choice = staged("fifo", "proportional", partitions={"debug": "sia"})
    said = explain(decided(state, choice), "1")
    assert said is not None
    assert any("sia counts" in remark for remark in said.remarks)


def test_limits_are_named_and_free_gpus_of_others_are_counted():
    nodes = snapshot("t4:1x4", []).nodes
    state = snapshot((dataclasses.replace(nodes[0], gpus_others=3),), [job("7", min_gpus=2, account="physics")])
    limits = (GpuLimit("account", "physics", 1), GpuLimit("account", "biology", 1))
    said = explain(decided(dataclasses.replace(state, limits=limits)), "7")
    assert said is not None
    assert said.limits == ("the limit of 1 GPUs for account physics",)
    assert [(use.others, use.free) for use in said.uses] == [(3, 1)]


def test_an_unknown_job_has_no_explanation():
    assert explain(full_cluster(), "99") is None


def test_a_job_hears_its_share_and_what_cpu_and_memory_are_worth_to_it():
    """12 CPUs and 240 GB for 4 GPUs: a part of 3 and 60 GB, with which the model is at 1; its demand is 12 and 120 GB."""
    image = Sensitivity(1, (1, 3, 12), (60_000, 120_000), ((0.3, 0.3), (1, 1), (2, 3)))
    shot = snapshot("v100:1x4:12c:240g", [job("1", max_gpus=1), job("2", max_gpus=1)])
    known = with_facts(shot, sensitivity={"1": SensitivityProfile("image", (image,))})
    record = decided(known, staged("fifo", "proportional"))
    one, two = explain(record, "1"), explain(record, "2")
    assert one is not None
    assert two is not None
    assert one.share == ShareUse(
        1,
        Amount(3, 60_000),
        Amount(3, 60_000),
        "image",
        1.0,
        (Option(1, 60_000, 0.3), Option(3, 60_000, 1.0), Option(12, 60_000, 2.0), Option(12, 120_000, 3.0)),
    )
    assert words(one, now_s=0.0)[-2:] == [
        "On its node the job has 3 CPUs and 60000 MB; the part proportional to its GPUs is 3 CPUs and 60000 MB.",
        "By the profile image it is 1.00 times as fast as with the proportional part; at most 3.00 times is possible: "
        "0.30 with 1 CPU and 60000 MB, 1.00 with 3 CPUs and 60000 MB, "
        "2.00 with 12 CPUs and 60000 MB, 3.00 with 12 CPUs and 120000 MB.",
    ]
    assert words(two, now_s=0.0)[-1].startswith("No profile tells how its speed depends on CPU and memory")
    plain = explain(decided(known, "fifo"), "1")
    assert plain is not None
    assert plain.share is None, "the policy does not give them out"


def test_a_job_whose_user_allows_few_nodes_is_told_so():
    """Its nodes are all taken, and four T4 are free."""
    said = explain(full_cluster(min_gpus=1, max_gpus=1, nodes=NodeChoice(exclude=frozenset({"t4-00"}))), "2")
    assert said is not None
    assert [use.gpu_type for use in said.uses] == ["a100"]
    assert {remedy.change: remedy.gets for remedy in said.remedies} == {
        "any node (no --exclude=t4-00)": Configuration(1, 1, "t4")
    }
    assert "Its user allows only some nodes: --exclude=t4-00." in words(said, now_s=1060.0)


def test_nodes_that_lack_cpus_are_no_choice_of_the_user():
    nodes = NodeChoice(request=ResourceRequest(cpus=60))
    said = explain(full_cluster(min_gpus=1, max_gpus=1, gpu_types=("a100",), nodes=nodes), "2")
    assert said is not None
    assert not any("Its user allows" in line for line in words(said, now_s=1060.0))
    assert not any("any node" in remedy.change for remedy in said.remedies)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (NodeChoice(only=frozenset({"x"})), "no managed node is allowed by --nodelist=x: submit it with other nodes"),
        (
            NodeChoice(exclude=frozenset({"a100-00"})),
            "no node among those that --exclude=a100-00 allows has a100; the types are t4",
        ),
    ],
)
def test_a_job_that_no_allowed_node_suits_is_told_that_it_can_never_start(choice, text):
    said = explain(full_cluster(gpu_types=("a100",), nodes=choice), "2")
    assert said is not None
    assert said.reason.code is ReasonCode.NEVER_FITS
    assert text in said.reason.text


def test_a_waiting_job_is_told_when_it_may_leave_for_the_cloud_and_for_how_much():
    """It came at 900 s and may wait for an hour; 2 h on 2 A100s at $3.00 an hour, with a margin of a quarter."""
    base = full_cluster(min_gpus=2, max_gpus=2, gpu_types=("a100",), runtime_s=7200.0).snapshot
    two = Offer("vm2", "a100", 1, 2, 3.0, boot_s=0.0)
    cloud = CloudState(
        (two,), (), (BudgetLine("", "total", 100.0, 0.0),), WaitingPolicy(Wait.CONSTANT, 1.0), by_default=True
    )
    said = explain(decided(dataclasses.replace(base, cloud=cloud)), "2")
    assert said is not None
    cheapest = "the cheapest there is 2 a100 (vm2, $3.00/h), for about $6.00, at most $7.50."
    wait = f"It may leave for the cloud in 57 min, unless it gets GPUs on site before: {cheapest}"
    assert wait in words(said, now_s=1080.0)
    broke = dataclasses.replace(cloud, budgets=(BudgetLine("", "total", 5.0, 0.0),))
    said = explain(decided(dataclasses.replace(base, cloud=broke)), "2")
    assert said is not None
    assert any(
        "for the cloud in 57 min" in line and "does not allow the $7.50" in line for line in words(said, now_s=1080.0)
    )
    now = dataclasses.replace(broke, waiting=WaitingPolicy(Wait.NONE))
    said = explain(decided(dataclasses.replace(base, cloud=now)), "2")
    assert said is not None
    refused = [line for line in words(said, now_s=1080.0) if "does not allow the $7.50" in line]
    assert len(refused) == 1, "the reason for its wait is told once"
    assert refused[0].startswith("Job 2 waits: would leave for 2 a100")
    said = explain(decided(base), "2")
    assert said is not None
    assert not any("cloud" in line for line in words(said, now_s=1080.0)), "a site without a cloud"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("booting", "Job 2 waits in the cloud for 2 a100 (vm2, $3.00/h), for at most $7.50."),
        ("running", "Job 2 runs in the cloud on 2 a100 (vm2, $3.00/h), for at most $7.50."),
    ],
)
def test_a_job_in_the_cloud_is_told_whether_its_instances_are_there(state: str, told: str):
    base = full_cluster(min_gpus=2, max_gpus=2, gpu_types=("a100",)).snapshot
    run = CloudRun("2", Offer("vm2", "a100", 1, 2, 3.0), 900.0, 7.5, state=state)
    cloud = CloudState((), (run,), (), WaitingPolicy(Wait.CONSTANT, 1.0), by_default=True)
    said = explain(decided(dataclasses.replace(base, cloud=cloud)), "2")
    assert said is not None
    assert words(said, now_s=1080.0)[0] == told


def test_a_job_is_told_which_of_its_claims_does_not_hold():
    record = full_cluster()
    snapshot_ = with_facts(record.snapshot, doubts={"2": ("its table is wrong: correct it",)})
    said = explain(dataclasses.replace(record, snapshot=snapshot_), "2", remedies=0)
    assert said is not None
    assert "A claim of the job does not hold: its table is wrong: correct it." in words(said, now_s=1000.0)


def test_a_job_is_told_that_its_node_sleeps_and_one_that_waits_which_node_did_not_boot():
    (node,) = snapshot("t4:1x4", []).nodes
    sleeps = dataclasses.replace(node, boot_s=90.0, note="is powered down; Slurm wakes it in about 2 min")
    said = explain(decided(snapshot((sleeps,), [job("1", max_gpus=1)])), "1")
    assert said is not None
    assert f"Node {node.name} is powered down; Slurm wakes it in about 2 min." in words(said, now_s=1000.0)
    failed = dataclasses.replace(node, may_start=False, note="did not boot within 10 min (ResumeTimeout)")
    said = explain(decided(snapshot((failed,), [job("1", max_gpus=1)])), "1")
    assert said is not None
    assert f"Node {node.name} did not boot within 10 min (ResumeTimeout)." in words(said, now_s=1000.0)
    runs = job("1", max_gpus=1, phase=Phase.RUNNING, allocation=on("t4", t4_00=1))
    said = explain(decided(snapshot((sleeps,), [runs])), "1")
    assert said is not None
    assert not said.notes


def test_a_job_that_lets_plain_jobs_go_first_is_told_so():
    state = snapshot("t4:2x4", [job("1", max_gpus=4)])
    first, other = (node.name for node in state.nodes)
    for kept, where in (({first}, (other,)), ({first, other}, None)):
        waits = job("1", max_gpus=4, nodes=NodeChoice(kept=frozenset(kept)))
        for policy in ("sia", "gandiva"):
            record = decided(dataclasses.replace(state, jobs=(waits,)), policy)
            given = record.plan.assignments.get("1")
            assert (given.placement.nodes if given is not None else None) == where
            said = explain(record, "1")
            assert said is not None
            told = " ".join(words(said, now_s=1000.0))
            assert f"came before it and start first on {', '.join(sorted(kept))}" in told
            assert not any(text in told for text in ("user allows", "can never", "NEVER"))
            assert where or record.plan.waiting["1"].code is ReasonCode.WAITING_CAPACITY


def test_a_job_that_did_not_start_on_a_node_is_told_so_and_gets_another_one():
    state = snapshot("t4:2x4", [job("1", max_gpus=4)])
    first, other = (node.name for node in state.nodes)
    tried = job("1", max_gpus=4, nodes=NodeChoice(tried=frozenset({first})))
    record = decided(dataclasses.replace(state, jobs=(tried,)))
    assert record.plan.assignments["1"].placement.nodes == (other,)
    said = explain(record, "1")
    assert said is not None
    told = words(said, now_s=1000.0)
    assert f"The cluster did not start it on {first}. Other nodes are tried first; its history has the reasons." in told
    assert not any("user allows only some nodes" in line for line in told), "its user has not chosen"
