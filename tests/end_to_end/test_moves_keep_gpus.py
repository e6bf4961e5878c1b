"""A job that moves or shrinks never loses its GPUs to ordinary jobs, and room is made for the one that is due."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway.base import MOVES
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]


def crowded(make_loopback: MakeLoopback, make_site: MakeSite, **slurm: object) -> tuple[Site, list[str]]:
    """Eight adaptive jobs with two GPUs each, at least one, hold all 16 GPUs."""
    site = make_site(make_loopback("t4:4x4"))
    site.slurm_settings |= {"plain_patience_s": 4} | slurm
    site.start()
    jobs = [site.submit(100_000, rates={"t4": RATES["t4"]}, min_gpus=1, max_gpus=2) for _ in range(8)]

    def full() -> bool:
        found = [site.job(job) for job in jobs]
        return all(each.state == "RUNNING" and each.gpus_per_node == 2 for each in found)

    wait_for(full, 120, "two GPUs each", details=site.tail)
    return site, jobs


def others(site: Site, count: int = 5) -> list[str]:
    """Ordinary jobs for which Penstock makes no room, because they name no GPUs of a node. Slurm starts them where it can."""
    return [site.sbatch("--gpus=2", "-N1", "-t10", "--wrap=exec sleep 1000") for _ in range(count)]


def none_is_left(site: Site) -> None:
    """The reservation has ended."""
    listed = lambda: site.slurm.command("scontrol", "show", "reservation").stdout  # noqa: E731
    wait_for(lambda: MOVES not in listed(), 60, "the end of the reservation", details=site.tail)


def test_room_is_for_the_ordinary_job_that_is_due(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    """Two jobs shrink for it. Their four GPUs are free for a moment, and three others wait for just that."""
    site, jobs = crowded(make_loopback, make_site)
    due = site.sbatch("--gres=gpu:2", "-t10", "--wrap=exec sleep 1000")
    late = others(site)
    site.wait_states("RUNNING", due)
    until_s = time.monotonic() + 20
    while set(site.states(*jobs).values()) != {"RUNNING"}:
        assert time.monotonic() < until_s, (site.states(*jobs, *late), site.tail())
        pause(0.2)
    assert set(site.states(*late).values()) == {"PENDING"}, site.tail()
    none_is_left(site)


WITHOUT_MOVES = """#!/bin/bash
[[ "$*" == *ReservationName=* ]] && exit 0
if [ $# = 0 ]; then sed /Priority=/d | {real}; else {real} "$@"; fi
"""
"""An scontrol that makes no reservation and gives no priority, so that moves lose their GPUs."""


@pytest.mark.long
def test_while_moved_jobs_hold_nothing_no_job_is_moved_for_a_gain(
    make_loopback: MakeLoopback, make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other jobs take the GPUs of the two that shrink. It is told, and it ends when those jobs run again."""
    site, jobs = crowded(make_loopback, make_site)
    site.stop()
    another_scontrol(tmp_path, monkeypatch, WITHOUT_MOVES)
    site.start()
    site.sbatch("--gres=gpu:2", "-t10", "--wrap=exec sleep 1000")
    late = others(site)

    def held_back() -> str:
        with contextlib.closing(open_store(site.store)) as store:
            last = store.last_round()
        return last.snapshot.no_gain if last is not None else ""

    wait_for(held_back, 200, "moves that have failed", details=site.tail)
    assert "PENDING" in site.states(*jobs).values()
    with Client(f"unix:{site.state}/api.sock") as penstock:
        assert any("no other job is moved for a gain" in each for each in penstock.ready().warnings)
    site.slurm.command("scancel", *late)
    wait_for(lambda: not held_back(), 120, "the end of that", details=site.tail)
    site.wait_states("RUNNING", *jobs, timeout_s=60)


def another_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Put a program before Slurm's own scontrol, for the daemons that are started from now on."""
    scontrol, real = folder / "bin" / "scontrol", shutil.which("scontrol")
    scontrol.parent.mkdir()
    scontrol.write_text(program.format(real=real, folder=folder))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")


SCONTROL = """#!/bin/bash
if [ $# = 0 ]; then asked=$(cat); {real} <<<"$asked"; else asked="$*"; {real} "$@"; fi
status=$?
[[ -e {folder}/kills && $asked == *"$(cat {folder}/kills)"* ]] && rm {folder}/kills && kill -9 $(cat {folder}/pid)
exit $status
"""
"""An scontrol after which penstockd is killed, once, if it was asked for what the file `kills` has."""

STEPS = ["create ReservationName", "requeuehold", "ReqNodeList=", "release", "Priority=", "delete ReservationName"]
"""The commands of a move, in their order."""


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[] if step == "Priority=" else pytest.mark.long, id=step) for step in STEPS]
)
def test_a_move_during_which_penstockd_is_killed_keeps_its_gpus(
    make_loopback: MakeLoopback, make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As above, and penstockd is killed after one of the commands and started again."""
    another_scontrol(tmp_path, monkeypatch, SCONTROL)
    site, jobs = crowded(make_loopback, make_site)
    assert site.daemon is not None
    (tmp_path / "pid").write_text(str(site.daemon.pid))
    (tmp_path / "kills").write_text(step)
    due = site.sbatch("--gres=gpu:2", "-t10", "--wrap=exec sleep 1000")
    late = others(site)
    wait_for(lambda: not site.runs, 120, "the end of penstockd", details=site.tail)
    site.start()
    site.wait_states("RUNNING", due, *jobs, timeout_s=60)
    assert set(site.states(*late).values()) == {"PENDING"}, site.tail()
    none_is_left(site)
