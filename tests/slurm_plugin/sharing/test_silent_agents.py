"""What penstockd does about agents that have gone silent, and what it says about the jobs that they have suspended."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest

from penstock_scheduler.api.agent_messages import CarriedJob, NodeStatus
from penstock_scheduler.model import Job, JobSpec, Stop, StopCode
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.gateway import Refused, SlurmJob
from penstock_slurm.share.silent_agents import SilentAgents

from .site import carried, runs

PATIENCE_S = 300.0


class Gateway:
    """Records what Slurm is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.refuses = False

    def resume(self, job_id: str) -> None:
        self._ask("resume", job_id)

    def requeue_hold(self, job_id: str) -> None:
        self._ask("requeue_hold", job_id)

    def _ask(self, call: str, job_id: str) -> None:
        self.asked.append((call, job_id))
        if self.refuses:
            raise Refused("no", command=call, job_id=job_id)


class Scene:
    """One node, `n0`, whose agent has reported once: job 7 runs on GPU 0, on which it has suspended job 8."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.gateway, self.spool = SimulatedClock(), Gateway(), Spool(folder)
        self.clock.sleep(10_000.0)
        self.beat_s = self.clock.now_s()
        self.states = {"7": "RUNNING", "8": "SUSPENDED"}
        self.spec = JobSpec(max_gpus=1)
        self.unreachable: frozenset[str] = frozenset()
        self.off: frozenset[str] = frozenset()
        self.told: tuple[CarriedJob, ...] = (
            carried("7", 0),
            carried("8", 0, state="suspended").model_copy(update={"since_s": 9000.0}),
        )
        self.begin()

    def begin(self) -> None:
        self.agents = SilentAgents(self.clock, PATIENCE_S)
        self.observe()

    def observe(self, after_s: float = 0.0) -> None:
        self.clock.sleep(after_s)
        status = NodeStatus(node="n0", order=1, time_s=self.beat_s, history="h", jobs=self.told)
        jobs: dict[str, Job] = {}
        records: dict[str, SlurmJob] = {}
        for number, state in self.states.items():
            found, record = runs(number, None, state=state)
            jobs[number], records[number] = dataclasses.replace(found, spec=self.spec), record
        self.agents.saw({"n0": status}, jobs, records, self.unreachable, self.off)

    def relieve(self, saved: Collection[str] = ()) -> dict[str, Stop]:
        return self.agents.relieve(self.gateway, self.spool, saved)  # type: ignore[arg-type]

    def says(self, job: str = "8") -> str:
        suspension = self.agents.suspended.get(job)
        return suspension.text if suspension is not None else ""


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_while_the_agent_reports_a_suspended_job_is_just_that(scene: Scene) -> None:
    """Its clock may be an hour behind: what counts is that a new status comes."""
    scene.beat_s -= 3600.0
    for _ in range(100):
        scene.beat_s += 5.0
        scene.observe(5.0)
        assert scene.agents.silent() == ()
        assert scene.relieve(["8"]) == {}
    assert "7" not in scene.agents.suspended
    assert scene.says() == "other jobs have its GPUs in this time slice"
    suspension = scene.agents.suspended.get("8")
    assert suspension is not None
    assert suspension.since_s == 9000.0
    assert not scene.gateway.asked


def test_a_job_whose_gpus_are_free_is_resumed_after_the_patience(scene: Scene) -> None:
    scene.states["7"] = "COMPLETED"
    scene.observe(20.0)
    (silent,) = scene.agents.silent()
    assert (silent.node, silent.suspended) == ("n0", ("8",))
    assert "the agent of n0, which would resume it, has been silent since" in scene.says()
    assert "Penstock resumes it at" in scene.says()
    scene.observe(PATIENCE_S - 21.0)
    assert scene.relieve() == {}
    assert not scene.gateway.asked
    scene.observe(2.0)
    assert scene.relieve() == {}
    assert scene.gateway.asked == [("resume", "8")]
    scene.states["8"] = "RUNNING"
    scene.observe(1.0)
    assert scene.relieve() == {}
    assert "8" not in scene.agents.suspended
    assert scene.gateway.asked == [("resume", "8")]


def test_a_job_whose_gpus_another_job_uses_starts_again_if_it_has_saved(scene: Scene) -> None:
    """The job that runs there is left alone."""
    scene.observe(PATIENCE_S + 1)
    assert scene.relieve() == {}, "it has not saved: it would lose all its work"
    assert "job 7 runs on its GPUs meanwhile" in scene.says()
    stops = scene.relieve(["8"])
    assert {job: stop.code for job, stop in stops.items()} == {"8": StopCode.SHARING}
    assert "has been silent since" in stops["8"].text
    assert "it starts again from its last checkpoint" in stops["8"].text
    assert scene.gateway.asked == [("requeue_hold", "8")]


def test_a_job_that_only_its_agent_can_restore_is_not_resumed(scene: Scene) -> None:
    """NVIDIA's driver has moved its GPU memory to the host: resumed, it would hang in its next CUDA call."""
    scene.told = (scene.told[0], scene.told[1].model_copy(update={"cuda_checkpointed": True}))
    scene.states["7"] = "COMPLETED"
    scene.observe(PATIENCE_S + 1)
    assert scene.relieve() == {}, "it has not saved: it would lose all its work"
    assert "another one stays suspended until the agent is back" in scene.says()
    stops = scene.relieve(["8"])
    assert "from which only the agent has it moved back; it starts again from its last checkpoint" in stops["8"].text
    assert scene.gateway.asked == [("requeue_hold", "8")]


