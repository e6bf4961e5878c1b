"""Nothing that a user or an admin writes into Slurm confuses the reading of it, and a job that is gone does not stay.

The first half gives the parsers answers as Slurm prints them. The second half is a real Slurm with a penstockd: a fuzz test,
whose values come from seeds, and a walk through all lives of an array. Each attack lists its bystanders, which must be read,
planned and left as before.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
from collections.abc import Callable, Iterator

import pytest

from penstock_scheduler.client import Client
from penstock_slurm.gateway import CliGateway, JobGone, SlurmJob, Unknown, open_gateway
from penstock_slurm.gateway.accounts import parse_associations, parse_fair_shares, parse_qos, parse_runs
from penstock_slurm.gateway.base import SlurmLimit
from penstock_slurm.gateway.errors import Refused, error_from, unknown_messages
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
from penstock_slurm.loopback import LoopbackCluster, wait_for
from penstock_slurm.loopback.fixtures import MakeLoopback
from tests.end_to_end.conftest import make_site
from tests.end_to_end.site import Site
from tests.slurm_plugin.gateway.test_parse import HELD, MARKS, NODE, OF_22_05, RESERVATIONS, RUNNING, answer

__all__ = ["make_site"]

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
    unknown_messages.clear()
    for job in range(1, 6):
        error = error_from(f"slurm_x error: the moon is full for job {job}", command="scontrol update", job_id=str(job))
        assert type(error) is Refused
    assert dict(unknown_messages) == {"slurm_x error: the moon is full for job n": 5}
    assert [record.getMessage() for record in caplog.records] == ["a message of Slurm's is not known"]
    for at in range(1000):
        error_from(f"message {'x' * at}", command="scontrol")
    assert len(unknown_messages) <= 100
    unknown_messages.clear()


@pytest.mark.parametrize(
    "text", ["Job 625_389 not found", "Job 7 not found", "squeue: error: Invalid job id: 99999999999"]
)
def test_a_job_that_is_not_found_is_gone(text: str) -> None:
    assert type(error_from(text, command="scontrol show job")) is JobGone


@pytest.mark.parametrize(
    "text", ["sh: 1: exec: scontrol: not found", "scontrol: command not found", "User not found on host"]
)
def test_a_command_that_is_not_found_is_no_job_that_is_gone(text: str) -> None:
    assert type(error_from(text, command="scontrol show job")) is not JobGone


# --- a real Slurm

WORDS = (
    *(
        "end",
        "record",
        "~",
        "|",
        ",",
        ":",
        "%",
        "%j",
        "=",
        "\\",
        '"',
        "'",
        "(null)",
        "N/A",
        "None",
        "[0-9]",
        "[[",
        "t4-01",
    ),
    *(
        "NodeName=t4-01 ",
        "ReservationName=x ",
        "PartitionName=all ",
        "JobId=1 ",
        "State=DOWN ",
        "State=IDLE ",
        "Nodes=ALL ",
    ),
    *(
        "Nodes=t4-00 CPU_IDs=0 Mem=0 GRES=gpu:t4:4(IDX:0-3) ",
        "JOB_GRES=gpu:t4:4 ",
        "Gres=gpu:t4:64 ",
        "UserId=root(0) ",
    ),
    *(" ", "\t", *NEWLINES, "\x1b[31m", "\u202e", "\ufffd", "\U0001f4a5", '{"penstock":', "}", "\x7f"),
    *JOB_FIELDS,
)


def values(seed: int, count: int) -> Iterator[bytes]:
    """Hostile values, the same for the same seed: words of the formats, separators, random bytes, empty and very long ones."""
    draw = random.Random(seed)
    for _ in range(count):
        pieces = []
        for _ in range(draw.randint(0, 6)):
            kind = draw.random()
            if kind < 0.7:
                pieces.append(draw.choice(WORDS).encode())
            elif kind < 0.95:
                pieces.append(bytes(draw.randint(1, 255) for _ in range(draw.randint(1, 12))))
            else:
                pieces.append(draw.choice((b"x" * 1000, b"\xff" * 900, b"y" * 10_000)))
        yield b"".join(pieces)


OPTIONS = (
    *("job-name", "comment", "wckey", "account", "reservation", "qos", "mail-user", "constraint", "licenses", "gres"),
    *("partition", "dependency", "nodelist", "mcs-label", "deadline"),
)
"""sbatch's options that take text."""


