"""The parsers on text as printed by Slurm 22.05.8, and in the forms that 24.11 documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_slurm.gateway.abilities import release
from penstock_slurm.gateway.base import SlurmFeatures
from penstock_slurm.gateway.fields import duration_s
from penstock_slurm.gateway.node_states import node_facts
from penstock_slurm.gateway.parse import (
    NodeReader,
    parse_features,
    parse_gpu_ids,
    parse_gpus_held,
    parse_gres,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    parse_state,
    parse_switches,
    parse_tres_per_node,
    parse_version,
)
from penstock_slurm.gateway.parse_jobs import JOB_FIELDS, JobReader, Marks, job_fields, parse_jobs, squeue_format

OF_22_05 = release((22, 5))

NODE = (
    "NodeName=a100-00 Arch=x86_64 CoresPerSocket=32  CPUAlloc=3 CPUEfctv=60 CPUTot=64 CPULoad=1.15 AvailableFeatures=a100"
    " ActiveFeatures=nvme,ib Gres=gpu:a100:8(S:0-1) GresDrain=N/A GresUsed=gpu:a100:3(IDX:0,2-3) NodeAddr=127.0.0.1"
    " NodeHostName=vm Port=27014 Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=256000"
    " AllocMem=512 FreeMem=22620 Sockets=2 Boards=1 MemSpecLimit=1000 State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0"
    " Weight=1 Owner=N/A MCS_label=N/A Partitions=a100,all  BootTime=2026-11-21T01:18:24"
    " CfgTRES=cpu=64,mem=250G,billing=64 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s"
    " ExtSensorsWatts=0 ExtSensorsTemp=n/s Reason=a b State=IDLE x [root@2026-11-21T01:46:00] Comment=c State=FOO"
)


def test_reads_a_node_of_22_05():
    (node,) = parse_nodes(NODE + "\n", OF_22_05)
    assert (node.name, node.gpus, node.gpus_used) == ("a100-00", {"a100": 8}, {"a100": 3})
    assert node.state == {"MIXED", "DRAIN"}
    assert node.partitions == ("a100", "all")
    assert (node.cpus, node.cpus_used, node.memory_mb, node.memory_used_mb) == (60, 3, 255000, 512)
    assert node.reason == "a b State=IDLE x"
    assert node.features == ("ib", "nvme")
    assert parse_nodes(NODE.replace("=nvme,ib", "=(null)"), OF_22_05)[0].features == ()
    assert not node_facts(node.state).may_start


def test_reads_whether_a_node_has_what_jobs_ask_for_in_place_of_gpus():
    """As 24.11.5 prints it."""
    assert not parse_nodes(NODE, OF_22_05)[0].stand_in
    line = NODE.replace("Gres=gpu:a100:8(S:0-1)", "Gres=gpu:a100:8(S:0-1),penstock:no_consume:1")
    (node,) = parse_nodes(
        line.replace("GresUsed=gpu:a100:3(IDX:0,2-3)", "GresUsed=gpu:a100:3(IDX:0,2-3),penstock:0"), OF_22_05
    )
    assert (node.stand_in, node.gpus, node.gpus_used) == (True, {"a100": 8}, {"a100": 3})
    assert not parse_nodes(line.replace(":no_consume", ""), OF_22_05)[0].stand_in, "the first job would have it alone"


def test_a_node_that_has_not_registered_yet_is_not_known():
    """As right after slurmctld's restart, whatever ran there before; not so one that is powered down or up."""
    line = NODE.split(" Reason=")[0].replace("MIXED+DRAIN", "MIXED")

    def registered(state: str, started: str) -> bool:
        text = line.replace("State=MIXED", f"State={state}").replace(" CfgTRES", f" SlurmdStartTime={started} CfgTRES")
        return "UNKNOWN" not in parse_nodes(text, OF_22_05)[0].state

    assert registered("MIXED", "2026-11-21T01:18:24")
    assert not registered("MIXED", "None")
    assert not registered("IDLE+COMPLETING", "None")
    assert registered("MIXED+CLOUD+POWERING_UP", "None")


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        (" JOB_GRES=gpu:t4:2 Nodes=t4-[00-01] GRES=gpu:t4:1(IDX:0)", 2),
        (" JOB_GRES=(null) Nodes=t4-01 GRES=", 0),
        (" JOB_GRES=gpu:a100:0 GRES=gpu:a100:0(IDX:)", 0),
        (" JobState=RUNNING", None),
    ],
)
def test_reads_what_a_job_was_really_given(text, gpus):
    assert parse_gpus_held("JobId=1 JobName=x" + text) == gpus


