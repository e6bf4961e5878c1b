"""The spool under attack: a folder in which the jobs of all users write, and which penstockd reads as root in each tick.

A user sees what is theirs. What users put there costs a tick no more than a bound, delays no report of another user's job, and an
admin learns whose it is.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_executor import Environment, connect
from penstock_profiles.wire import (
    Checkpointed,
    ControlMessage,
    control_file,
    inbox_folder,
    left_file,
    reports_file,
    reports_folder,
)
from penstock_scheduler.store import spool as spools
from penstock_scheduler.store.disks import spool_check
from penstock_scheduler.store.inbox import LEFT, TAKEN_AT_ONCE, TURNS, foreign_in, refused_folder
from penstock_scheduler.store.spool import Spool
from penstock_slurm.jobs.holds import HoldFiles
from tests.folders import public_folder

ME = os.geteuid()
AS_ROOT = pytest.mark.skipif(ME != 0, reason="only root can become another user")
ANN, BEN = 64_001, 64_002
"""Users that no host knows."""

JOBS = [str(number) for number in range(1, 20 * TURNS)]
DONE = Checkpointed(progress=5, seconds=0.1)

_watched: list[list[str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _watched and event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir"):
        _watched[-1].append(f"{event} {arguments[0]!s}")


sys.addaudithook(_note)


def calls(done: Callable[[], object]) -> list[str]:
    """The calls on files while `done` runs."""
    _watched.append([])
    try:
        done()
    finally:
        found = _watched.pop()
    return found


def as_user(uid: int, call: Callable[[], object], gid: int | None = None) -> object:
    """The result of `call`, or its error, in a process of that user."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(gid or uid, gid or uid, gid or uid)
            os.setresuid(uid, uid, uid)
            try:
                answer = call()
            except OSError as error:
                answer = f"{type(error).__name__}"
            except BaseException as error:
                answer = repr(error)
            os.write(write, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A spool that every user can reach."""
    with public_folder() as found:
        yield found / "spool"


def tell(spool: Spool, job: str, uid: int, epoch: int = 1) -> None:
    spool.tell(ControlMessage(job_id=job, epoch=epoch, round=1), uid)


def report(folder: Path, job: str) -> str:
    """What a job does, as its user."""
    client = connect(None, Environment(job_id=job, spool=folder))
    client.report(DONE)
    assert client.poll() is None
    return "reported" if client.reported() else "nothing reported"


def seen_by_cat(folder: Path, job: str) -> list[str]:
    """What somebody reads of a job."""
    found = []
    paths = [control_file(folder, job), reports_file(folder, job, 1), reports_folder(folder, job)]
    for path in paths:
        try:
            found.append(str(os.listdir(path) if path.is_dir() else path.read_text()[:20]))
        except OSError as error:
            found.append(type(error).__name__)
    return found


NOTHING = ["PermissionError"] * 3


@AS_ROOT
@pytest.mark.parametrize("lists", [True, False], ids=["access control lists", "none"])
def test_a_user_sees_nothing_of_other_users_jobs_and_reports_as_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, lists: bool
) -> None:
    known = {ANN: 70_001, BEN: 70_002}
    monkeypatch.setattr(spools.pwd, "getpwuid", lambda uid: pwd.struct_passwd(("u", "", uid, known[uid], "", "", "")))
    if not lists:
        monkeypatch.setattr(spools, "ACL", "user.no-list")
    spool = Spool(folder, alone=True)
    for job, uid in (("1", ANN), ("2", BEN), ("3", 0)):
        tell(spool, job, uid)
    for job, uid in (("1", ANN), ("2", BEN)):
        assert as_user(uid, lambda job=job: report(folder, job), known[uid]) == "reported"  # type: ignore[misc]
    report(folder, "3")
    assert {each.job_id for each in spool.read(["1", "2", "3"], {"1": ANN, "2": BEN, "3": 0})} == {"1", "2", "3"}
    for job, uid in (("2", ANN), ("3", ANN), ("1", BEN)):
        assert as_user(uid, lambda job=job: seen_by_cat(folder, job), known[uid]) == NOTHING  # type: ignore[misc]

    def attack() -> list[str]:
        found = []
        for act in (
            lambda: control_file(folder, "1").write_text("{}"),
            lambda: control_file(folder, "1").unlink(),
            lambda: reports_folder(folder, "1").rename(folder / "1" / "other"),
            lambda: reports_folder(folder, "1").chmod(0o755),
            lambda: (folder / "1").chmod(0o755),
            lambda: (folder / "1" / "new").touch(),
            lambda: (folder / "9").mkdir(),
        ):
            try:
                act()
                found.append("done")
            except OSError as error:
                found.append(type(error).__name__)
        return found

    own = as_user(ANN, attack, known[ANN])
    assert own == ["PermissionError"] * 3 + ["done"] + ["PermissionError"] * 3, (
        "it may open its reports to others, no more"
    )
    tell(spool, "1", ANN, epoch=2)
    tell(spool, "2", BEN, epoch=2)
    assert as_user(ANN, lambda: control_file(folder, "1").read_text()[:1], known[ANN]) == "{", (
        "a requeued job reads its own"
    )
    assert stat.S_IMODE(reports_folder(folder, "1").stat().st_mode) == 0o700


@AS_ROOT
def test_who_holds_which_job_is_for_the_daemon_alone(folder: Path) -> None:
    folder.mkdir()
    files = HoldFiles(folder)
    (folder / "holds").mkdir(0o755)
    for act in (lambda: files.hold("7", "ann", admin=False), lambda: files.release("8")):
        act()
        assert as_user(BEN, lambda: os.listdir(folder / "holds")) == "PermissionError"
        assert as_user(BEN, lambda: (folder / "holds" / "7.held").read_text()) == "PermissionError"
        (folder / "holds").chmod(0o755)
    assert files.read().held["7"].by == "ann"


@AS_ROOT
def test_a_job_that_runs_while_penstock_is_upgraded_goes_on_reporting_and_its_folder_becomes_private(
    folder: Path,
) -> None:
    """The older daemon's folders have mode 0755. The job's process has its reports open all the time."""
    Spool(folder)
    for job, uid in (("1", ANN), ("2", ANN)):
        reports_folder(folder, job).mkdir(parents=True)
        control_file(folder, job).write_text(ControlMessage(job_id=job, epoch=1, round=1).model_dump_json())
        os.chown(reports_folder(folder, job), uid, uid)
    assert as_user(ANN, lambda: report(folder, "1")) == "reported"
    os.utime(reports_folder(folder, "1"), (1, 1))
    assert as_user(BEN, lambda: seen_by_cat(folder, "1")) != NOTHING
    spool = Spool(folder, alone=True)
    assert spool.recent(1e6) == {"2"}
    assert as_user(BEN, lambda: seen_by_cat(folder, "1") + seen_by_cat(folder, "2")) == NOTHING * 2
    for job in ("1", "2"):
        assert as_user(ANN, lambda job=job: report(folder, job)) == "reported"  # type: ignore[misc]
    assert len(spool.read(["1", "2"], {"1": ANN, "2": ANN})) == 2, "of the newest runs"


@AS_ROOT
def test_a_job_whose_id_another_user_had_before_is_the_new_users(folder: Path) -> None:
    spool = Spool(folder, alone=True)
    tell(spool, "1", ANN)
    tell(spool, "1", BEN, epoch=2)
    assert as_user(ANN, lambda: seen_by_cat(folder, "1"))[:1] == NOTHING[:1]  # type: ignore[index]
    assert as_user(BEN, lambda: report(folder, "1")) == "reported"


@AS_ROOT
def test_a_daemon_that_is_not_root_lets_its_users_report_where_lists_exist(folder: Path) -> None:
    def daemon() -> None:
        tell(Spool(folder), "1", ANN)

    folder.mkdir()
    os.chown(folder, BEN, BEN)
    assert as_user(BEN, daemon) is None
    if os.lstat(folder / "1").st_mode & 0o070 == 0:
        pytest.skip("the file system has no access control lists")
    assert as_user(ANN, lambda: report(folder, "1")) == "reported"
    assert as_user(BEN, lambda: len(Spool(folder).read(["1"], {"1": ANN}))) == 1
    assert as_user(ANN + 7, lambda: seen_by_cat(folder, "1")) == NOTHING


@pytest.fixture
def read_before(tmp_path: Path) -> Spool:
    """A spool in which every job was read before."""
    found = Spool(tmp_path / "spool", alone=True)
    found.read(JOBS)
    return found


def announced(spool: Spool, job: str) -> bool:
    """Whether a report of this job is read in the next two ticks."""
    connect(None, Environment(job_id=job, spool=spool.folder)).report(DONE)
    return any(each.job_id == job for _ in range(2) for each in spool.read(JOBS))


def fill(folder: Path, kind: str, number: int) -> None:
    for each in range(number):
        path = folder / f"x{each}"
        if kind == "folders":
            path.mkdir()
        elif kind == "files":
            path.touch()
        else:
            path.symlink_to("/nowhere")


@pytest.mark.parametrize("kind", ["folders", "files", "links"])
def test_thousands_of_entries_in_the_inbox_delay_no_report_and_cost_a_tick_little(
    read_before: Spool, kind: str
) -> None:
    spool, folder = read_before, inbox_folder(read_before.folder)
    fill(folder, kind, TAKEN_AT_ONCE + 2000)
    assert announced(spool, JOBS[-1])
    assert len(calls(lambda: spool.read(JOBS))) <= 1 + 2 * (TURNS + 1)
    assert len(os.listdir(folder)) == 0
    assert announced(spool, JOBS[-2])
    assert str(refused_folder(spool.folder)) in foreign_in(spool.folder)
    assert pwd.getpwuid(ME).pw_name in foreign_in(spool.folder)
    assert stat.S_IMODE(refused_folder(spool.folder).stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_what_cannot_be_taken_away_is_tried_once(read_before: Spool) -> None:
    spool, folder = read_before, inbox_folder(read_before.folder)
    fill(folder, "folders", LEFT)
    spool.read(JOBS)
    assert len(calls(lambda: spool.read(JOBS))) <= 1 + 2 * TURNS
    assert announced(spool, JOBS[-1])
    assert foreign_in(spool.folder) == ""
    (folder / "one more").mkdir()
    spool.read(JOBS)
    assert os.listdir(folder) == []
    assert "rm -r" in foreign_in(spool.folder)


def odd(path: Path, kind: str) -> None:
    """Put something odd there."""
    if kind == "folder":
        (path / "more").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "link to a folder":
        path.symlink_to("/etc")
    else:
        path.symlink_to("/nowhere/at/all")


ODD = ["folder", "pipe", "socket", "link to a folder", "dangling link"]


@pytest.mark.parametrize("kind", ODD)
def test_nothing_in_the_place_of_an_announcement_keeps_a_job_from_announcing(
    read_before: Spool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(read_before.folder)  # the path of a socket is short
    for job in JOBS[-3:]:
        odd(Path("inbox") / job, kind)
    read_before.read(JOBS)
    for job in JOBS[-3:]:
        assert announced(read_before, job)
        assert announced(read_before, job)


def test_an_announcement_that_comes_while_the_inbox_is_set_aside_counts(
    read_before: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, made = read_before, Path.rename
    connect(None, Environment(job_id=JOBS[-1], spool=spool.folder)).report(DONE)
    spool.read(JOBS)

    def late(path: Path, target: Path) -> Path:
        connect(None, Environment(job_id=JOBS[-1], spool=spool.folder)).report(DONE)
        return made(path, target)

    odd(inbox_folder(spool.folder) / JOBS[-2], "folder")
    monkeypatch.setattr(Path, "rename", late)
    assert [each.job_id for each in spool.read(JOBS)] == [JOBS[-1]]


def test_what_is_remembered_of_the_inbox_has_a_bound(read_before: Spool) -> None:
    spool, box = read_before, read_before._inbox
    assert box is not None
    for turn in range(3):
        for each in range(500):
            (inbox_folder(spool.folder) / f"y{turn}-{each}").touch()
        spool.read(JOBS)
    assert not any(name.startswith("y") for name in box._announcing | box._left | box._silent | box._again)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("where", ["reports", "1.jsonl", "left-0-n1"])
def test_odd_things_in_a_job_folder_concern_that_job_alone(
    read_before: Spool, where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = read_before
    monkeypatch.chdir(spool.folder)
    path = Path("1") / ("reports" if where == "reports" else f"reports/{where}")
    path.parent.mkdir(parents=True)
    odd(path, kind)
    (inbox_folder(spool.folder) / "1").touch()
    assert announced(spool, JOBS[-1])
    found = calls(lambda: (spool.read(JOBS, awaited={"1"}), spool.has_left("1", 0, ["n1"])))
    assert not [each for each in found if "/etc" in each or "/nowhere" in each], "no link is followed"


def test_a_link_in_place_of_a_nodes_note_is_not_followed(read_before: Spool) -> None:
    """It may lead to a mount that hangs. Whoever makes it says, as with a file, that its own processes have ended."""
    path = left_file(read_before.folder, "1", 0, "n1")
    path.parent.mkdir(parents=True)
    path.symlink_to(path)
    assert read_before.has_left("1", 0, ["n1"])


def test_a_reports_folder_with_many_names_costs_each_tick_little(
    read_before: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are made smaller: two jobs have as many names as a tick lists."""
    monkeypatch.setattr(spools, "MOST_NAMES", 500)
    monkeypatch.setattr(spools, "LISTED_IN_TICK", 900)
    spool, liars = read_before, JOBS[:10]
    for job in liars:
        reports_folder(spool.folder, job).mkdir(parents=True)
        for each in range(600):
            (reports_folder(spool.folder, job) / f"x{each}").touch()
        connect(None, Environment(job_id=job, spool=spool.folder)).report(DONE)
    spool.read(JOBS)
    for job in liars:
        (inbox_folder(spool.folder) / job).touch()
    listed: list[int] = []
    before = spools.islice
    monkeypatch.setattr(
        spools, "islice", lambda entries, most: [listed.append(1) or each for each in before(entries, most)]
    )
    assert announced(spool, JOBS[-1])
    assert sum(listed) <= 2 * (900 + 500 + 10)


def test_doctor_hears_of_it_through_the_check_of_the_spool(tmp_path: Path) -> None:
    found = spool_check(tmp_path, lambda: 1.0)
    found.check()
    assert (found.record.foreign, found.record.error) == ("", "")
    (refused_folder(tmp_path) / "inbox-1" / "x").mkdir(parents=True)
    tmp_path.chmod(0o777)
    found.check()
    assert f"chmod o-w {tmp_path}" in found.record.foreign
    assert "rm -r" in found.record.foreign


def test_the_check_of_the_spool_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / ".penstockd-writes").symlink_to(tmp_path / "victim")
    spool_check(tmp_path, lambda: 1.0).check()
    assert (tmp_path / "victim").read_text() == "kept"