class Attacker:
    """Writes values into all fields of jobs and nodes that Slurm lets somebody write."""

    def __init__(self, slurm: LoopbackCluster) -> None:
        self._slurm = slurm
        self.names: dict[str, str] = {}
        """Job -> the name that it was given."""
        self.accepted: dict[str, int] = {}
        """Field -> how many values Slurm has taken."""

    def run(self, *words: str | bytes) -> str | None:
        """The output of a command of Slurm; None: Slurm has refused it."""
        program, *arguments = (word if isinstance(word, bytes) else word.encode() for word in words)
        done = subprocess.run(
            [program, *arguments],
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **self._slurm.environment()},
            cwd=self._slurm.folder,
            check=False,
            capture_output=True,
            timeout=120,
        )
        return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None

    def take(self, field: str, *words: str | bytes) -> str | None:
        """Run a command that writes into a field."""
        found = self.run(*words)
        self.accepted[field] = self.accepted.get(field, 0) + (found is not None)
        return found

    def submits(self, seed: int) -> None:
        """One job for each of sbatch's options that take text, some of which run."""
        for option, value in zip(OPTIONS, values(seed, len(OPTIONS)), strict=True):
            held = [b"--hold"] if seed % 3 else [b"--nodelist=t4-00"]
            end = [b"--output=/dev/null", b"--wrap=sleep 600"]
            job = self.take(option, b"sbatch", b"--parsable", *held, b"--" + option.encode() + b"=" + value, *end)
            if job is not None and option == "job-name" and value:
                self.names[job.split(";")[0]] = value.decode(errors="replace")

    def edits(self, seed: int) -> None:
        """An admin writes texts about a node, names a reservation and a partition."""
        node, *others = values(seed + 1_000_000, 7)
        for key, value in zip(("Comment", "Extra", "Reason"), (node, *others), strict=False):
            self.take(key, b"scontrol", b"update", b"NodeName=t4-00", key.encode() + b"=" + value)
        for key in ("AvailableFeatures", "ActiveFeatures"):
            self.take(key, b"scontrol", b"update", b"NodeName=t4-00", key.encode() + b"=" + others[2])
        where = (b"StartTime=now+1hour", b"Duration=60", b"Users=root", b"Nodes=t4-00", b"Flags=IGNORE_JOBS,OVERLAP")
        self.take("ReservationName", b"scontrol", b"create", b"reservation", b"ReservationName=" + others[3], *where)
        self.take("PartitionName", b"scontrol", b"create", b"PartitionName=" + others[4], b"Nodes=t4-00")
        for job in list(self.names)[-2:]:
            self.take("AdminComment", b"scontrol", b"update", b"JobId=" + job.encode(), b"AdminComment=" + others[5])


def shown(job: SlurmJob) -> SlurmJob:
    """A job without what changes while nothing happens to it."""
    return dataclasses.replace(
        job, priority=min(job.priority, 1), reason="", suspended_s=0.0, start_s=None, end_s=None, eligible_s=None
    )


def live(client: Client) -> dict[str, str]:
    """Penstock's jobs that have not ended -> their states."""
    return {job.id: job.state for job in client.jobs() if job.state != "ended"}


SPEC = '--comment={"penstock": {"max_gpus": 1, "preemptible": false}}'
OURS = ("--hold", "--requeue", "--gres=gpu:1", "--output=/dev/null", SPEC)


