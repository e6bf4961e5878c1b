"""Jobs with licences see a round only while theirs are free, and no round moves them while they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock_scheduler.model import Placement, Share, Start
from penstock_scheduler.simulator import SimulatedClock
from penstock_scheduler.store.spool import Spool
from penstock_slurm.cluster import SlurmCluster
from penstock_slurm.gateway import SlurmError, Transient
from penstock_slurm.gateway.parse import parse_licences
from penstock_slurm.jobs.licences import wanted
from penstock_slurm.settings import SlurmSettings
from tests.slurm_plugin.test_cluster import Told, pending

HERE = Placement("t4", "gpu", (Share("n0", 1),))

ANSWER = """\
LicenseName=sim Total=2 Used=1 Free=1 Reserved=0 Remote=no
LicenseName=ansys@server Total=10 Used=0 Free=7 Reserved=3 Remote=yes LastConsumed=0 LastDeficit=0 LastUpdate=2026-11-29T09:00:00
"""


@pytest.mark.parametrize(
    ("text", "licences"),
    [
        ("", {}),
        ("sim", {"sim": 1}),
        ("sim:2,scratch:10", {"sim": 2, "scratch": 10}),
        ("sim;sim:2", {"sim": 3}),
        ("ansys@server:4", {"ansys@server": 4}),
        ("sim|scratch", None),
        ("sim*2", None),
        ("sim:2:3", None),
        ("sim,", None),
        ("sim:(2)", None),
    ],
)
def test_reads_what_a_job_wants(text: str, licences: Mapping[str, int] | None) -> None:
    assert wanted(text) == licences


def test_reads_what_is_free() -> None:
    assert parse_licences(ANSWER) == {"sim": 1, "ansys@server": 7}
    assert parse_licences("No licenses configured in Slurm.\n") == {}
    with pytest.raises(ValueError, match="a licence without a number that is free: LicenseName=sim Total=2"):
        parse_licences("LicenseName=sim Total=2\n")


class World(Told):
    """A site with two licences of `sim`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.free: Mapping[str, int] | SlurmError = {"sim": 2}
        self.asked_for_licences = 0
        settings = SlurmSettings(partitions=("gpu",), spool_dir=folder / "spool")
        self.clock = SimulatedClock()
        self.cluster = SlurmCluster(self, self, Spool(folder / "spool"), self.clock, settings, lambda spec: None)  # type: ignore[arg-type]

    def free_licences(self) -> Mapping[str, int]:
        self.asked_for_licences += 1
        if isinstance(self.free, SlurmError):
            raise self.free
        return self.free

    def look(self) -> tuple[list[str], dict[str, str]]:
        """The jobs that a round may place, and why others wait."""
        state = self.cluster.observe()
        return [job.id for job in state.jobs], {each.job.id: each.text for each in state.waiting}

    def change(self, job_id: str, **fields: object) -> None:
        self.listed = [dataclasses.replace(job, **fields) if job.id == job_id else job for job in self.listed]  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_slurm_is_asked_only_where_a_job_waits_for_licences(world: World) -> None:
    world.listed = [pending("gpu")]
    assert world.look() == (["7"], {})
    assert world.asked_for_licences == 0


def test_a_job_waits_until_all_its_licences_are_free(world: World) -> None:
    world.listed = [
        pending("gpu", id="1", licenses="sim:3"),
        pending("gpu", id="2", licenses="sim:2"),
        pending("gpu", id="3", licenses="sim,matlab"),
        pending("gpu", id="4"),
    ]
    lacks = {"1": "waits for licences: sim (2 of 3 free)", "3": "waits for licences: matlab (0 of 1 free)"}
    assert world.look() == (["2", "4"], lacks)
    world.free = {"sim": 3, "matlab": 1}
    assert world.look() == (["1", "2", "3", "4"], {})


def test_what_slurm_does_not_say_keeps_back_only_these_jobs(world: World) -> None:
    world.listed, world.free = (
        [pending("gpu", id="1", licenses="sim"), pending("gpu", id="2")],
        Transient("away", command="scontrol"),
    )
    assert world.look() == (["2"], {"1": "waits for Slurm to say which licences are free"})


def test_a_job_that_was_sent_has_a_claim_until_slurm_says_that_it_lacks_them(world: World) -> None:
    world.listed = [pending("gpu", id=str(n), licenses="sim:2") for n in (1, 2)]
    world.look()
    world.cluster.apply([Start("1", 1, HERE)])
    world.change("1", priority=9, required_nodes=("n0",), reason="Priority")
    assert world.look() == (["1"], {"2": "waits for licences: sim (0 of 2 free)"})
    world.change("1", reason="Licenses")
    assert world.look() == (["2"], {"1": "waits for licences that are not free, as Slurm says (sim:2)"})


def test_a_job_that_comes_too_late_for_licences_loses_no_attempt(world: World) -> None:
    """A round places all jobs that can have theirs. One starts, and the others go on waiting, however often that happens."""
    for number in range(10):
        world.free, world.listed = {"sim": 1}, [pending("gpu", id="1", licenses="sim")]
        assert world.look() == (["1"], {})
        world.cluster.apply([Start("1", number, HERE)])
        world.free = {"sim": 0}
        world.change("1", priority=9, required_nodes=("n0",), reason="Licenses")
        assert world.look() == ([], {"1": "waits for licences: sim (0 of 1 free)"})
        world.clock.sleep(60.0)


def test_a_job_that_slurm_refuses_although_licences_are_free_waits_ever_longer(world: World) -> None:
    """They may be reserved, and each attempt keeps GPUs from others for a round."""
    offered = 0
    world.listed = [pending("gpu", id="1", licenses="sim")]
    for number in range(100):
        jobs, waiting = world.look()
        if jobs == ["1"]:
            offered += 1
            world.cluster.apply([Start("1", number, HERE)])
            world.change("1", priority=9, required_nodes=("n0",), reason="Licenses")
        else:
            world.change("1", priority=0, required_nodes=(), reason="JobHeldUser")
        world.clock.sleep(60.0)
    assert 5 < offered < 15
    assert "attempts in vain: waits for licences that are not free, as Slurm says (sim)" in waiting["1"]


def test_no_round_moves_a_job_that_holds_licences(world: World) -> None:
    world.listed = [
        pending("gpu", id=str(n), licenses=licences, state="RUNNING", nodes=("n0",), priority=9, start_s=10.0)
        for n, licences in ((1, "sim"), (2, ""))
    ]
    assert [job.movable for job in world.cluster.observe().jobs] == [False, True]
