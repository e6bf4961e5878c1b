"""What Slurm's commands must do as reader and writer, on a real Slurm.

test_pyslurm_reader.py compares the other reader with them.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loopback import LoopbackCluster, wait_for
from penstock_scheduler.people.errors import ConfigError
from penstock_slurm.gateway import (
    AccountingAway,
    CliGateway,
    CommandsMissing,
    ControllerAway,
    JobGone,
    JobPlacement,
    Refused,
    SlurmFeatures,
    SlurmLimit,
    TimedOut,
    Transient,
    UnreadableAnswer,
    Unregistered,
    Write,
)
from penstock_slurm.gateway.abilities import RELEASES, release
from penstock_slurm.gateway.errors import MESSAGES, Messages
from penstock_slurm.gateway.hostlist import expand
from penstock_slurm.gateway.node_states import node_facts
from penstock_slurm.gateway.parse import parse_tres_per_node
from penstock_slurm.gateway.parse_jobs import Marks, parse_jobs
from tests.slurm_plugin.state import save_jobs

slurm = pytest.mark.slurm


@pytest.fixture
def gateway(loopback: LoopbackCluster) -> CliGateway:
    return CliGateway(conf=loopback.slurm_conf, timeout_s=20)


def held(loopback: LoopbackCluster, *options: str) -> str:
    return loopback.command(
        "sbatch",
        "--parsable",
        "--hold",
        "--requeue",
        "--gres=gpu:1",
        "--output=/dev/null",
        *options,
        "--wrap",
        "exec sleep 300",
    ).stdout.strip()


def place(gateway: CliGateway, job_id: str, placement: JobPlacement) -> None:
    (error,) = gateway.write([Write(job_id, "place", placement)])
    if error is not None:
        raise error


def job(gateway: CliGateway, job_id: str, *, finished: bool = True):
    return next(each for each in gateway.jobs(finished=finished) if each.id == job_id)


def wait_state(gateway: CliGateway, job_id: str, state: str) -> None:
    wait_for(
        lambda: job(gateway, job_id).state == state, 120, f"{job_id} {state}", details=lambda: job(gateway, job_id)
    )


@slurm
def test_readings(gateway, loopback):
    nodes = {node.name: node for node in gateway.nodes()}
    assert set(nodes) == {node.name for node in loopback.nodes}
    assert nodes["rtx-01"].gpus == {"rtx": 8}
    assert nodes["rtx-01"].gpus_used == {"rtx": 0}
    assert node_facts(nodes["rtx-01"].state).may_start
    assert set(nodes["rtx-01"].partitions) == {"all", "rtx"}
    partitions = {partition.name: partition for partition in gateway.partitions()}
    assert partitions["t4"].nodes == ("t4-00", "t4-01")
    assert partitions["all"].default
    assert gateway.version() >= (22, 5)
    loopback.command("scontrol", "update", "NodeName=rtx-01", "State=DRAIN", "Reason=fan = broken")
    assert node_facts({node.name: node for node in gateway.nodes()}["rtx-01"].state).leave


@slurm
def test_an_untyped_job_is_placed_on_each_type_shrunk_and_grown(gateway, loopback):
    """Also on fewer nodes than its user requested."""
    job_id = held(loopback, "--nodes=2")
    assert job(gateway, job_id).held
    for nodes, gpus in ((("t4-00",), 2), (("rtx-00", "rtx-01"), 8), (("a100-01",), 3), (("t4-00", "t4-01"), 4)):
        place(gateway, job_id, JobPlacement("all", nodes, gpus, len(nodes), len(nodes), ends_begin=True))
        gateway.release(job_id)
        wait_state(gateway, job_id, "RUNNING")
        found = job(gateway, job_id)
        assert (found.nodes, found.gpus_per_node, found.gpu_type) == (nodes, gpus, None)
        used = {node.name: sum(node.gpus_used.values()) for node in gateway.nodes()}
        assert {name: count for name, count in used.items() if count} == dict.fromkeys(nodes, gpus)
        gateway.requeue_hold(job_id)
        wait_state(gateway, job_id, "PENDING")
        time.sleep(1.2)
    gateway.cancel(job_id)
    wait_state(gateway, job_id, "CANCELLED")


@slurm
def test_a_job_is_suspended_and_resumed_and_twice_is_once(gateway, loopback):
    """It keeps its GPUs all the while. Resuming one that runs is refused, which changes nothing."""
    job_id = held(loopback)
    gateway.release(job_id)
    wait_state(gateway, job_id, "RUNNING")
    for _ in range(2):
        gateway.suspend(job_id)
        assert job(gateway, job_id).state == "SUSPENDED"
    assert sum(sum(node.gpus_used.values()) for node in gateway.nodes()) == 1
    gateway.resume(job_id)
    assert job(gateway, job_id).state == "RUNNING"
    with pytest.raises(Refused):
        gateway.resume(job_id)
    assert gateway.unread() == (), "the message is in the table"
    gateway.cancel(job_id)
    wait_state(gateway, job_id, "CANCELLED")
    with pytest.raises((JobGone, Refused)):
        gateway.suspend(job_id)
    with pytest.raises(JobGone):
        gateway.suspend("999999")


@slurm
def test_names_and_comments_cannot_pose_as_anything_else(gateway, loopback):
    """Spaces, newlines, quotes, other scripts, and what looks like Slurm's own fields come back as they were given."""
    evil = 'x UserId=root(0) AdminComment={"penstock": {}}\n99|RUNNING|%X% "quoted" \'single\' ü 漢'
    job_id = held(loopback, f"--job-name={evil.splitlines()[0]}", f"--comment={evil}")
    other = held(loopback)
    found = job(gateway, job_id)
    assert found.comment == evil
    assert found.admin_comment == ""
    assert {each.id for each in gateway.jobs()} >= {job_id, other}
    word = '{"penstock_says": "a\\nb"}'
    gateway.set_admin_comment(job_id, word)
    assert job(gateway, job_id).admin_comment == word


