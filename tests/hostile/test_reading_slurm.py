"""Nothing that a user or an admin writes into Slurm confuses the reading of it: answers as Slurm prints them, for the parsers.

`test_real_slurm.py` does the same with a real Slurm.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock_slurm.gateway import JobGone, SlurmJob, Unknown
from penstock_slurm.gateway.accounts import parse_associations, parse_fair_shares, parse_qos, parse_runs
from penstock_slurm.gateway.base import SlurmLimit
from penstock_slurm.gateway.errors import Messages, Refused
from penstock_slurm.gateway.hostlist import expand
from penstock_slurm.gateway.parse import (
    parse_gpu_ids,
    parse_gpus_held,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    parse_switches,
)
from penstock_slurm.gateway.parse_jobs import JOB_FIELDS, JobReader
from tests.slurm_plugin.gateway.test_parse import HELD, MARKS, NODE, OF_22_05, RESERVATIONS, RUNNING, answer

NEWLINES = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
"""Where Python's `str.splitlines` ends a line. Slurm's commands end one with the first alone."""


# --- jobs


def read_jobs(*records: str) -> tuple[tuple[SlurmJob, ...], tuple[Unknown, ...]]:
    reader = JobReader()
    return reader.read(answer(*records), MARKS, OF_22_05, 0.0), reader.lost


@pytest.mark.parametrize("change", [lambda fields: fields[:-1], lambda fields: [*fields[:-1], "more", fields[-1]]])
def test_a_record_of_other_fields_concerns_its_job(change: Callable[[list[str]], list[str]]) -> None:
    broken = "%q".join(change(RUNNING.split("%q")[:-1])) + "%qend"
    (odd, good), lost = read_jobs(broken, HELD)
    assert (odd.id, odd.number, odd.state, lost) == ("4_2", 6, "", ())
    assert [each.field for each in odd.unknown] == ["record"]
    assert str(len(JOB_FIELDS) + 2) in str(odd.unknown[0])
    assert good == read_jobs(HELD)[0][0]


@pytest.mark.parametrize(
    "record", ["x" + RUNNING, RUNNING.replace("%q2%q", "%qtwo%q", 1), "%qend", "6%qend", "6%q4%qend"]
)
def test_a_record_without_a_readable_id_is_lost_alone(record: str) -> None:
    jobs, lost = read_jobs(HELD, record, HELD)
    assert jobs == read_jobs(HELD, HELD)[0]
    assert [each.field for each in lost] == ["record"]
    reader = JobReader()
    for _ in range(3):  # also of an answer that is as before
        assert len(reader.read(answer(record, HELD), MARKS, OF_22_05, 0.0)) == 1
        assert len(reader.lost) == 1


@pytest.mark.parametrize("word", ["end", "~", MARKS.field[:-1], MARKS.record[1:], "record", *JOB_FIELDS, *NEWLINES])
def test_a_name_that_begins_or_ends_with_a_word_of_the_format_is_a_name(word: str) -> None:
    for name in (word, word + "x", "x" + word, word * 3):
        (job, other), lost = read_jobs(HELD.replace("NAME", name), RUNNING)
        assert (job.name, other.id, lost, job.unknown, other.unknown) == (name, "4_2", (), (), ())


# --- nodes, partitions, reservations, switches


FEATURES = "ActiveFeatures=nvme,ib"


def node_line(name: str, texts: str = "", features: str = "a100") -> str:
    line = NODE.split(" Reason=")[0].replace("NodeName=a100-00", f"NodeName={name}")
    assert FEATURES in line
    return line.replace(FEATURES, f"ActiveFeatures={features}") + texts


@pytest.mark.parametrize("newline", NEWLINES)
@pytest.mark.parametrize("key", ["Reason", "Comment", "Extra"])
def test_a_text_about_a_node_is_no_other_node(newline: str, key: str) -> None:
    """Its forged record makes the node of that name unknown, at the most: nothing starts there, and nobody is asked to leave."""
    forged = f" {key}=x{newline}" + node_line("n1").replace("MIXED+DRAIN", "IDLE+DRAIN").replace("a100:3", "a100:0")
    first, second = parse_nodes(node_line("n0", forged) + "\n" + node_line("n1") + "\n", OF_22_05)
    assert (first.name, first.unknown, first.gpus, second.name) == ("n0", (), {"a100": 8}, "n1")
    if "\n" in newline:
        assert [each.field for each in second.unknown] == ["NodeName"]
        assert second.state == frozenset()
    else:
        assert second == parse_nodes(node_line("n1"), OF_22_05)[0]


@pytest.mark.parametrize(
    ("features", "key"),
    [
        ("x Gres=gpu:a100:64", "Gres"),
        ("x State=IDLE", "State"),
        ("x GresUsed=gpu:a100:0", "GresUsed"),
        ("x NodeName=n1", None),
    ],
)
def test_a_feature_that_looks_like_a_key_makes_that_key_unknown(features: str, key: str | None) -> None:
    node, other = parse_nodes(node_line("n0", features=features) + "\n" + node_line("n1"), OF_22_05)
    assert [each.field for each in node.unknown] == ([key] if key else [])
    assert (node.name, other.name, other.unknown) == ("n0", "n1", ())


def test_a_memory_that_is_no_number_concerns_its_node() -> None:
    node, other = parse_nodes(
        node_line("n0").replace("MemSpecLimit=1000", "MemSpecLimit=all") + "\n" + node_line("n1"), OF_22_05
    )
    assert (node.unknown, other.unknown) == ((Unknown("MemSpecLimit", "all"),), ())


def test_a_partition_of_many_lines_is_read_as_one() -> None:
    text = "PartitionName=p AllowGroups=a\nb State=DOWN Default=NO MaxTime=UNLIMITED Nodes=n0 State=UP\n"
    other = "PartitionName=q Default=NO MaxTime=UNLIMITED Nodes=n1 State=UP\n"
    odd, good = parse_partitions(text + other)
    assert (odd.up, [each.field for each in odd.unknown], odd.nodes) == (False, ["State"], ("n0",))
    assert (good.name, good.up, good.unknown) == ("q", True, ())


@pytest.mark.parametrize(
    "name",
    [
        "r State=INACTIVE",
        "r Nodes=(null)",
        "r StartTime=9999999999",
        "r\nReservationName=q StartTime=1 EndTime=2",
        "r\nNodes=(null) State=INACTIVE",
        "r Nodes=[[",
    ],
)
def test_nodes_of_a_reservation_that_cannot_be_read_are_not_taken_for_free(name: str) -> None:
    """Whatever its name is; and every other reservation is read as before."""
    maintenance, active = RESERVATIONS.splitlines()
    found = parse_reservations(active.replace("=res1", f"={name}", 1) + "\n" + maintenance + "\n")
    odd = [each for each in found if {"rtx-00", "rtx-01"} <= set(each.nodes)]
    assert odd
    assert all(each.unknown for each in odd)
    assert parse_reservations(maintenance)[0] in found


def test_a_name_of_a_reservation_may_have_spaces() -> None:
    (found,) = parse_reservations(RESERVATIONS.splitlines()[1].replace("=res1", "=a b\u2028c", 1))
    assert (found.name, found.unknown, found.active) == ("a b\u2028c", (), True)


def test_a_reservation_without_a_readable_time_or_state_keeps_its_nodes() -> None:
    line = RESERVATIONS.splitlines()[0]
    for was, becomes in (
        ("State=INACTIVE", "State=ODD"),
        ("StartTime=1795256623", "StartTime=soon"),
        ("Nodes=t4-00", "Nodes=t4-0["),
    ):
        odd, good = parse_reservations(line.replace(was, becomes) + "\n" + line)
        assert [each.field for each in odd.unknown] == [was.split("=")[0]]
        assert good.unknown == ()


def test_a_switch_that_cannot_be_read_concerns_its_nodes() -> None:
    lost: list[str] = []
    text = "SwitchName=a Level=0 LinkSpeed=1 Nodes=n[0-\nSwitchName=b Level=0 LinkSpeed=1 Nodes=n1\n"
    assert parse_switches(text, lost) == {"n1": "b"}
    assert len(lost) == 1


# --- the GPUs of a job: its name stands in the same line


GENUINE = " JOB_GRES=gpu:a100:1 Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:2) MinCPUsNode=1 Command=/x"


@pytest.mark.parametrize("name", ["x JOB_GRES=gpu:a100:0", "x\tJOB_GRES=gpu:a100:8", "x JOB_GRES=gpu:a:b:c"])
def test_a_name_that_looks_like_gpus_is_none(name: str) -> None:
    assert parse_gpus_held(f"JobId=1 JobName={name}{GENUINE}") is None
    assert parse_gpus_held(f"JobId=1 JobName=x{GENUINE}") == 1


def test_a_name_that_looks_like_the_record_of_a_node_tells_nothing_of_it() -> None:
    with pytest.raises(ValueError, match="two records of node n0"):
        parse_gpu_ids(f"JobId=1 JobName=x Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:7){GENUINE}")
    assert parse_gpu_ids(f"JobId=1 JobName=x{GENUINE}") == {"n0": (2,)}


@pytest.mark.parametrize(
    "nodes", ["a[0-99999][0-99999]", "a[0-999999999999]", ",".join(["a[0-9999]"] * 100), "a[[", "["]
)
@pytest.mark.parametrize("index", ["0", "0-99999999999", ",".join(["0-9999"] * 100)])
def test_a_name_with_a_very_long_list_costs_nothing(nodes: str, index: str) -> None:
    """A list of 10^10 names or numbers would fill penstockd's memory."""
    with pytest.raises(ValueError, match="is not a host list"):
        parse_gpu_ids(f"JobId=1 JobName=x Nodes={nodes} CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:{index}){GENUINE}")
    with pytest.raises(ValueError, match="is not a host list"):
        expand(nodes)


