"""`python -m penstock_executor.try_run` finds what a script does wrongly around its stops, and passes one that is right."""

import math
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor import try_run  # noqa: E402
from penstock_executor.training.trial import Disturbance  # noqa: E402
from penstock_executor.try_run import TrialRecord, TriedStop, compare, logged_otherwise, scenarios  # noqa: E402

from .elastic import PYTHON, environment, python_path  # noqa: E402
from .spool import ROOT, wait_for  # noqa: E402

MIDDLE = TriedStop("a stop in mid-epoch", Disturbance("stop", 14))


def tried(*statuses: int, said: str = "", **changed: object) -> TrialRecord:
    """Three epochs of ten steps. `changed`: of the steps from 15 on."""
    steps = {
        step: {"step": step, "epoch": (step - 1) // 10, "in_epoch": (step - 1) % 10 + 1, "samples": 4, "rates": [0.1]}
        | {"norm": 2.0, "sign": 1.0, "apart": 0.0}
        | (changed if step > 14 else {})
        for step in range(1, 31)
    }
    return TrialRecord(list(statuses), steps, said=said)


WHOLE = tried(0)
COUNTED = "penstock: train.py:41 counts batches by enumerate. After a stop"
TRACE = 'File "/x/train.py", line 44, in <module>\nZeroDivisionError: division by zero\n'


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (tried(143, 0), []),
        (tried(143, 0, sign=1.2), ["in step 15, epoch 1: the weights differ by 0.1", "pass it to run.keep"]),
        (tried(143, 0, norm=2.1), ["in step 15, epoch 1: the weights differ by 0.05", "pass it to run.keep"]),
        (
            tried(143, 0, rates=[0.6], said=COUNTED),
            ["learning rates are 0.6 and not 0.1", "train.py:41 counts batches"],
        ),
        (tried(143, 0, rates=[0.6]), ["learning rates are 0.6", "pass the schedule to run.prepare"]),
        (tried(143, 0, samples=8), ["in step 15, epoch 1: 8 samples", "run.epoch_steps"]),
        (tried(143, 1, said=TRACE), ["train.py, line 44: ZeroDivisionError: division by zero (status 1)"]),
        (
            tried(0, said="penstock: <lambda> handles SIGTERM since px.start"),
            ["the stop ended in status 0 and not 143", "<lambda> handles SIGTERM since"],
        ),
    ],
)
def test_what_differs_is_said_with_its_place_and_a_remedy(found: TrialRecord, words: list[str]):
    lines = compare(WHOLE, found, MIDDLE, "train.py")
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_weights_that_differ_before_the_stop_are_those_of_a_script_that_is_not_repeatable():
    found = tried(143, 0)
    found.steps[3] = found.steps[3] | {"norm": 3.0}
    assert "two runs of the script differ: seed" in compare(WHOLE, found, MIDDLE, "train.py")[1]


def test_final_weights_are_compared_too_and_less_strictly_on_other_processes():
    whole, found = tried(0), tried(143, 0)
    whole.weights, found.weights = ({"model": {"w": torch.full((4,), w)}} for w in (1.0, 1.001))
    assert "at the end: the weights differ by 0.001" in compare(whole, found, MIDDLE, "train.py")[0]
    assert compare(whole, found, TriedStop("moved", Disturbance("stop", 14), 2), "train.py") == []
    assert math.isclose(try_run._difference(whole.weights, found.weights), 0.001, rel_tol=1e-3)


ON_TWO = TriedStop("undisturbed on 2 processes", Disturbance(), first=2)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (tried(0, norm=2.4), []),
        (tried(1, said=TRACE), ["it fails: train.py, line 44: ZeroDivisionError"]),
        (
            tried(0, rates=[0.2]),
            ["the learning rates are 0.2 and not 0.1", "leave their number out of the learning rate"],
        ),
        (tried(0, samples=8), ["in step 15, epoch 1: 8 samples", "run.epoch_steps"]),
        (tried(0, apart=0.03), ["the processes' weights differ by 0.03", "DistributedDataParallel"]),
    ],
)
def test_a_whole_training_on_two_processes_has_the_same_steps_and_one_model(found: TrialRecord, words: list[str]):
    """Its weights may differ: the processes draw noise of their own."""
    lines = compare(WHOLE, found, ON_TWO, "train.py")
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_after_a_move_weights_may_differ_as_much_as_whole_trainings_do():
    found = tried(143, 0, norm=2.1)
    moved = TriedStop("moved", Disturbance("stop", 14), 2)
    assert "the weights differ by 0.05" in compare(WHOLE, found, moved, "train.py")[0]
    assert compare(WHOLE, found, moved, "train.py", close=0.1) == []
    assert compare(WHOLE, tried(143, 0, sign=1.2), moved, "train.py") == [], "a mark of small changes"
    same = TriedStop("killed", Disturbance("kill", 14), 2, 2)
    assert "the weights differ by 0.05" in compare(WHOLE, tried(137, 0, norm=2.1), same, "train.py", close=0.1)[0]


