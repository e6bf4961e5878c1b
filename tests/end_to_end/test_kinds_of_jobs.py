"""Slurm's other kinds of jobs with adaptive flags: each line of the table in docs/user/jobs.md, through real sbatch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.wire import claimed_epochs
from penstock_scheduler.model.records import RoundRecord
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import RATES, Site, pause

pytestmark = pytest.mark.slurm

MakeSite = Callable[..., Site]


def rounds(site: Site) -> list[RoundRecord]:
    store = open_store(site.state)
    return [store.round(number) for number in store.round_numbers()]


def said(site: Site, job: str) -> str:
    """The daemon's message to the job's user."""
    told = wait_for(lambda: site.job(job).admin_comment, 120, "the daemon's message", details=site.tail)
    return str(json.loads(told)["penstock_says"])


def test_arrays_dependencies_and_begin_times(make_flag_site: MakeSite) -> None:
    """All cases on one site, since Slurm checks the dependencies of held jobs only once a minute."""
    site = make_flag_site()
    array = site.submit_with_flags(10, "--max-gpus=2", "--non-preemptible", "--array=1-3", "--trial-group=array")
    after = site.submit_with_flags(1, "--max-gpus=1", f"--dependency=afterok:{array}")
    early = site.submit_with_flags(1, "--max-gpus=1")
    elements = [f"{array}_{index}" for index in (1, 2, 3)]
    numbers = {site.job(element).number for element in elements}
    begin_s = int(time.time()) + 70
    late = site.submit_with_flags(1, "--max-gpus=1", "--begin=now+70")
    site.start()  # not earlier, since a round gives each element its own number
    site.wait_completed(early, *elements)
    assert len({site.job(element).number for element in elements}) == 3 > len(numbers)
    assert all(site.starts(element) for element in elements), "each reports under its own id"
    one_element_is_requeued_and_another_cancelled(site)
    a_job_submitted_by_an_element_is_not_taken_for_it(site)
    site.wait_states("COMPLETED", late, after)
    assert (site.job(late).start_s or 0) >= begin_s > (site.job(early).start_s or begin_s)
    assert site.job(late).restarts == 0
    records = rounds(site)
    groups = {job.spec.trial_group for record in records for job in record.snapshot.jobs if job.id in elements}
    assert groups == {f"array {array}"}
    planned = [set(record.plan.assignments) for record in records]
    assert any(set(elements) <= jobs for jobs in planned), "they run side by side"
    assert not any(after in jobs and jobs & set(elements) for jobs in planned)
    ends = [site.job(element).end_s or 0 for element in elements]
    assert (site.job(after).start_s or 0) >= max(ends)


def one_element_is_requeued_and_another_cancelled(site: Site) -> None:
    array = site.submit_with_flags(20_000, "--max-gpus=1", "--gpu-types=a100", "--array=7,9")
    requeued, cancelled = f"{array}_7", f"{array}_9"
    wait_for(lambda: site.starts(requeued), 120, "a first report", details=site.tail)
    site.wait_states("RUNNING", requeued, cancelled)
    pause(1.0)
    site.slurm.command("scontrol", "requeue", requeued)
    site.slurm.command("scancel", cancelled)
    wait_for(lambda: len(site.starts(requeued)) == 2, 120, "the second run", details=site.tail)
    site.assert_progress_kept(requeued, lost=2.0)
    site.wait_states("CANCELLED", cancelled)
    assert site.states(requeued) == {requeued: "RUNNING"}


def a_job_submitted_by_an_element_is_not_taken_for_it(site: Site) -> None:
    """It inherits SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID, and reports under its own number."""
    script = site.folder / "plain.sh"
    script.write_text(f"#!/bin/sh\n{site.trainer(1)}\n")
    nested = f"sbatch --parsable --gres=gpu:1 --output=/dev/null {script} >{site.folder}/nested"
    flags = ("--adaptive", "--max-gpus=1", "--gpu-types=a100", "--array=1-2", f"--output={site.folder}/%j.out")
    array = site.sbatch(*flags, f"--wrap=[ $SLURM_ARRAY_TASK_ID = 2 ] || {nested}; {site.trainer(20_000)}")
    element = f"{array}_1"
    wait_for(lambda: site.starts(element), 120, "the element's report", details=site.tail)
    job = (site.folder / "nested").read_text().strip()
    site.wait_states("COMPLETED", job)
    assert claimed_epochs(site.spool, job) == claimed_epochs(site.spool, element) == [1]


def test_an_array_runs_as_few_elements_at_once_as_its_user_wants(make_flag_site: MakeSite) -> None:
    site = make_flag_site("t4:1x4")
    site.start()
    array = site.submit_with_flags(3, "--max-gpus=1", "--array=1-5%2")
    site.wait_completed(*(f"{array}_{index}" for index in range(1, 6)))
    assert max(len(record.plan.assignments) for record in rounds(site)) == 2


@pytest.mark.parametrize("spec", ["comment", "flags"])
def test_what_cannot_be_managed_is_refused_with_a_sentence(make_flag_site: MakeSite, spec: str) -> None:
    site = make_flag_site()
    if spec == "comment":
        site.start()
    refused = {
        ("--exclusive",): (
            "whole nodes",
            "no partition has 1 GPU of the kind that the flags ask for on whole nodes",
        ),
        ("--no-requeue",): ("submit it with --requeue", "--no-requeue cannot be used with --adaptive"),
        ("--gres=gpu:t4:1",): ("of type t4 from Slurm, which cannot change that later", ""),  # with flags, it is read
    }
    for options, (by_daemon, by_lua) in refused.items():
        if spec == "comment":
            assert by_daemon in said(site, site.submit(1, *options)), options
            continue
        done = site.slurm.command("sbatch", "--adaptive", "--max-gpus=1", *options, "--wrap=true", check=False)
        assert (done.returncode != 0) is bool(by_lua)
        assert by_lua in done.stderr
    if spec == "flags":
        many = ("--adaptive", "--max-gpus=1", "--wrap=true")
        assert "name one reservation" in site.slurm.command("sbatch", *many, "--reservation=a,b", check=False).stderr
        assert "a heterogeneous job" in site.slurm.command("sbatch", *many[:2], ":", "--wrap=true", check=False).stderr
        return
    het = ("--hold", "--gres=gpu:1", '--comment={"penstock": {"max_gpus": 1}}')
    job = site.sbatch(*het, ":", "--hold", "--wrap=true").split("+")[0]
    assert "part of a heterogeneous job" in said(site, job)


def test_a_job_that_its_deadline_overtakes_is_ended_by_slurm(make_flag_site: MakeSite) -> None:
    """It is held and waits for another job's GPUs. Slurm ignores the deadline of a held job."""
    site = make_flag_site("t4:1x4")
    site.start()
    other = site.sbatch("--gres=gpu:4", "--wrap=sleep 600")
    site.wait_states("RUNNING", other)
    job = site.submit_with_flags(1, "--max-gpus=1", "--deadline=now+6seconds")
    site.wait_states("DEADLINE", job)


