"""Checks of the arguments of `TrainingRun.prepare`."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

import torch

from penstock_executor.environment import EnvironmentDisagrees, Ranks
from penstock_executor.training.arguments import check_split_model, epoch_limits, split_batch
from penstock_executor.training.batches import BatchSize
from penstock_executor.training.processes import Group


def test_with_drop_last_no_batch_is_larger_than_the_data_set():
    assert epoch_limits(32, 256, 203, drop_last=True) == (203, 192)
    assert epoch_limits(32, 256, 203, drop_last=False) == (256, 203)
    assert epoch_limits(32, 256, None, drop_last=True) == (256, None)
    with pytest.raises(ValueError, match="batch_size=256 with drop_last: the data set has 203 samples"):
        epoch_limits(256, 256, 203, drop_last=True)


def test_replicas_of_a_pipeline_have_equal_shares():
    """Batch 64: 2 x 32 of two. Up to 200 of three: 3 x 64 = 192; up to 100: 3 x 33 = 99."""
    assert split_batch(64, None, 2) == BatchSize(64, 32)
    assert split_batch(64, 200, 3) == BatchSize(192, 64)
    assert split_batch(64, 100, 3) == BatchSize(99, 33)
    with pytest.raises(
        ValueError, match=r"batch_size=64 is not a multiple of 3 replicas.*use a batch size that any number"
    ):
        split_batch(64, None, 3)
    with pytest.raises(ValueError, match="max_batch_size=2 is less than a sample for each of 3 replicas"):
        split_batch(2, 2, 3)


def test_arguments_that_a_pipeline_does_not_support_are_refused():
    plain = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"scaler with gpus_per_replica=2.*train in bfloat16"):
        check_split_model(2, plain, scaler=object(), max_atomic_batch=None)
    with pytest.raises(ValueError, match="max_atomic_batch with gpus_per_replica=2"):
        check_split_model(2, plain, scaler=None, max_atomic_batch=8)
    plain.set_requires_gradient_sync = None
    with pytest.raises(ValueError, match="fully_shard as well"):
        check_split_model(2, plain, scaler=None, max_atomic_batch=None)
    for processes, gpus_per_replica in ((3, 2), (1, 2)):
        with pytest.raises(
            EnvironmentDisagrees, match=f"{processes} processes are not a multiple of gpus_per_replica=2"
        ):
            Group(Ranks(world=processes), gpus_per_replica)
