"""`penstock submit --dry-run` says what penstockd then does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from penstock_loopback import wait_for
from penstock_scheduler.store.sql import open_store
from penstock_slurm.submit.cli import app
from tests.end_to_end.site import Site

pytestmark = pytest.mark.slurm


@pytest.fixture
def dry_run(flag_site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The output of `penstock submit --dry-run` with these arguments. It knows the socket of penstockd and nothing else."""
    socket = f"unix:{flag_site.state / 'api.sock'}"
    for name, value in (flag_site.slurm.environment() | {"PENSTOCK_URL": socket}).items():
        monkeypatch.setenv(name, value)

    def said(*argv: str) -> str:
        done = CliRunner().invoke(app, ["--dry-run", *argv])
        assert done.exit_code == 0, done.output
        return done.stdout

    return said


def test_a_dry_run_says_what_the_daemon_then_does(flag_site: Site, dry_run: Callable[..., str]) -> None:
    holder = flag_site.submit_with_flags(
        5000, "--adaptive=rigid", "--max-gpus=4", "--gpu-types=t4", "--non-preemptible", "--time=30"
    )
    flag_site.wait_states("RUNNING", holder)
    flag_site.wait_round(flag_site.wait_round())

    waits = dry_run("--adaptive=rigid", "--max-gpus=4", "--gpu-types=t4", "train.sh")
    assert "The job would wait: " in waits
    assert "It needs 4 GPUs of type t4" in waits
    minutes = re.search(r"in (\d+) min, if no other job is submitted", waits)
    assert minutes, waits
    assert 28 <= int(minutes[1]) <= 30, "the holder's time limit"

    flags = ("--min-gpus=2", "--max-gpus=4", "--gpu-types=a100,t4")
    said = dry_run("--adaptive", *flags, "train.sh")
    assert re.search(r"by the policy sia on round \d+, \d+ s old", said)
    assert f"Job {holder}" not in said
    job = flag_site.submit_with_flags(5000, *flags)

    def first() -> object:
        store = open_store(flag_site.state)
        plans = (store.round(number).plan for number in store.round_numbers())
        return next((plan.assignments[job] for plan in plans if job in plan.assignments), None)

    given = wait_for(first, 120, "the job to be placed", details=flag_site.tail)
    assert f"The job would get {given.configuration} ({given.placement.gpus} on a100-00): {given.reason.text}" in said

    other = dry_run("--adaptive=rigid", "--max-gpus=8", "--gpu-types=a100", "train.sh")
    assert "The job would wait" in other or "The allocation of 1 other job would change" in other
