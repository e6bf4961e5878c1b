"""The parsers at the edges of what Slurm prints: counts of one and none, records that come twice, values that cannot be read."""

from __future__ import annotations

import pytest

from penstock_slurm.gateway import parse
from penstock_slurm.gateway.abilities import release
from penstock_slurm.gateway.base import SlurmNode, SlurmPartition, SlurmReservation, Unknown
from penstock_slurm.gateway.hostlist import MOST

OF_22_05 = release((22, 5))

LINE = (
    "NodeName=n0 Arch=x86_64 CPUAlloc=3 CPUTot=64 Gres=gpu:t4:4 GresUsed=gpu:t4:1(IDX:0) RealMemory=1000 AllocMem=12 "
    "State=MIXED Partitions=p,q SlurmdStartTime=2026-11-21T01:18:24 ActiveFeatures=b,a"
)
SEEN = SlurmNode("n0", {"t4": 4}, {"t4": 1}, frozenset({"MIXED"}), ("p", "q"), 64, 3, 1000, 12, features=("a", "b"))


def node(was: str = "", becomes: str = "") -> SlurmNode:
    """The node of `LINE` with one change."""
    (found,) = parse.parse_nodes(LINE.replace(was, becomes), OF_22_05)
    return found


def unknown(was: str, becomes: str) -> list[str]:
    return [str(each) for each in node(was, becomes).unknown]


# --- records and their keys


def test_each_record_begins_with_its_key_at_the_start_of_a_line():
    assert parse.records("Key=a x\nKey=b Key=c\nmore\n\n", "Key") == ["a x", "b Key=c\nmore"]
    assert parse.records("no Key=a\n", "Key") == []
    assert parse.records("", "Key") == []


def test_a_key_that_occurs_twice_is_unknown_with_its_first_values():
    fields = parse.keyed(parse.NODE_KEYS, " State=A Gres=x" + "".join(f" State={n}" for n in range(9)))
    assert fields.values == {"Gres": "x"}
    assert fields.unknown == [Unknown("State", "A State=0 State=1 State=2 State=3 State=4 State=5 State=6")]
    twice = parse.keyed(parse.NODE_KEYS, " State=A State=B")
    assert (twice.values, twice.unknown) == ({}, [Unknown("State", "A State=B")])


# --- jobs' details


@pytest.mark.parametrize(
    ("throttle", "limit"), [("", None), (" ArrayTaskThrottle=3", 3), (" ArrayTaskThrottle=12", 12)]
)
def test_the_limit_of_an_array_is_in_the_record_of_its_element(throttle: str, limit: int | None):
    assert parse.parse_array_limit(f"JobId=8 ArrayJobId=7 ArrayTaskId=1{throttle} JobName=x") == limit


@pytest.mark.parametrize("text", ["", "JobId=8 JobName=ArrayJobId=7 ArrayTaskId=1 JobName=x"])
def test_other_records_have_no_limit_of_an_array(text: str):
    with pytest.raises(ValueError, match="no record of an array's element"):
        parse.parse_array_limit(text)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        (" JOB_GRES=gpu:t4:2,gpu:a:3", 5),
        (" JOB_GRES=gpu:t4:2 JOB_GRES=gpu:t4:2", None),
        (" JOB_GRES=gpu:t4:2:x:3", None),
        ("", None),
    ],
)
def test_gpus_that_a_job_holds_are_told_once_or_not_at_all(text: str, gpus: int | None):
    assert parse.parse_gpus_held("JobId=1" + text) == gpus


def on(nodes: str, gres: str) -> str:
    return f" Nodes={nodes} CPU_IDs=0-1 Mem=0 GRES={gres}"


def test_the_gpus_of_each_node_are_in_order_and_nodes_without_gpus_are_left_out():
    text = on("n[0-1]", "gpu:t4:2(IDX:3,0-1)") + on("n2", "gpu:t4:0(IDX:)") + on("n3", "gpu:1(IDX:2),nic:1(IDX:0)")
    assert parse.parse_gpu_ids(text) == {"n0": (0, 1, 3), "n1": (0, 1, 3), "n3": (2,)}


def test_a_node_with_two_records_is_an_error():
    with pytest.raises(ValueError, match="two records of node n1"):
        parse.parse_gpu_ids(on("n1", "") + on("n[0-1]", "gpu:t4:1(IDX:0)"))


