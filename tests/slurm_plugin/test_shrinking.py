"""A run gives up a node in place: what the daemon asks for, waits for and takes, and what it does when something fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock_profiles.wire import Checkpointed, ControlMessage, Report, Request, Started, left_file, reports_file
from penstock_scheduler.model import Action, Hold, Migrate, Outcome, Phase, Placement, Resize, Share
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.steps import STUCK
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import Refused, SlurmError, Transient
from penstock_slurm.observe.managed import rests
from penstock_slurm.observe.view import Spooled
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin import test_cluster
from tests.slurm_plugin.test_cluster import pending

ONE, BOTH = Placement("t4", "gpu", (Share("n0", 1),)), Placement("t4", "gpu", (Share("n0", 1), Share("n1", 1)))
SHRINK, STAY = Resize("7", 5, ONE), Migrate("7", 6, BOTH)
STARTED = Started(gpu_type="t4", gpu_ids={}, gives_up_nodes=True, restarts=0)
LEFT = STARTED.model_copy(update={"left_nodes": ("n1",)})


class Told(test_cluster.Told):
    """Job 7 runs on n0 and n1. It can shrink, unless there is an `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.error: SlurmError | None = None
        self.shrunk: list[tuple[str, ...]] = []
        self.said: list[str] = []
        self.hold(("n0", "n1"))

    def hold(self, nodes: tuple[str, ...], restarts: int = 0) -> None:
        fields = {"state": "RUNNING", "nodes": nodes, "node_count": len(nodes), "priority": 9, "start_s": 10.0}
        self.listed = [pending("gpu", uid=os.geteuid(), restarts=restarts, **fields)]

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        self.shrunk.append((job_id, *nodes))
        if self.error is not None:
            raise self.error
        self.hold(tuple(nodes))

    def set_admin_comment(self, job_id: str, text: str) -> None:
        self.said.append(text)


@dataclass
class Rig:
    """A cluster; its jobs are `told`."""

    folder: Path
    told: Told = field(default_factory=Told)
    clock: SimulatedClock = field(default_factory=lambda: SimulatedClock(100.0))
    reports: int = 0

    def __post_init__(self) -> None:
        self.restart()
        self.spool.tell(ControlMessage(job_id="7", epoch=1, round=1, nodes=2, gpus=2, holds=0), os.geteuid())
        self.report(1, STARTED)

    def restart(self) -> None:
        """Another penstockd takes over."""
        self.spool = Spool(self.folder)
        settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=self.folder)
        self.cluster = SlurmCluster(self.told, self.told, self.spool, self.clock, settings, lambda spec: None)  # type: ignore[arg-type]

    def report(self, epoch: int, body: Started | Checkpointed) -> None:
        report = Report(job_id="7", epoch=epoch, sequence=self.reports, time_s=self.clock.now_s(), body=body)
        self.reports += 1
        with reports_file(self.folder, "7", epoch).open("a") as file:
            file.write(report.model_dump_json() + "\n")

    def leave(self, restarts: int = 0) -> None:
        """The launcher on n1 ends, and the next run begins."""
        left_file(self.folder, "7", restarts, "n1").touch()
        self.report(2, LEFT)

    def tick(self, action: Action | None, seconds: float = 1.0) -> str:
        """One tick later. Returns the action's outcome."""
        self.clock.sleep(seconds)
        self.cluster.observe()
        self.cluster.reports()
        self.cluster.observe()
        outcomes: tuple[Outcome, ...] = self.cluster.apply([action] if action is not None else [])
        return outcomes[-1].text if outcomes else ""

    @property
    def request(self) -> Request | None:
        control = self.spool.control("7")
        assert control is not None
        return control.request

    @property
    def written(self) -> list[str]:
        return [each.kind for each in self.told.written]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_run_leaves_first_and_then_slurm_takes_the_node(rig: Rig) -> None:
    assert rig.tick(SHRINK) == "was asked to give up nodes n1"
    request = rig.request
    assert request is not None
    assert (request.kind, request.keep_nodes) == ("checkpoint", ("n0",))
    rig.tick(SHRINK)
    assert rig.request == request, "it is asked once"
    rig.report(2, LEFT)
    assert rig.tick(SHRINK) == "has left nodes, which Slurm takes now"
    assert rig.told.shrunk == [], "a launcher may still be there"
    left_file(rig.folder, "7", 0, "n1").touch()
    rig.restart()
    rig.tick(SHRINK)
    assert rig.told.shrunk == [("7", "n0")]
    control = rig.spool.control("7")
    assert control is not None
    assert (control.nodes, control.gpus, control.request, control.moved_s) == (1, 1, None, None)
    rig.tick(None)
    assert (rig.written, rig.told.said, len(rig.told.shrunk)) == ([], [], 1), "no restart, no message"


def test_a_run_that_does_not_say_that_it_can_is_moved_by_requeue(rig: Rig) -> None:
    rig.report(1, Started(gpu_type="t4", gpu_ids={}))
    assert rig.tick(SHRINK) == "was asked to save"
    assert rig.request is not None
    assert rig.request.keep_nodes == ()


def test_a_silent_run_is_moved_by_requeue_and_its_owner_is_told(rig: Rig) -> None:
    """It then has as long to save as any other job."""
    rig.tick(SHRINK)
    assert rig.tick(SHRINK, 58) == "was asked to give up nodes n1"
    assert rig.tick(SHRINK, 2) == "was asked to save"
    assert rig.request is not None
    assert rig.request.keep_nodes == ()
    (said,) = rig.told.said
    assert "it did not give up nodes n1 within 60 s of the request, so it is restarted" in said
    rig.tick(STAY)
    assert rig.tick(SHRINK) == "was asked to save", "it is not asked twice to give up nodes"
    rig.report(1, Checkpointed(request=rig.request.id, progress=1, seconds=1))
    assert rig.tick(SHRINK) == "has saved, leaves its GPUs"
    assert (rig.written, rig.told.shrunk) == (["requeue_hold"], [])


def test_the_plan_changes_its_mind_before_the_run_has_left(rig: Rig) -> None:
    rig.tick(SHRINK)
    assert rig.tick(STAY) == "stays where it is"
    assert rig.request is None
    rig.tick(None)
    assert (rig.told.shrunk, rig.written) == ([], [])


def test_nodes_that_the_run_has_left_are_taken_whatever_a_later_plan_says(rig: Rig) -> None:
    """The request was withdrawn too late. The job would hold a node that no process of it uses."""
    rig.tick(SHRINK)
    rig.leave()
    rig.tick(STAY)
    assert (rig.request, rig.told.shrunk, rig.written) == (None, [("7", "n0")], [])


def test_a_plan_that_stops_the_job_meanwhile_asks_it_only_to_save(rig: Rig) -> None:
    rig.tick(SHRINK)
    before = rig.request
    assert before is not None
    rig.report(1, Checkpointed(request=before.id, progress=1, seconds=1))
    assert rig.tick(Hold("7", 5)) == "was asked to save", "what it saved then is old"
    assert rig.request is not None
    assert (rig.request.keep_nodes, rig.request.id != before.id) == ((), True)


@pytest.mark.parametrize("later", [SHRINK, STAY], ids=["as before", "plan stays"])
def test_if_slurm_refuses_the_job_starts_again_with_the_reason(rig: Rig, later: Action) -> None:
    """Also if the plan leaves it on both nodes: the run uses one of them."""
    rig.tick(SHRINK)
    rig.told.error = Refused("Job is no longer pending execution", command="scontrol update")
    rig.leave()
    rig.tick(later)
    rig.tick(later)
    assert rig.told.shrunk == [("7", "n0")], "it is tried once"
    assert "it gave up nodes n1, and has to restart: " in rig.told.said[0]
    assert "Job is no longer pending execution" in rig.told.said[0]
    assert rig.request is not None
    assert rig.request.keep_nodes == ()
    rig.report(2, Checkpointed(request=rig.request.id, progress=1, seconds=1))
    assert rig.tick(later) == f"has saved, leaves its GPUs: {STUCK.text}"
    assert rig.written == ["requeue_hold"]
    # It is not asked again, on this version of Slurm.
    rig.told.hold(("n0", "n1"), restarts=1)
    rig.spool.tell(ControlMessage(job_id="7", epoch=3, round=7, nodes=2, gpus=2), os.geteuid())
    rig.report(3, STARTED.model_copy(update={"restarts": 1}))
    assert rig.tick(Resize("7", 8, ONE)) == "was asked to save"


def test_if_slurm_refuses_after_the_plan_has_changed_its_mind_the_job_has_to_leave(rig: Rig) -> None:
    """No action is left for a job that is where the plan wants it, so its phase has to say that it is not."""
    rig.tick(SHRINK)
    rig.tick(STAY)
    rig.told.error = Refused("Job is no longer pending execution", command="scontrol update")
    rig.leave()
    rig.tick(None)
    rig.tick(None)
    assert rig.cluster._managed.jobs["7"].phase is Phase.STOPPING


def test_a_passing_failure_of_slurm_is_tried_again(rig: Rig) -> None:
    rig.tick(SHRINK)
    rig.told.error = Transient("Resource temporarily unavailable", command="scontrol update")
    rig.leave()
    rig.tick(SHRINK)
    rig.told.error = None
    rig.tick(SHRINK)
    assert (rig.told.shrunk, rig.told.said, rig.request) == ([("7", "n0")] * 2, [], None)


def test_a_launcher_that_does_not_end_keeps_its_node(rig: Rig) -> None:
    rig.tick(SHRINK)
    rig.report(2, LEFT)
    rig.tick(SHRINK)
    rig.tick(SHRINK, 61)
    assert rig.told.shrunk == []
    assert "its launchers did not end there within 60 s" in rig.told.said[0]


def test_what_an_earlier_run_left_counts_no_more_after_a_restart(rig: Rig) -> None:
    """Slurm has restarted the job on both nodes, and the new run has not reported yet."""
    rig.leave()
    left_file(rig.folder, "7", 1, "n1").touch()
    rig.told.hold(("n0", "n1"), restarts=1)
    rig.tick(None)
    assert rig.told.shrunk == []


def test_nothing_is_taken_on_a_silent_node(rig: Rig) -> None:
    rig.leave()
    rig.told.words = {"n0": {"MIXED", "NOT_RESPONDING"}}
    rig.tick(None)
    assert rig.told.shrunk == []


def test_a_run_cannot_have_its_first_node_taken(rig: Rig) -> None:
    """Whatever it reports: Slurm would end the job."""
    left_file(rig.folder, "7", 0, "n0").touch()
    rig.report(2, STARTED.model_copy(update={"left_nodes": ("n0",)}))
    rig.tick(None)
    assert rig.told.shrunk == []


def test_a_second_shrink_is_another_ability(rig: Rig) -> None:
    """The run has left n2 before, which Slurm has taken."""
    rig.report(2, STARTED.model_copy(update={"left_nodes": ("n2",)}))
    rig.told.error = Refused("Job is no longer pending execution", command="scontrol update")
    rig.tick(SHRINK)
    left_file(rig.folder, "7", 0, "n1").touch()
    rig.report(3, STARTED.model_copy(update={"left_nodes": ("n2", "n1")}))
    rig.tick(SHRINK)
    abilities = (rig.folder / "abilities.json").read_text()
    assert '"shrink-again"' in abilities
    assert '"shrink":' not in abilities


def test_a_job_whose_run_has_left_nodes_is_looked_at_in_each_observation(rig: Rig) -> None:
    rig.tick(None)
    (record,), job, scene = rig.told.listed, rig.cluster._managed.jobs["7"], rig.cluster._scene
    assert rests(record, job, Spooled(None, STARTED, 1), scene)
    assert not rests(record, job, Spooled(None, LEFT, 2), scene)
