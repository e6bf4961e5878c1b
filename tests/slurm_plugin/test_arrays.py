"""Arrays that may run few elements at once: which of their elements a plan may give GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_profiles.wire import ControlMessage, Request
from penstock_scheduler.model import Phase, Placement, Progress, Share, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import JobGone, SlurmError, SlurmFeatures, Transient
from penstock_slurm.jobs.arrays import AGAIN, NEW
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending


class World(Told):
    """A site with arrays, and a cluster on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clock, self.spool = SimulatedClock(), Spool(folder / "spool", alone=True)
        settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=self.spool.folder)
        self.cluster = SlurmCluster(self, self, self.spool, self.clock, settings, lambda spec: None)  # type: ignore[arg-type]
        self.asked_about: list[str] = []
        self.fails: Callable[[str], SlurmError | None] = lambda job_id: None

    def array_limit(self, job_id: str) -> int | None:
        self.asked_about.append(job_id)
        if (error := self.fails(job_id)) is not None:
            raise error
        return super().array_limit(job_id)

    def add(self, array: int, elements: int, limit: int | None = None, **fields: object) -> None:
        if limit is not None:
            self.array_limits[array] = limit
        self.listed += [
            pending(
                "gpu", id=f"{array}_{at}", number=array, array_job_id=array, array_task_id=at, **self.fields(fields)
            )
            for at in range(1, elements + 1)
        ]

    @staticmethod
    def fields(fields: dict[str, object]) -> dict[str, object]:
        return {"reason": "JobHeldUser", "restarts": 0, "uid": 7} | fields

    def change(self, job_id: str, **fields: object) -> None:
        at = [job.id for job in self.listed].index(job_id)
        self.listed[at] = dataclasses.replace(self.listed[at], **fields)  # type: ignore[arg-type]

    def run(self, *job_ids: str, state: str = "RUNNING") -> None:
        for job_id in job_ids:
            self.change(job_id, state=state, nodes=("n0",), start_s=self.clock.now_s(), reason="None", priority=9)

    def send(self, *job_ids: str) -> None:
        """Penstock has placed and released them."""
        for job_id in job_ids:
            self.change(job_id, required_nodes=("n0",), priority=9, reason="None")
            self.spool.tell(ControlMessage(job_id=job_id, epoch=1, round=1, submitted_s=0.0, nodes=1, gpus=1))

    def end(self, job_id: str) -> None:
        (job,) = (job for job in self.listed if job.id == job_id)
        self.listed.remove(job)
        self.ended.append(dataclasses.replace(job, state="COMPLETED"))

    def planned(self) -> set[str]:
        """The jobs that a policy sees."""
        self.clock.sleep(1.0)
        self.state = self.cluster.observe()
        self.cluster.apply([])
        assert {job.id for job in self.state.jobs}.isdisjoint(each.job.id for each in self.state.waiting)
        return {job.id for job in self.state.jobs}

    def text(self, job_id: str) -> str:
        return next(each.text for each in self.state.waiting if each.job.id == job_id)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_no_more_elements_are_planned_for_than_may_run(world: World) -> None:
    """The first ones, in Slurm's order. An array without a limit, and a job, are planned for as a whole."""
    world.add(1, 12, limit=2)
    world.add(2, 3)
    world.listed.append(pending("gpu", id="3", **world.fields({})))
    others = {"2_1", "2_2", "2_3", "3"}
    assert world.planned() == {"1_1", "1_2"} | others
    assert world.text("1_3") == (
        "waits for another element to end: its array runs at most 2 at a time (ArrayTaskThrottle)"
    )
    assert len(world.state.waiting) == 10
    world.run("1_1")
    assert world.planned() == {"1_1", "1_2"} | others
    world.end("1_1")
    assert world.planned() == {"1_2", "1_3"} | others
    assert not world.written, "what is held already is not held again"


def test_what_the_user_changes_counts_from_the_next_look(world: World) -> None:
    """What runs, runs on. An element that was sent to nodes, and may not run any more, is held and gives its GPUs up."""
    world.add(1, 4, limit=3)
    world.run("1_2")
    world.send("1_3")
    assert world.planned() == {"1_1", "1_2", "1_3"}
    world.array_limits[1] = 1
    assert world.planned() == {"1_2"}
    assert [(write.job_id, write.kind) for write in world.written] == [("1_3", "hold")]
    control = world.spool.control("1_3")
    assert control is not None
    assert (control.holds, control.holding) == (0, 0), "so that a hold that comes too late is taken back"
    world.change("1_3", priority=0, reason="JobHeldUser")
    assert world.planned() == {"1_2"}
    assert world.text("1_3").startswith("waits for another element"), "the hold is nobody else's"
    del world.array_limits[1]
    assert world.planned() == {"1_1", "1_2", "1_3", "1_4"}
    assert len(world.written) == 1


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED"])
def test_an_element_that_holds_gpus_counts_whatever_it_does(world: World, state: str) -> None:
    world.add(1, 3, limit=1)
    world.run("1_3", state=state)
    assert world.planned() == {"1_3"}