@pytest.mark.parametrize(("last", "fits"), [(MOST - 3, True), (MOST - 2, False)])
def test_there_are_no_more_nodes_and_gpus_than_any_slurm_has(last: int, fits: bool):
    """Each record by itself has fewer: `last` + 1 nodes and two GPUs."""
    text = on(f"n[0-{last}]", "gpu:t4:2(IDX:0-1)")
    if fits:
        assert len(parse.parse_gpu_ids(text)) == MOST - 2
    else:
        with pytest.raises(ValueError, match=f"more than {MOST} nodes and GPUs"):
            parse.parse_gpu_ids(text)


def test_all_records_of_nodes_count_together():
    half = MOST // 2
    text = on(f"a[1-{half}]", "") + on(f"b[1-{half}]", "")
    assert parse.parse_gpu_ids(text) == {}
    with pytest.raises(ValueError, match="more than"):
        parse.parse_gpu_ids(text + on("c", ""))


# --- GRES


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:t4:3,gpu:t4:1", {"t4": 4}),
        ("gpu:t4:3,gpu:t4:3", {"t4": 6}),
        ("gpu", {"": 1}),
        ("gpu:t4", {"t4": 1}),
        ("gres:gpu:t4:2", {"t4": 2}),
        ("", {}),
        ("license:3,gpu:2", {"": 2}),
        ("shard:4,tmp:t4:2", {}),
        ("nic:gpu:2", {}),
        (" gpu:2 , gpu:t4:1", {"": 2, "t4": 1}),
        ("nic:a:b:c:4,gpu:1", {"": 1}),
        ("gpu:t4:10", {"t4": 10}),
    ],
)
def test_gpus_in_gres(text: str, gpus: dict[str, int]):
    assert parse.parse_gres(text) == gpus


@pytest.mark.parametrize("text", ["gpu:t4:x", "gpu:t4:a:4", "nic:1,gpu:a:b"])
def test_gpus_in_another_form_are_an_error(text: str):
    with pytest.raises(ValueError, match="is not gpu:TYPE:COUNT"):
        parse.parse_gres(text)


@pytest.mark.parametrize("text", ["gres", "gres:no_consume", "gpu:1,no_consume"])
def test_a_gres_without_a_name_is_unknown_for_its_node_alone(text: str):
    with pytest.raises(ValueError, match="names no GRES"):
        parse.parse_gres(text)
    assert unknown("Gres=gpu:t4:4", f"Gres={text}") == [f"Gres={text}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (None, None)),
        ("N/A", (None, None)),
        ("nic:2", (None, None)),
        ("gpu:t4:0", (0, "t4")),
        ("gpu:t4:1,gpu:a:1", (2, None)),
    ],
)
def test_gpus_of_a_tres(text: str, expected: tuple[int | None, str | None]):
    assert parse.parse_tres_per_node(text) == expected
    assert parse.parse_cpus_per_gpu(text) == expected[0]


@pytest.mark.parametrize(
    ("used", "gpus"),
    [
        ("gpu:t4:1,shard:t4:3(2/4,1/4)", {"t4": 3}),
        ("gpu:t4:1,shard:t4:3(3/4,0/4)", {"t4": 2}),
        ("gpu:t4:0,shard:t4:2(1/4,1/4,1/4)", {"t4": 2}),
        ("gpu:t4:0,shard:t4:3(1/4)", {"t4": 3}),
        ("gpu:t4:0,mps:t4:9", {"t4": 4}),
        ("gpu:t4:0,mps:t4:0", {"t4": 0}),
        ("gpu:t4:0,mps:1", {"t4": 0, "": 1}),
        ("gpu:t4:0,mps:(null):1", {"t4": 0, "": 1}),
        ("gpu:t4:1,shard:a:1", {"t4": 1, "a": 1}),
        ("(null)", {}),
    ],
)
def test_gpus_of_which_jobs_have_a_part_count_as_used(used: str, gpus: dict[str, int]):
    assert node("gpu:t4:1(IDX:0)", used).gpus_used == gpus


# --- nodes


def test_a_node_of_one_line():
    assert node() == SEEN


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("NodeName=n0", "NodeName=n0;x", ["NodeName=n0;x"]),
        ("State=MIXED", "State=MIXED+TIRED", ["State=MIXED+TIRED"]),
        ("State=MIXED ", "", ["no State"]),
        ("CPUTot=64", "CPUTot=x", ["CPUTot=x"]),
        ("CPUAlloc=3 ", "", ["no CPUAlloc"]),
        ("Gres=gpu:t4:4", "Gres=gpu:t4:a:4", ["Gres=gpu:t4:a:4"]),
        ("AllocMem=12", "AllocMem=12 AllocMem=13", ["AllocMem=12 AllocMem=13"]),
    ],
)
def test_what_cannot_be_read_of_a_node_is_said(was: str, becomes: str, said: list[str]):
    assert unknown(was, becomes) == said


