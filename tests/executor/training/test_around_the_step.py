"""What scripts have around the step goes on after a stop as if nothing had happened, with real processes on CPUs."""

import copy
import json
import pickle
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.training import messages
from penstock_executor.training.batches import BatchSize
from penstock_executor.training.loader import Loader
from penstock_executor.training.messages import counts_from_0
from penstock_executor.training.run import TrainingRun

from ..elastic import gang
from ..spool import ROOT

SCRIPT = ROOT / "tests" / "executor" / "train_around.py"


def weights(folder: Path) -> list[float]:
    return json.loads((folder / "weights.json").read_text())


def noted(folder: Path, what: str) -> list:
    lines = [json.loads(line) for line in (folder / "noted.jsonl").read_text().splitlines()]
    return [(line["epoch"], line[what]) for line in lines if what in line]


def run_to_the_end(folder: Path, *options: str, stops: int, status: int = 143) -> str:
    said = ""
    for _ in range(stops):
        with gang(SCRIPT, folder, *options) as job:
            assert job.wait() == status, job.said.read_text()
            said += job.said.read_text()
    with gang(SCRIPT, folder, *options) as job:
        return said + job.finish()


def test_a_stop_in_an_epochs_last_step_waits_for_the_code_after_the_loop(tmp_path: Path):
    """That code divides by the number of batches, so that it can follow no empty loop."""
    run_to_the_end(tmp_path / "whole", stops=0)
    run_to_the_end(tmp_path / "stopped", "--stop-in=0.9", stops=1)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert noted(tmp_path / "stopped", "evaluated") == [(0, True), (1, True), (2, True)]


def test_a_stop_in_an_evaluation_is_served_at_its_end(tmp_path: Path):
    run_to_the_end(tmp_path / "whole", stops=0)
    run_to_the_end(tmp_path / "stopped", "--stop-in=1.evaluation", stops=1)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert noted(tmp_path / "stopped", "evaluated") == [(0, True), (1, True), (2, True)]


def test_a_kill_in_an_evaluation_costs_one_step(tmp_path: Path):
    run_to_the_end(tmp_path / "whole", stops=0)
    run_to_the_end(tmp_path / "killed", "--kill", "--stop-in=0.evaluation", stops=1, status=-9)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert noted(tmp_path / "killed", "batch")[:12] == [(0, batch) for batch in (*range(10), 9)] + [(1, 0)]


@pytest.mark.parametrize("place", ["0.1", "0.4"])
def test_a_loop_that_accumulates_calls_step_done_once_a_step(tmp_path: Path, place: str):
    run_to_the_end(tmp_path / "whole", "--accumulate=2", stops=0)
    said = run_to_the_end(tmp_path / "stopped", "--accumulate=2", f"--stop-in={place}", "--stop-in=2.2", stops=2)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert noted(tmp_path / "stopped", "batch") == noted(tmp_path / "whole", "batch")
    assert "was begun by the last run" in said
    assert "enumerate(loader, loader.first)" not in said, "the script does that"


def test_a_run_that_finishes_early_is_done_and_more_epochs_go_on_from_there(tmp_path: Path):
    for stops in (1, 0):  # the second run has nothing to do
        run_to_the_end(tmp_path, "--finish", "--stop-in=0.4", stops=stops)
        assert noted(tmp_path, "evaluated") == [(0, True), (1, True)]


def test_a_run_that_leaves_its_epochs_otherwise_is_told_that_the_last_one_is_repeated(tmp_path: Path):
    said = run_to_the_end(tmp_path, "--break", stops=0)
    assert "epoch=1 was left before its end" in said
    assert "call run.finish() and then leave the loop" in said


def test_counting_from_0_is_told_before_any_stop_and_only_where_a_script_does_it(tmp_path: Path):
    said = run_to_the_end(tmp_path / "counts", "--count", stops=0)
    assert "penstock: train_around.py:" in said
    assert said.count("counts batches by enumerate") == 1
    assert "counts batches by enumerate" not in run_to_the_end(tmp_path / "does not", stops=0)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("for i, batch in enumerate(loader):", True),
        ("    for i, (x, y) in enumerate(logger.every(loader, 10, header)):", True),
        ("for i, batch in enumerate(loader, 1):", True),
        ("for i, batch in enumerate(loader, start=1):", True),
        ("for i, batch in enumerate(loader, run.epoch_steps):", False),
        ("for i, batch in enumerate(loader, loader.first + 1):", False),
        ("for i, batch in enumerate(logger.every(loader, 10), start=first):", False),
        ("for batch in loader:", False),
        ("for i, batch in enumerate(loader) if counts else enumerate(loader, 1):", True),
        ("for i, batch in enumerate(  # goes on in the next line", True),
        ("names = dict(enumerate(loader))", False),
    ],
)
def test_a_count_that_is_given_its_first_number_is_none_from_a_fixed_one(line: str, counts: bool):
    assert counts_from_0(line + "\n") is counts


