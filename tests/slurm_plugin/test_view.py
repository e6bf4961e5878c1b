"""Slurm's records as the scheduler sees them: each function of the view by itself, on the smallest records."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from penstock_profiles.wire import ControlMessage, Request, Started
from penstock_scheduler.model import (
    EndedRun,
    Job,
    JobSpec,
    NodeChoice,
    Phase,
    Placement,
    Refusal,
    ResourceRequest,
    Share,
)
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.gateway import SlurmJob, SlurmRun, Unknown
from penstock_slurm.jobs.states import State
from penstock_slurm.observe import sorting, view
from penstock_slurm.observe.site import SlurmRules
from penstock_slurm.observe.sorting import SortedJobs
from penstock_slurm.observe.view import CLOCKS_DIFFER_S, Scene, Spooled, Views
from tests.slurm_plugin.test_states import job as slurm_job

SPEC_TEXT = '{"penstock": {"max_gpus": 4}}'
SPEC = JobSpec(max_gpus=4)
NOW_S = 1000.0
SCENE = Scene(NOW_S, ("p", "q"), ("p", "q"), {"n0": "t4", "n1": "t4", "n2": "rtx"})
CONTROL = ControlMessage(job_id="7", epoch=1, round=1, nodes=2, gpus=4)
ASKED = CONTROL.model_copy(update={"request": Request(id="1-1", asked_s=1.0)})
STARTED = Started(gpu_type="t4", gpu_ids={})
BARE = Spooled()


def record(state: str = "PENDING", **changes: Any) -> SlurmJob:
    """A job with a job spec that Penstock holds."""
    return dataclasses.replace(slurm_job(state), **({"comment": SPEC_TEXT} | changes))


def running(**changes: Any) -> SlurmJob:
    """A job with two GPUs on each of two nodes."""
    fields = {"nodes": ("n1", "n0"), "gpus_per_node": 2, "priority": 9, "start_s": 500.0, "submit_s": 100.0}
    return record(**({"state": "RUNNING"} | fields | changes))


def ended(**changes: Any) -> SlurmJob:
    return dataclasses.replace(running(state="COMPLETED", end_s=900.0), **changes)


def held_on(*shares: Share, gpu_type: str = "t4", partition: str = "p") -> Placement:
    return Placement(gpu_type, partition, shares)


TWO = held_on(Share("n0", 2), Share("n1", 2))


def seen(job: SlurmJob, spooled: Spooled = BARE, scene: Scene = SCENE) -> Job:
    found = view.job_view(job, SPEC, spooled, scene)[1]
    assert found is not None
    return found


# --- which jobs are managed


def sort(*jobs: SlurmJob, **answers: Any) -> SortedJobs:
    told: dict[str, Any] = {"cleared": False, "sent": False, "was_managed": False, "shares_by": None} | answers
    check, adopt = told.pop("check", lambda spec: None), told.pop("adopt", ())
    return sorting.sort_jobs(
        jobs,
        ("p", "q"),
        adopt=adopt,
        check=check,
        **{name: lambda job, value=value: value for name, value in told.items()},
    )


def refused(*jobs: SlurmJob, **answers: Any) -> list[str]:
    found = sort(*jobs, **answers)
    assert not found.managed
    return [each.text for each in found.refused]


def test_jobs_with_a_spec_in_a_managed_partition_are_managed():
    ours = record(id="1", partition=("else", "q"))
    others = record(id="2", partition=("else",)), record("FAILED", id="3"), record(id="4", comment="")
    found = sort(*others, ours)
    assert found.managed == {"1": (ours, SPEC)}
    assert (found.refused, found.records) == ([], {})


def test_the_spool_is_not_asked_about_each_job_of_a_site_that_adopts_all():
    def sent(job: SlurmJob) -> bool:
        raise AssertionError(job.id)

    answers: dict[str, Any] = dict.fromkeys(("cleared", "was_managed", "shares_by"), lambda job: False)
    job = record()
    found = sorting.sort_jobs([job], ("p",), adopt=(), sent=sent, check=lambda spec: None, **answers)
    assert found.managed == {job.id: (job, SPEC)}


@pytest.mark.parametrize(("state", "runs"), [("PENDING", False), ("RUNNING", True), ("COMPLETING", None)])
def test_a_refused_job_is_reported_with_whether_it_runs(state: str, runs: bool | None):
    bad, good = record(state, id="1", het_job_id=1), record(id="2")
    found = sort(bad, good)
    text = "it is part of a heterogeneous job, which cannot be moved in parts; submit it as a job of its own"
    assert found.refused == [Refusal("1", "j", "u", text, runs)]
    assert found.records == {"1": bad}
    assert list(found.managed) == ["2"], "the others are managed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unknown": (Unknown("Gres", "x"), Unknown("State", None))}, "Slurm says Gres=x, no State of it"),
        ({"exclusive": True}, "it requests whole nodes"),
        ({"licenses": "matlab|octave"}, "in a form that Penstock cannot read (matlab|octave)"),
        ({"gpu_type": "t4"}, '"gpu_types": ["t4"]'),
        ({"gpus_per_node": None}, "it requests no GPUs per node"),
        ({"requeue": False}, "submit it with --requeue"),
        ({"required_nodes": ("n0",)}, "it names its nodes"),
        ({"comment": '{"penstock": {"max_gpus": 0}}'}, "max_gpus"),
        ({"admin_comment": '{"penstock_nodes": 3, "penstock": {"max_gpus": 4}}'}, "penstock_nodes"),
    ],
)
def test_a_job_that_cannot_be_placed_is_refused_with_the_reason(changes: dict[str, Any], words: str):
    (text,) = refused(record(**changes))
    assert words in text


@pytest.mark.parametrize(
    ("adopt", "managed"),
    [
        ((), True),
        (("user:u", "account:other"), True),
        (("account:ml",), True),
        (("partition:q",), True),
        (("user:ml", "account:u", "partition:p"), False),
    ],
)
def test_a_site_may_adopt_some_users_accounts_and_partitions(adopt: tuple[str, ...], managed: bool):
    job, running = (record(state, account="ml", partition=("q",)) for state in ("PENDING", "RUNNING"))
    assert sort(job, adopt=adopt).managed == ({job.id: (job, SPEC)} if managed else {})
    for each, words in ((job, "submit it again without adaptive flags"), (running, "it continues as a plain job")):
        assert (
            managed or f"only jobs of account:u, partition:p, user:ml; {words}, or ask" in refused(each, adopt=adopt)[0]
        )
    assert sort(running, adopt=adopt, sent=True).managed, "a job that Penstock has started stays managed"


def test_jobs_that_look_alike_and_are_managed():
    whole = json.dumps({"penstock": {"max_gpus": 4}, "penstock_request": {"whole_nodes": True}})
    assert sort(record(exclusive=True, admin_comment=whole)).managed
    assert sort(record(gpus_per_node=None), cleared=True).managed
    named = {"required_nodes": ("n0",)}
    assert sort(record(**named), sent=True).managed
    assert sort(record(**named, restarts=1)).managed
    assert sort(record(**named, priority=9)).managed


def test_a_job_that_lost_its_spec_is_refused_and_says_what_happens_to_it():
    (waits,) = refused(record(comment=""), was_managed=True)
    assert waits.endswith("; it stays pending until then")
    (runs,) = refused(running(comment=""), was_managed=True)
    assert runs.endswith("; it continues as a plain job")


def test_a_spec_that_can_never_be_served_is_refused():
    def check(spec: JobSpec) -> None:
        raise BadJobSpec(f"at most 2 GPUs, not {spec.max_gpus}")

    assert refused(record(), check=check) == ["at most 2 GPUs, not 4"]


def test_the_site_s_spec_goes_before_the_user_s():
    site = '{"penstock": {"max_gpus": 2}}'
    assert sorting.job_spec(record(admin_comment=site)) == JobSpec(max_gpus=2)
    assert sorting.job_spec(record(admin_comment="a note")) == SPEC
    assert sorting.job_spec(record(admin_comment="")) == SPEC
    quotes = json.dumps({"penstock_says": 'its comment has {"penstock": {"max_gpus": 2}}'})
    assert sorting.job_spec(record(admin_comment=quotes)) == SPEC
    assert sorting.job_spec(record(comment="", admin_comment=quotes)) is None


def test_the_trials_of_an_array_are_a_group_of_their_own():
    text = '{"penstock": {"max_gpus": 4, "trial_group": "GROUP"}}'
    array, other = text.replace("GROUP", "array"), text.replace("GROUP", "mine")

    def group(comment: str, array_job_id: int | None) -> str | None:
        spec = sorting.job_spec(record(comment=comment, array_job_id=array_job_id))
        assert spec is not None
        return spec.trial_group

    assert group(array, 12) == "array 12"
    assert group(array, None) == "array"
    assert group(other, 12) == "mine"


# --- what a job is to the scheduler


def test_a_job_that_runs():
    job = running(restarts=2, suspended_s=3.0, time_limit_s=60.0, account="a", qos="o", reservation="r", end_s=2000.0)
    state, found = view.job_view(job, SPEC, Spooled(), SCENE)
    assert state is State.RUNNING
    assert found == Job(
        "7",
        "j",
        "u",
        SPEC,
        ("p", "q"),
        Phase.RUNNING,
        submit_s=100.0,
        restarts=2,
        allocation=TWO,
        started_s=500.0,
        suspended_s=3.0,
        requeued_s=100.0,
        account="a",
        qos="o",
        reservation="r",
        time_limit_s=60.0,
        request=ResourceRequest(),
    )
    assert seen(running()).requeued_s is None


def test_a_job_that_waits():
    found = seen(record(submit_s=100.0, start_s=7.0, suspended_s=3.0))
    assert found == Job("7", "j", "u", SPEC, ("p", "q"), Phase.QUEUED, submit_s=100.0, request=ResourceRequest())


def test_a_job_that_ends_for_good_is_none_and_one_that_leaves_counts_what_it_holds():
    leaves = running(state="COMPLETING", end_s=990.0)
    assert view.job_view(leaves, SPEC, Spooled(CONTROL), SCENE) == (State.STOPPING, None)
    assert view.job_view(ended(), SPEC, Spooled(ASKED), SCENE) == (State.DONE, None)
    found = seen(leaves, Spooled(ASKED))
    assert (found.phase, found.allocation, found.leaving) == (Phase.STOPPING, TWO, True)
    assert (found.stopped_s, found.started_s, found.suspended_s) == (990.0, None, 0.0)
    assert not seen(running()).leaving


def test_a_job_that_was_sent_to_nodes_is_about_to_hold_them():
    sent = record(priority=9, gpus_per_node=2, required_nodes=("n1", "n0"))
    assert (seen(sent).phase, seen(sent).allocation) == (Phase.STARTING, TWO)
    assert seen(record(priority=9)).allocation is None
    begin = dataclasses.replace(sent, reason="BeginTime", eligible_s=NOW_S + 1)
    assert (seen(begin).phase, seen(begin).allocation) == (Phase.STARTING, None)
    assert seen(dataclasses.replace(begin, eligible_s=NOW_S)).allocation == TWO
    assert seen(dataclasses.replace(begin, reason="Resources")).allocation == TWO


def test_a_job_stops_if_it_was_asked_has_no_gpus_or_shares_in_the_wrong_place():
    def at(spooled: Spooled, scene: Scene) -> tuple[Phase, Placement | None]:
        found = seen(running(), spooled, scene)
        return found.phase, found.allocation

    assert at(Spooled(ASKED), SCENE) == (Phase.STOPPING, TWO)
    assert at(Spooled(CONTROL), dataclasses.replace(SCENE, misplaced={"7"})) == (Phase.STOPPING, TWO)
    assert at(Spooled(CONTROL), dataclasses.replace(SCENE, without_gpus={"7"})) == (Phase.STOPPING, None)
    assert at(Spooled(CONTROL), SCENE) == (Phase.RUNNING, TWO)


def test_what_else_is_known_of_a_job():
    def facts(spooled: Spooled, **changes: Any) -> tuple[bool, ...]:
        found = view.job_facts(running(**changes), spooled, dataclasses.replace(SCENE, silent=frozenset({"n1"})))
        return found.asked, found.answers, found.saved, found.silent

    assert facts(Spooled()) == (False, False, False, True)
    assert facts(Spooled(CONTROL, STARTED), nodes=("n0",)) == (False, True, False, False)
    assert facts(Spooled(ASKED, STARTED, saved=True)) == (True, True, True, True)


@pytest.mark.parametrize(
    ("reads", "usr2", "answers"), [(True, None, True), (False, None, False), (False, "batch", True)]
)
def test_a_run_answers_if_it_reads_requests_or_does_so_on_a_signal(reads: bool, usr2: Any, answers: bool):
    assert Spooled(present=STARTED.model_copy(update={"answers_requests": reads, "usr2": usr2})).answers is answers
    assert not Spooled().answers


def test_what_the_scene_shows_of_a_running_job():
    assert not SCENE.concerns(running())
    for changes in ({"silent": frozenset({"n1"})}, {"misplaced": {"7"}}, {"without_gpus": {"7"}}):
        assert dataclasses.replace(SCENE, **changes).concerns(running())
    assert not dataclasses.replace(SCENE, silent=frozenset({"n2"}), misplaced={"8"}).concerns(running())


def test_the_first_submission_counts():
    def submitted(kept: float | None) -> float:
        return seen(running(), Spooled(CONTROL.model_copy(update={"submitted_s": kept}))).submit_s

    assert [submitted(kept) for kept in (None, 50.0, 150.0)] == [100.0, 50.0, 100.0]
    assert seen(running(), Spooled(CONTROL.model_copy(update={"pauses_s": (1.0,)}))).pauses_s == (1.0,)


def test_when_its_last_run_ended():
    scene = dataclasses.replace(SCENE, stopped_s={("7", 1): 77.0})
    assert seen(running(restarts=2), scene=scene).stopped_s == 77.0
    assert seen(running(restarts=1), scene=scene).stopped_s is None
    assert seen(running(restarts=2, end_s=5.0), scene=scene).stopped_s == 77.0, "that is its time limit"
    leaves = running(state="COMPLETING", restarts=2)
    assert seen(leaves, Spooled(ASKED), scene).stopped_s == 77.0
    assert seen(dataclasses.replace(leaves, end_s=88.0), Spooled(ASKED), scene).stopped_s == 88.0
    limit_s = scene.now_s + 7200.0
    assert seen(dataclasses.replace(leaves, end_s=limit_s), Spooled(ASKED), scene).stopped_s == 77.0, "it is to come"


def test_the_user_s_nodes_and_the_weight():
    notes = {"penstock": {"max_gpus": 4}, "penstock_nodes": {"exclude": "n1"}}
    found = seen(running(admin_comment=json.dumps(notes), account="a"))
    assert (found.nodes, found.weight) == (NodeChoice(exclude=frozenset({"n1"})), 1.0)
    rules = SlurmRules(fair_shares={("a", "u"): 1.0})
    assert seen(running(account="a"), scene=dataclasses.replace(SCENE, rules=rules)).weight > 1.0


# --- partitions


def partitions(job: SlurmJob, told: str | None = None, **scene: Any) -> tuple[str, ...]:
    control = None if told is None else CONTROL.model_copy(update={"submitted_to": told})
    return seen(job, Spooled(control), dataclasses.replace(SCENE, managed=("p", "q", "r"), **scene)).partitions


def test_the_partitions_to_which_a_job_was_submitted_come_first():
    assert partitions(record(partition=("q",))) == ("q", "p", "r")
    assert partitions(record(partition=("else", "r", "p"))) == ("r", "p", "q")
    assert partitions(record(partition=("q",)), "r") == ("r", "p", "q")
    assert partitions(record(partition=("q",)), "else") == ("q", "p", "r")


def test_a_partition_must_allow_the_job_s_time_limit():
    job = record(partition=("q", "p"), time_limit_s=600.0)
    assert partitions(job, max_time_s={"p": 599.0, "q": 600.0, "r": 599.0}) == ("q",)
    assert partitions(job, max_time_s={"p": 599.0, "q": 599.0}) == ("q", "p", "r"), "Slurm says so there"


def test_a_partition_that_gives_its_jobs_no_cpus_takes_none_of_whole_nodes_either():
    whole = json.dumps({"penstock": {"max_gpus": 4}, "penstock_request": {"whole_nodes": True}})
    assert partitions(record(partition=("p",), admin_comment=whole), most={"q": (0, None)}) == ("p", "r")


def test_only_jobs_that_count_in_whole_nodes_go_to_partitions_of_whole_nodes():
    job = record(partition=("p",))
    assert partitions(job, whole_nodes=frozenset({"r"})) == ("p", "q")
    assert partitions(record(partition=("r",)), whole_nodes=frozenset({"r"})) == ("r", "p", "q")
    whole = json.dumps({"penstock": {"max_gpus": 4}, "penstock_request": {"whole_nodes": True}})
    assert partitions(record(admin_comment=whole), whole_nodes=frozenset({"r"})) == ("p", "q", "r")


# --- placements


def test_the_gpus_of_a_job_that_shares_are_in_its_control_message():
    shares = CONTROL.model_copy(update={"shares": True, "gpus": 6})
    types = SCENE.types
    assert view.placement(running(gpus_per_node=None), ("n1", "n0"), types, shares) == held_on(
        Share("n0", 3), Share("n1", 3)
    )
    assert view.placement(running(gpus_per_node=None), ("n0",), types, CONTROL) == held_on(Share("n0", 0))
    assert view.placement(running(gpus_per_node=None), ("n0",), types) == held_on(Share("n0", 0))
    assert view.placement(running(), ("n0",), types, shares) == held_on(Share("n0", 2))
    bare = shares.model_copy(update={"nodes": None})
    assert view.placement(running(gpus_per_node=None), ("n0",), types, bare) == held_on(Share("n0", 6))
    none = shares.model_copy(update={"gpus": None})
    assert view.placement(running(gpus_per_node=None), ("n0",), types, none) == held_on(Share("n0", 0))


def test_a_placement_has_the_type_of_its_first_node_and_the_first_partition():
    job = running(partition=("q", "p"))
    assert view.placement(job, ("n2", "n0"), SCENE.types) == held_on(
        Share("n0", 2), Share("n2", 2), gpu_type="rtx", partition="q"
    )
    assert view.placement(job, ("n9",), SCENE.types) == held_on(Share("n9", 2), gpu_type="", partition="q")
    assert view.placement(running(partition=()), (), SCENE.types) == held_on(gpu_type="", partition="")


def test_cpus_and_memory_that_penstock_gave_are_part_of_what_a_job_holds():
    given = CONTROL.model_copy(update={"cpus": 6, "memory_mb": 900})
    whole = held_on(Share("n0", 2, 6, 900), Share("n1", 2, 6, 900))
    assert seen(running(), Spooled(given)).allocation == whole
    no_memory = CONTROL.model_copy(update={"cpus": 6})
    assert seen(running(), Spooled(no_memory)).allocation == held_on(Share("n0", 2, 6), Share("n1", 2, 6))
    assert seen(running(), Spooled(given.model_copy(update={"nodes": 3}))).allocation == TWO, "for another placement"
    assert seen(running(), Spooled(given.model_copy(update={"cpus": None}))).allocation == TWO
    assert seen(record(), Spooled(given)).allocation is None


def test_nodes_that_a_run_has_left_in_favour_of_others():
    job = running(nodes=("n0", "n1", "n2"), restarts=1)
    left = STARTED.model_copy(update={"restarts": 1, "left_nodes": ("n0", "n2", "n9")})
    assert view.left_behind(job, left) == ("n2",)
    assert view.left_behind(job, left.model_copy(update={"left_nodes": ("n1",)})) == ("n1",)
    assert view.left_behind(job, None) == ()
    assert view.left_behind(job, left.model_copy(update={"restarts": 0})) == ()
    assert view.left_behind(job, left.model_copy(update={"restarts": 2})) == ()
    assert view.left_behind(dataclasses.replace(job, state="COMPLETING"), left) == ()


# --- runs that have ended


def run_of(job: SlurmJob, control: ControlMessage | None = None) -> EndedRun | None:
    return view.ended_run(job, {"7": control}.get, SCENE)


def test_the_last_run_of_a_job():
    assert run_of(ended()) == EndedRun("7", TWO, 500.0, 900.0)
    assert run_of(ended(state="COMPLETING")) == EndedRun("7", TWO, 500.0, 900.0)
    latest = ended(end_s=NOW_S + CLOCKS_DIFFER_S)
    assert run_of(latest) == EndedRun("7", TWO, 500.0, NOW_S + CLOCKS_DIFFER_S)
    assert CLOCKS_DIFFER_S == 60.0


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "RUNNING"},
        {"start_s": None},
        {"end_s": None},
        {"nodes": ()},
        {"end_s": NOW_S + CLOCKS_DIFFER_S + 0.1},
        {"comment": ""},
        {"comment": '{"penstock": {"max_gpus": 0}}'},
        {"partition": ("else",)},
    ],
)
def test_jobs_without_a_run_that_has_ended(changes: dict[str, Any]):
    assert run_of(ended(**changes)) is None


def test_the_gpus_of_an_ended_run_that_shared():
    control = CONTROL.model_copy(update={"shares": True})
    assert run_of(ended(gpus_per_node=None), control) == EndedRun("7", TWO, 500.0, 900.0)
    found = run_of(ended(gpus_per_node=1), control)
    assert found is not None
    assert found.held.gpus == 2


def test_runs_in_slurms_accounting():
    run, types = SlurmRun("7", 1.0, 2.0, ("n2", "n0"), 6), SCENE.types

    def gpus(gpus: int, control: ControlMessage | None) -> int:
        return view.accounted_run(dataclasses.replace(run, gpus=gpus), control, types).held.gpus

    held = held_on(Share("n0", 3), Share("n2", 3), gpu_type="rtx", partition="")
    assert view.accounted_run(run, None, types) == EndedRun("7", held, 1.0, 2.0)
    shares = CONTROL.model_copy(update={"shares": True})
    assert (gpus(0, shares), gpus(0, CONTROL), gpus(0, None), gpus(2, shares)) == (4, 0, 0, 2)
    assert gpus(0, shares.model_copy(update={"gpus": None})) == 0
    nowhere = dataclasses.replace(run, nodes=())
    assert view.accounted_run(nowhere, None, types).held == held_on(gpu_type="", partition="")
    unknown = dataclasses.replace(run, nodes=("n9",))
    assert view.accounted_run(unknown, None, types).held.gpu_type == ""


# --- remembered views


def test_a_view_is_made_anew_when_a_fact_of_its_job_changes_and_others_are_kept():
    views, other = Views(), running(id="8", nodes=("n2",))
    job = running(restarts=1)

    def made(scene: Scene, spooled: Spooled = BARE) -> tuple[Any, Any]:
        views.begin(scene)
        return views.of(job, SPEC, spooled, scene), views.of(other, SPEC, Spooled(), scene)

    first, kept = made(SCENE)
    assert made(SCENE) == (first, kept)
    assert made(SCENE)[0] is first
    for changes in ({"silent": frozenset({"n1"})}, {"stopped_s": {("7", 0): 1.0}}, {"misplaced": {"7"}}):
        assert made(SCENE)[0] == first
        ours, theirs = made(dataclasses.replace(SCENE, **changes))
        assert ours != first
        assert theirs is kept
    assert made(dataclasses.replace(SCENE, types={}))[1] is not kept, "all views depend on it"


def test_only_the_jobs_that_are_kept_are_remembered():
    views, jobs = Views(), [running(id="8"), running(id="9")]
    first = [views.of(job, SPEC, Spooled(), SCENE) for job in jobs]
    views.forget({"8"})
    again = [views.of(job, SPEC, Spooled(), SCENE) for job in jobs]
    assert [new is old for new, old in zip(again, first, strict=True)] == [True, False]


def test_scenes_and_what_the_spool_has_are_values():
    for each in (SCENE, Spooled(), SortedJobs()):
        assert not hasattr(each, "__dict__"), "there are thousands"
    for each in (SCENE, Spooled()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, None)
    assert (Spooled().epoch, Spooled().saved) == (0, False)
