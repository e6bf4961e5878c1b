"""Two penstockd beside one Slurm: takeover, handover, and a client that finds the leader."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from tests.end_to_end.pair import pair
from tests.end_to_end.site import UNFORESEEN
from tests.scheduler.databases import REASON, available, restartable

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(not available(), reason=REASON)]


@pytest.fixture(scope="module")
def server():
    with restartable() as found:
        yield found


def command(two, *words: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PENSTOCK_URL": two.url()}
    return subprocess.run(
        [str(Path(sys.executable).with_name("penstock")), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_jobs_notice_nothing_while_the_leader_changes(loopback, tmp_path, server):
    """Killed, moved by an admin, stopped by systemd: another one leads, running jobs run on, waiting ones start."""
    with pair(loopback, tmp_path, server, round_s=1.0) as two:
        two.start()
        runs = two.site.submit(4000)
        two.site.wait_states("RUNNING", runs)
        started = two.site.job(runs).start_s
        took_s = {}

        leader = wait_for(two.leader, 120, "a leader", details=two.site.tail)
        took_s["kill -9"] = two.takeover_s(lambda: leader.send(signal.SIGKILL))
        new = two.site.submit(3)
        two.site.wait_states("COMPLETED", new)

        standby = wait_for(two.stands_by, 120, "a standby", details=two.site.tail)
        shown = command(two, "leader", "show")
        assert f"leader  {wait_for(two.leader, 120, 'a leader').name}" in shown.stdout
        assert standby.name in shown.stdout
        took_s["leader move"] = two.takeover_s(lambda: command(two, "leader", "move"))

        wait_for(lambda: two.stands_by() is not None, 120, "a standby", details=two.site.tail)
        leader = wait_for(two.leader, 120, "a leader", details=two.site.tail)
        leader.wanted = False
        took_s["SIGTERM"] = two.takeover_s(lambda: leader.send(signal.SIGTERM))
        assert leader.process.wait(120) == 0

        listed = command(two, "list")  # one of the two addresses does not answer
        assert listed.returncode == 0
        assert runs in listed.stdout
        refused = command(two, "leader", "move")
        assert refused.returncode == 1
        assert "no other penstockd stands by" in refused.stderr

        assert two.site.job(runs).state == "RUNNING"
        assert (two.site.job(runs).start_s, two.site.job(runs).restarts) == (started, 0)
        two.assert_one_writer()
        assert UNFORESEEN not in two.log.read_text(), two.site.tail()
        print("takeovers, s:", {what: round(seconds, 1) for what, seconds in took_s.items()})
        two.site.slurm.command("scancel", runs)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("ahead_s", [300.0, pytest.param(-300.0, marks=pytest.mark.long)])
def test_jobs_start_while_the_leaders_clock_differs_from_slurmctlds(make_loopback, tmp_path, server, ahead_s):
    """A new one, and one that Slurm has requeued, which waits for the begin time that Slurm has given it."""
    slurm = make_loopback("t4:1x4")
    with pair(slurm, tmp_path, server, clocks=True, round_s=1.0) as two:
        two.start()
        wait_for(two.leader, 120, "a leader").set_clock(ahead_s)
        new = two.site.submit(3)
        two.site.wait_states("COMPLETED", new)
        runs = two.site.submit(4000)
        two.site.wait_states("RUNNING", runs)
        slurm.command("scontrol", "requeue", runs)
        wait_for(lambda: two.site.job(runs).restarts == 1, 120, "Slurm to requeue it", details=two.site.tail)
        two.site.wait_states("RUNNING", runs)
        assert [two.site.job(job).restarts for job in (new, runs)] == [0, 1]
        slurm.command("scancel", runs)
