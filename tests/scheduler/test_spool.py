"""What the daemon reads in the spool, and when: control messages once, and the reports of jobs that have news."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_executor import Client, Environment, connect
from penstock_profiles.wire import (
    Checkpointed,
    ControlMessage,
    Report,
    SaveFailed,
    control_file,
    inbox_folder,
    reports_file,
    reports_folder,
)
from penstock_scheduler.people.errors import StoreError
from penstock_scheduler.store import spool as spool_module
from penstock_scheduler.store.inbox import TURNS
from penstock_scheduler.store.spool import READ_AT_ONCE, Spool

DONE = Checkpointed(progress=5, seconds=0.1)
MANY = [str(number) for number in range(1, 20 * TURNS)]

_watched: list[list[str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _watched and event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir"):
        _watched[-1].append(f"{event} {arguments[0]!s}")


sys.addaudithook(_note)


def calls(folder: Path, done: Callable[[], object]) -> list[str]:
    """The calls on files below a folder while `done` runs."""
    _watched.append([])
    try:
        done()
    finally:
        found = _watched.pop()
    return [each for each in found if str(folder) in each]


def write(spool: Path, job: str, sequence: int = 0, epoch: int = 1) -> None:
    """A report of a run that announces nothing."""
    path = reports_file(spool, job, epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(Report(job_id=job, epoch=epoch, sequence=sequence, time_s=1.0, body=DONE).model_dump_json() + "\n")


@pytest.mark.parametrize("rubbish", ["\n", "x\n", "{" + "x" * 80 + "\n"])
def test_a_million_lines_that_are_no_reports_are_one_line_in_the_log(
    tmp_path: Path, rubbish: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "1")
    with reports_file(tmp_path, "1", 1).open("a", encoding="utf-8") as file:
        file.write(rubbish * (READ_AT_ONCE // 2 // len(rubbish)))
    write(tmp_path, "1", 1)
    assert [each.sequence for each in Spool(tmp_path).read(["1"])] == [0, 1]
    assert len(caplog.records) == 1


def test_a_tick_does_not_read_all_that_many_jobs_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart. Each job has its turn in each tick, those that are awaited a longer one, and nothing is lost."""
    monkeypatch.setattr(spool_module, "READ_IN_TICK", 8000)
    monkeypatch.setattr(spool_module, "READ_AT_ONCE", 4000)
    monkeypatch.setattr(spool_module, "READ_AT_LEAST", 1000)
    names = [f"{number}" for number in range(1, 9)]
    for name in names:
        for sequence in range(100):
            write(tmp_path, name, sequence)
    size = reports_file(tmp_path, "1", 1).stat().st_size / 100
    spool, read = Spool(tmp_path), {name: list[int]() for name in names}
    for tick in range(200):
        found = spool.read(names, awaited={"8"})
        for each in found:
            read[each.job_id].append(each.sequence)
        if tick == 0:
            assert [round(len(read[name]) * size, -3) for name in ("1", "2", "3", "7", "8")] == [
                4e3,
                4e3,
                1e3,
                1e3,
                4e3,
            ]
        if not found:
            break
    assert read == {name: list(range(100)) for name in names}


def run(spool: Path, job: str) -> Client:
    return connect(None, Environment(job_id=job, spool=spool))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """A spool in which every one of MANY jobs was read before."""
    found = Spool(tmp_path / "spool", alone=True)
    found.read(MANY)
    return found


def test_a_report_is_read_at_the_next_tick_however_many_jobs_there_are(spool: Spool):
    client = run(spool.folder, MANY[-1])
    client.report(DONE)
    assert [each.job_id for each in spool.read(MANY)] == [MANY[-1]]
    assert spool.read(MANY) == []
    client.report(DONE)
    client.report(DONE)
    assert [each.sequence for each in spool.read(MANY)] == [1, 2]


def test_jobs_without_news_cost_a_fixed_number_of_calls(spool: Spool):
    assert len(calls(spool.folder, lambda: spool.read(MANY))) <= 1 + 2 * TURNS


