"""Turns of users, worked by hand. `tests/hostile/test_starving.py` lets whole floods happen."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import GpuLimit, Job, LeaveCause, LeaveRequest, Phase, Plan, Snapshot, StopCode
from penstock_scheduler.rounds.policies import make_policy, policy_names, takes_turns
from penstock_scheduler.rounds.policies.turns import LARGE_TURN_S, TURN_S, WithTurns
from tests.scheduler.builders import job, on, snapshot, staged, with_facts

NOW_S = 10_000.0


def short(job_id: str, node: str, gpus: int = 1, user: str = "mallory", **fields: object) -> Job:
    """A running job that started 30 s ago."""
    own = {
        "allocation": on("t4", **{node: gpus}),
        "min_gpus": gpus,
        "max_gpus": gpus,
        "submit_s": NOW_S - 60.0,
        "started_s": NOW_S - 30.0,
    }
    return job(job_id, user=user, phase=Phase.RUNNING, **(own | fields))


def waits(job_id: str, for_s: float, min_gpus: int = 1, user: str = "ada", **fields: object) -> Job:
    """A queued job that has waited so long."""
    return job(job_id, user=user, submit_s=NOW_S - for_s, min_gpus=min_gpus, **fields)


class Stubborn:
    """A policy that keeps what runs as long as there is room, and then starts the jobs of mallory first, on one GPU each."""

    name = "stubborn"

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        return make_policy("fifo")[0].decide(
            dataclasses.replace(
                snapshot,
                jobs=tuple(sorted(snapshot.jobs, key=lambda each: (each.user != "mallory", each.submit_s, each.id))),
            )
        )


def decided(state: Snapshot) -> Plan:
    return WithTurns(Stubborn()).decide(state)


def full(*more: Job, nodes: str = "t4:1x4", **fields: object) -> Snapshot:
    """mallory holds all four GPUs of the first node."""
    held = [short(f"m{n}", "t4_00", **fields) for n in range(4)]
    return snapshot(nodes, [*held, *more], time_s=NOW_S)


def test_a_job_that_is_due_takes_a_gpu_of_the_user_who_keeps_more() -> None:
    """mallory has 4 - 1 = 3 left, ada then has 1. One of its jobs makes room; the others stay."""
    plan = make_policy("sia")[0].decide(full(waits("a", TURN_S)))
    assert plan.assignments["a"].placement.gpus == 1
    assert plan.assignments["a"].reason.text == "starts on 1 t4: it has been without GPUs for 10 min"
    ((stopped, stop),) = plan.stops.items()
    assert stop.code is StopCode.PREEMPTED
    assert stop.makes_room_for == "a"
    assert stop.text == "makes room for job a, which has been without GPUs for 10 min while user mallory holds 4 GPUs"
    assert {"m0", "m1", "m2", "m3"} - {stopped} <= plan.assignments.keys()


def test_nothing_happens_before_a_job_is_due() -> None:
    plan = decided(full(waits("a", TURN_S - 1)))
    assert "a" in plan.waiting
    assert not plan.stops


def test_a_wait_counts_from_the_last_stop() -> None:
    plan = decided(full(waits("a", 5000.0, stopped_s=NOW_S - 60.0, restarts=1)))
    assert "a" in plan.waiting


def test_a_user_who_would_have_more_takes_nothing() -> None:
    """ada has two of the four GPUs: a third one would leave mallory with one."""
    held = [short("m0", "t4_00"), short("m1", "t4_00"), short("a0", "t4_00", 2, "ada")]
    plan = decided(snapshot("t4:1x4", [*held, waits("a", 5000.0)], time_s=NOW_S))
    assert "a" in plan.waiting
    assert {"m0", "m1", "a0"} <= plan.assignments.keys()


@pytest.mark.parametrize("unseen", [False, True], ids=["", "in jobs that ada took away from Penstock"])
@pytest.mark.parametrize(("elsewhere", "starts"), [(0, True), (2, True), (3, False)])
def test_what_a_user_holds_elsewhere_counts(elsewhere: int, starts: bool, unseen: bool) -> None:
    """dan has the four A100s, and keeps three if ada's job takes one. With three T4s, ada would then have four GPUs: in its own
    pool each of them would see the other as holding more."""
    held = [short(f"d{n}", "a100_00", user="dan", allocation=on("a100", a100_00=1)) for n in range(4)]
    held += [short(f"a{n}", "t4_00", user="ada", gpu_types=("t4",)) for n in range(elsewhere)]
    state = snapshot("t4:1x4,a100:1x4", [*held, waits("a", 5000.0, gpu_types=("a100",))], time_s=NOW_S)
    if unseen:
        state = dataclasses.replace(state, jobs=(*held[:4], state.jobs[-1]), unseen=tuple(held[4:]))
    assert ("a" in decided(state).assignments) is starts


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "holds", "stays"),
    [
        (TURN_S, LARGE_TURN_S, 0, False),
        (TURN_S - 1, LARGE_TURN_S, 0, True),
        (TURN_S, LARGE_TURN_S - 1, 0, True),
        (TURN_S, LARGE_TURN_S, 1, True),
    ],
    ids=["after an hour", "it has just started", "within the hour", "ada holds a GPU elsewhere"],
)
def test_the_only_job_of_a_user_makes_room_after_an_hour(
    ran_s: float, waited_s: float, holds: int, *, stays: bool
) -> None:
    """mallory's one job needs all four GPUs, which is more than the share of two. ada's needs one, which is within it."""
    large = short("m", "t4_00", 4, started_s=NOW_S - ran_s)
    held = [short(f"a{n}", "a100_00", user="ada", allocation=on("a100", a100_00=1)) for n in range(holds)]
    due = waits("a", waited_s, gpu_types=("t4",))
    plan = make_policy("sia")[0].decide(snapshot("t4:1x4,a100:1x1", [large, *held, due], time_s=NOW_S))
    assert ("m" in plan.assignments) is stays
    assert ("a" in plan.assignments) is not stays


def test_a_job_that_can_shrink_shrinks() -> None:
    """mallory's job holds 4 GPUs and needs 1."""
    state = snapshot("t4:1x4", [short("m", "t4_00", 4, min_gpus=1), waits("a", TURN_S)], time_s=NOW_S)
    plan = make_policy("sia")[0].decide(state)
    assert plan.assignments["a"].placement.gpus == 1
    assert plan.assignments["m"].placement.gpus == 2
    assert plan.stops["m"].makes_room_for == "a"