def test_a_number_in_the_log_that_differs_is_noted_on_as_many_processes():
    whole, found, moved = tried(0), tried(143, 0), TriedStop("moved", Disturbance("stop", 14), 2)
    whole.logged = {20: {"loss": 0.5, "odd": math.nan}, 30: {"loss": 0.4}}
    for numbers, noted in (({"loss": 0.5, "odd": 1.0}, False), ({"loss": 0.3, "odd": math.nan}, True), ({}, True)):
        found.logged = {20: numbers}
        lines = logged_otherwise(whole, found, MIDDLE)
        assert [line.split(". ")[0] for line in lines] == (
            [f"note: after step 20, the log has loss={numbers.get('loss', math.nan):.6g} and not 0.5"] if noted else []
        )
        assert logged_otherwise(whole, found, moved) == []
        assert compare(whole, found, MIDDLE, "train.py") == [], "it is no mistake"


def test_stops_are_tried_in_mid_epoch_at_an_epochs_end_and_in_an_evaluation():
    found = scenarios(tried(0), 2, 0, Disturbance)
    assert [each.disturbance.kind for each in found] == ["stop", "kill", "none", "stop", "stop", "kill", "stop"]
    places = [(each.first, each.processes) for each in found]
    assert places == [(1, 1), (1, 1), (2, 1), (1, 2), (2, 1), (2, 2), (1, 1)]
    steps = [each.disturbance.step for each in found]
    assert all(11 <= step < 20 for step in (*steps[:2], *steps[3:6]))
    assert steps[6] == 10
    evaluates = tried(0)
    evaluates.evaluates = [10, 20, 30]
    assert scenarios(evaluates, 1, 0, Disturbance)[-1].disturbance == Disturbance("evaluation", 10)


def run(script: Path, *arguments: str, options: Sequence[str] = ()) -> tuple[int, str]:
    environ = environment() | {"PYTHONPATH": python_path()}
    command = [PYTHON, "-m", "penstock_executor.try_run", *options, str(script), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=580, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_a_script_is_moved_from_one_process_to_four_and_back(tmp_path: Path):
    """A step of four samples has one for each. The processes' weights are compared with one another, too."""
    script, counts = ROOT / "tests" / "executor" / "train_tried.py", tmp_path / "counts"
    status, said = run(script, "good", str(counts), options=["--processes=4"])
    assert status == 0, said
    assert said.count("as undisturbed") == 7
    for line in ("continued on 4 processes: as", "SIGTERM to all of 4 processes", "kill -9 of one of 4 processes"):
        assert line in said
    assert counts.read_text().split() == ["1", *"11", *"11", "4", *"14", *"41", *"44", *"11", *"11"], "of each run"


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("good", []),
        ("count", ["learning rates are", "counts batches by enumerate"]),
        ("no optimiser", ["the weights differ by", "pass it to run.keep"]),
        ("whole", ["the next run fails: train_tried.py, line 42: IndexError"]),
    ],
)
def test_a_script_is_tried_with_real_stops(tmp_path: Path, option: str, words: list[str]):
    status, said = run(ROOT / "tests" / "executor" / "train_tried.py", option)
    assert status == bool(words), said
    for word in words:
        assert word in said
    if not words:
        assert said.count("as undisturbed") == 7
        assert "undisturbed on 2 processes: the weights differ by" in said
        assert "the log has mean=" in said


