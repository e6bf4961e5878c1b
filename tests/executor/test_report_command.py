"""`penstock-report`, and a shell script that uses it."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from penstock_executor.report_command import main
from penstock_profiles.wire import Checkpointed, Ended, Observation, Result, Started

from .spool import JOB, ROOT, bodies, job_environment, reports, tell, wait_for

EXAMPLE = ROOT / "examples" / "shell_report" / "train.sh"


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def report(spool: Path | None, *arguments: str) -> Said:
    """The command, in this process: the shell script below starts processes."""
    with (
        mock.patch.dict(os.environ, job_environment(spool), clear=True),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            status = main(arguments)
        except SystemExit as wrong:  # argparse's
            status = int(wrong.code or 0)
    return Said(status, out.getvalue(), err.getvalue())


def test_each_call_is_one_message_of_the_run(tmp_path: Path):
    tell(tmp_path, 4)
    began = report(tmp_path, "begin", "--gpu-type=t4", "--progress=320", "--total=1e6")
    assert (began.returncode, began.stdout) == (0, "4\n")
    assert report(tmp_path, "poll", "--epoch=4").returncode == 1
    tell(tmp_path, 4, "save-me")
    for _ in range(2):  # until it is answered
        asked = report(tmp_path, "poll", "--epoch=4")
        assert (asked.returncode, asked.stdout) == (0, "save-me\n")
    steps = ("steps", "--epoch=4", "--steps=10", "--step-time-s=0.5", "--atomic-batch=32", "--progress=640")
    assert report(tmp_path, *steps).returncode == 0
    assert report(tmp_path, "saved", "--epoch=4", "--request=save-me", "--seconds=2", "--progress=640").returncode == 0
    assert report(tmp_path, "poll", "--epoch=4").returncode == 1
    assert report(tmp_path, "metric", "--epoch=4", "nan").returncode == 0, "a diverged trial reports nothing"
    assert report(tmp_path, "metric", "--epoch=4", "--progress=640", "-2.5e-01").returncode == 0
    assert report(tmp_path, "end", "--epoch=4", "--outcome=stopped", "--progress=640").returncode == 0
    said = reports(tmp_path, 4)
    assert [each.sequence for each in said] == [0, 1, 2, 3, 4]
    assert [type(each.body) for each in said] == [Started, Observation, Checkpointed, Result, Ended]
    assert (said[3].body.metric, said[3].body.progress) == (-0.25, 640)
    assert (said[0].job_id, said[0].body.progress, said[0].body.total) == (JOB, 320, 1e6)
    assert (said[1].body.gpu_type, said[1].body.step_time_s, said[1].body.atomic_batch) == ("t4", 0.5, 32)


def test_a_superseded_run_is_told_to_stop(tmp_path: Path):
    assert report(tmp_path, "begin").stdout == "1\n"
    assert report(tmp_path, "begin").stdout == "2\n"
    left = report(tmp_path, "steps", "--epoch=1", "--steps=1", "--step-time-s=1", "--atomic-batch=1")
    assert left.returncode == 75
    assert "a run later than epoch 1 has begun" in left.stderr
    assert [each.body.kind for each in reports(tmp_path, 1)] == ["started"]


def test_without_penstock_nothing_is_reported(tmp_path: Path):
    assert report(None, "begin", f"--checkpoints={tmp_path}").stdout == "1\n"
    assert report(None, "begin", f"--checkpoints={tmp_path}").stdout == "2\n"
    assert report(None, "poll", "--epoch=2").returncode == 1
    assert report(None, "end", "--epoch=2", "--outcome=completed").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("poll",), "--epoch"),
        (("steps", "--epoch=1", "--steps=0", "--step-time-s=1", "--atomic-batch=1"), "steps"),
        (("end", "--epoch=1", "--outcome=fine"), "completed"),
        (("metric", "--epoch=1", "much"), "metric"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: tuple[str, ...], words: str):
    report(tmp_path, "begin")
    wrong = report(tmp_path, *arguments)
    assert wrong.returncode == 2
    assert words in wrong.stderr


def test_a_shell_script_takes_part(tmp_path: Path):
    spool, folder = tmp_path / "spool", tmp_path / "folder"
    spool.mkdir()
    tell(spool, 1)
    more = {"FOLDER": str(folder), "STEP_S": "0.01", "REPORT": f"{sys.executable} -m penstock_executor.report_command"}

    def start(steps: int) -> subprocess.Popen[bytes]:
        environment = job_environment(spool, os.environ["PATH"]) | more | {"STEPS": str(steps)}
        return subprocess.Popen(["bash", EXAMPLE], env=environment)

    with start(1_000_000) as child:
        try:
            wait_for(lambda: bodies(spool, 1, "observation"), "observation")
            tell(spool, 1, "save")
            wait_for(lambda: [b for b in bodies(spool, 1, "checkpointed") if b.request == "save"], "answer")
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=240) == 143
        finally:
            child.kill()
    (ended,) = bodies(spool, 1, "ended")
    assert ended.outcome == "stopped"
    count = int((folder / "count").read_text())
    assert ended.progress == count * 32
    with start(count + 10) as child:
        assert child.wait(timeout=240) == 0
    assert bodies(spool, 2, "started")[0].progress == ended.progress
    assert bodies(spool, 2, "ended")[0].outcome == "completed"
