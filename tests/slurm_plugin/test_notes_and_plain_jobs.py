"""What a pending job waits for, and which GPUs are set aside for plain ones: by hand. Times in seconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest

from penstock_scheduler.model import Job, Node, NodeChoice, Outranks, Phase
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.people.units import clock
from penstock_slurm.gateway import PlainShape, SlurmJob
from penstock_slurm.gateway.parse_jobs import parse_jobs
from penstock_slurm.jobs.notes import (
    SAYS,
    SHARES,
    kept_by_begin,
    node_choice,
    overdue,
    plain_shape,
    waits_for,
    with_message,
    with_note,
)
from penstock_slurm.observe.plain_jobs import Attempts, behind, longest_waiting, set_aside, waiting_jobs, with_room
from tests.scheduler.builders import job, on
from tests.slurm_plugin.gateway.test_parse import MARKS, OF_22_05, RUNNING, answer

(SEEN,) = parse_jobs(answer(RUNNING), MARKS, OF_22_05)
NOW_S = 10_000.0


def pending(**fields: object) -> SlurmJob:
    """A job that waits for 2 GPUs on one node of t4 or all, since 100 s."""
    blank = {
        **{"state": "PENDING", "nodes": (), "reason": "Resources", "reservation": "", "partition": ("t4", "all")},
        **{
            "eligible_s": NOW_S - 100,
            "restarts": 0,
            "node_count": 1,
            "gpus_per_node": 2,
            "deadline_s": None,
            "priority": 9,
        },
    }
    return dataclasses.replace(SEEN, **(blank | fields))


def noted(**keys: object) -> str:
    return json.dumps({"penstock": {"max_gpus": 2}} | keys)


def test_the_nodes_that_a_user_allows() -> None:
    def chosen(**note: object) -> NodeChoice | None:
        return node_choice(pending(admin_comment=noted(penstock_nodes=note)))

    assert node_choice(pending(admin_comment=noted())) is chosen() is None
    two = chosen(nodelist="t4-[00-02],x", exclude="t4-01", constraint="ib&nvme")
    assert two == NodeChoice(
        frozenset({"t4-00", "t4-01", "t4-02", "x"}), frozenset({"t4-01"}), frozenset({frozenset({"ib", "nvme"})})
    )
    assert str(two) == "--nodelist=t4-00,t4-01,t4-02,x --exclude=t4-01 --constraint=ib&nvme"
    assert chosen(constraint="nvme,ib,") == chosen(constraint="ib&nvme")

    def admitted(choice: NodeChoice | None, **features: tuple[str, ...]) -> str:
        assert choice is not None
        names = {name.replace("_", "-"): has for name, has in features.items()}
        return " ".join(n for n, has in names.items() if choice.admits(Node(n, "t4", 4, ("all",), features=has)))

    nodes = {"t4_00": ("ib", "nvme"), "t4_01": ("ib", "nvme"), "t4_02": ("ib",), "t4_03": ("ib", "nvme", "big")}
    assert admitted(two, **nodes) == "t4-00"
    assert admitted(chosen(constraint="big|nvme"), **nodes) == "t4-00 t4-01 t4-03"
    assert admitted(chosen(exclude="t4-[00-01]"), **nodes) == "t4-02 t4-03"
    with pytest.raises(BadJobSpec, match="penstock_nodes that cannot be read"):
        chosen(nodelist="t4-[")
    with pytest.raises(BadJobSpec, match="penstock_nodes that cannot be read"):
        node_choice(pending(admin_comment=noted(penstock_nodes="t4-00")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"dependency": "afterok:1(unfulfilled)"}, "its dependency afterok:1(unfulfilled)"),
        ({"eligible_s": NOW_S + 5}, "the begin time"),
        ({"eligible_s": NOW_S + 5, "restarts": 1}, ""),
        ({"eligible_s": NOW_S + 5, "admin_comment": noted()}, ""),
        ({"admin_comment": noted(penstock_begin_s=NOW_S + 5)}, "the begin time"),
        ({"admin_comment": noted(penstock_begin_s=NOW_S - 5)}, ""),
        ({"admin_comment": noted(penstock_begin_s="soon")}, ""),
        ({"deadline_s": NOW_S - 1}, "Slurm to end it at its deadline"),
        ({"deadline_s": NOW_S + 1}, ""),
    ],
)
def test_what_a_pending_job_waits_for(fields: dict[str, object], words: str) -> None:
    found = waits_for(pending(**fields), NOW_S)
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert overdue(pending(**fields), NOW_S) == (fields.get("deadline_s") == NOW_S - 1)


def test_a_note_of_the_plain_shape() -> None:
    note = noted(penstock_plain={"partition": "all", "nodes": 2, "gpus_per_node": 4})
    assert plain_shape(pending(admin_comment=note)) == PlainShape("all", 2, 4)
    later = {"admin_comment": note, "eligible_s": NOW_S + 5}
    assert kept_by_begin(pending(**later), NOW_S)
    assert not kept_by_begin(pending(**(later | {"priority": 0})), NOW_S)
    assert not kept_by_begin(pending(admin_comment=note), NOW_S)
    for broken in ("", "x", "7", noted(), noted(penstock_plain=3), noted(penstock_plain={"nodes": 2})):
        assert plain_shape(pending(admin_comment=broken)) is None


def test_the_plain_job_that_has_waited_longest_is_the_next() -> None:
    old, new = pending(id="1", eligible_s=NOW_S - 500), pending(id="2")
    assert longest_waiting([new, old], ["all"], NOW_S, 60) == old
    assert longest_waiting([new, old], ["all"], NOW_S, 600) is None
    assert longest_waiting([old], ["rtx"], NOW_S, 60) is None
    others = {"priority": 0}, {"reason": "Dependency"}, {"reservation": "exam"}, {"gpus_per_node": None}
    for fields in (*others, {"eligible_s": None}, {"state": "RUNNING"}):
        assert longest_waiting([pending(**fields)], ["all"], NOW_S, 60) is None, fields


def node(name: str, **fields: object) -> Node:
    return dataclasses.replace(Node(name, "t4", 4, ("all",)), **fields)  # type: ignore[arg-type]


def test_gpus_are_set_aside_where_the_fewest_have_to_be_given_back() -> None:
    """It wants 2: n1 has 1 free, n2 has 0; n3 has 3 free, but Penstock may not use it; on n4 nothing can be moved."""
    nodes = [node("n1"), node("n2"), node("n3", may_start=False), node("n4")]
    held = {"n1": 3, "n2": 4, "n4": 4}
    assert set_aside(pending(), nodes, {"n4": 4}, held) == {"n1": 2}
    assert set_aside(pending(node_count=2), nodes, {"n4": 4}, held) == {"n1": 2, "n2": 2}
    assert set_aside(pending(node_count=3), nodes, {"n4": 4}, held) == {}
    assert set_aside(pending(gpu_type="a100"), nodes, {}, held) == {}
    assert set_aside(pending(required_nodes=("n2",)), nodes, {}, held) == {"n2": 2}
    assert set_aside(pending(), [node("n1", gpus_others=3)], {}, {}) == {}


def test_a_note_that_is_taken_away_leaves_room_for_the_next_one() -> None:
    shared = dataclasses.replace(SEEN, admin_comment=json.dumps({SHARES: {"node": "n0"}}))
    empty = with_note(shared, SHARES, None)
    assert empty == "{}"
    left = dataclasses.replace(shared, admin_comment=empty)
    assert with_note(left, SHARES, None) is None
    assert json.loads(with_message(left, "wait") or "") == {SAYS: "wait"}
    assert with_message(dataclasses.replace(shared, admin_comment='{"site": 1}'), "wait") is None


def test_the_queue_says_when_room_is_made_for_each_plain_job() -> None:
    """Room is made after 300 s, for one job at a time; a pause counts for the jobs of one user."""

    def seen(
        *jobs: SlurmJob, managed: Sequence[Job] = (), attempts: Attempts | None = None
    ) -> list[tuple[object, ...]]:
        attempts, nodes = attempts or Attempts(60.0), (node("a"), node("b"))
        how = {"now_s": NOW_S, "patience_s": 300.0, "attempts": attempts, "moves": lambda each: each.id == "moves"}
        nodes = with_room(nodes, jobs, managed, ["all"], **how)  # type: ignore[arg-type]
        found = waiting_jobs(jobs, nodes, managed, ["all"], **how)  # type: ignore[arg-type]
        return [(each.id, each.needs, each.room_s, each.text) for each in found]

    old, older = pending(id="7", number=7, eligible_s=NOW_S - 400), pending(id="8", number=8, eligible_s=NOW_S - 500)
    new = pending(id="9", number=9, gpu_type="t4")
    assert seen(new) == [
        (
            "9",
            "2 GPUs of type t4",
            NOW_S + 200,
            f"Penstock makes room for it from {clock(NOW_S + 200)} on, if Slurm has not started it by then",
        )
    ]
    first, second = seen(old, older)
    assert first == ("8", "2 GPUs", NOW_S, "Penstock keeps GPUs of a free for it; jobs there save and leave")
    assert second == ("7", "2 GPUs", None, "Penstock makes room for job 8 first")
    earlier = dataclasses.replace(job("1"), submit_s=NOW_S - 450)
    assert seen(old, managed=[earlier]) == [
        ("7", "2 GPUs", None, "Penstock makes room for it when no adaptive job has waited longer")
    ]
    moves = dataclasses.replace(job("moves"), submit_s=NOW_S - 450, restarts=1)
    ((_, _, room_s, text),) = seen(old, managed=[moves])
    assert (room_s, text) == (NOW_S, "Penstock keeps GPUs of a free for it; jobs there save and leave")
    ((_, _, room_s, text),) = seen(pending(id="7", number=7, eligible_s=NOW_S - 400, gpus_per_node=64))
    assert (room_s, text) == (
        None,
        "Slurm starts it when GPUs are free; Penstock cannot make room for it by moving jobs",
    )
    attempts = Attempts(60.0)
    attempts.made(old, (), NOW_S - 61.0)
    ((_, _, room_s, text),) = seen(old, attempts=attempts)
    assert room_s == attempts.next_s(old.uid) > NOW_S
    assert text.startswith(
        "Slurm did not start a job of this user on GPUs that were kept free; Penstock tries again from"
    )
    assert seen(pending(priority=0), pending(reason="Dependency"), pending(partition=("rtx",))) == []


def test_where_jobs_share_gpus_no_job_goes_before_a_plain_one_that_came_before_it() -> None:
    """On n1, the plain job waits for two GPUs since 100 s; on n2, GPUs of another type; on n3, no job may be moved."""
    nodes = [node("n1"), node("n2", gpu_type="a100"), node("n3")]
    fixed = job("8", phase=Phase.RUNNING, allocation=on("t4", n3=3), preemptible=False)

    def kept(
        *jobs: Job, attempts: Attempts | None = None, rank: str = "", **plain: object
    ) -> dict[str, frozenset[str]]:
        found = behind(
            [fixed, *jobs],
            nodes,
            [pending(gpu_type="t4", **plain)],
            ["all"],
            now_s=NOW_S,
            attempts=attempts or Attempts(60.0),
            moves=lambda each: each.id == "moves",
            rank=lambda _: rank,
        )
        return {each: changed.nodes.kept for each, changed in found.items() if changed.nodes is not None}

    late = job("9", submit_s=NOW_S - 99)
    assert kept(late) == {"9": {"n1"}}
    assert kept(job("9", submit_s=NOW_S - 101), job("7", submit_s=NOW_S, phase=Phase.RUNNING)) == {}
    assert kept(late, reason="Dependency") == {}, "it does not wait for GPUs"
    moved = [dataclasses.replace(late, id=name, restarts=1) for name in ("moves", "stopped")]
    assert kept(*moved) == {"stopped": {"n1"}}, "a job that moves has a right to its GPUs"
    owner = dataclasses.replace(late, outranks=Outranks(frozenset({"low"}), "all", 30.0))
    assert (kept(owner, rank="low"), kept(owner)) == ({}, {"9": {"n1"}})
    paused = Attempts(60.0)
    paused.made(pending(), (), NOW_S - 61.0)
    paused.saw([pending()], NOW_S)
    assert kept(late, attempts=paused) == {}, "Slurm does not start it anyway"