def test_free_gpus_go_to_the_due_job_of_the_user_who_holds_less() -> None:
    """One GPU is free. mallory's next job has waited longer, but mallory holds three."""
    state = full(waits("a", TURN_S), waits("m9", 5000.0, user="mallory"))
    state = dataclasses.replace(state, jobs=tuple(each for each in state.jobs if each.id != "m0"))
    plan = decided(state)
    assert plan.assignments["a"].placement == on("t4", t4_00=1)
    assert "m9" in plan.waiting
    assert not plan.stops


def test_what_may_not_be_stopped_is_not_stopped() -> None:
    """Neither a job that may not be stopped, nor one that has not shown that it can save."""
    plan = make_policy("sia")[0].decide(full(waits("a", 5000.0), preemptible=False))
    assert "a" in plan.waiting
    state = full(waits("a", 5000.0))
    plan = make_policy("sia")[0].decide(with_facts(state, saves={f"m{n}": False for n in range(4)}))
    assert "a" in plan.waiting
    assert not plan.stops


@pytest.mark.parametrize("unsaved", [False, True])
def test_gpus_are_kept_free_for_a_job_of_several(unsaved: bool) -> None:
    """Half of the eight GPUs is ada's share. The node with a free GPU is kept free; mallory's next jobs do not start there."""
    held = [short(f"m{n}", "t4_00" if n < 4 else "t4_01", preemptible=unsaved) for n in range(7)]
    queued = [waits(f"q{n}", 100.0, user="mallory", max_gpus=1) for n in range(3)]
    state = snapshot("t4:2x4", [*held, *queued, waits("a", TURN_S, 4)], time_s=NOW_S)
    state = with_facts(state, saves={each.id: not unsaved for each in held})
    plan = make_policy("sia")[0].decide(state)
    assert {each.id for each in held} <= plan.assignments.keys()
    assert not {each.id for each in queued} & plan.assignments.keys()


def test_no_gpu_is_kept_free_where_jobs_have_run_for_long() -> None:
    """They are not expected to end soon, so that the free GPU would idle for nobody knows how long."""
    held = [short(f"m{n}", "t4_00", preemptible=False, started_s=NOW_S - TURN_S) for n in range(3)]
    queued = waits("q", 100.0, user="mallory", max_gpus=1)
    plan = make_policy("sia")[0].decide(snapshot("t4:1x4", [*held, queued, waits("a", TURN_S, 2)], time_s=NOW_S))
    assert "q" in plan.assignments


def test_no_more_than_the_share_is_kept_free() -> None:
    """A job of all GPUs is beyond the share of one of two users: it cannot empty the cluster."""
    held = [short(f"m{n}", "t4_00", preemptible=False) for n in range(3)]
    queued = waits("q", 100.0, user="mallory", max_gpus=1)
    plan = make_policy("sia")[0].decide(snapshot("t4:1x4", [*held, queued, waits("a", 5000.0, 4)], time_s=NOW_S))
    assert "q" in plan.assignments