def test_reads_a_node_without_gpus_and_in_good_health():
    line = NODE.split(" Reason=")[0].replace("Gres=gpu:a100:8(S:0-1)", "Gres=(null)").replace("MIXED+DRAIN", "MIXED")
    (node,) = parse_nodes(line.replace("GresUsed=gpu:a100:3(IDX:0,2-3)", "GresUsed=(null)"), OF_22_05)
    assert (node.gpus, node.gpus_used, node.reason, node_facts(node.state).may_start) == ({}, {}, "", True)


@pytest.mark.parametrize(
    ("text", "words", "usable"),
    [
        ("IDLE", {"IDLE"}, True),
        ("MIXED+PLANNED", {"MIXED", "PLANNED"}, True),
        ("ALLOCATED-", {"ALLOCATED", "PLANNED"}, True),
        ("IDLE+CLOUD", {"IDLE", "CLOUD"}, True),
        ("IDLE+CLOUD+POWERED_DOWN", {"IDLE", "CLOUD", "POWERED_DOWN"}, True),
        ("idle~", {"IDLE", "POWERED_DOWN"}, True),
        ("DOWN*", {"DOWN", "NOT_RESPONDING"}, False),
        ("MIXED*", {"MIXED", "NOT_RESPONDING"}, False),
        ("IDLE+DRAIN+INVALID_REG", {"IDLE", "DRAIN", "INVALID_REG"}, False),
        ("UNKNOWN", {"UNKNOWN"}, False),
        ("IDLE$", {"IDLE", "MAINT"}, False),
        ("IDLE+MAINTENANCE", {"IDLE", "MAINTENANCE"}, False),
        ("MIXED+MAINTENANCE+RESERVED", {"MIXED", "MAINTENANCE", "RESERVED"}, False),
        ("IDLE+TIRED", {"IDLE", "TIRED"}, False),
    ],
)
def test_reads_node_states(text, words, usable):
    line = NODE.split(" Reason=")[0].replace("State=MIXED+DRAIN", f"State={text}")
    assert parse_state(text) == words
    assert parse_nodes(line, OF_22_05)[0].state == words
    assert node_facts(words).may_start is usable


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:t4:4", {"t4": 4}),
        ("gpu:4(S:0-1)", {"": 4}),
        ("gpu:t4:4(S:0,1),shard:t4:16,nic:2", {"t4": 4}),
        ("gpu:a100:2(IDX:0,2),gpu:t4:0(IDX:N/A)", {"a100": 2, "t4": 0}),
        ("gpu:(null):0(IDX:N/A)", {"": 0}),
        ("gpu:t4:no_consume:4", {"t4": 4}),
        ("craynetwork:4", {}),
    ],
)
def test_reads_gres(text, gpus):
    assert parse_gres(text) == gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gres:gpu:4", (4, None)),
        ("gres/gpu:4", (4, None)),  # 24.11
        ("gres/gpu=4", (4, None)),
        ("gres:gpu:t4:2", (2, "t4")),
        ("gres/gpu:rtx:2", (2, "rtx")),  # 24.11
        ("gpu:2", (2, None)),
        ("gres:gpu", (1, None)),
        ("gres:gpu:t4", (1, "t4")),
        ("gres:gpu:t4:1,gres:gpu:rtx:2", (3, None)),
        ("gres:craynetwork:1,gres:gpu:3", (3, None)),
        ("gres:craynetwork:1", (None, None)),
        ("N/A", (None, None)),
        ("", (None, None)),
    ],
)
def test_reads_tres_per_node(text, expected):
    assert parse_tres_per_node(text) == expected