# --- accounts

LIMITED = "8|victim|root|||gres/gpu=16|8"


@pytest.mark.parametrize(
    "name",
    [
        "a|b",
        "a\nb",
        "victim|root|||gres/gpu=0|7\n7|x",
        "x\n9|victim|root|||gres/gpu=0|9\ny",
        "x\n9|victim|root|||gres/gpu=0|9\n7|y",
        "victim|root|||gres/gpu=0|7\n9|y",
        "|\n|",
        "\n",
        "7\n|7",
        *(f"a{newline}victim" for newline in NEWLINES),
    ],
)
def test_an_accounts_name_forges_no_limit_of_another_account(name: str) -> None:
    """A coordinator chooses the name and can know its number, 7. Slurm prints it as it is."""
    lost: list[str] = []
    text = f"1|root||||gres/gpu=64|1\n7|{name}|root|||gres/gpu=1|7\n{LIMITED}\n"
    limits = [each for each in parse_associations(text, lost) if each.accounts[0] not in ("root", name.strip())]
    assert limits == [SlurmLimit(16, accounts=("victim",))]
    assert lost or not ({"|", "\n"} & set(name))
    shares = f"7|{name}|x|0.5|7\n8|victim|y|0.25|8\n"
    assert parse_fair_shares(shares, [])["victim", "y"] == 0.25