class Fickle:
    """A policy that stops ada's jobs for those of mallory that wait."""

    name = "fickle"

    def decide(self, snapshot: Snapshot) -> Plan:
        def first(each: Job) -> Job:
            if each.user == "ada":
                return dataclasses.replace(each, phase=Phase.QUEUED, allocation=None, submit_s=NOW_S)
            return each

        return make_policy("fifo")[0].decide(dataclasses.replace(snapshot, jobs=tuple(map(first, snapshot.jobs))))


def test_a_running_job_is_not_stopped_for_a_user_who_holds_more() -> None:
    """With the policy's plan mallory had 4 GPUs and ada none. ada's job stays, and one of mallory's jobs waits."""
    held = [short("a", "t4_00", user="ada"), *(short(f"m{n}", "t4_00") for n in range(3))]
    state = snapshot("t4:1x4", [*held, waits("q", 60.0, user="mallory", max_gpus=1)], time_s=NOW_S)
    assert "a" in Fickle().decide(state).waiting
    plan = WithTurns(Fickle()).decide(state)
    assert plan.assignments["a"].placement == held[0].allocation
    assert plan.assignments["a"].reason.text == "keeps 1 t4: other users hold more"
    assert "q" in plan.waiting


@pytest.mark.parametrize(
    "asks", [{"reservation": "exam"}, {"may_start": False, "leave": LeaveRequest(LeaveCause.DRAIN)}]
)
def test_a_job_that_a_person_asks_to_leave_is_not_kept_by_turns(asks: dict[str, object]) -> None:
    """ada's node is reserved or drained, and mallory has more GPUs on another one."""
    held = [short("a", "t4_00", user="ada"), *(short(f"m{n}", "t4_01") for n in range(4))]
    state = snapshot("t4:2x4", held, time_s=NOW_S)
    nodes = (dataclasses.replace(state.nodes[0], **asks), state.nodes[1])
    assert "a" in WithTurns(Fickle()).decide(dataclasses.replace(state, nodes=nodes)).waiting


def test_the_smallest_job_that_is_enough_makes_room() -> None:
    """mallory's job of four GPUs is not stopped for one GPU while there is one of a single GPU."""
    held = [short("m4", "t4_00", 4), *(short(f"m{n}", "t4_01", 2 if n else 1) for n in range(2)), short("m9", "t4_01")]
    plan = make_policy("sia")[0].decide(snapshot("t4:2x4", [*held, waits("a", TURN_S)], time_s=NOW_S))
    assert "a" in plan.assignments
    assert plan.stops.keys() <= {"m0", "m9"}


def test_a_limit_counts_for_a_turn() -> None:
    """ada's limit is used up by her own job elsewhere."""
    state = full(waits("a", 5000.0), short("a0", "t4_01", user="ada", gpus=1), nodes="t4:2x4")
    state = dataclasses.replace(state, limits=(GpuLimit("user", "ada", 1),))
    assert "a" in decided(state).waiting


def test_one_user_alone_is_left_to_the_policy() -> None:
    policy = Stubborn()
    state = full(*(waits(f"w{n}", 9000.0, user="mallory") for n in range(3)))
    WithTurns(policy).decide(state)
    assert policy.seen == [state]
    assert policy.seen[0] is state


def test_a_round_without_due_jobs_is_left_to_the_policy() -> None:
    policy = Stubborn()
    state = full(waits("a", 10.0))
    WithTurns(policy).decide(state)
    assert len(policy.seen) == 1
    assert policy.seen[0] is state


def test_policies_with_turns() -> None:
    """Those that resize running jobs."""
    assert [name for name in policy_names() if takes_turns(name)] == ["pollux", "sia"]


def test_a_partition_of_its_own_counts_by_itself() -> None:
    """mallory holds all of the debug nodes with jobs that have not saved; ada's many GPUs elsewhere do not count there."""
    held = [short(f"m{n}", "t4_00", partitions=("t4",)) for n in range(3)]
    ada = short("a0", "a100_00", 4, "ada", partitions=("a100",), allocation=on("a100", "a100", a100_00=4))
    held = [dataclasses.replace(each, allocation=on("t4", "t4", t4_00=1)) for each in held]
    jobs = [*held, ada, waits("a", TURN_S, partitions=("t4",)), waits("q", 9000.0, user="mallory", partitions=("t4",))]
    state = with_facts(snapshot("t4:1x4,a100:1x4", jobs, time_s=NOW_S), saves={each.id: False for each in held})
    plan = make_policy(staged("sia", partitions={"t4": "pollux"}))[0].decide(state)
    assert plan.assignments["a"].placement.nodes == ("t4-00",)