def test_reads_partitions():
    text = (
        "PartitionName=t4 AllowGroups=ALL Default=NO QoS=N/A DefaultTime=NONE MaxTime=1-00:00:00 MinNodes=0 "
        "Nodes=t4-[00-01] State=UP TotalCPUs=128\n"
        "PartitionName=all AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=(null) State=DRAIN\n"
    )
    first, second = parse_partitions(text)
    assert (first.name, first.nodes, first.up, first.default) == ("t4", ("t4-00", "t4-01"), True, False)
    assert first.max_time_s == 86400
    assert (second.nodes, second.up, second.default, second.max_time_s) == ((), False, True, None)
    assert (first.tier, first.frees, first.grace_s) == (0, False, 0.0)


@pytest.mark.parametrize(
    ("mode", "frees"),
    [("REQUEUE", True), ("CANCEL", True), ("GANG,REQUEUE", True), ("OFF", False), ("GANG,SUSPEND", False)],
)
def test_reads_how_jobs_of_a_partition_are_preempted(mode, frees):
    text = (
        f"PartitionName=p Default=NO GraceTime=120 MaxTime=1:00 Nodes=n0 PreemptMode={mode} PriorityTier=7 State=UP\n"
    )
    (found,) = parse_partitions(text)
    assert (found.tier, found.frees, found.grace_s, found.unknown) == (7, frees, 120.0, ())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("1:02:03", 3723), ("1-02:04:00", 93840), ("UNLIMITED", None), ("Partition_Limit", None)],
)
def test_reads_durations(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize(("text", "version"), [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.5", (24, 11))])
def test_reads_versions(text, version):
    assert parse_version(text) == version


MARKS = Marks("~1c9f0a2b3d4e5f60", "~60f5e4d3b2a09fc1")


# As printed by 22.05.8, but for the user's fields, with %q for the mark of a field and %qend for that of a record.
RUNNING = (
    "6%q4%q2%qN/A%qRUNNING%qNone%qall%qwrap%qroot%q0%q(null)%q(null)%qt4-[00-01]%q%q2%qgres:gpu:1%q2%q1%q2%q(null)%q"
    "(null)%q1795225238%q1795225239%q1795225240%q1795225540%q5:00%q1%q1%q4294901758%qexam%q"
    "cpu=1,node=1,billing=1,gres/gpu=1,gres/gpu:t4=1%q"
    "(null)%q(null)%q1795225999%qN/A%q3G%qOK%q1-02:03:04%qend"
)


HELD = (
    "9%q9%qN/A%qN/A%qPENDING%qJobHeldUser%qt4,all%qNAME%qann%q1001%qlab%qnormal%q%qt4-01%q1%qgres:gpu:t4:2%q3%q3%q1%q"
    'COMMENT%q{"penstock": 1}%q1795225115%qN/A%q1795225243%qNONE%qUNLIMITED%q0%q0%q0%q(null)%qcpu=1,mem=250G,node=1,billing=1%q'
    "afterok:1(unfulfilled)%qmatlab:1%qN/A%qgres:gpu:3%q0%qNO%q0:00%qend"
)


def answer(*records: str) -> str:
    fields = (record.removesuffix("%qend").replace("%q", MARKS.field) for record in records)
    return "".join(f"{record}{MARKS.record}\n" for record in fields)


def test_reads_jobs_of_22_05():
    running, held = parse_jobs(answer(RUNNING, HELD), MARKS, OF_22_05)
    assert (running.id, running.number, running.array_job_id, running.array_task_id) == ("4_2", 6, 4, 2)
    assert (running.nodes, running.node_count, running.gpus_per_node) == (("t4-00", "t4-01"), 2, 1)
    assert (running.submit_s, running.eligible_s, running.start_s) == (1795225238.0, 1795225239.0, 1795225240.0)
    assert (running.end_s, running.time_limit_s, running.restarts, running.requeue) == (1795225540.0, 300.0, 1, True)
    assert (running.account, running.comment, running.held) == ("", "", False)
    assert (held.id, held.partition, held.user, held.uid) == ("9", ("t4", "all"), "ann", 1001)
    assert (held.required_nodes, held.gpus_per_node, held.gpu_type) == (("t4-01",), 2, "t4")
    assert (held.cpus, held.cpus_per_task, held.tasks) == (3, 3, 1)
    assert (running.cpus_per_gpu, held.cpus_per_gpu) == (None, 3)
    assert (held.admin_comment, held.held, held.start_s, held.requeue) == ('{"penstock": 1}', True, None, False)
    assert (running.reservation, running.gpus_counted) == ("exam", {"": 1, "t4": 1})
    assert (held.reservation, held.gpus_counted) == ("", {})
    assert (running.deadline_s, held.deadline_s) == (1795225999.0, None)
    assert (running.suspended_s, held.suspended_s) == (0.0, 0.0)
    assert (running.dependency, running.licenses, running.exclusive) == ("", "", False)
    assert (held.dependency, held.licenses, held.exclusive) == ("afterok:1(unfulfilled)", "matlab:1", True)
    assert (held.array_job_id, held.het_job_id, held.time_limit_s) == (None, None, None)


@given(name=st.text(), comment=st.text(alphabet=st.sampled_from('~1c9f\n|"{} =:0,%q'), max_size=60))
def test_what_users_write_stays_in_its_field(name, comment):
    record = HELD.replace("NAME", name.replace("%q", "")).replace("COMMENT", comment.replace("%q", ""))
    jobs = parse_jobs(answer(RUNNING, record, RUNNING), MARKS, OF_22_05)
    assert [job.id for job in jobs] == ["4_2", "9", "4_2"]
    if "COMMENT" not in name and name not in ("", "(null)"):
        assert jobs[1].name == name.replace("%q", "")
    assert jobs[1].uid == 1001


@pytest.mark.parametrize(
    ("used", "gpus"),
    [
        ("gpu:a100:3(IDX:0,2-3),shard:a100:0(0/4)", 3),
        ("gpu:a100:0(IDX:N/A),shard:a100:3(2/4,1/4,0/4,0/4,0/4,0/4,0/4,0/4)", 2),
        ("gpu:a100:2(IDX:0-1),shard:a100:3", 5),
        ("gpu:a100:0(IDX:N/A),shard:20", 8),
        ("gpu:a100:0(IDX:N/A),shard:(null):1(0/1)", 1),
        ("gpu:a100:1(IDX:0),mps:a100:50(0/100,50/100,0/100,0/100,0/100,0/100,0/100,0/100)", 2),
        ("gpu:a100:1(IDX:0),mps:0,penstock:0", 1),
    ],
)
def test_a_gpu_of_which_a_job_has_a_part_is_in_use(used: str, gpus: int):
    """Slurm gives it to no other job whole. Where it does not say which GPU a part is of, each counts as one of another."""
    line = NODE.replace("Gres=gpu:a100:8(S:0-1)", "Gres=gpu:a100:8(S:0-1),shard:a100:32,mps:a100:800")
    (node,) = parse_nodes(line.replace("GresUsed=gpu:a100:3(IDX:0,2-3)", f"GresUsed={used}"), OF_22_05)
    assert sum(node.gpus_used.values()) == gpus
    assert not node.unknown


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Nodes=n0 CPU_IDs=0-1 Mem=64 GRES=gpu:t4:2(IDX:0,3) Nodes=n1 CPU_IDs=0-1 Mem=64 GRES=gpu:t4:1(IDX:2) x=1",
            ("0,3", "2"),
        ),
        ("Nodes=n[0-1] CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:1-2) MinCPUsNode=1", ("1,2", "1,2")),
        ("Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:t4:2(IDX:0-1),shard:t4:1(0/1) MinCPUsNode=1", ("0,1",)),
        ("Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:a100:0(IDX:) MinCPUsNode=1", ()),
        ("JobState=PENDING JOB_GRES=(null) MinCPUsNode=1 TresPerNode=gres:gpu:1", ()),
    ],
)
def test_reads_which_gpus_a_job_has_on_each_node(text, ids):
    expected = {f"n{node}": tuple(map(int, listed.split(","))) for node, listed in enumerate(ids)}
    assert parse_gpu_ids("JobId=1 " + text) == expected


