"""Holds on a real Slurm: what an admin or a user holds is not started, and nobody else's job is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.people.errors import BadJobSpec
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.gateway import CliGateway
from penstock_slurm.settings import SlurmSettings
from tests.end_to_end.site import Site, pause

pytestmark = pytest.mark.slurm

ROUNDS = 4.0
"""Seconds in which several rounds are decided."""


def test_a_job_that_somebody_holds_stays_held_until_it_is_released(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    """An admin holds one before its first start and requeues and holds another; a user holds a third one that runs on."""
    site = make_site(loopback, round_s=1.0, tick_s=0.2)
    first, second, third, bystander = (site.submit(100_000) for _ in range(4))
    site.slurm.command("scontrol", "hold", first)
    site.start()
    site.wait_states("RUNNING", second, third, bystander)
    wait_for(lambda: all(map(site.starts, (second, third, bystander))), 120, "first reports", details=site.tail)
    submitter = SlurmSubmitter(
        CliGateway(conf=site.slurm.slurm_conf, timeout_s=20), Spool(site.spool), SlurmSettings(partitions=("all",))
    )
    submitter.hold(third, "ada", admin=False)
    site.slurm.command("scontrol", "requeuehold", second)
    wait_for(lambda: site.job(third).priority == 0, 120, "Slurm to hold the running job, too", details=site.tail)
    site.wait_states("PENDING", first, second)
    pause(ROUNDS)
    assert site.states(first, second, third) == {first: "PENDING", second: "PENDING", third: "RUNNING"}
    assert site.job(third).restarts == 0, "a hold does not stop a running job"
    site.slurm.command("scontrol", "requeue", third)
    site.wait_states("PENDING", third)
    site.kill()
    site.start()  # what is held stays held for the next daemon
    pause(ROUNDS)
    assert site.states(first, second, third) == dict.fromkeys((first, second, third), "PENDING")
    for job in (first, second, third):
        submitter.release(job, admin=True)
    site.wait_states("RUNNING", first, second, third)
    assert site.job(bystander).restarts == 0
    assert site.states(bystander) == {bystander: "RUNNING"}


def test_a_job_that_is_requeued_while_it_is_suspended_starts_again(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    """Slurm shows it as held by an admin, who has done nothing of the kind."""
    site = make_site(loopback, round_s=1.0, tick_s=0.2)
    job = site.submit(100_000)
    site.start()
    site.wait_states("RUNNING", job)
    wait_for(lambda: site.starts(job), 120, "a first report", details=site.tail)
    site.slurm.command("scontrol", "suspend", job)
    site.wait_states("SUSPENDED", job)
    pause(1.0)
    site.slurm.command("scontrol", "requeue", job)
    wait_for(lambda: site.job(job).restarts >= 1, 60, "the requeue", details=site.tail)
    site.wait_states("RUNNING", job)


def test_a_hold_of_penstocks_that_reaches_a_running_job_is_taken_back(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    """penstockd dies when Slurm has started a job that it was about to hold. Requeued later, the job starts again."""
    site = make_site(loopback, round_s=1.0, tick_s=0.2)
    job = site.submit(100_000)
    site.start()
    wait_for(lambda: site.starts(job), 120, "a first report", details=site.tail)
    site.kill()
    spool = Spool(site.spool)
    control = spool.control(job)
    assert control is not None
    spool.tell(control.model_copy(update={"holding": 0}), 0)
    site.slurm.command("scontrol", "uhold", job)
    assert (site.job(job).state, site.job(job).reason, site.job(job).priority) == ("RUNNING", "JobHeldUser", 0)
    site.start()
    wait_for(lambda: site.job(job).priority > 0, 120, "the hold to be taken back", details=site.tail)
    assert site.job(job).reason != "JobHeldUser"
    pause(ROUNDS)
    assert (site.job(job).state, site.job(job).restarts) == ("RUNNING", 0)
    (node,) = site.job(job).nodes
    site.slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a fan")
    wait_for(lambda: len(site.starts(job)) == 2, 120, "its second run", details=site.tail)


def test_an_admins_hold_of_a_running_job_is_an_admins_after_its_run(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    """Slurm shows JobHeldAdmin while it runs, and then only that somebody holds it."""
    site = make_site(loopback, round_s=1.0, tick_s=0.2)
    job = site.submit(100_000)
    site.start()
    wait_for(lambda: site.starts(job), 120, "a first report", details=site.tail)
    submitter = SlurmSubmitter(
        CliGateway(conf=site.slurm.slurm_conf, timeout_s=20), Spool(site.spool), SlurmSettings(partitions=("all",))
    )

    def the_user_cannot_release() -> None:
        submitter.hold(job, "ada", admin=False)
        with pytest.raises(BadJobSpec, match="an admin holds"):
            submitter.release(job, admin=False)

    noted = site.spool / "holds" / f"{job}.by-admin"
    site.slurm.command("scontrol", "hold", job)
    assert (site.job(job).reason, site.job(job).priority) == ("JobHeldAdmin", 0)
    wait_for(noted.exists, 120, "the round loop to see it", details=site.tail)
    the_user_cannot_release()
    site.slurm.command("scontrol", "release", job)
    assert site.job(job).reason != "JobHeldAdmin"
    wait_for(lambda: not noted.exists(), 120, "the round loop to see the release", details=site.tail)
    submitter.release(job, admin=False)
    released = site.spool / "holds" / f"{job}.released"
    wait_for(lambda: not released.exists(), 120, "the user's release", details=site.tail)
    site.slurm.command("scontrol", "hold", job)
    wait_for(noted.exists, 120, "the round loop to see it", details=site.tail)
    site.slurm.command("scontrol", "requeue", job)
    site.wait_states("PENDING", job)
    the_user_cannot_release()
    pause(ROUNDS)
    assert site.states(job) == {job: "PENDING"}
    the_user_cannot_release()
    submitter.release(job, admin=True)
    site.wait_states("RUNNING", job)
    wait_for(lambda: not noted.exists(), 120, "the note to be removed", details=site.tail)