def test_an_element_whose_node_boots_counts_as_one_that_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm has started it, so it is not taken back in favour of another one, nor is it to be sent again."""
    monkeypatch.setattr(world, "features", lambda: SlurmFeatures("loop", resume_timeout_s=600.0))
    world.words = {"n0": {"MIXED", "NOT_RESPONDING", "POWERING_UP"}}
    world.add(1, 3, limit=1)
    world.send("1_3")
    world.run("1_3", state="CONFIGURING")
    assert world.planned() == {"1_3"}
    (job,) = world.state.jobs
    assert (job.phase, job.allocation is None) == (Phase.STARTING, False)
    assert job.allocation is not None
    (outcome,) = world.cluster.apply([Start("1_3", 1, job.allocation)])
    assert (outcome.progress, outcome.text) == (Progress.UNDER_WAY, "waits for Slurm to boot its nodes")
    assert not world.written


def test_a_job_whose_node_boots_is_not_held_because_it_was_sent_in_vain_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may start it right before it is held."""
    monkeypatch.setattr(world, "features", lambda: SlurmFeatures("loop", resume_timeout_s=600.0))
    world.words = {"n0": {"MIXED", "NOT_RESPONDING", "POWERING_UP"}}
    world.listed.append(pending("gpu", id="3", **world.fields({})))
    assert world.planned() == {"3"}
    sent_to = Placement("t4", "gpu", (Share("n0", 1),))
    for now_s in (0.0, 100.0):
        world.cluster._managed.unstarted.refused("3", sent_to, "Resources", world.clock.now_s() + now_s)
    assert world.planned() == set()
    world.run("3", state="CONFIGURING")
    assert world.planned() == {"3"}
    assert not world.written


def test_an_element_counts_that_penstock_does_not_manage(world: World) -> None:
    world.add(1, 3, limit=1)
    world.run("1_3")
    world.change("1_3", exclusive=True)
    assert world.planned() == set()
    world.change("1_3", state="COMPLETING")
    assert world.planned() == {"1_1"}, "Slurm does not count what is ending"


def test_an_element_that_was_stopped_goes_first_and_keeps_its_turn_while_it_leaves(world: World) -> None:
    """Also if Slurm or its user has requeued it, and it waits for the begin time that Slurm gives it."""
    world.add(1, 3, limit=1)
    world.run("1_2")
    assert world.planned() == {"1_2"}
    request = Request(id="r", asked_s=world.clock.now_s())
    told = ControlMessage(job_id="1_2", epoch=1, round=1, submitted_s=0.0, nodes=1, gpus=1, holds=1, request=request)
    world.spool.tell(told)
    world.change("1_2", state="COMPLETING", end_s=world.clock.now_s())
    assert world.planned() == {"1_2"}
    again = {"state": "PENDING", "nodes": (), "start_s": None, "restarts": 1}
    world.change("1_2", **again, priority=0, reason="job requeued in held state")
    assert world.planned() == {"1_2"}
    world.change("1_2", priority=9, reason="BeginTime", eligible_s=world.clock.now_s() + 100, required_nodes=("n0",))
    assert world.planned() == {"1_2"}
    assert not world.written


def test_an_element_that_somebody_holds_or_that_waits_for_something_takes_nobodys_turn(world: World) -> None:
    world.add(1, 4, limit=1)
    world.change("1_1", reason="JobHeldAdmin")
    world.change("1_2", dependency="afterok:9")
    assert world.planned() == {"1_3"}
    assert "held by an admin" in world.text("1_1")
    assert world.text("1_2") == "waits for its dependency afterok:9"


def test_elements_that_slurm_could_start_by_itself_are_held(world: World) -> None:
    """Without the flags, and without --hold."""
    world.add(1, 4, limit=2, priority=9, reason="Priority")
    assert len(world.planned()) == 2
    assert {write.job_id for write in world.written} == {"1_3", "1_4"}


def test_only_arrays_are_asked_about_whose_elements_wait_for_others(world: World) -> None:
    world.listed.append(pending("gpu", id="3", **world.fields({})))
    world.add(1, 1)
    world.add(2, 2)
    world.run("2_1", "2_2")
    assert world.planned() == {"3", "1_1", "2_1", "2_2"}
    assert world.asked_about == []


def test_a_site_with_very_many_arrays_is_asked_about_some_at_a_time(world: World) -> None:
    """Until Slurm has told an array's limit, it runs one element at a time. Then all get their turn to be asked about again."""
    arrays = range(100, 100 + 2 * NEW)
    for array in arrays:
        world.add(array, 2)
    assert len(world.planned()) == NEW * 2 + NEW
    assert "Slurm to say how many elements of its array may run at once" in world.text(f"{arrays[-1]}_2")
    assert len(world.asked_about) == NEW
    assert len(world.planned()) == NEW * 4
    assert len(world.asked_about) == 2 * NEW + AGAIN
    for _ in range(2 * NEW // AGAIN):
        world.planned()
    assert {world.asked_about.count(f"{array}_1") for array in arrays} == {2, 3}


@pytest.mark.parametrize("error", [JobGone, Transient])
def test_what_slurm_does_not_answer_leaves_the_limit_as_it_was(world: World, error: type[SlurmError]) -> None:
    world.add(1, 3, limit=2)
    assert world.planned() == {"1_1", "1_2"}
    world.fails = lambda job_id: error("no answer", command="scontrol show job", job_id=job_id)
    world.array_limits[1] = 3
    assert world.planned() == {"1_1", "1_2"}
    world.add(2, 2)
    assert world.planned() == {"1_1", "1_2", "2_1"}


def test_elements_beyond_the_limit_rest(world: World) -> None:
    """An array of very many elements costs no look at each of them in every tick."""
    world.add(1, 500, limit=1)
    world.planned()
    assert len(world.cluster._managed._at_rest) == 500
    assert not world.planned() - {"1_1"}
    assert not world.cluster._managed.looked
    world.end("1_1")
    assert world.planned() == {"1_2"}
