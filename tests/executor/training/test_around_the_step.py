"""What scripts have around the step goes on after a stop as if nothing had happened, with real processes on CPUs."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.training import messages
from penstock_executor.training.batches import BatchSize
from penstock_executor.training.loader import Loader
from penstock_executor.training.messages import counts_from_0
from penstock_executor.training.run import TrainingRun

from ..elastic import gang
from ..spool import ROOT

T = TypeVar("T")
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
    said = run_to_the_end(tmp_path / "stopped", "--stop-in=1.evaluation", stops=1)
    assert "step=20 epoch=2 position=0 continues" in said, "it left before the next epoch's first step"
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
    ("source", "counts"),
    [
        ("for i, batch in enumerate(loader): ...", True),
        ("    for i, (x, y) in enumerate(logger.every(loader, 10, header)): ...", True),
        ("for i, batch in enumerate(loader, 1): ...", True),
        ("for i, batch in enumerate(loader, start=1): ...", True),
        ("for i, batch in enumerate(loader, run.epoch_steps): ...", False),
        ("for i, batch in enumerate(loader, loader.first + 1): ...", False),
        ("for i, batch in enumerate(logger.every(loader, 10), start=first): ...", False),
        ("for batch in loader: ...", False),
        ("for i, batch in enumerate(loader) if counts else enumerate(loader, 1): ...", True),
        ("(batch for i, batch in enumerate(loader),  # a part of a longer statement", True),
        ("batches = enumerate(tqdm(loader), run.epoch_steps)\nfor i, batch in batches: ...", False),
    ],
)
def test_a_count_that_is_given_its_first_number_is_none_from_a_fixed_one(source: str, counts: bool):
    assert counts_from_0(source + "\n") is counts


def every(batches: Iterable[T]) -> Iterator[T]:
    """As tqdm and a metric's logger: a generator of its own around the batches."""
    yield from batches


class Ahead(Iterator[T]):
    """As a prefetcher: an iterator of its own."""

    def __init__(self, batches: Iterable[T]) -> None:
        self._batches = iter(batches)

    def __next__(self) -> T:
        return next(self._batches)


class Odd(Ahead[T]):
    """An iterator that leaves no trace of itself where the loader looks for it."""

    def __next__(self) -> T:
        batches = self._batches
        del self
        return next(batches)


def numbered(batches: Iterable[T]) -> Iterator[tuple[int, T]]:
    return enumerate(every(batches))


def count_in_a_name(loader: Loader) -> Iterator[object]:
    batches = enumerate(every(loader))
    yield from every(batches)


def check_one_first(loader: Loader) -> Iterator[object]:
    next(iter(loader))
    loader.take()
    yield from numbered(loader)


COUNTS: list[Callable[[Loader], Iterable[object]]] = [
    lambda loader: enumerate(loader),
    lambda loader: enumerate(loader, 1),
    lambda loader: enumerate(every(loader)),
    lambda loader: every(enumerate(every(loader))),
    lambda loader: islice(enumerate(every(loader)), 9),
    lambda loader: enumerate(Ahead(every(loader))),
    lambda loader: enumerate(map(str, every(loader))),
    lambda loader: zip(enumerate(loader), "ab", strict=False),
    count_in_a_name,
    numbered,
    check_one_first,
]
BY_ZIP: list[Callable[[Loader], Iterable[object]]] = [
    lambda loader: zip(range(9), loader, strict=False),
    lambda loader: zip(every(loader), count(), strict=False),
    lambda loader: every(zip(count(1), every(loader), strict=False)),
]
RIGHT: list[Callable[[Loader], Iterable[object]]] = [
    lambda loader: loader,
    lambda loader: enumerate(every(loader), loader.first),
    lambda loader: enumerate(Ahead(loader), loader.first + 1),
    lambda loader: zip(range(loader.first, 9), loader, strict=False),
    lambda loader: zip(every(loader), count(loader.first), strict=False),
    lambda loader: zip(every(loader), "abc", strict=False),
    lambda loader: enumerate(Odd(loader)),  # its count is not seen
]


def told(loop: Callable[[Loader], Iterable[object]], position: int, caplog: pytest.LogCaptureFixture) -> str:
    place = {"seed": 0, "shuffle": False, "position": position, "drop_last": False}
    loader = Loader(list(range(16)), BatchSize(total=4, atomic=4), (0, 1), **place)
    for _ in range(2):
        for number, _ in enumerate("outer"):  # it counts nothing of the loader
            for _ in loop(loader):
                loader.take()
            if number:
                break
        loader.epoch, loader.position = loader.epoch + 1, 0
    return caplog.text


@pytest.mark.parametrize(
    ("loop", "by"),
    [*((loop, "enumerate") for loop in COUNTS), *((loop, "zip") for loop in BY_ZIP), *((loop, "") for loop in RIGHT)],
)
def test_a_count_that_begins_anew_in_mid_epoch_is_told_however_it_is_written(caplog, monkeypatch, loop, by: str):
    """As in `batches = enumerate(tqdm(loader))` and `for i, batch in batches`."""
    monkeypatch.setattr(messages, "_told", set())
    said = told(loop, 8, caplog)
    assert said.count("test_around_the_step.py:") == said.count("counts batches by") == bool(by)
    assert not by or f"counts batches by {by}. After" in said


@pytest.mark.parametrize(("loop", "told_at_once"), [(count_in_a_name, 1), (COUNTS[0], 1), (RIGHT[1], 0), (RIGHT[3], 0)])
def test_a_count_is_told_before_any_stop_if_its_source_shows_it(caplog, monkeypatch, loop, told_at_once: int):
    monkeypatch.setattr(messages, "_told", set())
    assert told(loop, 0, caplog).count("counts batches by enumerate") == told_at_once


@pytest.mark.parametrize("position", [0, 8])
def test_a_count_in_an_installed_program_trains_on(tmp_path: Path, position: int):
    """`python -m program`: all frames are in site-packages."""
    program = tmp_path / "site-packages/program.py"
    program.parent.mkdir()
    program.write_text(
        "from penstock_executor.training.batches import BatchSize\n"
        "from penstock_executor.training.loader import Loader\n"
        "place = {'seed': 0, 'shuffle': False, 'drop_last': False}\n"
        f"loader = Loader(list(range(16)), BatchSize(total=4, atomic=4), (0, 1), position={position}, **place)\n"
        "print(len([loader.take() for number, _ in enumerate(loader)]))\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, str(4 - position // 4)), ran.stderr


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