def test_cpus_and_memory_that_jobs_may_have():
    assert node("CPUTot=64", "CPUTot=64 CPUEfctv=60").cpus == 60


@pytest.mark.parametrize(
    ("cpus", "core", "socket"),
    [
        ("CPUTot=64 Sockets=2 CoresPerSocket=16", 2, 32),
        ("CPUTot=64 CPUEfctv=60 Sockets=2 CoresPerSocket=16", 2, 32),
        ("CPUTot=32 Sockets=2 CoresPerSocket=16", 1, 16),
        ("CPUTot=8 Sockets=2 CoresPerSocket=16", 1, 4),
        ("CPUTot=64 Sockets=0 CoresPerSocket=16", 1, 1),
        ("CPUTot=64", 1, 1),
    ],
)
def test_the_cpus_of_a_core_and_of_a_socket(cpus: str, core: int, socket: int):
    found = node("CPUTot=64", cpus)
    assert (found.core_cpus, found.socket_cpus, found.unknown) == (core, socket, ())
    assert node("RealMemory=1000", "RealMemory=1000 MemSpecLimit=1000").memory_mb == 0
    assert node("RealMemory=1000", "RealMemory=1000 MemSpecLimit=1001").memory_mb == 0
    assert node("RealMemory=1000", "RealMemory=1000 MemSpecLimit=999").memory_mb == 1
    assert node("Partitions=p,q ", "").partitions == ()
    assert node("ActiveFeatures=b,a", "ActiveFeatures=(null)").features == ()


@pytest.mark.parametrize("state", ["IDLE+POWERED_DOWN", "IDLE#", "MIXED", "DOWN*"])
def test_a_node_whose_slurmd_has_not_registered_is_unknown_unless_it_is_powered_down(state: str):
    line = LINE.replace("2026-11-21T01:18:24", "None").replace("State=MIXED", f"State={state}")
    (found,) = parse.parse_nodes(line, OF_22_05)
    assert found.state == parse.parse_state(state) | ({"UNKNOWN"} if state in ("MIXED", "DOWN*") else set())
    missing = LINE.replace(" SlurmdStartTime=2026-11-21T01:18:24", "")
    assert parse.parse_nodes(missing, OF_22_05)[0].state == {"MIXED"}, "older releases of Slurm do not say"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (" Reason=disk is full [root@2026-11-21T01:46:00]", "disk is full"),
        (" Reason=disk [x] full", "disk [x] full"),
        (" Reason=a Comment=b", "a"),
        (" Comment=b", ""),
        ("", ""),
    ],
)
def test_the_reason_of_a_node(end: str, reason: str):
    assert parse.parse_nodes(LINE + end, OF_22_05)[0].reason == reason


@pytest.mark.parametrize(
    ("gres", "stand_in"),
    [
        ("penstock:no_consume:2", True),
        ("gpu:1,penstock:no_consume", True),
        ("penstock:no_consume:0", False),
        ("penstock:1", False),
        ("xpenstock:no_consume:1", False),
    ],
)
def test_the_gres_in_place_of_gpus(gres: str, stand_in: bool):
    assert node("Gres=gpu:t4:4", f"Gres={gres}").stand_in is stand_in


def test_a_node_with_two_records_is_unknown_and_the_others_are_read():
    text = f"{LINE}\n{LINE.replace('CPUTot=64', 'CPUTot=1')}\n{LINE.replace('n0', 'n1')}"
    twice, other = parse.parse_nodes(text, OF_22_05)
    assert (twice.name, twice.state, twice.unknown) == ("n0", frozenset(), (Unknown("NodeName", "n0, in 2 records"),))
    assert (other.name, other.state, other.unknown) == ("n1", {"MIXED"}, ())


def test_a_line_is_read_anew_when_slurm_s_release_has_changed():
    reader, line = parse.NodeReader(), LINE
    (first,) = reader.read(line, OF_22_05)
    assert reader.read(line, OF_22_05)[0] is first
    newer = release((24, 11))
    (second,) = reader.read(line, newer)
    assert second is not first
    assert reader.read(line, newer)[0] is second