@pytest.mark.slurm
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 300), marks=pytest.mark.long)], ids=["few", "many"])
def test_no_text_in_any_field_stops_a_round_or_changes_another_job(
    make_loopback: MakeLoopback, make_site: Callable[..., Site], seeds: range
) -> None:
    """Bystanders: a job that runs, one that waits, a plain job, and the node on which the first runs."""
    site = make_site(make_loopback("t4:2x4"))
    site.start()
    attacker = Attacker(site.slurm)
    plain = site.sbatch(
        "--nodelist=t4-01", "--gres=gpu:1", "--job-name=plain", "--output=/dev/null", "--wrap=sleep 3600"
    )
    runs = site.sbatch(*OURS, "--job-name=runs", "--wrap=sleep 3600")
    site.wait_states("RUNNING", plain, runs)
    waits = site.sbatch(*OURS, "--job-name=waits", f"--dependency=afterany:{runs}", "--wrap=sleep 3600")
    bystanders = {plain, runs, waits}

    def seen() -> dict[str, SlurmJob]:
        return {job.id: shown(job) for job in site.gateway.jobs() if job.id in bystanders}

    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: set(live(penstock)) == {runs, waits}, 120, "both jobs to be seen", details=site.tail)
        before, ours = seen(), live(penstock)
        for seed in seeds:
            attacker.submits(seed)
            attacker.edits(seed)
            jobs = {job.id: job for job in site.gateway.jobs(finished=True)}
            assert {job_id: jobs[job_id].name for job_id in attacker.names} == attacker.names
            assert all(not job.unknown for job in jobs.values())
            assert seen() == before, f"seed {seed}"
            nodes = {node.name: node for node in site.gateway.nodes()}
            assert nodes["t4-01"].gpus == {"t4": 4}
            assert nodes["t4-00"].gpus == {"t4": 4} or nodes["t4-00"].unknown, "an admin has written about it"
            site.gateway.partitions(), site.gateway.reservations()
            number = penstock.cluster().round or 0
            rounds = lambda number=number: (penstock.cluster().round or 0) > number + 1  # noqa: E731
            wait_for(rounds, 120, f"rounds to go on with seed {seed}", details=site.tail)
            assert penstock.ready().status == "ok", site.tail()
            assert live(penstock) == ours, f"seed {seed}"
            for job in [*attacker.names, *(set(jobs) - bystanders - set(attacker.names))]:
                attacker.run("scancel", job)
            attacker.names.clear()
        assert site.job(runs).restarts == 0
        assert attacker.accepted["job-name"] >= len(seeds) - 1
        assert attacker.accepted["comment"] >= len(seeds) - 1
        assert attacker.accepted["Comment"] >= len(seeds) - 1


