"""Jobs through pyslurm: a stand-in program dies, hangs and prints rubbish; the real program has a stand-in pyslurm; both readers
are compared record by record on a busy Slurm, wherever Python can import pyslurm."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock_loopback import LoopbackCluster, wait_for
from penstock_slurm.gateway import CliGateway, ControllerAway, SlurmJob
from penstock_slurm.gateway import pyslurm_reader as pyslurm
from penstock_slurm.gateway.pyslurm_reader import PyslurmReader

JOB = {
    **dict.fromkeys(("ArrayJobID", "ArrayTaskID", "HetJobID", "Deadline", "cpus-per-tres", "Dependency"), "N/A"),
    "MinMemory": "0",
    **dict.fromkeys(("ReqNodes", "Licenses", "Reservation", "admin_comment"), ""),
    **{"State": "RUNNING", "Reason": "None", "Partition": "gpu,debug", "UserName": "ann", "UserID": "1001"},
    **{"Account": "lab", "QOS": "normal", "NodeList": "n[1-2]", "NumNodes": "2", "tres-per-node": "gres:gpu:a100:2"},
    **{"NumCPUs": "8", "cpus-per-task": "4", "NumTasks": "2", "SubmitTime": "100", "EligibleTime": "100"},
    **{"StartTime": "200", "EndTime": "3800", "TimeLimit": "1:00:00", "RestartCnt": "0", "Requeue": "1"},
    **{"PriorityLong": "7", "tres-alloc": "cpu=8,gres/gpu=4", "OverSubscribe": "OK", "TimeUsed": "5:00"},
}
"""What squeue prints of a job, without its id and its texts."""

GIVEN = ("State", "Partition", "Name", "comment", "NumCPUs", "RestartCnt")
"""The fields that the stand-in program has. squeue is asked for the others."""

SQUEUE = """
import json, os, re, sys
jobs = json.load(open("{folder}/jobs.json"))
fields = re.findall(r"([A-Za-z_-]+):\\d+(~\\w+)", os.environ["SQUEUE_FORMAT2"])
open("{folder}/asked", "a").write(" ".join(sys.argv[1:]) + " | " + " ".join(name for name, _ in fields) + "\\n")
some = sys.argv[sys.argv.index("-j") + 1].split(",") if "-j" in sys.argv else None
for job in jobs:
    if some is None or job["JobID"] in some:
        print("".join(job[name] + mark for name, mark in fields))
"""
PROGRAM = """
import json, os, signal, sys, time
jobs, fault = json.load(open("{folder}/seen.json")), open("{folder}/fault").read()
open("{folder}/started", "a").write("x")
fields = {given}
if fault == "no pyslurm":
    sys.exit("ModuleNotFoundError: No module named 'pyslurm'")
print(json.dumps({{"pyslurm": "22.5.3", "fields": fields if fault != "other fields" else ["Moon"]}}))
if sys.argv[1] == "fields":
    sys.exit()
if fault == "slow":
    time.sleep(0.5)
if fault == "hangs":
    sys.stdout.flush()
    time.sleep(600)
for job in jobs:
    line = json.dumps([int(job["JobID"]), *(job[name] for name in fields)])
    if fault == "dies in the middle of a record":
        sys.stdout.write(line[:20])
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "ends in the middle of a record":
        sys.stdout.write(line[:20])
        sys.exit()
    print(line if fault != "prints rubbish" else line.replace('"', ""))
if fault != "ends before its last line":
    print(json.dumps({{"jobs": len(jobs) + (fault == "counts wrong")}}))
