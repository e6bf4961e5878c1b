"""The parsers of sacctmgr, sacct and sshare on text as printed by Slurm 22.05.8."""

import math

import pytest

from penstock_slurm.gateway.accounts import (
    parse_associations,
    parse_ends,
    parse_fair_shares,
    parse_preempting,
    parse_qos,
    parse_runs,
)
from penstock_slurm.gateway.base import SlurmEnd, SlurmLimit, SlurmQos


def test_reads_runs_that_are_over():
    text = (
        "7|1795256400|1795256410|t4-[00-01]|billing=2,gres/gpu:t4=8,gres/gpu=8,node=2\n"
        "7|1795256420|Unknown|t4-00|gres/gpu=4\n12_3|1795256400|1795256401|a100-00|cpu=1\n9|Unknown|Unknown|None assigned|\n"
    )
    first, element = parse_runs(text, [])
    assert (first.job_id, first.end_s - first.start_s, first.nodes, first.gpus) == ("7", 10, ("t4-00", "t4-01"), 8)
    assert (element.job_id, element.gpus) == ("12_3", 0)


def test_reads_how_jobs_ended_by_their_newest_records():
    text = (
        "7|100|NODE_FAIL|0:0|150\n7|200|FAILED|3:0|250\n"  # requeued once
        "8|200|CANCELLED by 1000|0:15|260\n8|100|NODE_FAIL|0:0|150\n"  # in the other order
        "9|100|NODE_FAIL|0:0|150\n9|200|RUNNING|0:0|Unknown\n"  # goes on
        "12_3|100|REQUEUED|0:0|150\n13|100|TIMEOUT|0:0|Unknown\n14|Unknown|FAILED|1:0|150\n"
    )
    ends = {"7": SlurmEnd("FAILED", 3, 250.0, 100.0), "8": SlurmEnd("CANCELLED", 143, 260.0, 100.0)}
    assert parse_ends(text, []) == ends


def test_an_id_that_slurm_has_given_again_is_that_of_a_job_submitted_later():
    """slurmctld was killed and lost the first job, of which the accounts know only the start."""
    for before in ("7|100|RUNNING|0:0|Unknown\n", "7|100|COMPLETED|0:0|150\n"):
        assert parse_ends(before + "7|200|COMPLETED|0:0|250\n", []) == {"7": SlurmEnd("COMPLETED", 0, 250.0, 200.0)}


def test_reads_limits_of_qos():
    text = "1|normal||||1\n2|short|gres/gpu:a100=2,gres/gpu=4|cpu=9,gres/gpu=2|gres/gpu=3|2\n"
    assert parse_qos(text, []) == (
        SlurmLimit(2, "a100", qos="short"),
        SlurmLimit(4, qos="short"),
        SlurmLimit(2, qos="short", each="user"),
        SlurmLimit(3, qos="short", each="account"),
    )


def test_reads_how_qos_take_part_in_preemption():
    text = (
        "1|normal||cluster||00:00:00|1\n2|high|low,spot|requeue|00:10:00|00:02:00|2\n"
        "3|low||gang,suspend|unreadable||3\n"
    )
    assert parse_preempting(text, []) == (
        SlurmQos("normal", frozenset(), None, None, 0.0),
        SlurmQos("high", frozenset({"low", "spot"}), True, 600.0, 120.0),
        SlurmQos("low", frozenset(), False, math.inf, 0.0),
    )


def test_reads_limits_of_associations_with_the_accounts_below():
    text = (
        "1|root|||||1\n2|root||root|||2\n3|maths|root|||gres/gpu=12|3\n4|maths||nobody||gres/gpu=3|4\n"
        "5|algebra|maths|||cpu=100,gres/gpu:a100=4|5\n6|algebra||nobody|fast|gres/gpu=5|6\n"
    )
    assert parse_associations(text, []) == (
        SlurmLimit(12, accounts=("maths", "algebra")),
        SlurmLimit(3, accounts=("maths",), user="nobody"),
        SlurmLimit(4, "a100", accounts=("algebra",)),
    )


def test_reads_fair_shares():
    text = "1|root|||1\n2| root|root|1.000000|2\n3| maths|||3\n4|  maths|nobody|0.250000|4\n"
    assert parse_fair_shares(text, []) == {("root", "root"): 1.0, ("maths", "nobody"): 0.25}


@pytest.mark.parametrize(
    "parse", [parse_qos, parse_preempting, parse_associations, parse_fair_shares, parse_ends, parse_runs]
)
def test_a_line_with_other_fields_is_lost(parse):
    lost: list[str] = []
    assert not parse("1|a|b\n", lost)
    assert lost == ["1|a|b"]
