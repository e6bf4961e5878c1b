"""Partitions, reservations and limits as rows of the program."""

import dataclasses
from typing import Any

import pytest

from penstock_scheduler.model import Configuration, GpuLimit, Job, Node, Phase, Placement, ReasonCode, Share, Snapshot
from penstock_scheduler.rounds.policies.sia import Sia, SiaSettings
from tests.scheduler.builders import job, on, snapshot, table, with_facts

sia = Sia(SiaSettings())
THREE = "a100:1x4,rtx:1x4,t4:1x4"


def nodes(*of: tuple[str, str, int, tuple[str, ...], str]) -> tuple[Node, ...]:
    """(name, type, GPUs, partitions, reservation) each."""
    return tuple(Node(name, kind, gpus, inside, reservation=kept) for name, kind, gpus, inside, kept in of)


def new(where: str | None, *unknown: str, nodes: str = THREE, others: tuple[Job, ...] = (), **more: Any) -> Snapshot:
    """A job that has, or waits for, one GPU, and of which these types are unknown; 100 s after it came."""
    attained = more.pop("attained", {})
    models = {"j": more.pop("model")} if "model" in more else {}
    held = {"phase": Phase.RUNNING, "allocation": on(where, **{f"{where}_00": 1})} if where else {}
    state = snapshot(nodes, [job("j", submit_s=900.0, **held, **more), *others], models, attained={"j": attained})
    return with_facts(state, unmeasured_types={"j": unknown}, largest_run_gpus={"j": 1 if where else 0})


def test_partitions_that_overlap_are_rows_of_the_program():
    """x is in a, y in a and b. Of three jobs that want a node, the two oldest are in b: one of them and the one in a run."""
    where = nodes(("x", "t4", 4, ("a",), ""), ("y", "t4", 4, ("a", "b"), ""))
    jobs = [job(f"j{i}", submit_s=i, min_gpus=4, max_gpus=4, partitions=("b",) if i < 2 else ("a",)) for i in range(3)]
    plan = sia.decide(snapshot(where, jobs))
    assert {name: a.placement.nodes for name, a in plan.assignments.items()} == {"j0": ("y",), "j2": ("x",)}
    assert plan.waiting["j1"].code is ReasonCode.WAITING_CAPACITY


def test_what_is_scarce_of_one_type_leaves_the_others_free():
    """In b there are 4 T4 and 8 A100; the two jobs in b get one node each."""
    where = nodes(("x", "t4", 4, ("a",), ""), ("y", "t4", 4, ("a", "b"), ""), ("z", "a100", 8, ("b",), ""))
    jobs = [job(f"j{i}", submit_s=i, min_gpus=4, max_gpus=4, partitions=("b",)) for i in range(3)]
    assert len(sia.decide(snapshot(where, jobs)).assignments) == 3


def test_a_reservation_is_for_its_own_jobs_alone():
    where = nodes(("x", "t4", 4, ("all",), "exam"), ("y", "t4", 2, ("all",), ""))
    plan = sia.decide(snapshot(where, [job("in", reservation="exam"), job("out", submit_s=1)]))
    assert plan.assignments["in"].placement.nodes == ("x",)
    assert plan.assignments["out"].placement.nodes == ("y",)
    assert "scattered" not in plan.assignments["out"].reason.text
    alone = sia.decide(snapshot(where[:1], [job("out")]))
    assert alone.waiting["out"].code is ReasonCode.WAITING_CAPACITY


def test_a_job_leaves_a_partition_that_it_may_not_use_any_more():
    where = nodes(("x", "t4", 4, ("old",), ""), ("y", "t4", 4, ("new",), ""))
    held = Placement("t4", "old", (Share("x", 4),))
    each = job("j", phase=Phase.RUNNING, allocation=held, max_gpus=4, partitions=("new",))
    assert sia.decide(snapshot(where, [each])).assignments["j"].placement.nodes == ("y",)


