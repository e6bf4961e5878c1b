"""What a running job shows, against what Slurm's accounting says at the same moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_profiles.wire import Observation
from penstock_scheduler.api.client import Client
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm

GPUS = 2
WITHIN_S = 2.0
"""How far the GPU-hours of a running job may be from Slurm's, in seconds of its time."""


def accounted(site: Site, job: str) -> str:
    """For how long Slurm has charged the job's present run, in whole seconds; empty: its accounting does not know the job yet."""
    return site.slurm.command("sacct", "-X", "-n", "-P", "-j", job, "-o", "ElapsedRaw").stdout.strip()


@pytest.mark.long
def test_what_a_job_that_runs_steadily_shows_is_at_most_a_tick_old(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
):
    """For 60 s nothing happens to the job. It shows its GPU-hours within 2 s of Slurm's, and what it reported last."""
    site = make_site(make_loopback(f"t4:1x{GPUS}", accounting=True), sample_s=10)
    site.start()
    job = site.submit(1000.0, max_gpus=GPUS, min_gpus=GPUS)
    site.wait_states("RUNNING", job)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: penstock.job(job).state == "running", 120, "the job to run", details=site.tail)
        wait_for(lambda: site.reports(job), 120, "its first report", details=site.tail)
        wait_for(lambda: accounted(site, job), 120, "slurmdbd to know the job", details=site.tail)
        theirs_s = 0.0
        while theirs_s < 60:
            observed_s = time.time() - (penstock.ready().observed_age_s or 0.0)
            reported = [each.body.progress for each in site.reports(job) if isinstance(each.body, Observation)]
            shown = penstock.job(job)
            theirs_s = float(accounted(site, job))
            late_s = max(time.time() - observed_s - WITHIN_S, 0.0)  # by a machine that is busy
            (listed,) = penstock.jobs()
            after = listed.gpu_seconds["t4"] / GPUS
            assert shown.gpu_seconds["t4"] / GPUS <= theirs_s + WITHIN_S, "no more than Slurm says"
            assert after >= theirs_s - WITHIN_S - late_s, "no less than Slurm says"
            assert shown.progress is not None
            assert shown.progress >= max(reported, default=0.0), "what was in the store is not older"
            time.sleep(2.0)
        assert penstock.job(job).version <= listed.version, "nothing happened to the job"

        wait_for(lambda: len(penstock.job_series(job).samples) >= 5, 120, "a sample each 10 s", details=site.tail)
        samples = penstock.job_series(job).samples
        shown = penstock.job(job)
        assert all(sample.gpus == GPUS and sample.expected is not None for sample in samples)
        assert shown.progress >= samples[-2].progress > samples[0].progress
        (node,) = penstock.nodes()
        assert [(each.job, each.gpu_ids) for each in node.jobs] == [(job, [0, 1])]
        allocated = penstock.series("gpus.t4.allocated", from_s=time.time() - 30).series["gpus.t4.allocated"]
        assert {value for _, value in allocated} == {GPUS}
        waiting = site.submit(1000.0, max_gpus=GPUS, min_gpus=GPUS)
        wait_for(lambda: [each.job for each in penstock.queue()] == [waiting], 120, "the queue", details=site.tail)
        wait_for(lambda: next(penstock.queue()).code == "waiting-capacity", 120, "the reason", details=site.tail)