def count_itself(loader: Loader) -> None:
    numbered = enumerate(loader)
    for _number, _batch in numbered:
        loader.take()


def count_from_the_first(loader: Loader) -> None:
    numbered = enumerate(loader, loader.first)
    for _number, _batch in numbered:
        loader.take()


@pytest.mark.parametrize(("loop", "told"), [(count_itself, 1), (count_from_the_first, 0)])
def test_a_count_whose_loop_is_in_another_line_is_told_too(caplog, monkeypatch, loop, told: int):
    """As in `bar = tqdm(enumerate(loader))` and `for i, batch in bar`, which many scripts have."""
    monkeypatch.setattr(messages, "_told", set())
    place = {"seed": 0, "shuffle": False, "position": 0, "drop_last": False}
    for _ in range(2):
        loop(Loader(list(range(8)), BatchSize(total=4, atomic=4), (0, 1), **place))
    assert caplog.text.count("test_around_the_step.py:") == caplog.text.count("counts batches by enumerate") == told


def test_a_learning_rate_by_the_number_of_the_batch_is_right_after_stops_if_it_counts_from_the_first(tmp_path: Path):
    run_to_the_end(tmp_path / "whole", "--by-number", stops=0)
    run_to_the_end(tmp_path / "stopped", "--by-number", "--stop-in=0.4", "--stop-in=2.7", stops=2)
    assert noted(tmp_path / "stopped", "rate") == noted(tmp_path / "whole", "rate")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    said = run_to_the_end(tmp_path / "counts", "--by-number", "--count", "--stop-in=0.4", stops=1)
    assert noted(tmp_path / "counts", "rate") != noted(tmp_path / "whole", "rate")
    assert "counts batches by enumerate" in said.split("continues")[1], "the next run names the line, too"


def test_batches_that_belong_to_no_step_are_told(tmp_path: Path):
    assert "epoch=1 samples=8 of the last pass belong to no step" in run_to_the_end(tmp_path, "--accumulate=4", stops=0)


def test_a_weighted_sampler_draws_the_same_samples_after_a_stop(tmp_path: Path):
    run_to_the_end(tmp_path / "whole", "--sampler", stops=0)
    run_to_the_end(tmp_path / "stopped", "--sampler", "--stop-in=0.4", "--stop-in=2.2", stops=2)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    drawn = noted(tmp_path / "whole", "samples")
    assert noted(tmp_path / "stopped", "samples") == drawn
    assert len(drawn) == 3 * 9
    assert len({tuple(samples) for _, samples in drawn}) > 20, "another order in each epoch"


def test_messages_are_seen_without_logging_being_set_up(tmp_path: Path):
    assert "checkpoint written" in run_to_the_end(tmp_path, stops=0)


def test_a_handler_of_sigterm_that_takes_the_place_of_ours_is_told(tmp_path: Path):
    assert "this run saves nothing when Slurm stops it" in run_to_the_end(tmp_path, "--handler", stops=0)


def test_a_run_among_saved_arguments_is_saved_as_a_text_and_copied_as_itself():
    run = TrainingRun.__new__(TrainingRun)
    assert pickle.loads(pickle.dumps([run])) == ["the run of penstock_executor"]
    assert copy.deepcopy([run])[0] is run


@pytest.mark.parametrize("trained", [True, False])
def test_only_batches_that_were_not_trained_on_are_told(caplog: pytest.LogCaptureFixture, trained: bool):
    """`run.step` takes each batch by itself, as of `run.prepare`."""
    place = {"seed": 0, "shuffle": False, "position": 0, "drop_last": False}
    loader = Loader(list(range(8)), BatchSize(total=4, atomic=4), (0, 1), **place)
    for _ in range(2):
        for _ in loader:
            if trained:
                loader.take()
    assert ("samples=8 of the last pass belong to no step" in caplog.text) is not trained
