"""What a job gets by claiming to be fast, long, short or expensive to move: never more than the truth would give it.

`benchmarks/liars.py` has the liars, and measures them for hours under several policies; here are short runs of it. The last test
is on a real Slurm.
"""

from __future__ import annotations

import json

import pytest
from benchmarks.liars import LIARS, honest, play, row

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback, make_loopback
from tests.end_to_end.conftest import make_site
from tests.end_to_end.site import Site, pause

__all__ = ["make_loopback", "make_site"]


@pytest.mark.parametrize("name", ["table, many GPUs, silent", "table, GPU types, silent", "table, true steps"])
def test_a_false_table_gets_what_a_true_one_gets(name: str):
    found = row(name, "sia", hours=1.0, seeds=1)
    assert found.lie > 0.01
    assert found.gain <= 1.1
    assert found.work >= 0.95
    assert found.named


def test_a_table_gets_no_more_than_silence():
    """A job that declares nothing and measures nothing, and the same with a table of 1e12."""
    liar, _ = LIARS["table, many GPUs, silent"]
    _, silent = LIARS["ends in 1 s, silent"]
    lie, nothing = (play([*honest(), make()], "sia", 1.0).share["liar"] for make in (liar, silent))
    assert lie <= 1.1 * nothing


@pytest.mark.parametrize(
    "name", ["0 s left", "restart costs a year", "steps on other GPUs", "steps faster on one type"]
)
def test_a_false_report_is_named(name: str):
    """What it gains by that is measured over hours: the twin's share of one hour is a matter of chance."""
    liar, _ = LIARS[name]
    doubts = play([*honest(), liar()], "sia", 1.0).doubts
    assert any(job.startswith("liar") for job in doubts)
    assert not any(job.startswith("honest") for job in doubts)


@pytest.mark.slurm
def test_a_table_of_1e12_stops_nobody(make_loopback: MakeLoopback, make_site: type[Site]):
    """Six honest jobs hold 12 of 16 A100s. The liar may have what is idle; its owner and the admin hear of the lie."""
    site = make_site(make_loopback("a100:2x8"), check_claims=True)
    site.start()
    six = [site.submit(4000, max_gpus=2, min_gpus=2, goodput_table=None) for _ in range(6)]
    site.wait_states("RUNNING", *six)
    table = {"a100": {"1": 1.0, "4": 4.0, "8": 8.0, "16": 1e12}}
    spec = {"max_gpus": 16, "goodput_table": table, "checkpointable": True}
    comment = f"--comment={json.dumps({'penstock': spec})}"
    liar = site.sbatch("--hold", "--requeue", "--gres=gpu:1", comment, "--output=/dev/null", "--wrap=sleep 4000")
    site.wait_states("RUNNING", liar)
    begun = site.wait_round()
    wait_for(lambda: site.wait_round(begun) >= begun + 8, 120, "eight rounds", details=site.tail)
    pause(1.0)
    assert site.states(*six) == dict.fromkeys(six, "RUNNING")
    assert [site.job(job).restarts for job in six] == [0] * 6
    assert "a claim does not hold" in site.log.read_text()
