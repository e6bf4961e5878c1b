"""Stops that no round decides: each is in the job's history, its explanation and the audit log, as a round's stops are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from penstock_profiles.wire import ControlMessage
from penstock_scheduler.api.ports import Burst, ClusterParts
from penstock_scheduler.daemon import penstockd as daemon
from penstock_scheduler.daemon.live import LiveScheduler
from penstock_scheduler.daemon.penstockd import WallClock
from penstock_scheduler.daemon.service.views import explanation_view, history_view
from penstock_scheduler.model import Action, Hold, Job
from penstock_scheduler.model import CloudState as Cloud
from penstock_scheduler.rounds.loop import BACK
from penstock_scheduler.rounds.settings import parse_settings
from penstock_scheduler.store.spool import Spool
from penstock_scheduler.store.sql import open_store
from penstock_slurm.act.steps import MISPLACED
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import CliGateway
from penstock_slurm.observe.cloud_nodes import SlurmCloudNodes
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.share.agents import SlurmAgents
from penstock_slurm.share.gpu_reservation import GpuReservations
from tests.slurm_plugin.sharing.site import Commands
from tests.slurm_plugin.test_cluster import Told, pending

RUNS = {"state": "RUNNING", "nodes": ("n0",), "priority": 9, "restarts": 1, "start_s": 10.0}


class Recalling:
    """A cloud without offers that has job 7 leave."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def observe(self, jobs: Sequence[Job]) -> Cloud:
        return Cloud()

    def asks(self) -> Sequence[Action]:
        return (Hold("7", 0),) if self.told.listed[0].state == "RUNNING" else ()

    def apply(self, actions: Sequence[object]) -> tuple[()]:
        return ()


class AllMisplaced(SlurmAgents):
    """Agents for which job 7 is on GPUs of another group."""

    def share(self, groups: Sequence[object], actions: Sequence[object] = ()) -> None:
        self.misplaced = frozenset({"7"})


@dataclasses.dataclass
class Rig:
    """A site whose Slurm is `told`, where job 7 runs."""

    told: Told
    cluster: SlurmCluster
    cloud_nodes: SlurmCloudNodes
    site: LiveScheduler


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    store = open_store(tmp_path / "state", writer=True)
    made: list[Rig] = []

    def make(sharing: type[SlurmAgents] | None = None) -> Rig:
        told, spool, clock = Told(), Spool(tmp_path / "spool"), WallClock()
        told.listed = [pending("gpu", **RUNS)]
        spool.tell(ControlMessage(job_id="7", epoch=2, round=0, nodes=1, gpus=1, holds=0), 0)
        nodes = SlurmCloudNodes("cloud", cast(CliGateway, told), spool)
        agents = None if sharing is None else sharing(GpuReservations(Commands()), tmp_path / "spool", clock)  # type: ignore[arg-type]
        settings = SlurmSettings(partitions=("gpu", "debug"), spool_dir=tmp_path / "spool")
        cluster = SlurmCluster(told, told, spool, clock, settings, lambda spec: None, nodes, agents)  # type: ignore[arg-type]
        parts = ClusterParts(cluster)
        monkeypatch.setattr(daemon, "open_cluster", lambda *given: parts)
        text = f'[daemon]\ncluster = "slurm"\nstate_dir = "{tmp_path}/state"\nround_s = 0.001\n'
        site = daemon.make_site(tmp_path / "penstock.toml", parse_settings(text, "text"), clock, store)
        made.append(Rig(told, cluster, nodes, site))
        site.loop.tick()
        return made[-1]

    yield make
    for rig in made:
        rig.site.watcher.notifier.stop()
    store.close()


def expect_told(rig: Rig, code: str, words: str) -> None:
    """The reason is told once in each place, and stays when the job is queued again."""
    rig.site.loop.tick()
    rig.told.listed = [pending("gpu", restarts=2, reason="job requeued in held state")]
    rig.cluster.apply(())
    rig.site.loop.tick()
    board, store = rig.site.board, rig.site.store
    view = board.job("7")
    assert view is not None
    assert view.state == "queued"
    assert view.stopped.startswith(f"{code}: ")
    assert words in view.stopped
    stops = {line.stop for line in history_view(store, "7").outcomes if line.stop}
    assert stops == {view.stopped}
    assert [line for line in explanation_view(board, view).lines if words in line]
    audit = [line.text for line in store.audit() if (line.action, line.target) == ("stop", "jobs/7")]
    assert audit == [f"without a round: {view.stopped}"]


def test_a_run_without_its_gpus(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.told.gpus_held = lambda job_id: 0  # type: ignore[method-assign,assignment]
    rig.told.requeue_hold = lambda job_id: None  # type: ignore[attr-defined]
    expect_told(rig, "no-gpus", "Slurm started it without its GPUs")


def test_a_job_on_cloud_nodes_that_were_not_ordered_for_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.told.requeue_hold = rig.told.hold = lambda job_id: None  # type: ignore[attr-defined]
    rig.cloud_nodes.refuse("7", "it asks for cloud nodes itself")
    expect_told(rig, "recall", "it asks for cloud nodes itself")


def test_a_job_that_the_cloud_sends_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.site.loop._cloud = cast(Burst, Recalling(rig.told))
    expect_told(rig, "recall", BACK)


def test_a_job_on_shared_gpus_of_another_group(make_rig: Callable[..., Rig]) -> None:
    expect_told(make_rig(AllMisplaced), "sharing", MISPLACED.text)