@pytest.mark.slurm
def test_a_plain_job_whose_name_begins_with_a_word_of_the_format_stops_no_round(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """`sbatch -J end2end-train`: the case of the issue."""
    site = make_site(make_loopback("t4:1x4"))
    site.start()
    ours = site.sbatch(*OURS, "--wrap=sleep 3600")
    for option in ("--job-name", "--comment", "--account", "--wckey"):
        site.sbatch(f"{option}=end2end-train", "--output=/dev/null", "--wrap=true")
    site.wait_states("RUNNING", ours)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        number = penstock.cluster().round or 0
        wait_for(lambda: (penstock.cluster().round or 0) > number + 2, 120, "rounds to go on", details=site.tail)
        assert penstock.ready().status == "ok"
        assert live(penstock) == {ours: "running"}


@pytest.fixture
def array_site(make_loopback: MakeLoopback, make_site: Callable[..., Site]) -> Site:
    site = make_site(make_loopback("t4:2x4"))
    site.start()
    return site


Cancel = Callable[[Site, dict[str, int]], set[str]]
"""Cancels arrays, of which it gets the last elements. Returns the elements that it leaves."""


def by_user(site: Site, arrays: dict[str, int]) -> set[str]:
    del arrays
    site.slurm.command("scancel", "--user=root", "--name=theirs")
    return set()


def by_id(site: Site, arrays: dict[str, int]) -> set[str]:
    site.slurm.command("scancel", *arrays)
    return set()


def by_element(site: Site, arrays: dict[str, int]) -> set[str]:
    site.slurm.command("scancel", *(f"{array}_{at}" for array, last in arrays.items() for at in range(last)))
    return {f"{array}_{last}" for array, last in arrays.items()}


def by_range(site: Site, arrays: dict[str, int]) -> set[str]:
    site.slurm.command("scancel", *(f"{array}_[0-{last - 1}]" for array, last in arrays.items()))
    return {f"{array}_{last}" for array, last in arrays.items()}


@pytest.mark.slurm
@pytest.mark.parametrize("cancel", [by_user, by_id, by_element, by_range])
def test_an_array_that_is_cancelled_in_any_of_its_lives_leaves_no_phantom(array_site: Site, cancel: Cancel) -> None:
    """Elements that wait, run, have ended, are throttled, held and requeued. Another job, and what is not cancelled, stays.

    Of an element that never started nothing is left in Slurm, while its array is still known.
    """
    site = array_site
    other = site.sbatch(*OURS, "--wrap=sleep 3600")
    theirs = (*OURS, "--job-name=theirs")
    ended = site.sbatch(*theirs, "--array=0-3", "--wrap=[ $SLURM_ARRAY_TASK_ID -gt 1 ] || exit 0; sleep 3600")
    throttled = site.sbatch(*theirs, "--array=0-2%1", "--wrap=sleep 3600")
    held = site.sbatch(*theirs, "--array=0-3", "--wrap=sleep 3600")
    site.slurm.command("scontrol", "hold", held)
    waiting = site.sbatch(*theirs, "--array=0-29", "--wrap=sleep 3600")
    arrays = {ended: 3, throttled: 2, held: 3, waiting: 29}
    elements = [f"{waiting}_{at}" for at in range(30)]
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        wait_for(lambda: set(elements) <= live(penstock).keys(), 120, "the elements", details=site.tail)
        site.wait_states("RUNNING", other, f"{ended}_2", f"{ended}_3")
        wait_for(lambda: f"{ended}_0" not in live(penstock), 120, "an element to end", details=site.tail)
        wait_for(lambda: "RUNNING" in site.states(*elements).values(), 120, "one to run", details=site.tail)
        site.slurm.command("scontrol", "requeue", f"{ended}_2")
        stay = {other} | cancel(site, arrays)
        wait_for(lambda: {job.id for job in site.gateway.jobs()} == stay, 120, "Slurm to have cancelled them")
        # The wait is for a busy machine: a phantom stays for ever.
        wait_for(lambda: live(penstock).keys() == stay, 120, f"no phantom beside {stay}", details=site.tail)
        assert (live(penstock)[other], site.job(other).restarts) == ("running", 0)
        site.wait_states("RUNNING", *(site.sbatch(*OURS, "--wrap=sleep 3600") for _ in range(8 - len(stay))))
        assert penstock.ready().status == "ok"


@pytest.mark.slurm
def test_a_restart_of_slurmctld_makes_no_job_disappear(make_loopback: MakeLoopback) -> None:
    """No answer that it gives before, meanwhile or after lacks a job: what it cannot answer is an error."""
    slurm = make_loopback("t4:1x4")
    array = slurm.command("sbatch", "--parsable", "--hold", "--array=0-499", "--wrap=true").stdout.strip()
    gateway = open_gateway("cli", conf=slurm.slurm_conf, timeout_s=60)
    wanted = {f"{array}_{at}" for at in range(500)}
    assert {job.id for job in gateway.jobs()} == wanted
    slurm.stop_slurmctld()
    poll = subprocess.Popen(
        ["/bin/sh", "-c", "while :; do squeue -h -r -t all -o %i && echo; done 2>/dev/null"],
        env={"PATH": "/usr/bin:/bin", **slurm.environment()},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        slurm.start_slurmctld()
        assert {job.id for job in gateway.jobs()} == wanted
    finally:
        poll.kill()
        output, _ = poll.communicate()
    answers = [set(text.split()) for text in output.split("\n\n")[:-1]]
    assert all(found == wanted for found in answers if found), [len(found) for found in answers]
    assert all(answers)


@pytest.mark.slurm
def test_names_in_the_accounting_confuse_no_limit(make_loopback: MakeLoopback) -> None:
    """Real accounts and QOS with bars and newlines in their names."""
    slurm = make_loopback("t4:1x4", accounting=True, settings={"AccountingStorageEnforce": "limits"})
    slurm.command("sacctmgr", "-i", "add", "account", "victim")
    slurm.command("sacctmgr", "-i", "modify", "account", "victim", "set", "GrpTRES=gres/gpu=3")
    gateway = open_gateway("cli", conf=slurm.slurm_conf, timeout_s=60)
    assert isinstance(gateway, CliGateway)
    limit = SlurmLimit(3, accounts=("victim",))
    assert limit in gateway.limits("loop")
    assert gateway.unread() == ()
    taken = 0
    for name in ("a|b", "a\nb", "c d", "x\n99|victim|root|||gres/gpu=0|99\ny", "e\u2028f"):
        for kind in ("account", "qos"):
            done = slurm.command("sacctmgr", "-i", "add", kind, name, check=False)
            taken += done.returncode == 0
    assert taken
    assert limit in gateway.limits("loop")
    assert all(each.user == "" or each.accounts for each in gateway.limits("loop"))
    assert not [each for each in gateway.limits("loop") if each.gpus == 0]
    assert {each.kind for each in gateway.unread()} <= {"association", "QOS"}
    assert gateway.unread()
    assert gateway.fair_shares() is not None
    assert gateway.ends(["1"]) == {}
