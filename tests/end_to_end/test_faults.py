"""Crashes of penstockd, slurmctld and slurmd at any time, and the credential race.

docs/developer/testing.md says which of these were seen to fail without the code that recovers.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_profiles.wire import ControlMessage, Ended
from penstock_scheduler.store.spool import Spool
from tests.end_to_end.site import RATES, Site, pause, wait_saved

pytestmark = pytest.mark.slurm


def test_penstockd_killed_at_four_random_moments(make_site, loopback, request):
    """No job is lost, none runs twice at once, and every job completes. PENSTOCK_TEST_SEED repeats a run."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.SystemRandom().randrange(10_000)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    site: Site = make_site(loopback, round_s=1.0, tick_s=0.2)
    site.start(wait=False)
    jobs = [site.submit(60, max_gpus=16) for _ in range(2)]
    for _ in range(4):
        pause(chance.uniform(0.2, 2.0))
        site.kill()
        site.start(wait=False)
        if len(jobs) < 4:
            jobs.append(site.submit(60, max_gpus=chance.choice([1, 4, 16])))
    site.wait_completed(*jobs, timeout_s=300)
    site.assert_no_run_twice(*jobs)
    for job in jobs:
        site.assert_progress_kept(job, lost=3.0 * 26)  # never more than 3 s of the fastest configuration seen


@pytest.mark.long
def test_slurmctld_restarted_in_mid_run(site: Site):
    # Slurm would learn of a forgotten end only when the node registers minutes later: no job has ended before the crash.
    jobs = [site.submit(1800, max_gpus=8) for _ in range(3)]
    wait_for(lambda: all(site.starts(job) for job in jobs), 120, "all to start", details=site.tail)
    pause(12)
    wait_for(
        lambda: set(site.states(*jobs).values()) == {"RUNNING"}, 30, "all to run, for one may grow", details=site.tail
    )
    wait_saved(site.slurm)
    site.slurm.kill_slurmctld()
    wait_for(lambda: "ClusterAway" in site.log.read_text(), 120, "a round to notice", details=site.tail)
    site.slurm.start_slurmctld()
    late = site.submit(5)
    site.wait_states("COMPLETED", *jobs, late, timeout_s=400)
    assert site.runs
    site.assert_no_run_twice(*jobs)


def test_a_node_that_dies_loses_its_job_to_another_and_the_old_run_is_superseded(make_site, make_loopback):
    slurm = make_loopback(nodes="t4:2x4", slurmd_timeout_s=5)
    site: Site = make_site(slurm)
    site.start()
    job = site.submit(4000, rates={"t4": RATES["t4"]}, min_gpus=4, max_gpus=4)
    wait_for(lambda: site.starts(job), 120, "the first run", details=site.tail)
    pause(6)
    # Slurm 24.11.5 may briefly consider healthy nodes dead, and start the job again in the same place (slurm-gateway.md).
    spool = Spool(site.spool)

    def runs_and_has_said_so() -> bool:
        return site.states(job) == {job: "RUNNING"} and spool.control(job).epoch == max(site.places(job))

    wait_for(runs_and_has_said_so, 120, "its present run", details=site.tail)
    _, node = max(site.places(job).items())
    slurm.kill_slurmd(node)
    wait_for(lambda: max(site.places(job).items())[1] != node, 120, "a run elsewhere", details=site.tail)
    dead = max(epoch for epoch, place in site.places(job).items() if place == node)
    # The node was only cut off. The run's process continues there, sees the later epoch, and ends by itself.
    old = site.spool / job / "reports" / f"{dead}.jsonl"
    wait_for(
        lambda: '"superseded"' in old.read_text(), 120, "the old run to see that it is superseded", details=site.tail
    )
    slurm.start_slurmd(node)
    wait_for(lambda: site.reports(job)[-1].epoch > dead, 120, "reports of the run elsewhere", details=site.tail)
    site.slurm.command("scancel", job)
    site.assert_no_run_twice(job)
    assert not any(report.epoch == dead and isinstance(report.body, Ended) for report in site.reports(job))
    assert "event=pause" not in site.log.read_text(), "Penstock did not move it, so there is no pause to count"


def refused_starts(log: str, job: str) -> list[str]:
    """slurmctld's log lines about runs that a node refused for a revoked credential, except those requeued before they reached
    it."""
    refused: list[str] = []
    requeued = False
    for line in log.splitlines():
        if re.search(rf"Allocate JobId={job}\b", line):
            requeued = False
        elif re.search(rf"Requeuing JobId={job}\b", line):
            requeued = True
        elif "revoked" in line and not requeued:
            refused.append(line)
    return refused


