"""The optimiser's step and the schedule of the learning rate."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor.training.optimizing import OptimizerStep
from penstock_profiles.learning_rate import RULES
from penstock_profiles.noise import NoiseEstimator

BATCH = 8


def step_with(make) -> tuple[OptimizerStep, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    step = OptimizerStep(optimizer, RULES["linear"], NoiseEstimator(), BATCH, make(optimizer), None)
    step.step(BATCH)
    return step, optimizer


def test_a_schedule_of_a_fixed_length_ends_where_it_says_though_a_large_last_step_goes_beyond():
    """OneCycleLR raises "Tried to step 11 times" in the eleventh step. Large batches rarely end exactly after ten."""
    step, optimizer = step_with(lambda each: torch.optim.lr_scheduler.OneCycleLR(each, max_lr=1.0, total_steps=10))
    step.follow_schedule(9 * BATCH)
    before = optimizer.param_groups[0]["lr"]
    step.follow_schedule(13 * BATCH)
    assert step.scheduled == 9
    assert optimizer.param_groups[0]["lr"] == before < 1e-3


def test_a_schedule_by_a_metric_is_left_to_the_script():
    """ReduceLROnPlateau.step takes the metric, which only the script has."""
    step, optimizer = step_with(lambda each: torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=0))
    step.follow_schedule(5 * BATCH)
    assert (step.scheduled, optimizer.param_groups[0]["lr"]) == (0, 0.1)