"""
FAULTS = (
    *("no pyslurm", "other fields", "hangs", "dies in the middle of a record", "ends in the middle of a record"),
    *("prints rubbish", "ends before its last line", "counts wrong"),
)


class Rig:
    """A squeue and a program that read files: `jobs` is what squeue sees, `seen` what pyslurm sees."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self.set(
            jobs=[record(1), record(2, comment='two\nlines, "quoted" ~ö'), record(3, State="PENDING", NodeList="")]
        )
        self.fault("")
        program = folder / "program.py"
        program.write_text(PROGRAM.format(folder=folder, given=list(GIVEN)))
        (folder / "squeue.py").write_text(SQUEUE.format(folder=folder))
        self.commands = CliGateway(conf=None, timeout_s=timeout_s)
        self.reader = PyslurmReader(self.commands.commands, (sys.executable, "-I", str(program)))

    def set(self, jobs: list[dict[str, str]], seen: list[dict[str, str]] | None = None) -> None:
        (self.folder / "jobs.json").write_text(json.dumps(jobs))
        (self.folder / "seen.json").write_text(json.dumps(jobs if seen is None else seen))

    def fault(self, name: str) -> None:
        (self.folder / "fault").write_text(name)

    def asked(self) -> list[str]:
        """What squeue was asked since the last look."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def started(self) -> int:
        path = self.folder / "started"
        return len(path.read_text()) if path.exists() else 0


def record(number: int, **fields: str) -> dict[str, str]:
    return {**JOB, "JobID": str(number), "Name": f"job {number}", "comment": "", **fields}


def still(jobs: tuple[SlurmJob, ...]) -> list[SlurmJob]:
    """The jobs in order, without how long they were suspended, which depends on the second."""
    return [dataclasses.replace(job, suspended_s=0.0) for job in sorted(jobs, key=lambda job: job.id)]


@pytest.fixture
def rig(tmp_path: Path, slurm: Any, request: pytest.FixtureRequest) -> Rig:
    slurm(f'case "${{0##*/}}" in squeue) exec {sys.executable} -I {tmp_path}/squeue.py "$@";; esac')
    return Rig(tmp_path, getattr(request, "param", 30.0))


def test_the_records_are_those_of_the_commands_and_squeue_gives_only_the_fields_that_pyslurm_lacks(rig):
    wanted = rig.commands.jobs()
    rig.asked()
    assert still(rig.reader.jobs()) == still(wanted)
    assert rig.reader.unread() == ()
    (asked,) = rig.asked()
    fields = asked.partition(" | ")[2].split()
    assert "State" in fields, "to find jobs that change between both answers"
    assert set(fields).isdisjoint(set(GIVEN) - {"State", "RestartCnt"})
    assert {"tres-alloc", "Reservation", "NodeList"} < set(fields)


def test_a_record_that_has_not_changed_is_the_very_object_of_the_last_answer(rig):
    rig.set([record(1, StartTime="N/A"), record(2, StartTime="N/A")])
    before = {job.id: job for job in rig.reader.jobs()}
    rig.set([record(1, StartTime="N/A"), record(2, StartTime="N/A", comment="new")])
    after = {job.id: job for job in rig.reader.jobs()}
    assert after["1"] is before["1"]
    assert after["2"].comment == "new"


@pytest.mark.parametrize("seen", [{"State": "PENDING"}, {"RestartCnt": "1"}, None])
def test_a_job_that_changes_between_both_answers_is_read_whole_from_squeue(rig, seen):
    """It has ended for pyslurm (`None`), or has another state or another run."""
    jobs = [record(1), record(2)]
    rig.set(jobs, [record(1)] if seen is None else [record(1), record(2, **seen)])
    assert still(rig.reader.jobs()) == still(rig.commands.jobs())
    assert any("-j 2 |" in line for line in rig.asked())


def test_a_value_that_pyslurm_cannot_give_is_asked_of_squeue(rig):
    rig.set([record(1), record(2)], [record(1), record(2, Name=None)])
    assert [job.name for job in sorted(rig.reader.jobs(), key=lambda job: job.id)] == ["job 1", "job 2"]


def test_a_slow_program_is_waited_for(rig):
    rig.fault("slow")
    assert len(rig.reader.jobs()) == 3
    assert rig.reader.unread() == ()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rig", [2.0], indirect=True)
def test_a_program_that_fails_hands_over_to_the_commands_and_says_so_once(rig, fault, caplog):
    wanted = still(rig.commands.jobs())
    if fault in FAULTS[2:]:
        assert rig.reader.jobs(), "it worked before"
    rig.fault(fault)
    with caplog.at_level(logging.WARNING):
        assert still(rig.reader.jobs()) == wanted
        started = rig.started()
        assert still(rig.reader.jobs()) == wanted
        assert rig.started() == started, "it is not tried at each tick"
        (told,) = rig.reader.unread()
        assert told.kind == "reader"
        assert "Slurm's commands do" in told.text
        rig.reader._again_at_s = 0.0  # AGAIN_S later
        assert still(rig.reader.jobs()) == wanted
    assert len([each for each in caplog.records if "commands read" in each.message]) == 1
    rig.fault("")
    rig.reader._again_at_s = 0.0  # AGAIN_S later
    assert still(rig.reader.jobs()) == wanted
    assert rig.reader.unread() == (), "it works again"


def test_a_slurmctld_that_is_away_is_an_error_as_with_the_commands(rig, slurm):
    assert rig.reader.jobs()
    slurm("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(ControllerAway):
        rig.reader.jobs()


STAND_IN = """
__version__ = "22.5.3"
class Job:
    state = state_reason = partition = name = user_name = user_id = account = qos = None
    allocated_nodes = required_nodes = cpus = submit_time = start_time = end_time = time_limit = None
    requeue_count = is_requeueable = priority = heterogeneous_id = admin_comment = None
    id = 1
    @property
    def comment(self):
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")
class Jobs(dict):
    @staticmethod
    def load():
        one, two = Job(), Job()
        one.id, one.state, one.time_limit, one.priority, one.user_id = 1, "RUNNING", 60, 0, 1001
        two.id, two.state, two.time_limit = 2, "PENDING", "unlimited"
        return Jobs({1: one, 2: two})
