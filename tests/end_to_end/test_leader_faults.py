"""Random faults on two penstockd, their database and slurmctld, or on one penstockd on SQLite and slurmctld."""

from __future__ import annotations

import contextlib
import os
import random
import shutil

import pytest

from tests.end_to_end.faults import NODES, Faults
from tests.end_to_end.pair import pair
from tests.scheduler.databases import REASON, available, restartable

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]


two_daemons = pytest.mark.skipif(not available(), reason=REASON)


@pytest.mark.parametrize(
    ("count", "longest_s", "patient", "one"),
    [
        pytest.param(20, 8.0, 0.1, False, marks=[two_daemons, pytest.mark.long], id="20"),
        pytest.param(200, 60.0, 0.6, False, marks=[two_daemons, pytest.mark.long], id="200"),
        pytest.param(40, 30.0, 0.4, True, marks=pytest.mark.long, id="sqlite"),
    ],
)
def test_random_faults(make_loopback, tmp_path, count, longest_s, patient, one):
    """PENSTOCK_TEST_SEED repeats the faults, but not their timing; PENSTOCK_TEST_FAULTS is another number of faults."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.SystemRandom().randrange(10_000)))
    count = int(os.environ.get("PENSTOCK_TEST_FAULTS", count))
    slurm = make_loopback(NODES, settings={"MinJobAge": "7200"}, backup=os.geteuid() == 0)
    print(f"seed {seed}; {tmp_path}")
    with contextlib.ExitStack() as stack:
        server = None if one else stack.enter_context(restartable())
        two = stack.enter_context(pair(slurm, tmp_path, server, clocks=True, round_s=1.0, lease_s=4.0))
        two.start()
        faults = Faults(two, count, seed, longest_s, patient)
        faults.rage()
        faults.check()
        print(faults.table())
        two.slurm.command("scancel", *faults.long)