# --- partitions, reservations, switches


PARTITION = "PartitionName=p Default=NO MaxTime=1:00:00 Nodes=n[0-1] OverSubscribe=NO State=UP"


def partition(was: str = "", becomes: str = "") -> SlurmPartition:
    (found,) = parse.parse_partitions(PARTITION.replace(was, becomes))
    return found


def test_a_partition():
    assert partition() == SlurmPartition("p", ("n0", "n1"), True, False, 3600.0, state="UP")
    assert partition("OverSubscribe=NO", "OverSubscribe=EXCLUSIVE").whole_nodes
    assert partition("Default=NO", "Default=YES").default
    inactive = partition("State=UP", "State=INACTIVE")
    assert (inactive.up, inactive.state, inactive.unknown) == (False, "INACTIVE", ())


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("Default=NO", "Default=MAYBE", "Default=MAYBE"),
        ("MaxTime=1:00:00", "MaxTime=soon", "MaxTime=soon"),
        ("Nodes=n[0-1]", "Nodes=n[0-", "Nodes=n[0-"),
        ("State=UP", "State=ODD", "State=ODD"),
    ],
)
def test_what_cannot_be_read_of_a_partition_is_said(was: str, becomes: str, said: str):
    found = partition(was, becomes)
    assert [str(each) for each in found.unknown] == [said]
    assert (found.default, found.up) == (False, said != "State=ODD")


RESERVATION = "ReservationName=r x StartTime=100 EndTime=200 Nodes=n[0-1] Flags=MAINT,SPEC_NODES State=ACTIVE"


def reservation(was: str = "", becomes: str = "") -> SlurmReservation:
    (found,) = parse.parse_reservations(RESERVATION.replace(was, becomes))
    return found


def test_a_reservation():
    whole = SlurmReservation("r x", 100.0, 200.0, ("n0", "n1"), True, frozenset({"MAINT", "SPEC_NODES"}))
    assert reservation() == whole
    assert not reservation("State=ACTIVE", "State=INACTIVE").active
    assert reservation("Flags=MAINT,SPEC_NODES", "Flags=").flags == frozenset()


def test_a_reservation_that_cannot_be_read_is_active_for_all_nodes_that_it_may_be_for():
    odd = reservation("State=ACTIVE", "State=SOON")
    assert (odd.active, [str(each) for each in odd.unknown]) == (True, ["State=SOON"])
    twice = reservation("Flags=", "Nodes=n7 Flags=")
    assert twice.nodes == ("n0", "n1", "n7")
    assert [each.field for each in twice.unknown] == ["Nodes"]
    bad = reservation("Flags=", "Nodes=n[7 Flags=")
    assert bad.nodes == ("n0", "n1"), "the other value may be the one"
    early = reservation("StartTime=100", "StartTime=x")
    assert (early.start_s, [each.field for each in early.unknown]) == (0.0, ["StartTime"])
    late = reservation("EndTime=200", "EndTime=x")
    assert (late.end_s, [each.field for each in late.unknown]) == (0.0, ["EndTime"])


def test_a_switch_that_cannot_be_read_is_said_and_the_others_are_read():
    lost: list[str] = []
    text = (
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-1]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[\n"
        "SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n2\nSwitchName=top Level=1 LinkSpeed=1 Nodes=n[0-2] Switches=s[0-2]\n"
    )
    assert parse.parse_switches(text, lost) == {"n0": "s0", "n1": "s0", "n2": "s2"}
    assert lost == ["SwitchName=s1 Nodes=n["]


def test_a_version_is_two_numbers():
    assert parse.parse_version("slurm 23.11.0-0rc1") == (23, 11)
    with pytest.raises(ValueError, match="no version number"):
        parse.parse_version("slurm")


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({"ResumeProgram": "/opt/resume", "ResumeTimeout": "90 sec"}, 90.0),
        ({"ResumeProgram": "/opt/resume", "ResumeTimeout": "soon"}, parse.RESUME_TIMEOUT_S),
        ({"ResumeProgram": "/opt/resume"}, parse.RESUME_TIMEOUT_S),
        ({"ResumeProgram": "(null)", "ResumeTimeout": "90 sec"}, None),
        ({"ResumeTimeout": "90 sec"}, None),
    ],
)
def test_the_time_that_a_node_may_take_to_boot(keys: dict[str, str], seconds: float | None) -> None:
    assert parse.resume_timeout_s(keys) == seconds