def test_a_program_that_announces_nothing_is_found_and_then_read_in_every_tick(spool: Spool):
    job = MANY[len(MANY) // 2]
    write(spool.folder, job)
    ticks = next(tick for tick in range(100) if spool.read(MANY))
    assert ticks <= len(MANY) / TURNS
    for sequence in range(1, 4):
        write(spool.folder, job, sequence)
        assert [each.sequence for each in spool.read(MANY)] == [sequence]


def test_with_few_jobs_every_one_is_read_in_every_tick(tmp_path: Path):
    spool, jobs = Spool(tmp_path, alone=True), MANY[:TURNS]
    for sequence in range(3):
        for job in jobs:
            write(tmp_path, job, sequence)
        assert len(spool.read(jobs)) == TURNS


def test_an_awaited_job_is_read_in_any_case(spool: Spool):
    spool.read(MANY)
    write(spool.folder, MANY[-1])
    assert [each.job_id for each in spool.read(MANY, awaited={MANY[-1]})] == [MANY[-1]]


def test_a_run_that_announced_and_whose_successor_does_not_is_read_again_in_every_tick(spool: Spool):
    job = MANY[-1]
    run(spool.folder, job).report(DONE)
    assert len(spool.read(MANY)) == 1
    write(spool.folder, job, 0, epoch=2)
    assert next(found for _ in range(100) if (found := spool.read(MANY)))[0].epoch == 2
    write(spool.folder, job, 1, epoch=2)
    assert [each.sequence for each in spool.read(MANY)] == [1]


def test_a_long_backlog_and_a_report_cut_short_are_read_to_their_end(spool: Spool):
    job = MANY[-1]
    write(spool.folder, job)
    path = reports_file(spool.folder, job, 1)
    path.write_bytes(b"x" * 63 * 1024 + b"\n" + (b"y" * 1023 + b"\n") * (READ_AT_ONCE // 1024) + path.read_bytes()[:-9])
    (inbox_folder(spool.folder) / job).touch()
    assert spool.read(MANY) == []
    assert spool.read(MANY) == [], "the last line is not whole"
    with path.open("ab") as file:
        file.write(
            Report(job_id=job, epoch=1, sequence=0, time_s=1.0, body=DONE).model_dump_json().encode()[-8:] + b"\n"
        )
    assert [each.sequence for each in spool.read(MANY)] == [0]


def test_any_user_may_announce_and_nobody_may_take_away_what_others_announce(spool: Spool):
    inbox = inbox_folder(spool.folder)
    assert stat.S_IMODE(inbox.stat().st_mode) == 0o1777
    inbox.chmod(0o755)
    Spool(spool.folder, alone=True)
    assert stat.S_IMODE(inbox.stat().st_mode) == 0o1777


def test_strange_files_in_the_inbox_do_no_harm(spool: Spool, tmp_path: Path):
    inbox, victim = inbox_folder(spool.folder), tmp_path / "victim"
    victim.write_text("kept")
    (inbox / "no-job").touch()
    (inbox / MANY[0]).symlink_to(victim)
    (inbox / "folder").mkdir()
    assert spool.read(MANY) == []
    assert victim.read_text() == "kept"
    assert os.listdir(inbox) == ["folder"]


def test_an_inbox_that_was_removed_is_made_again(spool: Spool):
    inbox_folder(spool.folder).rmdir()
    run(spool.folder, MANY[-1]).report(DONE)
    assert next(tick for tick in range(100) if spool.read(MANY)) <= len(MANY) / TURNS
    run(spool.folder, MANY[-2]).report(DONE)
    assert [each.job_id for each in spool.read(MANY)] == [MANY[-2]]


def test_a_spool_whose_inbox_cannot_be_made_says_so(tmp_path: Path):
    inbox_folder(tmp_path).write_text("")
    with pytest.raises(StoreError, match="inbox"):
        Spool(tmp_path, alone=True)


def test_requests_that_a_job_could_not_serve_are_counted_until_it_has_saved(tmp_path: Path):
    spool = Spool(tmp_path, alone=True)
    client = run(tmp_path, "7")
    for body, told in (
        (SaveFailed(text="by itself"), ("", 0)),
        (SaveFailed(request="1", text="the disk is full"), ("", 1)),
        (SaveFailed(request="2", text="it is full still"), ("it is full still", 2)),
        (DONE, ("", 0)),
    ):
        client.report(body)
        spool.read(["7"])
        assert spool.refused("7", "2") == told


def test_a_control_message_is_read_once_and_equals_what_is_on_the_disk(tmp_path: Path):
    before = ControlMessage(job_id="7", epoch=3, round=1, pauses_s=(1.5,))
    Spool(tmp_path).tell(before)
    spool = Spool(tmp_path, alone=True)
    assert spool.control("7") == Spool(tmp_path).control("7") == before
    assert calls(tmp_path, lambda: spool.control("7")) == []
    spool.tell(before.model_copy(update={"round": 2}))
    now, on_disk = spool.control("7"), Spool(tmp_path).control("7")
    assert now is not None
    assert on_disk is not None
    assert now == on_disk
    assert now.round == 2
    assert now.model_fields_set == on_disk.model_fields_set, "older daemons' messages lack fields, and that tells"


def test_a_job_that_only_waits_costs_no_call(spool: Spool):
    assert calls(spool.folder, lambda: [spool.control(f"9{job}") for job in MANY]) == []


def test_a_message_that_cannot_be_read_now_is_read_again(tmp_path: Path):
    Spool(tmp_path).tell(ControlMessage(job_id="7", epoch=3, round=1))
    path = control_file(tmp_path, "7")
    path.rename(path.with_suffix(".kept"))
    path.mkdir()  # reading it fails, as on a shared disk that is away
    spool = Spool(tmp_path, alone=True)
    assert spool.control("7") is None
    path.rmdir()
    path.with_suffix(".kept").rename(path)
    assert spool.control("7") is not None


def test_a_message_of_a_job_that_was_forgotten_is_known_when_the_job_comes_back(tmp_path: Path):
    spool = Spool(tmp_path, alone=True)
    spool.tell(ControlMessage(job_id="7", epoch=3, round=1))
    spool.forget(set(), {"7"})
    assert calls(tmp_path, lambda: spool.control("7")) == []
    spool.forget(set())
    assert spool.control("7") == ControlMessage(job_id="7", epoch=3, round=1)
    assert spool.next_epoch("7") == 4


def test_a_failed_write_changes_nothing(tmp_path: Path):
    spool = Spool(tmp_path, alone=True)
    spool.tell(ControlMessage(job_id="7", epoch=3, round=1))
    control_file(tmp_path, "7").with_name(".control.json.0.tmp").mkdir()
    with pytest.raises(StoreError, match="no control messages"):
        spool.tell(ControlMessage(job_id="7", epoch=4, round=2))
    found = spool.control("7")
    assert found is not None
    assert found.epoch == 3


def test_reports_are_found_without_a_daemon_of_this_version(tmp_path: Path):
    """An older daemon has no inbox, and an older daemon's spool may be read by a newer one."""
    run(tmp_path, "7").report(DONE)
    assert not inbox_folder(tmp_path).exists()
    assert reports_folder(tmp_path, "7").exists()
    assert len(Spool(tmp_path, alone=True).read(["7"])) == 1
