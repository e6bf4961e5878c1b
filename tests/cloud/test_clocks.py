"""The clocks of penstockd's host and of the provider may differ: a run lives for its money by either of them."""

from __future__ import annotations

import pytest

from penstock_scheduler.model import Phase
from tests.cloud.faults import Ec2
from tests.cloud.site import CloudSite

LIFE_S = 24 * 60.0
USD = 1.006 * LIFE_S / 3600


def runs(site: CloudSite, ahead_s: float, usd: float) -> None:
    """Job 7 runs in the cloud for this money, and the host's clock is so far ahead of the provider's."""
    site.ahead_s = ahead_s
    site.submit("7")
    site.send("7", usd=usd)
    site.until(lambda: site.jobs["7"].phase is Phase.RUNNING)


@pytest.mark.parametrize("ahead_s", [1800.0, -1800.0], ids=["ahead", "behind"])
def test_a_run_has_its_24_minutes_where_a_clock_is_wrong_by_half_an_hour(
    site: CloudSite, ec2: Ec2, ahead_s: float
) -> None:
    runs(site, ahead_s, usd=USD)
    site.sleep(LIFE_S - 240)
    site.ticks(3)
    assert site.jobs["7"].phase is Phase.RUNNING, "four minutes are left"
    assert ec2.running()
    site.sleep(180)
    site.until(lambda: not site.state.runs)
    assert site.jobs["7"].phase is Phase.QUEUED, "it was asked to leave two minutes before its end"
    assert not ec2.running()


@pytest.mark.parametrize("ahead_s", [1800.0, -1800.0], ids=["ahead", "behind"])
def test_an_instance_that_ec2_forgets_is_paid_for_as_long_as_it_may_have_lived(
    site: CloudSite, ec2: Ec2, ahead_s: float
) -> None:
    runs(site, ahead_s, usd=5.0)
    ec2.direct().terminate_instances(InstanceIds=ec2.running())
    ec2.forget()
    site.sleep(600)
    site.until(lambda: not site.state.runs)
    (usd,) = (line.amount for line in site.store.cloud_ledger() if line.kind == "usd")
    assert usd == pytest.approx(1.006 * 610 / 3600, rel=0.1)
