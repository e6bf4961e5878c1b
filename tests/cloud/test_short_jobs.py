"""A job in the cloud keeps all the time that it was sent with."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.burst.deciding.choices import choices_of
from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2
from tests.cloud.site import CloudSite
from tests.scheduler.builders import snapshot, table


@pytest.mark.parametrize("runs_s", [30.0, 290.0])
def test_a_short_job_is_not_asked_to_leave_before_its_end_even_if_the_boot_is_slow(
    site: CloudSite, ec2: Ec2, runs_s: float
) -> None:
    """Its commitment pays for the longest boot, for the job, and for the time to leave."""
    site.submit("7", max_gpus=1, runtime_s=runs_s)
    state = site.until(lambda: site.state.offers) or site.state
    seen = dataclasses.replace(
        snapshot("t4:1x1", [site.jobs["7"]], {"7": table(t4={1: 1.0}, a10g={1: 1.0})}), cloud=state
    )
    (choice, *_), _ = choices_of(site.jobs["7"], seen)
    site.boots = False
    site.send("7", choice.offer.id, choice.usd)
    site.sleep(site.settings.boot_timeout_s - 30)
    site.boots = True
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)
    begin_s = site.now_s()
    site.tick()
    site.sleep(runs_s - 10)
    site.ticks(3)
    assert site.now_s() > begin_s + runs_s - 5
    assert (site.jobs["7"].phase, [run.state for run in site.state.runs]) == (Phase.RUNNING, ["running"])
    site.finish("7")
    site.until(lambda: not site.state.runs)
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)
    assert spent <= choice.usd