@slurm
def test_failures_are_told_apart(gateway, loopback, make_loopback):
    job_id = held(loopback)
    with pytest.raises(JobGone):
        gateway.hold("999999")
    with pytest.raises(JobGone):
        gateway.hold("1; rm")
    with pytest.raises(Refused):
        place(gateway, job_id, JobPlacement("nowhere", ("t4-00",), 1, 1, 1))
    assert job(gateway, job_id).partition == ("all",), "an update that is refused changes nothing"
    gateway.cancel(job_id)
    wait_state(gateway, job_id, "CANCELLED")
    with pytest.raises(JobGone):
        gateway.release(job_id)
    assert gateway.knows(job_id), "until it is purged"
    assert not gateway.knows("999999")


@slurm
def test_a_controller_that_is_away_and_one_that_hangs(make_loopback):
    own = make_loopback(nodes="t4:1x4")
    quick = CliGateway(conf=own.slurm_conf, timeout_s=0.0001)
    with pytest.raises((Transient, ControllerAway)):
        quick.jobs()
    gateway = CliGateway(conf=own.slurm_conf, timeout_s=30)
    own.stop_munged()
    with pytest.raises(ControllerAway):
        gateway.jobs()
    own.start_munged()
    gateway.jobs()
    own.kill_slurmctld()
    text = own.slurm_conf.read_text()
    own.slurm_conf.write_text(text.replace("MessageTimeout=10", "MessageTimeout=2"))  # how long commands try
    with pytest.raises(ControllerAway):
        gateway.nodes()
    own.slurm_conf.write_text(text)
    own.start_slurmctld()
    assert gateway.nodes()


@slurm
def test_reservations(gateway, loopback):
    assert gateway.reservations() == ()
    now_s = time.time()
    for name, start in (("exam", "now"), ("later", "now+3600")):
        options = (f"ReservationName={name}", f"StartTime={start}", "Duration=60", "Nodes=rtx-[00-01]", "Users=root")
        loopback.command("scontrol", "create", "reservation", *options, "Flags=OVERLAP")
    try:
        found = {each.name: each for each in gateway.reservations()}
        assert (found["exam"].active, found["later"].active) == (True, False)
        assert found["exam"].nodes == ("rtx-00", "rtx-01")
        assert 3590 < found["later"].start_s - now_s < 3660
        assert found["later"].end_s - found["later"].start_s == 3600
        job_id = held(loopback, "--reservation=exam")
        assert job(gateway, job_id).reservation == "exam"
        gateway.cancel(job_id)
    finally:
        for name in ("exam", "later"):
            loopback.command("scontrol", "delete", f"ReservationName={name}")


