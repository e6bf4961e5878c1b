"""Loops of the script's own on the core of a run, with real processes on CPUs (gloo)."""

import math
import signal
import time
from pathlib import Path

import pytest

from ..elastic import assert_each_sample_once, final, gang, largest_difference, steps
from ..spool import ROOT, bodies, job_environment, tell, wait_for

GAN = ROOT / "tests" / "executor" / "train_gan.py"


def test_two_models_two_optimisers_and_an_average_move_to_more_processes_as_if_nothing_had_stopped_them(tmp_path: Path):
    with gang(GAN, tmp_path / "whole") as job:
        job.finish()
    with gang(GAN, tmp_path, "--hold=9", "--workers=1") as job:
        wait_for(lambda: "held in step 9" in job.said.read_text(), "a step of the second epoch")
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.said.read_text()
    with gang(GAN, tmp_path, processes=2) as job:
        job.finish()
    assert {record["world"] for record in steps(tmp_path)} == {1, 2}
    assert_each_sample_once(tmp_path, 2, 203)
    assert final(tmp_path)["progress"] == 2 * 203
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) < 1e-9


def test_a_loop_of_its_own_reports_saves_and_stands_still_on_request_and_gives_way_to_a_later_run(tmp_path: Path):
    spool = tmp_path / "spool"
    spool.mkdir()
    tell(spool, 1)
    environ = job_environment(spool) | {"OMP_NUM_THREADS": "1"}
    with gang(GAN, tmp_path, "--epochs=100000", environ=environ) as job:
        seen = wait_for(lambda: [each for each in bodies(spool, 1, "observation") if each.steps >= 7], "report")[0]
        assert (seen.gpu_type, seen.gpus, seen.accumulation_steps) == ("cpu", 1, 0)
        assert 29 <= seen.atomic_batch <= 32, "203 samples are 7 steps, of 32 and at last of 11"
        assert seen.goodput * seen.step_time_s <= 32
        tell(spool, 1, "now")
        wait_for(lambda: [each for each in bodies(spool, 1, "checkpointed") if each.request == "now"], "checkpoint")
        assert wait_for(lambda: bodies(spool, 1, "result"), "result of an epoch")[0].metric == 7
        tell(spool, 1, "away", "suspend")
        wait_for(lambda: [each for each in bodies(spool, 1, "suspended") if each.request == "away"], "suspension")
        count = len(steps(tmp_path))
        time.sleep(0.5)
        assert len(steps(tmp_path)) == count
        tell(spool, 1)
        wait_for(lambda: bodies(spool, 1, "resumed"), "report that it continues")
        tell(spool, 2)
        assert job.wait() == 75
    assert bodies(spool, 1, "ended")[0].outcome == "superseded"


@pytest.mark.parametrize(
    ("times", "words"),
    [(0, "before run.keep(...): checkpoints would hold nothing"), (2, "run.prepare or run.keep, one of them, once")],
)
def test_a_loop_that_would_save_nothing_or_only_a_part_is_refused(tmp_path: Path, times: int, words: str):
    with gang(GAN, tmp_path, f"--keep={times}") as job:
        assert job.wait() == 1
    assert words in job.said.read_text()


def test_a_sharded_model_is_refused_by_name(tmp_path: Path):
    with gang(GAN, tmp_path, "--sharded", processes=2) as job:
        assert job.wait() == 1
    assert "maker is sharded by fully_shard, which run.keep cannot save; pass it to run.prepare" in job.said.read_text()


def test_a_loop_with_a_loader_of_its_own_continues_after_the_batches_that_are_done(tmp_path: Path):
    """It says how far it will go, since the run cannot know that."""
    script, spool = GAN.with_name("train_own_loader.py"), tmp_path / "spool"
    spool.mkdir()
    for number, status in ((1, 143), (2, 0)):
        tell(spool, number)
        with gang(script, tmp_path, environ=job_environment(spool) | {"OMP_NUM_THREADS": "1"}) as job:
            assert job.wait() == status, job.said.read_text()
        assert [body.total for body in bodies(spool, number, "started")] == [240]
    assert (tmp_path / "seen").read_text().split() == [f"{epoch}.{batch}" for epoch in range(3) for batch in range(10)]


def test_a_stateful_data_loader_that_is_kept_continues_in_mid_epoch_with_each_sample_once(tmp_path: Path):
    """80 samples, ten steps an epoch; the job is stopped in the fifth step of the second."""
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    for status in (143, 0):
        with gang(GAN.with_name("train_stateful_loader.py"), tmp_path) as job:
            assert job.wait() == status, job.said.read_text()
    seen = (tmp_path / "seen").read_text().split()
    for epoch in range(3):
        assert sorted(map(int, seen[80 * epoch : 80 * (epoch + 1)])) == list(range(80))
    assert len(seen) == 240


