"""MIG devices on a real Slurm: GPUs of a type of their own, which Slurm binds to jobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

MIG, WHOLE = "a100_1g.5gb", "a100"


def test_a_job_has_a_mig_device_of_the_type_that_it_asks_for(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """Two devices of one GPU go to two jobs. A third one waits, and a job for a whole GPU does not get a device."""
    site = make_site(make_loopback(f"{MIG}:1x2,{WHOLE}:1x1"))
    site.start()
    rates = {MIG: {"1": 1.0}, WHOLE: {"1": 7.0}}
    one, other, third = (site.submit(1e6, rates=rates, gpu_types=[MIG], max_gpus=1) for _ in range(3))
    whole = site.submit(1e6, rates=rates, gpu_types=[WHOLE], max_gpus=1)
    wait_for(
        lambda: list(site.states(one, other, third, whole).values()).count("RUNNING") == 3, 120, "three jobs to run"
    )
    records = {job: site.job(job) for job in (one, other, third, whole)}
    assert records[whole].nodes == ("a100-00",)
    running = [job for job in (one, other, third) if records[job].state == "RUNNING"]
    assert {records[job].nodes for job in running} == {("a100_1g-5gb-00",)}
    assert len(running) == 2
    slurm = site.slurm.command("scontrol", "show", "job", "-d", running[0]).stdout
    assert f"gpu:{MIG}:1(IDX:" in slurm
