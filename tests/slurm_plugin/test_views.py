"""Views of jobs that are remembered are those that would be made anew, whatever changes between two observations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from penstock_profiles.wire import ControlMessage, Request, Started
from penstock_scheduler.api.agent_messages import agent_folder
from penstock_scheduler.model import Phase
from penstock_slurm.gateway import SlurmJob
from penstock_slurm.gateway.parse_jobs import parse_jobs
from penstock_slurm.observe.site import SlurmRules
from penstock_slurm.observe.sorting import job_spec
from penstock_slurm.observe.view import Scene, Spooled, Views, booting_jobs, job_view
from penstock_slurm.share.agent_files import nodes_with_agents
from tests.slurm_plugin.gateway.test_parse import MARKS, OF_22_05, RUNNING, answer

TEXT = '{"penstock": {"max_gpus": 4}}'
(SEEN,) = parse_jobs(answer(RUNNING), MARKS, OF_22_05)
JOB = dataclasses.replace(SEEN, admin_comment=TEXT, unknown=())
PENDING = dataclasses.replace(
    JOB, state="PENDING", reason="BeginTime", nodes=(), start_s=None, priority=1, required_nodes=("t4-00",)
)
BOOTING = dataclasses.replace(JOB, state="CONFIGURING")
SCENE = Scene(now_s=1795225300.0, managed=("all",), up=("all",), types={"t4-00": "t4", "t4-01": "t4"})
CONTROL = ControlMessage(job_id=JOB.id, epoch=1, round=1, nodes=2, gpus=2)
ASKED = CONTROL.model_copy(update={"request": Request(id="1", asked_s=1.0)})
STARTED = Started(gpu_type="t4", gpu_ids={})

OBSERVATIONS: list[tuple[SlurmJob, Spooled, Scene]] = [
    (JOB, Spooled(), SCENE),
    (JOB, Spooled(CONTROL), SCENE),
    (JOB, Spooled(CONTROL, STARTED, 1), SCENE),
    (JOB, Spooled(ASKED, STARTED, 1), SCENE),
    (JOB, Spooled(ASKED, STARTED, 1, saved=True), SCENE),
    (JOB, Spooled(CONTROL, STARTED, 1), dataclasses.replace(SCENE, silent=frozenset({"t4-01"}))),
    (JOB, Spooled(CONTROL, STARTED, 1), dataclasses.replace(SCENE, without_gpus={JOB.id})),
    (JOB, Spooled(CONTROL, STARTED, 1), dataclasses.replace(SCENE, misplaced={JOB.id})),
    (JOB, Spooled(CONTROL, STARTED, 1), dataclasses.replace(SCENE, types={"t4-00": "rtx", "t4-01": "rtx"})),
    (JOB, Spooled(CONTROL, STARTED, 1), dataclasses.replace(SCENE, max_time_s={"all": 1.0})),
    (JOB, Spooled(CONTROL, STARTED, 1), dataclasses.replace(SCENE, managed=("all", "t4"))),
    (
        JOB,
        Spooled(CONTROL, STARTED, 1),
        dataclasses.replace(SCENE, rules=SlurmRules(fair_shares={(JOB.account, JOB.user): 1.0})),
    ),
    (dataclasses.replace(JOB, suspended_s=5.0), Spooled(CONTROL, STARTED, 1), SCENE),
    (dataclasses.replace(PENDING, eligible_s=SCENE.now_s + 5), Spooled(CONTROL), SCENE),
    (dataclasses.replace(PENDING, eligible_s=SCENE.now_s - 5), Spooled(CONTROL), SCENE),
    (PENDING, Spooled(CONTROL), dataclasses.replace(SCENE, stopped_s={(JOB.id, JOB.restarts - 1): 7.0})),
    (PENDING, Spooled(CONTROL), SCENE),
    (BOOTING, Spooled(CONTROL), dataclasses.replace(SCENE, booting={JOB.id})),
    (BOOTING, Spooled(CONTROL), SCENE),
    (BOOTING, Spooled(ASKED), dataclasses.replace(SCENE, booting={JOB.id})),
]


def test_whatever_changes_the_view_is_the_one_that_would_be_made_anew():
    views = Views()
    for before in OBSERVATIONS:
        for after in OBSERVATIONS:
            for job, spooled, scene in (before, after):
                spec = job_spec(job)
                assert spec is not None
                views.begin(scene)
                assert views.of(job, spec, spooled, scene) == job_view(job, spec, spooled, scene)


def test_the_view_of_a_job_changes_when_a_begin_time_passes_and_nothing_else_happens():
    views, job = Views(), dataclasses.replace(PENDING, eligible_s=SCENE.now_s + 5)
    spec = job_spec(job)
    assert spec is not None
    spooled = Spooled(CONTROL)
    _, kept = views.of(job, spec, spooled, SCENE)
    _, due = views.of(job, spec, spooled, dataclasses.replace(SCENE, now_s=SCENE.now_s + 10))
    assert kept is not None
    assert due is not None
    assert (kept.allocation, due.allocation is None) == (None, False)


def test_a_job_of_which_nothing_has_changed_has_the_very_same_view_and_one_that_is_forgotten_does_not():
    views, spec = Views(), job_spec(JOB)
    assert spec is not None
    assert job_spec(dataclasses.replace(JOB)) is spec
    views.begin(SCENE)
    _, first = views.of(JOB, spec, Spooled(CONTROL), SCENE)
    views.begin(dataclasses.replace(SCENE, now_s=SCENE.now_s + 1))
    assert views.of(JOB, spec, Spooled(CONTROL), SCENE)[1] is first
    views.forget(set())
    assert views.of(JOB, spec, Spooled(CONTROL), SCENE)[1] is not first


def test_a_job_whose_nodes_boot_holds_them_and_has_not_begun():
    """Slurm sets its start time anew when the nodes are ready, so the time of the boot is not charged."""
    spec = job_spec(BOOTING)
    assert spec is not None
    _, boots = job_view(BOOTING, spec, Spooled(CONTROL), dataclasses.replace(SCENE, booting={JOB.id}))
    assert boots is not None
    assert (boots.phase, boots.started_s, boots.running_on) == (Phase.STARTING, None, None)
    assert boots.allocation is not None
    assert boots.allocation.nodes == ("t4-00", "t4-01")
    _, awake = job_view(BOOTING, spec, Spooled(CONTROL), SCENE)
    assert awake is not None
    assert awake.phase is Phase.RUNNING


def test_a_job_boots_its_nodes_until_slurm_begins_it():
    """Slurm begins it up to half a minute after the nodes are ready."""
    assert booting_jobs([BOOTING], {"t4-01": 30.0}, ()) == {JOB.id}
    assert booting_jobs([BOOTING], {}, {JOB.id}) == {JOB.id}
    assert booting_jobs([BOOTING], {"t4-07": 30.0}, ()) == frozenset(), "its nodes are awake: Slurm runs the prolog"
    assert booting_jobs([JOB, PENDING], {"t4-01": 30.0}, {JOB.id}) == frozenset()


def test_only_nodes_with_an_agent_are_looked_at(tmp_path: Path):
    assert nodes_with_agents(tmp_path, ["n0", "n1"]) == []
    agent_folder(tmp_path, "n1").mkdir(parents=True)
    agent_folder(tmp_path, "other").mkdir()
    assert nodes_with_agents(tmp_path, ["n0", "n1"]) == ["n1"]
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "agents").write_text("")
    assert nodes_with_agents(blocked, ["n0", "n1"]) == ["n0", "n1"], "in doubt, all"
