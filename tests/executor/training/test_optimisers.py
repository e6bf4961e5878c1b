"""Optimisers and parameters of every sort are trained as without a stop, or refused with a way round."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.training.batches import Part  # noqa: E402
from penstock_executor.training.gradients import GradientMeter  # noqa: E402

from ..elastic import gang  # noqa: E402
from ..spool import ROOT  # noqa: E402

SCRIPT = ROOT / "tests" / "executor" / "train_optimisers.py"
NOT_MEASURED = "the noise of the gradients is not measured any more"


def train(folder: Path, kind: str, *options: str, processes: int = 1, status: int = 0) -> str:
    with gang(SCRIPT, folder, kind, *options, processes=processes) as job:
        assert job.wait() == status, job.said.read_text()
    return job.said.read_text()


def flat(folder: Path) -> list[float]:
    weights = json.loads((folder / "weights.json").read_text())
    return [float(x) for name in sorted(weights) for x in torch.tensor(weights[name], dtype=torch.double).flatten()]


@pytest.mark.parametrize("kind", ["sparse", "sparse-sgd", "freeze", "lbfgs"])
def test_after_a_stop_the_training_is_as_without_one(tmp_path: Path, kind: str):
    """Layers are frozen at the beginning of the second of four epochs; the stop is in the third."""
    said = train(tmp_path / "whole", kind)
    train(tmp_path / "stopped", kind, "--stop-at=23", status=143)
    train(tmp_path / "stopped", kind)
    assert flat(tmp_path / "stopped") == flat(tmp_path / "whole")
    assert said.count(NOT_MEASURED) == (kind.startswith("sparse"))


@pytest.mark.parametrize("kind", ["sparse-sgd", "freeze"])
def test_on_two_processes_it_is_as_on_one(tmp_path: Path, kind: str):
    train(tmp_path / "one", kind)
    train(tmp_path / "two", kind, processes=2)
    assert flat(tmp_path / "two") == pytest.approx(flat(tmp_path / "one"), abs=1e-12)


def test_a_parameter_that_is_trained_later_is_refused_where_its_gradient_would_not_be_averaged(tmp_path: Path):
    train(tmp_path / "one", "unfreeze")
    said = train(tmp_path / "two", "unfreeze", processes=2, status=1)
    assert "rows.weight was frozen at run.prepare and is trained now" in said
    assert "ddp={'find_unused_parameters': True}" in said


@pytest.mark.parametrize(
    ("kind", "words"), [("lbfgs-prepared", "LBFGS computes the loss several"), ("two", "2 optimisers")]
)
def test_what_prepare_cannot_move_is_refused_with_a_way_round(tmp_path: Path, kind: str, words: str):
    said = train(tmp_path, kind, status=1)
    assert words in said
    assert "with run.loader, run.keep and run.step_done" in said


@pytest.mark.parametrize("averaged", [True, False])
def test_a_process_that_cannot_measure_makes_the_sum_void_in_the_steps_that_the_others_measure(
    averaged: bool, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the processes would vote in different steps, and wait for each other."""

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    parameter = torch.nn.Parameter(torch.ones(3))
    measured = []
    for fails in (False, True):
        meter = GradientMeter([parameter], torch.optim.SGD([parameter], lr=0.1), replicas=2, averaged=averaged)
        if fails:
            monkeypatch.setattr(meter, "_of_replicas", fail)
            monkeypatch.setattr(meter, "_keep", fail)
        found = []
        for step in range(8):
            meter.every = 4 if step else 1
            meter.begin(step)
            with meter.before_average():
                parameter.grad = None
                parameter.square().sum().backward()
            found.append(meter.after_step(Part(4, 8, 2, 1, last=True), 1.0))
        measured.append([step for step, norms in enumerate(found) if norms is not None])
        if fails:
            assert all(norms is None or norms.local_sqr.isnan() for norms in found)
    assert measured[0] == measured[1] != []
