"""The back end `cli` with stand-ins for Slurm's commands: what it does when they misbehave."""

import stat
import time
from pathlib import Path

import pytest

from penstock_scheduler.errors import ConfigError
from penstock_slurm.gateway import (
    BackendMissing,
    ControllerAway,
    JobGone,
    JobPlacement,
    Refused,
    SlurmError,
    TimedOut,
    Transient,
    UnreadableAnswer,
    Unregistered,
    Write,
    open_gateway,
)
from penstock_slurm.gateway.batch import FEEDS
from penstock_slurm.gateway.commands import COMMANDS
from penstock_slurm.gateway.errors import MESSAGES, error_from


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """slurm(body): every command becomes this shell script. They log their arguments to `calls`."""

    def install(body: str) -> Path:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        for command in COMMANDS:
            path = tmp_path / command
            path.write_text(f'#!/bin/sh\nprintf "%s\\n" "${{0##*/}} $*" >> {calls}\n{body}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return calls

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return install


def gateway(timeout_s: float = 30.0):
    return open_gateway("cli", conf=None, timeout_s=timeout_s)


def test_each_word_of_the_table_has_its_class():
    for words, kind, where in MESSAGES:
        error = error_from(f"slurm_update error: {words.capitalize()} for job 7", command="scontrol update", job_id="7")
        assert type(error) is kind
        assert where
        assert (error.job_id, error.command) == ("7", "scontrol update")
        assert words in str(error).lower()


def test_unknown_words_are_a_refusal_of_a_write_and_an_absence_for_a_reading(slurm):
    slurm("echo 'slurm_update error: Never heard of this' >&2; exit 1")
    with pytest.raises(Refused, match="Never heard of this"):
        gateway().hold("7")
    with pytest.raises(ControllerAway, match="Never heard of this"):
        gateway().nodes()


def test_a_refused_change_is_seen_although_the_command_returns_0(slurm):
    slurm("echo 'scancel: error: Kill job error on job id 7: Invalid job id specified' >&2")
    with pytest.raises(JobGone) as caught:
        gateway().cancel("7")
    assert caught.value.job_id == "7"


def test_what_passes_is_asked_three_times(slurm):
    calls = slurm("echo 'slurm_update error: Resource temporarily unavailable' >&2; exit 1")
    with pytest.raises(Transient):
        gateway().place("7", JobPlacement("t4", ("t4-00",), 2, 1, 1))
    assert len(calls.read_text().splitlines()) == 3


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
    with pytest.raises(TimedOut, match=r"no answer in 0\.3 s") as caught:
        gateway(timeout_s=0.3).hold("7")
    assert time.monotonic() - began < 20
    assert isinstance(caught.value, Transient)
    assert len(calls.read_text().splitlines()) == 1


def test_one_update_carries_the_whole_placement(slurm):
    calls = slurm("true")
    gateway().place("12_3", JobPlacement("rtx", ("rtx-00", "rtx-01"), 8, 2, 6))
    assert calls.read_text() == (
        "scontrol update JobId=12_3 Partition=rtx NumNodes=2-2 NumTasks=2 NumCPUs=6 TresPerNode=gres:gpu:8 "
        "ReqNodeList=rtx-00,rtx-01 StartTime=now\n"
    )
    gateway().place("12", JobPlacement("t4", ("t4-00",), 1, None, 1))
    assert "NumTasks" not in calls.read_text().splitlines()[1]


@pytest.mark.parametrize(("stand_in", "word"), [(False, "TresPerNode="), (True, "TresPerNode=gres:penstock:1")])
def test_a_job_that_shares_is_sent_without_gpus(slurm, stand_in, word):
    calls = slurm("true")
    gateway().place("12", JobPlacement("t4", ("t4-00",), 0, 1, 1, stand_in=stand_in))
    assert word in calls.read_text().split()


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


@pytest.mark.parametrize("read", ["nodes", "partitions", "jobs", "version"])
def test_an_answer_in_another_form_is_told(slurm, read):
    slurm("echo 'NodeName=x State=IDLE'; echo PartitionName=y")
    with pytest.raises(UnreadableAnswer):
        getattr(gateway(), read)()


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
    with pytest.raises(BackendMissing, match="install Slurm's commands") as caught:
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


def test_many_writes_go_through_one_scontrol_and_each_is_answered_for_itself(slurm, tmp_path):
    """The stand-in answers as scontrol 22.05.8 does: nothing for what it did, and to an unknown word that it is unknown."""
    slurm(
        f"""tee -a {tmp_path}/fed | while read -r line; do case "$line" in
        penstock*) echo "invalid keyword: $line" >&2 ;;
        "release 1,2"|"release 2") echo "Invalid job id specified for job 2" >&2 ;;
        *nowhere*) echo "Invalid partition name specified for job 3" >&2 ;;
        esac; done; exit 1"""
    )
    # Several of a kind are one line; as something is wrong there, each is asked again by itself.
    nowhere = Write("3", "place", JobPlacement("nowhere", ("a",), 1, 1, 1))
    odd = Write("5", "place", JobPlacement("p", ("a b",), 1, 1, 1))
    done = gateway().write(
        [
            Write("1", "release"),
            Write("2", "release"),
            nowhere,
            Write("4", "requeue_hold"),
            odd,
            Write("x", "hold"),
            Write("6", "hold"),
            Write("7", "hold"),
        ]
    )
    assert [type(error) for error in done] == [
        *(type(None), JobGone, Refused, type(None), Refused, JobGone),
        *2 * [type(None)],
    ]
    fed = [line for line in (tmp_path / "fed").read_text().splitlines() if not line.startswith("penstock")]
    assert sorted(fed) == sorted(
        ["release 1,2", nowhere_line(), "requeuehold Incomplete 4", "hold 6,7", "release 1", "release 2"]
    )
    assert "a b" in done[4].text
    assert "partition" in done[2].text


def nowhere_line() -> str:
    return (
        "update JobId=3 Partition=nowhere NumNodes=1-1 NumTasks=1 NumCPUs=1 TresPerNode=gres:gpu:1 ReqNodeList=a "
        "StartTime=now"
    )


def test_of_many_writes_only_those_that_pass_by_themselves_are_sent_again(slurm, tmp_path):
    slurm(
        f"""while read -r line; do echo "$line" >> {tmp_path}/fed; case "$line" in
        penstock*) echo "invalid keyword: $line" >&2 ;;
        "release 2") mkdir {tmp_path}/once 2>/dev/null && echo "Resource temporarily unavailable" >&2 ;;
        esac; done"""
    )
    assert gateway().write([Write("1", "hold"), Write("2", "release")]) == (None, None)
    assert (tmp_path / "fed").read_text().split("\n")[::2] == ["hold 1", "release 2", "release 2", ""]


def test_many_writes_to_a_scontrol_that_hangs_are_given_up_together(slurm):
    calls = slurm("exec sleep 60")
    done = gateway(timeout_s=0.3).write([Write(str(number), "hold") for number in range(250)])
    assert {type(error) for error in done} == {TimedOut}
    assert len(done) == 250
    assert set(calls.read_text().splitlines()) == {"scontrol "}
    assert len(calls.read_text().splitlines()) <= FEEDS, "what would hang again is not sent"


def test_many_writes_to_a_scontrol_that_stops_half_way(slurm, tmp_path):
    """What it did not get to is not known to be done."""
    slurm(f"mkdir {tmp_path}/once 2>/dev/null && echo 'invalid keyword: penstock-after-0' >&2")
    first, second = gateway().write([Write("1", "hold"), Write("2", "release")])
    assert first is None
    assert isinstance(second, Transient)
    assert second.job_id == "2"


def test_many_writes_leave_slurmctld_time_for_others(slurm):
    """250 writes at 500 a second: a pause before the last fifty, so at least 0.4 s."""
    slurm("sed -n 's/^penstock/invalid keyword: penstock/p' >&2")
    begun_s = time.monotonic()
    assert set(gateway().write([Write(str(number), "hold") for number in range(250)])) == {None}
    assert time.monotonic() - begun_s >= 0.4


@pytest.mark.parametrize("wrong", [("hold", True), ("place", False)])
def test_only_placing_has_a_placement(wrong):
    kind, placed = wrong
    with pytest.raises(ValueError, match="placement"):
        Write("1", kind, JobPlacement("p", ("a",), 1, 1, 1) if placed else None)


# Jobs that slurmdbd has not registered

UNREGISTERED = r"""
serve() {
    echo "$1" >> FOLDER/fed
    for job in $(echo "$1" | sed -nE 's/^(hold|release|update) (JobId=)?([0-9_,]+).*/\3/p' | tr , ' '); do
        test ! -e FOLDER/unregistered-$job && continue
        echo "Job update not available right now, the DB index is being set, try again in a bit for job $job" >&2
        code=1
    done
}
code=0
test $# = 0 || serve "$*"
test $# != 0 || while read -r line; do case "$line" in
    penstock*) echo "invalid keyword: $line" >&2 ;;
    *Requeue=1) exec sleep 60 ;;
    *) serve "$line" ;;
esac; done
exit $code"""
"""Like scontrol 22.05.8, with arguments or at its prompt, where it hangs at a `split`."""


@pytest.fixture
def unregistered(slurm, tmp_path):
    """unregistered(*jobs): slurmdbd has registered all jobs but these. Returns what tells the commands since then."""
    slurm(UNREGISTERED.replace("FOLDER", str(tmp_path)))
    fed = tmp_path / "fed"

    def since() -> list[str]:
        lines = fed.read_text().splitlines() if fed.exists() else []
        fed.unlink(missing_ok=True)
        return lines

    def install(*jobs: str):
        for path in tmp_path.glob("unregistered-*"):
            path.unlink()
        for job in jobs:
            (tmp_path / f"unregistered-{job}").touch()
        return since

    return install


def kinds(errors: tuple[SlurmError | None, ...]) -> list[type]:
    return [type(error) for error in errors]


DONE = type(None)


def test_what_scontrol_had_answered_before_it_hung_counts(unregistered):
    fed = unregistered("2")
    writes = [Write("1", "put_first"), Write("2", "hold"), Write("3", "split"), Write("4", "release")]
    slurm = gateway(timeout_s=5)
    done = slurm.write(writes)
    assert kinds(done) == [DONE, Unregistered, TimedOut, TimedOut]
    assert [error.job_id for error in done[1:] if error is not None] == ["2", "3", "4"]
    assert fed() == ["update JobId=1 Priority=4294967293", "hold 2"]
    assert kinds(slurm.write(writes[1:2])) == [Unregistered]
    assert fed() == [], "also that it is not registered"


def test_a_job_that_is_not_registered_is_asked_once_and_holds_nobody_up(unregistered):
    fed, slurm = unregistered("3"), gateway()
    writes = [Write("3", "put_first"), Write("4", "release")]
    first = slurm.write(writes)
    assert kinds(first) == [Unregistered, DONE]
    assert fed() == ["update JobId=3 Priority=4294967293", "release 4"]
    assert slurm.write(writes)[0].args == first[0].args, "the round's outcome stays the same"
    assert fed() == ["release 4"]
    assert "submit it again, or see docs/developer/slurm-gateway.md" in str(first[0])


def test_of_several_in_one_line_those_that_are_not_registered_are_not_asked_twice(unregistered):
    fed = unregistered("2", "5")
    done = gateway().write([Write(str(number), "release") for number in range(1, 6)])
    assert kinds(done) == [DONE, Unregistered, DONE, DONE, Unregistered]
    assert fed() == ["release 1,2,3,4,5", "release 1", "release 3", "release 4"]


def test_a_job_that_is_not_registered_is_asked_again_later_and_last(unregistered, monkeypatch):
    fed, slurm = unregistered("3", "1"), gateway()
    writes = [Write(number, "release") for number in ("3", "1", "2", "4")]
    slurm.write([writes[0]])
    slurm.write(writes)
    fed()
    monkeypatch.setattr("penstock_slurm.gateway.commands.UNREGISTERED_S", 0.0)
    assert kinds(slurm.write(writes)) == [Unregistered, Unregistered, DONE, DONE]
    assert fed() == ["release 2,4", "release 3", "release 1"]
    unregistered()
    assert kinds(slurm.write(writes)) == [DONE] * 4
    assert fed() == ["release 2,4", "release 3", "release 1"]
    slurm.write(writes)
    assert fed() == ["release 3,1,2,4"], "forgotten"


def test_a_batch_of_which_the_last_is_not_registered_is_not_given_up(unregistered, monkeypatch):
    monkeypatch.setattr("penstock_slurm.gateway.batch.AT_ONCE", 2)
    unregistered("2")
    done = gateway().write([Write(str(number), "release") for number in range(1, 5)])
    assert kinds(done) == [DONE, Unregistered, DONE, DONE]


def test_single_commands_about_a_job_that_is_not_registered(unregistered):
    """Slurm does all but update it."""
    fed, slurm = unregistered("7"), gateway()
    for _ in range(2):
        with pytest.raises(Unregistered, match="docs/developer/slurm-gateway"):
            slurm.hold("7")
    with pytest.raises(Unregistered):
        slurm.set_admin_comment("7", "x")
    slurm.begin_later(["7"], 600)
    slurm.begin_later(["8", "7", "9"], 600)
    assert fed() == ["hold 7", "update JobId=8,9 StartTime=now+600"]
    slurm.cancel("7")
    unregistered()
    slurm.set_admin_comment("7", "x")
    assert fed() == ["-v 7", "update JobId=7 AdminComment=x"], "a command that Slurm has done ends the waiting"


def test_begin_times_of_several_find_out_which_are_not_registered(unregistered):
    fed, slurm = unregistered("8", "9_1"), gateway()
    slurm.begin_later(["7", "8", "9_1"], 600)
    slurm.begin_later(["7", "8", "9_1"], 600)
    assert fed() == ["update JobId=7,8,9_1 StartTime=now+600", "update JobId=7 StartTime=now+600"]