@pytest.mark.parametrize("cycles", [5, pytest.param(100, marks=pytest.mark.long)])
def test_requeue_cycles_without_a_revoked_credential(make_site, loopback, cycles):
    """A user requeues the job repeatedly. Each time, Penstock sends it to its placement again, after the pause.

    Slurm itself would start it some 8 s later.
    """
    site: Site = make_site(loopback, round_s=0.5, tick_s=0.1)
    site.start()
    job = site.submit(100_000, max_gpus=1)
    slurmctld_log = site.slurm.log_folder / "slurmctld.log"
    before = len(slurmctld_log.read_text())  # other tests release jobs without a pause
    for cycle in range(cycles):
        wait_for(lambda: site.states(job) == {job: "RUNNING"}, 120, f"run {cycle}", details=site.tail, poll_s=0.02)
        if cycle % 2:
            pause(random.Random(cycle).uniform(0.0, 0.3))
        site.slurm.command("scontrol", "requeue", job)
    wait_for(lambda: site.states(job) == {job: "RUNNING"}, 120, "the last run", details=site.tail)
    log = slurmctld_log.read_text()[before:]
    released = len(re.findall(rf"release hold on JobId={job}\b", log))
    assert released >= cycles, (
        "Penstock started it each time, except at most once when the daemon stood still for that long"
    )
    assert site.job(job).restarts == cycles
    assert not refused_starts(log, job)
    site.slurm.command("scancel", job)


def test_reports_that_are_not_reports_do_no_harm(site: Site):
    """A user writes garbage into the job's own reports. It is ignored, and later reports are read."""
    job = site.submit(100_000, max_gpus=1)
    wait_for(lambda: site.starts(job), 120, "the first run", details=site.tail)
    (reports,) = (site.spool / job / "reports").iterdir()
    with reports.open("ab") as file:
        file.write(b"rubbish\n\xff\xfe\n" + b"x" * 100_000 + b"\n" + json.dumps({"version": 9}).encode() + b"\n")

    def ignored() -> int:
        return sum(map(int, re.findall(r'event="report ignored".* lines=(\d+)', site.log.read_text())))

    wait_for(lambda: ignored() >= 4, 120, "the daemon to say so", details=site.tail)
    read = len(site.reports(job))
    wait_for(lambda: len(site.reports(job)) > read, 120, "a report after the garbage", details=site.tail)
    site.slurm.command("scontrol", "requeue", job)
    wait_for(lambda: len(site.starts(job)) == 2, 120, "the second run", details=site.tail)
    site.slurm.command("scancel", job)


def report_line(epoch: int) -> str:
    body = {"kind": "checkpointed", "progress": 1.0, "seconds": 0.1}
    return json.dumps({"job_id": "7", "epoch": epoch, "sequence": 0, "time_s": 5.0, "body": body}) + "\n"


def test_a_spool_does_not_follow_links_or_wait_for_pipes(tmp_path: Path):
    """The link leads to a line that would be valid in the job's own file."""
    spool = Spool(tmp_path)
    reports = tmp_path / "7" / "reports"
    reports.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text(report_line(epoch=1))
    (reports / "1.jsonl").symlink_to(tmp_path / "elsewhere")
    assert spool.read(["7"]) == []
    os.mkfifo(reports / "2.jsonl")
    assert spool.read(["7"]) == []
    (reports / "3.jsonl").write_text(report_line(epoch=3))
    assert [report.epoch for report in spool.read(["7"])] == [3]


def test_a_torn_report_is_read_when_it_is_whole(tmp_path: Path):
    spool = Spool(tmp_path)
    reports = tmp_path / "7" / "reports"
    reports.mkdir(parents=True)
    line = report_line(epoch=1)
    (reports / "1.jsonl").write_text(line[:20])
    assert spool.read(["7"]) == []
    with (reports / "1.jsonl").open("a") as file:
        file.write(line[20:])
    (report,) = spool.read(["7"])
    assert report.epoch == 1


def test_reports_of_a_run_that_is_over_are_not_taken(tmp_path: Path, caplog):
    """Whether a later run has begun already, or only its epoch is assigned."""
    spool = Spool(tmp_path)
    reports = tmp_path / "7" / "reports"
    reports.mkdir(parents=True)
    spool.tell(ControlMessage(job_id="7", epoch=1, round=1))
    (reports / "1.jsonl").write_text(report_line(epoch=1))
    assert [report.epoch for report in spool.read(["7"])] == [1]
    spool.tell(ControlMessage(job_id="7", epoch=2, round=2))
    with (reports / "1.jsonl").open("a") as file:
        file.write(report_line(epoch=1))
    assert spool.read(["7"]) == []
    assert "report of a superseded run" in caplog.text
    (reports / "2.jsonl").write_text(report_line(epoch=2))
    with (reports / "1.jsonl").open("a") as file:
        file.write(report_line(epoch=1))
    assert [report.epoch for report in spool.read(["7"])] == [2]
    assert spool.next_epoch("7") == 3


def test_penstockd_stops_cleanly_and_quickly_when_asked(make_site, loopback):
    """It does not wait for its next observation of the cluster."""
    site: Site = make_site(loopback, tick_s=600.0)
    site.start()
    site.wait_round()
    site.stop()
    assert "event=stopped" in site.log.read_text()


def test_a_second_penstockd_on_the_same_state_refuses(site: Site, make_site, loopback):
    second: Site = make_site(loopback)
    second.log = second.folder / "second.log"
    second.start(wait=False)
    assert second.ended() == 1
    assert "in use by another penstockd" in second.log.read_text()
