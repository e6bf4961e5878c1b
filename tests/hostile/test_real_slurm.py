"""Nothing that a user or an admin writes into a real Slurm confuses penstockd, and a job that is gone does not stay.

A fuzz test, whose values come from seeds, and a walk through all lives of an array. Each attack lists its bystanders, which
must be read, planned and left as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import subprocess
from collections.abc import Callable, Iterator

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.model.nodespec import NodeSpec
from penstock_scheduler.store.sql import open_store
from penstock_slurm.gateway import CliGateway, SlurmJob
from penstock_slurm.gateway.base import SlurmLimit
from penstock_slurm.gateway.parse_jobs import JOB_FIELDS
from tests.end_to_end.conftest import make_site
from tests.end_to_end.site import Site
from tests.hostile.test_reading_slurm import NEWLINES

__all__ = ["make_site"]

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
@pytest.mark.parametrize(
    "cancel", [by_user, by_id, *(pytest.param(way, marks=pytest.mark.long) for way in (by_element, by_range))]
)
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
    gateway = CliGateway(conf=slurm.slurm_conf, timeout_s=60)
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
    gateway = CliGateway(conf=slurm.slurm_conf, timeout_s=60)
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


NAMED = (
    *(
        "end",
        "record",
        "NodeName",
        "None",
        "State=DOWN",
        "IDLE",
        "JobId=1",
        "a:b",
        "a+b",
        "a@b",
        "a.b",
        "0",
        "7",
        "1-2",
    ),
    *("-", "gpu:t4:4", "localhost", "x" * 28),
)
"""Names of nodes that are words of the formats, on which jobs can run."""

NOT_SENDABLE = (
    "(null)",
    "a%b",
    "a|b",
    "~",
    "a;b",
    "$a",
    "a*",
    "\u00e9",
    "a(b)",
    "'a'",
    "&",
    "a!",
    "x" * 200 + "?",
)
"""Names of nodes that scontrol's prompt cannot be told. (Slurm 24.11 puts no node with braces into a partition.)"""

TYPES = ("end", "record", "gpu", "null", "IDX", "4", "gres", "State", "x" * 60)
"""Types of GPUs, and so names of partitions, too."""


@pytest.mark.slurm
def test_names_of_nodes_partitions_and_types_that_are_words_of_the_format(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """Each node is read, with all of its GPUs, and gets a job; but no job is sent to one whose name cannot be sent."""
    kinds = itertools.cycle(TYPES)
    nodes = [NodeSpec(name, next(kinds), 2) for name in NAMED]
    lost = [NodeSpec(name, next(kinds), 2) for name in NOT_SENDABLE]
    slurm = make_loopback([*nodes, *lost])
    site = make_site(slurm)
    seen = {node.name: node for node in site.gateway.nodes()}
    assert {name: node.gpus for name, node in seen.items()} == {
        node.name: {node.gpu_type: 2} for node in (*nodes, *lost)
    }
    assert {name for name, node in seen.items() if node.unknown} == set(NOT_SENDABLE)
    assert {each.name for each in site.gateway.partitions()} == {*TYPES, "all"}
    in_partitions = {name: set(node.partitions) for name, node in seen.items()}
    assert in_partitions == {node.name: {"all", node.gpu_type} for node in (*nodes, *lost)}
    ours = (*OURS[:-1], SPEC.replace('"max_gpus": 1', '"min_gpus": 2, "max_gpus": 2'))
    jobs = [site.sbatch(*ours, "--wrap=sleep 3600") for _ in nodes]
    site.start()
    site.wait_states("RUNNING", *jobs)
    waits = site.sbatch(*ours, "--wrap=sleep 3600")
    site.wait_round(after=site.wait_round() + 1)
    running = [job for job in site.gateway.jobs() if job.state == "RUNNING"]
    assert sorted(name for job in running for name in job.nodes) == sorted(NAMED)
    assert site.states(waits) == {waits: "PENDING"}
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        assert penstock.ready().status == "ok"
        site.slurm.command("scancel", jobs[0])
        site.wait_states("RUNNING", waits)
    with contextlib.closing(open_store(site.store)) as store:
        assert not [each for each in store.outcomes() if each.progress.value == "failed"]


@pytest.mark.slurm
def test_names_of_qos_that_are_words_of_the_format_keep_their_limits(make_loopback: MakeLoopback) -> None:
    """Each with a limit of its own, read whole; a job of each is read with its QOS."""
    slurm = make_loopback("t4:1x4", accounting=True, settings={"AccountingStorageEnforce": "limits"})
    gateway = CliGateway(conf=slurm.slurm_conf, timeout_s=60)
    names = [name.lower() for name in (*NAMED, *(name for name in NOT_SENDABLE if name[0] not in "'$"))]
    taken = {}
    for gpus, name in enumerate(names, start=1):
        words = ("sacctmgr", "-i", "add", "qos", name, f"GrpTRES=gres/gpu={gpus}")
        if slurm.command(*words, check=False).returncode == 0:
            taken[name] = gpus
    assert len(taken) > len(names) // 2
    slurm.command("sacctmgr", "-i", "modify", "user", "root", "set", f"qos+={','.join(taken)}", check=False)
    limits = {limit.qos: limit.gpus for limit in gateway.limits("loop") if limit.qos}
    unread = [each.text for each in gateway.unread()]
    assert all(limits.get(name, gpus) == gpus for name, gpus in taken.items()), limits
    assert {name for name in taken if name not in limits} <= {name for name in taken if "|" in name}, unread
    assert limits.keys() <= taken.keys() | {"normal"}
    sent = {}
    for name in taken:
        done = slurm.command("sbatch", "--parsable", "--hold", f"--qos={name}", "--wrap=true", check=False)
        if done.returncode == 0:
            sent[done.stdout.strip()] = name
    assert {job.id: job.qos or "(null)" for job in gateway.jobs()} == sent, "Slurm prints (null) for no QOS"
    assert len(sent) > len(taken) // 2