def test_a_job_that_another_qos_preempts_is_placed_elsewhere(make_loopback: MakeLoopback, make_site: MakeSite) -> None:
    settings = {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}
    slurm = make_loopback("rtx:2x8", accounting=True, settings=settings)
    slurm.command("sacctmgr", "-i", "add", "qos", "urgent", "preempt=normal")
    slurm.command("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=urgent")
    site = make_site(slurm)
    site.start()
    job = site.submit(2000, min_gpus=8, max_gpus=8)
    wait_for(lambda: site.starts(job), 120, "a first report", details=site.tail)
    (node,) = site.job(job).nodes
    pause(1.0)
    urgent: list[str] = []

    def taken() -> bool:  # slurmdbd tells slurmctld of the QOS a moment later
        options = ("--parsable", "--qos=urgent", f"--nodelist={node}", "--gres=gpu:8", "--wrap=sleep 600")
        urgent.extend(slurm.command("sbatch", *options, check=False).stdout.split())
        return bool(urgent)

    wait_for(taken, 120, "slurmctld to know the QOS")
    wait_for(lambda: len(site.starts(job)) == 2, 120, "the second run", details=site.tail)
    site.wait_states("RUNNING", *urgent)
    assert site.job(job).nodes == tuple({"rtx-00", "rtx-01"} - {node})
    site.assert_progress_kept(job, lost=2.0)


@pytest.mark.long
def test_while_penstockd_lives_slurm_starts_nothing_alone_and_afterwards_it_does(make_flag_site: MakeSite) -> None:
    """The site's own limit keeps the job waiting on an empty cluster, so that only its begin time prevents Slurm from starting
    it."""
    after_s = 36
    site = make_flag_site(plain_after_s=after_s)
    site.extra = "[limits]\ngpus_per_user = 0\n"
    site.start()
    job = site.submit_with_flags(1000, "--max-gpus=8", "--min-gpus=2")
    other = site.submit_with_flags(1, "--max-gpus=1", "--dependency=afterok:1")
    site.wait_round(site.wait_round())
    begins: set[float] = set()
    while len(begins) < 2 or time.time() < min(begins) + 2.0:
        seen = site.job(job)
        assert (seen.state, seen.held) == ("PENDING", False), site.tail()
        assert seen.eligible_s is not None
        begins.add(seen.eligible_s)
        pause(0.25)
    assert all(later - each > after_s / 4 for each, later in pairwise(sorted(begins))), (
        "now and then, not in each observation"
    )
    site.kill()
    killed_s = time.time()
    site.wait_states("RUNNING", job)
    started = site.job(job)
    assert (started.start_s or 0) >= max(begins), "at the begin time that Slurm was given last"
    assert max(begins) <= killed_s + after_s + 1
    assert (started.gpus_per_node, started.node_count) == (2, 1)
    assert site.states(other) == {other: "PENDING"}