"""


def test_the_program_writes_the_words_of_squeue_and_null_for_what_it_cannot_give(rig, tmp_path, monkeypatch):
    """The program itself, with a stand-in for pyslurm that has no `eligible_time` and no `deadline`."""
    (tmp_path / "pyslurm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader = PyslurmReader(CliGateway(conf=None, timeout_s=30).commands, (sys.executable, pyslurm.PROGRAM[-1]))
    fields, lines = reader._asked("jobs")
    assert not {"EligibleTime", "Deadline"} & set(fields)
    one, two = (dict(zip(("JobID", *fields), json.loads(line), strict=True)) for line in lines)
    assert (one["JobID"], one["State"], one["TimeLimit"], one["PriorityLong"], one["UserID"]) == (
        1,
        "RUNNING",
        "60:00",
        "0",
        "1001",
    )
    assert (one["comment"], one["StartTime"], one["NumCPUs"]) == (None, "N/A", None)
    assert (two["TimeLimit"], two["Name"]) == ("UNLIMITED", "")


@pytest.mark.slurm
def test_both_readers_agree_record_by_record_on_a_busy_slurm(loopback: LoopbackCluster):
    if importlib.util.find_spec("pyslurm") is None:
        pytest.skip(
            "pyslurm is not installed: it is built for this machine's Slurm, see docs/developer/slurm-gateway.md"
        )
    commands = CliGateway(conf=loopback.slurm_conf, timeout_s=60)
    reader = PyslurmReader(commands.commands)
    options = (
        *(
            ("--array=0-3%2",),
            ("--exclusive", "-N2"),
            ("--hold", "--comment=a,b\n[1]"),
            ("--time=2:00:00", "--requeue"),
        ),
        *(
            ("--begin=now+1hour",),
            ("--deadline=now+2days", "--time=1:00:00"),
            ("--nodelist=t4-01",),
            ("--job-name=ö x",),
        ),
        *(("--dependency=afterany:1",), ("--cpus-per-task=2", "-n2"), ("--partition=t4,rtx",), ("--cpus-per-gpu=2",)),
    )
    for each in (*options, *options):
        words = ("sbatch", "--parsable", "--gres=gpu:1", "--output=/dev/null", *each, "--wrap", "exec sleep 300")
        loopback.command(*words)
    wait_for(lambda: any(job.state == "RUNNING" for job in commands.jobs()), 60, "a job to run")
    loopback.command("scancel", "--name=ö x")

    def same() -> bool:
        return still(commands.jobs(finished=True)) == still(reader.jobs(finished=True))

    wait_for(same, 60, "both readers to agree", details=lambda: differences(commands, reader))
    assert reader.unread() == ()


def differences(commands: CliGateway, reader: PyslurmReader) -> list[tuple[str, str, object, object]]:
    """(job, field, by the commands, by pyslurm) of all that differs."""
    ours = {job.id: dataclasses.asdict(job) for job in still(reader.jobs(finished=True))}
    theirs = {job.id: dataclasses.asdict(job) for job in still(commands.jobs(finished=True))}
    return [
        (job, field, value, ours.get(job, {}).get(field))
        for job, fields in theirs.items()
        for field, value in fields.items()
        if ours.get(job, {}).get(field) != value
    ]
