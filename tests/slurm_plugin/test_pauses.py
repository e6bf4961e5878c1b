"""The pause of a move, as the report of the next run ends it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from penstock_profiles.wire import ControlMessage, Report, Started
from penstock_scheduler.people.errors import NotLeading
from penstock_slurm.observe.reporting import measured
from tests.slurm_plugin.test_managed import World

MOVED = ControlMessage(job_id="7", epoch=3, round=1, moved_s=1000.0, pauses_s=(9.0,))


@pytest.mark.parametrize(("begun_s", "pauses_s"), [(1012.0, (9.0, 12.0)), (1000.0, (9.0, 0.0)), (700.0, (9.0,))])
def test_a_pause_that_ends_before_it_began_is_not_measured(begun_s: float, pauses_s: tuple[float, ...]) -> None:
    """The clock of the node or of penstockd was set, or another penstockd leads."""
    report = Report(job_id="7", epoch=3, sequence=0, time_s=begun_s, body=Started(gpu_type="t4", gpu_ids={"n0": (0,)}))
    found = measured(MOVED, report, now_s=2000.0)
    assert found is not None
    assert (found.moved_s, found.pauses_s) == (None, pauses_s)


BEGUN = Started(gpu_type="t4", gpu_ids={"n0": (0,)})


def moved(folder: Path, ahead_s: float) -> World:
    """A site whose only job was moved, by a penstockd whose clock was ahead, and has begun again."""
    world = World(folder, 0)
    world.listed = [dataclasses.replace(world.listed[0], uid=os.geteuid())]  # whose reports count
    world.clock.sleep(1000.0)
    world.clusters[0].observe()
    world.tell(moved_s=world.clock.now_s() + ahead_s, holds=0)
    world.run()
    world.report(BEGUN)
    world.clusters[0].observe()
    return world


@pytest.mark.parametrize(("ahead_s", "pauses"), [(-12.0, (12.0,)), (300.0, ())])
def test_the_first_pause_of_a_job_is_read_whatever_the_clocks_say(
    tmp_path: Path, ahead_s: float, pauses: tuple[float, ...]
) -> None:
    world = moved(tmp_path, ahead_s)
    assert [report.body for report in world.clusters[0].reports()] == [BEGUN]
    control = world.spools[0].control("1")
    assert control is not None
    assert (control.moved_s, control.pauses_s) == (None, pauses)


def test_a_report_is_kept_although_its_pause_could_not_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease cannot be confirmed for a moment."""

    def refuse(*_: object) -> None:
        raise NotLeading("the database is away")

    world = moved(tmp_path, -12.0)
    with monkeypatch.context() as away:
        away.setattr(world.spools[0], "tell", refuse)
        with pytest.raises(NotLeading):
            world.clusters[0].reports()
    assert [report.body for report in world.clusters[0].reports()] == [BEGUN]
    control = world.spools[0].control("1")
    assert control is not None
    assert control.pauses_s == (12.0,)
