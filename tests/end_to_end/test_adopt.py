"""`[slurm] adopt` on a real Slurm: neither adding an entry nor taking it back touches what runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


def in_newest_round(site: Site) -> set[str]:
    site.wait_round(site.wait_round())
    with contextlib.closing(open_store(site.store)) as store:
        record = store.last_round()
        assert record is not None
        return {job.id for job in record.snapshot.jobs}


def test_what_runs_stays_managed_and_what_waits_is_told(
    loopback: LoopbackCluster, make_site: Callable[..., Site]
) -> None:
    site = make_site(loopback)
    site.start()
    job = site.submit(100_000, min_gpus=1, max_gpus=1, preemptible=False)
    site.wait_states("RUNNING", job)
    before = site.job(job)
    site.stop()
    site.slurm_settings["adopt"] = ["account:ml"]
    site.start()
    later = site.submit(100_000, min_gpus=1, max_gpus=1)
    wait_for(
        lambda: "only jobs of account:ml; submit it again" in site.job(later).admin_comment,
        60,
        "the message to the user",
        details=site.tail,
    )
    after = site.job(job)
    assert (after.state, after.restarts, after.nodes) == ("RUNNING", before.restarts, before.nodes)
    assert in_newest_round(site) == {job}
    assert site.job(later).held
    site.stop()
    del site.slurm_settings["adopt"]
    site.start()
    site.wait_states("RUNNING", later)
    assert site.job(job).restarts == before.restarts
