"""Slurm's nodes and partitions as the scheduler sees them, and what the jobs on them hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock_scheduler.model import LeaveCause, LeaveRequest, Node, Partition
from penstock_slurm.gateway import SlurmFeatures, SlurmJob, SlurmNode, SlurmPartition, Unknown
from penstock_slurm.gateway.node_states import UNLISTED
from penstock_slurm.observe import view
from penstock_slurm.observe.site import SlurmRules
from penstock_slurm.observe.view import Scene, Spooled
from tests.slurm_plugin.test_view import BARE, CONTROL, SCENE, ended, record, running, seen


def node(name: str = "n0", **changes: Any) -> SlurmNode:
    fields: dict[str, Any] = {"gpus": {"t4": 4}, "gpus_used": {"t4": 3}, "state": frozenset({"MIXED"})}
    fields |= {"partitions": ("p", "else", "q"), "cpus": 16, "cpus_used": 10, "memory_mb": 1000, "memory_used_mb": 700}
    return SlurmNode(name, **(fields | changes))


def test_the_gpu_type_of_a_node():
    assert view.gpu_type(node()) == "t4"
    assert view.gpu_type(node(gpus={"t4": 1, "": 1, "a": 1})) == "a+gpu+t4"


def test_nodes_that_are_silent_or_drained():
    assert view.silent_nodes([node(), node("n1", state=frozenset({"DOWN", "NOT_RESPONDING"}))]) == {"n1"}
    drained = node(state=frozenset({"IDLE", "DRAIN"}), reason="disk")
    assert view.leave_request(drained) == LeaveRequest(LeaveCause.DRAIN, "disk")
    assert view.leave_request(node()) is None


def test_the_managed_partitions():
    known = {
        name: SlurmPartition(name, (), state == "UP", False, None, state=state)
        for name, state in (("p", "UP"), ("q", "DOWN"), ("r", "UP"))
    }
    assert view.partition_views(known, ("q", "p")) == (Partition("q", False, "DOWN"), Partition("p", True, "UP"))


def nodes(
    *nodes: SlurmNode,
    jobs: tuple[SlurmJob, ...] = (),
    scene: Scene = SCENE,
    spooled: Spooled = BARE,
    **more: Any,
) -> tuple[Node, ...]:
    views = {job.id: (job, seen(job, spooled)) for job in jobs}
    return view.node_views(nodes, views, scene, **({"kept_for": {}, "placeholders": {}} | more))


def test_a_node_as_a_round_sees_it():
    rules = SlurmRules(SlurmFeatures(memory=True), switches={"n0": "s1"})
    scene = dataclasses.replace(SCENE, rules=rules)
    (found,) = nodes(
        node(state=frozenset({"MIXED", "CLOUD"}), features=("ib",)), scene=scene, kept_for={"n0": ("r", 50.0)}
    )
    assert found == Node(
        "n0",
        "t4",
        4,
        ("p", "q"),
        gpus_others=3,
        reservation="r",
        reserved_s=50.0,
        switch="s1",
        cpus=16,
        cpus_others=10,
        state="CLOUD+MIXED",
        memory_mb=1000,
        memory_others_mb=700,
        features=("ib",),
    )


def test_a_site_without_rules_has_no_memory_switches_and_reservations():
    (found,) = nodes(node())
    assert (found.memory_mb, found.memory_others_mb, found.switch) == (0, 0, "")
    assert (found.reservation, found.reserved_s, found.leave, found.may_start) == ("", None, None, True)


def test_what_managed_jobs_and_placeholders_hold_is_not_held_by_others():
    job = running(cpus=8)  # 2 GPUs and 4 CPUs on each of its nodes
    assert [(each.gpus_others, each.cpus_others) for each in nodes(node(), node("n1"), jobs=(job,))] == [(1, 6), (1, 6)]
    (found,) = nodes(node(), jobs=(job, dataclasses.replace(job, id="8", cpus=2)))
    assert (found.gpus_others, found.cpus_others) == (0, 5), "4 of 3 are its jobs' right after a restart of slurmctld"
    (found,) = nodes(node(cpus_used=3), jobs=(job,), placeholders={"n0": 1})
    assert (found.gpus_others, found.cpus_others) == (0, 0)
    (found,) = nodes(node(), placeholders={"n0": 1})
    assert found.gpus_others == 2


def test_jobs_that_wait_or_share_hold_no_gpus_in_slurm():
    sent = record(priority=9, gpus_per_node=2, required_nodes=("n0",), cpus=8)
    (found,) = nodes(node(), jobs=(sent, record(id="8")))
    assert (found.gpus_others, found.cpus_others) == (3, 10)
    shares = Spooled(CONTROL.model_copy(update={"shares": True}))
    (found,) = nodes(node(), jobs=(running(gpus_per_node=None, cpus=8),), spooled=shares)
    assert (found.gpus_others, found.cpus_others) == (3, 6)


def test_memory_of_managed_jobs_is_not_held_by_others():
    scene = dataclasses.replace(SCENE, rules=SlurmRules(SlurmFeatures(memory=True)))
    given = Spooled(CONTROL.model_copy(update={"cpus": 6, "memory_mb": 300}))
    job = running(memory_mb=600)  # on two nodes
    (found,) = nodes(node(), jobs=(job,), scene=scene, spooled=given)
    assert found.memory_others_mb == 400
    (found,) = nodes(node(memory_used_mb=200), jobs=(job,), scene=scene, spooled=given)
    assert found.memory_others_mb == 0


def test_slurm_may_count_more_gpus_than_a_node_has():
    assert nodes(node(gpus_used={"t4": 8}))[0].gpus_others == 4
    assert nodes(node(gpus_used={"t4": 1}), closed={"n0"})[0].gpus_others == 4, "its free GPUs are of no use"
    assert nodes(node(gpus_used={"t4": 1}), closed={"n1"})[0].gpus_others == 1


def test_nothing_starts_on_a_node_that_cannot_be_read_or_is_down():
    assert not nodes(node(unknown=(Unknown("Gres", "x"),)))[0].may_start
    (down,) = nodes(node(state=frozenset({"DOWN"})))
    assert not down.may_start
    (drained,) = nodes(node(state=frozenset({"MIXED", "DRAIN"}), reason="disk"))
    assert (drained.may_start, drained.leave) == (False, LeaveRequest(LeaveCause.DRAIN, "disk"))


def test_nodes_without_gpus_or_outside_the_managed_partitions_are_left_out():
    assert nodes(node(gpus={}), node(gpus={"t4": 0}), node(partitions=("else",))) == ()
    assert [each.gpus for each in nodes(node(gpus={"t4": 1}))] == [1]


def test_nodes_of_running_jobs_that_slurm_did_not_list():
    old = node("n1")
    jobs = [
        record(nodes=("n5",)),
        running(cpus=9, gpu_type="t4", partition=("p",)),
        running(id="8", state="COMPLETING"),
    ]
    found = view.unlisted_nodes(jobs, [node("n2")], {"n1": old})
    lost = frozenset({UNLISTED})
    assert found == (
        dataclasses.replace(old, state=lost),
        SlurmNode("n0", {"t4": 2}, {"t4": 2}, lost, ("p",), 4, 4, 0, 0),
    )
    assert view.unlisted_nodes(jobs, [node(), old], {}) == ()
    second = view.unlisted_nodes([running(nodes=("n0", "n3"))], [node()], {})
    assert [each.name for each in second] == ["n3"], "its first node is listed"
    (untyped,) = view.unlisted_nodes([running(nodes=("n3",), gpus_per_node=None, cpus=3)], [], {})
    assert (untyped.gpus, untyped.cpus) == ({"": 0}, 3)


def test_nodes_beside_whose_jobs_slurm_starts_no_others():
    jobs = [
        running(nodes=("n0",), apart=True),
        running(nodes=("n1",), exclusive=True, state="COMPLETING"),
        running(nodes=("n2",)),
        ended(nodes=("n3",), exclusive=True),
    ]
    assert view.closed_nodes(jobs) == {"n0", "n1"}


def test_gpus_that_no_job_holds():
    seen_nodes = nodes(node(), node("n1", gpus_used={}, state=frozenset({"DOWN"})))
    jobs = [seen(running(), Spooled()), seen(record(id="8")), seen(running(id="9"))]
    cloud = node("c0", gpus={"t4": 2, "a": 1})
    assert view.free_gpus(seen_nodes, [cloud], jobs, {"9"}) == {"n0": -1, "n1": -2, "c0": 3}
    assert view.free_gpus((), (), jobs, {"9"}) == {"n0": -2, "n1": -2}
