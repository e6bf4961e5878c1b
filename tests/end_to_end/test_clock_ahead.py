"""A leader whose clock is ten minutes ahead is killed, and what it has stored does not lie in the next one's future."""

from __future__ import annotations

import itertools
import shutil
import signal
import time

import pytest

from penstock_loopback import wait_for
from penstock_scheduler.store.sql import open_store
from tests.end_to_end.pair import pair
from tests.end_to_end.site import UNFORESEEN
from tests.scheduler.databases import REASON, available, restartable

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.long,
    pytest.mark.skipif(not available(), reason=REASON),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

SLACK_S = 3.0
"""Slurm's times are whole seconds, and a reading takes a moment."""


def ordered(times: list[float], before_s: float) -> bool:
    return (
        all(a <= b + SLACK_S for a, b in itertools.pairwise(times)) and (times[-1:] or [0.0])[0] <= before_s + SLACK_S
    )


@pytest.mark.parametrize("ahead_s", [600.0, -600.0])
def test_times_are_in_order_after_a_takeover(make_loopback, tmp_path, ahead_s):
    slurm = make_loopback("t4:1x4")
    began_s = time.time()
    with restartable() as server, pair(slurm, tmp_path, server, clocks=True, round_s=1.0, sample_s=10.0) as two:
        first, second = two.members.values()
        first.set_clock(ahead_s)
        first.start()
        wait_for(lambda: two.leader() is first, 120, "the one with the wrong clock to lead", details=two.site.tail)
        second.start()
        two.wait_ready(120)
        job = two.site.submit(4000)
        wait_for(lambda: _runs(two, job) == 1, 120, "its first run", details=two.site.tail)
        slurm.command("scontrol", "requeue", job)
        wait_for(lambda: _runs(two, job) == 2, 120, "a second run", details=two.site.tail)
        ended = two.site.submit(3)
        two.site.wait_states("COMPLETED", ended)
        first.wanted = False
        two.takeover_s(lambda: first.send(signal.SIGKILL))
        wait_for(lambda: two.leader() is second, 120, "the other one to lead", details=two.site.tail)
        store = open_store(two.site.store)
        taken = store.round_numbers()[-1]
        late = two.site.submit(3)
        two.site.wait_states("COMPLETED", late)
        slurm.command("scontrol", "requeue", job)
        wait_for(lambda: _runs(two, job) == 3, 120, "a third run", details=two.site.tail)
        time.sleep(12)  # a sample more
        slurm.command("scancel", job)
        wait_for(lambda: _ended(two, job), 120, "its end in the store", details=two.site.tail)

        now_s = time.time()
        rounds = [store.round(number).snapshot.time_s for number in store.round_numbers()]
        assert store.round_numbers()[-1] > taken + 3, "rounds go on"
        assert ordered(rounds, now_s)
        assert ordered([line.time_s for line in store.outcomes()], now_s)
        assert ordered([line.time_s for line in reversed(list(store.audit()))], now_s)
        for each in (job, ended, late):
            spans = store.job_spans(each)
            assert ordered([t for span in spans for t in (span.from_s, span.to_s or now_s)], now_s), spans
            view = store.job(each)
            held_s = sum(view.gpu_seconds.values())
            assert 0 < held_s < now_s - began_s, view
            assert held_s == pytest.approx(sum(span.to_s - span.from_s for span in spans), abs=8), (view, spans)
        assert len(store.job_spans(job)) == 3
        samples = store.samples(job, 0, 1e11, 1)
        assert samples
        assert ordered([sample.time_s for sample in samples], now_s)
        assert samples[0].time_s > began_s - SLACK_S
        assert [
            stop.code.value for span in store.job_spans(job)[:2] if (stop := store.newest_stop(job, span.from_s))
        ] == []
        store.close()
        two.assert_one_writer()
        assert UNFORESEEN not in two.log.read_text(), two.site.tail()


def _runs(two, job: str) -> int:
    """Of how many runs the store knows."""
    store = open_store(two.site.store)
    try:
        return len(store.job_spans(job))
    finally:
        store.close()


def _ended(two, job: str) -> bool:
    store = open_store(two.site.store)
    try:
        view, spans = store.job(job), store.job_spans(job)
        return view is not None and view.state == "ended" and all(span.to_s is not None for span in spans)
    finally:
        store.close()