def test_a_run_that_takes_too_long_is_told_and_is_none_that_was_killed(tmp_path: Path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    status, said = run(tmp_path / "train.py", options=["--timeout=2"])
    assert (status, said.count("had not ended when its time was over")) == (1, 1), said
    for kind in ("kill", "stop"):
        lines = compare(WHOLE, tried(124), TriedStop("stopped", Disturbance(kind, 14)), "train.py")
        assert lines == [
            "it fails: it had not ended when its time was over: let it make fewer steps, or give it more time by --timeout"
        ]


WRITES = """import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "child"])
here = pathlib.Path(os.environ["TMPDIR"])
(here / f"{os.getpid()}.pid").touch()
for number in range(10**9):
    for folder in here.glob("penstock-try-*/*"):
        try:
            (folder / f"{os.getpid()}-{number % 100}").write_text("more")
        except OSError:
            pass
"""
"""It and its child write into the folder of the trial all the time, and ignore SIGTERM."""


@pytest.mark.parametrize(("ends", "after_s"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 0.5)])
def test_when_it_is_ended_nothing_of_it_stays(tmp_path: Path, ends: signal.Signals, after_s: float):
    """`after_s`: seconds after the beginning of the script's two processes."""
    (tmp_path / "train.py").write_text(WRITES)
    environ = environment() | {"PYTHONPATH": python_path(), "TMPDIR": str(tmp_path)}
    command = [PYTHON, "-m", "penstock_executor.try_run", "train.py"]
    with subprocess.Popen(command, env=environ, cwd=tmp_path) as child:
        pids = wait_for(lambda: len(found := list(tmp_path.glob("*.pid"))) == 2 and found, "a run and its child")
        time.sleep(after_s)
        child.send_signal(ends)
        assert child.wait(30) == 128 + ends
    assert not [each for each in pids if Path(f"/proc/{each.stem}").exists()]
    assert not list(tmp_path.glob("penstock-try-*"))


def test_a_signal_at_any_moment_leaves_nothing(tmp_path: Path):
    """Also while it imports, and before its first run."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    environ = environment() | {"PYTHONPATH": python_path(), "TMPDIR": str(tmp_path)}
    for after_s in (0.3, 1.6):
        with subprocess.Popen(
            [PYTHON, "-m", "penstock_executor.try_run", "train.py"], env=environ, cwd=tmp_path
        ) as child:
            time.sleep(after_s)
            child.terminate()
            assert child.wait(30) in (143, -signal.SIGTERM)
        assert not list(tmp_path.glob("penstock-try-*"))


def test_a_script_that_outlives_its_trial_is_ended_with_it(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import subprocess, sys\nlast = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pid', 'w').write(str(last.pid))\n"
    )
    done = subprocess.run(
        [PYTHON, "-m", "penstock_executor.try_run", "train.py"],
        env=environment() | {"PYTHONPATH": python_path()},
        cwd=tmp_path,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


EXAMPLES = {
    "image_classification": ["--epochs=2", "--size=512"],
    "lightning": ["--epochs=1"],
    "numpy_mlp": ["--steps=50"],
    "optuna_search": ["--rate=0.1", "--width=1", "--epochs=1"],
    "transformer": ["--steps=2"],
}
"""The examples that train in Python, with arguments for a short training."""
FOLDERS = {"lightning": "--checkpoints", "numpy_mlp": "--checkpoint-dir", "optuna_search": "--checkpoints"}
FOLDERS |= {"transformer": "--output"}
"""Those without `px.start`, and the option for their own checkpoints."""


def test_each_example_that_trains_is_tried():
    assert EXAMPLES.keys() == {path.parent.name for path in ROOT.glob("examples/*/train.py")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in ("lightning", "transformer"))) for name in EXAMPLES]
)
def test_an_example_passes_or_is_said_to_be_none_that_can_be_tried(tmp_path: Path, name: str):
    if name in ("lightning", "transformer"):
        pytest.importorskip({"lightning": "lightning", "transformer": "accelerate"}[name])
    folder = [f"{FOLDERS[name]}={tmp_path}"] if name in FOLDERS else []
    status, said = run(ROOT / "examples" / name / "train.py", *EXAMPLES[name], *folder)
    if name in FOLDERS:
        assert (status, said.count("\n")) == (1, 1), said
        assert "the script makes no step after px.start, so it cannot be tried" in said
    else:
        assert (status, "DIFFERS" in said, said.count("as undisturbed")) == (0, False, 6), said
