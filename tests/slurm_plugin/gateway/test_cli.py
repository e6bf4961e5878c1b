"""The back end `cli` with stand-ins for Slurm's commands: what it does when they misbehave."""

import subprocess
import time

import pytest

from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.store.leadership.lease import boot_s
from penstock_slurm.gateway import (
    CommandsMissing,
    ControllerAway,
    JobGone,
    JobPlacement,
    PlainShape,
    Refused,
    SlurmError,
    TimedOut,
    Transient,
    UnreadableAnswer,
    Write,
)
from penstock_slurm.gateway.batch import arguments
from penstock_slurm.gateway.commands import OVER, RETRIES, guarded
from penstock_slurm.gateway.errors import MESSAGES, Messages
from tests.slurm_plugin.gateway.conftest import gateway


def test_each_word_of_the_table_has_its_class():
    for words, kind, where in MESSAGES:
        said = words.replace(" n ", " 7_3 ")
        error = Messages().error(
            f"slurm_update error: {said.capitalize()} for job 7", command="scontrol update", job_id="7"
        )
        assert type(error) is kind
        assert where
        assert (error.job_id, error.command) == ("7", "scontrol update")
        assert said in str(error).lower()


def test_unknown_words_are_a_refusal_of_a_write_and_an_absence_for_a_reading(slurm):
    slurm("echo 'slurm_update error: Never heard of this' >&2; exit 1")
    with pytest.raises(Refused, match="Never heard of this"):
        gateway().hold("7")
    with pytest.raises(ControllerAway, match="Never heard of this"):
        gateway().nodes()


@pytest.mark.parametrize(("body", "status"), [("kill -SEGV $$", "-11"), ("exit 3", "3")])
def test_a_command_that_fails_without_a_word_tells_its_status(slurm, body, status):
    slurm(body)
    with pytest.raises(Refused, match=f"scontrol uhold of job 7: ended with status {status}, without a message"):
        gateway().hold("7")
    with pytest.raises(ControllerAway, match=f"ended with status {status}, without a message"):
        gateway().nodes()


def test_a_refused_change_is_seen_although_the_command_returns_0(slurm):
    slurm("echo 'scancel: error: Kill job error on job id 7: Invalid job id specified' >&2")
    with pytest.raises(JobGone) as caught:
        gateway().cancel("7")
    assert caught.value.job_id == "7"


def test_what_passes_is_asked_a_few_times(slurm):
    calls = slurm("echo 'slurm_update error: Resource temporarily unavailable' >&2; exit 1")
    with pytest.raises(Transient):
        gateway().hold("7")
    assert len(calls.read_text().splitlines()) == 1 + RETRIES


def test_the_second_try_may_go_through(slurm, tmp_path):
    calls = slurm(
        f"mkdir {tmp_path}/once 2>/dev/null && {{ echo 'Resource temporarily unavailable' >&2; exit 1; }}; true"
    )
    gateway().release("7")
    assert calls.read_text().splitlines() == ["scontrol release 7"] * 2


@pytest.mark.parametrize("words", ["Invalid job id specified", "Unable to contact slurm controller", "Invalid user id"])
def test_what_does_not_pass_is_asked_once(slurm, words):
    calls = slurm(f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmError):
        gateway().hold("7")
    assert len(calls.read_text().splitlines()) == 1


def test_a_command_that_hangs_is_given_up_once(slurm):
    calls = slurm("exec sleep 60")
    began = time.monotonic()
    with pytest.raises(TimedOut, match="no answer in 3 s") as caught:
        gateway(timeout_s=3).hold("7")
    assert time.monotonic() - began < 20
    assert isinstance(caught.value, Transient)
    assert len(calls.read_text().splitlines()) == 1


def test_one_update_carries_the_whole_placement():
    placement = JobPlacement("rtx", ("rtx-00", "rtx-01"), 8, 2, 6, ends_begin=True)
    assert " ".join(arguments(Write("12_3", "place", placement))) == (
        "update JobId=12_3 Partition=rtx NumNodes=2-2 NumTasks=2 NumCPUs=6 TresPerNode=gres:gpu:8 "
        "ReqNodeList=rtx-00,rtx-01 StartTime=now"
    )
    of_one = arguments(Write("12", "place", JobPlacement("t4", ("t4-00",), 1, None, 1)))
    assert not {"NumTasks", "StartTime"} & {word.partition("=")[0] for word in of_one}


def test_a_job_with_several_tasks_on_a_node_is_sent_with_their_number_and_cpus(slurm):
    """MinCPUsNode is still that of the submission, and Slurm starts no job with fewer CPUs than that."""
    calls = slurm("true")
    place = Write("12", "place", JobPlacement("t4", ("t4-00", "t4-01"), 2, 4, 12, tasks_per_node=2))
    gateway().leave_to_slurm("12", PlainShape("t4", 2, 3, 3), 6, 10)
    leave, _ = calls.read_text().splitlines()
    assert "NumTasks=4 NumCPUs=12 TasksPerNode=2 MinCPUsNode=6" in " ".join(arguments(place))
    assert "NumTasks=6 NumCPUs=6 TasksPerNode=3 MinCPUsNode=3" in leave


