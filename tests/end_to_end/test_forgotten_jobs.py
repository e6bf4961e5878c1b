"""What Penstock knows of jobs that Slurm has forgotten (MinJobAge): how they ended, what they used and what they printed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import ApiError, Client
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

HELD = ("--hold", "--requeue", "--gres=gpu:1", '--comment={"penstock": {"max_gpus": 1}}')


def sacct(site: Site, job: str) -> tuple[str, str, float, float]:
    """State, exit code, seconds of running, and time of the end that Slurm's accounting has for a job."""
    words = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode,ElapsedRaw,End")
    state, code, elapsed, end = site.slurm.command(*words).stdout.strip().split("|")
    return state, code, float(elapsed), time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.long
def test_a_job_that_ended_while_penstockd_was_away_for_longer_than_slurm_remembers(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
):
    """Its state, exit code and end are those of Slurm's accounting, and its charge is Slurm's within 1 %."""
    site = make_site(make_loopback("t4:1x4", accounting=True, settings={"MinJobAge": "2"}))
    site.start()
    seen = site.sbatch(*HELD, "--job-name=night", f"--output={site.folder}/%x-%j.log", "--wrap=echo printed")
    job = site.sbatch(*HELD, f"--output={site.folder}/%j.log", "--wrap=echo begins; sleep 60; echo ends; exit 3")
    site.wait_states("RUNNING", job)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: penstock.job(job).output, 120, "the job to be seen running", details=site.tail)
        penstock.wait(seen, timeout_s=120)
    site.kill()
    wait_for(lambda: not site.states(seen, job), 300, "Slurm to forget both jobs")
    site.start()
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        ended = penstock.wait(job, timeout_s=120)
        state, code, elapsed, end_s = sacct(site, job)
        assert (state, code) == ("FAILED", "3:0")
        assert (ended.ended, ended.exit_code, ended.end_s) == (state, 3, end_s)
        (line,) = (each for each in penstock.ledger().lines if each.job == job)
        assert line.amount == pytest.approx(elapsed, rel=0.01)
        assert line.amount >= 60
        assert penstock.log(seen).text == "printed\n"
        assert penstock.log(job).text == "begins\nends\n"
        (site.folder / f"night-{seen}.log").unlink()
        with pytest.raises(ApiError, match=f"night-{seen}.log, cannot be read"):
            penstock.log(seen)


def test_output_files_by_every_pattern_and_of_array_elements(site: Site):
    """Without %N: all nodes of a loopback cluster are on one host, and slurmd takes the host's name."""
    name = "%x-%j-%A-%n-%t-%s-%J-%u-%8j-100%%.log"
    files = ("--job-name=night", f"--output={site.folder}/{name}", "--error=%j.err")
    patterns = site.sbatch(*HELD, *files, "--wrap=echo out; echo err >&2")
    array = site.sbatch(*HELD, "-a", "3-4", "--wrap=echo element $SLURM_ARRAY_TASK_ID")
    elements = [f"{array}_3", f"{array}_4"]
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        for job in (patterns, *elements):
            wait_for(lambda job=job: known(penstock, job), 120, f"job {job} to be seen", details=site.tail)
            assert penstock.wait(job, timeout_s=120).ended == "COMPLETED"
        assert penstock.log(patterns).text == "out\n"
        assert penstock.log(patterns, stream="stderr").text == "err\n"
        assert [penstock.log(job).text for job in elements] == ["element 3\n", "element 4\n"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_name_that_looks_like_another_field_of_scontrols_answer_shows_no_other_users_file(site: Site):
    (site.folder / "secret").write_text("secret")
    os.chown(site.folder / "secret", 65534, 65534)
    job = site.sbatch(*HELD, f"--output={site.folder}/secret UserId=nobody(65534)", "--wrap=echo out")
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: known(penstock, job), 120, "the job to be seen", details=site.tail)
        penstock.wait(job, timeout_s=120)
        with pytest.raises(ApiError, match="is not a regular file of the job's user"):
            penstock.log(job)


def known(penstock: Client, job: str) -> bool:
    """Whether penstockd knows the job."""
    try:
        return penstock.job(job).id == job
    except ApiError:
        return False