@pytest.mark.long
def test_a_job_that_was_stopped_is_left_to_slurm_too(make_flag_site: MakeSite) -> None:
    site = make_flag_site(plain_after_s=4)
    site.start()
    job = site.submit_with_flags(1000, "--max-gpus=8")
    site.wait_states("RUNNING", job)
    wait_for(lambda: site.starts(job), 120, "a first report", details=site.tail)
    site.stop()
    site.extra = "[limits]\ngpus_per_user = 0\n"
    site.start()
    wait_for(lambda: site.job(job).state == "PENDING", 120, "the job to be stopped", details=site.tail)
    wait_for(lambda: not site.job(job).held, 120, "it to be left to Slurm", details=site.tail)
    assert site.job(job).required_nodes == ()
    site.kill()
    site.wait_states("RUNNING", job)
    assert (site.job(job).gpus_per_node, site.job(job).node_count) == (1, 1)


@pytest.mark.long
def test_what_is_left_of_a_time_limit_goes_with_the_job(make_flag_site: MakeSite) -> None:
    """10 minutes in total, and each restart adds 3. After a run of a second or two, 13 minutes are left, then 16."""
    site = make_flag_site("t4:2x4")
    site.constants["slurm"] = {"time_limit_grace_s": 180}
    site.start()
    job = site.submit_with_flags(2000, "--adaptive=rigid", "--max-gpus=4", "--time=10")
    limits = []
    for runs in (1, 2, 3):
        wait_for(lambda runs=runs: len(site.starts(job)) == runs, 120, f"run {runs}", details=site.tail)
        limits.append(site.job(job).time_limit_s)
        pause(1.5)
        (node,) = site.job(job).nodes
        for each in ("t4-00", "t4-01"):
            state = "drain" if each == node else "resume"
            site.slurm.command("scontrol", "update", f"NodeName={each}", f"State={state}", "Reason=test", check=False)
    assert limits == [600, 780, 960]


def test_a_plain_job_gets_room_where_adaptive_ones_hold_everything(make_flag_site: MakeSite) -> None:
    """An endless adaptive job has all four GPUs. A plain job for two GPUs gets them after `plain_patience_s`, and they come
    back."""
    site = make_flag_site("t4:1x4", plain_patience_s=2)
    site.start()
    rates = {"t4": RATES["t4"]}
    adaptive = site.submit(2000, rates=rates, max_gpus=4)
    wait_for(lambda: [start[1] for start in site.starts(adaptive)][-1:] == [4], 120, "all GPUs", details=site.tail)
    before = [start[1] for start in site.starts(adaptive)]
    assert before == sorted(set(before)), "it begins small, because it has measured nothing"
    pause(1.0)
    plain = site.sbatch("--gres=gpu:2", "--output=/dev/null", "--wrap=sleep 600")
    site.wait_states("RUNNING", plain)
    wait_for(lambda: [start[1] for start in site.starts(adaptive)] == [*before, 2], 120, "two GPUs", details=site.tail)
    site.slurm.command("scancel", plain)
    wait_for(
        lambda: [start[1] for start in site.starts(adaptive)] == [*before, 2, 4], 120, "all again", details=site.tail
    )
    site.assert_progress_kept(adaptive, lost=1.0)
    site.assert_no_run_twice(adaptive)


@pytest.mark.long
def test_both_loads_together_and_neither_starves(make_flag_site: MakeSite) -> None:
    """More plain jobs than fit, beside more adaptive ones. Slurm starts the former, Penstock the latter, and all jobs end."""
    site = make_flag_site("t4:2x4", plain_patience_s=2)
    site.start()
    plain = [site.sbatch("--gres=gpu:4", "--output=/dev/null", "--wrap=sleep 2") for _ in range(4)]
    adaptive = [site.submit(8, rates={"t4": RATES["t4"]}, max_gpus=4) for _ in range(4)]
    plain += [site.sbatch("--gres=gpu:4", "--output=/dev/null", "--wrap=sleep 2") for _ in range(2)]
    site.wait_states("COMPLETED", *plain, *adaptive, timeout_s=120)
    site.assert_no_run_twice(*adaptive)
    refused = [each for each in open_store(site.state).outcomes() if each.progress.value == "failed"]
    assert refused == [], "no job is sent to GPUs on which Slurm has started another"
