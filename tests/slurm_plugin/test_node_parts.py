"""Hosts with GPUs of several types: a node for each type, and jobs on the part that has their GPUs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from penstock_scheduler.model import NodeChoice, Placement, Share, Start
from penstock_slurm.act.steps import step
from penstock_slurm.gateway import SlurmJob, SlurmNode, SlurmReservation
from penstock_slurm.gateway.batch import arguments
from penstock_slurm.observe import view
from penstock_slurm.observe.node_parts import NodeParts
from penstock_slurm.observe.records import Records
from penstock_slurm.observe.view import Spooled
from tests.slurm_plugin.test_steps import SETTINGS, pending
from tests.slurm_plugin.test_view import CONTROL, SCENE, record, refused, running, seen, sort
from tests.slurm_plugin.test_view_nodes import node

LAB = node("lab1", gpus={"old": 2, "new": 4}, gpus_used={"old": 2, "new": 1})
PURE = node("n1", gpus={"old": 4}, gpus_used={})
TYPES = {"lab1[new]": "new", "lab1[old]": "old", "n1": "old"}


def records(*jobs: SlurmJob, nodes: tuple[SlurmNode, ...] = (LAB, PURE), **more: Any) -> Records:
    return Records({}, nodes, jobs, **({"reservations": (), "gone": {}} | more))


def test_each_type_is_a_node_with_its_own_gpus_and_the_cpus_of_the_host():
    found = NodeParts().divide(records()).nodes
    assert [(each.name, each.gpus, each.gpus_used) for each in found] == [
        ("lab1[new]", {"new": 4}, {"new": 1}),
        ("lab1[old]", {"old": 2}, {"old": 2}),
        ("n1", {"old": 4}, {}),
    ]
    assert {(each.cpus, each.cpus_used, each.partitions) for each in found} == {(16, 10, ("p", "else", "q"))}


@pytest.mark.parametrize("nodes", [(PURE,), (node("lab1", gpus={"old": 2, "": 2}),), (node("c", partitions=("sky",)),)])
def test_answers_without_such_hosts_stay_as_they_are(nodes: tuple[SlurmNode, ...]):
    asked = records(running(), nodes=nodes)
    assert NodeParts("sky").divide(asked) is asked


def test_a_job_is_on_the_part_that_has_its_gpus_and_one_without_a_type_on_all():
    typed, untyped = running(id="1", nodes=("n1", "lab1"), gpu_type="old"), running(id="2", nodes=("lab1",))
    sent, elsewhere = record(id="3", required_nodes=("lab1",), gpu_type="new"), running(id="4", nodes=("n1",))
    found = NodeParts().divide(records(typed, untyped, sent, elsewhere)).jobs
    assert [each.nodes for each in found] == [("n1", "lab1[old]"), ("lab1[new]", "lab1[old]"), (), ("n1",)]
    assert found[2].required_nodes == ("lab1[new]",)
    assert found[3] is elsewhere


def test_an_unchanged_job_stays_the_same_object_and_a_host_that_an_answer_lacks_stays_divided():
    parts, job = NodeParts(), running(nodes=("lab1",), gpu_type="new")
    first = parts.divide(records(job)).jobs[0]
    lacks = parts.divide(records(job, nodes=(PURE,))).jobs[0]
    assert first.nodes == ("lab1[new]",)
    assert lacks is first, "a job that runs keeps its part, or the next round would move it"
    whole = parts.divide(records(job, nodes=(node("lab1", gpus={"new": 4}),)))
    assert whole.jobs[0].nodes == ("lab1",), "the admin has taken the other type out"


def test_reservations_and_ended_jobs_are_of_the_parts():
    held = SlurmReservation("r", 1.0, 2.0, ("lab1",), True, frozenset())
    over = running(nodes=("lab1",), gpu_type="old", state="COMPLETED", end_s=900.0)
    found = NodeParts().divide(records(reservations=(held,), gone={"7": over, "8": None}, ended=(over,)))
    assert found.reservations[0].nodes == ("lab1[new]", "lab1[old]")
    assert (found.gone["7"] or over).nodes == ("lab1[old]",)
    assert found.gone["8"] is None
    assert found.ended[0].nodes == ("lab1[old]",)


def test_a_job_that_slurm_started_with_a_mixture_is_left_alone_and_one_with_a_type_of_ours_is_managed():
    (mixed,) = NodeParts().divide(records(running(nodes=("lab1",)))).jobs
    (text,) = refused(mixed, sent=True)
    assert "several GPU types" in text
    (ours,) = NodeParts().divide(records(running(nodes=("lab1",), gpu_type="new"))).jobs
    assert sort(ours, sent=True).managed
    between = record(gpus_per_node=None)  # penstockd died after the request was removed and before the new one
    assert sort(between, sent=True).managed
    assert refused(dataclasses.replace(between, state="RUNNING"), sent=True)


def test_what_runs_on_one_part_is_not_taken_by_others_there_and_counts_on_the_other_part_as_cpus_only():
    parts = NodeParts()
    divided = parts.divide(records(running(nodes=("lab1",), gpu_type="old", cpus=8)))
    (job,), scene = divided.jobs, dataclasses.replace(SCENE, types=TYPES)
    views = {job.id: (job, seen(job, scene=scene))}
    new, old, _ = view.node_views(divided.nodes, views, scene, kept_for={}, placeholders={})
    assert seen(job, scene=scene).allocation == Placement("old", "p", (Share("lab1[old]", 2),))
    assert [(each.gpus, each.gpus_others, each.cpus_others) for each in (new, old)] == [(4, 1, 10), (2, 0, 2)]


def test_a_user_names_hosts():
    new, _, pure = view.node_views(
        NodeParts().divide(records()).nodes,
        {},
        dataclasses.replace(SCENE, types=TYPES),
        kept_for={},
        placeholders={},
    )
    assert NodeChoice(only=frozenset({"lab1"})).admits(new)
    assert not NodeChoice(exclude=frozenset({"lab1"})).admits(new)
    assert NodeChoice(exclude=frozenset({"lab1"})).admits(pure)


@pytest.mark.parametrize(
    ("asked", "only"), [(("new",), {"lab1"}), (("old",), {"lab1", "n1"}), (("old", "new"), {"lab1"}), ((), None)]
)
def test_where_types_stay_a_job_needs_hosts_with_all_that_it_has_asked_for(asked, only):
    control = CONTROL.model_copy(update={"asked_types": asked})
    chosen = seen(record(), Spooled(control), dataclasses.replace(SCENE, types=TYPES)).nodes
    assert (chosen.able if chosen is not None else None) == only


@pytest.mark.parametrize(("stays", "asked"), [(True, ("old", "new")), (False, ("old",))])
def test_the_types_that_a_job_has_asked_for_are_noted_where_they_stay(stays, asked):
    control = CONTROL.model_copy(update={"asked_types": ("old",)})
    wanted = Placement("new", "p", (Share("lab1[new]", 2),))
    scope = pending(free={"lab1[new]": 2}, types_stay=stays, spooled=Spooled(control))
    told = step(Start("7", 5, wanted), scope, SETTINGS).control
    assert told is not None
    assert told.asked_types == asked


@pytest.mark.parametrize(
    ("wanted", "changes", "tres", "clears"),
    [
        (Placement("new", "p", (Share("lab1[new]", 2),)), {}, "gres:gpu:new:2", True),
        (Placement("new", "p", (Share("lab1[new]", 2),)), {"gpu_type": "new"}, "gres:gpu:new:2", False),
        (Placement("old", "p", (Share("n1", 2),)), {"gpu_type": "new"}, "gres:gpu:old:2", True),
        (Placement("old", "p", (Share("n1", 2),)), {}, "gres:gpu:2", False),
        (Placement("gpu", "p", (Share("n2", 2),)), {"gpu_type": "new"}, "gres:gpu:2", False),
    ],
)
def test_a_type_is_asked_for_on_a_part_and_by_a_job_that_has_asked_for_one(wanted, changes, tres, clears):
    found = step(Start("7", 5, wanted), pending(free={wanted.nodes[0]: 2}, types_stay=True, **changes), SETTINGS)
    place = next(write for write in found.writes if write.kind == "place")
    assert place.placement is not None
    assert place.placement.clears_type is clears
    assert f"TresPerNode={tres}" in arguments(place)
    assert f"ReqNodeList={wanted.nodes[0].partition('[')[0]}" in arguments(place)


def test_temporary_disk_is_a_property_of_hosts_and_no_choice_of_the_user():
    noted = json.dumps({"penstock": {"max_gpus": 4}, "penstock_nodes": {"tmp_mb": 500, "exclude": "n2"}})
    scene = dataclasses.replace(SCENE, tmp_mb={"n1": 500, "n2": 900})
    chosen = seen(record(admin_comment=noted), scene=scene).nodes
    assert chosen is not None
    assert (chosen.able, chosen.able_for) == ({"n1", "n2"}, "500 MB of temporary disk")
    assert chosen.named == NodeChoice(exclude=frozenset({"n2"}))
    found = view.node_views([node("n0"), node("n1"), node("n2")], {}, scene, kept_for={}, placeholders={})
    assert [chosen.admits(each) for each in found] == [False, True, False]
