"""The order of an epoch by a sampler of the script's own, such as `WeightedRandomSampler`.

Each process draws the whole order from (seed, epoch) alone, so that it is the same everywhere and after each restart.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from penstock_executor.training.saving import random_states, set_random_states


def order(sampler: Any, epoch: int, seed: int) -> NDArray[np.int64]:
    """All indices of one epoch. The random generators keep their states."""
    key = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
    before = random_states()
    try:
        random.seed(key)
        np.random.seed(key)
        torch.default_generator.manual_seed(key)
        own = getattr(sampler, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(key)
        return np.fromiter(sampler, np.int64)
    finally:
        set_random_states(before)


def check(sampler: Any, dataset: object, seed: int) -> None:
    """Raises ValueError if the sampler does not suit, as one that would draw another order after a restart."""
    kind = type(sampler).__name__
    if hasattr(dataset, "stream"):
        raise ValueError(f"sampler={kind}: the data set is a stream, which has its own order")
    if isinstance(sampler, DistributedSampler):
        raise ValueError(f"sampler={kind} divides the samples among the processes, which Penstock does; leave it out")
    first = order(sampler, 0, seed)
    if len(first) != len(sampler) or not np.array_equal(first, order(sampler, 0, seed)):
        raise ValueError(
            f"sampler={kind} draws another order when it is asked again with the same seeds, so that samples would be lost"
            " after a restart: let it draw from PyTorch's, NumPy's or Python's global generators, or from its attribute"
            " `generator`"
        )
