"""`penstock show`, `explain`, `list` and `cancel` on a real Slurm, for jobs that Penstock does not manage, or not yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.cli import make_app
from penstock_scheduler.store.spool import Spool
from penstock_slurm.act.submitter import SlurmSubmitter
from penstock_slurm.gateway import CliGateway
from penstock_slurm.settings import SlurmSettings
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


def told(site: Site, *words: str) -> str:
    """What the command says, on either stream, with the text of its error."""
    done = CliRunner().invoke(make_app(), list(words), env={"PENSTOCK_URL": f"unix:{site.state / 'api.sock'}"})
    return f"{done.output} {done.exception or ''}"


def held(site: Site, *options: str) -> str:
    return site.sbatch("--hold", "--gres=gpu:1", "--output=/dev/null", *options, "--wrap=sleep 600")


def test_every_job_is_known_and_called_what_it_is(loopback: LoopbackCluster, make_site: Callable[..., Site]) -> None:
    site = make_site(loopback)
    site.start()
    forged = "x UserId=nobody(65534) ArrayJobId=1 ArrayTaskId=2 JobState=COMPLETED"
    plain = held(site, f"--job-name={forged}", f"--comment={forged}")
    ended = held(site)
    site.slurm.command("scancel", ended)
    array = held(site, "--array=3,5")
    number = str(site.job(f"{array}_5").number)
    elsewhere = site.submit(1, "--partition=t4")
    depends = site.submit(1, f"--dependency=afterok:{plain}")
    said = {
        plain: "has no job spec, so it is a plain job",
        ended: "has ended (CANCELLED) and was not managed",
        array: f"is an array: ask for its elements, such as {array}_",
        f"{array}_5": "has no job spec, so it is a plain job",
        elsewhere: "is in partition t4, which Penstock does not manage",
        str(int(depends) + 1000): "there is no job",
    }
    if number not in said:  # else the last element has the array's own number
        said[number] = f"is element 5 of array {array}: ask for {array}_5"
    for job, words in said.items():
        for command in ("show", "explain", "cancel"):
            assert words in told(site, command, job), (command, job)
        if job.isdigit() and int(job) < 1000:
            assert site.states(job).get(job, "PENDING") in ("PENDING", "CANCELLED"), "cancel leaves it alone"
    wait_for(lambda: "afterok" in told(site, "explain", depends), 120, "explain to name the dependency")
    assert "afterok" in told(site, "show", depends)
    assert f"{depends} " in told(site, "list")
    told(site, "cancel", depends)
    site.wait_states("CANCELLED", depends)


def test_a_job_whose_admin_comment_somebody_overwrote_is_known(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    """It runs on, and what to do is said. An admin writes the job spec back, and it is managed again."""
    site = make_site(loopback)
    site.start()
    job = site.sbatch("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 600")
    spec = 'AdminComment={"penstock": {"max_gpus": 1}}'
    site.slurm.command("scontrol", "update", f"JobId={job}", spec)
    site.wait_states("RUNNING", job)
    before = site.job(job)
    site.slurm.command("scontrol", "update", f"JobId={job}", "AdminComment=see ticket 12")
    wait_for(lambda: "no longer has the job spec" in told(site, "show", job), 120, "show to tell it")
    assert "is not managed any more: its AdminComment" in told(site, "explain", job)
    (line,) = (line for line in told(site, "list").splitlines() if line.startswith(f"{job} "))
    assert ("running" in line, "refused" in line) == (True, True), line
    site.slurm.command("scontrol", "update", f"JobId={job}", spec)
    wait_for(lambda: "no longer has the job spec" not in told(site, "show", job), 120, "it to be managed")
    now = site.job(job)
    assert (now.state, now.restarts, now.start_s) == ("RUNNING", 0, before.start_s)


def test_a_job_that_penstockd_has_not_looked_at_yet_is_not_called_plain(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    """No daemon runs; what answers for it says that it will be found later."""
    site = make_site(loopback)
    settings = SlurmSettings(partitions=("all",), conf=site.slurm.slurm_conf, spool_dir=site.spool)
    submitter = SlurmSubmitter(CliGateway(conf=site.slurm.slurm_conf, timeout_s=20), Spool(site.spool), settings)
    job = site.submit(1)
    found = submitter.unmanaged(job)
    assert found is not None
    assert (found.user, found.later) == ("root", True)
    site.slurm.command("scancel", job)
    found = submitter.unmanaged(job)
    assert found is not None
    assert ("ended (CANCELLED) before Penstock had looked at it" in found.text, found.later) == (True, False)
    assert submitter.unmanaged("999999") is None
    assert submitter.unmanaged("x; true") is None
