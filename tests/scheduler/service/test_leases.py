"""Leases: a job whose owner is silent is cancelled with a reason, and no other."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.api.messages import Owner, OwnerView, Submission
from penstock_scheduler.api.ports import Fate
from penstock_scheduler.daemon.service import submitting
from penstock_scheduler.daemon.service.leases import Leases
from penstock_scheduler.model import ClusterState
from tests.scheduler.builders import job, snapshot
from tests.scheduler.service.api import ME, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


def owned(name: str, lease_s: float | None) -> Submission:
    return Submission(key=name, owner=Owner(name=name, generation="g", attempt=1, lease_s=lease_s), command=("train",))


def test_a_job_is_cancelled_once_its_lease_has_run_out_and_its_owner_reads_why(api):
    with api.client("me") as me:
        silent = me.submit(owned("silent", 3600)).id
        long, none = me.submit(owned("long", 36000)).id, me.submit(owned("none", None)).id
        assert me.renew(silent, long, none, "1", "nonsense") == [silent, long], "job 1 is ada's"
        with api.client("ada") as ada:
            assert ada.renew(silent) == [], "it is not hers"
        api.app.state.api.leases._now_s = lambda: time.monotonic() + 7200
        wait_for(lambda: api.submitter.cancelled == [silent], 120, "the job to be cancelled")
        here = [job(each, user=ME) for each in (long, none)]
        api.submitter.ended[silent] = Fate("CANCELLED", None, None)
        api.board.observed(ClusterState(snapshot("t4:2x4", []).nodes, tuple(here)), time.time(), {})
        assert "nothing had waited for it for 1 h, the lease of its owner silent" in me.job(silent).ended_text
        assert api.submitter.cancelled == [silent]
    ended = ("lease", f"jobs/{silent}")
    wait_for(lambda: ended in [(each.action, each.target) for each in api.board.store.audit()], 120, "the audit log")


def test_a_later_try_does_not_take_up_a_job_whose_lease_ran_out_and_that_has_not_ended_yet(api):
    with api.client("me") as me:
        silent = me.submit(owned("silent", 3600)).id
        api.app.state.api.leases._now_s = lambda: time.monotonic() + 7200
        wait_for(lambda: api.submitter.cancelled == [silent], 120, "the job to be cancelled")
        again = Owner(name="silent", generation="g", attempt=2)
        assert me.submit(Submission(key="again", owner=again, command=("train",))).id != silent


def test_a_job_that_a_try_takes_up_while_its_lease_runs_out_is_not_cancelled(api):
    """The try holds the lock of its owner while it renews the lease."""
    service, out = api.app.state.api, [True]

    async def take_up() -> bool:
        async with service.owning.setdefault((ME, "o"), asyncio.Lock()):
            ending = asyncio.create_task(submitting.give_up(service, "1", (ME, "o"), lambda: out[0]))
            await asyncio.sleep(0)
            out[0] = False
        return await ending

    assert asyncio.run(take_up()) is False
    assert api.submitter.cancelled == []


def test_a_lease_that_is_renewed_runs_on_and_one_begins_anew_with_penstockd(api):
    """By a clock of the test's own, beside the service's leases."""
    now_s = [0.0]
    with api.client("me") as me:
        kept = me.submit(owned("kept", 3600)).id
    leases = Leases(api.board, lambda: now_s[0])
    leases.begin(ME, OwnerView(name="kept", generation="g", attempt=1, lease_s=100, job=kept))
    now_s[0] = 99
    assert leases.renew(ME, [kept]) == [kept]
    now_s[0] = 198
    assert leases.expired() == []
    now_s[0] = 199
    assert [each for each, _ in leases.expired()] == [kept]
    again = Leases(api.board, lambda: now_s[0])
    again.load()
    assert again.renew(ME, [kept]) == [kept], "the store knows it"
    leases.begin(ME, OwnerView(name="kept", generation="g", attempt=2, job=kept))
    assert leases.renew(ME, [kept]) == [], "a later try wants none"