@pytest.mark.parametrize(("stand_in", "word"), [(False, "TresPerNode="), (True, "TresPerNode=gres:penstock:1")])
def test_a_job_that_shares_is_sent_without_gpus(stand_in, word):
    assert word in arguments(Write("12", "place", JobPlacement("t4", ("t4-00",), 0, 1, 1, stand_in=stand_in)))


@pytest.mark.parametrize("job_id", ["", "-1", "7 8", "4_[1-5]", "JobId=7", "--help", "7\n"])
def test_an_id_that_is_none_starts_no_command(slurm, job_id):
    calls = slurm("true")
    with pytest.raises(JobGone, match="no job has such an id"):
        gateway().cancel(job_id)
    assert not calls.exists()


@pytest.mark.parametrize("text", ["a\0b", "x" * 100_001])
def test_a_comment_that_cannot_be_passed_on_is_refused(slurm, text):
    calls = slurm("true")
    with pytest.raises(Refused, match="shorten it"):
        gateway().set_admin_comment("7", text)
    assert not calls.exists()


@pytest.mark.parametrize("read", ["jobs", "version"])
def test_an_answer_in_another_form_is_told(slurm, read):
    slurm("echo 'NodeName=x State=IDLE'; echo ReservationName=y", version="none")
    with pytest.raises(UnreadableAnswer):
        getattr(gateway(), read)()


def test_after_an_answer_with_an_unknown_value_the_version_is_read_again(slurm):
    """Slurm may have been upgraded while penstockd runs."""
    slurm("echo NodeName=x State=IDLE+BLOCKED")
    ours = gateway()
    (node,) = ours.nodes()
    assert "State=IDLE+BLOCKED" in map(str, node.unknown)
    slurm("echo NodeName=x State=IDLE+BLOCKED", version="slurm 24.05.1")
    (node,) = ours.nodes()
    assert "State=IDLE+BLOCKED" not in map(str, node.unknown)


def test_a_field_that_this_slurm_does_not_know_is_told(slurm):
    slurm("echo 'squeue: error: Invalid job format specification: NumTasks' >&2")
    with pytest.raises(UnreadableAnswer, match="NumTasks"):
        gateway().jobs()


def test_the_users_variables_do_not_reach_the_commands(slurm, monkeypatch, tmp_path):
    for name in ("SQUEUE_FORMAT", "SQUEUE_STATES", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SCANCEL_STATE", "SINFO_ALL"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    slurm(f"env > {tmp_path}/env")
    gateway().hold("7")
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert {name for name in seen if name.startswith(("S", "LC_")) and name != "SHLVL"} & set(seen) >= {"SLURM_CONF"}
    assert {name for name in seen if name.startswith(("SQUEUE", "SLURM", "SCANCEL", "SINFO"))} == {"SLURM_CONF"}
    assert (seen["SLURM_CONF"], seen["LC_ALL"]) == ("/kept", "C")


def test_the_separator_is_new_each_time_and_not_among_the_arguments(slurm, tmp_path):
    calls = slurm(f"echo $SQUEUE_FORMAT2 >> {tmp_path}/formats")
    gateway().jobs()
    gateway().jobs(finished=True)
    first, second = (tmp_path / "formats").read_text().splitlines()
    assert first != second
    assert first.split(",")[0].removeprefix("JobID:0") not in calls.read_text()
    assert calls.read_text().splitlines() == ["squeue -a -h -r --local", "squeue -a -h -r --local -t all"]


def test_without_the_commands_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandsMissing, match="install Slurm's commands") as caught:
        gateway()
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": ()},
        {"nodes": ("a", "a")},
        {"gpus_per_node": -1},
        {"cpus": 0},
        {"tasks": 0},
    ],
)
def test_a_placement_that_cannot_be_is_not_made(wrong):
    good = {"partition": "t4", "nodes": ("a", "b"), "gpus_per_node": 1, "tasks": 2, "cpus": 2}
    JobPlacement(**good)
    with pytest.raises(ValueError, match="="):
        JobPlacement(**{**good, **wrong})


@pytest.mark.parametrize("wrong", [("hold", True), ("place", False)])
def test_only_placing_has_a_placement(wrong):
    kind, placed = wrong
    with pytest.raises(ValueError, match="placement"):
        Write("1", kind, JobPlacement("p", ("a",), 1, 1, 1) if placed else None)


@pytest.mark.parametrize(("left_s", "status"), [(60.0, 0), (-1.0, OVER)])
def test_a_command_keeps_its_time_in_a_container_that_shows_its_own_uptime(tmp_path, left_s, status):
    """lxcfs counts from the container's start, which is later than the machine's."""
    uptime = tmp_path / "uptime"
    uptime.write_text("40.00 10.00\n")
    argv = guarded(["true"], boot_s() + left_s, uptime)
    assert subprocess.run(argv, check=False).returncode == status
    uptime.write_text("104.00 10.00\n")  # it was frozen in between
    assert subprocess.run(argv, check=False).returncode == OVER
