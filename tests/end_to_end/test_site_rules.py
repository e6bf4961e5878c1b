"""Penstock keeps the site's rules in Slurm: reservations, and limits of QOS."""

from __future__ import annotations

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES

pytestmark = pytest.mark.slurm


def test_jobs_leave_a_node_for_a_reservation_and_its_own_job_runs_there_when_it_begins(make_loopback, make_site):
    slurm = make_loopback("rtx:2x8")
    site = make_site(slurm)
    site.start()
    rates = {"rtx": RATES["rtx"]}
    plain = site.submit(2000, rates=rates, max_gpus=8)
    site.wait_states("RUNNING", plain)
    (node,) = site.job(plain).nodes
    (other,) = {"rtx-00", "rtx-01"} - {node}
    options = ("ReservationName=exam", "StartTime=now+240", "Duration=60", f"Nodes={node}", "Users=root")
    slurm.command("scontrol", "create", "reservation", *options, "Flags=IGNORE_JOBS")
    member = site.submit(2000, "--reservation=exam", rates=rates, max_gpus=8)
    wait_for(lambda: site.job(plain).nodes == (other,), 120, "the plain job to leave", details=site.tail)
    assert not site.gateway.reservations()[0].active
    assert site.job(member).nodes == ()
    slurm.command("scontrol", "update", options[0], "StartTime=now+5", options[2])
    wait_for(lambda: site.job(member).nodes == (node,), 120, "the reservation's job to run", details=site.tail)
    (reservation,) = site.gateway.reservations()
    assert site.job(member).start_s >= reservation.start_s
    assert site.job(plain).nodes == (other,)
    store = open_store(site.state)
    sent_s = [line.time_s for line in store.outcomes(member) if line.text == "waits for Slurm to start it"]
    # Slurm counts in whole seconds.
    assert min(sent_s) > reservation.start_s - 1, "it is not sent there before Slurm accepts it"
    site.assert_progress_kept(plain, lost=2.0)
    refused = [each for each in store.outcomes(member) if each.progress.value == "failed"]
    assert refused == [], "no job is sent where Slurm does not accept it"


def test_a_limit_of_a_qos_keeps_adaptive_jobs_within_it(make_loopback, make_site):
    """The QOS may hold 4 of 8 GPUs, and another job of it holds 1. Two adaptive jobs for 4 GPUs each get 3 together."""
    slurm = make_loopback("t4:2x4", accounting=True, settings={"AccountingStorageEnforce": "associations,limits,qos"})
    slurm.command("sacctmgr", "-i", "add", "qos", "short", "GrpTRES=gres/gpu=4")
    slurm.command("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=short")
    site = make_site(slurm)
    submitted: list[str] = []

    def taken() -> bool:  # slurmdbd tells slurmctld of the QOS a moment later
        done = slurm.command("sbatch", "--parsable", "--qos=short", "--gres=gpu:1", "--wrap=sleep 600", check=False)
        submitted.extend(done.stdout.split())
        return bool(submitted)

    wait_for(taken, 120, "slurmctld to know the QOS")
    site.wait_states("RUNNING", *submitted)
    site.start()
    jobs = [site.submit(2000, "--qos=short", rates={"t4": RATES["t4"]}, max_gpus=4) for _ in range(2)]
    site.wait_states("RUNNING", *jobs)
    number, given = 0, list[int]()
    while given[-3:] != [3, 3, 3]:  # a job that has reported nothing yet grows step by step
        number = site.wait_round(number)
        record = open_store(site.state).round(number)
        assert [limit.gpus for limit in record.snapshot.limits] == [3]
        given.append(sum(each.placement.gpus for each in record.plan.assignments.values()))
        assert 2 <= given[-1] <= 3
        assert len(given) < 60, given
    free = site.submit(2000, rates={"t4": RATES["t4"]}, max_gpus=4)
    site.wait_states("RUNNING", free, *jobs)
    wait_for(lambda: sum(site.job(each).gpus_counted[""] for each in jobs) == 3, 60, "they have what they may have")


def test_a_job_that_its_user_takes_away_keeps_its_gpus_and_counts_on(make_loopback, make_site):
    """With a limit of 4 GPUs for a user, a second job would start as soon as the first one is not managed any more."""
    slurm = make_loopback("t4:2x4")
    site = make_site(slurm)
    site.extra = "[limits]\ngpus_per_user = 4\n"
    site.start()
    rates = {"t4": RATES["t4"]}
    mine = site.submit(2000, rates=rates, min_gpus=4, max_gpus=4)
    site.wait_states("RUNNING", mine)
    nodes = site.job(mine).nodes
    slurm.command("scontrol", "update", f"JobId={mine}", "Requeue=0")
    other = site.submit(2000, rates=rates, min_gpus=4, max_gpus=4)
    number, used = site.wait_round(), list[float]()
    while len(used) < 3:
        number = site.wait_round(number)
        seen = open_store(site.state).round(number).snapshot
        if [job.id for job in seen.jobs] == [other]:
            assert [(job.id, job.allocation.nodes) for job in seen.unseen] == [(mine, nodes)]
            assert [limit.gpus for limit in seen.limits] == [0]
            used.append(seen.attained[mine]["t4"])
    assert used == sorted(set(used)), "its GPU-seconds go on"
    assert site.states(mine, other) == {mine: "RUNNING", other: "PENDING"}
    slurm.command("scancel", mine)
    site.wait_states("RUNNING", other)
