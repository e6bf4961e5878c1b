"""Which steps' gradients are measured."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'penstock[executor]'")

import torch

from penstock_executor.training.batches import Part
from penstock_executor.training.gradients import GradientMeter, pace


def test_measuring_takes_half_a_hundredth_of_the_time_and_a_twentieth_of_the_steps_at_least():
    """Of a step of 50 ms, 0.25 ms are half a hundredth: 0.2 ms fit into each, 1.2 ms into every fifth."""
    assert [pace(seconds, 0.05) for seconds in (0.0, 0.0002, 0.0012, 1.0)] == [1, 1, 5, 20]


def test_of_one_gradient_a_step_neighbours_make_a_pair():
    """Steps 0 and 1, 4 and 5, 8 and 9: the gradients 1, 2, 5, 6, 9, 10 of one parameter."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    meter = GradientMeter([parameter], torch.optim.SGD([parameter], lr=0.1), replicas=1)
    meter.every = 4
    found = {}
    for step in range(10):
        meter.begin(step)
        parameter.grad = torch.tensor([step + 1.0])
        norms = meter.after_step(Part(8, 8, 1, 1, last=True), 1.0)
        if norms is not None:
            found[step] = float(norms.local_sqr), float(norms.mean_sqr)
    assert found == {1: (2.5, 2.25), 5: (30.5, 30.25), 9: (90.5, 90.25)}