def test_a_loop_of_accelerate_moves_to_more_processes_as_if_nothing_had_stopped_it(tmp_path: Path):
    """83 samples, eleven steps an epoch; the job is stopped in the fourth step of the second."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    script = GAN.with_name("train_accelerate.py")
    weights = {}
    for name, worlds in (("whole", [(1, 143), (1, 0)]), ("moved", [(1, 143), (2, 0)])):
        for processes, status in worlds:
            with gang(script, tmp_path / name, processes=processes) as job:
                assert job.wait() == status, job.said.read_text()
        seen = (tmp_path / name / "seen").read_text().split()
        assert sorted(map(int, seen)) == sorted([*range(83), *range(83)])
        weight, world, rate = (tmp_path / name / "weight").read_text().split()
        assert (int(world), float(rate)) == (worlds[-1][0], 0.0)
        weights[name] = float(weight)
    assert weights["moved"] == pytest.approx(weights["whole"], rel=1e-5)


@pytest.mark.parametrize("way", ["own loop", "prepare"])
def test_muon_beside_adamw_moves_to_more_processes(way: str, tmp_path: Path):
    """503 samples, 16 steps an epoch; the job is stopped in the fourth step of the second. Muon computes in bfloat16."""
    script, options = GAN.with_name("train_muon.py"), ["--prepare"] if way == "prepare" else []
    with gang(script, tmp_path / "whole", *options) as job:
        job.finish()
    with gang(script, tmp_path, "--hold=19", *options) as job:
        wait_for(lambda: "held in step 19" in job.said.read_text(), "a step of the second epoch")
        job.send(signal.SIGTERM)
        assert job.wait() == 143, job.said.read_text()
    with gang(script, tmp_path, *options, processes=2) as job:
        job.finish()
    assert {record["world"] for record in steps(tmp_path)} == {1, 2}
    assert_each_sample_once(tmp_path, 2, 503)
    moved, whole = final(tmp_path), final(tmp_path / "whole")
    assert (moved["progress"], moved["steps"]) == (2 * 503, 32)
    assert largest_difference(moved["weights"], whole["weights"]) < 0.01, "a step of Muon is 0.02"
    if way == "prepare":
        assert all(math.isfinite(each) and each > 0 for each in moved["noise"])


@pytest.mark.parametrize("option", [None, "--datasets"])
def test_a_stream_of_which_each_process_reads_its_part_moves_with_each_sample_once(option: str | None, tmp_path: Path):
    """Eight shards in four parts, ten steps of 12 samples an epoch. The job is stopped in steps 4 and 14, and goes from one
    process to four, and to two."""
    if option:
        pytest.importorskip("datasets", reason="datasets is not installed")
    script, options = GAN.with_name("train_parts.py"), [option] if option else []
    with gang(script, tmp_path / "whole", *options) as job:
        job.finish()
    for processes, hold, status in ((1, 3, 143), (4, 13, 143), (2, None, 0)):
        with gang(script, tmp_path, *options, *([f"--hold={hold}"] if hold else []), processes=processes) as job:
            if hold:
                wait_for(lambda job=job, hold=hold: f"held in step {hold}" in job.said.read_text(), "the step")
                job.send(signal.SIGTERM)
            assert job.wait() == status, job.said.read_text()
    assert_each_sample_once(tmp_path, 2, 120)
    assert largest_difference(final(tmp_path)["weights"], final(tmp_path / "whole")["weights"]) < 1e-9
    for line in (tmp_path / "read").read_text().splitlines():
        world, rank, shard = map(int, line.split())
        assert shard % 4 % world == rank, "each process opens only the shards of its parts"


WARNED = """\
import os, signal, subprocess, sys
import penstock_executor as px
seen = []
if "--own" in sys.argv:
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
px.start(sys.argv[1])
os.kill(os.getpid(), signal.SIGUSR2)
program = subprocess.run(["/bin/sh", "-c", "kill -USR2 $$"]).returncode
print(seen, program, file=sys.stderr)
"""


@pytest.mark.parametrize(("option", "seen"), [(None, "[]"), ("--own", "[12]")])
def test_a_warning_by_sigusr2_ends_no_run_and_reaches_a_handler_of_the_scripts_own(
    option: str | None, seen: str, tmp_path: Path
):
    """A program that the script starts gets the signal as usual."""
    script = tmp_path / "train.py"
    script.write_text(WARNED)
    with gang(script, tmp_path, *([option] if option else [])) as job:
        assert f"{seen} -12" in job.finish()
