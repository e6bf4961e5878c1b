"""What the parsers do not know is an error of that one job, node or partition, with Slurm's own text."""

from __future__ import annotations

import pytest

from penstock_slurm.gateway import Unknown
from penstock_slurm.gateway.abilities import RELEASES, Release, release
from penstock_slurm.gateway.node_states import NODE_STATES
from penstock_slurm.gateway.parse import parse_nodes, parse_partitions
from penstock_slurm.gateway.parse_jobs import JOB_FIELDS, TIME, job_fields, parse_jobs
from penstock_slurm.jobs.states import SLURM_STATES
from tests.slurm_plugin.gateway.test_parse import HELD, MARKS, NODE, OF_22_05, RUNNING, answer

ANY_TEXT = {"Reason", "Name", "UserName", "Account", "QOS", "Partition", "comment", "admin_comment", "tres-alloc"}
ANY_TEXT |= {"Reservation", "Dependency", "Licenses"}
"""Fields in which no text is unknown: users and admins choose it, or only parts of it are read."""
NUMBERS = {"JobID", "ArrayJobID", "ArrayTaskID"}
"""Without its number a record cannot be told from others: see tests/hostile/test_reading_slurm.py."""


def with_field(record: str, field: str, text: str, of: Release = OF_22_05) -> str:
    values = record.split("%q")
    values[job_fields(of).index(field)] = text
    return "%q".join(values)


@pytest.mark.parametrize("field", sorted({*JOB_FIELDS, "OverSubscribe", TIME} - ANY_TEXT - NUMBERS))
def test_a_value_of_a_job_that_cannot_be_read_is_named_and_harms_no_other_job(field):
    strange = "gpu:a:b:c" if field in ("tres-per-node", "cpus-per-tres") else "a[["
    broken, good = parse_jobs(answer(with_field(RUNNING, field, strange), HELD), MARKS, OF_22_05)
    assert broken.unknown == (Unknown(field, strange),)
    assert (broken.id, broken.name, good.unknown) == ("4_2", "wrap", ())
    assert good == parse_jobs(answer(HELD), MARKS, OF_22_05)[0]


@pytest.mark.parametrize("each", RELEASES, ids=lambda each: str(each.since))
def test_every_word_of_a_release_is_known_and_the_next_is_not(each: Release):
    words = [("State", word) for word in each.job_states] + [
        (each.whole_nodes_field, word) for word in each.whole_nodes
    ]
    for field, word in words:
        (job,) = parse_jobs(answer(with_field(RUNNING, field, word, each)), MARKS, each)
        others = () if field != "State" else (Unknown(each.whole_nodes_field, "OK"),) * ("OK" not in each.whole_nodes)
        assert job.unknown == others
    assert each.job_states <= SLURM_STATES, "each state has a place in the state machine"
    assert each.node_states <= NODE_STATES.keys(), "each state of a node has a meaning"
    line = NODE.split(" Reason=")[0]
    for state in each.node_states:
        assert parse_nodes(line.replace("MIXED+DRAIN", state), each)[0].unknown == ()
    assert parse_nodes(line.replace("MIXED+DRAIN", "IDLE+TIRED"), each)[0].unknown == (Unknown("State", "IDLE+TIRED"),)


@pytest.mark.parametrize(
    ("version", "word", "exclusive"),
    [
        *(((22, 5), "NO", True), ((22, 5), "OK", False), ((22, 5), "YES", False), ((22, 5), "USER", False)),
        *(((25, 11), "NO", True), ((25, 11), "TOPO", False)),
        *(((26, 5), "NODE", True), ((26, 5), "NO", False), ((26, 5), "USER", False), ((26, 5), "TOPO", False)),
        ((27, 11), "NODE", True),
    ],
)
def test_whole_nodes_are_read_in_the_words_of_each_release(version, word, exclusive):
    """Before 26.05 OverSubscribe=NO meant --exclusive. Since then it is what every ordinary job has."""
    of = release(version)
    (job,) = parse_jobs(answer(with_field(HELD, of.whole_nodes_field, word, of)), MARKS, of)
    assert (job.exclusive, job.unknown) == (exclusive, ())


@pytest.mark.parametrize("key", ["Gres", "GresUsed", "State", "CPUAlloc", "CPUEfctv", "RealMemory", "AllocMem"])
def test_a_value_of_a_node_that_is_missing_or_strange_is_named(key):
    was = NODE.split(f" {key}=")[1].split(" ")[0]
    other = NODE.replace("NodeName=a100-00", "NodeName=a100-01")
    missing, good = parse_nodes(NODE.replace(f" {key}={was}", "") + "\n" + other, OF_22_05)
    wanted = "CPUTot" if key == "CPUEfctv" else key
    assert missing.unknown == (() if key == "CPUEfctv" else (Unknown(wanted, None),))
    assert (missing.name, good.name, good.unknown) == ("a100-00", "a100-01", ())
    strange, good = parse_nodes(NODE.replace(f" {key}={was}", f" {key}=gpu:a:b:c") + "\n" + other, OF_22_05)
    assert strange.unknown == (Unknown(key, "gpu:a:b:c"),)
    assert good.unknown == ()


def test_a_partition_in_an_unheard_of_state_is_named_and_not_up():
    text = "PartitionName=t4 Default=NO MaxTime=UNLIMITED Nodes=t4-00 State=UP\n"
    strange, good = parse_partitions(text.replace("UP", "RESTING") + text)
    assert (strange.up, strange.unknown) == (False, (Unknown("State", "RESTING"),))
    assert (good.up, good.unknown) == (True, ())


def test_what_is_unknown_reads_well_and_briefly():
    assert str(Unknown("State", "RESTING")) == "State=RESTING"
    assert str(Unknown("Gres", None)) == "no Gres"
    assert len(str(Unknown("Dependency", "x" * 10_000))) < 200