def test_a_limit_on_a_user_is_kept_also_by_the_next_best_choice():
    """4 T4 would be best, but no node has 4 free; 8 A100 are free, but ada may have 4 GPUs."""
    state = snapshot("t4:2x4,a100:1x8", [job("j", min_gpus=4)], {"j": table(t4={4: 10.0}, a100={8: 9.0})})
    busy = tuple(dataclasses.replace(n, gpus_others=1) if n.gpu_type == "t4" else n for n in state.nodes)
    state = dataclasses.replace(state, nodes=busy)
    assert sia.decide(state).chosen["j"] == Configuration(1, 8, "a100")
    assert "4 t4 would be better" in sia.decide(state).assignments["j"].reason.text
    limited = sia.decide(dataclasses.replace(state, limits=(GpuLimit("user", "ada", 4),)))
    assert limited.waiting["j"].code is ReasonCode.WAITING_FRAGMENTS


@pytest.mark.parametrize(
    "limit", [GpuLimit("user", "ada", 3), GpuLimit("account", "maths", 3), GpuLimit("qos", "low", 3)]
)
def test_users_accounts_and_qos_get_no_more_than_their_limit(limit):
    jobs = [job(str(i), submit_s=i, max_gpus=2, account="maths", qos="low") for i in range(4)]
    other = job("other", user="bob", account="physics", qos="high", submit_s=9, max_gpus=2)
    plan = sia.decide(dataclasses.replace(snapshot("t4:2x4", [*jobs, other]), limits=(limit,)))
    assert sum(c.gpus for name, c in plan.chosen.items() if name != "other") == 3
    assert plan.chosen["other"].gpus == 2


def test_a_limit_on_one_type_leaves_the_others_free():
    """Of 8 a100 and 8 t4 the user may have 2 a100: four jobs with a table that likes a100 hold 2 of those, and the t4."""
    jobs = [job(f"j{i}", max_gpus=4, submit_s=float(i)) for i in range(4)]
    models = {each.id: table(t4={1: 1.0, 2: 2.0, 4: 4.0}, a100={1: 3.0, 2: 6.0, 4: 12.0}) for each in jobs}
    state = snapshot("t4:1x8,a100:1x8", jobs, models)
    limit = GpuLimit("user", "ada", 2, gpu_type="a100")
    held = [a.placement for a in sia.decide(dataclasses.replace(state, limits=(limit,))).assignments.values()]
    assert sum(p.gpus for p in held if p.gpu_type == "a100") == 2
    assert sum(p.gpus for p in held if p.gpu_type == "t4") == 8


def test_which_jobs_a_limit_covers():
    """By the account with those below it, within a QOS by user or account, and never jobs with a limit of their own."""
    ada = job("j", user="ada", account="algebra", qos="short")
    assert GpuLimit("account", "maths", 1, below=("algebra",)).covers(ada)
    assert not GpuLimit("account", "maths", 1).covers(ada)
    assert GpuLimit("qos", "short", 1, user="ada").covers(ada)
    assert not GpuLimit("qos", "short", 1, user="bob").covers(ada)
    assert not GpuLimit("qos", "short", 1, account="maths").covers(ada)
    assert not GpuLimit("account", "algebra", 1, spared_qos=("short",)).covers(ada)
    words = str(GpuLimit("qos", "short", 1, "a100", user="ada"))
    assert words == "the limit of 1 a100 GPUs for qos short and jobs of user ada"


def test_the_reason_says_that_a_reservation_has_not_begun():
    plan = sia.decide(
        snapshot(nodes(("n", "t4", 4, ("all",), "exam, soon")), [job("in", reservation="exam"), job("out")])
    )
    assert "no node is kept for its reservation exam now" in plan.waiting["in"].text
    assert "all nodes are reserved now" in plan.waiting["out"].text


def test_the_reason_names_the_limit_that_a_job_exceeds():
    state = dataclasses.replace(snapshot("t4:2x4", [job("j", min_gpus=4)]), limits=(GpuLimit("user", "ada", 2),))
    assert "the limit of 2 GPUs for user ada does not allow that" in sia.decide(state).waiting["j"].text