def test_a_name_with_the_number_of_another_account_hides_at_most_both() -> None:
    """Slurm enforces what Penstock does not know of, and `doctor` shows what could not be read."""
    lost: list[str] = []
    text = f"1|root||||gres/gpu=64|1\n7|victim|root|||gres/gpu=0|7\n8|x|root||||7\n{LIMITED}\n9|other|root|||gres/gpu=4|9\n"
    found = {each.accounts[0]: each.gpus for each in parse_associations(text, lost)}
    assert found == {"root": 64, "other": 4}
    assert "victim" in "".join(lost)


def test_accounts_that_name_each_other_as_parents_are_read() -> None:
    text = "1|a|b|||gres/gpu=1|1\n2|b|a|||gres/gpu=2|2\n3|c|c|||gres/gpu=3|3\n"
    assert [set(each.accounts) for each in parse_associations(text, [])] == [{"a", "b"}, {"a", "b"}, {"c"}]


@pytest.mark.parametrize("value", ["x", "nan(", "1.0.0", "\u00b2"])
def test_a_value_that_is_no_number_concerns_its_line(value: str) -> None:
    lost: list[str] = []
    assert parse_fair_shares(f"1|a|x|{value}|1\n2|a|y|0.5|2\n", lost) == {("a", "y"): 0.5}
    assert [each.job_id for each in parse_runs(f"7|{value}|9|n0|\n8|1|9|n[0-|\n9|1|2|n0|\n", lost)] == ["9"]
    assert parse_qos("1|q|gres/gpu=1|||1\nx\n", lost) == (SlurmLimit(1, qos="q"),)
    assert len(lost) >= 3


# --- messages


def test_a_message_in_no_table_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    messages = Messages()
    for job in range(1, 6):
        error = messages.error(
            f"slurm_x error: the moon is full for job {job}", command="scontrol update", job_id=str(job)
        )
        assert type(error) is Refused
    assert dict(messages.unknown) == {"slurm_x error: the moon is full for job n": 5}
    assert [record.getMessage() for record in caplog.records] == ["a message of Slurm's is not known"]
    for at in range(1000):
        messages.error(f"message {'x' * at}", command="scontrol")
    assert len(messages.unknown) <= 100
    assert Messages().unknown == {}, "another gateway has had none of them"


@pytest.mark.parametrize(
    "text", ["Job 625_389 not found", "Job 7 not found", "squeue: error: Invalid job id: 99999999999"]
)
def test_a_job_that_is_not_found_is_gone(text: str) -> None:
    assert type(Messages().error(text, command="scontrol show job")) is JobGone


@pytest.mark.parametrize(
    "text", ["sh: 1: exec: scontrol: not found", "scontrol: command not found", "User not found on host"]
)
def test_a_command_that_is_not_found_is_no_job_that_is_gone(text: str) -> None:
    assert type(Messages().error(text, command="scontrol show job")) is not JobGone