@pytest.mark.parametrize("text", ["6~1~2", "hello", answer(RUNNING)[:-30]])
def test_says_when_an_answer_is_not_jobs(text):
    with pytest.raises(ValueError, match="after the last record"):
        parse_jobs(text, MARKS, OF_22_05)


def test_no_jobs_is_an_answer():
    assert parse_jobs("", MARKS, OF_22_05) == ()


def test_the_format_asks_for_all_fields_uncut_but_dependencies():
    marks = Marks("~ab", "~cd")
    fields = squeue_format(marks, job_fields(OF_22_05)).split(",")
    sizes = [(field, 200 if field == "Dependency" else 0) for field in (*JOB_FIELDS, "OverSubscribe")]
    assert fields == [*(f"{field}:{size}~ab" for field, size in sizes), "TimeUsed:0~cd"]
    assert squeue_format(marks, job_fields(release((26, 5)))).endswith(",Exclusive:0~ab,TimeUsed:0~cd")


def test_a_record_that_has_not_changed_is_the_same_job_and_one_that_has_is_read_anew():
    reader = JobReader()
    running, held = reader.read(answer(RUNNING, HELD), MARKS, OF_22_05, 0.0)
    later = RUNNING.replace("1-02:03:04", "1-02:03:05")
    again, also = reader.read(answer(HELD, later), MARKS, OF_22_05, 0.0)[::-1]
    assert again is running
    assert also == held
    moved, also = reader.read(answer(later.replace("t4-[00-01]", "t4-[01-02]"), HELD), MARKS, OF_22_05, 0.0)
    assert moved.nodes == ("t4-01", "t4-02")
    assert also == held
    newer = answer(with_release_word(HELD))
    assert reader.read(newer, MARKS, release((26, 5)), 0.0)[0].exclusive, "another release, another meaning"


