"""18 equal jobs on a real Slurm: when a maintenance ends, jobs grow into the GPUs that are idle again, and none change places."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from tests.end_to_end.site import RATES, Site

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_equal_jobs_do_not_change_places_after_a_maintenance(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """16 of 24 GPUs are left during the maintenance. Afterwards two jobs start, and six grow from one GPU to two."""
    site = make_site(make_loopback("t4:6x4"))
    site.start()
    reservation = ("ReservationName=work", "Nodes=t4-04,t4-05", "StartTime=now", "Duration=60", "Users=root")
    site.slurm.command("scontrol", "create", *reservation, "Flags=MAINT,IGNORE_JOBS")
    jobs = [site.submit(100_000, rates={"t4": RATES["t4"]}, min_gpus=1, max_gpus=2) for _ in range(18)]

    def one_each() -> bool:
        """Whether 16 jobs run, on one GPU each."""
        return [each.gpus_per_node for each in site.gateway.jobs() if each.state == "RUNNING"] == [1] * 16

    def held(gpus: int) -> bool:
        """Whether the running jobs hold so many GPUs."""
        return sum(each.gpus_per_node or 0 for each in site.gateway.jobs() if each.state == "RUNNING") == gpus

    # The first jobs begin on two GPUs, and shrink while the others come.
    wait_for(one_each, 240, "a job on each GPU that is left", details=site.tail)
    before = {job: site.job(job) for job in jobs}
    site.slurm.command("scontrol", "delete", "ReservationName=work")
    wait_for(lambda: held(24), 180, "all GPUs to be used", details=site.tail)
    site.wait_round(site.wait_round())
    after = {job: site.job(job) for job in jobs}
    moved = {job for job in jobs if after[job].restarts > before[job].restarts}
    ran = {job for job in jobs if before[job].state == "RUNNING"}
    grown = {job for job in ran if (after[job].gpus_per_node or 0) > (before[job].gpus_per_node or 0)}
    assert moved == grown, "each stop of a run was for its own gain"
    assert sum(after[job].restarts - before[job].restarts for job in jobs) == len(grown) <= 6
    assert {each.state for each in after.values()} == {"RUNNING"}
