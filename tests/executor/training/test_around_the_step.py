"""What scripts have around the step goes on after a stop as if nothing had happened, with real processes on CPUs."""

import json
from pathlib import Path

import pytest

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
    assert "enumerate(loader, loader.first)" in said


def test_messages_are_seen_without_logging_being_set_up(tmp_path: Path):
    assert "checkpoint written" in run_to_the_end(tmp_path, stops=0)


def test_a_handler_of_sigterm_that_takes_the_place_of_ours_is_told(tmp_path: Path):
    assert "this run saves nothing when Slurm stops it" in run_to_the_end(tmp_path, "--handler", stops=0)