def with_release_word(record: str) -> str:
    return record.replace("%qNO%q0:00", "%qNODE%q0:00")


def test_the_time_that_a_run_was_suspended_is_seen_at_once_although_its_record_is_the_same():
    start_s, ran_s = 1795225240.0, 93784.0
    reader = JobReader()

    def suspended_s(after_s: float, ran: str) -> float:
        text = answer(RUNNING.replace("1-02:03:04", ran))
        return reader.read(text, MARKS, OF_22_05, start_s + ran_s + after_s)[0].suspended_s

    assert suspended_s(0.9, "1-02:03:04") == 0.0
    assert suspended_s(1.9, "1-02:03:05") == 0.0
    assert suspended_s(8.0, "1-02:03:06") == 6.0, "it was suspended and resumed between two observations"
    assert suspended_s(9.0, "1-02:03:07") == 6.0
    assert suspended_s(-1.0, "1-02:03:04") == 0.0, "slurmctld's clock is ahead"


def test_a_node_whose_line_has_not_changed_is_the_same_node_and_one_that_has_is_read_anew():
    reader = NodeReader()
    (first,) = reader.read(NODE, OF_22_05)
    assert reader.read(NODE + "\n", OF_22_05)[0] is first
    assert "DOWN" in reader.read(NODE.replace("State=", "State=DOWN+"), OF_22_05)[0].state
    assert reader.read(NODE, OF_22_05) == (first,)


RESERVATIONS = """\
ReservationName=maint StartTime=1795256623 EndTime=1795260223 Duration=01:00:00 Nodes=t4-00 NodeCnt=1 CoreCnt=64 \
Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES TRES=cpu=64 Users=root Groups=(null) Accounts=(null) \
Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
ReservationName=res1 StartTime=1795253023 EndTime=1795256623 Duration=01:00:00 Nodes=rtx-[00-01] NodeCnt=2 CoreCnt=128 \
Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=128 Users=root Groups=(null) Accounts=(null) \
Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)
"""