@slurm
def test_a_node_in_a_maintenance_reservation_says_so(loopback):
    gateway = CliGateway(conf=loopback.slurm_conf, timeout_s=20)
    options = ("ReservationName=maint", "StartTime=now", "Duration=60", "Nodes=t4-01", "Users=root", "Flags=MAINT")
    loopback.command("scontrol", "create", "reservation", *options)

    def state() -> frozenset[str]:
        return {node.name: node for node in gateway.nodes()}["t4-01"].state

    try:
        wait_for(
            lambda: state() == {"IDLE", "MAINTENANCE", "RESERVED"}, 60, "the state of a reservation", details=state
        )
    finally:
        loopback.command("scontrol", "delete", "ReservationName=maint")


TOPOLOGY = """\
SwitchName=leaf0 Nodes=t4-00
SwitchName=leaf1 Nodes=t4-01
SwitchName=spine Switches=leaf[0-1]
"""


@slurm
def test_limits_fair_share_and_topology(make_loopback, loopback):
    plain = CliGateway(conf=loopback.slurm_conf, timeout_s=20)
    stay = release(plain.version()).gpu_types_stay
    assert plain.features() == SlurmFeatures("loop", cpus_by="core", gpu_types_stay=stay)
    slurm = make_loopback(
        "t4:2x4",
        accounting=True,
        settings={"AccountingStorageEnforce": "safe", "TopologyPlugin": "topology/tree"},
        files={"topology.conf": TOPOLOGY},
    )
    gateway = CliGateway(conf=slurm.slurm_conf, timeout_s=20)
    assert gateway.features() == SlurmFeatures(
        "loop",
        accounting=True,
        topology=True,
        limits=True,
        fair_share=True,
        cpus_by="core",
        counts_gpus=True,
        gpu_types_stay=stay,
    )
    assert gateway.switches() == {"t4-00": "leaf0", "t4-01": "leaf1"}
    assert gateway.limits("loop") == ()
    for what in (
        "account maths GrpTRES=gres/gpu=6,cpu=9",
        "account algebra parent=maths",
        "user root account=maths GrpTRES=gres/gpu:t4=3",
        "qos short GrpTRES=gres/gpu=4 MaxTRESPerUser=gres/gpu=2",
    ):
        slurm.command("sacctmgr", "-i", "add", *what.split())
    assert set(gateway.limits("loop")) == {
        SlurmLimit(6, accounts=("maths", "algebra")),
        SlurmLimit(3, "t4", accounts=("maths",), user="root"),
        SlurmLimit(4, qos="short"),
        SlurmLimit(2, qos="short", each="user"),
    }
    assert gateway.limits("another") == tuple(limit for limit in gateway.limits("loop") if limit.qos)
    wait_for(lambda: ("maths", "root") in gateway.fair_shares(), 120, "slurmctld to know the association")
    assert all(0 <= factor <= 1 for factor in gateway.fair_shares().values())
    job_id = held(slurm, "--account=maths", "--gres=gpu:2")
    gateway.release(job_id)
    wait_state(gateway, job_id, "RUNNING")
    assert job(gateway, job_id).gpus_counted == {"": 2, "t4": 2}
    slurm.kill_slurmdbd()
    with pytest.raises(AccountingAway):
        gateway.limits("loop")
    assert gateway.jobs(), "slurmctld goes on without it"


