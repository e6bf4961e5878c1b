"""A storm: 300 jobs on 16 nodes, ten minutes of users, admins and dying daemons (`--long`); the same in small for every run."""

from __future__ import annotations

import os
import random

import pytest

from penstock_loopback import wait_for
from tests.end_to_end.site import Site
from tests.end_to_end.storm import NODES, Storm

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("jobs", "seconds", "differ"),
    [(30, 20.0, 0.3), pytest.param(300, 600.0, 0.03, marks=pytest.mark.long)],
)
def test_a_storm(make_site, make_loopback, jobs, seconds, differ):
    """PENSTOCK_TEST_SEED repeats the actions, but not their timing.

    Runs that start and end while the daemon or slurmctld is down are counted from what is known about them. The margin of the
    short storm is wider: such runs are a larger part there, and on a busy machine a daemon starts slowly (a run of 16 s was once
    counted as 32 s, of 130 s in all). Seen with 30 jobs: +1.2 %; with 50: +0.2 % twice; with 300, at a load of 20 to 30 on two
    cores: -2.1 %.
    """
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.SystemRandom().randrange(10_000)))
    # Slurm forgets an ended job after 5 minutes by default, and this test asks for all of them at the end.
    slurm = make_loopback(NODES, accounting=True, slurmd_timeout_s=10, settings={"MinJobAge": "3600"})
    site: Site = make_site(slurm, round_s=1.0, tick_s=0.4, check_claims=False)  # as in the figures above
    site.start()
    storm = Storm(site, jobs, seconds, seed)
    print(f"seed {seed}; {storm.log}, {site.log}, {site.state}, {slurm.log_folder}")
    storm.rage()
    wait_for(storm.nodes_are_back, 120, "all nodes", poll_s=1.0)
    states = storm.settle(timeout_s=120)
    assert len(states) == jobs, "an orderly restart loses no job"
    ours, theirs = storm.gpu_seconds()
    print(f"{storm.checked} rounds checked, {states}, GPU-seconds: Penstock's {ours:.0f}, Slurm's {theirs:.0f}")
    worst = sorted(storm.by_job(site.folder / "sacct.txt").items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:10]
    assert ours == pytest.approx(theirs, rel=differ), f"job: (Penstock's, Slurm's) {worst}"
    assert storm.stops_without_a_reason(site.folder / "sacct.txt") == []
    print(f"stops by Penstock: {dict(storm.stops)}")
    site.assert_no_run_twice(*storm.trainers)


@pytest.mark.long
def test_a_storm_in_which_slurmctld_crashes(make_site, make_loopback):
    """Kills and graceful restarts of slurmctld, partitions that are DOWN or INACTIVE: no stop by Penstock without a reason.

    A killed slurmctld forgets what happened in its last seconds, whole jobs too, and gives their ids to others. So nothing is
    compared here that depends on Slurm's memory.
    """
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.SystemRandom().randrange(10_000)))
    slurm = make_loopback(NODES, accounting=True, slurmd_timeout_s=10, settings={"MinJobAge": "3600"})
    site: Site = make_site(slurm, round_s=1.0, tick_s=0.4, check_claims=False)  # as in the figures above
    site.start()
    storm = Storm(site, 300, 600.0, seed, crashes=True)
    print(f"seed {seed}; {storm.log}, {site.log}, {site.state}, {slurm.log_folder}")
    storm.rage()
    wait_for(storm.nodes_are_back, 300, "all nodes", poll_s=1.0)
    storm.check_rounds()
    without = storm.stops_without_a_reason()
    kills = len(storm.facts.slurmctld_killed)
    print(f"{storm.checked} rounds checked, slurmctld was killed {kills} times; stops by Penstock: {dict(storm.stops)}")
    assert without == []
