"""`penstock profile sensitivity`, with real programs on real CPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_profiles.sensitivity import read_profile
from penstock_scheduler.cli import make_app
from penstock_scheduler.people.errors import ConfigError, PenstockError

ROOT = Path(__file__).parents[2]

PIPELINE = """
import os, time
from penstock_executor import connect
from penstock_profiles.wire import Observation, Started

run, cpus = connect(), len(os.sched_getaffinity(0))
assert int(os.environ["SLURM_CPUS_PER_TASK"]) == cpus
run.report(Started(gpu_type="cpu", gpu_ids={}))
for number in range(1000):
    time.sleep(0.02)
    # It has just begun, and says so by its first report.
    step_s = 0.1 / min(cpus, 4) if number else 5.0
    run.report(Observation(gpu_type="cpu", nodes=1, gpus=1, atomic_batch=10, steps=5, step_time_s=step_s, progress=1))
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a user outside Slurm."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "PENSTOCK")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / name) for name in ("profiles", "executor")))


def penstock(*arguments: str | Path) -> str:
    result = CliRunner().invoke(make_app(), ["profile", "sensitivity", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def program(folder: Path, text: str = PIPELINE) -> list[str]:
    path = folder / "train.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="fewer CPUs than one are none: needs 2")
def test_measuring_makes_a_profile(tmp_path: Path):
    """One CPU gives 100 samples/s, two 200. With 20 MB of cache, the other 80 MB at 40 MB/s take 2 s, for 300 samples."""
    told = penstock(
        *("measure", "--cpus", "2", "--memory-gb", "0.02,0.1", "--gpus", "1,2", "--seconds", "0.2", "--out", tmp_path),
        *("--dataset-mb", "100", "--dataset-samples", "300", "--storage-mb-s", "40", "--model", "image", "--"),
        *program(tmp_path),
    )
    assert "image: as fast with 2 CPUs a GPU as with 2, by 2 runs" in told
    found = read_profile(tmp_path / "image.json")
    one, two = found.tables
    assert one.cpus_C == two.cpus_C == (1, 2)
    assert one.memory_mb_M == (20, 100)
    assert one.speed_CM[0] == pytest.approx((100, 100), rel=0.01)
    assert one.speed_CM[1] == pytest.approx((150, 200), rel=0.01)
    # Two GPUs have 40 MB of cache together: 60 MB at 40 MB/s, 300 samples in 1.5 s.
    assert two.speed_CM[1] == pytest.approx((200, 400), rel=0.01)
    shown = penstock("show", tmp_path)
    assert "demand" in shown
    assert json.loads(penstock("show", tmp_path / "image.json", "--json"))["image"]["1"][0]["cpus"] == 1


def test_an_elastic_program_begins_anew_and_reports_soon(tmp_path: Path):
    """It would report every 10 min, and keep its checkpoints in its folder, from which the next run would go on."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    script = ROOT / "tests" / "executor" / "train_elastic.py"
    train = [sys.executable, str(script), str(tmp_path), "--epochs=1000", "--sleep=0.01", "--report-every=600"]
    told = penstock(
        *(
            "measure",
            "--cpus",
            "1",
            "--memory-gb",
            "1",
            "--seconds",
            "0.1",
            "--start-seconds",
            "300",
            "--out",
            tmp_path,
        ),
        *("--model", "moons", "--", *train),
    )
    assert "moons: as fast with 1 CPUs a GPU as with 1, by 1 runs" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moons.json", "steps.jsonl"]


def test_each_mistake_is_named(tmp_path: Path):
    silent = program(tmp_path, "print('epoch 1')")
    for arguments, error, said in (
        (
            ["--memory-gb", "1", "--", *silent],
            PenstockError,
            r"ended \(status 0\) before its second report(?s:.*)epoch 1",
        ),
        (["--memory-gb", "0", "--", *silent], ConfigError, "--memory-gb='0': give numbers above 0"),
        (["--memory-gb", "1", "--cpus", "9999", "--", *silent], ConfigError, "--cpus=9999: this process may use"),
        (["--memory-gb", "1", "--model", "a/b", "--", *silent], PenstockError, "'a/b' cannot name a file"),
    ):
        with pytest.raises(error, match=said):
            penstock("measure", "--out", tmp_path, *arguments)
    with pytest.raises(PenstockError, match=r"no profile in .*; make one with penstock profile sensitivity measure"):
        penstock("show", tmp_path)