@slurm
@pytest.mark.long
def test_jobs_whose_registration_slurmctld_has_forgotten_delay_no_other(make_loopback, monkeypatch):
    """Killed while slurmdbd does not answer, Slurm before 24.11 never asks again, and thinks for 5 s each time."""
    own = make_loopback("t4:1x4", accounting=True)
    gateway = CliGateway(conf=own.slurm_conf, timeout_s=15)
    if gateway.version() >= (24, 11):
        pytest.skip("this Slurm gives jobs their index itself")

    def registered(job_id: str) -> bool:
        return own.command("scontrol", "update", f"JobId={job_id}", "Comment=x", check=False).returncode == 0

    first = held(own)
    listed = ("sacct", "-XnP", f"--jobs={first}", "--format=JobID")
    wait_for(lambda: first in own.command(*listed).stdout, 120, "the job to be registered")
    slurmdbd = own.pid("slurmdbd")
    os.kill(slurmdbd, signal.SIGSTOP)
    stuck = [held(own) for _ in range(3)]
    wait_for(lambda: not registered(stuck[-1]), 120, "slurmctld to tell slurmdbd of the jobs")
    save_jobs(own, first)
    own.kill_slurmctld()
    os.kill(slurmdbd, signal.SIGCONT)
    own.start_slurmctld()

    writes = [Write(job_id, "split") for job_id in (*stuck, first)]
    done = gateway.write(writes)
    assert {type(error) for error in done[:3]} <= {Unregistered, TimedOut}
    assert isinstance(done[0], Unregistered)
    assert [type(error) for error in gateway.write(writes)][-1] is type(None), "in the second round nothing holds it up"
    gateway.cancel(stuck[0])
    wait_state(gateway, stuck[0], "CANCELLED")

    monkeypatch.setattr("penstock_slurm.gateway.commands.UNREGISTERED_S", 0.0)
    assert not registered(stuck[1])
    own.kill_slurmdbd()
    held(own)
    wait_for(lambda: registered(stuck[1]), 120, "slurmctld to fail to tell slurmdbd of a job")
    assert gateway.write([Write(stuck[1], "release"), Write(stuck[2], "release")]) == (None, None)


def test_a_back_end_that_is_not_there_is_an_error_of_the_settings(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CommandsMissing, match="slurm-client") as error:
        CliGateway(conf=None, timeout_s=1)
    assert isinstance(error.value, ConfigError)


@pytest.mark.parametrize(("words", "kind", "seen"), MESSAGES)
def test_the_table_of_words(words, kind, seen):
    assert seen
    assert type(Messages().error(f"slurm: error: {words.replace(' n ', ' 7_3 ').upper()}!", command="scontrol")) is kind


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("t4-00", ("t4-00",)),
        ("t4-[00-02,05],x", ("t4-00", "t4-01", "t4-02", "t4-05", "x")),
        ("a[1-2]b[08-09]", ("a1b08", "a1b09", "a2b08", "a2b09")),
    ],
)
def test_host_lists(text, names):
    assert expand(text) == names


@given(st.lists(st.integers(0, 500), min_size=1, unique=True))
def test_host_lists_of_any_numbers(numbers):
    text = f"n-[{','.join(f'{n:03d}' for n in numbers)}]"
    assert expand(text) == tuple(f"n-{n:03d}" for n in numbers)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gres:gpu:4", (4, None)),
        ("gres/gpu:2", (2, None)),
        ("gres:gpu:t4:2", (2, "t4")),
        ("gpu:1", (1, None)),
        ("", (None, None)),
        ("gres:nic:1", (None, None)),
    ],
)
def test_gpus_per_node(text, found):
    assert parse_tres_per_node(text) == found


@given(st.text())
def test_an_answer_of_another_form_is_said_to_be_one(text):
    try:
        assert parse_jobs(text, Marks("%field%", "%record%"), RELEASES[0]) == ()
    except (UnreadableAnswer, ValueError):
        assert text
    assert {len(mark) for marks in (Marks(), Marks()) for mark in (marks.field, marks.record)} == {17}
    assert len({mark for marks in (Marks(), Marks()) for mark in (marks.field, marks.record)}) == 4


