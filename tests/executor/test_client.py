import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_executor import Checkpoints, Client, Environment, connect
from penstock_executor.checkpoint import newest_epoch
from penstock_executor.client import ReportSchedule
from penstock_profiles import wire

from .spool import JOB, bodies, job_environment, reports, tell

DONE = wire.Checkpointed(progress=5, seconds=0.1)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


def client(spool: Path, checkpoints: Path | None = None) -> Client:
    return connect(checkpoints, Environment(job_id=JOB, spool=spool))


def test_takes_the_epoch_that_the_daemon_gave(spool: Path):
    tell(spool, 5)
    assert client(spool).epoch == 5


def test_takes_the_next_when_slurm_restarted_it_alone(spool: Path):
    tell(spool, 5)
    assert [client(spool).epoch for _ in range(3)] == [5, 6, 7]
    tell(spool, 9)
    assert client(spool).epoch == 9


def test_without_a_daemon_it_makes_its_folders(spool: Path):
    run = client(spool)
    run.report(DONE)
    assert (run.epoch, [r.body for r in reports(spool, 1)]) == (1, [DONE])
    assert client(spool).epoch == 2


def test_an_epoch_is_above_those_of_the_checkpoints_too(spool: Path, tmp_path: Path):
    """A new job that continues from an old job's checkpoints must not count as a superseded run."""
    Checkpoints(tmp_path / "ckpt", 9)
    tell(spool, 1)
    run = client(spool, tmp_path / "ckpt")
    assert (run.epoch, run.superseded) == (10, False)
    assert wire.claimed_epochs(spool, JOB) == [10]
    assert newest_epoch(tmp_path / "ckpt") == 10


@pytest.mark.parametrize("job_id", [None, JOB])
def test_without_a_spool_the_epoch_comes_from_the_checkpoints(
    tmp_path: Path, job_id: str | None, caplog: pytest.LogCaptureFixture
):
    runs = [connect(tmp_path, Environment(job_id=job_id)) for _ in range(3)]
    assert [run.epoch for run in runs] == [1, 2, 3]
    runs[0].report(DONE)
    assert (runs[0].poll(), runs[0].superseded, runs[2].superseded) == (None, True, False)
    runs[2].close("completed", 5)
    assert caplog.text == ""
    assert connect(environment=Environment()).epoch == 1


def test_a_missing_spool_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = client(tmp_path / "unmounted", tmp_path / "ckpt")
    for _ in range(3):
        run.report(DONE)
    assert (run.epoch, run.poll(), run.superseded) == (1, None, False)
    assert caplog.text.count("reports go nowhere") == 1
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize("blocked", ["42", "42/reports"])
def test_a_file_where_the_jobs_folder_should_be(spool: Path, blocked: str):
    (spool / blocked).parent.mkdir(exist_ok=True)
    (spool / blocked).touch()
    client(spool).report(DONE)


def test_reports_carry_epoch_and_sequence(spool: Path):
    tell(spool, 3)
    run = client(spool)
    run.report(DONE)
    run.close("completed", 7)
    run.close("failed", 8)
    run.report(DONE)
    assert [(r.job_id, r.epoch, r.sequence, r.body.kind) for r in reports(spool, 3)] == [
        (JOB, 3, 0, "checkpointed"),
        (JOB, 3, 1, "ended"),
    ]


def test_reports_wait_while_the_spool_is_away(spool: Path, caplog: pytest.LogCaptureFixture):
    run = client(spool)
    folder, away = wire.job_folder(spool, JOB), spool / "away"
    folder.rename(away)
    run.report(DONE)
    run.report(DONE)
    assert caplog.text.count("reports wait") == 1
    away.rename(folder)
    run.report(DONE)
    assert [report.sequence for report in reports(spool, 1)] == [0, 1, 2]


def test_a_report_that_a_full_disk_cuts_short_is_written_again(
    spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = client(spool)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    run.report(DONE)
    monkeypatch.setattr(os, "write", write)
    run.report(DONE)
    cut, *lines = wire.reports_file(spool, JOB, 1).read_bytes().splitlines()
    assert len(cut) == 10
    assert [wire.Report.model_validate_json(line).sequence for line in lines] == [0, 1]
    assert caplog.text.count("reports wait") == 1


def test_a_request_is_returned_once(spool: Path):
    run = client(spool)
    assert run.poll() is None
    tell(spool, 1, "a")
    control = wire.ControlMessage.model_validate_json(wire.control_file(spool, JOB).read_bytes())
    assert run.poll() == control.request == wire.Request(id="a", asked_s=control.request.asked_s)
    assert run.poll() is None
    tell(spool, 1, "a")
    assert run.poll() is None
    tell(spool, 1, "b")
    assert run.poll().id == "b"


def test_a_broken_control_message_is_ignored_until_it_is_whole(spool: Path, caplog: pytest.LogCaptureFixture):
    run = client(spool)
    tell(spool, 1, "a")
    path = wire.control_file(spool, JOB)
    whole = path.read_bytes()
    for broken in (b"", whole[:20], b"[]", b'{"version": 1}', whole.replace(b'"42"', b'"43"')):
        path.write_bytes(broken)
        assert (run.poll(), run.superseded) == (None, False)
    assert caplog.text == ""
    path.write_bytes(whole.replace(b'"version":1', b'"version":2'))
    assert (run.poll(), run.poll()) == (None, None)
    assert caplog.text.count("has version 2") == 1
    path.write_bytes(whole)
    assert run.poll().id == "a"


def test_superseded_by_a_control_message(spool: Path):
    tell(spool, 1)
    run = client(spool)
    assert not run.superseded
    tell(spool, 2, "a")
    assert run.superseded
    assert run.poll() is None  # asked of the later run


def test_superseded_by_a_later_run(spool: Path):
    first, second = client(spool), client(spool)
    assert (first.superseded, second.superseded) == (True, False)


def test_closing_reports_the_outcome(spool: Path):
    run = client(spool)
    run.close("failed", 7, "why")
    assert bodies(spool, 1, "ended") == [wire.Ended(outcome="failed", progress=7, text="why")]


@pytest.mark.parametrize("shared", ["spool", "checkpoints", "both"])
def test_processes_that_race_get_different_epochs(spool: Path, tmp_path: Path, shared: str):
    script = (
        "import sys; from pathlib import Path; from penstock_executor import connect; print('ready', flush=True)\n"
        "sys.stdin.readline(); folder = Path(sys.argv[1]) if sys.argv[1:] else None\n"
        "print(*[connect(folder).epoch for _ in range(25)])"
    )
    folder = [] if shared == "spool" else [str(tmp_path / "ckpt")]
    environment = job_environment(None if shared == "checkpoints" else spool)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, *folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    epochs = [int(word) for child in children for word in child.communicate(timeout=60)[0].split()]
    assert len(set(epochs)) == len(epochs) == 100
    if shared != "checkpoints":
        assert wire.claimed_epochs(spool, JOB)[-1] == max(epochs)
    if shared != "spool":
        assert newest_epoch(tmp_path / "ckpt") == max(epochs)


def test_a_run_reports_soon_and_then_at_its_pace():
    """Asked each second from 100 s on: after 5, 10 and 20 s, and then every 30 s. A shorter interval is used from the start."""
    pace, brisk = ReportSchedule(30.0, 100.0), ReportSchedule(2.0, 100.0)
    assert [second for second in range(101, 230) if pace.due(second)] == [105, 115, 135, 165, 195, 225]
    assert [second for second in range(101, 108) if brisk.due(second)] == [102, 104, 106]
