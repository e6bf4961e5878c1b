"""A job that moves or shrinks never loses its GPUs to ordinary jobs, and room is made for the one that is due."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
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