def test_reads_reservations():
    maintenance, active = parse_reservations(RESERVATIONS)
    assert (maintenance.name, maintenance.start_s, maintenance.end_s) == ("maint", 1795256623.0, 1795260223.0)
    assert (maintenance.nodes, maintenance.active, maintenance.flags) == (("t4-00",), False, {"MAINT", "SPEC_NODES"})
    assert (active.nodes, active.active) == (("rtx-00", "rtx-01"), True)
    assert parse_reservations("No reservations in the system\n") == ()
    licences = RESERVATIONS.splitlines()[0].replace("Nodes=t4-00", "Nodes=(null)")
    assert parse_reservations(licences)[0].nodes == ()


CONFIG = """\
Configuration data as of 2026-11-21T09:23:43
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
AccountingStoreFlags    = (null)
ClusterName             = loop
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu,gres/gpu:t4
PriorityType            = priority/multifactor
SlurmctldHost[0]        = vm(127.0.0.1)
TopologyPlugin          = topology/tree
"""


@pytest.mark.parametrize(
    ("was", "becomes", "features"),
    [
        ("", "", SlurmFeatures("loop", accounting=True, topology=True, limits=True, fair_share=True, counts_gpus=True)),
        (
            "associations,limits,qos",
            "none",
            SlurmFeatures("loop", accounting=True, topology=True, fair_share=True, counts_gpus=True),
        ),
        (
            "associations,limits,qos",
            "safe",
            SlurmFeatures("loop", accounting=True, topology=True, limits=True, fair_share=True, counts_gpus=True),
        ),
        ("accounting_storage/slurmdbd", "accounting_storage/none", SlurmFeatures("loop", topology=True)),
        (
            "priority/multifactor",
            "priority/basic",
            SlurmFeatures("loop", accounting=True, topology=True, limits=True, counts_gpus=True),
        ),
        (
            "topology/tree",
            "topology/none",
            SlurmFeatures("loop", accounting=True, limits=True, fair_share=True, counts_gpus=True),
        ),
    ],
)
def test_reads_what_is_switched_on(was, becomes, features):
    assert parse_features(CONFIG.replace(was, becomes)) == features


@pytest.mark.parametrize(
    ("line", "by", "frees", "exempt_s"),
    [
        ("", "", False, 0.0),
        ("PreemptType = preempt/partition_prio\nPreemptMode = REQUEUE", "partition", True, 0.0),
        ("PreemptType = preempt/qos\nPreemptMode = GANG,SUSPEND", "qos", False, 0.0),
        ("PreemptType = preempt/none\nPreemptMode = OFF\nPreemptExemptTime = 00:05:00", "", False, 300.0),
        ("PreemptExemptTime = soon", "", False, float("inf")),
    ],
)
def test_reads_when_slurm_preempts_jobs(line, by, frees, exempt_s):
    found = parse_features(f"{CONFIG}{line}\n")
    assert (found.preempts_by, found.preempted_frees, found.preempt_exempt_s) == (by, frees, exempt_s)


@pytest.mark.parametrize(
    ("word", "cpus_by", "memory"),
    [
        ("CR_CORE_MEMORY", "core", True),
        ("CR_Core,CR_ONE_TASK_PER_CORE", "core", False),
        ("CR_SOCKET", "socket", False),
        ("CR_CPU_MEMORY", "", True),
        ("NONE", "", False),
    ],
)
def test_reads_what_slurm_allocates(word, cpus_by, memory):
    found = parse_features(f"{CONFIG}SelectTypeParameters    = {word}\n")
    assert (found.cpus_by, found.memory) == (cpus_by, memory)


def test_reads_leaf_switches():
    text = (
        "SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=t4-[00-01]\n"
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=rtx-00\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=rtx-00,t4-[00-01] Switches=leaf[0-1]\n"
    )
    assert parse_switches(text, []) == {"t4-00": "leaf0", "t4-01": "leaf0", "rtx-00": "leaf1"}