@pytest.mark.parametrize(("spec", "stops"), [({"checkpointable": True}, 1), ({"preemptible": False}, 0)])
def test_what_the_job_spec_says_of_saving_and_moving_counts(scene: Scene, spec: dict[str, bool], stops: int) -> None:
    scene.spec = JobSpec.model_validate({"max_gpus": 1} | spec)
    scene.observe(PATIENCE_S + 1)
    assert len(scene.relieve(["8"] if not stops else [])) == stops


def test_two_suspended_jobs_of_one_gpu_are_not_resumed_together(scene: Scene) -> None:
    scene.states = {"7": "SUSPENDED", "8": "SUSPENDED"}
    scene.told = (carried("7", 0, state="suspended"), carried("8", 0, state="suspended"))
    scene.observe(PATIENCE_S + 1)
    scene.relieve()
    assert scene.gateway.asked == [("resume", "7")]
    scene.states["7"] = "RUNNING"
    scene.observe(1.0)
    scene.relieve()
    assert scene.gateway.asked == [("resume", "7")]


def test_a_daemon_that_starts_waits_the_whole_patience(scene: Scene) -> None:
    """After a power cut it may be up before the nodes are."""
    scene.observe(10 * PATIENCE_S)
    scene.begin()
    scene.observe(PATIENCE_S - 1.0)
    assert scene.relieve(["8"]) == {}
    scene.observe(2.0)
    assert scene.relieve(["8"])


def test_a_node_that_does_not_respond_is_slurms_matter(scene: Scene) -> None:
    scene.unreachable = frozenset({"n0"})
    scene.observe(PATIENCE_S + 1)
    assert scene.agents.silent() == ()
    assert scene.relieve(["8"]) == {}


def test_a_job_that_somebody_has_suspended_in_slurm_is_not_resumed(scene: Scene) -> None:
    scene.told = (carried("7", 0), carried("8", 1))
    scene.states = {"8": "SUSPENDED"}
    scene.observe(PATIENCE_S + 1)
    assert scene.says() == "somebody has suspended it in Slurm; `scontrol resume 8` ends that"
    scene.relieve(["8"])
    assert not scene.gateway.asked


def test_a_job_that_a_signal_has_stopped_stands_still_and_keeps_its_gpus(scene: Scene) -> None:
    scene.told = (carried("7", 0), carried("8", 1))
    scene.states = {"8": "STOPPED"}
    scene.observe(PATIENCE_S + 1)
    assert "STOPPED in Slurm" in scene.says()
    scene.relieve(["8"])
    assert not scene.gateway.asked


def test_what_slurm_refuses_is_tried_again(scene: Scene) -> None:
    scene.gateway.refuses = True
    for _ in range(2):
        scene.observe(PATIENCE_S + 1)
        assert scene.relieve(["8"]) == {}
    assert scene.gateway.asked == [("requeue_hold", "8")] * 2


def test_the_agent_of_a_node_that_slurm_has_powered_down_is_not_silent(scene: Scene) -> None:
    """Nor is it at once when the node is awake again."""
    scene.states = {}
    scene.off = frozenset({"n0"})
    scene.observe(3600.0)
    assert scene.agents.silent() == ()
    scene.off = frozenset()
    scene.observe(5.0)
    assert scene.agents.silent() == ()
    scene.observe(3600.0)
    assert [each.node for each in scene.agents.silent()] == ["n0"]


def test_a_driven_job_is_driven_or_frozen_and_runs_when_its_agent_is_silent(scene: Scene) -> None:
    """In Slurm it runs all the while. The guard of a silent agent has thawed it."""
    scene.told = (carried("7", 0).model_copy(update={"driven": True, "frozen_s": 40.0}), scene.told[1])
    scene.observe()
    driven = scene.agents.suspended["7"]
    assert (driven.state, driven.since_s) == ("driven", None)
    assert driven.text == (
        "the agent of n0 holds it to its share beside a guaranteed job, and freezes it in turns; a program that uses "
        "Penstock's executor keeps to its share by itself"
    )
    assert scene.agents.suspended["8"].state == "suspended"
    scene.told = (scene.told[0].model_copy(update={"frozen": True, "since_s": 9_500.0}), scene.told[1])
    scene.beat_s += 5.0
    scene.observe(5.0)
    frozen = scene.agents.suspended["7"]
    assert (frozen.state, frozen.since_s) == ("frozen", 9_500.0)
    assert frozen.text.endswith(", and keeps it frozen for now")
    assert scene.agents.frozen_s == {"7": 40.0}
    scene.observe(60.0)
    assert "7" not in scene.agents.suspended
    assert scene.agents.frozen_s == {"7": 40.0}, "what was frozen stays uncounted"
    scene.states["7"] = "COMPLETED"
    scene.observe()
    assert scene.agents.frozen_s == {}
