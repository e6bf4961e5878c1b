"""Jobs that have never saved, without Penstock's library in them: nothing of Penstock stops them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import Site, pause
from tests.end_to_end.test_safety import restart

pytestmark = pytest.mark.slurm

JOBS = 5


def sleeper(site: Site, **spec: object) -> str:
    """`sleep`, in a job that Penstock may stop."""
    comment = json.dumps({"penstock": {"max_gpus": 2} | spec})
    return site.sbatch(
        "--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", "--output=/dev/null", "--wrap=sleep 3600"
    )


def runs(site: Site, jobs: list[str]) -> dict[str, object]:
    found = {job: site.job(job) for job in jobs}
    return {job: (each.state, each.restarts, each.start_s, each.nodes) for job, each in found.items()}


def rounds(site: Site, count: int = 3) -> None:
    number = site.wait_round()
    for _ in range(count):
        number = site.wait_round(after=number)


def test_drains_rounds_and_restarts_stop_no_job_that_cannot_save(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """Five jobs on nine of twelve GPUs, or fewer. A job that needs a whole node and half of another waits meanwhile."""
    site = make_site(make_loopback("t4:3x4"))
    site.start()
    jobs = [sleeper(site) for _ in range(JOBS)]
    site.wait_states("RUNNING", *jobs)
    pause(15)  # slurmctld saves its state every five seconds; on a busy machine, a killed one forgets more
    before = runs(site, jobs)
    wants = sleeper(site, min_gpus=12, max_gpus=12)
    rounds(site)
    drained = site.job(jobs[0]).nodes[0]
    site.slurm.command("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=a fan")
    rounds(site)
    store = open_store(site.state)
    plan = store.round(store.round_numbers()[-1]).plan
    assert "it has not shown that it can save" in plan.assignments[jobs[0]].reason.text
    assert runs(site, jobs) == before
    pause(10)  # it must not forget the drain
    restart(site.slurm, site)
    rounds(site)
    site.slurm.command("scontrol", "reconfigure")
    site.slurm.command("scontrol", "update", "PartitionName=all", "State=DOWN")
    rounds(site)
    site.slurm.command("scontrol", "update", "PartitionName=all", "State=UP")
    site.kill()
    site.start()
    rounds(site)
    site.slurm.command("scontrol", "update", f"NodeName={drained}", "State=RESUME")
    restart(site.slurm, site, kill=False)
    rounds(site)
    assert runs(site, jobs) == before
    assert site.states(wants) == {wants: "PENDING"}
    done = {(line.action.job, line.action.kind) for line in open_store(site.state).outcomes()}
    assert {kind for job, kind in done if job in jobs} <= {"start"}, site.tail()


def test_a_job_that_cannot_save_starts_on_its_maximum_where_gpus_are_idle(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """It cannot grow later. One that comes when a single GPU is left takes that one."""
    site = make_site(make_loopback("t4:1x3"))
    site.start()
    first = sleeper(site)
    site.wait_states("RUNNING", first)
    second = sleeper(site)
    site.wait_states("RUNNING", second)
    assert [site.job(job).gpus_per_node for job in (first, second)] == [2, 1]