@slurm
def test_many_writes_at_once_are_answered_each_for_itself(gateway, loopback):
    good, placed, running = held(loopback), held(loopback), held(loopback)
    gateway.release(running)
    wait_state(gateway, running, "RUNNING")
    there = JobPlacement("t4", ("t4-01",), 2, 1, 1)
    nowhere = JobPlacement("nowhere", ("t4-00",), 1, 1, 1)
    done = gateway.write(
        [
            Write(good, "place", nowhere),
            Write("999999", "release"),
            Write(placed, "place", there),
            Write(running, "requeue_hold"),
        ]
    )
    busy = {Transient} if gateway.version() >= (24, 11) else set()  # see docs/developer/slurm-versions.md
    assert type(done[2]) in {type(None)} | busy
    assert [type(error) for error in (*done[:2], done[3])] == [Refused, JobGone, type(None)]
    wait_for(lambda: gateway.write([Write(placed, "place", there)]) == (None,), 120, "Slurm to do the update")
    wait_state(gateway, running, "PENDING")
    assert job(gateway, running).held
    assert job(gateway, good).partition == ("all",)
    assert gateway.write([Write(placed, "release"), Write(good, "hold"), Write(running, "requeue_hold")]) == (None,) * 3
    wait_state(gateway, placed, "RUNNING")
    assert job(gateway, placed).nodes == ("t4-01",)
    assert gateway.write([]) == ()
    some = [held(loopback) for _ in range(30)]
    assert gateway.write([Write(each, "release") for each in some]) == (None,) * 30
    assert not any(job(gateway, each).held for each in some)
    done = gateway.write([Write(each, "requeue_hold") for each in (*some, "999999")])
    assert set(done[:-1]) == {None}
    assert isinstance(done[-1], JobGone)

    def all_held() -> bool:  # a hold of one that Slurm starts at that moment is taken and does nothing
        left = [each for each in some if not job(gateway, each).held]
        gateway.write([Write(each, "requeue_hold") for each in left])
        return not left

    wait_for(all_held, 120, "all held")


@slurm
def test_many_writes_take_elements_of_an_array(loopback):
    """By the back end `cli`; the other takes plain numbers alone."""
    gateway = CliGateway(conf=loopback.slurm_conf, timeout_s=20)
    array = held(loopback, "--array=0-3")
    elements = [f"{array}_{element}" for element in range(4)]
    assert gateway.write([Write(each, "release") for each in elements[:2]]) == (None, None)
    assert [job(gateway, each).held for each in elements] == [False, False, True, True]


@slurm
def test_the_limit_of_an_array_is_told_of_each_element_whatever_its_name(loopback):
    """Of one that waits, and of one that has a record of its own. Its user changes it at any time."""
    gateway = CliGateway(conf=loopback.slurm_conf, timeout_s=20)
    forged = "x ArrayTaskThrottle=7\nJobId=1 ArrayJobId=1 ArrayTaskId=1 ArrayTaskThrottle=7 JobName=x"
    array, free, single = (
        held(loopback, "--array=0-3%2", f"--job-name={forged}"),
        held(loopback, "--array=0-3"),
        held(loopback),
    )
    assert gateway.write([Write(f"{array}_1", "split")]) == (None,)
    assert [gateway.array_limit(f"{array}_{at}") for at in range(4)] == [2] * 4
    assert gateway.array_limit(f"{free}_0") is None
    loopback.command("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=1")
    assert [gateway.array_limit(f"{array}_{at}") for at in range(4)] == [1] * 4
    loopback.command("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=0")
    assert gateway.array_limit(f"{array}_1") is None
    with pytest.raises(UnreadableAnswer):
        gateway.array_limit(single)
    with pytest.raises(JobGone):
        gateway.array_limit("9999_1")


@slurm
def test_the_jobs_of_one_user_are_listed_alone(loopback):
    """Also one that has ended. A user whom the host does not know has none."""
    gateway = CliGateway(conf=loopback.slurm_conf, timeout_s=20)
    mine, ended = held(loopback), held(loopback)
    gateway.cancel(ended)
    assert {job.id for job in gateway.jobs_of(job(gateway, mine).user)} >= {mine, ended}
    assert gateway.jobs_of("nobody") == ()
    assert gateway.jobs_of("no-such-user") == ()
    assert gateway.unread() == ()
